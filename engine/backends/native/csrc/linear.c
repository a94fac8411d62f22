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

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__)
#define HAVE_AMX 1
#endif

#define VECTORS (PANEL / LANES)        /* of one group of inputs of a panel */
#define SUMS (REGISTERS / 4 * 3)       /* registers for sums; the others hold weights and a number of x */
#define WHOLE_ROWS (SUMS / VECTORS)    /* rows that take a panel in one pass, their sums in registers */
#define HALF_ROWS (2 * WHOLE_ROWS)     /* rows that take it in two passes, 16 outputs each */
#define MOST_ROWS (WHOLE_ROWS >= 12 ? 12 : HALF_ROWS)
#define STRETCH_GROUPS 64              /* of two passes: their weights stay in the first-level cache */
#define BLOCK_BYTES (512 << 10) /* of x: stays in the second-level cache while panels pass */
/* Bytes of weight asked for ahead of use, into the second-level cache. A step of one row on one core of Zen 3 takes 58 ms
 * with 1 KiB and 72 with 4 KiB (0.5 billion weights, bfloat16); variants with AVX-512 keep what Zen 4 was given. */
#define AHEAD (LANES == 8 ? 1024 : 4096)

int64_t padded_inputs(int64_t inputs, int64_t dtype) {
    int64_t step = dtype == TYPE_BF16 ? 32 : dtype == TYPE_INT8 ? 64 : 1;
    return (inputs + step - 1) / step * step;
}

INLINE int64_t item_bytes(int64_t dtype) { return dtype == TYPE_BF16 ? 2 : dtype == TYPE_INT8 ? 1 : 4; }

/* Bytes of x that one group of inputs takes: see fed_bytes. */
INLINE int64_t group_bytes(int64_t dtype) { return 4 / item_bytes(dtype) * fed_bytes(dtype); }

INLINE vf splat_at(const char *x) {
    float value;
    memcpy(&value, x, 4);
    return splat(value);
}

#if defined(HAVE_DOT)
/* Two bfloat16, or four int8, of a row times those of each output, added to its sum. */
INLINE vf dot_of(vf sum, const char *x, vf w, int64_t dtype) {
    int32_t together;
    memcpy(&together, x, 4);
#if defined(__x86_64__)
    const __m512i same = _mm512_set1_epi32(together);
    if (dtype == TYPE_BF16) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)same, (__m512bh)w);
    return (vf)_mm512_dpbusd_epi32((__m512i)sum, same, (__m512i)w);
#else
    const int32x4_t same = vdupq_n_s32(together);
    if (dtype == TYPE_BF16) return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)same, (bfloat16x8_t)w);
    return (vf)vusdotq_s32((int32x4_t)sum, (uint8x16_t)same, (int8x16_t)w);
#endif
}
#endif

/* Of each four int8 in a vector the first and third, or the second and fourth, as numbers of 16 bits. */
INLINE vf pairs_of(vf bytes, int second) {
    vs pairs = (vs)bytes;
    return (vf)(second ? pairs >> 8 : (vs)((vs)((vus)pairs << 8) >> 8));
}

/* Two numbers of 16 bits of x, the same for every output, times two of each output, added to its sum. */
INLINE vf add_pairs(vf sum, const char *x, vf w) {
#if defined(__AVX512BW__) || LANES == 8 || (defined(__x86_64__) && LANES == 4)
    int32_t pair;
    memcpy(&pair, x, 4);
#endif
#if defined(__AVX512BW__)
    return (vf)((vi)sum + (vi)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(pair)));
#elif LANES == 8
    return (vf)((vi)sum + (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(pair)));
#elif defined(__x86_64__) && LANES == 4
    return (vf)((vi)sum + (vi)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(pair)));
#else
    int16_t two[2];
    memcpy(two, x, 4);
    return (vf)((vi)sum + (((vi)w << 16) >> 16) * (int32_t)two[0] + ((vi)w >> 16) * (int32_t)two[1]);
#endif
}

