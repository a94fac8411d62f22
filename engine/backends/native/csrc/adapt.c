/* Adapters: y += (x A) B for those rows of a step that have one, and the activation of a gated product that waited for
 * them.
 *
 * A and B are packed in panels of 16 columns, padded with zeros: [panel][row of the matrix][16]. The rows of a step are
 * given in pieces, each of one adapter. A piece is one thread's: the numbers of a row are one chain of sums in the order
 * of the inputs and one in the order of the ranks, whatever rows are beside it.
 */
#include "athanor.h"
#include "simd.h"

#define WIDTH ADAPT_PANEL
#define PARTS (WIDTH / LANES)

INLINE vf number_at(const void *from, int64_t index, int64_t type) {
    return type == TYPE_BF16 ? load_bf16((const uint16_t *)from + index) : load((const float *)from + index);
}

/* One panel of x A: `rows` rows, `inputs` numbers each, of which `fed` is the type. */
INLINE void narrow(int rows, int64_t type, int64_t fed, const char *const *x, int64_t inputs, const void *panel,
                   float (*out)[ADAPT_MOST_RANK], int64_t column) {
    vf sums[ADAPT_ROWS][PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = splat(0);
    for (int64_t k = 0; k < inputs; k++) {
        vf w[PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) w[p] = number_at(panel, k * WIDTH + p * LANES, type);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float value = fed == TYPE_BF16 ? one_from_bf16(((const uint16_t *)x[r])[k]) : ((const float *)x[r])[k];
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) sums[r][p] = fma_of(splat(value), w[p], sums[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(out[r] + column + p * LANES, sums[r][p]);
}

/* One panel of t B, added to 16 outputs of each row. */
INLINE void widen(int rows, int64_t type, float (*t)[ADAPT_MOST_RANK], int64_t rank, const void *panel, float *const *y,
                  int64_t count) {
    vf sums[ADAPT_ROWS][PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = splat(0);
    for (int64_t k = 0; k < rank; k++) {
        vf w[PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) w[p] = number_at(panel, k * WIDTH + p * LANES, type);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) sums[r][p] = fma_of(splat(t[r][k]), w[p], sums[r][p]);
    }
    if (count == WIDTH) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) store(y[r] + p * LANES, load(y[r] + p * LANES) + sums[r][p]);
        return;
    }
    for (int r = 0; r < rows; r++) {
        float ready[WIDTH];
        for (int p = 0; p < PARTS; p++) store(ready + p * LANES, sums[r][p]);
        for (int64_t i = 0; i < count; i++) y[r][i] += ready[i];
    }
}

INLINE void piece_of(int rows, int64_t type, int64_t fed, const athanor_op *op, const athanor_pair *pair,
                     const athanor_step *step, const int64_t *order) {
    float t[ADAPT_ROWS][ADAPT_MOST_RANK] __attribute__((aligned(64)));
    const int64_t item = type == TYPE_BF16 ? 2 : 4, padded = (pair->rank + WIDTH - 1) / WIDTH * WIDTH;
    const char *x[ADAPT_ROWS];
    float *y[ADAPT_ROWS];
    for (int r = 0; r < rows; r++) y[r] = (float *)op->out + order[r] * op->outputs;
    if (op->mode == MODE_ADD) { /* an embedding: the rows of A are gathered, in panels as if they were all */
        for (int r = 0; r < rows; r++)
            for (int64_t c = 0; c < padded; c += LANES)
                store(t[r] + c, number_at(pair->down, c / WIDTH * WIDTH * op->inputs + step->token_ids[order[r]] * WIDTH +
                                                         c % WIDTH, type));
    } else {
        const int64_t stride = padded_inputs(op->inputs, op->dtype) * fed_bytes(op->dtype);
        for (int r = 0; r < rows; r++) x[r] = (const char *)op->in + order[r] * stride;
        for (int64_t c = 0; c < padded; c += WIDTH)
            narrow(rows, type, fed, x, op->inputs, (const char *)pair->down + c * op->inputs * item, t, c);
    }
    for (int64_t c = 0; c < op->heads; c += WIDTH) {
        float *to[ADAPT_ROWS];
        int64_t place = c / op->kv_heads * 2 * op->kv_heads + c % op->kv_heads + op->dim;
        for (int r = 0; r < rows; r++) to[r] = y[r] + place;
        widen(rows, type, t, pair->rank, (const char *)pair->up + c * pair->rank * item, to, least(WIDTH, op->heads - c));
    }
}

#define ROWS(rows, type, fed) piece_of(rows, type, fed, op, pair, at->step, order)
#define EACH(rows)                                                        \
    if (op->dtype != TYPE_BF16) ROWS(rows, TYPE_F32, TYPE_F32);           \
    else if (fed_type(TYPE_BF16) == TYPE_BF16) ROWS(rows, TYPE_BF16, TYPE_BF16); \
    else ROWS(rows, TYPE_BF16, TYPE_F32);                                 \
    break;

/* `weight` has a pair for each adapter from number 1 on; `heads` outputs begin at `dim`, in stretches of `kv_heads`, each
 * of which is followed by as many of the other half of a gated map. */
void run_adapt(const athanor_op *op, const context *at) {
    const athanor_pieces *pieces = op->wanted ? &at->step->wanted_pieces : &at->step->pieces;
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(at->counter, 1, memory_order_relaxed);
        if (piece >= pieces->count) break;
        const int64_t *one = pieces->pieces + 3 * piece, *order = pieces->order + one[1];
        const athanor_pair *pair = (const athanor_pair *)op->weight + one[0] - 1;
        if (!pair->down) continue;
        switch (one[2]) {
        case 1: EACH(1)
        case 2: EACH(2)
        case 3: EACH(3)
        default: EACH(4)
        }
    }
}

/* silu(gate) * up of rows in which 16 numbers of either half take turns: what a product in mode SWIGLU does at once. */
void run_gate(const athanor_op *op, const context *at, int64_t rows) {
    const int64_t first = rows * at->thread / at->threads, last = rows * (at->thread + 1) / at->threads;
    const int64_t inner = op->outputs, wide = op->inputs;
    for (int64_t i = first; i < last; i++) {
        const float *row = (const float *)op->in + i * wide;
        for (int64_t n = 0; n < inner; n += 16) {
            float ready[16] __attribute__((aligned(64)));
            const float *gate = row + n * 2;
            const int64_t count = least(16, inner - n);
            for (int v = 0; v < 16; v += LANES) store(ready + v, silu_of(load(gate + v)) * load(gate + 16 + v));
            if (fed_type(op->dtype) == TYPE_BF16) {
                uint16_t *to = (uint16_t *)op->out + i * padded_inputs(inner, TYPE_BF16) + n;
                for (int64_t k = 0; k < count; k += LANES) {
                    vh half = to_bf16(load(ready + k));
                    memcpy(to + k, &half, 2 * least(LANES, count - k));
                }
            } else {
                const int64_t stride = op->dtype == TYPE_BF16 ? padded_inputs(inner, TYPE_BF16) : inner;
                memcpy((float *)op->out + i * stride + n, ready, count * 4);
            }
        }
    }
}
