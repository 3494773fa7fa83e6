/* A model compiled by reflib, for C or C++. This is the only file of the project to include.

   reflib_model *m;
   if (reflib_load(&m, NULL, 0)) ... reflib_error() ...
   reflib_value x = {.kind = REFLIB_TENSOR}, y;
   x.tensor.data = ..., x.tensor.dtype = REFLIB_FLOAT32, x.tensor.device = REFLIB_CPU, x.tensor.dim = 2;
   x.tensor.sizes = sizes, x.tensor.strides = strides;
   if (reflib_run(m, NULL, &x, 1, &y, 1)) ... reflib_error() ...
   reflib_free(&y);
   reflib_unload(m);

   Errors. Functions that return an int32_t return 0 on success; else reflib_error(), called in the same thread, returns
   the reason, and there is nothing to free. Sizes, strides, dtypes, devices and kinds are checked, pointers cannot be:
   `data` must have all the elements that sizes and strides describe.

   Threads. Several may call a loaded model at once, unless it writes to its own weights (a counter, running statistics).

   GPUs, streams. A loaded model is on one GPU; load it once more for another. Calls on several streams may overlap.
   The work of a call, the memory of its results and the freeing of that memory are in the order of its stream: let
   another stream wait (an event) before it reads a result, and this one before the result is freed. So a stream must
   live as long as results of its calls do. A fault on the GPU may be reported by a later call, as always in CUDA. Your
   thread's current context is restored.

   CUDA graphs. Calls may be captured, once a call like them has run: replays read the inputs where they were, and write
   the results where they are. The memory of captured calls, results too, is freed when the model is unloaded and all
   results of its calls are freed. (Of a model that calls PyTorch: capture as PyTorch does, its allocator knows how.)

   Lifetimes. A result may be a view: of an input, valid as long as that memory is; or of a weight, valid until
   reflib_unload, and changed by a call that writes to the weight. Copy it (reflib_copy) to keep it longer. All other
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
enum { REFLIB_NONE, REFLIB_TENSOR, REFLIB_INT, REFLIB_FLOAT, REFLIB_TEXT, REFLIB_TRUTH };

typedef struct {
    void *data; /* its first element */
    int32_t dtype, device, dim;
    const int64_t *sizes, *strides; /* `dim` of each; strides count elements */
    void *owner; /* of a result; NULL in tensors that you fill in */
} reflib_tensor;

typedef struct {
    int32_t kind; /* REFLIB_NONE ... */
    union {
        reflib_tensor tensor;
        int64_t integer; /* REFLIB_INT; REFLIB_TRUTH, of a result: 0 or 1 */
        double number;
        const char *text; /* of a result; UTF-8, of the library: it is not freed */
    };
} reflib_value;

typedef struct { /* an input, as the model was exported with it */
    const char *name;
    reflib_value example; /* its sizes and strides, small values for those that may change; no data */
} reflib_input;

typedef struct reflib_model reflib_model;

/* Load the model onto GPU number `gpu` (ignored by a model for CPUs). `weights`: the file's path; NULL:
   NAME_weights.safetensors, NAME the model's, in the folder of this library. The file is mapped privately: writes to
   weights stay in this loaded model. *model is NULL on failure. */
REFLIB_API int32_t reflib_load(reflib_model **model, const char *weights, int32_t gpu);

/* Call it. Inputs are not copied; a model that mutates its inputs changes them. Free results with `reflib_free`. On a
   GPU, `stream` is a CUstream (or cudaStream_t; NULL: the default stream), and results are ready when the stream has
   completed the call's work. On a CPU it is ignored, and results are ready when the call returns. */
REFLIB_API int32_t reflib_run(reflib_model *model, void *stream, const reflib_value *inputs, int32_t input_count,
                              reflib_value *outputs, int32_t output_count);

/* Free a result of `reflib_run` or `reflib_new`; it becomes REFLIB_NONE. Also valid after `reflib_unload`. */
REFLIB_API void reflib_free(reflib_value *value);

/* Free everything else: weights, machine code. No call may be running: on a GPU, wait for its streams first. */
REFLIB_API void reflib_unload(reflib_model *model);

/* The reason of the last failure in this thread. */
REFLIB_API const char *reflib_error(void);

/* Its inputs and outputs, and the variant that runs: "sm_90", "ptx", "cpu". */
REFLIB_API int32_t reflib_input_count(const reflib_model *model);
REFLIB_API int32_t reflib_output_count(const reflib_model *model);
REFLIB_API reflib_input reflib_about_input(const reflib_model *model, int32_t i); /* name NULL: there is none */
REFLIB_API const char *reflib_variant(const reflib_model *model);

/* For programs without a tensor library. A new tensor: `value` has dtype, device, sizes and strides, and receives data
   (uninitialised), owner, and sizes and strides that live until it is freed. */
REFLIB_API int32_t reflib_new(reflib_model *model, void *stream, reflib_value *value);
/* Copy elements between tensors of equal sizes and dtype, on any devices. Complete when it returns. */
REFLIB_API int32_t reflib_copy(reflib_model *model, void *stream, const reflib_value *to, const reflib_value *from);
REFLIB_API const char *reflib_dtype_name(int32_t dtype); /* "float32"; NULL: there is no such dtype */
REFLIB_API size_t reflib_dtype_size(int32_t dtype);      /* in bytes */

/* The same functions as a table, which each exported model has by a name of its own (NAME_model.h): for programs with
   several models. */
typedef struct {
    int32_t (*load)(reflib_model **, const char *, int32_t);
    int32_t (*run)(reflib_model *, void *, const reflib_value *, int32_t, reflib_value *, int32_t);
    void (*free)(reflib_value *);
    void (*unload)(reflib_model *);
    const char *(*error)(void);
    int32_t (*input_count)(const reflib_model *);
    int32_t (*output_count)(const reflib_model *);
    reflib_input (*about_input)(const reflib_model *, int32_t);
    const char *(*variant)(const reflib_model *);
    int32_t (*new_tensor)(reflib_model *, void *, reflib_value *);
    int32_t (*copy)(reflib_model *, void *, const reflib_value *, const reflib_value *);
    const char *(*dtype_name)(int32_t);
    size_t (*dtype_size)(int32_t);
} reflib_functions;

#ifdef __cplusplus
}
#endif
#endif
