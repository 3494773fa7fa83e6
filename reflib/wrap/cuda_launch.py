"""Launching compiled kernels on CUDA, cheaply.

Triton's own ``kernel[grid](...)`` takes tens of microseconds to look at every argument again. Here a kernel is a
C object that puts its arguments into an array and calls the driver: about a microsecond from Python. ::

    add = load(binary)                         # a compile_triton.Binary
    add(stream, grid, *pointers, *sizes)       # ints; returns at once

The C part (``cuda_driver.h``) declares the driver's functions by hand and serves C++ wrappers and packages as well.
It is compiled once, through the cache; without Python's headers or a compiler ctypes does its work.
``REFLIB_LIBCUDA`` names another driver library (tests use a stand-in).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import DeviceError, ToolchainError
from ..generate.compile_triton import Binary
from .native import C_HEAD, build_extension, once

DRIVER_SOURCE = (Path(__file__).parent / "cuda_driver.h").read_text()

_BINDING = r"""
static Driver driver;
static PyObject *device_error; /* reflib.errors.DeviceError */

/* A kernel. The image is loaded at the first launch, into the context current then, unless a device was named. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    CUfunction function;
    CUcontext context;
    PyObject *name, *image, *entry;
    Py_ssize_t nargs;
    unsigned threads, shared;
    int early, device;
} Launcher;

enum { ON_STACK = 128, HIDDEN = 2 };

static PyObject *fail(Launcher *k, const char *doing, CUresult r) {
    char text[400];
    driver_error(&driver, r, text, sizeof text);
    return PyErr_Format(device_error, "%s kernel %U: %s", doing, k->name, text);
}

static int load(Launcher *k) {
    CUfunction f;
    CUmodule module; /* for good: a CUDA graph may hold its kernels */
    CUresult r = driver_load(&driver, PyBytes_AS_STRING(k->image), PyUnicode_AsUTF8(k->entry), (int)k->shared,
                             k->device, &f, &k->context, &module);
    if (r) {
        fail(k, "cannot load", r);
        return -1;
    }
    k->function = f;
    return 0;
}

static PyObject *launch(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Launcher *k = (Launcher *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf) - 2;
    int64_t stack_values[ON_STACK + HIDDEN], *values = stack_values;
    void *stack_params[ON_STACK + HIDDEN], **params = stack_params;
    CUresult r;
    if (n != k->nargs || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "kernel %U takes a stream, a grid and %zd arguments, by position; got %zd",
                            k->name, k->nargs, n + 2);
    int64_t stream = as_int64(args[0]), grid = as_int64(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (grid <= 0) Py_RETURN_NONE; /* an empty tensor */
    if (grid > INT32_MAX)
        return PyErr_Format(device_error, "kernel %U: a grid of %lld programs; the limit is 2^31 - 1", k->name,
                            (long long)grid);
    if (!k->function && load(k)) return NULL;
    if (n > ON_STACK) {
        values = PyMem_Malloc((n + HIDDEN) * sizeof *values);
        params = PyMem_Malloc((n + HIDDEN) * sizeof *params);
        if (!values || !params) {
            PyErr_NoMemory();
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < n + HIDDEN; ++i) {
        /* After the arguments come Triton's two hidden pointers, to scratch memory and to its profiler's: null. A
           kernel that needs scratch memory takes its address as the last argument, that is as the first of the two. */
        values[i] = i < n ? as_int64(args[i + 2]) : 0;
        params[i] = &values[i]; /* a 32-bit size is the low half: little-endian hosts only */
    }
    if (PyErr_Occurred()) goto done;
    Py_BEGIN_ALLOW_THREADS
    r = driver_launch(&driver, k->function, k->context, (unsigned)grid, k->threads, k->shared,
                      k->early, (CUstream)(uintptr_t)stream, params);
    Py_END_ALLOW_THREADS
    if (r) fail(k, "cannot launch", r);
done:
    if (values != stack_values) PyMem_Free(values);
    if (params != stack_params) PyMem_Free(params);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static void launcher_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Launcher *k = (Launcher *)self;
    Py_XDECREF(k->name);
    Py_XDECREF(k->image);
    Py_XDECREF(k->entry);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, NULL},
    {"nargs", T_PYSSIZET, offsetof(Launcher, nargs), READONLY, "arguments after the stream and the grid"},
    {"name", T_OBJECT, offsetof(Launcher, name), READONLY, "the kernel's name"},
    {NULL},
};
static PyType_Slot launcher_slots[] = {
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, launcher_members},
    {0, NULL},
};
static PyType_Spec launcher_spec = {
    "_reflib_cuda.Launcher", sizeof(Launcher), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, launcher_slots,
};
static PyTypeObject *launcher_type;

