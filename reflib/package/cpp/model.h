/* A model that reflib compiled, called from C or C++. Nothing else of this project has to be included.

   reflib_model *m;
   if (reflib_load(&m, NULL, 0)) ... reflib_error() ...
   reflib_value x = {.kind = REFLIB_TENSOR}, y;
   x.tensor.data = ..., x.tensor.dtype = REFLIB_FLOAT32, x.tensor.device = REFLIB_CPU, x.tensor.dim = 2;
   x.tensor.sizes = sizes, x.tensor.strides = strides;
   if (reflib_run(m, NULL, &x, 1, &y, 1)) ... reflib_error() ...
   reflib_free(&y);
   reflib_unload(m);

   Errors. A function that returns an int32_t returns 0, or has failed; reflib_error() then says why, in the thread that
   called it. After a failure there is nothing to free. Sizes, strides, dtypes, devices and kinds are checked, pointers
   cannot be: `data` must have all the elements that sizes and strides say.

   Threads. Several may call a loaded model at once, unless it writes to its own weights (a counter, running statistics).

   GPUs, streams. A loaded model is on one GPU; load it once more for another. Calls on several streams may overlap.
   The work of a call, the memory of its results and the freeing of that memory are in the order of its stream: let
   another stream wait (an event) before it reads a result, and this one before the result is freed. So a stream must
   live as long as results of its calls do. A fault on the GPU may be said by a later call, as everywhere in CUDA. A call
   cannot be captured in a CUDA graph. Your thread's current context stays what it was.

   Lifetimes. A result may be a view: of an input, good as long as that memory is; or of a weight, good until
   reflib_unload, and changed by a call that writes to the weight. Copy (reflib_copy) what shall last longer. All other
   results outlive the model, and a result's sizes and strides live until it is freed. */
#ifndef REFLIB_MODEL_H
#define REFLIB_MODEL_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define REFLIB_API __attribute__((visibility("default")))

enum { /* dtypes, by PyTorch's numbers */
    REFLIB_UINT8 = 0, REFLIB_INT8 = 1, REFLIB_INT16 = 2, REFLIB_INT32 = 3, REFLIB_INT64 = 4, REFLIB_FLOAT16 = 5,
    REFLIB_FLOAT32 = 6, REFLIB_FLOAT64 = 7, REFLIB_COMPLEX64 = 9, REFLIB_COMPLEX128 = 10, REFLIB_BOOL = 11,
    REFLIB_BFLOAT16 = 15, REFLIB_FLOAT8_E5M2 = 23, REFLIB_FLOAT8_E4M3FN = 24, REFLIB_FLOAT8_E5M2FNUZ = 25,
    REFLIB_FLOAT8_E4M3FNUZ = 26, REFLIB_UINT16 = 27, REFLIB_UINT32 = 28, REFLIB_UINT64 = 29
};
enum { REFLIB_CPU = -1 }; /* a device; GPUs are 0, 1, ... */
enum { REFLIB_NONE, REFLIB_TENSOR, REFLIB_INT, REFLIB_FLOAT };

typedef struct {
    void *data; /* its first element */
    int32_t dtype, device, dim;
    const int64_t *sizes, *strides; /* `dim` of each; strides count elements */
    void *owner; /* of a result; NULL in what you fill in */
} reflib_tensor;

typedef struct {
    int32_t kind; /* REFLIB_NONE ... */
    union {
        reflib_tensor tensor;
        int64_t integer;
        double number;
    };
} reflib_value;

typedef struct { /* an input, as the model was exported with it */
    const char *name;
    reflib_value example; /* its sizes and strides, where such that may change are small; no data */
} reflib_input;

typedef struct reflib_model reflib_model;

/* Load the model onto GPU number `gpu` (which a model for CPUs does not look at). `weights`: the file's path;
   NULL: weights.safetensors in the folder of this library. The file is mapped: what the model writes to its weights
   stays in this loaded model. *model is NULL if it fails. */
REFLIB_API int32_t reflib_load(reflib_model **model, const char *weights, int32_t gpu);

/* Call it. Inputs are not copied; those that the model was written to change are changed. Results are yours, for
   `reflib_free`. On a GPU: `stream` is a CUstream (a cudaStream_t is one; NULL: the default stream), and the results
   are there when it has come so far. On a CPU it is not looked at, and the call returns when they are there. */
REFLIB_API int32_t reflib_run(reflib_model *model, void *stream, const reflib_value *inputs, int32_t input_count,
                              reflib_value *outputs, int32_t output_count);

/* Give back a result (of `reflib_run`, or of `reflib_new`); it becomes REFLIB_NONE. May come after `reflib_unload`. */
REFLIB_API void reflib_free(reflib_value *value);

/* Give back everything else: weights, machine code. No call may be running: on a GPU, wait for its streams first. */
REFLIB_API void reflib_unload(reflib_model *model);

/* Why the last function failed in this thread. */
REFLIB_API const char *reflib_error(void);

/* What it takes and gives, and which of its arms runs: "sm_90", "ptx", "cpu". */
REFLIB_API int32_t reflib_input_count(const reflib_model *model);
REFLIB_API int32_t reflib_output_count(const reflib_model *model);
REFLIB_API reflib_input reflib_about_input(const reflib_model *model, int32_t i); /* name NULL: there is no such */
REFLIB_API const char *reflib_arm(const reflib_model *model);

/* For programs without tensors of their own. A new tensor: `value` says dtype, device, sizes and strides, and gets data
   (whatever was in that memory), owner, and sizes and strides that live until it is freed. */
REFLIB_API int32_t reflib_new(reflib_model *model, void *stream, reflib_value *value);
/* Copy elements between tensors of equal sizes and dtype, wherever they lie. They are there when it returns. */
REFLIB_API int32_t reflib_copy(reflib_model *model, void *stream, const reflib_value *to, const reflib_value *from);
REFLIB_API const char *reflib_dtype_name(int32_t dtype); /* "float32"; NULL: there is no such dtype */
REFLIB_API size_t reflib_dtype_size(int32_t dtype);      /* in bytes */

#ifdef __cplusplus
}
#endif
#endif
