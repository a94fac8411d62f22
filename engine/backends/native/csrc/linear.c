/* Matrix products of few rows with a packed weight: y = x W^T.
 *
 * A packed weight is a row of panels. A panel holds 32 outputs for all inputs, contiguous in memory and in the order in
 * which it is read; between inputs that are multiplied together by one instruction (one of float32, two of bfloat16,
 * four of int8) the outputs lie side by side:  [panel][input / d][output of the panel][input % d].
 * This is what both the dot product instructions of AVX-512 and the tiles of AMX take. In a SWIGLU panel 16 outputs of
 * the gate come before the 16 outputs of the upper map that they multiply.
 *
 * Each output of each row is one chain of sums in the order of its inputs, whatever the number of rows.
 */
#include "athanor.h"
#include "compressed.h"
#include "simd.h"

#include <stddef.h>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAVE_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__)
#define HAVE_AMX 1
#endif

#define MOST_ROWS 12            /* 24 sums of 16 numbers in 32 registers */
#define BLOCK_BYTES (512 << 10) /* of x: stays in the second-level cache while panels pass */
#define AHEAD 4096              /* bytes of weight asked for ahead of use, into the second-level cache */

int64_t padded_inputs(int64_t inputs, int64_t dtype) {
    int64_t step = dtype == TYPE_BF16 ? 32 : dtype == TYPE_INT8 ? 64 : 1;
    return (inputs + step - 1) / step * step;
}

INLINE int64_t item_bytes(int64_t dtype) { return dtype == TYPE_BF16 ? 2 : dtype == TYPE_INT8 ? 1 : 4; }

INLINE vf load32(const void *from) { return load(from); }

/* One group of inputs of one row times 16 outputs. */
INLINE vf dot_bf16(vf sum, const void *x, vf w) {
    uint32_t pair;
    memcpy(&pair, x, 4);
#if defined(HAVE_DOT)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)w);
#else
    vf low = (vf)((vu)w << 16), high = (vf)((vu)w & 0xffff0000u);
    sum = fma16(splat(one_from_bf16((uint16_t)pair)), low, sum);
    return fma16(splat(one_from_bf16((uint16_t)(pair >> 16))), high, sum);
#endif
}

INLINE vf dot_int8(vf sum, const void *x, vf w) {
    uint32_t four;
    memcpy(&four, x, 4);
#if defined(HAVE_DOT)
    return (vf)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)four), (__m512i)w);
#else
    vi total = (vi)sum, bytes = (vi)w;
    for (int i = 0; i < 4; i++) total += ((bytes << (24 - 8 * i)) >> 24) * (int32_t)((four >> (8 * i)) & 255);
    return (vf)total;
#endif
}

INLINE vf dot_f32(vf sum, const void *x, vf w) {
    float value;
    memcpy(&value, x, 4);
    return fma16(splat(value), w, sum);
}

/* A group of inputs of some rows times one panel. Every group is four bytes of x and 128 bytes of w in each dtype. */
INLINE void add_group(int rows, int64_t dtype, const char *x, int64_t x_stride, const char *w, vf (*part)[2]) {
    vf left = load32(w), right = load32(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const char *four = x + r * x_stride;
        if (dtype == TYPE_BF16) {
            part[r][0] = dot_bf16(part[r][0], four, left);
            part[r][1] = dot_bf16(part[r][1], four, right);
        } else if (dtype == TYPE_INT8) {
            part[r][0] = dot_int8(part[r][0], four, left);
            part[r][1] = dot_int8(part[r][1], four, right);
        } else {
            part[r][0] = dot_f32(part[r][0], four, left);
            part[r][1] = dot_f32(part[r][1], four, right);
        }
    }
}

