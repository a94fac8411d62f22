/* Types shared by the kernels and by engine/backends/native/abi.py, which mirrors the structures field by field.
 *
 * A program is a list of operations whose weights and buffers are fixed when the model is loaded. A step says which
 * tokens go through it. All integers are 64 bits wide so that the layout needs no thought on either side.
 *
 * Every row of a step is computed by the same sequence of roundings whatever the other rows are and whichever thread
 * does it: sums run over inputs in one fixed order, attention walks the context in blocks of one fixed size.
 */
#ifndef ATHANOR_H
#define ATHANOR_H

#include <stdatomic.h>
#include <stdint.h>

#define ATHANOR_ABI 6
#define PANEL 32 /* outputs that lie side by side in a packed weight */

enum { KIND_EMBED, KIND_ANGLES, KIND_NORM, KIND_LINEAR, KIND_ROPE, KIND_ATTEND, KIND_QUANTISE, KIND_BEST,
       KIND_ADAPT, KIND_GATE };
enum { TYPE_F32, TYPE_BF16, TYPE_INT8 };
enum { MODE_STORE, MODE_ADD, MODE_SWIGLU };

typedef struct {
    int64_t kind, dtype, mode;
    int64_t wanted;             /* 1: works on the rows whose logits are asked for */
    int64_t inputs, outputs;    /* numbers of a row in and out; of SWIGLU outputs counts gate and up together */
    int64_t heads, kv_heads, dim;
    double number;              /* epsilon of a norm (of heads, too), scale of the scores, scale of the angles */
    const void *weight;         /* packed matrix, gain, inverse frequencies, embedding, or gains of heads or null */
    const float *scale;         /* of int8 weights, one an output, in packed order */
    const float *sums;          /* of int8 weights: 128 times the sum over inputs, packed order */
    const float *bias;          /* packed order, or null */
    const uint8_t *palette;     /* of compressed bfloat16 weights (compressed.h), or null */
    const uint32_t *starts, *patches;
    void *in, *out;
    float *in_scale, *out_scale; /* of int8 rows */
    void *keys, *values;        /* one layer of the cache: (slots, kv_heads, dim) */
    float *cosines, *sines;     /* (tokens, dim / 2) */
} athanor_op;

/* Rows of a step that have an adapter: `pieces` counts triples of an adapter, from 1 on, the place of its first row in
 * `order`, and a number of rows up to ADAPT_ROWS. */
typedef struct {
    int64_t count;
    const int64_t *pieces, *order;
} athanor_pieces;

/* One adapter's matrices for one map, in panels (adapt.c); null where it has none. */
typedef struct {
    int64_t rank;
    const void *down, *up;
} athanor_pair;

#define ADAPT_PANEL 16
#define ADAPT_ROWS 4
#define ADAPT_MOST_RANK 256

typedef struct {
    int64_t tokens, wanted_count;
    const int64_t *token_ids, *positions, *slots, *rows, *wanted;
    const int64_t *tables;      /* (rows, table_width): block tables */
    int64_t table_width;
    const int64_t *expected;    /* (rows, table_width): the stamp that a row expects of the block at that place */
    const int64_t *stamps;      /* (blocks): the stamp that each block has */
    athanor_pieces pieces, wanted_pieces; /* of the tokens, and of the rows whose logits are asked for */
} athanor_step;

enum { STEP_RUN, STEP_BROKEN, STEP_FOREIGN }; /* what athanor_run answers */

typedef struct {
    const athanor_op *ops;
    int64_t count;
    int64_t block_size;
    int64_t vocab_size;
    int64_t num_slots;          /* slots of the cache; every slot of a step is below */
    int64_t max_rows;           /* rows of the block tables */
    int64_t adapters;           /* adapters that the pairs of its operations are of */
    int64_t kv_dtype;
    int64_t solo_tokens;        /* up to so many tokens a step runs on the calling thread alone */
    void *counters;             /* count + 1 cache lines, zeroed */
} athanor_program;

/* What one thread knows while it runs an operation. */
typedef struct {
    const athanor_program *program;
    const athanor_step *step;
    int thread, threads;
    atomic_long *counter;       /* next piece of shared work */
    float *scratch;             /* of this thread alone */
} context;

#define SCRATCH_FLOATS (1 << 19)
#define ATTEND_ROWS 32          /* query rows of one tile at the least */
#define ATTEND_POSITIONS 16     /* context positions of one tile */
#define MAX_DIM 512
#define MAX_GROUP 64            /* query heads that share a key-value head */

/* Products of bfloat16 and of bytes in one instruction. */
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAVE_DOT 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define HAVE_DOT 1
#endif

/* What a product with weights of a dtype is fed. Where those instructions are missing, bfloat16 weights are widened as
 * they are read and meet float32; int8 weights meet numbers of 16 bits, of each four the first and third before the
 * second and fourth. */
static inline int64_t fed_type(int64_t dtype) {
#if defined(HAVE_DOT)
    return dtype;
#else
    return dtype == TYPE_BF16 ? TYPE_F32 : dtype;
#endif
}

static inline int64_t fed_bytes(int64_t dtype) {
#if defined(HAVE_DOT)
    return dtype == TYPE_BF16 ? 2 : dtype == TYPE_INT8 ? 1 : 4;
#else
    return dtype == TYPE_INT8 ? 2 : 4;
#endif
}

int64_t padded_inputs(int64_t inputs, int64_t dtype);
void run_linear(const athanor_op *op, const context *at, int64_t rows);
void run_attend(const athanor_op *op, const context *at);
void run_embed(const athanor_op *op, const context *at);
void run_angles(const athanor_op *op, const context *at);
void run_norm(const athanor_op *op, const context *at, int64_t rows);
void run_rope(const athanor_op *op, const context *at);
void run_best(const athanor_op *op, const context *at, int64_t rows);
void run_adapt(const athanor_op *op, const context *at);
void run_gate(const athanor_op *op, const context *at, int64_t rows);
void run_quantise(const athanor_op *op, const context *at, int64_t rows);
int survives(void (*trial)(void));
int probe_amx(void);

#endif
