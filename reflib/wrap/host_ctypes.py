"""The C extension (``host.c``, ``host_graph.c``) in ctypes, where it cannot be built or torch lays out tensors in an
unknown way: the same callables, several times slower.

Structures are those of ``host.h``. Every input gets a new handle from torch's own functions, freed after the call, so
nothing is assumed of how a tensor lies in memory. (``host_entry.c`` has no counterpart: compiled programs take their
slow path.)
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint,
    c_uint32,
    c_void_p,
    py_object,
)
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import DeviceError
from .host import ERRORS, FUNCTIONS, OUT_OF_MEMORY, address, described

# -- host.c: kernels called from Python -----------------------------------------------------------------
_path = "libcuda.so.1"


def driver(path: str, error: type[Exception]) -> None:
    """The driver library to open when the first kernel is loaded."""
    global _path
    _path = path


def function(address: int, nargs: int, owner: Any) -> Callable[..., int]:
    """The C function ``int f(const int64_t *arguments)`` as a callable of ``nargs`` ints. ``owner`` is kept alive."""
    array, entry = c_int64 * nargs, ctypes.CFUNCTYPE(c_int, c_void_p)(address)

    def call(*args: int) -> int:
        if len(args) != nargs:
            raise TypeError(f"this kernel takes {nargs} arguments, all by position; got {len(args)}")
        return entry(array(*args))

    call.owner = owner  # type: ignore[attr-defined]
    return call


@functools.cache
def _cuda(path: str) -> Any:
    try:
        cuda = ctypes.CDLL(path)
    except OSError as e:
        raise DeviceError(f"cannot load the CUDA driver: {e}") from e
    if cuda.cuInit(0):
        raise DeviceError("the CUDA driver finds no usable GPU (cuInit failed)")
    return cuda


class launcher:  # (named as in the extension)
    """A GPU kernel: called with a stream, a grid and ``nargs`` ints. ``facts``: see ``cuda_launch.facts``. It is loaded
    at the first launch; now, if the facts name a device."""

    def __init__(self, name: str, facts: tuple[bytes, str, int, int, int, int], nargs: int):
        self.name, self.nargs = name, nargs
        self.image, self.entry, self.shared, self.threads, _, self.device = facts
        self.function: int | None = None
        if self.device >= 0:
            self.load()

    def __call__(self, stream: int, grid: int, *args: int) -> None:
        if len(args) != self.nargs:
            raise TypeError(f"kernel {self.name} takes a stream, a grid and {self.nargs} arguments, by position")
        if grid > 0:
            if self.function is None:
                self.load()
            values = [c_int64(a - 2**64 if a >= 2**63 else a) for a in (*args, 0, 0)]
            self.start(stream, grid, (c_void_p * len(values))(*map(ctypes.addressof, values)))

    def start(self, stream: int | None, grid: int, params: Any) -> None:
        """Launch with an array of the arguments' addresses. (Never early: that the kernel waits for the previous one is
        merely superfluous then.)"""
        x, y, z = grid, 1, 1
        if grid >> 62:
            x, y, z = grid & (2**31 - 1), 1 + (grid >> 31 & 0xFFFF), 1 + (grid >> 47 & 0x7FFF)
        if x > 2**31 - 1 - (grid >> 62) or y > 65535 or z > 32767:
            raise DeviceError(
                f"cannot launch kernel {self.name}: a grid of too many programs; the limit is 2^31 - 1, and 65535 and "
                "32767 along y and z"
            )
        one = c_uint(1)
        self._check("launch", _cuda(_path).cuLaunchKernel(
            c_void_p(self.function), c_uint(x), c_uint(y), c_uint(z), c_uint(self.threads), one, one,
            c_uint(self.shared), c_void_p(stream), params, None,
        ))  # fmt: skip

    def load(self) -> None:
        cuda, before, module, found = _cuda(_path), c_void_p(), c_void_p(), c_void_p()
        self._check("load", cuda.cuCtxGetCurrent(byref(before)))
        entered = self.device >= 0 or not before.value
        if entered:
            handle, context = c_int(), c_void_p()
            self._check("load", cuda.cuDeviceGet(byref(handle), max(self.device, 0)))
            self._check("load", cuda.cuDevicePrimaryCtxRetain(byref(context), handle))
            self._check("load", cuda.cuCtxSetCurrent(context))
        self._check("load", cuda.cuModuleLoadData(byref(module), self.image))
        self._check("load", cuda.cuModuleGetFunction(byref(found), module, self.entry.encode()))
        if self.shared > 48 * 1024:
            self._check("load", cuda.cuFuncSetAttribute(found, 8, self.shared))
        if entered and before.value:
            cuda.cuCtxSetCurrent(before)
        self.function = found.value

    def _check(self, doing: str, result: int) -> None:
        if result:
            text, name = c_char_p(), c_char_p()
            _cuda(_path).cuGetErrorString(result, byref(text))
            _cuda(_path).cuGetErrorName(result, byref(name))
            message, code = (text.value or b"unknown error").decode(), (name.value or b"?").decode()
            raise DeviceError(f"cannot {doing} kernel {self.name}: {message} ({code}, CUDA error {result})")


# -- host_graph.c: C++ wrappers ---------------------------------------------------------------------------
NONE, TENSOR, INT, FLOAT, OBJECT, BOOL = range(6)  # VALUE_...
TORCH, DRIVER, INDEX, ARGUMENT, PYTHON, WRAPPER = range(1, 7)  # FAILED_...


def _struct(**fields: Any) -> Any:
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


Value = _struct(kind=c_int32, bits=c_int64)
Frame = _struct(step=c_char_p, kind=c_int32, argument=c_int32, text=ctypes.c_char * 1000)
Kernel = _struct(
    function=c_void_p, context=c_void_p, module=c_void_p, name=c_char_p, threads=c_uint32, shared=c_uint32,
    early=c_int32, checked=c_int32,
)  # fmt: skip
CALLBACKS = {
    "python": CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, POINTER(Value), c_int32, POINTER(Value), c_int32),
    "load": CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32),
    "zeros": CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_int64, POINTER(c_void_p)),
    "launch": CFUNCTYPE(c_int32, c_void_p, c_void_p, POINTER(Kernel), c_int64, c_void_p, POINTER(c_void_p)),
    "drop": CFUNCTYPE(None, c_void_p, c_void_p, c_int32),
}
Host = _struct(torch=c_void_p, kernels=c_void_p, symbols=c_void_p, constants=c_void_p, **CALLBACKS, gpu=c_int32)
ENTRY = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)

# (PYFUNCTYPE: these are Python's own, to be called with the GIL)
_capsule_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_new_handle = CFUNCTYPE(c_int32, c_void_p, POINTER(c_void_p))(address("aoti_torch_new_tensor_handle"))
_delete = CFUNCTYPE(c_int32, c_void_p)(address("aoti_torch_delete_tensor_object"))


def handle_of(t: torch.Tensor) -> int:
    """A new handle of ``t``."""
    return _capsule_pointer(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([t])[0], None)


def tensor_of(handle: int) -> torch.Tensor:
    """The tensor of a handle, which stays its owner's."""
    mine = c_void_p()
    if _new_handle(handle, ctypes.byref(mine)):
        raise RuntimeError("a tensor could not be wrapped")
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(mine, None, None)])[0]


