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

#define SCORES (ATTEND_POSITIONS / LANES) /* vectors of scores of a tile */
#define CHAINS (SCORES > 2 ? 2 : 4)       /* sums that a score is made of, so that they need not wait for each other */

typedef struct {
    int64_t rows;   /* query rows: tokens of the stretch times heads of the group */
    int64_t group;
    int64_t vectors; /* of LANES numbers in a padded head */
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

/* LANES x LANES numbers, rows to columns: in each round pairs of rows at distance 1, 2, 4, 8 trade their halves. */
#if LANES == 16
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#elif LANES == 8
#define LOW_1 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_1 1, 9, 3, 11, 5, 13, 7, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#else
#define LOW_1 0, 4, 2, 6
#define HIGH_1 1, 5, 3, 7
#define LOW_2 0, 1, 4, 5
#define HIGH_2 2, 3, 6, 7
#endif

#define TRADE(distance)                                                                      \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & distance)) {          \
        vf low = __builtin_shufflevector(row[i], row[i + distance], LOW_##distance);         \
        row[i + distance] = __builtin_shufflevector(row[i], row[i + distance], HIGH_##distance); \
        row[i] = low;                                                                        \
    }

static void transpose(float *block, int64_t stride) {
    vf row[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) row[i] = load(block + i * stride);
    TRADE(1)
    TRADE(2)
#if LANES >= 8
    TRADE(4)
#endif
#if LANES >= 16
    TRADE(8)
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(block + i * stride, row[i]);
}

/* Scores of one query row for the positions of a tile. Of its keys each square of LANES positions and LANES numbers of a
 * head lies transposed: row d of the square holds number d of all its positions. */
INLINE void score(const float *query, const tile *t, int64_t vectors, vf *scores) {
    const int64_t padded = vectors * LANES;
    vf parts[SCORES][CHAINS];
#pragma GCC unroll 4
    for (int s = 0; s < SCORES; s++)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++) parts[s][c] = splat(0);
    for (int64_t v = 0; v < vectors; v++)
#pragma GCC unroll 16
        for (int d = 0; d < LANES; d++) {
            const vf number = splat(query[v * LANES + d]);
#pragma GCC unroll 4
            for (int s = 0; s < SCORES; s++) {
                const float *keys = t->keys + (s * LANES + d) * padded + v * LANES;
                parts[s][d % CHAINS] = fma_of(number, load(keys), parts[s][d % CHAINS]);
            }
        }
#pragma GCC unroll 4
    for (int s = 0; s < SCORES; s++)
        scores[s] = CHAINS == 4 ? (parts[s][0] + parts[s][1]) + (parts[s][2] + parts[s][3]) : parts[s][0] + parts[s][1];
}

/* Take `count` positions, starting at `start`, into the running softmax of every query row. `vectors` is a constant where
 * this is inlined with one. */
INLINE void take_tile(const tile *t, int64_t vectors, int64_t start, int64_t count, const int64_t *positions) {
    int64_t padded = vectors * LANES;
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t seen = least(count, positions[r / t->group] - start + 1);
        if (seen <= 0) continue;
        vf scores[SCORES];
        score(t->queries + r * padded, t, vectors, scores);
        vf top = splat(-INFINITY);
#pragma GCC unroll 4
        for (int s = 0; s < SCORES; s++) {
            scores[s] = choose(lanes >= (int32_t)(seen - s * LANES), splat(-INFINITY), scores[s]);
            top = larger_of(scores[s], top);
        }
        float best = most_of(top), before = t->largest[r];
        best = best > before ? best : before;
        float weights[ATTEND_POSITIONS] __attribute__((aligned(64)));
        vf total = splat(0);
#pragma GCC unroll 4
        for (int s = 0; s < SCORES; s++) {
            vf weight = exp_of(scores[s] - splat(best));
            store(weights + s * LANES, weight);
            total += weight;
        }
        float shrink = exp_of(splat(before - best))[0];
        t->largest[r] = best;
        t->totals[r] = t->totals[r] * shrink + sum_of(total);
        float *sum = t->sums + r * padded;
        for (int64_t v = 0; v < vectors; v++) {
            vf even = load(sum + v * LANES) * splat(shrink), odd = splat(0);
#pragma GCC unroll 8
            for (int64_t p = 0; p < ATTEND_POSITIONS; p += 2) {
                even = fma_of(splat(weights[p]), load(t->values + p * padded + v * LANES), even);
                odd = fma_of(splat(weights[p + 1]), load(t->values + (p + 1) * padded + v * LANES), odd);
            }
            store(sum + v * LANES, even + odd);
        }
    }
}

static void take(const tile *t, int64_t start, int64_t count, const int64_t *positions) {
    switch (t->vectors) {
    case 16 / LANES: take_tile(t, 16 / LANES, start, count, positions); break;
    case 32 / LANES: take_tile(t, 32 / LANES, start, count, positions); break;
    case 64 / LANES: take_tile(t, 64 / LANES, start, count, positions); break;
    case 128 / LANES: take_tile(t, 128 / LANES, start, count, positions); break;
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
        for (int64_t s = 0; s < SCORES; s++)
            for (int64_t v = 0; v < vectors; v++) transpose(t.keys + s * LANES * padded + v * LANES, padded);
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
            if (fed_type(op->dtype) == TYPE_BF16)
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
