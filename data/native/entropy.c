/* A Huffman decoder for baseline JPEGs that takes the place of libjpeg's: it knows which MCUs the wanted part touches. The others are only
   walked over, several symbols a step, or jumped over where restart markers show where to. Any oddity is an error: PIL decides then. */
#include <string.h>

#include "native.h"

/* The head of libjpeg-turbo's struct jpeg_entropy_decoder (jpegint.h), the same in all its versions. */
struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr cinfo);
    boolean (*decode_mcu)(j_decompress_ptr cinfo, JBLOCKROW *blocks);
};

#define LOOK 10 /* bits looked up at once */
#define AROUND 8 /* pixels around the window that are decoded too: chroma is interpolated */
#define END 64  /* how far an end-of-block symbol moves: out of any block */

typedef struct {
    /* By the next LOOK bits: value << 16 | move << 9 | extra << 5 | bits. bits: the code and, where they fit, the value's bits; else extra
       of these follow. move: coefficients passed. 0: a longer code. */
    uint32_t one[1 << LOOK];
    /* For walking: before << 16 | move << 8 | bits, of all symbols whose codes fit; before: what those but the last move. */
    uint32_t many[1 << LOOK];
    int32_t last_code[18], offset[18]; /* canonical codes by length */
    const uint8_t *symbols;
} Table;

typedef struct {
    uint64_t buffer;   /* the next bits, from the top */
    int bits, padding; /* how many there are, and how many of them were made up behind the end */
    const uint8_t *at, *end;
} Bits;

typedef struct {
    Bits bits;
    uint32_t mcu, total, per_row, interval, jump_to, next_restart;
    uint32_t left, top, right, bottom; /* the window, in MCUs */
    uint32_t last_dc[4];
    const Table *dc[4], *ac[4]; /* by component */
} Entropy;

static const uint8_t NATURAL[64 + 16] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50,
    43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, /* for runs beyond the end */
};

static void fail(j_decompress_ptr cinfo) { cinfo->err->error_exit((j_common_ptr)cinfo); }

/* A value of `size` bits as the format has it: those that start with 0 are negative. */
static inline int32_t extend(uint32_t raw, int size) {
    return size && raw < 1u << (size - 1) ? (int32_t)raw - (int32_t)(1u << size) + 1 : (int32_t)raw;
}

static uint32_t pack_one(uint32_t looked, int length, int symbol, int is_dc) {
    int size = symbol & 15, taken = length + size, fits = taken <= LOOK;
    uint32_t move = (uint32_t)(is_dc ? 1 : size == 0 && symbol != 0xF0 ? END : (symbol >> 4) + 1);
    uint32_t value = (uint32_t)(fits ? extend(looked >> (LOOK - taken) & ((1u << size) - 1), size) : 0);
    return value << 16 | move << 9 | (uint32_t)(fits ? 0 : size) << 5 | (uint32_t)(fits ? taken : length);
}

/* `codes`: the length of the code alone, by the bits looked up. */
static void join_symbols(Table *table, const uint8_t *codes) {
    for (uint32_t looked = 0; looked < 1 << LOOK; looked++) {
        uint32_t one = table->one[looked], bits = (one & 31) + (one >> 5 & 15), move = one >> 9 & 127, before = 0;
        while (bits && bits < LOOK && move < END) {
            uint32_t rest = looked << bits & ((1 << LOOK) - 1), next = table->one[rest];
            if (!next || codes[rest] > LOOK - bits) break; /* what stands behind the bits looked up is not known */
            before = move;
            bits += (next & 31) + (next >> 5 & 15);
            move += next >> 9 & 127;
        }
        table->many[looked] = before << 16 | move << 8 | bits;
    }
}

static const Table *make_table(j_decompress_ptr cinfo, const JHUFF_TBL *huffman, int is_dc) {
    if (!huffman) fail(cinfo);
    Table *table = cinfo->mem->alloc_small((j_common_ptr)cinfo, JPOOL_IMAGE, sizeof *table);
    uint8_t codes[1 << LOOK];
    memset(table, 0, sizeof *table);
    table->symbols = huffman->huffval;
    int32_t code = 0, symbol = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        int count = huffman->bits[length];
        if (symbol + count > 256 || code + count > 1 << length) fail(cinfo);
        table->offset[length] = symbol - code;
        for (int i = 0; i < count; i++, code++, symbol++) {
            if (length > LOOK) continue;
            uint32_t first = (uint32_t)code << (LOOK - length), past = first + (1u << (LOOK - length));
            for (uint32_t looked = first; looked < past; looked++) {
                table->one[looked] = pack_one(looked, length, huffman->huffval[symbol], is_dc);
                codes[looked] = (uint8_t)length;
            }
        }
        table->last_code[length] = count ? code - 1 : -1;
    }
    if (!is_dc) join_symbols(table, codes);
    return table;
}

