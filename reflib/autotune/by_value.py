"""Functions and custom ops that exist in this process alone (a script's, a notebook cell's, a closure's), by value.

A worker process imports what it can by name. What it cannot is sent as it is: functions by cloudpickle, with what they
refer to; an op as its schema and its functions, which the worker registers under the op's name. The functions are
unpickled where the op is first called, so a worker that only compiles never sees them. What cannot be sent, with
reason: what holds a tensor on a device (reading it would wait for that device), a lock, a file, very much data.
"""

import contextlib
import functools
import importlib
import inspect
import linecache
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from types import ModuleType
from typing import Any

import torch

from ..errors import MeasureError

MOST = 2**26  # bytes that one function may hold


@dataclass(frozen=True)
class Definition:
    """An op: ``ns::name``, its schema without the name, and by kind of device (None: any) its function, pickled."""

    name: str
    schema: str
    functions: tuple[tuple[str | None, bytes], ...]


class CannotSend(MeasureError):
    """Something that another process cannot have."""


# -- here ---------------------------------------------------------------------------------------------
def packed_ops(names: list[str]) -> bytes:
    """What a worker unpickles to have these ops (``ns::name``, of ``torch.library.custom_op``), and those that their
    functions refer to. Raises CannotSend."""
    from torch._library.custom_ops import OPDEFS

    found: dict[str, Definition] = {}
    todo = list(names)
    while todo:
        if (name := todo.pop()) not in found:
            op = OPDEFS.get(name)
            if op is None:
                raise CannotSend(f"{name} is not made by torch.library.custom_op")
            functions = []
            for device, fn in op._backend_fns.items():
                code, more = packed(_inner(name, fn), name)
                functions.append((device, code))
                todo += more
            found[name] = Definition(name, op._schema, tuple(functions))
    return pickle.dumps(_Registering(tuple(found.values())))


def packed(what: Any, name: str) -> tuple[bytes, list[str]]:
    """``what`` (called ``name`` in errors) as bytes, and the ops that it refers to. Raises CannotSend."""
    try:
        out = BytesIO()
        pickler = _pickler()(out)
        with _by_value(what):
            pickler.dump(what)
    except Exception as e:
        said = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise CannotSend(f"{name} cannot be sent to another process ({said})") from e
    if out.tell() > MOST:
        raise CannotSend(f"{name} cannot be sent to another process (it refers to {out.tell() / 2**20:.0f} MB of data)")
    return out.getvalue(), pickler.ops


def _inner(name: str, fn: Any) -> Any:
    """The user's function in what PyTorch keeps, which refers to the op itself."""
    held = inspect.getclosurevars(inspect.unwrap(fn)).nonlocals
    if "fn" not in held:
        raise CannotSend(f"{name} cannot be sent to another process (this PyTorch keeps its function elsewhere)")
    return held["fn"]


@contextlib.contextmanager
def _by_value(what: Any) -> Iterator[None]:
    """While this is entered, functions of ``what``'s module are pickled by value if no worker can import it."""
    import cloudpickle

    from .isolation import importable

    module = sys.modules.get(getattr(what, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or importable(module.__name__):
        yield  # (__main__ is by value anyway)
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _pickler() -> Any:
    """(cloudpickle is imported where it is needed.)"""
    import cloudpickle
    from torch._library.custom_ops import CustomOpDef

    class Pickler(cloudpickle.Pickler):
        """``ops``: names of the user's ops that were met."""

        def __init__(self, file: Any) -> None:
            super().__init__(file)
            self.ops: list[str] = []

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CustomOpDef):
                self.ops.append(obj._qualname)
                return _op, (obj._qualname,)
            if isinstance(obj, torch._ops.OpOverload):
                return _op, (obj._schema.name, obj._overloadname)
            if isinstance(obj, torch._ops.OpOverloadPacket):
                return _op, (obj._qualified_op_name,)
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:  # torch.ops, torch._inductor.config
                return _module, (obj.__name__,)
            if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                raise pickle.PicklingError(f"it refers to a tensor on {obj.device}")
            triton = sys.modules.get("triton.runtime.jit")
            if triton is not None and type(obj) is triton.JITFunction:
                return _kernel, _kernel_parts(obj)
            return super().reducer_override(obj)

    return Pickler


def _kernel_parts(kernel: Any) -> tuple[Any, ...]:
    """Triton reads a function's source again, from its file; a cell's file is in ``linecache`` alone."""
    file = inspect.getsourcefile(kernel.fn) or ""
    options = {
        k: getattr(kernel, k) for k in ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug")
    }
    return kernel.fn, file, tuple(linecache.getlines(file)), options


# -- in a worker --------------------------------------------------------------------------------------
class _Registering:
    """Pickled, it is the call of ``register``."""

    def __init__(self, definitions: tuple[Definition, ...]):
        self.definitions = definitions

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return register, (self.definitions,)


_registered: dict[str, tuple[Definition, Any]] = {}  # by name, with the Library that holds it


def register(definitions: tuple[Definition, ...]) -> None:
    """Each op as it is defined now: one that a cell has defined again replaces the earlier. One that an imported file
    registers stays."""
    for d in definitions:
        before = _registered.get(d.name)
        if before is not None and before[0] == d:
            continue
        if before is not None:
            before[1]._destroy()
        space, _, name = d.name.partition("::")
        if before is None and hasattr(getattr(torch.ops, space), name):
            continue
        library = torch.library.Library(space, "FRAGMENT")  # (kept as long as the op)
        library.define(name + d.schema)
        for device, code in d.functions:
            key = "CompositeExplicitAutograd" if device is None else torch._C._dispatch_key_for_device(device)
            library.impl(name, _first_called(code), key)
        _registered[d.name] = d, library


def _first_called(code: bytes) -> Callable[..., Any]:
    function = functools.cache(lambda: pickle.loads(code))
    return lambda *args, **kwargs: function()(*args, **kwargs)


def makers(code: bytes) -> Mapping[str, Any]:
    """Functions that make inputs, by their keys (``Request.makers``)."""
    return pickle.loads(code) if code else {}


def _op(name: str, overload: str | None = None) -> Any:
    space, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, space), rest)
    return packet if overload is None else getattr(packet, overload)


def _module(name: str) -> Any:
    """A module that can be imported, or is an attribute of one."""
    try:
        return importlib.import_module(name)
    except ImportError:
        space, _, last = name.rpartition(".")
        return getattr(_module(space), last)


def _kernel(fn: Any, file: str, lines: tuple[str, ...], options: dict[str, Any]) -> Any:
    import triton

    linecache.cache.setdefault(file, (sum(map(len, lines)), None, list(lines), file))
    return triton.jit(fn, **options)
