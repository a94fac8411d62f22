/* What is done to one row at a time: embedding, norm, rotation and the write into the cache, quantisation. */
#include "athanor.h"
#include "compressed.h"
#include "simd.h"

#include <math.h>

/* This thread's share of `count` rows. */
#define MY_ROWS(at, count, first, last)                                     \
    int64_t first = (count) * (at)->thread / (at)->threads,                 \
            last = (count) * ((at)->thread + 1) / (at)->threads

INLINE void put(void *row, int64_t dtype, int64_t index, float value) {
    if (dtype == TYPE_BF16)
        ((uint16_t *)row)[index] = one_to_bf16(value);
    else
        ((float *)row)[index] = value;
}

INLINE void put_vector(void *row, int64_t dtype, int64_t index, vf value) {
    if (dtype == TYPE_BF16)
        store_bf16((uint16_t *)row + index, value);
    else
        store((float *)row + index, value);
}

/* One row of numbers to unsigned bytes around 128 with a scale of its own: value = (byte - 128) * scale. A row with a
 * number that is not finite gets the scale NaN, and so makes nothing but NaN. */
static void quantise(const float *row, int64_t count, void *to, float *scale) {
    float largest = 0, broken = 0;
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(row[i]);
        largest = size > largest ? size : largest;
        broken += row[i] * 0.0f;
    }
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    *scale = largest / 127.0f + broken;
    for (int64_t i = 0; i < count; i++) {
        float value = row[i] * inverse;
        value = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value == value ? value : 0.0f;
        int32_t whole = (int32_t)nearbyintf(value) + 128;
#if defined(HAVE_DOT)
        ((uint8_t *)to)[i] = (uint8_t)whole;
#else
        ((int16_t *)to)[(i & ~3) | (i & 1) << 1 | (i & 2) >> 1] = (int16_t)whole;
#endif
    }
}

void run_quantise(const athanor_op *op, const context *at, int64_t rows) {
    MY_ROWS(at, rows, first, last);
    int64_t stride = padded_inputs(op->inputs, TYPE_INT8);
    for (int64_t i = first; i < last; i++)
        quantise((const float *)op->in + i * op->inputs, op->inputs,
                 (char *)op->out + i * stride * fed_bytes(TYPE_INT8), op->out_scale + i);
}

/* A row of a compressed table: its panel's chunks are expanded one after the other. */
static void embed_compressed(const athanor_op *op, int64_t token, float *row) {
    char plain[CHUNK_PLAIN] __attribute__((aligned(64)));
    int64_t width = op->outputs, chunks = padded_inputs(width, TYPE_BF16) / 2 / CHUNK_GROUPS, panel = token / PANEL;
    panel_weights of = {.at = (const char *)op->weight + panel * chunks * CHUNK_BYTES, .palette = op->palette,
                        .starts = op->starts + panel * chunks, .patches = op->patches};
    for (int64_t k = 0; k < width; k++) {
        if (k % (2 * CHUNK_GROUPS) == 0) expand(&of, k / (2 * CHUNK_GROUPS), of.at, plain);
        row[k] = one_from_bf16(((uint16_t *)plain)[k / 2 % CHUNK_GROUPS * PANEL * 2 + token % PANEL * 2 + k % 2]);
    }
}

/* x[i] = table[token]: a plain table, or (mode ADD) the packed weight of a head that shares its numbers. */
void run_embed(const athanor_op *op, const context *at) {
    MY_ROWS(at, at->step->tokens, first, last);
    int64_t width = op->outputs, padded = padded_inputs(width, op->dtype);
    int packed = op->mode == MODE_ADD;
    for (int64_t i = first; i < last; i++) {
        int64_t token = at->step->token_ids[i];
        float *row = (float *)op->out + i * width;
        if (op->palette) {
            embed_compressed(op, token, row);
        } else if (op->dtype == TYPE_BF16 && packed) {
            const uint16_t *from = (const uint16_t *)op->weight + token / PANEL * PANEL * padded + token % PANEL * 2;
            for (int64_t k = 0; k < width; k++) row[k] = one_from_bf16(from[k / 2 * PANEL * 2 + k % 2]);
        } else if (op->dtype == TYPE_BF16) {
            const uint16_t *from = (const uint16_t *)op->weight + token * width;
            for (int64_t k = 0; k < width; k++) row[k] = one_from_bf16(from[k]);
        } else if (packed) {
            const float *from = (const float *)op->weight + token / PANEL * PANEL * padded + token % PANEL;
            for (int64_t k = 0; k < width; k++) row[k] = from[k * PANEL];
        } else {
            memcpy(row, (const float *)op->weight + token * width, width * sizeof(float));
        }
    }
}

/* Cosines and sines of a step's positions, once for all layers. */
void run_angles(const athanor_op *op, const context *at) {
    MY_ROWS(at, at->step->tokens, first, last);
    int64_t half = op->dim / 2;
    const float *frequencies = op->weight;
    float scale = (float)op->number;
    for (int64_t i = first; i < last; i++) {
        float position = (float)at->step->positions[i];
        for (int64_t d = 0; d < half; d++) {
            float angle = position * frequencies[d];
            op->cosines[i * half + d] = cosf(angle) * scale;
            op->sines[i * half + d] = sinf(angle) * scale;
        }
    }
}

