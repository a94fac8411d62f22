/* How fast this machine reads memory: each thread reads its share of a buffer in order, with and without prefetching.
 * Compiled and called by bench/cpu.py; gives seconds. */
#include <pthread.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t line __attribute__((vector_size(64)));
typedef struct {
    const char *from;
    int64_t bytes, ahead;
    line sum;
} share;

static void *read_share(void *argument) {
    share *mine = argument;
    line a = {0}, b = a, c = a, d = a;
    for (int64_t i = 0; i + 256 <= mine->bytes; i += 256) {
        const line *at = (const line *)(mine->from + i);
        if (mine->ahead)
            for (int l = 0; l < 4; l++) __builtin_prefetch((const char *)(at + l) + mine->ahead, 0, 3);
        a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];
    }
    mine->sum = a ^ b ^ c ^ d;
    return 0;
}

double read_seconds(const char *from, int64_t bytes, int threads, int64_t ahead) {
    static share shares[256];
    pthread_t made[256];
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < threads; i++) {
        shares[i] = (share){from + bytes / threads * i / 64 * 64, bytes / threads, ahead, {0}};
        if (i) pthread_create(&made[i], 0, read_share, &shares[i]);
    }
    read_share(&shares[0]);
    for (int i = 1; i < threads; i++) pthread_join(made[i], 0);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) * 1e-9;
}
