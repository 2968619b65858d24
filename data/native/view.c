/* One call from a JPEG's bytes to a resized part of it in the caller's memory: only the rows and columns that the part needs are decoded
   to pixels, and each row is resized as it comes. No decoding at 1/2, 1/4, 1/8 size: it would be another picture than PIL's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define STRIP 16 /* rows that are asked for at once; libjpeg gives 1 to 4 */
#define MARGIN 16 /* columns beside the part that are decoded too: chroma is interpolated from its neighbours */

typedef struct {
    const uint8_t *data;
    size_t size;
    const JpegHeader *header;
    const JpegView *view;
    struct jpeg_decompress_struct cinfo;
    struct jpeg_source_mgr source;
    ErrorManager errors;
    Filter across, down;
    int down_first;
    uint8_t *strip, *rows, *tall, *line; /* of bytes: decoded rows; all rows of the part; one row before and one after the second pass */
    size_t pitch, decoded; /* bytes from one of rows to the next; of one decoded row */
} Job;

static void on_error(j_common_ptr cinfo) { longjmp(((ErrorManager *)cinfo->err)->escape, 1); }

static void on_message(j_common_ptr cinfo, int level) {
    if (level < 0) on_error(cinfo); /* damaged data: PIL decides */
}

static void no_output(j_common_ptr cinfo) { (void)cinfo; }

void errors_attach(j_common_ptr cinfo, ErrorManager *errors) {
    cinfo->err = jpeg_std_error(&errors->base);
    errors->base.error_exit = on_error;
    errors->base.emit_message = on_message;
    errors->base.output_message = no_output;
}

static void source_nothing(j_decompress_ptr cinfo) { (void)cinfo; }

static boolean source_empty(j_decompress_ptr cinfo) {
    on_error((j_common_ptr)cinfo); /* all bytes were there from the start: the picture is cut */
    return FALSE;
}

static void source_skip(j_decompress_ptr cinfo, long count) {
    if (count <= 0) return;
    if ((size_t)count > cinfo->src->bytes_in_buffer) on_error((j_common_ptr)cinfo);
    cinfo->src->next_input_byte += count;
    cinfo->src->bytes_in_buffer -= (size_t)count;
}

void source_attach(j_decompress_ptr cinfo, struct jpeg_source_mgr *source, const uint8_t *data, size_t size) {
    source->next_input_byte = data;
    source->bytes_in_buffer = size;
    source->init_source = source->term_source = source_nothing;
    source->fill_input_buffer = source_empty;
    source->skip_input_data = source_skip;
    source->resync_to_restart = jpeg_resync_to_restart;
    cinfo->src = source;
}

static void make_filters(Job *job) {
    const JpegView *view = job->view;
    float left = view->left, top = view->top, right = view->right, bottom = view->bottom;
    if (right - left == (float)view->width && bottom - top == (float)view->height) { /* not resampled: whole pixels */
        left = rintf(left);
        top = rintf(top);
        right = left + (float)view->width;
        bottom = top + (float)view->height;
    }
    int width = (int)job->cinfo.output_width, height = (int)job->cinfo.output_height;
    if (filter_make(&job->across, width, left, right, view->width) ||
        filter_for_rows(&job->across) || filter_make(&job->down, height, top, bottom, view->height))
        longjmp(job->errors.escape, NO_MEMORY);
}

/* Which pass comes first is PIL's choice (13): the vertical one where it takes off more than twice what the horizontal one does. */
static int choose_order(j_decompress_ptr cinfo, const JpegView *view) {
    int down = (int)cinfo->output_height - view->height, across = (int)cinfo->output_width - view->width;
    return down > 2 * (across > 0 ? across : 0);
}

/* `width`: decoded columns. Rows have room for what filter_row reads and writes past their ends. */
static void make_buffers(Job *job, size_t width) {
    size_t out_bytes = 4 * ((size_t)job->view->width + 1), num_rows = (size_t)(job->down.high - job->down.low);
    size_t decoded = 4 * (width + (size_t)job->across.most + 3);
    job->decoded = decoded;
    job->pitch = job->down_first ? decoded : out_bytes;
    job->strip = job->down_first ? NULL : malloc(STRIP * decoded);
    job->rows = malloc(num_rows * job->pitch);
    job->line = malloc(out_bytes);
    job->tall = malloc(decoded);
    if (!job->rows || !job->line || !job->tall || (!job->down_first && !job->strip)) longjmp(job->errors.escape, NO_MEMORY);
}

/* Limits the decoding to the columns that have a weight; gives the first one that comes. */
static JDIMENSION crop_columns(Job *job) {
    j_decompress_ptr cinfo = &job->cinfo;
    JDIMENSION low = (JDIMENSION)job->across.low, high = (JDIMENSION)job->across.high;
    low = low < MARGIN ? 0 : low - MARGIN;
    high = high + MARGIN > cinfo->output_width ? cinfo->output_width : high + MARGIN;
    if (low == 0 && high == cinfo->output_width) return 0;
    JDIMENSION width = high - low;
    jpeg_crop_scanline(cinfo, &low, &width);
    return low;
}

