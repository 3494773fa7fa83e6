/* reflib's C extension: kernels as Python callables of ints (this file), and C++ wrappers as Python callables of
   tensors (host_graph.c). One module, compiled once per machine and version of Python. cuda_driver.h launches for both,
   and for exported programs (package/cpp/gpu.cpp). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include "cuda_driver.h"
#include "host.h"

/* -- the driver --------------------------------------------------------------------------------------------------- */
static Driver cuda;
static char cuda_path[1024];
static int cuda_is_open;
static pthread_mutex_t cuda_lock = PTHREAD_MUTEX_INITIALIZER;
static PyObject *device_error; /* reflib.errors.DeviceError */

/* driver(path, error class): the library to open when the first kernel is loaded. */
static PyObject *set_driver(PyObject *module, PyObject *args) {
    const char *path;
    PyObject *error;
    if (!PyArg_ParseTuple(args, "sO", &path, &error)) return NULL;
    snprintf(cuda_path, sizeof cuda_path, "%s", path);
    Py_XSETREF(device_error, Py_NewRef(error));
    Py_RETURN_NONE;
}

/* Open the driver, the first time. Returns NULL, or why it cannot be used. */
static const char *need_driver(void) {
    pthread_mutex_lock(&cuda_lock);
    const char *why = cuda_is_open ? NULL : driver_open(&cuda, cuda_path);
    cuda_is_open = !why;
    pthread_mutex_unlock(&cuda_lock);
    return why;
}

/* Load a kernel from `facts`: (address of a C function, does it check indices?), or what cuda_launch.facts returns:
   (image, entry, shared bytes, threads, early, device). -1: a Python exception is set. */
static int fill_kernel(Kernel *k, PyObject *facts) {
    if (PyTuple_GET_SIZE(facts) == 2) {
        k->checked = PyObject_IsTrue(PyTuple_GET_ITEM(facts, 1));
        void *function = PyLong_AsVoidPtr(PyTuple_GET_ITEM(facts, 0));
        if (PyErr_Occurred()) return -1;
        __atomic_store_n(&k->function, function, __ATOMIC_RELEASE);
        return 0;
    }
    const char *image, *entry;
    Py_ssize_t size;
    int shared, threads, early, device;
    if (!PyArg_ParseTuple(facts, "y#siiii", &image, &size, &entry, &shared, &threads, &early, &device)) return -1;
    k->shared = shared, k->threads = threads, k->early = early;
    char text[400];
    const char *why = need_driver();
    CUresult r = why ? 0 : driver_load(&cuda, k, image, entry, device);
    if (r) driver_error(&cuda, r, text, sizeof text), why = text;
    if (why) PyErr_Format(device_error, "cannot load kernel %s: %s", k->name, why);
    return why ? -1 : 0;
}

/* Launch. -1: `text` says why it failed. Needs no GIL. */
static int start_kernel(const Kernel *k, int64_t grid, void *stream, void **params, char *text, size_t size) {
    unsigned n[3];
    const char *why = driver_grid(grid, n);
    if (why) {
        snprintf(text, size, "%s", why);
        return -1;
    }
    CUresult r = driver_launch(&cuda, k, grid, (CUstream)stream, params);
    if (__builtin_expect(r != 0, 0)) driver_error(&cuda, r, text, size);
    return r ? -1 : 0;
}

/* A type of callables, whose members begin with where their vectorcall is. traverse: of what may be in cycles. */
#define VECTORCALL(type) {"__vectorcalloffset__", T_PYSSIZET, offsetof(type, vectorcall), READONLY, NULL}
static PyTypeObject *new_type(const char *name, int size, PyMemberDef *members, destructor end, traverseproc traverse) {
    PyType_Slot slots[] = {{Py_tp_dealloc, end}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
                           {traverse ? Py_tp_traverse : 0, traverse}, {0, NULL}};
    unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    PyType_Spec spec = {name, size, 0, flags | (traverse ? Py_TPFLAGS_HAVE_GC : 0), slots};
    return (PyTypeObject *)PyType_FromSpec(&spec);
}

/* -- kernels called from Python ----------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Kernel kernel;
    Py_ssize_t nargs;
    PyObject *name;
    PyObject *owner; /* a C function's library; what a GPU kernel is loaded from */
} Callable;

enum { ON_STACK = 256, HIDDEN = 2 };

/* Pointers are unsigned, sizes are signed: both keep their bits. */
static int64_t as_int64(PyObject *o) {
    long long v = PyLong_AsLongLong(o);
    if (v == -1 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        v = (long long)PyLong_AsUnsignedLongLong(o);
    }
    return (int64_t)v;
}

