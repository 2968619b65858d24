/* Many small samples at once: read from their shards, their headers checked, their fields gathered. What columns.py and store.py do with
   numpy, with the same result. Nothing here keeps state or trusts a number: every place is checked against the buffer that it is said to
   be in. A header that is not an ordinary one is declined (the sample is "odd"), and tar.py decides. */
#define _FILE_OFFSET_BITS 64
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BLOCK = 512, NAME = 100, MOST = 16 }; /* MOST: fields of different names in a batch; a sample with one more is odd */

typedef struct {
    const uint64_t *offsets; /* count + 1 of them, as in the index */
    int64_t count;
    int64_t file; /* descriptor */
    const uint8_t *map; /* of `mapped` bytes of it; NULL: it can't be mapped */
    int64_t mapped;
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

/* The first `length` bytes of a file in memory, NULL where that can't be. */
void *shardline_map(int32_t file, int64_t length) {
    void *map = length > 0 ? mmap(NULL, (size_t)length, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    return map == MAP_FAILED ? NULL : map;
}

void shardline_unmap(void *map, int64_t length) { munmap(map, (size_t)length); }

static _Thread_local sigjmp_buf *volatile escape;

static void on_bus_error(int number) {
    if (escape) siglongjmp(*escape, 1);
    signal(number, SIG_DFL); /* not ours: it comes again */
}

/* memcpy from a map; 0 where the file has become shorter under it, or its disk fails. */
static int copy_mapped(uint8_t *to, const uint8_t *from, size_t size) {
    sigjmp_buf back;
    if (sigsetjmp(back, 0)) {
        escape = NULL;
        return 0;
    }
    escape = &back;
    memcpy(to, from, size);
    escape = NULL;
    return 1;
}

/* How much of a shard's map is there now: beyond the end of its file a page is filled up with zeros, and the next one is a bus error. */
static int64_t still_there(const Source *source) {
    struct stat now;
    if (!source->map || fstat((int)source->file, &now)) return 0;
    return now.st_size < source->mapped ? (int64_t)now.st_size : source->mapped;
}

typedef struct {
    const int64_t *start, *size, *place;
    uint8_t *buffer;
    int64_t length;
    int32_t error;
} Reading;

/* The n samples `order` of one shard, from the first `limit` bytes of its map where they are in it. Returns as shardline_read. */
static int64_t read_shard(Reading *in, const Source *source, const int64_t *order, int64_t n, int64_t limit) {
    int64_t next;
    for (int64_t k = 0; k < n; k = next) {
        int64_t i = order[k], last = i, position = in->start[i], to = in->place[i];
        for (next = k + 1; next < n; next++) {
            int64_t j = order[next];
            if (in->start[j] != in->start[last] + in->size[last] || in->place[j] != in->place[last] + in->size[last]) break;
            last = j;
        }
        int64_t stop = in->place[last] + in->size[last];
        if (position < 0 || to < 0 || stop < to || stop > in->length) {
            in->error = EFAULT;
            return i;
        }
        if (position <= limit - (stop - to) && copy_mapped(in->buffer + to, source->map + position, (size_t)(stop - to))) continue;
        while (to < stop) {
            ssize_t got = pread((int)source->file, in->buffer + to, (size_t)(stop - to), (off_t)position);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                in->error = got ? errno : 0;
                while (k < next - 1 && in->place[order[k]] + in->size[order[k]] <= to) k++;
                return order[k];
            }
            to += got;
            position += got;
        }
    }
    return -1;
}

/* Read them; neighbours in the shard that are neighbours in the buffer with one call. From a map that takes a third of the time that a
   call of the system takes; where the file has become shorter, the system is asked, and says so. Returns -1, or the sample at which a
   file ends or fails: `error` is then errno, or 0 at its end. */
int64_t shardline_read(int64_t n, const int64_t *order, const int64_t *shard, const Source *sources, const int64_t *start,
                       const int64_t *size, const int64_t *place, uint8_t *buffer, int64_t length, int32_t *error) {
    Reading in = {start, size, place, buffer, length, 0};
    struct sigaction ours = {.sa_handler = on_bus_error, .sa_flags = SA_NODEFER}, before;
    int64_t found = -1, after;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, &before);
    for (int64_t k = 0; k < n && found < 0; k = after, sources++) {
        for (after = k + 1; after < n && shard[order[after]] == shard[order[k]];) after++;
        int64_t limit, now = still_there(sources);
        do { /* once more where it was cut meanwhile */
            limit = now;
            found = read_shard(&in, sources, order + k, after - k, limit);
            now = limit ? still_there(sources) : 0;
        } while (found < 0 && now < limit);
    }
    sigaction(SIGBUS, &before, NULL);
    *error = in.error;
    return found;
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

static uint32_t sum_block(const uint8_t *block) {
#ifdef __SSE2__
    __m128i sum = _mm_setzero_si128();
    for (int i = 0; i < BLOCK; i += 16)
        sum = _mm_add_epi64(sum, _mm_sad_epu8(_mm_loadu_si128((const __m128i *)(block + i)), _mm_setzero_si128()));
    return (uint32_t)(_mm_cvtsi128_si32(sum) + _mm_cvtsi128_si32(_mm_srli_si128(sum, 8)));
#else
    uint32_t sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += block[i];
    return sum;
#endif
}

/* The size of an ordinary file whose header has the right checksum, else -1. */
static int64_t file_size(const uint8_t *head) {
    if (head[156] != '0' || head[345] || head[135] > 32 || (head[154] & 0xDF) || (head[155] & 0xDF)) return -1;
    int64_t size = octal(head + 124, 11), stated = octal(head + 148, 6);
    if (size < 0 || stated < 0) return -1;
    uint32_t sum = sum_block(head) + 8 * ' '; /* the checksum counts itself as blanks */
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

typedef struct {
    int64_t at;                /* where the next header is */
    int64_t members;           /* ordinary ones that were passed */
    int64_t key, key_length;   /* the open sample's key is at data[key]; -1: it is still the one that was given */
} Walked;

/* Pass over ordinary members from `at` on, and note where those of another key than the member before start: as index.py does it. key: of
   the open sample, of length 0 where there is none. Returns the number of starts; stops at what is not ordinary, at the end, and when
   there is no room for more. */
int64_t shardline_walk(const uint8_t *data, int64_t length, int64_t at, const uint8_t *key, int64_t key_length, int64_t *starts,
                       int64_t room, Walked *walked) {
    int64_t found = 0;
    *walked = (Walked){at, 0, -1, key_length};
    while (at >= 0 && at <= length - BLOCK && found < room) {
        int dot;
        int64_t size = file_size(data + at);
        if (size < 0 || size > length - at - BLOCK || !split(data + at, &dot)) break;
        if (dot != walked->key_length || memcmp(data + at, key, (size_t)dot)) {
            starts[found++] = at;
            key = data + at;
            walked->key = at;
            walked->key_length = dot;
        }
        at += BLOCK + whole_blocks(size);
        walked->at = at;
        walked->members++;
    }
    return found;
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
