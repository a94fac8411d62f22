/* Runs one step of a program that lies in another process's memory, of which the parts that it names were copied to a
 * file: for kernels of a processor that this machine is not, under an emulator.
 *
 * The file holds a header, the regions' addresses there, and their bytes. Pointers of the structures are moved to where
 * the regions lie here. Afterwards the bytes are written back, and the answer of athanor_run is the exit status.
 */
#include "athanor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_REGIONS 256

int athanor_run(const athanor_program *program, const athanor_step *step);
int athanor_start(int threads);
int athanor_probe(void);

typedef struct {
    int64_t address, size;
    char *here;
} region;

static region regions[MOST_REGIONS];
static int64_t count;

static void move(void *field) {
    int64_t address = *(int64_t *)field;
    if (!address) return;
    for (int64_t i = 0; i < count; i++)
        if (address >= regions[i].address && address < regions[i].address + regions[i].size) {
            *(char **)field = regions[i].here + (address - regions[i].address);
            return;
        }
    fprintf(stderr, "no region holds %lx\n", (long)address);
    exit(100);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        printf("%d\n", athanor_probe());
        return 0;
    }
    FILE *file = fopen(argv[1], "r+");
    int64_t header[3]; /* addresses of program and step, number of regions */
    if (!file || fread(header, 8, 3, file) != 3 || header[2] > MOST_REGIONS) return 101;
    count = header[2];
    for (int64_t i = 0; i < count; i++)
        if (fread(&regions[i], 8, 2, file) != 2) return 102;
    const long start = ftell(file);
    for (int64_t i = 0; i < count; i++) {
        regions[i].here = aligned_alloc(4096, (regions[i].size + 4095) / 4096 * 4096);
        if (fread(regions[i].here, 1, regions[i].size, file) != (size_t)regions[i].size) return 103;
    }
    athanor_program *program;
    athanor_step *step;
    move(&header[0]), move(&header[1]);
    memcpy(&program, &header[0], 8), memcpy(&step, &header[1], 8);
    const athanor_program program_before = *program;
    const athanor_step step_before = *step;
    move(&program->ops), move(&program->counters);
    char *fields[] = {(char *)&step->token_ids, (char *)&step->positions, (char *)&step->slots, (char *)&step->rows,
                      (char *)&step->wanted, (char *)&step->tables, (char *)&step->expected, (char *)&step->stamps};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) move(fields[i]);
    athanor_op *ops = malloc((program->count + 1) * sizeof *ops);
    memcpy(ops, program->ops, program->count * sizeof *ops);
    program->ops = ops;
    for (int64_t i = 0; i < program->count; i++) {
        athanor_op *op = ops + i;
        char *own[] = {(char *)&op->weight, (char *)&op->scale, (char *)&op->sums, (char *)&op->bias,
                       (char *)&op->palette, (char *)&op->starts, (char *)&op->patches, (char *)&op->in,
                       (char *)&op->out, (char *)&op->in_scale, (char *)&op->out_scale, (char *)&op->keys,
                       (char *)&op->values, (char *)&op->cosines, (char *)&op->sines};
        for (size_t f = 0; f < sizeof own / sizeof *own; f++) move(own[f]);
    }
    athanor_start(2);
    const int verdict = athanor_run(program, step);
    *program = program_before, *step = step_before;
    fseek(file, start, SEEK_SET);
    for (int64_t i = 0; i < count; i++) fwrite(regions[i].here, 1, regions[i].size, file);
    return fclose(file) ? 104 : verdict;
}