/* A C function `int f(const int64_t *arguments)`. Returns its result. */
static PyObject *call_function(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Callable *f = (Callable *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    int64_t on_stack[ON_STACK], *a = on_stack;
    int result = 0;
    if (n != f->nargs || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "this kernel takes %zd arguments, all by position; got %zd", f->nargs, n);
    if (n > ON_STACK && !(a = PyMem_Malloc(n * sizeof *a))) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; ++i) a[i] = as_int64(args[i]);
    int failed = PyErr_Occurred() != NULL;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        result = ((int (*)(const int64_t *))f->kernel.function)(a);
        Py_END_ALLOW_THREADS
    }
    if (a != on_stack) PyMem_Free(a);
    return failed ? NULL : PyLong_FromLong(result);
}

/* A GPU kernel: (stream, grid, arguments...). It is loaded at the first launch, if not before. */
static PyObject *call_launcher(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Callable *k = (Callable *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf) - 2;
    int64_t stack_values[ON_STACK + HIDDEN], *values = stack_values;
    void *stack_params[ON_STACK + HIDDEN], **params = stack_params;
    char text[400];
    if (n != k->nargs || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "kernel %U takes a stream, a grid and %zd arguments, by position; got %zd",
                            k->name, k->nargs, n + 2);
    int64_t stream = as_int64(args[0]), grid = as_int64(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (grid <= 0) Py_RETURN_NONE; /* an empty tensor */
    if (!k->kernel.function && fill_kernel(&k->kernel, k->owner)) return NULL;
    if (n > ON_STACK) {
        values = PyMem_Malloc((n + HIDDEN) * (sizeof *values + sizeof *params));
        if (!values) return PyErr_NoMemory();
        params = (void **)(values + n + HIDDEN);
    }
    for (Py_ssize_t i = 0; i < n + HIDDEN; ++i) {
        /* Triton's two hidden pointers (scratch memory, its profiler's) come last and are null. A kernel with scratch
           memory takes its address as the last argument, which makes it the first of the two. */
        values[i] = i < n ? as_int64(args[i + 2]) : 0;
        params[i] = &values[i]; /* a 32-bit size is the low half: little-endian hosts only */
    }
    int failed = PyErr_Occurred() != NULL;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = start_kernel(&k->kernel, grid, (void *)(uintptr_t)stream, params, text, sizeof text);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_Format(device_error, "cannot launch kernel %U: %s", k->name, text);
    }
    if (values != stack_values) PyMem_Free(values);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static void callable_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Callable *)self)->name);
    Py_XDECREF(((Callable *)self)->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef callable_members[] = {
    VECTORCALL(Callable),
    {"nargs", T_PYSSIZET, offsetof(Callable, nargs), READONLY, "arguments (after a GPU kernel's stream and grid)"},
    {"name", T_OBJECT, offsetof(Callable, name), READONLY, "the kernel's name"},
    {NULL},
};
static PyTypeObject *callable_type;

static Callable *new_callable(vectorcallfunc call, PyObject *name, Py_ssize_t nargs, PyObject *owner) {
    Callable *k = PyObject_New(Callable, callable_type);
    if (!k) return NULL;
    memset(&k->kernel, 0, sizeof k->kernel);
    k->vectorcall = call, k->nargs = nargs;
    k->name = Py_XNewRef(name), k->owner = Py_NewRef(owner);
    return k;
}

/* function(address, nargs, owner) */
static PyObject *make_function(PyObject *module, PyObject *args) {
    unsigned long long address;
    Py_ssize_t nargs;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "KnO", &address, &nargs, &owner)) return NULL;
    Callable *f = new_callable(call_function, NULL, nargs, owner);
    if (f) f->kernel.function = (void *)(uintptr_t)address;
    return (PyObject *)f;
}

/* launcher(name, facts, nargs): loaded now if the facts name a device, else at the first launch */
static PyObject *make_launcher(PyObject *module, PyObject *args) {
    PyObject *name, *facts;
    Py_ssize_t nargs;
    if (!PyArg_ParseTuple(args, "UO!n", &name, &PyTuple_Type, &facts, &nargs)) return NULL;
    Callable *k = new_callable(call_launcher, name, nargs, facts);
    if (!k) return NULL;
    k->kernel.name = PyUnicode_AsUTF8(name);
    if (PyLong_AsLong(PyTuple_GET_ITEM(facts, 5)) >= 0 && fill_kernel(&k->kernel, facts)) Py_CLEAR(k);
    return (PyObject *)k;
}

/* -- the module --------------------------------------------------------------------------------------------------- */
#include "host_graph.c"

static PyMethodDef methods[] = {
    {"driver", set_driver, METH_VARARGS, "driver(path, error): the CUDA driver's library"},
    {"function", make_function, METH_VARARGS, "function(address, nargs, owner): a C function as a callable"},
    {"launcher", make_launcher, METH_VARARGS, "launcher(name, facts, nargs): a GPU kernel as a callable"},
    GRAPH_METHODS
    {NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reflib_host", NULL, -1, methods};

PyMODINIT_FUNC PyInit__reflib_host(void) {
    PyObject *m = PyModule_Create(&module);
    callable_type = new_type("_reflib_host.Callable", sizeof(Callable), callable_members, callable_dealloc, NULL);
    return m && callable_type && !graph_types() ? m : NULL;
}
