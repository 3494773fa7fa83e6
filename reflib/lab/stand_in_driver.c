/* A stand-in for libcuda.so.1: it notes what it is called for in $STAND_IN_LOG, as lines of JSON. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void *current;
static int blocks, modules, contexts, mode, captures;
static void *lane; /* the stream that is captured, and what was launched on it: */
static struct { void *f, *args[5]; } nodes[64];
static FILE *out(void) { static FILE *f; return f ? f : (f = fopen(getenv("STAND_IN_LOG"), "w")); }
#define NOTE(...) (fprintf(out(), __VA_ARGS__), fputc('\n', out()))
static int setting(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
__attribute__((destructor)) static void end(void) {
    NOTE("{\"left\": [%d, %d, %d]}", blocks, modules, contexts);
    fclose(out());
}
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuInit(unsigned f) { return 0; }
int cuGetErrorName(int r, const char **s) { *s = "CUDA_ERROR_STAND_IN"; return 0; }
int cuGetErrorString(int r, const char **s) { *s = "the stand-in says no"; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetCount(int *n) { *n = setting("STAND_IN_GPUS", 1); return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "Stand-In"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    int c = setting("STAND_IN_CAPABILITY", 90);
    *v = a == 75 ? c / 10 : a == 76 ? c % 10 : a == 97 ? setting("STAND_IN_SHARED", 227 << 10)
       : a == 115 ? setting("STAND_IN_POOLS", 1) : -1;
    return *v < 0;
}
int cuDriverGetVersion(int *v) { *v = setting("STAND_IN_DRIVER", 13000); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { ++contexts; *c = (void *)(uintptr_t)(d + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { --contexts; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
static int make(void **p, size_t n, const char *how) {
    if (!current || n > setting("STAND_IN_MEMORY", 1 << 24)) return 2;
    NOTE("{\"%s\": %zu}", how, n);
    return ++blocks, (*p = malloc(n)) ? 0 : 2;
}
static int drop(void *p) { return current ? free(p), --blocks, 0 : 1; }
int cuMemAlloc_v2(void **p, size_t n) {
    return (lane || setting("STAND_IN_CAPTURES", 0)) && mode != 2 ? 900 : make(p, n, "plain");
}
int cuMemFree_v2(void *p) { return drop(p); }
int cuMemAllocAsync(void **p, size_t n, void *s) { return make(p, n, "pool"); }
int cuMemFreeAsync(void *p, void *s) { return drop(p); }
int cuDeviceGetDefaultMemPool(void **p, int d) { *p = (void *)5; return 0; }
int cuMemPoolSetAttribute(void *p, int a, void *v) { return !(p == (void *)5 && a == 4 && *(uint64_t *)v == UINT64_MAX); }
int cuMemcpyAsync(void *to, const void *from, size_t n, void *s) { memmove(to, from, n); return current ? 0 : 1; }
int cuMemsetD8Async(void *p, unsigned char v, size_t n, void *s) { NOTE("{\"zeros\": %zu}", n); memset(p, v, n); return 0; }
int cuStreamSynchronize(void *s) { return 0; }
int cuStreamIsCapturing(void *s, int *v) { *v = lane ? s == lane : setting("STAND_IN_CAPTURES", 0); return 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *v, uint64_t *id, void *g, void *d, void *n) { return *v = 1, *id = 7, 0; }
int cuThreadExchangeStreamCaptureMode(int *m) { int before = mode; return mode = *m, *m = before, 0; }
int cuStreamCreate(void **s, unsigned flags) { return *s = (void *)512, flags != 1; }
int cuStreamDestroy_v2(void *s) { return 0; }
int cuStreamBeginCapture_v2(void *s, int m) { return lane = s, captures = 0, 0; }
int cuStreamEndCapture(void *s, void **g) { lane = 0; return *g = nodes, 0; }
int cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long flags) {
    void **made = *e = malloc(sizeof nodes + 8);
    *(int *)made = captures, memcpy(made + 1, g, sizeof nodes);
    return ++contexts, 0;
}
int cuGraphLaunch(void *e, void *s);
int cuGraphExecDestroy(void *e) { return free(e), --contexts, 0; }
int cuGraphDestroy(void *g) { return g != nodes; }
int cuModuleLoadData(void **m, const void *p) {
    const unsigned char *b = p;
    fprintf(out(), "{\"image\": \"");
    for (int i = 0; i < 64; ++i) fprintf(out(), "%02x", b[i]);
    NOTE("\"}");
    return ++modules, *m = (void *)p, setting("STAND_IN_BAD", 0);
}
int cuModuleUnload(void *m) { return --modules, 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { return *f = strdup(n), 0; }
int cuLaunchKernelEx(const unsigned *c, void *f, void **p, void **extra) { /* grid, block, shared; stream, attributes */
    void *const *tail = (void *const *)(c + 8); const int *attribute = tail[1];
    NOTE("{\"early\": [%u, %d, %d]}", *(const unsigned *)(tail + 2), attribute[0], attribute[2]);
    return cuLaunchKernel(f, c[0], c[1], c[2], c[3], c[4], c[5], c[6], tail[0], p, extra);
}
int cuFuncSetAttribute(void *f, int a, int v) { NOTE("{\"shared\": %d}", v); return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **p, void **extra) {
    NOTE("{\"launch\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"dynamic\": %u, \"stream\": %ld}",
         (char *)f, x, y, z, bx, by, bz, shared, (long)stream);
    if (!current) return 201;
    int count = setting("STAND_IN_COUNT", 0);
    if (lane && stream == lane) { /* recorded, not done */
        nodes[captures].f = f;
        for (int i = 0; count && i < 5; ++i) nodes[captures].args[i] = *(void **)p[i];
        return ++captures > 64;
    }
    if (count) { /* as if it were the kernel of Scaled: x, w, y and two hidden pointers */
        float *x = *(float **)p[0], *w = *(float **)p[1], *y = *(float **)p[2];
        for (int i = 0; i < count; ++i) y[i] = x[i] * w[i % 32] + 1;
        if (*(void **)p[3] || *(void **)p[4]) return 1;
    }
    return setting("STAND_IN_LAUNCH", 0);
}
int cuGraphLaunch(void *e, void *s) {
    const char *node = (char *)e + 8;
    NOTE("{\"graph\": %d}", *(int *)e);
    for (int i = 0; i < *(int *)e; ++i, node += sizeof *nodes) {
        void *p[5];
        for (int k = 0; k < 5; ++k) p[k] = (void *)(node + 8 + 8 * k);
        if (cuLaunchKernel(*(void **)node, 1, 1, 1, 1, 1, 1, 0, s, p, 0)) return 1;
    }
    return 0;
}
