/* Many small samples at once: read from their shards, their headers checked, their fields gathered. What columns.py and store.py do with
   numpy, with the same result. Nothing here keeps state or trusts a number: every place is checked against the buffer that it is said to
   be in. A header that is not an ordinary one is declined (the sample is "odd"), and tar.py decides. */
#define _FILE_OFFSET_BITS 64
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 512, NAME = 100, MOST = 16 }; /* MOST: fields of different names in a batch; a sample with one more is odd */

typedef struct {
    const uint64_t *offsets; /* count + 1 of them, as in the index */
    int64_t count;
    int64_t file; /* descriptor */
} Source;

const char *shardline_samples_sources(void) { return SOURCES; }

static int64_t whole_blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

/* Where the n samples are in their shards and where they go in a buffer, each to the start of a block, one after the other from `at` on.
   order: of the disk; shards that follow each other in it are those of `sources`, one after the other. Returns the buffer's length, or
   -1 - i where sample i is not in its index. */
int64_t shardline_places(int64_t n, const int64_t *order, const int64_t *shard, const int64_t *index, const Source *sources, int64_t at,
                         int64_t *start, int64_t *size, int64_t *place) {
    for (int64_t k = 0; k < n; k++) {
        int64_t i = order[k];
        if (k && shard[i] != shard[order[k - 1]]) sources++;
        if (index[i] < 0 || index[i] >= sources->count) return -1 - i;
        uint64_t first = sources->offsets[index[i]], end = sources->offsets[index[i] + 1];
        if (end <= first || end >> 62 || at >> 62) return -1 - i;
        start[i] = (int64_t)first;
        size[i] = (int64_t)(end - first);
        place[i] = at;
        at += whole_blocks(size[i]);
    }
    return at;
}

/* Read them; neighbours in the shard that are neighbours in the buffer with one call. Returns -1, or the sample at which a file ends or
   fails: `error` is then errno, or 0 at its end. */
int64_t shardline_read(int64_t n, const int64_t *order, const int64_t *shard, const Source *sources, const int64_t *start,
                       const int64_t *size, const int64_t *place, uint8_t *buffer, int64_t length, int32_t *error) {
    int64_t next;
    *error = 0;
    for (int64_t k = 0; k < n; k = next) {
        int64_t i = order[k], last = i, position = start[i], to = place[i];
        if (k && shard[i] != shard[order[k - 1]]) sources++;
        for (next = k + 1; next < n; next++) {
            int64_t j = order[next];
            if (shard[j] != shard[i] || start[j] != start[last] + size[last] || place[j] != place[last] + size[last]) break;
            last = j;
        }
        int64_t stop = place[last] + size[last];
        if (to < 0 || stop < to || stop > length) {
            *error = EFAULT;
            return i;
        }
        while (to < stop) {
            ssize_t got = pread((int)sources->file, buffer + to, (size_t)(stop - to), (off_t)position);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                *error = got ? errno : 0;
                while (k < next - 1 && place[order[k]] + size[order[k]] <= to) k++;
                return order[k];
            }
            to += got;
            position += got;
        }
    }
    return -1;
}

/* -1 where it has anything but octal digits. */
static int64_t octal(const uint8_t *digits, int count) {
    uint64_t value = 0;
    unsigned wrong = 0;
    for (int i = 0; i < count; i++) {
        unsigned digit = digits[i] - 48u;
        wrong |= digit;
        value = value << 3 | (digit & 7);
    }
    return wrong > 7 ? -1 : (int64_t)value;
}

/* The size of an ordinary file whose header has the right checksum, else -1. */
static int64_t file_size(const uint8_t *head) {
    if (head[156] != '0' || head[345] || head[135] > 32 || (head[154] & 0xDF) || (head[155] & 0xDF)) return -1;
    int64_t size = octal(head + 124, 11), stated = octal(head + 148, 6);
    if (size < 0 || stated < 0) return -1;
    uint32_t sum = 8 * ' '; /* the checksum counts itself as blanks */
    for (int i = 0; i < BLOCK; i++) sum += head[i];
    for (int i = 148; i < 156; i++) sum -= head[i];
    return sum == (uint64_t)stated ? size : -1;
}

/* The length of a name and the first dot of its last component; 0 where these are not the whole story. */
static int split(const uint8_t *name, int *dot) {
    const uint8_t *zero = memchr(name, 0, NAME);
    int length = zero ? (int)(zero - name) : NAME, start = 0, doubled = 0;
    for (int i = length; i < NAME; i++)
        if (name[i]) return 0;
    *dot = -1;
    for (int i = 0; i < length; i++) {
        if (name[i] == '/') {
            start = i + 1;
            *dot = -1;
        } else if (name[i] == '.') {
            if (*dot < 0) *dot = i;
        } else if (name[i] == '_' && i + 1 < length && name[i + 1] == '_') {
            if (!i) return 0; /* __MACOSX, __meta__ */
            doubled = 1;
        }
    }
    return *dot > start && !(doubled && start) ? length : 0; /* a name that starts with a dot is a hidden file */
}

