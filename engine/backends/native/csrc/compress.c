/* Makes the form that compressed.h reads; once a matrix, while a model is loaded. */
#include "compressed.h"

#define SAMPLED 4 /* one group of so many is looked at to choose the palette: others in the next chunk */

#if defined(__AVX512BW__)
/* The sixteen upper bytes that are most frequent in a sample of every chunk: padding lies in some of them only. */
static void choose_palette(const uint16_t *weights, int64_t chunks, uint8_t *palette) {
    int64_t seen[256] = {0};
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t group = c % SAMPLED; group < CHUNK_GROUPS; group += SAMPLED)
            for (int64_t i = 0; i < PANEL * 2; i++) seen[weights[c * CHUNK_WEIGHTS + group * PANEL * 2 + i] >> 8]++;
    for (int i = 0; i < PALETTE; i++) {
        int best = 0;
        for (int byte = 1; byte < 256; byte++)
            if (seen[byte] > seen[best]) best = byte;
        palette[i] = (uint8_t)best;
        seen[best] = -1;
    }
}

/* Which of 64 bytes are in the palette, and their indices. */
static __mmask64 look_up(__m512i bytes, const uint8_t *palette, __m512i *index) {
    __mmask64 found = 0;
    *index = _mm512_setzero_si512();
    for (int i = 0; i < PALETTE; i++) {
        __mmask64 same = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8((char)palette[i]));
        *index = _mm512_mask_mov_epi8(*index, same, _mm512_set1_epi8((char)i));
        found |= same;
    }
    return found;
}
#endif

/* Compress whole chunks of packed bfloat16 weights. `palette` has 16 bytes, `to` three quarters of the weights' bytes,
 * `starts` one entry a chunk and one more, `patches` room for `most`. Gives the number of patches, or -1 when there
 * would be more, or when this processor cannot undo it in passing. */
int64_t athanor_compress(const uint16_t *weights, int64_t chunks, uint8_t *palette, char *to, uint32_t *starts,
                         uint32_t *patches, int64_t most) {
#if defined(__AVX512BW__)
    choose_palette(weights, chunks, palette);
    int64_t count = 0;
    for (int64_t half = 0; half < chunks * CHUNK_WEIGHTS / 64; half++) {
        const int64_t in_chunk = half % (CHUNK_WEIGHTS / 64);
        const uint16_t *from = weights + half * 64;
        char *chunk = to + half / (CHUNK_WEIGHTS / 64) * CHUNK_BYTES;
        char *pairs = chunk + CHUNK_WEIGHTS + in_chunk / 2 * 64;
        if (in_chunk == 0) starts[half / (CHUNK_WEIGHTS / 64)] = (uint32_t)count;
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32), mask = _mm512_set1_epi16(255), index;
        __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        __mmask64 missing = ~look_up(high, palette, &index);
        _mm512_storeu_si512(chunk + in_chunk * 64, low);
        if (in_chunk % 2) index = _mm512_or_si512(_mm512_slli_epi16(index, 4), _mm512_loadu_si512(pairs));
        _mm512_storeu_si512(pairs, index);
        for (; missing; missing &= missing - 1) {
            int byte = __builtin_ctzll(missing), place = byte / 16 * 8 + byte % 8 + byte % 16 / 8 * 32;
            if (count == most) return -1;
            patches[count++] = (uint32_t)(in_chunk * 64 + place) << 16 | from[place];
        }
    }
    starts[chunks] = (uint32_t)count;
    return count;
#else
    (void)weights, (void)chunks, (void)palette, (void)to, (void)starts, (void)patches, (void)most;
    return -1;
#endif
}
