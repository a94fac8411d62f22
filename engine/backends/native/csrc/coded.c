/* bfloat16 weights with coded exponents, as files have them: docs/compressed-weights.md describes every byte.
 *
 * A chunk of 4,096 weights is read or written at a time: its codes or its exponents as they are, its escapes, then one
 * byte of sign and mantissa for each weight. Files are untrusted: every size in them is compared with what was given
 * before it is used, no read goes past the chunk's own bytes and no write past its own weights.
 */
#include <stdint.h>
#include <string.h>

#define CODED_CHUNK 4096  /* weights */
#define CODED_ENTRY 4     /* bytes of a chunk in the table: bytes of its codes u16, escapes u16 */
#define CODED_ESCAPE 3    /* bytes of an escape: place u16, exponent u8 */
#define CODED_PALETTE 16
#define CODED_BITS 11     /* the longest code */
#define CODED_WINDOWS (1 << CODED_BITS)
#define CODED_AT_ONCE 6   /* exponents of one look-up at the most */
#define CODED_LOOKUPS 5   /* of one load: 5 * 11 of at least 57 bits */

enum { CODED_FINE, CODED_BAD_CODE, CODED_BAD_TABLE, CODED_BAD_CHUNK };

/* What 11 bits mean: six exponents, from the lowest byte on, their number, and the bits that they take. */
typedef struct {
    uint64_t several[CODED_WINDOWS];
    uint8_t exponent[CODED_WINDOWS], bits[CODED_WINDOWS]; /* of the first one alone */
} coded_windows;

static uint16_t read_u16(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

static void write_u16(uint8_t *to, int64_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

/* The code assigns windows in order, so lengths that fill them exactly are a complete code, and no others are. */
static int fill_windows(const uint8_t *exponents, const uint8_t *lengths, int64_t entries, coded_windows *to) {
    int64_t next = 0;
    if (entries < 2 || entries > CODED_PALETTE) return CODED_BAD_CODE;
    for (int64_t i = 0; i < entries; i++) {
        if (lengths[i] < 1 || lengths[i] > CODED_BITS || (i && lengths[i] < lengths[i - 1])) return CODED_BAD_CODE;
        const int64_t count = CODED_WINDOWS >> lengths[i];
        if (next + count > CODED_WINDOWS) return CODED_BAD_CODE;
        memset(to->exponent + next, exponents[i], (size_t)count);
        memset(to->bits + next, lengths[i], (size_t)count);
        next += count;
    }
    if (next != CODED_WINDOWS) return CODED_BAD_CODE;
    for (int64_t window = 0; window < CODED_WINDOWS; window++) {
        uint64_t found = 0, count = 0, used = 0;
        while (count < CODED_AT_ONCE) {
            const int64_t rest = window << used & (CODED_WINDOWS - 1);
            if (used + to->bits[rest] > CODED_BITS) break;
            found |= (uint64_t)to->exponent[rest] << 8 * count++;
            used += to->bits[rest];
        }
        to->several[window] = found | count << 48 | used << 56;
    }
    return CODED_FINE;
}

static uint64_t next_bits(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return __builtin_bswap64(value);
}

/* Exponents of `count` weights out of `size` bytes of codes; `room` bytes may be read from `from` on. */
static int read_codes(const coded_windows *windows, const uint8_t *from, int64_t size, int64_t room, int64_t count,
                      uint8_t *to) {
    int64_t bit = 0, done = 0;
    while (done + CODED_LOOKUPS * CODED_AT_ONCE <= count && (bit >> 3) + 8 <= room) {
        uint64_t bits = next_bits(from + (bit >> 3)) << (bit & 7);
        for (int i = 0; i < CODED_LOOKUPS; i++) {
            const uint64_t found = windows->several[bits >> (64 - CODED_BITS)];
            memcpy(to + done, &found, sizeof found); /* two bytes too many, which the next ones cover: see `exponents` */
            done += found >> 48 & 255;
            bits <<= found >> 56;
            bit += (int64_t)(found >> 56);
        }
    }
    for (; done < count; done++) {
        uint64_t bits = 0;
        for (int64_t i = 0; i < 3; i++) bits = bits << 8 | ((bit >> 3) + i < size ? from[(bit >> 3) + i] : 0);
        const uint64_t window = bits << (40 + (bit & 7)) >> (64 - CODED_BITS);
        to[done] = windows->exponent[window];
        bit += windows->bits[window];
    }
    return (bit + 7) >> 3 == size ? CODED_FINE : CODED_BAD_CHUNK;
}

static int read_chunk(const coded_windows *windows, const uint8_t *entry, const uint8_t *from, int64_t count,
                      uint16_t *to) {
    uint8_t exponents[CODED_CHUNK + 8];
    const int64_t size = read_u16(entry), escapes = read_u16(entry + 2);
    const uint8_t *escape = from + size, *rest = escape + escapes * CODED_ESCAPE;
    if (size == count) memcpy(exponents, from, (size_t)count);
    else if (read_codes(windows, from, size, size + escapes * CODED_ESCAPE + count, count, exponents) != CODED_FINE)
        return CODED_BAD_CHUNK;
    for (int64_t i = 0, before = -1; i < escapes; i++, escape += CODED_ESCAPE) {
        const int64_t place = read_u16(escape);
        if (place <= before || place >= count) return CODED_BAD_CHUNK;
        exponents[place] = escape[2];
        before = place;
    }
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint16_t)((rest[i] & 0x80) << 8 | exponents[i] << 7 | (rest[i] & 0x7f));
    return CODED_FINE;
}

static int64_t weights_of_chunk(int64_t chunk, int64_t weights) {
    const int64_t left = weights - chunk * CODED_CHUNK;
    return left < CODED_CHUNK ? left : CODED_CHUNK;
}

/* Decode whole chunks. `table` has an entry for each; `data` has their bytes and no others; `to` has room for `weights`,
 * of which the last chunk may lack some. Gives 0, or what is wrong. */
int64_t athanor_decode_weights(const uint8_t *exponents, const uint8_t *lengths, int64_t entries, const uint8_t *table,
                               const uint8_t *data, int64_t data_bytes, uint16_t *to, int64_t weights) {
    coded_windows windows;
    const int64_t chunks = (weights + CODED_CHUNK - 1) / CODED_CHUNK;
    int64_t at = 0;
    if (fill_windows(exponents, lengths, entries, &windows) != CODED_FINE) return CODED_BAD_CODE;
    for (int64_t c = 0; c < chunks; c++) {
        const uint8_t *entry = table + c * CODED_ENTRY;
        const int64_t count = weights_of_chunk(c, weights);
        const int64_t coded = read_u16(entry) + (int64_t)read_u16(entry + 2) * CODED_ESCAPE;
        if (!read_u16(entry) || coded > count || coded + count > data_bytes - at) return CODED_BAD_TABLE;
        if (read_chunk(&windows, entry, data + at, count, to + c * CODED_CHUNK) != CODED_FINE) return CODED_BAD_CHUNK;
        at += coded + count;
    }
    return at == data_bytes ? CODED_FINE : CODED_BAD_TABLE;
}

/* Add how often each exponent occurs. */
void athanor_count_exponents(const uint16_t *weights, int64_t count, int64_t *counts) {
    uint32_t seen[4][256] = {{0}}; /* of a chunk; four, as neighbours are often equal */
    for (int64_t begin = 0; begin < count; begin += CODED_CHUNK) {
        const int64_t end = begin + CODED_CHUNK < count ? begin + CODED_CHUNK : count;
        memset(seen, 0, sizeof seen);
        for (int64_t i = begin; i < end; i++) seen[i & 3][weights[i] >> 7 & 255]++;
        for (int i = 0; i < 256; i++) counts[i] += seen[0][i] + seen[1][i] + seen[2][i] + seen[3][i];
    }
}

/* Bytes of a chunk's codes, and its escapes, as the table has them. Exponents stay as they are where codes are longer. */
static void measure_chunk(const uint32_t *codes, const uint16_t *weights, int64_t count, uint8_t *entry) {
    int64_t bits = 0, escapes = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t code = codes[weights[i] >> 7 & 255];
        bits += code >> 16 & 255;
        escapes += code >> 24;
    }
    const int64_t size = (bits + 7) >> 3, is_plain = size + escapes * CODED_ESCAPE >= count;
    write_u16(entry, is_plain ? count : size);
    write_u16(entry + 2, is_plain ? 0 : escapes);
}