/* Root mean square norm of rows of x into the operand of the next matrix product. */
void run_norm(const athanor_op *op, const context *at, int64_t rows) {
    MY_ROWS(at, rows, first, last);
    int64_t width = op->inputs, whole = width / LANES * LANES;
    int64_t stride = padded_inputs(width, op->dtype);
    const float *gain = op->weight;
    for (int64_t i = first; i < last; i++) {
        const float *row = (const float *)op->in + (op->wanted ? at->step->wanted[i] : i) * width;
        vf parts = splat(0);
        for (int64_t k = 0; k < whole; k += LANES) parts = fma_of(load(row + k), load(row + k), parts);
        float total = sum_of(parts);
        for (int64_t k = whole; k < width; k++) total += row[k] * row[k];
        float factor = 1.0f / sqrtf(total / (float)width + (float)op->number);
        int64_t dtype = op->dtype == TYPE_INT8 ? TYPE_F32 : fed_type(op->dtype);
        char *fed = (char *)op->out + i * stride * fed_bytes(op->dtype);
        void *out = op->dtype == TYPE_INT8 ? (void *)at->scratch : fed;
        for (int64_t k = 0; k < whole; k += LANES)
            put_vector(out, dtype, k, load(row + k) * splat(factor) * load(gain + k));
        for (int64_t k = whole; k < width; k++) put(out, dtype, k, row[k] * factor * gain[k]);
        if (op->dtype == TYPE_INT8) quantise(out, width, fed, op->out_scale + i);
    }
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        head[d] = a * cosines[d] - b * sines[d];
        head[d + half] = b * cosines[d] + a * sines[d];
    }
}

/* A head to root mean square 1, times its gain. */
INLINE void normalise(float *head, const float *gain, int64_t dim, float eps) {
    int64_t whole = dim / LANES * LANES;
    vf parts = splat(0);
    for (int64_t d = 0; d < whole; d += LANES) parts = fma_of(load(head + d), load(head + d), parts);
    float total = sum_of(parts);
    for (int64_t d = whole; d < dim; d++) total += head[d] * head[d];
    float factor = 1.0f / sqrtf(total / (float)dim + eps);
    for (int64_t d = 0; d < dim; d++) head[d] = head[d] * factor * gain[d];
}

/* Normalise the heads of queries and keys where there are gains (one for queries, one for keys behind it), rotate them
 * in place; write keys and values to their slots. */
void run_rope(const athanor_op *op, const context *at) {
    MY_ROWS(at, at->step->tokens, first, last);
    int64_t dim = op->dim, half = dim / 2, width = (op->heads + 2 * op->kv_heads) * dim, kv = op->kv_heads * dim;
    int64_t type = at->program->kv_dtype;
    for (int64_t i = first; i < last; i++) {
        float *row = (float *)op->in + i * width, *keys = row + op->heads * dim, *values = keys + kv;
        const float *gain = op->weight;
        for (int64_t h = 0; gain && h < op->heads + op->kv_heads; h++)
            normalise(row + h * dim, h < op->heads ? gain : gain + dim, dim, (float)op->number);
        for (int64_t h = 0; op->cosines && h < op->heads + op->kv_heads; h++)
            rotate(row + h * dim, op->cosines + i * half, op->sines + i * half, half);
        int64_t place = at->step->slots[i] * kv;
        if (type == TYPE_BF16) {
            uint16_t *key_slot = (uint16_t *)op->keys + place, *value_slot = (uint16_t *)op->values + place;
            for (int64_t d = 0; d < kv; d++) key_slot[d] = one_to_bf16(keys[d]);
            for (int64_t d = 0; d < kv; d++) value_slot[d] = one_to_bf16(values[d]);
        } else {
            memcpy((float *)op->keys + place, keys, kv * sizeof(float));
            memcpy((float *)op->values + place, values, kv * sizeof(float));
        }
    }
}

/* The place of each row's maximum, the lowest among equals; -1 where the maximum is not finite or a number is NaN. */
void run_best(const athanor_op *op, const context *at, int64_t rows) {
    MY_ROWS(at, rows, first, last);
    int64_t width = op->inputs, whole = width / LANES * LANES;
    for (int64_t i = first; i < last; i++) {
        const float *row = (const float *)op->in + i * width;
        vf most = splat(-INFINITY), broken = splat(0);
        for (int64_t k = 0; k < whole; k += LANES) {
            vf value = load(row + k);
            most = larger_of(value, most);
            broken += value * splat(0);
        }
        float best = most_of(most), odd = sum_of(broken);
        for (int64_t k = whole; k < width; k++) {
            best = row[k] > best ? row[k] : best;
            odd += row[k] * 0.0f;
        }
        int64_t place = 0;
        while (place < width && row[place] != best) place++;
        /* A sum of zeros is NaN when a number was infinite too: look again, minus infinity is allowed. */
        int nan = 0;
        if (odd != odd)
            for (int64_t k = 0; k < width; k++) nan |= row[k] != row[k];
        ((int64_t *)op->out)[i] = nan || !isfinite(best) ? -1 : place;
    }
}
