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

/* Chunk `number` of a panel, as it was; meanwhile CHUNK_BYTES from `next` on are asked for, a few lines at a time. Sixteen
 * bytes of a register are a lane of their own to these instructions: that makes the order. Nothing is ever compressed
 * where they are missing. */
INLINE void expand(const panel_weights *of, int64_t number, const char *next, char *to) {
#if defined(__AVX512BW__)
    const char *chunk = of->at + number * CHUNK_BYTES;
    const __m512i palette = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)of->palette));
    const __m512i four = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < CHUNK_WEIGHTS / 128; i++) {
        for (int64_t line = 0; line < CHUNK_BYTES / 8; line += 64) expect(next + i * (CHUNK_BYTES / 8) + line);
        __m512i both = _mm512_loadu_si512(chunk + CHUNK_WEIGHTS + i * 64);
        __m512i high[2] = {_mm512_shuffle_epi8(palette, _mm512_and_si512(both, four)),
                           _mm512_shuffle_epi8(palette, _mm512_and_si512(_mm512_srli_epi16(both, 4), four))};
        for (int64_t half = 0; half < 2; half++) {
            __m512i low = _mm512_loadu_si512(chunk + i * 128 + half * 64);
            _mm512_store_si512(to + i * 256 + half * 128, _mm512_unpacklo_epi8(low, high[half]));
            _mm512_store_si512(to + i * 256 + half * 128 + 64, _mm512_unpackhi_epi8(low, high[half]));
        }
    }
    for (uint32_t i = of->starts[number]; i < of->starts[number + 1]; i++)
        ((uint16_t *)to)[of->patches[i] >> 16] = (uint16_t)of->patches[i];
#else
    (void)of, (void)number, (void)next, (void)to;
#endif
}

#endif
