/* NVIDIA's driver for programs that use pycuda, without a GPU: one device, whose memory is the host's. Kernels do not run.

   Each thread has its stack of contexts. As the real driver does, it refuses a call without a current context (201), and memory, streams,
   events and functions of another context than the current one (400). */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, INVALID_HANDLE = 400 };
typedef struct { void *context; } Handle;                       /* a stream, an event, a module or a function */
typedef struct Piece { struct Piece *next; char *base; size_t nbytes; void *context; } Piece;

static __thread void *stack[16];
static __thread int depth;
static Piece *pieces;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char primary[1];

#define CURRENT (depth ? stack[depth - 1] : NULL)
#define ENTERED if (!CURRENT) return NO_CONTEXT
#define OF_CURRENT(handle) if ((uintptr_t)(handle) > 2 && ((Handle *)(handle))->context != CURRENT) return INVALID_HANDLE

static int handle_for(void **out) { ENTERED; Handle *made = malloc(sizeof *made); made->context = CURRENT; *out = made; return OK; }
static Piece *piece_at(uint64_t address) {
    Piece *found = NULL;
    pthread_mutex_lock(&lock);
    for (Piece *p = pieces; p && !found; p = p->next)
        if ((uint64_t)p->base <= address && address < (uint64_t)p->base + p->nbytes) found = p;
    pthread_mutex_unlock(&lock);
    return found;
}
static int reach(uint64_t address) {
    Piece *p = piece_at(address);
    ENTERED;
    return !p ? INVALID : p->context == CURRENT ? OK : INVALID_HANDLE;
}

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *out) { *out = 13000; return OK; }
int cuGetErrorString(int code, const char **out) { static __thread char text[32]; sprintf(text, "error %d", code); *out = text; return OK; }
int cuDeviceGetCount(int *out) { *out = 1; return OK; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return ordinal ? 101 : OK; }
int cuDeviceGetName(char *out, int length, int device) { snprintf(out, length, "a GPU that is none"); return OK; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = 1u << 30; return OK; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { *major = 9; *minor = 0; return OK; }
int cuDeviceGetAttribute(int *out, int what, int device) {
    switch (what) {
        case 1: *out = 1024; break; case 2: case 3: case 4: case 5: case 6: case 7: *out = 1024; break; case 10: *out = 32; break; case 13: *out = 1500000; break; case 16: *out = 4; break; case 36: *out = 1000000; break; case 37: *out = 1024; break;
        case 38: *out = 1 << 20; break; case 39: *out = 2048; break; case 75: *out = 9; break; case 81: *out = 228 << 10; break;
        case 82: *out = 65536; break; case 97: *out = 227 << 10; break; case 106: *out = 32; break; default: *out = 0;
    }
    return OK;
}
int cuDeviceCanAccessPeer(int *out, int device, int other) { *out = 0; return OK; }

int cuDevicePrimaryCtxRetain(void **out, int device) { *out = primary; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxCreate_v4(void **out, void *parameters, unsigned flags, int device) { stack[depth++] = *out = malloc(1); return OK; }
int cuCtxDetach(void *context) { if (CURRENT == context) depth--; return OK; }
int cuCtxPushCurrent_v2(void *context) { stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(void **out) { ENTERED; *out = stack[--depth]; return OK; }
int cuCtxGetCurrent(void **out) { *out = CURRENT; return OK; }
int cuCtxGetDevice(int *out) { ENTERED; *out = 0; return OK; }
int cuCtxSynchronize(void) { ENTERED; return OK; }

int cuMemAlloc_v2(uint64_t *out, size_t nbytes) {
    ENTERED;
    if (nbytes > 1u << 28) return NO_MEMORY;
    Piece *made = malloc(sizeof *made);
    *made = (Piece){pieces, aligned_alloc(256, (nbytes + 255) / 256 * 256), nbytes, CURRENT};
    pthread_mutex_lock(&lock);
    pieces = made;
    pthread_mutex_unlock(&lock);
    *out = (uint64_t)made->base;
    return OK;
}
int cuMemFree_v2(uint64_t address) { return reach(address); }
int cuMemAllocHost_v2(void **out, size_t nbytes) { ENTERED; *out = malloc(nbytes); return OK; }
int cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) { ENTERED; *out = malloc(nbytes); return OK; }
int cuMemFreeHost(void *memory) { ENTERED; free(memory); return OK; }
int cuPointerGetAttribute(void *out, int what, uint64_t address) {
    Piece *p = piece_at(address);
    if (!p) return INVALID;
    if (what == 9) *(int *)out = 0; else *(void **)out = p->context;
    return OK;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t nbytes, void *stream) {
    OF_CURRENT(stream);
    int code = reach(to);
    if (!code) memcpy((void *)to, from, nbytes);
    return code;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t nbytes, void *stream) {
    OF_CURRENT(stream);
    int code = reach(from);
    if (!code) memcpy(to, (void *)from, nbytes);
    return code;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t nbytes) { return cuMemcpyHtoDAsync_v2(to, from, nbytes, NULL); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t nbytes) { return cuMemcpyDtoHAsync_v2(to, from, nbytes, NULL); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t nbytes, void *stream) {
    OF_CURRENT(stream);
    int code = reach(to) ? reach(to) : reach(from);
    if (!code) memmove((void *)to, (void *)from, nbytes);
    return code;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t nbytes, void *stream) {
    OF_CURRENT(stream);
    int code = reach(to);
    if (!code) memset((void *)to, value, nbytes);
    return code;
}

int cuStreamCreate(void **out, unsigned flags) { return handle_for(out); }
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamQuery(void *stream) { OF_CURRENT(stream); return OK; }
int cuStreamSynchronize(void *stream) { OF_CURRENT(stream); return OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { OF_CURRENT(stream); OF_CURRENT(event); return OK; }
int cuEventCreate(void **out, unsigned flags) { return handle_for(out); }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { OF_CURRENT(event); OF_CURRENT(stream); return OK; }
int cuEventSynchronize(void *event) { return OK; }
int cuEventElapsedTime_v2(float *out, void *first, void *second) { *out = 1; return OK; }

int cuModuleLoadData(void **out, const void *image) { return handle_for(out); }
int cuModuleLoadDataEx(void **out, const void *image, unsigned n, void *options, void *values) { return handle_for(out); }
int cuModuleUnload(void *module) { return OK; }
int cuModuleGetFunction(void **out, void *module, const char *name) { OF_CURRENT(module); return handle_for(out); }
int cuFuncSetBlockShape(void *function, int x, int y, int z) { OF_CURRENT(function); return OK; }
int cuFuncSetAttribute(void *function, int what, int value) { OF_CURRENT(function); return OK; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **extra) { ENTERED; OF_CURRENT(function); OF_CURRENT(stream); return OK; }
