/* Causal attention over the paged cache: the block table is read in place, nothing is gathered or copied.
 *
 * One piece of work is a stretch of neighbouring tokens of one sequence (one token while decoding) and one key-value
 * head. Its context is walked in tiles of at most 16 positions that never cross a block, with a running maximum and
 * sum (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Tiles are cut by position alone, and a
 * masked position adds an exact zero, so a token's result does not depend on the stretch it is computed in.
 */
#include "athanor.h"
#include "simd.h"

#include <math.h>

typedef struct {
    int64_t rows;   /* query rows: tokens of the stretch times heads of the group */
    int64_t group;
    int64_t vectors; /* of 16 numbers in a padded head */
    float *queries, *sums, *keys, *values;
    float *largest, *totals;
} tile;

static void load_rows(float *to, const void *from, int64_t type, int64_t count, int64_t stride, int64_t dim,
                      int64_t padded) {
    int64_t whole = dim / LANES * LANES;
    for (int64_t p = 0; p < count; p++) {
        float *row = to + p * padded;
        if (type == TYPE_BF16) {
            const uint16_t *line = (const uint16_t *)from + p * stride;
            for (int64_t d = 0; d < whole; d += LANES) store(row + d, load_bf16(line + d));
            for (int64_t d = whole; d < dim; d++) row[d] = one_from_bf16(line[d]);
        } else {
            const float *line = (const float *)from + p * stride;
            memcpy(row, line, dim * sizeof(float));
        }
    }
}

/* Ask for the rows that the next tile will read: they lie far apart, in a block that no prefetcher of the machine can
 * guess, and behind page tables that are dear to walk in a virtual machine. */
static void expect_rows(const char *from, int64_t count, int64_t stride_bytes, int64_t bytes) {
    for (int64_t p = 0; p < count; p++)
        for (int64_t b = 0; b < bytes; b += 64) prefetch(from + p * stride_bytes + b);
}

/* 16 x 16 numbers, rows to columns: in four rounds pairs of rows at distance 1, 2, 4, 8 trade their halves. */
#define TRADE(low, high, distance, first, second)                           \
    do {                                                                    \
        vf kept = __builtin_shuffle(low, high, (vi)first);                  \
        high = __builtin_shuffle(low, high, (vi)second);                    \
        low = kept;                                                         \
    } while (0)