/* At least 32 bits in the buffer; zeros behind the end or before a marker. */
static inline void refill(Bits *in) {
    if (in->bits >= 32) return;
    if (in->end - in->at >= 4) {
        const uint8_t *at = in->at;
        uint32_t word = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        if (!((~word - 0x01010101u) & word & 0x80808080u)) { /* no 0xFF among them */
            in->buffer |= (uint64_t)word << (32 - in->bits);
            in->bits += 32;
            in->at += 4;
            return;
        }
    }
    while (in->bits <= 56) {
        if (in->padding || in->at >= in->end || (*in->at == 0xFF && (in->end - in->at < 2 || in->at[1]))) {
            in->padding += 64 - in->bits;
            in->bits = 64;
            return;
        }
        in->buffer |= (uint64_t)*in->at << (56 - in->bits);
        in->at += *in->at == 0xFF ? 2 : 1;
        in->bits += 8;
    }
}

static inline void drop(Bits *in, int count) {
    in->buffer <<= count;
    in->bits -= count;
}

static inline int32_t take_value(Bits *in, int size) {
    if (size == 0) return 0;
    uint32_t raw = (uint32_t)(in->buffer >> (64 - size));
    drop(in, size);
    return extend(raw, size);
}

/* A code longer than LOOK bits. */
static int long_symbol(j_decompress_ptr cinfo, Bits *in, const Table *table) {
    for (int length = LOOK + 1; length <= 16; length++) {
        int32_t code = (int32_t)(in->buffer >> (64 - length));
        if (code > table->last_code[length]) continue;
        drop(in, length);
        return table->symbols[(code + table->offset[length]) & 255];
    }
    fail(cinfo);
    return 0;
}

/* One symbol and its value; gives how far it moves. */
static inline uint32_t next_value(j_decompress_ptr cinfo, Bits *in, const Table *table, int is_dc, int32_t *value) {
    refill(in);
    uint32_t one = table->one[in->buffer >> (64 - LOOK)];
    if (one) {
        drop(in, (int)(one & 31));
        int extra = (int)(one >> 5 & 15);
        *value = extra ? take_value(in, extra) : (int16_t)(one >> 16);
        return one >> 9 & 127;
    }
    int symbol = long_symbol(cinfo, in, table), size = symbol & 15;
    *value = take_value(in, size);
    return is_dc ? 1 : size == 0 && symbol != 0xF0 ? END : (uint32_t)(symbol >> 4) + 1;
}

/* A symbol whose value lies in the bits looked up too: most are. */
static inline int short_value(Bits *in, const Table *table, uint32_t *k, JCOEF *block) {
    uint32_t one = table->one[in->buffer >> (64 - LOOK)];
    if (one < 1u << 16) return 0; /* no value: another kind */
    drop(in, (int)(one & 31));
    *k += one >> 9 & 127;
    block[NATURAL[*k - 1]] = (JCOEF)(one >> 16);
    return 1;
}

static void read_block(j_decompress_ptr cinfo, Entropy *entropy, int component, JCOEF *block) {
    Bits in = entropy->bits; /* a copy stays in registers */
    const Table *ac = entropy->ac[component];
    int32_t value;
    next_value(cinfo, &in, entropy->dc[component], 1, &value);
    block[0] = (JCOEF)(entropy->last_dc[component] += (uint32_t)value);
    for (uint32_t k = 1; k < 64;) {
        refill(&in);
        /* three of them need no more than 30 bits */
        if (short_value(&in, ac, &k, block) && k < 64 && short_value(&in, ac, &k, block) && k < 64 && short_value(&in, ac, &k, block)) continue;
        if (k >= 64) break;
        k += next_value(cinfo, &in, ac, 0, &value);
        if (value) block[NATURAL[k - 1]] = (JCOEF)value;
    }
    entropy->bits = in;
}

static void walk_block(j_decompress_ptr cinfo, Entropy *entropy, int component) {
    Bits in = entropy->bits;
    const Table *ac = entropy->ac[component];
    int32_t value;
    next_value(cinfo, &in, entropy->dc[component], 1, &value);
    entropy->last_dc[component] += (uint32_t)value;
    for (uint32_t k = 1; k < 64;) {
        refill(&in);
        uint32_t many = ac->many[in.buffer >> (64 - LOOK)];
        if (many && k + (many >> 16) < 64) {
            drop(&in, (int)(many & 255));
            k += many >> 8 & 255;
        } else {
            k += next_value(cinfo, &in, ac, 0, &value);
        }
    }
    entropy->bits = in;
}

/* Goes on behind the restart marker that must come here, or, after a jump, somewhere behind. */
static void restart(j_decompress_ptr cinfo, Entropy *entropy, int jumped) {
    Bits *in = &entropy->bits;
    if (jumped) {
        while ((in->at = memchr(in->at, 0xFF, (size_t)(in->end - in->at)))) {
            if (in->end - in->at < 2) fail(cinfo);
            if (in->at[1]) break;
            in->at += 2;
        }
        if (!in->at) fail(cinfo);
    } else if (in->bits - in->padding >= 8) {
        fail(cinfo);
    }
    if (in->end - in->at < 2 || in->at[0] != 0xFF || in->at[1] != 0xD0 + (entropy->next_restart++ & 7)) fail(cinfo);
    in->at += 2;
    in->buffer = 0;
    in->bits = in->padding = 0;
    memset(entropy->last_dc, 0, sizeof entropy->last_dc);
}

