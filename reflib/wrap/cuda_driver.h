/* Loading and launching CUDA kernels through the driver. All callers use these functions: kernels called from Python
   (host.c), C++ wrappers (host_graph.c) and exported programs (package/cpp/gpu.cpp).

   The driver's functions are declared by hand and looked up at run time: no CUDA headers, no link-time dependency, one
   second to compile. Valid C and C++.

   Use:  Driver d;  const char *why = driver_open(&d, "libcuda.so.1");  if (why) ...
         Kernel k = {.name = ..., .threads = ..., .shared = ...};
         CUresult r = driver_load(&d, &k, image, entry, device);  r = driver_launch(&d, &k, grid, stream, params); */
#ifndef REFLIB_CUDA_DRIVER_H
#define REFLIB_CUDA_DRIVER_H
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include "host.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

typedef struct { /* CUlaunchAttribute: 4 bytes of id, 4 unused, 64 of value */
    int id, unused;
    union {
        int on;
        char size[64];
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

enum {
    REFLIB_CUDA_EARLY_LAUNCH = 6, /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
    REFLIB_CUDA_INVALID_CONTEXT = 201,
    REFLIB_CUDA_MAX_DYNAMIC_SHARED = 8, /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    REFLIB_CUDA_PLAIN_SHARED = 48 * 1024 /* a kernel that needs more must set the attribute */
};

typedef struct {
    CUresult (*Init)(unsigned);
    CUresult (*GetErrorName)(CUresult, const char **);
    CUresult (*GetErrorString)(CUresult, const char **);
    CUresult (*DeviceGet)(CUdevice *, int);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext *, CUdevice);
    CUresult (*CtxGetCurrent)(CUcontext *);
    CUresult (*CtxSetCurrent)(CUcontext);
    CUresult (*ModuleLoadData)(CUmodule *, const void *);
    CUresult (*ModuleGetFunction)(CUfunction *, CUmodule, const char *);
    CUresult (*FuncSetAttribute)(CUfunction, int, int);
    CUresult (*LaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             CUstream, void **, void **);
    CUresult (*LaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **); /* NULL before CUDA 11.8 */
    CUresult (*StreamIsCapturing)(CUstream, int *); /* NULL in a stand-in without it */
    CUresult (*ModuleUnload)(CUmodule);             /* likewise */
    CUresult (*CtxSynchronize)(void);               /* likewise */
} Driver;

/* Fill in `d`. Returns NULL, or what went wrong (static text). */
static const char *driver_open(Driver *d, const char *path) {
    static char why[512];
    static const char *const names[] = {
        "cuInit", "cuGetErrorName", "cuGetErrorString", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent",
        "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"};
    void *library = dlopen(path, RTLD_NOW);
    if (!library) {
        snprintf(why, sizeof why, "cannot load the CUDA driver: %s", dlerror());
        return why;
    }
    void *found[sizeof names / sizeof *names];
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
        if (!(found[i] = dlsym(library, names[i]))) {
            snprintf(why, sizeof why, "the CUDA driver %s has no %s: it is too old", path, names[i]);
            return why;
        }
    memcpy(d, found, sizeof found); /* the members are in the order of the names */
    *(void **)&d->LaunchKernelEx = dlsym(library, "cuLaunchKernelEx");
    *(void **)&d->StreamIsCapturing = dlsym(library, "cuStreamIsCapturing");
    *(void **)&d->ModuleUnload = dlsym(library, "cuModuleUnload");
    *(void **)&d->CtxSynchronize = dlsym(library, "cuCtxSynchronize");
    if (d->Init(0)) return "the CUDA driver finds no usable GPU (cuInit failed)";
    return NULL;
}

/* The driver's message for an error. */
static void driver_error(const Driver *d, CUresult r, char *out, size_t size) {
    const char *name = NULL, *text = NULL;
    d->GetErrorName(r, &name);
    d->GetErrorString(r, &text);
    snprintf(out, size, "%s (%s, CUDA error %d)", text ? text : "unknown error", name ? name : "?", r);
}

/* The primary context of `device` (the one PyTorch uses), made current in this thread. */
static CUresult driver_enter(const Driver *d, int device, CUcontext *context) {
    CUdevice handle;
    CUresult r = d->DeviceGet(&handle, device);
    if (!r) r = d->DevicePrimaryCtxRetain(context, handle);
    return r ? r : d->CtxSetCurrent(*context);
}

/* Load `image` and find `entry`, into `k`, whose `shared` is set. device < 0: into the current context (device 0's if
   there is none). The current context is restored. The module stays loaded until it is unloaded. */
static CUresult driver_load(const Driver *d, Kernel *k, const void *image, const char *entry, int device) {
    CUcontext before = NULL, context = NULL;
    CUmodule module = NULL;
    CUfunction f = NULL;
    CUresult r = d->CtxGetCurrent(&before);
    context = before;
    if (!r && (device >= 0 || !before)) r = driver_enter(d, device < 0 ? 0 : device, &context);
    if (!r) r = d->ModuleLoadData(&module, image);
    if (!r) r = d->ModuleGetFunction(&f, module, entry);
    if (!r && k->shared > REFLIB_CUDA_PLAIN_SHARED)
        r = d->FuncSetAttribute(f, REFLIB_CUDA_MAX_DYNAMIC_SHARED, (int)k->shared);
    if (r && module && d->ModuleUnload) d->ModuleUnload(module);
    if (before && before != context) d->CtxSetCurrent(before);
    if (r) return r;
    k->context = context, k->module = module;
    __atomic_store_n(&k->function, (void *)f, __ATOMIC_RELEASE); /* last: other threads may launch now */
    return 0;
}

/* Unload the kernel's module, if it has one, after all work of its context has finished: the kernel may be running in
   any stream. (At the end of the process the driver may be gone already.) */
static void driver_unload(const Driver *d, const Kernel *k) {
    CUcontext before = NULL, context = (CUcontext)k->context;
    if (!k->module || !d->ModuleUnload || d->CtxGetCurrent(&before)) return;
    if (before != context && d->CtxSetCurrent(context)) return;
    if (d->CtxSynchronize) d->CtxSynchronize();
    d->ModuleUnload((CUmodule)k->module);
    if (before != context) d->CtxSetCurrent(before);
}

/* A grid is a number of programs; bit 62 says that it holds three, of a kernel of the user's (generate/user_kernel.py):
   x in 31 bits, y - 1 in 16, z - 1 in 15. Returns NULL, or why there can be no such grid. */
static const char *driver_grid(int64_t grid, unsigned *xyz) {
    int64_t x = grid, y = 1, z = 1;
    if (grid >> 62) x = grid & INT32_MAX, y += grid >> 31 & 0xffff, z += grid >> 47 & 0x7fff;
    xyz[0] = (unsigned)x, xyz[1] = (unsigned)y, xyz[2] = (unsigned)z;
    if (x <= INT32_MAX - (grid >> 62) && y <= 65535 && z <= 32767) return NULL;
    return "a grid of too many programs; the limit is 2^31 - 1, and 65535 and 32767 along y and z";
}

/* Launch on a grid that `driver_grid` accepts, in the current context. An `early` kernel may start before the previous one in the
   stream has finished, and waits for it itself (programmatic dependent launch). */
static CUresult driver_launch_here(const Driver *d, const Kernel *k, int64_t grid, CUstream stream, void **params) {
    CUfunction f = (CUfunction)k->function;
    unsigned n[3];
    driver_grid(grid, n);
    if (k->early && d->LaunchKernelEx) {
        CUlaunchAttribute attribute = {REFLIB_CUDA_EARLY_LAUNCH, 0, {1}};
        CUlaunchConfig config = {n[0], n[1], n[2], k->threads, 1, 1, k->shared, stream, &attribute, 1};
        return d->LaunchKernelEx(&config, f, params, NULL);
    }
    return d->LaunchKernel(f, n[0], n[1], n[2], k->threads, 1, 1, k->shared, stream, params, NULL);
}

/* The same; in a thread without a CUDA context, the kernel's context is made current first. */
static CUresult driver_launch(const Driver *d, const Kernel *k, int64_t grid, CUstream stream, void **params) {
    CUresult r = driver_launch_here(d, k, grid, stream, params);
    if (r == REFLIB_CUDA_INVALID_CONTEXT && k->context && !d->CtxSetCurrent((CUcontext)k->context))
        r = driver_launch_here(d, k, grid, stream, params);
    return r;
}
#endif
