/* A baseline JPEG written anew with restart markers: the coefficients, and so the pixels, stay what they are. */
#include <stdlib.h>
#include <string.h>

#include "native.h"

typedef struct {
    struct jpeg_decompress_struct in;
    struct jpeg_compress_struct out;
    struct jpeg_source_mgr source;
    ErrorManager errors;
    unsigned char *memory;
    unsigned long size;
} Rewrite;

static int rewrite(Rewrite *work, const uint8_t *data, size_t size, int interval) {
    errors_attach((j_common_ptr)&work->in, &work->errors);
    work->out.err = &work->errors.base;
    if (setjmp(work->errors.escape)) return BROKEN;
    jpeg_create_decompress(&work->in);
    jpeg_create_compress(&work->out);
    source_attach(&work->in, &work->source, data, size);
    jpeg_read_header(&work->in, TRUE);
    if (work->in.progressive_mode || work->in.arith_code || jpeg_has_multiple_scans(&work->in)) return NOT_OURS;
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&work->in);
    jpeg_mem_dest(&work->out, &work->memory, &work->size);
    jpeg_copy_critical_parameters(&work->in, &work->out);
    work->out.optimize_coding = TRUE;
    work->out.restart_interval = (unsigned)interval;
    jpeg_write_coefficients(&work->out, coefficients);
    jpeg_finish_compress(&work->out);
    jpeg_finish_decompress(&work->in);
    return DONE;
}

/* On DONE `memory` holds the new JPEG, to be given to shardline_free: only its tables and its scan are of use, the other segments of the old
   one are not in it. */
int shardline_restart(const uint8_t *data, size_t size, int interval, unsigned char **memory, size_t *new_size) {
    Rewrite work;
    memset(&work, 0, sizeof work);
    int code = rewrite(&work, data, size, interval);
    jpeg_destroy_compress(&work.out);
    jpeg_destroy_decompress(&work.in);
    if (code != DONE) {
        free(work.memory);
        return code;
    }
    *memory = work.memory;
    *new_size = work.size;
    return DONE;
}

void shardline_free(unsigned char *memory) { free(memory); }