static void write_chunk(const uint32_t *codes, const uint16_t *weights, int64_t count, const uint8_t *entry, uint8_t *to) {
    const int64_t size = read_u16(entry);
    uint8_t *escape = to + size, *rest = escape + read_u16(entry + 2) * CODED_ESCAPE;
    uint64_t pending = 0, held = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t exponent = weights[i] >> 7 & 255, code = codes[exponent];
        rest[i] = (uint8_t)(weights[i] >> 8 & 0x80) | (uint8_t)(weights[i] & 0x7f);
        if (size == count) {
            to[i] = (uint8_t)exponent;
            continue;
        }
        pending = pending << (code >> 16 & 255) | (code & 0xffff);
        for (held += code >> 16 & 255; held >= 8; held -= 8) *to++ = (uint8_t)(pending >> (held - 8));
        if (!(code >> 24)) continue;
        write_u16(escape, i);
        escape[2] = (uint8_t)exponent;
        escape += CODED_ESCAPE;
    }
    if (held) *to = (uint8_t)(pending << (8 - held));
}

/* Code weights. `codes` says of each exponent the code in the lowest 16 bits, its length in the next eight, and 1 above
 * where it is an escape. Fills the table; with `to`, which has room for twice the weights' number, their bytes as well.
 * Gives the number of these bytes. */
int64_t athanor_encode_weights(const uint32_t *codes, const uint16_t *weights, int64_t count, uint8_t *table,
                               uint8_t *to) {
    int64_t at = 0;
    for (int64_t c = 0; c * CODED_CHUNK < count; c++) {
        const int64_t some = weights_of_chunk(c, count);
        uint8_t *entry = table + c * CODED_ENTRY;
        measure_chunk(codes, weights + c * CODED_CHUNK, some, entry);
        if (to) write_chunk(codes, weights + c * CODED_CHUNK, some, entry, to + at);
        at += read_u16(entry) + read_u16(entry + 2) * CODED_ESCAPE + some;
    }
    return at;
}
