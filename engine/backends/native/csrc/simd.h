/* Vectors of floats as wide as a register of the instructions that the compiler may use.
 *
 * A vector wider than a register lives in memory: every operation then loads and stores it. So LANES follows the build,
 * and kernels say how many vectors they need from it.
 */
#ifndef ATHANOR_SIMD_H
#define ATHANOR_SIMD_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef uint16_t vus __attribute__((vector_size(4 * LANES)));

INLINE vf load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vf value) { memcpy(to, &value, sizeof value); }

/* Not `(vf){0} + value`: an addition of zero is not nothing, it changes the sign of a zero. */
INLINE vf splat(float value) {
#if LANES == 16
    return (vf)_mm512_set1_ps(value);
#elif LANES == 8
    return (vf)_mm256_set1_ps(value);
#else
    return (vf){value, value, value, value};
#endif
}

/* a * b + c with one rounding where the machine can. */
INLINE vf fma_of(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float sum_of(vf v) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[LANES];
    store(parts, v);
    for (int distance = LANES / 2; distance; distance /= 2)
        for (int i = 0; i < distance; i++) parts[i] += parts[i + distance];
    return parts[0];
#endif
}

INLINE float most_of(vf v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float parts[LANES];
    store(parts, v);
    for (int distance = LANES / 2; distance; distance /= 2)
        for (int i = 0; i < distance; i++) parts[i] = parts[i + distance] > parts[i] ? parts[i + distance] : parts[i];
    return parts[0];
#endif
}

/* The numbers of `yes` where `mask` is all ones, those of `no` where it is zero. */
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

INLINE vf larger_of(vf a, vf b) { return choose(a > b, a, b); }

INLINE vf load_bf16(const uint16_t *from) {
    vh half;
    memcpy(&half, from, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

/* Round to nearest even; a NaN stays one. */
INLINE vh to_bf16(vf value) {
    vu bits = (vu)value;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vi is_nan = value != value;
    return __builtin_convertvector((rounded & ~(vu)is_nan) | (nan & (vu)is_nan), vh);
}

INLINE void store_bf16(uint16_t *to, vf value) {
    vh half = to_bf16(value);
    memcpy(to, &half, sizeof half);
}

INLINE float one_from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t one_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* exp to about one unit in the last place: 2^n * p(r), r = x - n ln 2 (Cephes' polynomial degree, own coefficients from
 * the Taylor series up to r^7 / 7!, enough for |r| <= 0.35). Below -87 exactly 0; above 88 cut, so never infinite;
 * NaN stays NaN. */
INLINE vf exp_of(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    vf cut = choose(x > high, high, x);
    vf n = fma_of(cut, splat(1.44269504f), splat(12582912.0f)); /* 1.5 * 2^23: rounds to an integer */
    vi whole = (vi)n - 0x4b400000;
    n = n - splat(12582912.0f);
    vf r = fma_of(n, splat(-0.693145752f), cut);
    r = fma_of(n, splat(-1.42860677e-6f), r);
    vf p = splat(1.0f / 5040);
    p = fma_of(p, r, splat(1.0f / 720));
    p = fma_of(p, r, splat(1.0f / 120));
    p = fma_of(p, r, splat(1.0f / 24));
    p = fma_of(p, r, splat(1.0f / 6));
    p = fma_of(p, r, splat(0.5f));
    p = fma_of(p, r, splat(1.0f));
    p = fma_of(p, r, splat(1.0f));
    vi result = (vi)p + (whole << 23);
    vi broken = x != x;
    return (vf)((result & ~(x < low) & ~broken) | ((vi)x & broken));
}

INLINE vf silu_of(vf x) { return x / (splat(1.0f) + exp_of(-x)); }

#if defined(__AMX_TILE__)
/* All eight tiles with 16 rows of 64 bytes. The compiler's own intrinsics claim to read eight bytes of the configuration
 * and no memory at all when a tile is loaded; the clobber here makes it write everything before. */
INLINE void configure_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t column_bytes[16];
        uint8_t rows[16];
    } wanted = {.palette = 1};
    for (int i = 0; i < 8; i++) wanted.column_bytes[i] = 64, wanted.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(wanted) : "memory");
}
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Into the first-level cache, for what is used within some hundred cycles; into the second for what comes later, where
 * more lines may be on their way at once. */
INLINE void prefetch(const void *where) { __builtin_prefetch(where, 0, 3); }
INLINE void expect(const void *where) { __builtin_prefetch(where, 0, 2); }

#endif
