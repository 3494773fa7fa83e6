"""The extension's kernels (``host.c``) in ctypes, several times slower: where it cannot be built, for lack of a C
compiler or of Python's headers. (Wrappers are in Python there.)"""

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_int64, c_uint, c_void_p
from typing import Any

from ..errors import DeviceError


def libcuda() -> str:
    """The driver library to load."""
    return os.environ.get("REFLIB_LIBCUDA") or "libcuda.so.1"


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
def _cuda() -> Any:
    try:
        cuda = ctypes.CDLL(libcuda())
    except OSError as e:
        raise DeviceError(f"cannot load the CUDA driver: {e}") from e
    if cuda.cuInit(0):
        raise DeviceError("the CUDA driver finds no usable GPU (cuInit failed)")
    return cuda


class launcher:  # (named as in the extension)
    """A GPU kernel: called with a stream, a grid and ``nargs`` ints (None: any number). ``facts``: see
    ``cuda_launch.facts``. It is loaded at the first launch; now, if the facts name a device. (Never started early: that
    the kernel waits for the previous one is merely superfluous then.)"""

    def __init__(self, name: str, facts: tuple[bytes, str, int, int, int, int], nargs: int | None):
        self.name, self.nargs = name, nargs
        self.image, self.entry, self.shared, self.threads, _, self.device = facts
        self.function: int | None = None
        if self.device >= 0:
            self.load()

    def __call__(self, stream: int, grid: int, *args: int) -> None:
        if self.nargs not in (None, len(args)):
            raise TypeError(f"kernel {self.name} takes a stream, a grid and {self.nargs} arguments, by position")
        if grid <= 0:
            return
        if self.function is None:
            self.load()
        x, y, z = grid, 1, 1
        if grid >> 62:
            x, y, z = grid & (2**31 - 1), 1 + (grid >> 31 & 0xFFFF), 1 + (grid >> 47 & 0x7FFF)
        if x > 2**31 - 1 - (grid >> 62) or y > 65535 or z > 32767:
            raise DeviceError(
                f"cannot launch kernel {self.name}: a grid of too many programs; the limit is 2^31 - 1, and 65535 and "
                "32767 along y and z"
            )
        values = [c_int64(a - 2**64 if a >= 2**63 else a) for a in (*args, 0, 0)]
        params, one = (c_void_p * len(values))(*map(ctypes.addressof, values)), c_uint(1)
        self._check("launch", _cuda().cuLaunchKernel(
            c_void_p(self.function), c_uint(x), c_uint(y), c_uint(z), c_uint(self.threads), one, one,
            c_uint(self.shared), c_void_p(stream), params, None,
        ))  # fmt: skip

    def load(self) -> None:
        cuda, before, module, found = _cuda(), c_void_p(), c_void_p(), c_void_p()
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
            _cuda().cuGetErrorString(result, byref(text))
            _cuda().cuGetErrorName(result, byref(name))
            message, code = (text.value or b"unknown error").decode(), (name.value or b"?").decode()
            raise DeviceError(f"cannot {doing} kernel {self.name}: {message} ({code}, CUDA error {result})")
