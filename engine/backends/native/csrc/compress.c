/* Makes the form that compressed.h reads; once a matrix, while a model is loaded. */
#include "compressed.h"

#define SAMPLED 4 /* one group of so many is looked at to choose the palette: others in the next chunk */

#define NONE 255   /* no place in the palette */

#if defined(HAVE_EXPAND)
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
#endif

/* Compress whole chunks of packed bfloat16 weights. `palette` has 16 bytes, `to` three quarters of the weights' bytes,
 * `starts` one entry a chunk and one more, `patches` room for `most`. Gives the number of patches, or -1 when there
 * would be more, or when this processor cannot undo it in passing. */
int64_t athanor_compress(const uint16_t *weights, int64_t chunks, uint8_t *palette, char *to, uint32_t *starts,
                         uint32_t *patches, int64_t most) {
#if defined(HAVE_EXPAND)
    uint8_t places[256];
    choose_palette(weights, chunks, palette);
    memset(places, NONE, sizeof places);
    for (int i = PALETTE - 1; i >= 0; i--) places[palette[i]] = (uint8_t)i;
    int64_t count = 0;
    for (int64_t c = 0; c < chunks; c++) {
        char *chunk = to + c * CHUNK_BYTES;
        starts[c] = (uint32_t)count;
        for (int64_t unit = 0; unit < CHUNK_WEIGHTS; unit += 128) {
            const uint16_t *from = weights + c * CHUNK_WEIGHTS + unit;
            uint8_t high[128];
            for (int i = 0; i < 128; i++) {
                /* Of a lane's sixteen bytes eight are of the first 32 weights, eight of the second. */
                const int place = (i & 64) | (i & 8) << 2 | (i & 48) >> 1 | (i & 7);
                chunk[unit + i] = (char)from[place];
                high[i] = places[from[place] >> 8];
                if (high[i] != NONE) continue;
                if (count == most) return -1;
                high[i] = 0;
                patches[count++] = (uint32_t)(unit + place) << 16 | from[place];
            }
            for (int i = 0; i < 64; i++) chunk[CHUNK_WEIGHTS + unit / 2 + i] = (char)(high[i] | high[i + 64] << 4);
        }
    }
    starts[chunks] = (uint32_t)count;
    return count;
#else
    (void)weights, (void)chunks, (void)palette, (void)to, (void)starts, (void)patches, (void)most;
    return -1;
#endif
}
