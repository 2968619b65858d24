/* Mutated JPEGs through every entry of data/native, under AddressSanitizer: fuzz_native INPUTS SEED FILE...
   Each input and each output lies in memory of exactly its size. What kills it leaves its input in fuzz-input.jpg. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define MOST 400000 /* bytes of an input */

int shardline_restart(const uint8_t *data, size_t size, int interval, unsigned char **memory, size_t *new_size);
void shardline_free(unsigned char *memory);
void __sanitizer_set_death_callback(void (*callback)(void));

static const uint8_t *current;
static size_t current_size;
static uint64_t state;

static void keep_input(void) {
    FILE *file = fopen("fuzz-input.jpg", "wb");
    if (file) fwrite(current, 1, current_size, file), fclose(file);
}

static uint32_t below(uint32_t limit) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717ull) >> 33) % limit;
}

typedef struct {
    uint8_t *data;
    size_t size;
} File;

static File read_file(const char *path) {
    File file = {malloc(MOST), 0};
    FILE *handle = fopen(path, "rb");
    if (!handle) exit(2);
    file.size = fread(file.data, 1, MOST / 2, handle);
    fclose(handle);
    return file;
}

/* The place of a marker of this kind, or any place. */
static size_t place(const uint8_t *data, size_t size, int marker) {
    size_t start = below((uint32_t)size);
    for (size_t i = 0; marker && i < size; i++) {
        size_t at = (start + i) % size;
        if (at + 1 < size && data[at] == 0xFF && data[at + 1] == marker) return at;
    }
    return start;
}

static size_t mutate(uint8_t *data, size_t size, const File *other) {
    static const int markers[] = {0xC0, 0xC2, 0xC4, 0xDB, 0xDA, 0xDD, 0xE1, 0xD0, 0xD3, 0xD9, 0, 0, 0};
    static const uint8_t bytes[] = {0, 1, 2, 7, 8, 0x11, 0x22, 0x41, 0x7F, 0x80, 0xC0, 0xC4, 0xD0, 0xD8, 0xD9, 0xDA, 0xDD, 0xFE, 0xFF};
    size_t at = place(data, size, markers[below(13)]), length = 1 + below(below(4) ? 8 : 300);
    at += below(3) ? below(24) : 0;
    if (at >= size) at = size - 1;
    if (length > size - at) length = size - at;
    switch (below(8)) {
    case 0: data[at] ^= (uint8_t)(1u << below(8)); return size;
    case 1: data[at] = bytes[below(sizeof bytes)]; return size;
    case 2: data[at] = (uint8_t)below(256); return size;
    case 3: /* takes out */
        if (size - length < 4) return size;
        memmove(data + at, data + at + length, size - at - length);
        return size - length;
    case 4: /* doubles */
        if (size + length > MOST) return size;
        memmove(data + at + length, data + at, size - at);
        return size + length;
    case 5: /* of another picture */
        if (length > other->size) return size;
        memcpy(data + at, other->data + below((uint32_t)(other->size - length + 1)), length);
        return size;
    case 6: /* cut, with an end mark */
        if (at < 4) return size;
        data[at - 2] = 0xFF, data[at - 1] = 0xD9;
        return at;
    default:
        for (size_t i = 0; i < length; i++) data[at + i] = (uint8_t)below(256);
        return size;
    }
}

static int try_views(const uint8_t *data, size_t size) {
    JpegHeader header;
    int done = 0;
    if (shardline_header(data, size, &header) != DONE || (int64_t)header.width * header.height > 3000000) return 0;
    for (int i = 0; i < 2; i++) {
        float width = (float)header.width, height = (float)header.height;
        float left = width * (float)below(100) / 101, top = height * (float)below(100) / 101;
        JpegView view = {left, top, left + (width - left) * (float)(1 + below(100)) / 100, top + (height - top) * (float)(1 + below(100)) / 100,
                         (int32_t)(1 + below(70)), (int32_t)(1 + below(70)), NULL, 0, 1, 0};
        if (i) view.left = floorf(left), view.top = floorf(top), view.right = ceilf(view.right), view.bottom = ceilf(view.bottom);
        if (view.right > width) view.right = width;
        if (view.bottom > height) view.bottom = height;
        uint8_t *out = malloc(3 * (size_t)view.width * (size_t)view.height);
        view.plane = (int64_t)view.width * view.height;
        if (below(2)) { /* turned */
            view.step_x = -view.height, view.step_y = 1;
            view.out = out + (view.width - 1) * (int64_t)view.height;
        } else { /* mirrored or not */
            view.step_x = below(2) ? 1 : -1, view.step_y = view.width;
            view.out = out + (view.step_x < 0 ? view.width - 1 : 0);
        }
        done |= shardline_view(data, size, &header, &view) == DONE;
        free(out);
    }
    unsigned char *memory;
    size_t new_size;
    if (below(4) == 0 && header.width * header.height < 100000 && shardline_restart(data, size, 1 + (int)below(40), &memory, &new_size) == DONE)
        shardline_free(memory);
    return done;
}

int main(int count, char **words) {
    if (count < 4) return 2;
    long inputs = atol(words[1]), decoded = 0, headers = 0;
    state = strtoull(words[2], NULL, 10) * 7919 + 88172645463325252ull;
    int num_files = count - 3;
    File *files = malloc(sizeof *files * (size_t)num_files);
    for (int i = 0; i < num_files; i++) files[i] = read_file(words[i + 3]);
    uint8_t *scratch = malloc(MOST + 400);
    __sanitizer_set_death_callback(keep_input);
    for (long i = 0; i < inputs; i++) {
        const File *file = &files[below((uint32_t)num_files)];
        size_t size = file->size;
        memcpy(scratch, file->data, size);
        for (uint32_t k = below(6); k; k--) size = mutate(scratch, size, &files[below((uint32_t)num_files)]);
        uint8_t *input = malloc(size);
        memcpy(input, scratch, size);
        current = input, current_size = size;
        JpegHeader header;
        headers += shardline_header(input, size, &header) == DONE;
        decoded += try_views(input, size);
        free(input);
    }
    for (int i = 0; i < num_files; i++) free(files[i].data);
    free(files);
    free(scratch);
    printf("%ld inputs, %ld with a header that is read, %ld decoded\n", inputs, headers, decoded);
    return 0;
}
