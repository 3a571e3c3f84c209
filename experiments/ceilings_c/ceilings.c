/* What this machine can do at best, in plain C: multiply-adds, and bandwidth of a working set.
 *
 *   gcc -O3 -march=native -fno-tree-loop-distribute-patterns -pthread ceilings.c -o ceilings
 *   ./ceilings THREADS SAMPLES KIND [BYTES]      KIND: fma32 fma64 read read4 read_half write write_stream copy copy_stream
 *
 * prints flops or bytes per second of all threads together. BYTES is the working set of one thread; a copy has half of it as
 * source and half as destination, and counts both. read4 has four loads a turn, read_half four of half a vector, the others eight. Each
 * thread is pinned, owns its memory and has touched it first. All start together; a sample lasts at least 2 ms and ends with the last thread. The figure is the lower quartile of
 * the samples' times.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__AVX512F__)
typedef __m512i vec;
typedef __m256i half_vec;
typedef __m512 vec32;
typedef __m512d vec64;
#define STREAM(p, v) _mm512_stream_si512((void *)(p), v)
#define FMA32 _mm512_fmadd_ps
#define FMA64 _mm512_fmadd_pd
#define ONES32 _mm512_set1_ps
#define ONES64 _mm512_set1_pd
#define ACCUMULATORS 24
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256i vec;
typedef __m128i half_vec;
typedef __m256 vec32;
typedef __m256d vec64;
#define STREAM(p, v) _mm256_stream_si256((void *)(p), v)
#define FMA32 _mm256_fmadd_ps
#define FMA64 _mm256_fmadd_pd
#define ONES32 _mm256_set1_ps
#define ONES64 _mm256_set1_pd
#define ACCUMULATORS 12
#else
#error "compile with -march=native on a machine with AVX2 and FMA"
#endif

#define MAX_THREADS 256
#define SAMPLE_SECONDS 2e-3

enum kind { FMA_32, FMA_64, READ, READ_4, READ_HALF, WRITE, WRITE_STREAM, COPY, COPY_STREAM, KINDS };
static const char *const NAMES[KINDS] = {"fma32", "fma64", "read", "read4", "read_half", "write", "write_stream", "copy", "copy_stream"};

static enum kind kind;
static int threads;
static size_t bytes;
static long repeats;
static atomic_int generation, waiting;
static atomic_int stop;
static int cores[MAX_THREADS];
static volatile float sink32;
static volatile double sink64;
static volatile long long sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define BARRIER __asm__ volatile("" ::: "memory")

static void run_fma32(long turns) {
    vec32 x[ACCUMULATORS], m = ONES32(0.5f), c = ONES32(1.0f);
    for (int i = 0; i < ACCUMULATORS; i++) x[i] = ONES32((float)i);
    for (long t = 0; t < turns; t++)
#pragma GCC unroll 24
        for (int i = 0; i < ACCUMULATORS; i++) x[i] = FMA32(x[i], m, c);
    for (int i = 0; i < ACCUMULATORS; i++) sink32 = ((float *)&x[i])[0];
}

static void run_fma64(long turns) {
    vec64 x[ACCUMULATORS], m = ONES64(0.5), c = ONES64(1.0);
    for (int i = 0; i < ACCUMULATORS; i++) x[i] = ONES64((double)i);
    for (long t = 0; t < turns; t++)
#pragma GCC unroll 24
        for (int i = 0; i < ACCUMULATORS; i++) x[i] = FMA64(x[i], m, c);
    for (int i = 0; i < ACCUMULATORS; i++) sink64 = ((double *)&x[i])[0];
}

static vec ones(void) {
    vec v;
    memset(&v, 1, sizeof v);
    ((char *)&v)[0] = 3;
    return v;
}

static void run_memory(char *memory, long passes) {
    size_t half = bytes / 2 / (8 * sizeof(vec)) * (8 * sizeof(vec)), n = bytes / (8 * sizeof(vec)) * 8;
    vec *p = (vec *)memory, *q = (vec *)(memory + half), a[8], v = ones();
    half_vec b[4] = {{0}};
    size_t m = half / sizeof(vec);
    for (int k = 0; k < 8; k++) a[k] = v;
    for (long r = 0; r < passes; r++) {
        switch (kind) {
        case READ:
            for (size_t i = 0; i < n; i += 8)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) a[k] ^= p[i + k];
            break;
        case READ_4:
            for (size_t i = 0; i < n; i += 4)
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) a[k] ^= p[i + k];
            break;
        case READ_HALF:
            for (size_t i = 0; i < 2 * n; i += 4)
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) b[k] ^= ((half_vec *)p)[i + k];
            break;
        case WRITE:
            for (size_t i = 0; i < n; i += 8)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) p[i + k] = v;
            break;
        case WRITE_STREAM:
            for (size_t i = 0; i < n; i += 8)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) STREAM(p + i + k, v);
            break;
        case COPY:
            for (size_t i = 0; i < m; i += 8)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) q[i + k] = p[i + k];
            break;
        default:
            for (size_t i = 0; i < m; i += 8)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) STREAM(q + i + k, p[i + k]);
        }
        BARRIER;
    }
    for (int k = 0; k < 8; k++) sink = ((long long *)&a[k])[0];
    for (int k = 0; k < 4; k++) sink = ((long long *)&b[k])[0];
}

static void work(char *memory) {
    if (kind == FMA_32) run_fma32(repeats);
    else if (kind == FMA_64) run_fma64(repeats);
    else run_memory(memory, repeats);
}

static char *allocate(int index) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[index], &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) perror("sched_setaffinity");
    if (kind < READ) return NULL;
    size_t huge = 2u << 20, room = (bytes + huge - 1) / huge * huge + huge;
    char *raw = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) { perror("mmap"); exit(1); }
    char *memory = (char *)(((size_t)raw + huge - 1) / huge * huge);
    madvise(memory, room - huge, MADV_HUGEPAGE);
    memset(memory, 1, bytes);
    return memory;
}

static void *worker(void *argument) {
    int index = (int)(size_t)argument, seen = 0;
    char *memory = allocate(index);
    atomic_fetch_sub(&waiting, 1);
    for (;;) {
        while (atomic_load(&generation) == seen) _mm_pause();
        if (atomic_load(&stop)) return NULL;
        seen++;
        work(memory);
        atomic_fetch_sub(&waiting, 1);
    }
}

static double sample(char *memory) {
    atomic_store(&waiting, threads - 1);
    double start = now();
    atomic_fetch_add(&generation, 1);
    work(memory);
    while (atomic_load(&waiting)) _mm_pause();
    return now() - start;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int samples = argc > 2 ? atoi(argv[2]) : 0;
    threads = argc > 1 ? atoi(argv[1]) : 0;
    for (kind = 0; argc > 3 && kind < KINDS && strcmp(argv[3], NAMES[kind]); kind++) {}
    bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;
    if (argc < 4 || kind == KINDS || threads < 1 || threads > MAX_THREADS || samples < 4 || (kind >= READ && bytes < 16 * sizeof(vec))) {
        fprintf(stderr, "usage: %s THREADS SAMPLES(>=4) fma32|fma64|read|read4|read_half|write|write_stream|copy|copy_stream [BYTES]\n", argv[0]);
        return 2;
    }
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    int found = 0;
    for (int c = 0; c < CPU_SETSIZE && found < threads; c++)
        if (CPU_ISSET(c, &allowed)) cores[found++] = c;
    if (found < threads) { fprintf(stderr, "%d threads do not fit %d cores\n", threads, found); return 2; }
    pthread_t handles[MAX_THREADS];
    atomic_store(&waiting, threads - 1);
    for (int i = 1; i < threads; i++) pthread_create(&handles[i], NULL, worker, (void *)(size_t)i);
    char *memory = allocate(0);
    while (atomic_load(&waiting)) _mm_pause();
    double seconds;
    for (repeats = 1; (seconds = sample(memory)) < SAMPLE_SECONDS;)
        repeats = seconds > 0 && 1.2 * SAMPLE_SECONDS / seconds < 1000 ? (long)((double)repeats * 1.2 * SAMPLE_SECONDS / seconds) + 1 : 1000 * repeats;
    double *times = malloc((size_t)samples * sizeof *times);
    for (int i = 0; i < samples; i++) times[i] = sample(memory);
    qsort(times, (size_t)samples, sizeof *times, by_value);
    seconds = times[samples / 4];
    atomic_store(&stop, 1);
    atomic_fetch_add(&generation, 1);
    for (int i = 1; i < threads; i++) pthread_join(handles[i], NULL);
    double amount;
    if (kind < READ) amount = 2.0 * ACCUMULATORS * (double)(sizeof(vec) / (kind == FMA_32 ? 4 : 8));
    else if (kind < COPY) amount = (double)(bytes / (8 * sizeof(vec)) * (8 * sizeof(vec)));
    else amount = 2.0 * (double)(bytes / 2 / (8 * sizeof(vec)) * (8 * sizeof(vec)));
    printf("%.6g\n", amount * (double)repeats * threads / seconds);
    return 0;
}
