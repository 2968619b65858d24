/* The markers of a JPEG up to its first scan, and the EXIF orientation. Strict: what is unusual is left to PIL. */
#include <string.h>

#include "native.h"

static uint32_t big16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }

static uint32_t read16(const uint8_t *p, int big) { return big ? big16(p) : (uint32_t)p[1] << 8 | p[0]; }

static uint32_t read32(const uint8_t *p, int big) {
    return big ? big16(p) << 16 | big16(p + 2) : read16(p + 2, 0) << 16 | read16(p, 0);
}

/* Orientation in a TIFF block: 1..8, 1 where there is none, 0 where PIL has to say. */
static int tiff_orientation(const uint8_t *data, size_t size) {
    if (size < 14 || (memcmp(data, "II*\0", 4) && memcmp(data, "MM\0*", 4))) return 0;
    int big = data[0] == 'M', found = 0, orientation = 1;
    size_t at = read32(data + 4, big);
    if (at < 8 || at > size - 2) return 0;
    size_t entries = read16(data + at, big);
    if (entries * 12 > size - at - 2) return 0;
    for (const uint8_t *entry = data + at + 2; entries--; entry += 12) {
        if (read16(entry, big) != 0x0112) continue;
        uint32_t value = read16(entry + 8, big);
        if (found++ || read16(entry + 2, big) != 3 || read32(entry + 4, big) != 1 || value < 1 || value > 8) return 0;
        orientation = (int)value;
    }
    return found ? orientation : 1;
}

static int contains(const uint8_t *data, size_t size, const char *word) {
    size_t length = strlen(word);
    for (const uint8_t *at = data, *end = data + size; (size_t)(end - at) >= length; at++) {
        at = memchr(at, word[0], (size_t)(end - at) - length + 1);
        if (!at) return 0;
        if (!memcmp(at, word, length)) return 1;
    }
    return 0;
}

/* One APP1: `exif` is -1 until one with EXIF was seen. */
static void read_app1(const uint8_t *body, size_t size, int *exif, int *ask) {
    if (size >= 6 && !memcmp(body, "Exif\0\0", 6)) {
        if (*exif >= 0) *ask = 1;
        *exif = tiff_orientation(body + 6, size - 6);
        if (*exif == 0) *ask = 1;
    } else if (contains(body, size, "rientation")) {
        *ask = 1; /* XMP may carry it */
    }
}

static int read_frame(const uint8_t *body, size_t size, int marker, JpegHeader *header) {
    if (header->components || size < 6 || body[0] != 8) return NOT_OURS;
    int components = body[5];
    if ((components != 1 && components != 3) || size != 6 + 3 * (size_t)components) return NOT_OURS;
    header->height = (int32_t)big16(body + 1);
    header->width = (int32_t)big16(body + 3);
    if (header->width == 0 || header->height == 0 || (int64_t)header->width * header->height > MAX_PIXELS) return NOT_OURS;
    for (int i = 0; i < components; i++) {
        header->h[i] = body[7 + 3 * i] >> 4;
        header->v[i] = body[7 + 3 * i] & 15;
        if (header->h[i] < 1 || header->h[i] > 4 || header->v[i] < 1 || header->v[i] > 4) return NOT_OURS;
    }
    header->components = components;
    header->sof = marker;
    return DONE;
}

static int has_end_mark(const uint8_t *data, size_t from, size_t size) {
    for (size_t at = size; at-- > from + 1;)
        if (data[at] == 0xD9 && data[at - 1] == 0xFF) return 1;
    return 0;
}

int shardline_header(const uint8_t *data, size_t size, JpegHeader *header) {
    int exif = -1, ask = 0;
    memset(header, 0, sizeof *header);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return NOT_OURS;
    for (size_t at = 2; at + 4 <= size;) {
        if (data[at] != 0xFF) return NOT_OURS;
        int marker = data[at + 1];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        size_t length = big16(data + at + 2);
        const uint8_t *body = data + at + 4;
        if (length < 2 || length > size - at - 2) return NOT_OURS;
        at += 2 + length;
        length -= 2;
        if (marker == 0xC0 || marker == 0xC1 || marker == 0xC2) {
            if (read_frame(body, length, marker, header)) return NOT_OURS;
        } else if (marker == 0xE1) {
            read_app1(body, length, &exif, &ask);
        } else if (marker == 0xDD) {
            if (length != 2) return NOT_OURS;
            header->restart = (int32_t)big16(body);
        } else if (marker == 0xDA) {
            header->orientation = ask ? 0 : exif < 0 ? 1 : exif;
            header->scan = (int64_t)at;
            return header->components && has_end_mark(data, at, size) ? DONE : NOT_OURS;
        } else if (marker != 0xC4 && marker != 0xDB && marker != 0xFE && (marker < 0xE0 || marker > 0xEF)) {
            return NOT_OURS;
        }
    }
    return NOT_OURS;
}

/* sha256 of the C files this was built from. */
const char *shardline_sources(void) { return SOURCES; }
