/* Sixteen floats at a time, in the compiler's own vector types: any machine, best where AVX-512 is. */
#ifndef ATHANOR_SIMD_H
#define ATHANOR_SIMD_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

INLINE vf load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vf value) { memcpy(to, &value, sizeof value); }

INLINE vf splat(float value) { return (vf){0} + value; }

/* a * b + c with one rounding where the machine can. */
INLINE vf fma16(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union {
        vf whole;
        __m256 half[2];
    } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#else
    return a * b + c;
#endif
}

INLINE float sum16(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

INLINE float max16(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

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
INLINE vf exp16(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    vf cut = (vf)(((vi)x & ~(x > high)) | ((vi)high & (x > high)));
    vf n = fma16(cut, splat(1.44269504f), splat(12582912.0f)); /* 1.5 * 2^23: rounds to an integer */
    vi whole = (vi)n - 0x4b400000;
    n = n - splat(12582912.0f);
    vf r = fma16(n, splat(-0.693145752f), cut);
    r = fma16(n, splat(-1.42860677e-6f), r);
    vf p = splat(1.0f / 5040);
    p = fma16(p, r, splat(1.0f / 720));
    p = fma16(p, r, splat(1.0f / 120));
    p = fma16(p, r, splat(1.0f / 24));
    p = fma16(p, r, splat(1.0f / 6));
    p = fma16(p, r, splat(0.5f));
    p = fma16(p, r, splat(1.0f));
    p = fma16(p, r, splat(1.0f));
    vi result = (vi)p + (whole << 23);
    vi broken = x != x;
    return (vf)((result & ~(x < low) & ~broken) | ((vi)x & broken));
}

INLINE vf silu16(vf x) { return x / (splat(1.0f) + exp16(-x)); }

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