/* A group of inputs of some rows times `vectors` vectors of one panel's outputs: 128 bytes of w in each dtype. */
INLINE void add_group(int rows, int vectors, int64_t dtype, const char *x, int64_t x_stride, const char *w,
                      vf (*part)[VECTORS]) {
    vf whole[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) whole[v] = load((const float *)w + v * LANES);
#if defined(HAVE_DOT)
    if (dtype != TYPE_F32) {
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) part[r][v] = dot_of(part[r][v], x + r * x_stride, whole[v], dtype);
        return;
    }
#endif
    const int halves = dtype == TYPE_F32 ? 1 : 2; /* of each four bytes of w, taken one after the other */
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        vf taken[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vu bits = (vu)whole[v];
            if (dtype == TYPE_BF16)
                taken[v] = (vf)(half ? bits & 0xffff0000u : bits << 16);
            else if (dtype == TYPE_INT8)
                taken[v] = pairs_of(whole[v], half);
            else
                taken[v] = whole[v];
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const char *four = x + r * x_stride + half * 4;
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                part[r][v] = dtype == TYPE_INT8 ? add_pairs(part[r][v], four, taken[v])
                                                : fma_of(splat_at(four), taken[v], part[r][v]);
        }
    }
}

/* Add some groups of some rows times `vectors` vectors of a panel's outputs, from number `first` on, to sums. All but
 * the addresses and `groups` are constants where this is inlined; `lines` are asked for at `next` while a group
 * is multiplied. */
INLINE void panel_pass(int rows, int first, int vectors, int64_t dtype, int lines, const char *x, int64_t x_stride,
                       const char *w, const char *next, int64_t groups, vf (*sums)[VECTORS]) {
    const int64_t step = group_bytes(dtype), skip = first * LANES * 4;
    vf part[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) part[r][v] = sums[r][first + v];
    for (int64_t g = 0; g < groups; g++) {
#pragma GCC unroll 2
        for (int line = 0; line < lines; line++) expect(next + (g * lines + line) * 64);
        add_group(rows, vectors, dtype, x + g * step, x_stride, w + g * 128 + skip, part);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][first + v] = part[r][v];
}

/* The same for all outputs of a panel: in two passes where one would need more registers than there are. */
INLINE void panel_stretch(int rows, int64_t dtype, int lines, const char *x, int64_t x_stride, const char *w,
                          const char *next, int64_t groups, vf (*sums)[VECTORS]) {
    if (rows <= WHOLE_ROWS) {
        panel_pass(rows, 0, VECTORS, dtype, lines, x, x_stride, w, next, groups, sums);
    } else {
        const char *behind = next + groups * 64;
        panel_pass(rows, 0, VECTORS / 2, dtype, lines / 2, x, x_stride, w, next, groups, sums);
        panel_pass(rows, VECTORS / 2, VECTORS / 2, dtype, lines / 2, x, x_stride, w, behind, groups, sums);
    }
}

/* `rows` rows times one panel. */
INLINE void panel_rows(int rows, int64_t dtype, int compressed, const char *x, int64_t x_stride,
                       const panel_weights *w, const char *next, int64_t groups, vf (*sums)[VECTORS]) {
    const int64_t step = group_bytes(dtype);
    const int64_t most = compressed ? CHUNK_GROUPS : rows <= WHOLE_ROWS ? groups : STRETCH_GROUPS;
    char plain[CHUNK_PLAIN] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0);
    for (int64_t g = 0; g < groups; g += most) {
        const char *here = w->at + g * 128;
        if (compressed) {
            expand(w, g / CHUNK_GROUPS, next + g / CHUNK_GROUPS * CHUNK_BYTES, plain);
            here = plain;
        }
        panel_stretch(rows, dtype, compressed ? 0 : 2, x + g * step, x_stride, here, next + g * 128,
                      least(most, groups - g), sums);
    }
}

typedef void panel_function(const char *, int64_t, const panel_weights *, const char *, int64_t, vf (*)[VECTORS]);

#define PANEL_FUNCTION(name, type, compressed, rows)                                                            \
    static void name##_##rows(const char *x, int64_t stride, const panel_weights *w, const char *next,          \
                              int64_t groups, vf (*sums)[VECTORS]) {                                            \
        panel_rows(rows <= MOST_ROWS ? rows : 1, type, compressed, x, stride, w, next, groups, sums);           \
    }
