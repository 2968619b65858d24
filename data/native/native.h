/* What the C files of the JPEG path share. Nothing here prints, exits or keeps state between calls: a call owns its memory and frees it,
   so threads and forked processes need no care. */
#ifndef SHARDLINE_NATIVE_H
#define SHARDLINE_NATIVE_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#define MAX_PIXELS 178956970 /* as in data/decoders.py */

/* What a caller is told; everything but DONE means: let PIL decide, it has the last word (and the words) on bad bytes. */
enum { DONE = 0, NOT_OURS = 1, BROKEN = 2, NO_MEMORY = 3 };

typedef struct {
    int32_t width, height; /* as stored */
    int32_t orientation;   /* EXIF's, 1..8; 0 where PIL has to say */
    int32_t components;
    int32_t sof;         /* 0xC0 baseline, 0xC1 extended, 0xC2 progressive */
    int32_t restart;     /* MCUs in a restart interval, 0 for none */
    int32_t h[4], v[4];  /* sampling factors */
    int32_t pad;
    int64_t scan;        /* where the first scan's compressed bytes start */
} JpegHeader;

/* The part of a stored picture that is wanted, and where its pixels go: pixel (x, y) of the resized part is written to
   out[channel * plane + x * step_x + y * step_y], so that flips and turns cost nothing. */
typedef struct {
    float left, top, right, bottom;
    int32_t width, height;
    uint8_t *out;
    int64_t plane, step_x, step_y;
} JpegView;

/* The weights of one direction of an antialiased resize: output i is the sum of taps[i] inputs from first[i] on. */
typedef struct {
    int32_t *first, *taps, *weights;
    int16_t *split; /* the weights for filter_row */
    int32_t length, stride, most, low, high; /* stride: weights per output; most: taps of any, made even; [low, high): inputs with a weight */
} Filter;

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf escape;
} ErrorManager;

int shardline_header(const uint8_t *data, size_t size, JpegHeader *header);
int shardline_view(const uint8_t *data, size_t size, const JpegHeader *header, const JpegView *view);

int filter_make(Filter *filter, int in_size, float start, float end, int out_size);
void filter_free(Filter *filter);
int filter_for_rows(Filter *filter);
void filter_row(const Filter *filter, const uint8_t *in, uint8_t *out);
void filter_column(const Filter *filter, const uint8_t *rows, size_t pitch, size_t bytes, int row, uint8_t *out);

void entropy_attach(j_decompress_ptr cinfo, uint32_t left, uint32_t top, uint32_t right, uint32_t bottom);

void errors_attach(j_common_ptr cinfo, ErrorManager *errors);
void source_attach(j_decompress_ptr cinfo, struct jpeg_source_mgr *source, const uint8_t *data, size_t size);

#endif
