/* Open MPI's side of the benchmark: one process per rank, measures the blocks named on the command line.
 *
 * usage: openmpi OUT BLOCK...     BLOCK = type:bytes:calls:warmups, type f32 or bf16
 *
 * Every rank writes OUT.RANK, one line a block: "type bytes nanoseconds...". A wrong result ends the run.
 * MPI has no bf16, so it is MPI_UINT16_T with a user-defined operation whose loop the compiler vectorises. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The input of rank r is in[i] = ((i + shift) % PERIOD + r) % VALUES, and the shift changes from call to call. Sums of
 * up to 16 ranks are whole numbers below 256: exact in bf16, whatever the order. */
enum { PERIOD = 1021, VALUES = 13, SHIFTS = 8 };

static int rank, ranks;

static void fail(const char *what, const char *block) {
    fprintf(stderr, "openmpi: rank %d: %s %s\n", rank, what, block);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    const uint16_t *restrict a = in;
    uint16_t *restrict b = inout;
    for (int i = 0, n = *count; i < n; i++) b[i] = narrow(widen(a[i]) + widen(b[i]));
}

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory) fail("no memory", "");
    return memory;
}

static void store(void *to, int wide, size_t index, int value) {
    if (wide) ((float *)to)[index] = (float)value;
    else ((uint16_t *)to)[index] = narrow((float)value);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Compares all elements with the sum of all ranks' inputs. */
static void check(const char *block, const void *buffer, int wide, size_t count, size_t shift) {
    const size_t width = wide ? sizeof(float) : sizeof(uint16_t);
    char expected[PERIOD * sizeof(float)];
    for (size_t i = 0; i < PERIOD; i++) {
        int sum = 0;
        for (int r = 0; r < ranks; r++) sum += ((int)((i + shift) % PERIOD) + r) % VALUES;
        store(expected, wide, i, sum);
    }
    for (size_t i = 0; i < count; i += PERIOD) {
        size_t part = count - i < PERIOD ? count - i : PERIOD;
        if (memcmp((const char *)buffer + i * width, expected, part * width)) fail("wrong result in", block);
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Op bf16_sum;
    MPI_Op_create(add_bf16, 1, &bf16_sum);
    if (argc < 3) fail("usage: openmpi OUT BLOCK...", "");

    char path[4096];
    snprintf(path, sizeof path, "%s.%d", argv[1], rank);
    FILE *out = fopen(path, "w");
    if (!out) fail("cannot write", path);

    for (int b = 2; b < argc; b++) {
        char type[8];
        size_t bytes;
        int calls, warmups;
        if (sscanf(argv[b], "%7[a-z0-9]:%zu:%d:%d", type, &bytes, &calls, &warmups) != 4) fail("bad block", argv[b]);
        const int wide = strcmp(type, "f32") == 0;
        const size_t width = wide ? sizeof(float) : sizeof(uint16_t), count = bytes / width;

        char *source = allocate(bytes + SHIFTS * width), *buffer = allocate(bytes);
        for (size_t i = 0; i < count + SHIFTS; i++) store(source, wide, i, ((int)(i % PERIOD) + rank) % VALUES);

        fprintf(out, "%s %zu", type, bytes);
        for (int call = -warmups; call < calls; call++) {
            const size_t shift = (size_t)(call + warmups) % SHIFTS;
            memcpy(buffer, source + shift * width, bytes);
            MPI_Barrier(MPI_COMM_WORLD);
            const uint64_t start = now();
            MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, wide ? MPI_FLOAT : MPI_UINT16_T, wide ? MPI_SUM : bf16_sum,
                          MPI_COMM_WORLD);
            const uint64_t nanoseconds = now() - start;
            MPI_Barrier(MPI_COMM_WORLD);
            if (call >= 0) fprintf(out, " %llu", (unsigned long long)nanoseconds);
            if (call == -warmups || call == calls - 1) check(argv[b], buffer, wide, count, shift);
        }
        fprintf(out, "\n");
        free(source);
        free(buffer);
    }
    fclose(out);
    MPI_Op_free(&bf16_sum);
    MPI_Finalize();
    return 0;
}
