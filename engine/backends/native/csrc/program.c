/* Threads, and the run of a program over a step.
 *
 * The calling thread is number 0. The others are made once, sleep on a futex between steps and meet at a barrier after
 * every operation; there they spin for some ten microseconds before they sleep. Nothing is allocated after the start.
 */
#define _GNU_SOURCE
#include "athanor.h"
#include "simd.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <linux/futex.h>

#define MOST_THREADS 256
#define SPINS 600 /* pauses before a wait becomes a sleep: some ten microseconds */

typedef struct {
    int threads;
    unsigned first;                   /* steps run before the newest threads were made */
    float *scratch[MOST_THREADS];
    const athanor_program *program;
    const athanor_step *step;
    _Alignas(64) atomic_uint work;    /* counts steps; workers sleep on it */
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint turn;    /* counts barriers */
    _Alignas(64) atomic_uint sleepers;
} pool;

static pool shared;

static void pause_once(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_while(atomic_uint *word, unsigned value) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        pause_once();
    }
    atomic_fetch_add(&shared.sleepers, 1);
    while (atomic_load(word) == value) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
    atomic_fetch_sub(&shared.sleepers, 1);
}

static void announce(atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&shared.sleepers)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MOST_THREADS, 0, 0, 0);
}

static void barrier(int threads) {
    if (threads == 1) return;
    unsigned turn = atomic_load(&shared.turn);
    if (atomic_fetch_add(&shared.arrived, 1) + 1 == (unsigned)threads) {
        atomic_store(&shared.arrived, 0);
        announce(&shared.turn);
    } else {
        sleep_while(&shared.turn, turn);
    }
}

static void run_one(const athanor_op *op, const context *at) {
    int64_t rows = op->wanted ? at->step->wanted_count : at->step->tokens;
    switch (op->kind) {
    case KIND_EMBED: run_embed(op, at); break;
    case KIND_ANGLES: run_angles(op, at); break;
    case KIND_NORM: run_norm(op, at, rows); break;
    case KIND_LINEAR: run_linear(op, at, rows); break;
    case KIND_ROPE: run_rope(op, at); break;
    case KIND_ATTEND: run_attend(op, at); break;
    case KIND_QUANTISE: run_quantise(op, at, rows); break;
    case KIND_BEST: run_best(op, at, rows); break;
    case KIND_ADAPT: run_adapt(op, at); break;
    case KIND_GATE: run_gate(op, at, rows); break;
    default: break;
    }
}

static void run_share(const athanor_program *program, const athanor_step *step, int thread, int threads) {
    context at = {program, step, thread, threads, 0, shared.scratch[thread]};
    /* Behind the last barrier the caller may have let go of program and step. */
    const athanor_op *ops = program->ops;
    char *counters = program->counters;
    int64_t count = program->count;
    for (int64_t i = 0; i < count; i++) {
        at.counter = (atomic_long *)(counters + i * 64);
        run_one(ops + i, &at);
        barrier(threads);
    }
}

static void *work_forever(void *argument) {
    int thread = (int)(intptr_t)argument;
    unsigned seen = shared.first;
    for (;;) {
        sleep_while(&shared.work, seen++);
        run_share(shared.program, shared.step, thread, shared.threads);
    }
    return 0;
}

/* Whether every block that a row reads up to a place of its table exists and has the stamp that the row expects. */
static int owned(const athanor_program *program, const athanor_step *step, int64_t row, int64_t last) {
    const int64_t *table = step->tables + row * step->table_width, *expected = step->expected + row * step->table_width;
    uint64_t blocks = (uint64_t)(program->num_slots / program->block_size);
    int64_t difference = 0;
    for (int64_t b = 0; b <= last; b++) {
        if ((uint64_t)table[b] >= blocks) return 0;
        difference |= step->stamps[table[b]] ^ expected[b];
    }
    return !difference;
}

/* Whether rows that have an adapter, and the adapter, exist. */
static int known(const athanor_program *program, const athanor_pieces *of, int64_t rows) {
    for (int64_t i = 0; i < of->count; i++) {
        const int64_t *one = of->pieces + 3 * i;
        if (one[0] < 1 || one[0] > program->adapters || one[2] < 1 || one[2] > ADAPT_ROWS) return 0;
        for (int64_t k = one[1]; k < one[1] + one[2]; k++)
            if (of->order[k] < 0 || of->order[k] >= rows) return 0;
    }
    return 1;
}

