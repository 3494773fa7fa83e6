/* The interface between a C++ wrapper (wrapper.h) and the process that calls it (host_graph.c; package/cpp/model.cpp).
   Valid C and C++; PyTorch and Python appear as addresses only, so neither is needed to compile either side.

   The wrapper's one entry, `reflib_call`, gets its inputs as Values and leaves its outputs as Values. Functions of
   PyTorch's C interface come in a table (`Torch`), looked up by name once per process in the libraries that torch has
   loaded. So a wrapper links to nothing, and runs with every torch that has these functions: 2.11 and later. */
#ifndef REFLIB_HOST_H
#define REFLIB_HOST_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct AtenTensorOpaque *Handle; /* AtenTensorHandle: an at::Tensor* */

enum { VALUE_NONE, VALUE_TENSOR, VALUE_INT, VALUE_FLOAT, VALUE_OBJECT, VALUE_BOOL };

typedef struct {
    int32_t kind;
    union {
        Handle tensor; /* borrowed in an input; in an output owned by the receiver */
        int64_t integer; /* of a bool 0 or 1 */
        double number;
        int64_t object; /* which of the graph's Python objects */
    };
} Value;

/* The prototypes are those of torch/csrc/inductor/aoti_torch/c/shim.h. All but the marked return 0 when they succeed. */
typedef struct {
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *);
    int32_t (*reinterpret)(Handle, int64_t, const int64_t *, const int64_t *, int64_t, Handle *);
    int32_t (*new_handle)(Handle, Handle *);
    int32_t (*delete_handle)(Handle);
    int32_t (*data_ptr)(Handle, void **);
    int32_t (*sizes)(Handle, int64_t **);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*device_type)(Handle, int32_t *);
    int32_t (*device_index)(Handle, int32_t *);
    int32_t (*dispatch)(const char *, const char *, uint64_t *, uint64_t);
    int32_t (*new_list)(uint64_t, void **);
    int32_t (*push)(void *, uint64_t);
    int32_t (*new_string)(const char *, uint64_t, void **);
    int32_t (*record_start)(const char *, void *, void *const *, uint64_t, void **);
    int32_t (*record_end)(void *);
    int32_t (*threads)(void); /* at::get_num_threads: returns the number */
    /* of libtorch_cuda; null without it */
    int32_t (*current_stream)(int32_t, void **);
    int32_t (*current_device)(int32_t *);
    int32_t (*new_guard)(int32_t, void **);
    int32_t (*delete_guard)(void *);
    /* null before torch 2.13 */
    const char *(*what)(void); /* the message of the last failure in this thread */
    /* null without PyTorch */
    int32_t (*storage_size)(Handle, int64_t *); /* in bytes */
    int32_t (*storage_offset)(Handle, int64_t *);
} Torch;

/* A kernel, ready to launch. `function`: CUfunction, or the address of a CPU kernel; null until it is loaded. */
typedef struct {
    void *function, *context, *module;
    const char *name;
    uint32_t threads, shared;
    int32_t early;   /* on a GPU: may start before the previous kernel has finished, and waits for it itself */
    int32_t checked; /* on a CPU: returns nonzero if an index is outside its tensor */
} Kernel;

enum { FAILED_TORCH = 1, FAILED_DRIVER, FAILED_INDEX, FAILED_ARGUMENT, FAILED_PYTHON, FAILED_WRAPPER };

/* One call in progress. */
typedef struct {
    const char *step; /* for messages: the current step */
    int32_t kind;     /* FAILED_... */
    int32_t argument; /* of FAILED_ARGUMENT: the one that does not fit, whose description is added; -1: several */
    char text[1000];
} Frame;

/* What a wrapper may use and call: one per graph. The functions return 0, or fill in the frame and return nonzero. */
typedef struct Host {
    const Torch *torch;
    Kernel *kernels;
    void **symbols;     /* C functions that the wrapper calls */
    Handle *constants;  /* tensors that the captured graph holds */
    /* call a Python function of the wrapper */
    int32_t (*python)(struct Host *, Frame *, int32_t which, const Value *args, int32_t n, Value *results, int32_t m);
    int32_t (*load)(struct Host *, Frame *, int32_t kernel); /* build and load a kernel that few calls need */
    /* `count` int32 words that are zero; the kernel must leave them at zero */
    int32_t (*zeros)(struct Host *, Frame *, int32_t device, void *stream, int64_t count, void **words);
    int32_t (*launch)(struct Host *, Frame *, const Kernel *, int64_t grid, void *stream, void **params);
    void (*drop)(struct Host *, Frame *, int32_t input); /* an input is not needed any more */
    int32_t gpu; /* the device that is number 0 in the wrapper: a package can be loaded on any GPU */
} Host;

typedef int32_t (*WrapperEntry)(Host *, Frame *, const Value *inputs, Value *outputs);

#ifdef __cplusplus
}
#endif
#endif