/* launcher(name, image, entry, nargs, threads, shared, early, device) -> Launcher */
static PyObject *make_launcher(PyObject *module, PyObject *args) {
    PyObject *name, *image, *entry;
    Py_ssize_t nargs;
    unsigned threads, shared;
    int early, device;
    if (!PyArg_ParseTuple(args, "USUnIIii", &name, &image, &entry, &nargs, &threads, &shared, &early, &device))
        return NULL;
    Launcher *k = PyObject_New(Launcher, launcher_type);
    if (!k) return NULL;
    k->vectorcall = launch;
    k->function = NULL;
    k->context = NULL;
    k->name = Py_NewRef(name);
    k->image = Py_NewRef(image);
    k->entry = Py_NewRef(entry);
    k->nargs = nargs;
    k->threads = threads;
    k->shared = shared;
    k->early = early;
    k->device = device;
    if (device >= 0 && load(k)) {
        Py_DECREF(k);
        return NULL;
    }
    return (PyObject *)k;
}

/* open(path, error class) */
static PyObject *open_driver(PyObject *module, PyObject *args) {
    const char *path;
    PyObject *error;
    if (!PyArg_ParseTuple(args, "sO", &path, &error)) return NULL;
    Py_XSETREF(device_error, Py_NewRef(error));
    const char *why = driver_open(&driver, path);
    if (why) return PyErr_Format(device_error, "%s", why);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", open_driver, METH_VARARGS, "open(path, error): find the driver's functions"},
    {"launcher", make_launcher, METH_VARARGS, "launcher(name, image, entry, nargs, threads, shared, early, device)"},
    {NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reflib_cuda", NULL, -1, methods};

PyMODINIT_FUNC PyInit__reflib_cuda(void) {
    PyObject *m = PyModule_Create(&module);
    launcher_type = (PyTypeObject *)PyType_FromSpec(&launcher_spec);
    if (!m || !launcher_type) return NULL;
    return m;
}
"""


def load(binary: Binary, device: int | None = None) -> Callable[..., None]:
    """``binary`` as ``launch(stream, grid, *pointers, *sizes)``. A binary with ``scratch`` takes one pointer more at
    the end: to grid * scratch bytes, which launches on two streams at once may not share.

    ``device``: load into this GPU's primary context now; None: at the first launch, into the context current then.
    Launching a grid of 0 does nothing. Raises DeviceError: no driver, a wrong architecture, the driver's own errors.
    """
    _launchable(binary)
    nargs, threads = binary.pointers + binary.symbols + bool(binary.scratch), binary.num_warps * binary.warp
    where = -1 if device is None else device
    native = extension()
    if native is None:
        return _CtypesLauncher(_ctypes_driver(), binary, nargs, threads, where)
    return native.launcher(
        binary.name, binary.image, binary.entry, nargs, threads, binary.shared, int(binary.pdl), where
    )


def facts(binary: Binary, device: int) -> tuple[bytes, str, int, int, int, int]:
    """What a C++ wrapper loads and launches ``binary`` by: (image, entry, shared bytes, threads, early, device)."""
    _launchable(binary)
    return (
        binary.image, binary.entry, binary.shared, binary.num_warps * binary.warp, int(binary.pdl), device,
    )  # fmt: skip


def _launchable(binary: Binary) -> None:
    if binary.arch.startswith("gfx"):
        raise DeviceError(
            f"kernel {binary.name} is compiled for {binary.arch}: "
            "reflib compiles for AMD GPUs but cannot launch there yet"
        )
    if binary.num_ctas != 1 or binary.profile:
        raise DeviceError(f"kernel {binary.name} needs a cluster or a profile, which this launcher does not give")


def libcuda() -> str:
    """The driver library to load."""
    return os.environ.get("REFLIB_LIBCUDA") or "libcuda.so.1"


@once
def extension() -> ModuleType | None:
    """The C launcher, its driver opened; None where it cannot be built."""
    try:
        module = build_extension("_reflib_cuda", C_HEAD + DRIVER_SOURCE + _BINDING, ["-ldl"])
    except ToolchainError:
        return None
    module.open(libcuda(), DeviceError)
    return module


# -- without a C compiler ---------------------------------------------------------------------------
@functools.cache
def _ctypes_driver() -> Any:
    try:
        driver = ctypes.CDLL(libcuda())
    except OSError as e:
        raise DeviceError(f"cannot load the CUDA driver: {e}") from e
    if driver.cuInit(0):
        raise DeviceError("the CUDA driver finds no usable GPU (cuInit failed)")
    return driver


class _CtypesLauncher:
    """The same in ctypes: several times slower."""

    def __init__(self, driver: Any, binary: Binary, nargs: int, threads: int, device: int):
        self.driver, self.binary, self.nargs, self.threads, self.device = driver, binary, nargs, threads, device
        self.name = binary.name
        self.function: ctypes.c_void_p | None = None
        if device >= 0:
            self._load()

    def __call__(self, stream: int, grid: int, *args: int) -> None:
        if len(args) != self.nargs:
            raise TypeError(f"kernel {self.name} takes a stream, a grid and {self.nargs} arguments, by position")
        if grid <= 0:
            return
        if grid > 2**31 - 1:
            raise DeviceError(f"kernel {self.name}: a grid of {grid} programs; the limit is 2^31 - 1")
        if self.function is None:
            self._load()
        values = [ctypes.c_int64(a - 2**64 if a >= 2**63 else a) for a in (*args, 0, 0)]
        params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        one = ctypes.c_uint(1)  # never early: a kernel that waits by itself may come later just as well
        self._check("cannot launch", self.driver.cuLaunchKernel(
            self.function, ctypes.c_uint(grid), one, one, ctypes.c_uint(self.threads), one, one,
            ctypes.c_uint(self.binary.shared), ctypes.c_void_p(stream), params, None,
        ))  # fmt: skip

    def _load(self) -> None:
        d, before, module, function = self.driver, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cannot load", d.cuCtxGetCurrent(ctypes.byref(before)))
        entered = self.device >= 0 or not before.value
        if entered:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._check("cannot load", d.cuDeviceGet(ctypes.byref(handle), max(self.device, 0)))
            self._check("cannot load", d.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
            self._check("cannot load", d.cuCtxSetCurrent(context))
        self._check("cannot load", d.cuModuleLoadData(ctypes.byref(module), self.binary.image))
        self._check("cannot load", d.cuModuleGetFunction(ctypes.byref(function), module, self.binary.entry.encode()))
        if self.binary.shared > 48 * 1024:
            self._check("cannot load", d.cuFuncSetAttribute(function, 8, self.binary.shared))
        if entered and before.value:
            d.cuCtxSetCurrent(before)
        self.function = function

    def _check(self, doing: str, result: int) -> None:
        if result:
            text, name = ctypes.c_char_p(), ctypes.c_char_p()
            self.driver.cuGetErrorString(result, ctypes.byref(text))
            self.driver.cuGetErrorName(result, ctypes.byref(name))
            said = (text.value or b"unknown error").decode()
            code = (name.value or b"?").decode()
            raise DeviceError(f"{doing} kernel {self.name}: {said} ({code}, CUDA error {result})")