/* Whether every index of the step is in range, and every block that it reads or writes its row's own. */
static int judge(const athanor_program *program, const athanor_step *step) {
    for (int64_t i = 0; i < step->tokens; i++) {
        if (step->token_ids[i] < 0 || step->token_ids[i] >= program->vocab_size) return STEP_BROKEN;
        if (step->rows[i] < 0 || step->rows[i] >= program->max_rows) return STEP_BROKEN;
        if (step->positions[i] < 0 || step->positions[i] >= step->table_width * program->block_size) return STEP_BROKEN;
        if (i + 1 < step->tokens && step->rows[i + 1] == step->rows[i] && step->positions[i + 1] > step->positions[i])
            continue; /* the last token of a stretch reads all that those before it read */
        if (!owned(program, step, step->rows[i], step->positions[i] / program->block_size)) return STEP_FOREIGN;
    }
    for (int64_t i = 0; i < step->tokens; i++)
        if (step->slots[i] < 0 || step->slots[i] >= program->num_slots) return STEP_BROKEN;
    for (int64_t i = 0; i < step->wanted_count; i++)
        if (step->wanted[i] < 0 || step->wanted[i] >= step->tokens) return STEP_BROKEN;
    if (!known(program, &step->pieces, step->tokens)) return STEP_BROKEN;
    if (!known(program, &step->wanted_pieces, step->wanted_count)) return STEP_BROKEN;
    return STEP_RUN;
}

/* Run a step. Gives STEP_RUN; STEP_BROKEN when the step names something that does not exist, or STEP_FOREIGN when a row
 * would use a block that is not its own: nothing is read or written then. */
int athanor_run(const athanor_program *program, const athanor_step *step) {
    int verdict = judge(program, step);
    if (verdict) return verdict;
    if (!program->count) return 0; /* no barrier would keep the caller until all have read its program */
    for (int64_t i = 0; i < program->count; i++)
        atomic_store_explicit((atomic_long *)((char *)program->counters + i * 64), 0, memory_order_relaxed);
    if (shared.threads == 1 || step->tokens <= program->solo_tokens) {
        run_share(program, step, 0, 1);
        return 0;
    }
    shared.program = program;
    shared.step = step;
    announce(&shared.work);
    run_share(program, step, 0, shared.threads);
    return 0;
}

/* Have as many threads, the caller's own among them: those that are missing are made, and none is ever taken away. Call
 * while no step runs. Gives their number; another one than was asked for when there are more, or they cannot be had. */
int athanor_start(int threads) {
    if (threads < 1 || threads > MOST_THREADS) return shared.threads;
    probe_amx();
    shared.first = atomic_load(&shared.work);
    while (shared.threads < threads) {
        const int number = shared.threads;
        pthread_t thread;
        if (posix_memalign((void **)&shared.scratch[number], 64, SCRATCH_FLOATS * sizeof(float))) break;
        memset(shared.scratch[number], 0, SCRATCH_FLOATS * sizeof(float));
        if (number) {
            if (pthread_create(&thread, 0, work_forever, (void *)(intptr_t)number)) break;
            pthread_detach(thread);
        }
        shared.threads = number + 1;
    }
    return shared.threads;
}

/* Give back the memory of a library whose only thread is the caller's; athanor_start makes it usable again. */
void athanor_release(void) {
    if (shared.threads != 1) return;
    free(shared.scratch[0]);
    shared.threads = 0;
}

/* Bytes that a program's structures have here, for the other side to compare; then the ABI's number. */
int64_t athanor_layout(void) {
    return ATHANOR_ABI * 1000000 + (int64_t)sizeof(athanor_op) * 10000 + (int64_t)sizeof(athanor_step) * 100 +
           (int64_t)sizeof(athanor_program);
}

static volatile float trial_result;

/* A small product in each dtype, on the very instructions that were compiled in. */
static void try_dots(void) {
    static float weight[64 * PANEL], out[PANEL], scale[PANEL], sums[PANEL], in_scale[1] = {1};
    static float in[64 * 16];
    for (int64_t dtype = TYPE_F32; dtype <= TYPE_INT8; dtype++) {
        athanor_op op = {.kind = KIND_LINEAR, .dtype = dtype, .inputs = 16, .outputs = PANEL, .weight = weight,
                         .in = in, .out = out, .scale = scale, .sums = sums, .in_scale = in_scale};
        atomic_long counter = 0;
        context at = {.threads = 1, .counter = &counter};
        run_linear(&op, &at, 1);
        trial_result += out[0];
    }
}

/* 0: unusable on this machine; else a sum of 1 (usable), 2 (dot product instructions), 4 (tiles). */
int athanor_probe(void) {
    int tiles = probe_amx();
    if (!survives(try_dots)) return 0;
    int dots = 0;
#if defined(HAVE_DOT)
    dots = 2;
#endif
    return 1 + dots + 4 * tiles;
}
