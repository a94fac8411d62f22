/* Codes weights from standard input and decodes mutated forms of them, with every buffer exactly as large as stated: a
 * sanitiser then sees each byte that is read or written beside one. Arguments: rounds; anything more is the control, which
 * states one byte too much. Input: entries u64, exponents 16, lengths 16, codes u32[256], count u64, weights u16[count]. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t athanor_decode_weights(const uint8_t *exponents, const uint8_t *lengths, int64_t entries, const uint8_t *table,
                               const uint8_t *data, int64_t data_bytes, uint16_t *to, int64_t weights);
int64_t athanor_encode_weights(const uint32_t *codes, const uint16_t *weights, int64_t count, uint8_t *table, uint8_t *to);
void athanor_count_exponents(const uint16_t *weights, int64_t count, int64_t *counts);

static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

static void take(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(9);
}

static void *copy(const void *from, size_t size) {
    void *made = malloc(size);
    memcpy(made, from, size);
    return made;
}

static void mutate(uint8_t *bytes, size_t size) {
    if (!size) return;
    const size_t at = draw(size), end = at + 1 + draw(8);
    switch (draw(4)) {
    case 0: bytes[at] ^= (uint8_t)(1 << draw(8)); break;
    case 1: for (size_t i = at; i < end && i < size; i++) bytes[i] = (uint8_t)draw(256); break;
    case 2: bytes[at] = draw(2) ? 255 : 0; break;
    default: bytes[at] = (uint8_t)(1 + draw(12));
    }
}

int main(int argc, char **argv) {
    uint64_t entries, count, taken = 0, refused = 0;
    uint8_t exponents[16], lengths[16];
    uint32_t codes[256];
    int64_t counts[256] = {0};
    take(&entries, 8), take(exponents, 16), take(lengths, 16), take(codes, sizeof codes), take(&count, 8);
    uint16_t *weights = malloc(2 * count);
    take(weights, 2 * count);
    const size_t table_bytes = 4 * ((count + 4095) / 4096);
    uint8_t *table = malloc(table_bytes), *room = malloc(2 * count);
    athanor_count_exponents(weights, (int64_t)count, counts);
    const size_t size = (size_t)athanor_encode_weights(codes, weights, (int64_t)count, table, room);
    uint8_t *data = copy(room, size);
    for (long round = 0; round < atol(argv[1]); round++) {
        const int kept = round == 0;
        const size_t some = kept || draw(4) ? count : 1 + draw(count);
        const size_t entry_bytes = 4 * ((some + 4095) / 4096), bytes = kept || draw(8) ? size : draw(size);
        const int64_t stated = (int64_t)bytes, named = kept || draw(32) ? (int64_t)entries : (int64_t)draw(40) - 4;
        uint8_t *own[4] = {copy(exponents, 16), copy(lengths, 16), copy(table, entry_bytes),
                           copy(data, argc > 2 ? bytes - 1 : bytes)};
        const size_t sizes[4] = {16, 16, entry_bytes, bytes};
        uint16_t *to = malloc(2 * some);
        for (uint64_t i = kept ? 0 : 1 + draw(3); i; i--) {
            const uint64_t part = draw(8) ? 1 + draw(3) : 0;
            mutate(own[part], sizes[part]);
        }
        const int64_t answer = athanor_decode_weights(own[0], own[1], named, own[2], own[3], stated, to, (int64_t)some);
        if (kept && (answer || memcmp(to, weights, 2 * count))) return 8;
        answer ? refused++ : taken++;
        for (int i = 0; i < 4; i++) free(own[i]);
        free(to);
    }
    printf("%lu %lu\n", (unsigned long)taken, (unsigned long)refused);
    free(weights), free(table), free(room), free(data);
    return 0;
}
