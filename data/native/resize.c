/* Antialiased bilinear resize in fixed point, to the very bytes that PIL's Image.resize(box=...) gives: a triangle as wide as the scale,
   weights in 22 bits, each of the two passes rounded to 8 bits. Pixels are four bytes, the fourth without meaning. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 __builtin_cpu_supports("avx2")
#else
#define HAVE_AVX2 0
#endif

#define BITS 22
#define HALF (1 << (BITS - 1))

int filter_make(Filter *filter, int in_size, float start, float end, int out_size) {
    double scale = (double)(end - start) / out_size, support = scale < 1.0 ? 1.0 : scale, inverse = 1.0 / support;
    int most = (int)ceil(support) * 2 + 1, stride = (most + 1) & ~1;
    filter->length = out_size;
    filter->stride = stride;
    filter->first = malloc(sizeof(int32_t) * (size_t)out_size * 2);
    filter->weights = calloc((size_t)out_size * (size_t)stride, sizeof(int32_t));
    double *row = malloc(sizeof(double) * (size_t)stride);
    filter->low = in_size;
    filter->high = filter->most = 0;
    if (filter->first && filter->weights && row) {
        filter->taps = filter->first + out_size;
        for (int i = 0; i < out_size; i++) {
            double center = start + (i + 0.5) * scale, sum = 0.0;
            int low = (int)(center - support + 0.5), high = (int)(center + support + 0.5);
            low = low < 0 ? 0 : low;
            high = (high > in_size ? in_size : high) - low;
            if (high > most || high < 1) break; /* can't be: a guard for what follows */
            for (int k = 0; k < high; k++) {
                double x = fabs((k + low - center + 0.5) * inverse);
                row[k] = x < 1.0 ? 1.0 - x : 0.0;
                sum += row[k];
            }
            for (int k = 0; k < high; k++) {
                double weight = sum != 0.0 ? row[k] / sum : row[k];
                filter->weights[(size_t)i * (size_t)stride + (size_t)k] = (int32_t)(0.5 + weight * (1 << BITS));
            }
            while (high > 1 && filter->weights[(size_t)i * (size_t)stride + (size_t)high - 1] == 0) high--;
            filter->first[i] = low;
            filter->taps[i] = high;
            filter->most = ((high > filter->most ? high : filter->most) + 1) & ~1;
            filter->low = low < filter->low ? low : filter->low;
            filter->high = low + high > filter->high ? low + high : filter->high;
            if (i == out_size - 1) {
                free(row);
                return DONE;
            }
        }
    }
    free(row);
    filter_free(filter);
    return NO_MEMORY;
}

void filter_free(Filter *filter) {
    free(filter->first);
    free(filter->weights);
    free(filter->split);
    memset(filter, 0, sizeof *filter);
}

static uint8_t rounded(int32_t sum) {
    int32_t value = sum >> BITS;
    return (uint8_t)(value > 255 ? 255 : value);
}

static void row_plain(const Filter *filter, const uint8_t *in, uint8_t *out) {
    for (int i = 0; i < filter->length; i++) {
        const int32_t *weights = filter->weights + (size_t)i * (size_t)filter->stride;
        const uint8_t *from = in + 4 * (size_t)(filter->first[i] - filter->low);
        int32_t a = HALF, b = HALF, c = HALF;
        for (int k = 0; k < filter->taps[i]; k++, from += 4) {
            a += weights[k] * from[0];
            b += weights[k] * from[1];
            c += weights[k] * from[2];
        }
        out[4 * i] = rounded(a);
        out[4 * i + 1] = rounded(b);
        out[4 * i + 2] = rounded(c);
        out[4 * i + 3] = 0;
    }
}