typedef struct {
    int64_t n, *start, *size; /* MOST rows of n each: of field f in sample i at [f * n + i]; size -1 where there is none */
    uint8_t *names;           /* MOST rows of NAME */
    int32_t *lengths;
    int32_t num;
} Fields;

/* The row of a field's name in lower case, a new one where it is new; -1 where there is no room, or it is not ASCII. */
static int find_field(Fields *fields, const uint8_t *raw, int length, int guess) {
    uint8_t name[NAME];
    for (int i = 0; i < length; i++) {
        if (raw[i] & 0x80) return -1;
        name[i] = raw[i] >= 'A' && raw[i] <= 'Z' ? raw[i] | 0x20 : raw[i];
    }
    for (int k = 0; k < fields->num; k++) {
        int f = (guess + k) % fields->num;
        if (fields->lengths[f] == length && !memcmp(fields->names + f * NAME, name, (size_t)length)) return f;
    }
    if (fields->num == MOST) return -1;
    int f = fields->num++;
    memcpy(fields->names + f * NAME, name, (size_t)length);
    fields->lengths[f] = length;
    memset(fields->start + f * fields->n, 0, sizeof(int64_t) * (size_t)fields->n);
    memset(fields->size + f * fields->n, 0xFF, sizeof(int64_t) * (size_t)fields->n);
    return f;
}

/* The length of sample i's key, which its first name starts with; -1 where it is odd. */
static int parse_one(Fields *fields, const uint8_t *data, int64_t i, int64_t at, int64_t end) {
    const uint8_t *first = data + at;
    int key = -1, member = 0;
    while (at < end) {
        int dot;
        if (end - at < BLOCK) return -1;
        int64_t size = file_size(data + at);
        if (size < 0 || size > end - at - BLOCK) return -1;
        int length = split(data + at, &dot);
        if (!length || (key >= 0 && (dot != key || memcmp(data + at, first, (size_t)dot)))) return -1;
        key = dot;
        int f = find_field(fields, data + at + dot + 1, length - dot - 1, member++);
        if (f < 0 || fields->size[f * fields->n + i] >= 0) return -1; /* twice: tar.py names it */
        fields->start[f * fields->n + i] = at + BLOCK;
        fields->size[f * fields->n + i] = size;
        at += BLOCK + whole_blocks(size);
    }
    return key;
}

/* The fields of n samples, sample i at data[place[i] : place[i] + size[i]]. key: the length of each one's key, -1 where it is odd (then it
   has no fields here). Returns the number of fields, or -1 where a sample is not inside `data`. */
int shardline_parse(const uint8_t *data, int64_t length, int64_t n, const int64_t *place, const int64_t *size, int64_t *field_start,
                    int64_t *field_size, uint8_t *names, int32_t *lengths, int64_t *key) {
    Fields fields = {n, field_start, field_size, names, lengths, 0};
    for (int64_t i = 0; i < n; i++) {
        if (place[i] < 0 || size[i] < 0 || place[i] > length || size[i] > length - place[i]) return -1;
        key[i] = parse_one(&fields, data, i, place[i], place[i] + size[i]);
        if (key[i] < 0)
            for (int f = 0; f < fields.num; f++) field_size[f * n + i] = -1;
    }
    return fields.num;
}

/* Copy n pieces of `data` one after the other; the bytes copied, or -1 where one is outside or there is no room. */
int64_t shardline_gather(const uint8_t *data, int64_t length, int64_t n, const int64_t *start, const int64_t *size, uint8_t *out,
                         int64_t room) {
    int64_t to = 0;
    for (int64_t i = 0; i < n; i++) {
        if (start[i] < 0 || size[i] < 0 || start[i] > length || size[i] > length - start[i] || size[i] > room - to) return -1;
        memcpy(out + to, data + start[i], (size_t)size[i]);
        to += size[i];
    }
    return to;
}

/* value[i]: of a text of one to nine digits, else -1. */
int shardline_digits(const uint8_t *data, int64_t length, int64_t n, const int64_t *start, const int64_t *size, int64_t *value) {
    for (int64_t i = 0; i < n; i++) {
        value[i] = -1;
        if (size[i] < 1 || size[i] > 9) continue;
        if (start[i] < 0 || start[i] > length - size[i]) return -1;
        int64_t number = 0;
        unsigned wrong = 0;
        for (int64_t k = 0; k < size[i]; k++) {
            unsigned digit = data[start[i] + k] - 48u;
            wrong |= digit > 9;
            number = number * 10 + digit;
        }
        if (!wrong) value[i] = number;
    }
    return 0;
}

/* same[i]: whether the `count` bytes at start[i] are those at `at`. */
int shardline_same(const uint8_t *data, int64_t length, int64_t n, const int64_t *start, int64_t at, int64_t count, uint8_t *same) {
    if (count < 0 || at < 0 || count > length || at > length - count) return -1;
    for (int64_t i = 0; i < n; i++) {
        if (start[i] < 0 || start[i] > length - count) return -1;
        same[i] = !memcmp(data + start[i], data + at, (size_t)count);
    }
    return 0;
}
