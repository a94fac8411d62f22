/* How fast this machine reads memory: each thread reads its share of it in order, with and without prefetching.
 * Compiled and called by bench/probe.py; gives seconds. */
#include <pthread.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t line __attribute__((vector_size(64)));
typedef struct {
    const char *from;
    int64_t bytes;
} stretch;
typedef struct {
    const stretch *list;
    int64_t count, ahead;
    int thread, threads;
    line sum;
} share;

static line read_stretch(const char *from, int64_t bytes, int64_t ahead) {
    line a = {0}, b = a, c = a, d = a;
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
        const line *at = (const line *)(from + i);
        if (ahead)
            for (int l = 0; l < 4; l++) __builtin_prefetch((const char *)(at + l) + ahead, 0, 3);
        a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];
    }
    return a ^ b ^ c ^ d;
}

static void *read_share(void *argument) {
    share *mine = argument;
    for (int64_t i = 0; i < mine->count; i++) {
        int64_t part = mine->list[i].bytes / mine->threads / 64 * 64;
        mine->sum ^= read_stretch(mine->list[i].from + part * mine->thread, part, mine->ahead);
    }
    return 0;
}

/* Each thread reads its share of every stretch, one stretch after the other. */
double read_seconds(const stretch *list, int64_t count, int threads, int64_t ahead) {
    static share shares[256];
    pthread_t made[256];
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < threads; i++) {
        shares[i] = (share){list, count, ahead, i, threads, {0}};
        if (i) pthread_create(&made[i], 0, read_share, &shares[i]);
    }
    read_share(&shares[0]);
    for (int i = 1; i < threads; i++) pthread_join(made[i], 0);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) * 1e-9;
}
