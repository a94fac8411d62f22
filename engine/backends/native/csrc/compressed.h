/* bfloat16 weights without loss in three quarters of their bytes.
 *
 * The upper byte of a trained weight, sign and seven bits of exponent, takes few values. The sixteen most frequent of a
 * matrix make its palette; a weight is then its lower byte and four bits of palette. The few that do not fit are patched
 * in behind. (Zhang et al., DFloat11, arXiv 2504.11651, note how little the exponents say; a fixed width costs 12 bits
 * instead of their 11 and is undone by one shuffle.)
 *
 * The unit is a chunk: the 1,024 weights of 16 groups of one panel. First come 1,024 lower bytes, then 512 bytes of two
 * palette indices each, in the order in which the byte shuffles below put them together.
 */
#ifndef ATHANOR_COMPRESSED_H
#define ATHANOR_COMPRESSED_H

#include "athanor.h"
#include "simd.h"

#define CHUNK_GROUPS 16
#define CHUNK_WEIGHTS (CHUNK_GROUPS * PANEL * 2)
#define CHUNK_PLAIN (CHUNK_WEIGHTS * 2)
#define CHUNK_BYTES (CHUNK_WEIGHTS + CHUNK_WEIGHTS / 2)
#define PALETTE 16

/* One panel's weights. Without a palette they lie as they are. */
typedef struct {
    const char *at;
    const uint8_t *palette;
    const uint32_t *starts;  /* of this panel's first chunk: where its patches begin */
    const uint32_t *patches; /* place in the chunk << 16 | weight */
} panel_weights;

#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__aarch64__)
#define HAVE_EXPAND 1
#endif

#if defined(__AVX2__) && !defined(__AVX512BW__)
/* Lower and upper bytes of two lanes, put together: half of what `expand` does at once. */
INLINE void join(const char *low, __m256i high, char *to) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)low);
    _mm256_store_si256((__m256i *)to, _mm256_unpacklo_epi8(bytes, high));
    _mm256_store_si256((__m256i *)(to + 64), _mm256_unpackhi_epi8(bytes, high));
}
#endif

/* Chunk `number` of a panel, as it was; meanwhile CHUNK_BYTES from `next` on are asked for, a few lines at a time. Sixteen
 * bytes of a register are a lane of their own to these instructions: that makes the order. Nothing is ever compressed
 * where they are missing. */
INLINE void expand(const panel_weights *of, int64_t number, const char *next, char *to) {
#if defined(HAVE_EXPAND)
    const char *chunk = of->at + number * CHUNK_BYTES;
#if defined(__AVX512BW__)
    const __m512i palette = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)of->palette));
    const __m512i four = _mm512_set1_epi8(15);
#elif defined(__AVX2__)
    const __m256i palette = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)of->palette));
    const __m256i four = _mm256_set1_epi8(15);
#else
    const uint8x16_t palette = vld1q_u8(of->palette), four = vdupq_n_u8(15);
#endif
    for (int64_t i = 0; i < CHUNK_WEIGHTS / 128; i++) {
        const char *pairs = chunk + CHUNK_WEIGHTS + i * 64, *low = chunk + i * 128;
        char *out = to + i * 256;
        for (int64_t line = 0; line < CHUNK_BYTES / 8; line += 64) expect(next + i * (CHUNK_BYTES / 8) + line);
#if defined(__AVX512BW__)
        __m512i both = _mm512_loadu_si512(pairs);
        __m512i high[2] = {_mm512_shuffle_epi8(palette, _mm512_and_si512(both, four)),
                           _mm512_shuffle_epi8(palette, _mm512_and_si512(_mm512_srli_epi16(both, 4), four))};
        for (int64_t half = 0; half < 2; half++) {
            __m512i bytes = _mm512_loadu_si512(low + half * 64);
            _mm512_store_si512(out + half * 128, _mm512_unpacklo_epi8(bytes, high[half]));
            _mm512_store_si512(out + half * 128 + 64, _mm512_unpackhi_epi8(bytes, high[half]));
        }
#elif defined(__AVX2__)
        for (int64_t place = 0; place < 64; place += 32) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(pairs + place));
            join(low + place, _mm256_shuffle_epi8(palette, _mm256_and_si256(both, four)), out + place);
            join(low + 64 + place, _mm256_shuffle_epi8(palette, _mm256_and_si256(_mm256_srli_epi16(both, 4), four)),
                 out + 128 + place);
        }
#else
        for (int64_t place = 0; place < 64; place += 16) {
            uint8x16_t both = vld1q_u8((const uint8_t *)pairs + place);
            uint8x16_t high[2] = {vqtbl1q_u8(palette, vandq_u8(both, four)), vqtbl1q_u8(palette, vshrq_n_u8(both, 4))};
            for (int64_t half = 0; half < 2; half++) {
                uint8x16_t bytes = vld1q_u8((const uint8_t *)low + half * 64 + place);
                vst1q_u8((uint8_t *)out + half * 128 + place, vzip1q_u8(bytes, high[half]));
                vst1q_u8((uint8_t *)out + half * 128 + 64 + place, vzip2q_u8(bytes, high[half]));
            }
        }
#endif
    }
    for (uint32_t i = of->starts[number]; i < of->starts[number + 1]; i++)
        ((uint16_t *)to)[of->patches[i] >> 16] = (uint16_t)of->patches[i];
#else
    (void)of, (void)number, (void)next, (void)to;
#endif
}

#endif