/* Whether the window touches an MCU of [from, past). */
static int is_wanted(const Entropy *entropy, uint32_t from, uint32_t past) {
    for (uint32_t row = from / entropy->per_row; row <= (past - 1) / entropy->per_row && row < entropy->bottom; row++) {
        uint32_t start = row * entropy->per_row, low = from > start ? from - start : 0, high = past - start;
        if (row >= entropy->top && low < entropy->right && high > entropy->left) return 1;
    }
    return 0;
}

/* Takes the place of libjpeg's: `blocks` NULL means that the MCU is not used. */
static boolean read_mcu(j_decompress_ptr cinfo, JBLOCKROW *blocks) {
    Entropy *entropy = cinfo->client_data;
    uint32_t mcu = entropy->mcu++, row = mcu / entropy->per_row, column = mcu - row * entropy->per_row, interval = entropy->interval;
    if (mcu < entropy->jump_to) return TRUE;
    if (mcu >= entropy->total) fail(cinfo);
    uint32_t in_interval = interval ? mcu % interval : 1;
    if (in_interval == 0 && mcu) restart(cinfo, entropy, mcu == entropy->jump_to);
    int inside = row >= entropy->top && row < entropy->bottom && column >= entropy->left && column < entropy->right;
    if (interval && !inside && (in_interval == 0 || column == entropy->right)) {
        uint32_t past = mcu - in_interval + interval;
        if (past < entropy->total && !is_wanted(entropy, mcu, past)) {
            entropy->jump_to = past;
            return TRUE;
        }
    }
    for (int i = 0; i < cinfo->blocks_in_MCU; i++) {
        if (inside && blocks)
            read_block(cinfo, entropy, cinfo->MCU_membership[i], *blocks[i]);
        else
            walk_block(cinfo, entropy, cinfo->MCU_membership[i]);
    }
    if (entropy->bits.padding > entropy->bits.bits) fail(cinfo); /* read beyond the end */
    return TRUE;
}

/* To be called after jpeg_start_decompress: takes over where the scan has one way to be read, and does nothing where not. The window is in
   pixels of the picture. */
void entropy_attach(j_decompress_ptr cinfo, uint32_t left, uint32_t top, uint32_t right, uint32_t bottom) {
    if (cinfo->progressive_mode || cinfo->arith_code || jpeg_has_multiple_scans(cinfo) || cinfo->comps_in_scan != cinfo->num_components) return;
    Entropy *entropy = cinfo->mem->alloc_small((j_common_ptr)cinfo, JPOOL_IMAGE, sizeof *entropy);
    memset(entropy, 0, sizeof *entropy);
    int alone = cinfo->comps_in_scan == 1; /* then an MCU is one block, whatever the sampling */
    uint32_t width = 8u * (alone ? 1 : (uint32_t)cinfo->max_h_samp_factor), height = 8u * (alone ? 1 : (uint32_t)cinfo->max_v_samp_factor);
    entropy->left = (left > AROUND ? left - AROUND : 0) / width;
    entropy->top = (top > AROUND ? top - AROUND : 0) / height;
    entropy->right = (right + AROUND + width - 1) / width;
    entropy->bottom = (bottom + AROUND + height - 1) / height;
    entropy->per_row = cinfo->MCUs_per_row;
    entropy->total = cinfo->MCUs_per_row * cinfo->MCU_rows_in_scan;
    entropy->interval = cinfo->restart_interval;
    entropy->bits.at = cinfo->src->next_input_byte;
    entropy->bits.end = entropy->bits.at + cinfo->src->bytes_in_buffer;
    for (int i = 0; i < cinfo->comps_in_scan; i++) {
        const jpeg_component_info *component = cinfo->cur_comp_info[i];
        for (int k = 0; k < i; k++) {
            if (cinfo->cur_comp_info[k]->dc_tbl_no == component->dc_tbl_no) entropy->dc[i] = entropy->dc[k];
            if (cinfo->cur_comp_info[k]->ac_tbl_no == component->ac_tbl_no) entropy->ac[i] = entropy->ac[k];
        }
        if (!entropy->dc[i]) entropy->dc[i] = make_table(cinfo, cinfo->dc_huff_tbl_ptrs[component->dc_tbl_no], 1);
        if (!entropy->ac[i]) entropy->ac[i] = make_table(cinfo, cinfo->ac_huff_tbl_ptrs[component->ac_tbl_no], 0);
    }
    cinfo->client_data = entropy;
    cinfo->entropy->decode_mcu = read_mcu;
}