/* `rows` rows times one panel; `rows`, `dtype` and `compressed` are constants where this is inlined. */
INLINE void panel_rows(int rows, int64_t dtype, int compressed, const char *x, int64_t x_stride,
                       const panel_weights *w, const char *next, int64_t groups, vf (*sums)[2]) {
    vf part[MOST_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) part[r][0] = part[r][1] = splat(0);
    if (compressed) {
        char plain[CHUNK_PLAIN] __attribute__((aligned(64)));
        for (int64_t chunk = 0; chunk < groups / CHUNK_GROUPS; chunk++) {
            expand(w, chunk, next + chunk * CHUNK_BYTES, plain);
            for (int64_t g = 0; g < CHUNK_GROUPS; g++)
                add_group(rows, dtype, x + (chunk * CHUNK_GROUPS + g) * 4, x_stride, plain + g * 128, part);
        }
    } else {
        for (int64_t g = 0; g < groups; g++) {
            expect(next + g * 128);
            expect(next + g * 128 + 64);
            add_group(rows, dtype, x + g * 4, x_stride, w->at + g * 128, part);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sums[r][0] = part[r][0], sums[r][1] = part[r][1];
}

typedef void panel_function(const char *, int64_t, const panel_weights *, const char *, int64_t, vf (*)[2]);

#define PANEL_FUNCTION(name, type, compressed, rows)                                                            \
    static void name##_##rows(const char *x, int64_t stride, const panel_weights *w, const char *next,          \
                              int64_t groups, vf (*sums)[2]) {                                                  \
        panel_rows(rows, type, compressed, x, stride, w, next, groups, sums);                                   \
    }
#define PANEL_FUNCTIONS(name, type, compressed)                                                                 \
    PANEL_FUNCTION(name, type, compressed, 1) PANEL_FUNCTION(name, type, compressed, 2)                         \
    PANEL_FUNCTION(name, type, compressed, 3) PANEL_FUNCTION(name, type, compressed, 4)                         \
    PANEL_FUNCTION(name, type, compressed, 5) PANEL_FUNCTION(name, type, compressed, 6)                         \
    PANEL_FUNCTION(name, type, compressed, 7) PANEL_FUNCTION(name, type, compressed, 8)                         \
    PANEL_FUNCTION(name, type, compressed, 9) PANEL_FUNCTION(name, type, compressed, 10)                        \
    PANEL_FUNCTION(name, type, compressed, 11) PANEL_FUNCTION(name, type, compressed, 12)                       \
    static panel_function *const name[MOST_ROWS + 1] = {                                                        \
        0,        name##_1, name##_2, name##_3, name##_4,  name##_5,  name##_6,                                 \
        name##_7, name##_8, name##_9, name##_10, name##_11, name##_12};

PANEL_FUNCTIONS(panel_f32, TYPE_F32, 0)
PANEL_FUNCTIONS(panel_bf16, TYPE_BF16, 0)
PANEL_FUNCTIONS(panel_bf16c, TYPE_BF16, 1)
PANEL_FUNCTIONS(panel_int8, TYPE_INT8, 0)

#if defined(HAVE_AMX)
/* Up to 32 rows times one panel on tiles: x in 0 and 1, w in 2 and 3, sums in 4 to 7. The rows of x that do not exist
 * are read from the buffer's spare rows, or are the one row again, and are never looked at. */
INLINE void panel_tiles(int two, int64_t dtype, int compressed, const char *x, int64_t x_stride,
                        const panel_weights *w, const char *next, int64_t groups, float *sums) {
    char plain[CHUNK_PLAIN] __attribute__((aligned(64)));
    _tile_zero(4);
    _tile_zero(5);
    if (two) {
        _tile_zero(6);
        _tile_zero(7);
    }
    for (int64_t g = 0; g < groups; g += CHUNK_GROUPS) {
        const char *here = w->at + g * 128;
        if (compressed) {
            expand(w, g / CHUNK_GROUPS, next + g / CHUNK_GROUPS * CHUNK_BYTES, plain);
            here = plain;
        } else {
            for (int line = 0; line < 32; line++) expect(next + g * 128 + line * 64);
        }
        _tile_loadd(0, x + g * 4, x_stride);
        if (two) _tile_loadd(1, x + 16 * x_stride + g * 4, x_stride);
        _tile_loadd(2, here, 128);
        _tile_loadd(3, here + 64, 128);
        if (dtype == TYPE_BF16) {
            _tile_dpbf16ps(4, 0, 2);
            _tile_dpbf16ps(5, 0, 3);
            if (two) {
                _tile_dpbf16ps(6, 1, 2);
                _tile_dpbf16ps(7, 1, 3);
            }
        } else {
            _tile_dpbusd(4, 0, 2);
            _tile_dpbusd(5, 0, 3);
            if (two) {
                _tile_dpbusd(6, 1, 2);
                _tile_dpbusd(7, 1, 3);
            }
        }
    }
    _tile_stored(4, sums, 128);
    _tile_stored(5, sums + 16, 128);
    if (two) {
        _tile_stored(6, sums + 16 * PANEL, 128);
        _tile_stored(7, sums + 16 * PANEL + 16, 128);
    }
}
#endif

/* From raw sums of one row and panel to the result: scales, bias, then store, add, or gate. */
INLINE void finish(const athanor_op *op, int64_t row, int64_t panel, vf left, vf right) {
    int64_t column = panel * PANEL;
    if (op->dtype == TYPE_INT8) {
        vf scale = splat(op->in_scale[row]);
        vf whole_left = __builtin_convertvector((vi)left, vf), whole_right = __builtin_convertvector((vi)right, vf);
        left = (whole_left - load(op->sums + column)) * scale * load(op->scale + column);
        right = (whole_right - load(op->sums + column + 16)) * scale * load(op->scale + column + 16);
    }
    if (op->bias) {
        left += load(op->bias + column);
        right += load(op->bias + column + 16);
    }
    if (op->mode == MODE_SWIGLU) {
        int64_t inner = op->outputs / 2, first = panel * 16, count = least(16, inner - first);
        vf gated = silu16(left) * right;
        if (op->dtype == TYPE_BF16) {
            uint16_t *to = (uint16_t *)op->out + row * padded_inputs(inner, TYPE_BF16) + first;
            vh half = to_bf16(gated);
            memcpy(to, &half, count * 2);
        } else {
            memcpy((float *)op->out + row * inner + first, &gated, count * 4);
        }
        return;
    }
    float *to = (float *)op->out + row * op->outputs + column;
    float both[PANEL] __attribute__((aligned(64)));
    int64_t count = least(PANEL, op->outputs - column);
    if (count == PANEL) {
        if (op->mode == MODE_ADD) left += load(to), right += load(to + 16);
        store(to, left);
        store(to + 16, right);
        return;
    }
    store(both, left);
    store(both + 16, right);
    for (int64_t i = 0; i < count; i++) to[i] = op->mode == MODE_ADD ? to[i] + both[i] : both[i];
}

typedef struct {
    int64_t groups, x_stride, panel_bytes;
    int tiles;
    panel_function *const *functions;
} shape;

/* The weights of a panel. When they are read several times they are expanded once, into this thread's scratch. */
static panel_weights weights_of(const athanor_op *op, const shape *of, int64_t panel, int often, float *scratch) {
    panel_weights w = {.at = (const char *)op->weight + panel * of->panel_bytes};
    if (!op->palette) return w;
    int64_t chunks = of->groups / CHUNK_GROUPS;
    w.palette = op->palette, w.starts = op->starts + panel * chunks, w.patches = op->patches;
    if (!often) return w;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        expand(&w, chunk, w.at + chunk * CHUNK_BYTES + AHEAD, (char *)scratch + chunk * CHUNK_PLAIN);
    return (panel_weights){.at = (const char *)scratch};
}

static void one_panel(const athanor_op *op, const shape *of, int64_t panel, int64_t first, int64_t last,
                      float *scratch) {
    const char *x = op->in;
    const int64_t most = of->tiles ? 32 : MOST_ROWS, pieces = (last - first + most - 1) / most;
    const panel_weights w = weights_of(op, of, panel, pieces > 1, scratch);
    const char *start = (const char *)op->weight + panel * of->panel_bytes;
#if defined(HAVE_AMX)
    if (of->tiles) {
        float sums[2 * 16 * PANEL] __attribute__((aligned(64)));
        for (int64_t m = first; m < last; m += 32) {
            const char *next = start + (last - m > 32 ? 0 : pieces > 1 ? of->panel_bytes : AHEAD);
            int two = last - m > 16, compressed = w.palette != 0;
            const char *rows = x + m * of->x_stride;
            int64_t stride = last - m == 1 ? 0 : of->x_stride;
#define TILES(rows32, type, expanding) \
    if (two == rows32 && op->dtype == type && compressed == expanding) \
        panel_tiles(rows32, type, expanding, rows, stride, &w, next, of->groups, sums);
            TILES(0, TYPE_BF16, 0) TILES(1, TYPE_BF16, 0) TILES(0, TYPE_BF16, 1) TILES(1, TYPE_BF16, 1)
            TILES(0, TYPE_INT8, 0) TILES(1, TYPE_INT8, 0)
#undef TILES
            for (int64_t r = m; r < least(last, m + 32); r++)
                finish(op, r, panel, load(sums + (r - m) * PANEL), load(sums + (r - m) * PANEL + 16));
        }
        return;
    }
#endif
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t m = first + (last - first) * piece / pieces, end = first + (last - first) * (piece + 1) / pieces;
        vf sums[MOST_ROWS][2];
        const char *next = start + (pieces == 1 ? AHEAD : piece + 1 == pieces ? of->panel_bytes : 0);
        panel_function *const *functions = w.palette ? panel_bf16c : of->functions;
        functions[end - m](x + m * of->x_stride, of->x_stride, &w, next, of->groups, sums);
        for (int64_t r = m; r < end; r++) finish(op, r, panel, sums[r - m][0], sums[r - m][1]);
    }
}

void run_linear(const athanor_op *op, const context *at, int64_t rows) {
    int64_t padded = padded_inputs(op->inputs, op->dtype), item = item_bytes(op->dtype);
    shape of = {.groups = padded * item / 4, .x_stride = padded * item, .panel_bytes = padded * item * PANEL};
    if (op->palette) of.panel_bytes = of.panel_bytes / CHUNK_PLAIN * CHUNK_BYTES;
    of.functions = op->dtype == TYPE_BF16 ? panel_bf16 : op->dtype == TYPE_INT8 ? panel_int8 : panel_f32;
#if defined(HAVE_AMX)
    of.tiles = op->dtype != TYPE_F32 && probe_amx();
    if (of.tiles) configure_tiles();
#endif
    int64_t block = BLOCK_BYTES / of.x_stride / 96 * 96;
    if (block < 96) block = 96;
    int64_t blocks = (rows + block - 1) / block;
    int64_t panels = (op->outputs + PANEL - 1) / PANEL, pieces = panels * blocks;
    int64_t take = pieces / (at->threads * 8);
    if (at->threads == 1) take = pieces;
    if (take < 1) take = 1;
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(at->counter, take, memory_order_relaxed);
        if (piece >= pieces) break;
        for (int64_t end = least(pieces, piece + take); piece < end; piece++) {
            int64_t first = piece / panels * block;
            one_panel(op, &of, piece % panels, first, least(rows, first + block), at->scratch);
        }
    }
#if defined(HAVE_AMX)
    if (of.tiles) _tile_release();
#endif
}