#define PANEL_FUNCTIONS(name, type, compressed)                                                                 \
    PANEL_FUNCTION(name, type, compressed, 1) PANEL_FUNCTION(name, type, compressed, 2)                         \
    PANEL_FUNCTION(name, type, compressed, 3) PANEL_FUNCTION(name, type, compressed, 4)                         \
    PANEL_FUNCTION(name, type, compressed, 5) PANEL_FUNCTION(name, type, compressed, 6)                         \
    PANEL_FUNCTION(name, type, compressed, 7) PANEL_FUNCTION(name, type, compressed, 8)                         \
    PANEL_FUNCTION(name, type, compressed, 9) PANEL_FUNCTION(name, type, compressed, 10)                        \
    PANEL_FUNCTION(name, type, compressed, 11) PANEL_FUNCTION(name, type, compressed, 12)                       \
    static panel_function *const name[12 + 1] = {                                                               \
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
INLINE void finish(const athanor_op *op, int64_t row, int64_t panel, vf *sums) {
    const int64_t column = panel * PANEL;
    float ready[PANEL] __attribute__((aligned(64)));
    for (int v = 0; v < VECTORS; v++) {
        const int64_t place = column + v * LANES;
        if (op->dtype == TYPE_INT8) {
            vf whole = __builtin_convertvector((vi)sums[v], vf);
            sums[v] = (whole - load(op->sums + place)) * splat(op->in_scale[row]) * load(op->scale + place);
        }
        if (op->bias) sums[v] += load(op->bias + place);
    }
    if (op->mode == MODE_SWIGLU) {
        const int64_t inner = op->outputs / 2, first = panel * 16, count = least(16, inner - first);
        for (int v = 0; v < VECTORS / 2; v++) store(ready + v * LANES, silu_of(sums[v]) * sums[v + VECTORS / 2]);
        if (fed_type(op->dtype) == TYPE_BF16) {
            uint16_t *to = (uint16_t *)op->out + row * padded_inputs(inner, TYPE_BF16) + first;
            for (int64_t i = 0; i < count; i += LANES) {
                vh half = to_bf16(load(ready + i));
                memcpy(to + i, &half, 2 * least(LANES, count - i));
            }
        } else {
            const int64_t stride = op->dtype == TYPE_BF16 ? padded_inputs(inner, TYPE_BF16) : inner;
            memcpy((float *)op->out + row * stride + first, ready, count * 4);
        }
        return;
    }
    float *to = (float *)op->out + row * op->outputs + column;
    const int64_t count = least(PANEL, op->outputs - column);
    if (count == PANEL) {
        for (int v = 0; v < VECTORS; v++) {
            if (op->mode == MODE_ADD) sums[v] += load(to + v * LANES);
            store(to + v * LANES, sums[v]);
        }
        return;
    }
    for (int v = 0; v < VECTORS; v++) store(ready + v * LANES, sums[v]);
    for (int64_t i = 0; i < count; i++) to[i] = op->mode == MODE_ADD ? to[i] + ready[i] : ready[i];
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
            for (int64_t r = m; r < least(last, m + 32); r++) {
                vf own[VECTORS] = {load(sums + (r - m) * PANEL), load(sums + (r - m) * PANEL + LANES)};
                finish(op, r, panel, own);
            }
        }
        return;
    }
#endif
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t m = first + (last - first) * piece / pieces, end = first + (last - first) * (piece + 1) / pieces;
        vf sums[MOST_ROWS][VECTORS];
        const int64_t ahead = end - m <= WHOLE_ROWS ? AHEAD : STRETCH_GROUPS * 128;
        const char *next = start + (pieces == 1 ? ahead : piece + 1 == pieces ? of->panel_bytes : 0);
        panel_function *const *functions = w.palette ? panel_bf16c : of->functions;
        functions[end - m](x + m * of->x_stride, of->x_stride, &w, next, of->groups, sums);
        for (int64_t r = m; r < end; r++) finish(op, r, panel, sums[r - m]);
    }
}

void run_linear(const athanor_op *op, const context *at, int64_t rows) {
    int64_t padded = padded_inputs(op->inputs, op->dtype), item = item_bytes(op->dtype);
    shape of = {.groups = padded * item / 4, .x_stride = padded * fed_bytes(op->dtype),
                .panel_bytes = padded * item * PANEL};
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