/* The rows that have a weight, into job->rows: resized already, unless that pass comes second. */
static void read_rows(Job *job, size_t column) {
    j_decompress_ptr cinfo = &job->cinfo;
    JDIMENSION top = (JDIMENSION)job->down.low, bottom = (JDIMENSION)job->down.high;
    JSAMPROW pointers[STRIP];
    if (top > 0 && jpeg_skip_scanlines(cinfo, top) != top) on_error((j_common_ptr)cinfo);
    uint8_t *row = job->rows;
    for (JDIMENSION y = top; y < bottom;) {
        JDIMENSION wanted = bottom - y < STRIP ? bottom - y : STRIP;
        for (JDIMENSION i = 0; i < wanted; i++) pointers[i] = (job->down_first ? row : job->strip) + i * job->decoded;
        JDIMENSION got = jpeg_read_scanlines(cinfo, pointers, wanted);
        if (got == 0) on_error((j_common_ptr)cinfo);
        for (JDIMENSION i = 0; i < got; i++, y++, row += job->pitch)
            if (!job->down_first) filter_row(&job->across, pointers[i] + column, row);
    }
}

static void write_row(const uint8_t *line, const JpegView *view, uint8_t *out) {
    int width = view->width;
    uint8_t *r = out, *g = out + view->plane, *b = out + 2 * view->plane;
    if (view->step_x == 1) {
        for (int x = 0; x < width; x++) {
            r[x] = line[4 * x];
            g[x] = line[4 * x + 1];
            b[x] = line[4 * x + 2];
        }
    } else {
        for (int64_t x = 0, step = view->step_x; x < width; x++) {
            r[x * step] = line[4 * x];
            g[x * step] = line[4 * x + 1];
            b[x * step] = line[4 * x + 2];
        }
    }
}

/* The second pass, row by row. */
static void write_pixels(Job *job, size_t column) {
    const JpegView *view = job->view;
    for (int y = 0; y < view->height; y++) {
        if (job->down_first) {
            filter_column(&job->down, job->rows + column, job->pitch, 4 * (size_t)(job->across.high - job->across.low), y, job->tall);
            filter_row(&job->across, job->tall, job->line);
        } else {
            filter_column(&job->down, job->rows, job->pitch, 4 * (size_t)view->width, y, job->line);
        }
        write_row(job->line, view, view->out + y * view->step_y);
    }
}

/* Whether every coefficient came with all its bits. Where not, libjpeg smooths over the gaps, each version in its own way. */
static int is_complete(j_decompress_ptr cinfo) {
    for (int i = 0; cinfo->progressive_mode && i < cinfo->num_components; i++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (cinfo->coef_bits[i][k] != 0) return 0;
    return 1;
}

static int decode(Job *job) {
    j_decompress_ptr cinfo = &job->cinfo;
    errors_attach((j_common_ptr)cinfo, &job->errors);
    int code = setjmp(job->errors.escape);
    if (code) return code == NO_MEMORY ? NO_MEMORY : BROKEN;
    jpeg_create_decompress(cinfo);
    source_attach(cinfo, &job->source, job->data, job->size);
    jpeg_read_header(cinfo, TRUE);
    if ((int32_t)cinfo->image_width != job->header->width || (int32_t)cinfo->image_height != job->header->height ||
        cinfo->num_components != job->header->components || cinfo->data_precision != 8 || cinfo->arith_code)
        return NOT_OURS;
    cinfo->out_color_space = JCS_EXT_RGBX;
    jpeg_start_decompress(cinfo);
    if (!is_complete(cinfo)) return NOT_OURS;
    make_filters(job);
    job->down_first = choose_order(cinfo, job->view);
    size_t column = 4 * ((size_t)job->across.low - crop_columns(job));
    make_buffers(job, cinfo->output_width);
    entropy_attach(cinfo, (uint32_t)job->across.low, (uint32_t)job->down.low, (uint32_t)job->across.high, (uint32_t)job->down.high);
    read_rows(job, column);
    write_pixels(job, column);
    return DONE;
}

int shardline_view(const uint8_t *data, size_t size, const JpegHeader *header, const JpegView *view) {
    Job job;
    memset(&job, 0, sizeof job);
    job.data = data;
    job.size = size;
    job.header = header;
    job.view = view;
    int code = decode(&job);
    jpeg_destroy_decompress(&job.cinfo);
    filter_free(&job.across);
    filter_free(&job.down);
    free(job.strip);
    free(job.rows);
    free(job.line);
    free(job.tall);
    return code;
}