static void transpose(float *block, int64_t stride) {
    const vi first[4] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                         {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                         {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                         {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
    const vi second[4] = {{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
                          {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
                          {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
                          {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}};
    vf row[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) row[i] = load(block + i * stride);
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i >> round & 1)) TRADE(row[i], row[i + (1 << round)], round, first[round], second[round]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(block + i * stride, row[i]);
}

/* Take `count` positions, starting at `start`, into the running softmax of every query row. The keys lie transposed,
 * 16 numbers of a head at a time. `vectors` is a constant where this is inlined with one. */
INLINE void take_tile(const tile *t, int64_t vectors, int64_t start, int64_t count, const int64_t *positions) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t padded = vectors * LANES;
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t seen = least(count, positions[r / t->group] - start + 1);
        if (seen <= 0) continue;
        const float *query = t->queries + r * padded;
        vf parts[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (int64_t v = 0; v < vectors; v++)
#pragma GCC unroll 16
            for (int64_t d = 0; d < LANES; d++)
                parts[d % 4] = fma16(splat(query[v * LANES + d]), load(t->keys + d * padded + v * LANES), parts[d % 4]);
        vi hidden = lanes >= (int32_t)seen;
        vf score = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        score = (vf)(((vi)score & ~hidden) | ((vi)splat(-INFINITY) & hidden));
        float best = max16(score), before = t->largest[r];
        best = best > before ? best : before;
        vf weight = exp16(score - splat(best));
        float shrink = exp16(splat(before - best))[0];
        t->largest[r] = best;
        t->totals[r] = t->totals[r] * shrink + sum16(weight);
        float weights[LANES] __attribute__((aligned(64)));
        store(weights, weight);
        float *sum = t->sums + r * padded;
        for (int64_t v = 0; v < vectors; v++) {
            vf even = load(sum + v * LANES) * splat(shrink), odd = splat(0);
#pragma GCC unroll 8
            for (int64_t p = 0; p < LANES; p += 2) {
                even = fma16(splat(weights[p]), load(t->values + p * padded + v * LANES), even);
                odd = fma16(splat(weights[p + 1]), load(t->values + (p + 1) * padded + v * LANES), odd);
            }
            store(sum + v * LANES, even + odd);
        }
    }
}

static void take(const tile *t, int64_t start, int64_t count, const int64_t *positions) {
    switch (t->vectors) {
    case 1: take_tile(t, 1, start, count, positions); break;
    case 2: take_tile(t, 2, start, count, positions); break;
    case 4: take_tile(t, 4, start, count, positions); break;
    case 8: take_tile(t, 8, start, count, positions); break;
    default: take_tile(t, t->vectors, start, count, positions);
    }
}

static void attend_stretch(const athanor_op *op, const context *at, int64_t first, int64_t tokens, int64_t kv_head) {
    const athanor_step *step = at->step;
    int64_t dim = op->dim, group = op->heads / op->kv_heads, vectors = (dim + LANES - 1) / LANES;
    int64_t padded = vectors * LANES, type = at->program->kv_dtype, item = type == TYPE_BF16 ? 2 : 4;
    int64_t width = (op->heads + 2 * op->kv_heads) * dim, kv = op->kv_heads * dim;
    tile t = {.rows = tokens * group, .group = group, .vectors = vectors};
    t.queries = at->scratch;
    t.sums = t.queries + t.rows * padded;
    t.keys = t.sums + t.rows * padded;
    t.values = t.keys + ATTEND_POSITIONS * padded;
    t.largest = t.values + ATTEND_POSITIONS * padded;
    t.totals = t.largest + t.rows;
    memset(at->scratch, 0, (size_t)((char *)(t.totals + t.rows) - (char *)at->scratch));
    for (int64_t r = 0; r < t.rows; r++) {
        const float *query = (const float *)op->in + (first + r / group) * width + (kv_head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d++) t.queries[r * padded + d] = query[d] * (float)op->number;
        t.largest[r] = -INFINITY;
    }
    int64_t size = at->program->block_size, end = step->positions[first + tokens - 1] + 1;
    const int64_t *table = step->tables + step->rows[first] * step->table_width;
    int64_t next, place = (table[0] * size * kv + kv_head * dim) * item;
    for (int64_t start = 0; start < end; place = next) {
        int64_t count = least(least(ATTEND_POSITIONS, size - start % size), end - start), after = start + count;
        next = after < end ? ((table[after / size] * size + after % size) * kv + kv_head * dim) * item : place;
        expect_rows((const char *)op->keys + next, count, kv * item, dim * item);
        expect_rows((const char *)op->values + next, count, kv * item, dim * item);
        load_rows(t.keys, (const char *)op->keys + place, type, count, kv, dim, padded);
        load_rows(t.values, (const char *)op->values + place, type, count, kv, dim, padded);
        if (count < ATTEND_POSITIONS) {
            memset(t.keys + count * padded, 0, (ATTEND_POSITIONS - count) * padded * 4);
            memset(t.values + count * padded, 0, (ATTEND_POSITIONS - count) * padded * 4);
        }
        if (dim % LANES) /* the transposition has filled what lies behind a head with other positions' numbers */
            for (int64_t p = 0; p < count; p++) memset(t.keys + p * padded + dim, 0, (padded - dim) * 4);
        for (int64_t v = 0; v < vectors; v++) transpose(t.keys + v * LANES, padded);
        take(&t, start, count, step->positions + first);
        start += count;
    }
    int64_t stride = padded_inputs(op->heads * dim, op->dtype);
    if (op->dtype == TYPE_INT8) stride = op->heads * dim; /* quantised by the next operation */
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t place = (first + r / group) * stride + (kv_head * group + r % group) * dim;
        const float *sum = t.sums + r * padded;
        for (int64_t d = 0; d < dim; d++) {
            float value = sum[d] / t.totals[r];
            if (op->dtype == TYPE_BF16)
                ((uint16_t *)op->out)[place + d] = one_to_bf16(value);
            else
                ((float *)op->out)[place + d] = value;
        }
    }
}

void run_attend(const athanor_op *op, const context *at) {
    const athanor_step *step = at->step;
    int64_t group = op->heads / op->kv_heads, most = group < ATTEND_ROWS ? ATTEND_ROWS / group : 1;
    int64_t mine = atomic_fetch_add_explicit(at->counter, 1, memory_order_relaxed), number = 0;
    for (int64_t first = 0; first < step->tokens;) {
        int64_t tokens = 1;
        while (tokens < most && first + tokens < step->tokens && step->rows[first + tokens] == step->rows[first] &&
               step->positions[first + tokens] == step->positions[first] + tokens)
            tokens++;
        for (int64_t head = 0; head < op->kv_heads; head++, number++) {
            if (number != mine) continue;
            attend_stretch(op, at, first, tokens, head);
            mine = atomic_fetch_add_explicit(at->counter, 1, memory_order_relaxed);
        }
        first += tokens;
    }
}