class graph:  # (named as in the extension)
    """See ``host.graph``."""

    def __init__(
        self, name: str, entry: int, inputs: int, outputs: int, kernels: Sequence[tuple[str, tuple | None]],
        loaders: Sequence[Any], functions: Sequence[Callable[..., tuple]], objects: Sequence[Any],
        constants: Sequence[torch.Tensor], symbols: Sequence[int], zeros: Callable[[int, int, int], torch.Tensor],
        library: Any, gpu: int, unloads: bool,
    ):  # fmt: skip
        self.name, self.inputs, self.outputs, self.library = name, inputs, outputs, library
        self.loaders, self.functions, self.objects, self.make_zeros = loaders, functions, objects, zeros
        self.lock = threading.Lock()
        self.launchers: dict[int, launcher] = {}
        self.calls: dict[int, SimpleNamespace] = {}  # in progress, by their frames' addresses
        self.kernels = (Kernel * (len(kernels) + 1))()
        handles = [handle_of(t) for t in constants]
        weakref.finalize(self, lambda: [_delete(h) for h in handles]).atexit = False
        for i, (kernel, facts) in enumerate(kernels):
            self.kernels[i].name = kernel.encode()
            if facts is not None:
                self._fill(i, facts)
        found = [address(n) for n, _ in FUNCTIONS], symbols, handles
        self.tables = [(c_void_p * (len(a) + 1))(*a) for a in found]
        torch_table, symbol_table, constant_table = map(ctypes.addressof, self.tables)
        callbacks = [kind(self._guarded(getattr(self, "_" + what))) for what, kind in CALLBACKS.items()]
        self.host = Host(torch_table, ctypes.addressof(self.kernels), symbol_table, constant_table, *callbacks, gpu)
        self.entry = ENTRY(entry)

    def __call__(self, args: list) -> tuple:
        if not isinstance(args, list):
            raise TypeError("a compiled graph takes one list, which it empties")
        if len(args) != self.inputs:
            raise ERRORS[ARGUMENT](f"graph {self.name} takes {self.inputs} arguments, got {len(args)}")
        values, outputs = (Value * (len(args) + 1))(), (Value * (self.outputs + 1))()
        call = SimpleNamespace(owned=list(args), values=values, frame=Frame(), error=None, kept=[])
        where = ctypes.addressof(call.frame)
        try:
            for v, x in zip(values, call.owned):
                if isinstance(x, torch.Tensor):
                    v.kind, v.bits = TENSOR, handle_of(x)
                elif type(x) is int and -(2**63) <= x < 2**63:
                    v.kind, v.bits = INT, x
            x = None  # the call alone holds the inputs
            args.clear()
            self.calls[where] = call
            if self.entry(ctypes.addressof(self.host), where, values, outputs):
                raise self._error(call)
            return tuple(self._object(outputs[i]) for i in range(self.outputs))
        finally:
            self.calls.pop(where, None)
            for v in (*values, *outputs):
                if v.kind == TENSOR:
                    _delete(v.bits)
            call.error = None

    def _object(self, v: Any) -> Any:
        """What a value is in Python."""
        if v.kind == TENSOR:
            return tensor_of(v.bits)
        if v.kind == FLOAT:
            return c_double.from_buffer(v, Value.bits.offset).value
        if v.kind == BOOL:
            return bool(v.bits)
        return self.objects[v.bits] if v.kind == OBJECT else v.bits if v.kind == INT else None

    def _error(self, call: SimpleNamespace) -> BaseException:
        if call.error is not None:
            return call.error
        kind, step = call.frame.kind, (call.frame.step or b"the start").decode()
        text = call.frame.text.decode(errors="replace")
        what = address("torch_exception_get_what_without_backtrace")
        if kind == TORCH and not text and what:
            text = (CFUNCTYPE(c_char_p)(what)() or b"").decode(errors="replace")
        if kind in (INDEX, ARGUMENT):
            one = kind == ARGUMENT and call.frame.argument >= 0
            return ERRORS[kind](f"{text}; got {described(call.owned[call.frame.argument])}" if one else text)
        memory = kind == TORCH and "out of memory" in text
        text = f"graph {self.name}, step {step}: {text or 'it failed; see stderr'}"
        return ERRORS[OUT_OF_MEMORY if memory else kind or WRAPPER](text)

    # -- what a wrapper calls -------------------------------------------------------------------------
    def _guarded(self, fn: Callable[..., None]) -> Callable[..., int]:
        """``fn`` with the call in progress; its exception becomes that call's error."""

        def guarded(host: int, frame: int, *args: Any) -> int:
            call = self.calls[frame]
            try:
                fn(call, *args)
                return 0
            except BaseException as e:
                call.error, call.frame.kind = e, PYTHON
                return -1

        return guarded

    def _python(self, call: Any, which: int, args: Any, n: int, results: Any, m: int) -> None:
        for i, x in enumerate(self.functions[which](*[self._object(args[i]) for i in range(n)])[:m]):
            if isinstance(x, torch.Tensor):
                results[i].kind, results[i].bits = TENSOR, handle_of(x)
            elif isinstance(x, float):
                results[i].kind, results[i].bits = FLOAT, c_int64.from_buffer(c_double(x)).value
            else:
                kind = BOOL if isinstance(x, bool) else INT
                results[i].kind, results[i].bits = (NONE, 0) if x is None else (kind, x.__index__())

    def _load(self, call: Any, i: int) -> None:
        with self.lock:
            if not self.kernels[i].function:
                self._fill(i, self.loaders[i]())

    def _fill(self, i: int, facts: tuple) -> None:
        k = self.kernels[i]
        if len(facts) == 2:
            k.checked, k.function = facts[1], facts[0]
            return
        self.launchers[i] = launcher(k.name.decode(), facts, 0)
        if self.launchers[i].function is None:
            self.launchers[i].load()
        k.function = self.launchers[i].function

    def _zeros(self, call: Any, device: int, stream: int | None, count: int, words: Any) -> None:
        call.kept.append(self.make_zeros(device, stream or 0, count))
        words[0] = call.kept[-1].data_ptr()

    def _launch(self, call: Any, kernel: Any, grid: int, stream: int | None, params: Any) -> None:
        i = (ctypes.addressof(kernel.contents) - ctypes.addressof(self.kernels)) // ctypes.sizeof(Kernel)
        self.launchers[i].start(stream, grid, params)

    def _drop(self, call: Any, i: int) -> None:
        _delete(call.values[i].bits)
        call.values[i].kind, call.owned[i] = NONE, None