static void column_plain(const int32_t *weights, int taps, const uint8_t *rows, size_t pitch, size_t from, size_t bytes, uint8_t *out) {
    for (size_t x = from; x < bytes; x++) {
        int32_t sum = HALF;
        for (int k = 0; k < taps; k++) sum += weights[k] * rows[(size_t)k * pitch + x];
        out[x] = rounded(sum);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)

/* The weights once more, as row_of reads them: for every four taps of an output, the upper and the lower 11 bits of each, 16 bits wide. A
   product of 8 and 22 bits is then two of 16, of which one instruction makes 16 and adds them by twos; the sums are the same. */
static int16_t *split_weights(const Filter *filter) {
    size_t length = (size_t)filter->length, padded = (length + 1) & ~(size_t)1, groups = ((size_t)filter->most + 3) / 4;
    int16_t *split = calloc(groups * padded * 8, sizeof *split);
    for (size_t i = 0; split && i < length; i++)
        for (int k = 0; k < filter->taps[i]; k++) {
            int32_t weight = filter->weights[i * (size_t)filter->stride + (size_t)k];
            int16_t *of_four = split + ((size_t)k / 4 * padded + i) * 8 + k % 4;
            of_four[0] = (int16_t)(weight >> 11);
            of_four[4] = (int16_t)(weight & 2047);
        }
    return split;
}

/* Two outputs a step, one in each half, four taps at a time: as many for all, with weights of zero, since a loop of unsteady length is
   mispredicted. `pairs`: of taps. */
__attribute__((target("avx2"), always_inline)) static inline void row_of(const Filter *filter, const uint8_t *in, uint8_t *out, int pairs) {
    const __m256i half = _mm256_set1_epi32(HALF);
    const __m256i first_two = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m256i last_two = _mm256_broadcastsi128_si256(_mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1));
    size_t length = (size_t)filter->length, padded = (length + 1) & ~(size_t)1;
    for (size_t i = 0; i < length; i += 2) {
        const uint8_t *a = in + 4 * (size_t)(filter->first[i] - filter->low);
        const uint8_t *b = i + 1 < length ? in + 4 * (size_t)(filter->first[i + 1] - filter->low) : a;
        const int16_t *weights = filter->split + i * 8;
        __m256i high = _mm256_setzero_si256(), low = high;
        for (int pair = 0; pair < pairs; pair += 2, a += 16, b += 16, weights += padded * 8) {
            __m256i four = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)), _mm_loadu_si128((const __m128i *)b), 1);
            __m256i weight = _mm256_loadu_si256((const __m256i *)weights);
            __m256i two = _mm256_shuffle_epi8(four, first_two);
            high = _mm256_add_epi32(high, _mm256_madd_epi16(two, _mm256_shuffle_epi32(weight, 0x00)));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(two, _mm256_shuffle_epi32(weight, 0xAA)));
            if (pair + 1 == pairs) break;
            two = _mm256_shuffle_epi8(four, last_two);
            high = _mm256_add_epi32(high, _mm256_madd_epi16(two, _mm256_shuffle_epi32(weight, 0x55)));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(two, _mm256_shuffle_epi32(weight, 0xFF)));
        }
        __m256i sum = _mm256_srai_epi32(_mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, 11), low), half), BITS);
        sum = _mm256_packs_epi32(sum, sum);
        sum = _mm256_packus_epi16(sum, sum);
        _mm_storel_epi64((__m128i *)(out + 4 * i), _mm_unpacklo_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    }
}

__attribute__((target("avx2"))) static void row_avx2(const Filter *filter, const uint8_t *in, uint8_t *out) {
    if (filter->most <= 2)
        row_of(filter, in, out, 1);
    else if (filter->most <= 4)
        row_of(filter, in, out, 2);
    else if (filter->most <= 6)
        row_of(filter, in, out, 3);
    else
        row_of(filter, in, out, filter->most / 2);
}

__attribute__((target("avx2"))) static void column_avx2(const int32_t *weights, int taps, const uint8_t *rows, size_t pitch, size_t bytes,
                                                      uint8_t *out) {
    size_t x = 0;
    for (; x + 16 <= bytes; x += 16) {
        __m256i a = _mm256_set1_epi32(HALF), b = a;
        const uint8_t *from = rows + x;
        for (int k = 0; k < taps; k++, from += pitch) {
            __m256i weight = _mm256_set1_epi32(weights[k]);
            __m128i some = _mm_loadu_si128((const __m128i *)from);
            a = _mm256_add_epi32(a, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(some), weight));
            b = _mm256_add_epi32(b, _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(some, 8)), weight));
        }
        a = _mm256_packs_epi32(_mm256_srai_epi32(a, BITS), _mm256_srai_epi32(b, BITS));
        a = _mm256_permute4x64_epi64(a, 0xD8);
        _mm_storeu_si128((__m128i *)(out + x), _mm_packus_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }
    column_plain(weights, taps, rows, pitch, x, bytes, out);
}

#else
#define split_weights(filter) NULL
#define row_avx2 row_plain
#define column_avx2(weights, taps, rows, pitch, bytes, out) column_plain(weights, taps, rows, pitch, 0, bytes, out)
#endif

/* To be called before filter_row. */
int filter_for_rows(Filter *filter) {
    if (HAVE_AVX2 && !(filter->split = split_weights(filter))) return NO_MEMORY;
    return DONE;
}

/* One row: `in` starts at input filter->low, and may be read filter->most + 3 pixels past its last; `out` may be written one past its last. */
void filter_row(const Filter *filter, const uint8_t *in, uint8_t *out) {
    if (HAVE_AVX2)
        row_avx2(filter, in, out);
    else
        row_plain(filter, in, out);
}

/* Output row `row`: `bytes` bytes, from rows that lie `pitch` bytes apart from input filter->low on. */
void filter_column(const Filter *filter, const uint8_t *rows, size_t pitch, size_t bytes, int row, uint8_t *out) {
    const int32_t *weights = filter->weights + (size_t)row * (size_t)filter->stride;
    rows += (size_t)(filter->first[row] - filter->low) * pitch;
    if (HAVE_AVX2)
        column_avx2(weights, filter->taps[row], rows, pitch, bytes, out);
    else
        column_plain(weights, filter->taps[row], rows, pitch, 0, bytes, out);
}
