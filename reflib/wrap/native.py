"""Calling compiled functions from Python, cheaply.

A kernel's library holds, beside ``int NAME(pointers..., sizes..., int threads)``, a second entry
``int NAME_packed(const int64_t* a)`` that takes the same arguments as one array. A small extension module in C
puts Python ints into such an array and makes the call: a fraction of a microsecond, where ctypes takes several.
The extension is compiled once, through the cache; without Python's headers ctypes does its work.

:func:`build_extension` is open to others: any C source with a ``PyInit_<name>`` becomes a module. ::

    launcher = build_extension("_reflib_cuda", C_SOURCE)      # ToolchainError without a compiler or Python.h
    launcher.launch(...)
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import cache, toolchain
from ..errors import ReflibError, ToolchainError

# What the C of every extension here begins with.
C_HEAD = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stddef.h>
#include <structmember.h>

static int64_t as_int64(PyObject *o) {
    /* Pointers are unsigned, sizes are signed: both keep their bits. */
    long long v = PyLong_AsLongLong(o);
    if (v == -1 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        v = (long long)PyLong_AsUnsignedLongLong(o);
    }
    return (int64_t)v;
}
"""

_SOURCE = r"""
/* One compiled function, callable with ints. `entry` takes all arguments as one array. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*entry)(const int64_t *);
    Py_ssize_t nargs;
    PyObject *owner; /* the library: it must outlive its functions */
} Function;

enum { MAX_ON_STACK = 256 };

static PyObject *function_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Function *f = (Function *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    int64_t on_stack[MAX_ON_STACK], *a = on_stack;
    int result;
    if (n != f->nargs || (kwnames && PyTuple_GET_SIZE(kwnames)))
        return PyErr_Format(PyExc_TypeError, "this kernel takes %zd arguments, all by position; got %zd", f->nargs, n);
    if (n > MAX_ON_STACK && !(a = PyMem_Malloc(n * sizeof *a))) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; ++i) a[i] = as_int64(args[i]);
    if (PyErr_Occurred()) {
        if (a != on_stack) PyMem_Free(a);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    result = f->entry(a);
    Py_END_ALLOW_THREADS
    if (a != on_stack) PyMem_Free(a);
    return PyLong_FromLong(result);
}

static void function_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Function *)self)->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef function_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, vectorcall), READONLY, NULL},
    {"nargs", T_PYSSIZET, offsetof(Function, nargs), READONLY, "how many ints it takes"},
    {NULL},
};
static PyType_Slot function_slots[] = {
    {Py_tp_dealloc, function_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, function_members},
    {0, NULL},
};
static PyType_Spec function_spec = {
    "_reflib_native.Function", sizeof(Function), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, function_slots,
};
static PyTypeObject *function_type;

/* function(address, nargs, owner) -> Function */
static PyObject *make_function(PyObject *module, PyObject *args) {
    unsigned long long address;
    Py_ssize_t nargs;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "KnO", &address, &nargs, &owner)) return NULL;
    Function *f = PyObject_New(Function, function_type);
    if (!f) return NULL;
    f->vectorcall = function_call;
    f->entry = (int (*)(const int64_t *))(uintptr_t)address;
    f->nargs = nargs;
    f->owner = Py_NewRef(owner);
    return (PyObject *)f;
}

static PyMethodDef methods[] = {
    {"function", make_function, METH_VARARGS, "function(address, nargs, owner): a compiled function as a callable"},
    {NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reflib_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit__reflib_native(void) {
    PyObject *m = PyModule_Create(&module);
    function_type = (PyTypeObject *)PyType_FromSpec(&function_spec);
    if (!m || !function_type) return NULL;
    return m;
}
"""


def build_extension(name: str, c_source: str, flags: Sequence[str] = ()) -> ModuleType:
    """The CPython extension module ``name`` made of ``c_source`` (C11, which must define ``PyInit_<name>``).

    Compiled once per Python ABI, compiler and source, through the cache. ``flags`` are added at the end of the
    command line (``-I...``, ``-ldl``). Raises ToolchainError when the compiler or Python.h is missing.
    """
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise ToolchainError(f"Python's C headers are missing ({include}/Python.h): install python3-dev or the like")
    found = toolchain.compiler()
    abi = sysconfig.get_config_var("SOABI") or "abi"
    mac = ("-undefined", "dynamic_lookup") if os.uname().sysname == "Darwin" else ()
    options = ("-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", f"-I{include}", *mac)
    k = cache.key("extension", name, c_source, abi, found.command, found.version, options, tuple(flags))
    path = cache.get("extensions", k)
    if path is None:
        with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
            source, made = Path(folder, f"{name}.c"), Path(folder, f"{name}.so")
            source.write_text(c_source)
            toolchain.must_run([*found.command, *options, str(source), "-o", str(made), *flags])
            path = cache.put("extensions", k, made, ".so")
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """``make``, called the first time only; other threads wait for it."""
    made: list[Any] = []
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):  # a child has the lock, but not the thread that holds it
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]

    @functools.wraps(make)
    def get() -> Any:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get


@once
def extension() -> ModuleType | None:
    """The extension of this file; None where it cannot be built (then ctypes is used)."""
    try:
        return build_extension("_reflib_native", C_HEAD + _SOURCE)
    except ToolchainError:
        return None


class Library:
    """A loaded library of kernels. It stays loaded as long as one of its functions is alive (and after)."""

    def __init__(self, path: Path):
        self.path = path
        self._handle = ctypes.CDLL(str(path))

    def function(self, name: str, nargs: int) -> Callable[..., int]:
        """Kernel ``name`` as a callable of ``nargs`` ints (pointers, sizes, threads), which returns its int result.
        The GIL is released while it runs."""
        try:
            entry: Any = getattr(self._handle, f"{name}_packed")
        except AttributeError:
            raise ReflibError(f"{self.path} holds no kernel {name!r}") from None
        native = extension()
        if native is None:
            return _ctypes_function(entry, nargs)
        return native.function(ctypes.cast(entry, ctypes.c_void_p).value, nargs, self)

    def address(self, name: str) -> int:
        """Of kernel ``name`` itself, which takes its arguments as C does."""
        return ctypes.cast(getattr(self._handle, name), ctypes.c_void_p).value or 0


def _ctypes_function(entry: Any, nargs: int) -> Callable[..., int]:
    array = ctypes.c_int64 * nargs

    def call(*args: int) -> int:
        if len(args) != nargs:
            raise TypeError(f"this kernel takes {nargs} arguments, all by position; got {len(args)}")
        return entry(array(*args))

    return call


def load_library(path: str | os.PathLike[str]) -> Library:
    """Load a library that :func:`reflib.toolchain.build_library` made."""
    try:
        return Library(Path(path))
    except OSError as e:
        raise ReflibError(f"cannot load the compiled kernels {path}: {e}") from e
