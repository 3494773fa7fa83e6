"""Inputs of a graph as text and back: sizes, strides, dtype, device, shared memory, symbols, and values or a seed."""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..autotune.inputs import extent

FEW = 16  # elements whose values are kept in any case


@dataclass(frozen=True)
class Symbol:
    """An integer argument: an expression of SYMBOLS, such as ``s77`` or ``2*s77``."""

    expr: str


@dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    ``between``: its values are drawn there, from ``seed``. ``data``: they are known instead: a list of all elements in
    memory, from ``offset`` to the last that the strides reach, or their bytes (zlib, base64). ``storage``: (number,
    bytes) of memory that several tensors share. ``skew``: its address modulo 16. ``symbolic``: sizes and strides as
    expressions. ``static``: a model's parameter or buffer."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    offset: int = 0
    seed: int = 0
    between: tuple[float, float] = (-1.0, 1.0)
    data: Any = None
    storage: tuple[int, int] | None = None
    skew: int = 0
    grad: bool = False
    parameter: bool = False
    static: bool = False
    symbolic: tuple[str, str] = ("", "")

    def __repr__(self) -> str:
        parts = [f"{self.size}", f"{self.stride}"]
        for f in fields(self)[2:]:
            if (value := getattr(self, f.name)) != f.default:
                parts.append(f"{f.name}={value!r}")
        return f"Tensor({', '.join(parts)})"


class Unprintable(Exception):
    """An input that has no text."""


# -- from values to text ----------------------------------------------------------------------------
def describe(values: Sequence[Any], fakes: Sequence[Any], static: Sequence[bool], whole: bool = False) -> list[Any]:
    """What is written for each input: a Tensor, a Symbol or a plain value. ``fakes``: what capture knows of each.
    ``whole``: with all values. Raises Unprintable for a sparse tensor, a subclass and the like."""
    storages: dict[int, int] = {}
    shared = [_key(v) for v in values if isinstance(v, torch.Tensor)]
    out: list[Any] = []
    for i, (v, fake) in enumerate(zip(values, fakes)):
        if isinstance(v, torch.Tensor):
            held = None
            if shared.count(_key(v)) > 1:
                held = storages.setdefault(_key(v), len(storages)), _hint(v.untyped_storage().nbytes())
            out.append(_tensor(v, fake, i, held, static[i], whole))
        elif isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            out.append(Symbol(str(v.node.expr)))
        elif isinstance(fake, torch.SymInt):
            out.append(Symbol(str(fake.node.expr)))
        elif v is None or isinstance(v, (bool, int, float, str)):
            out.append(v)
        else:
            raise Unprintable(f"input {i} is a {type(v).__name__}")
    return out


def _key(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage()._cdata
    except Exception:  # a sparse tensor
        return id(t)


def _tensor(t: torch.Tensor, fake: Any, i: int, storage: tuple[int, int] | None, static: bool, whole: bool) -> Tensor:
    plain = t.layout == torch.strided and not t.is_quantized and type(t) in (torch.Tensor, torch.nn.Parameter)
    if not plain and not isinstance(t, torch._subclasses.FakeTensor):
        raise Unprintable(f"input {i} is a {type(t).__name__} of layout {t.layout}")
    if t.is_conj() or t.is_neg():
        raise Unprintable(f"input {i} is conjugated or negated in passing")
    like = fake if isinstance(fake, torch.Tensor) else t
    sizes = tuple(like.shape), tuple(like.stride())
    dynamic = any(isinstance(n, torch.SymInt) for n in (*sizes[0], *sizes[1]))
    made = Tensor(
        tuple(map(_hint, t.shape)), tuple(map(_hint, t.stride())), t.dtype, str(t.device), _hint(t.storage_offset()), i,
        storage=storage, grad=t.requires_grad, parameter=isinstance(t, torch.nn.Parameter), static=static,
        symbolic=tuple(", ".join(map(str, n)) for n in sizes) if dynamic else ("", ""),  # type: ignore[arg-type]
    )  # fmt: skip
    changes: dict[str, Any] = {"between": (-1.0, 1.0) if t.dtype.is_floating_point else (0, 1)}
    if not isinstance(t, torch._subclasses.FakeTensor) and t.numel():
        if t.device.type == "cpu":
            changes["skew"] = (t.data_ptr() - t.storage_offset() * t.itemsize) % 16
        memory = t.detach().as_strided((extent(t.shape, t.stride()),), (1,))
        changes |= {"data": _bytes(memory)} if whole else _values(memory)
    return Tensor(**{f.name: getattr(made, f.name) for f in fields(made)} | changes)


def _hint(n: Any) -> int:
    return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)


def _bytes(memory: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(memory.cpu().view(torch.uint8).numpy().tobytes())).decode()


def _values(memory: torch.Tensor) -> dict[str, Any]:
    """All of a few; of many, between what they are."""
    if memory.numel() <= FEW:
        return {"data": memory.tolist()}
    if memory.dtype == torch.bool or memory.is_complex():
        return {}
    memory = memory.float() if memory.dtype.is_floating_point and memory.dtype != torch.float64 else memory
    if memory.dtype.is_floating_point:
        memory = memory[memory.isfinite()]
    low, high = (x.item() for x in memory.aminmax()) if memory.numel() else (0, 1)
    return {"between": (low, high)}


# -- from text to values ----------------------------------------------------------------------------
def make(inputs: Iterable[Any], symbols: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The values: plain tensors, and integers for symbols."""
    inputs = list(inputs)
    hints = {name: value for name, (value, *_) in symbols.items()}
    memory: dict[int, torch.Tensor] = {}
    for x in inputs:
        if isinstance(x, Tensor) and x.storage is not None and x.storage[0] not in memory:
            memory[x.storage[0]] = _flat(_memory(x.storage[1], x), x.dtype)
    return [
        _made(x, memory) if isinstance(x, Tensor) else int(evaluate(x.expr, hints)) if isinstance(x, Symbol) else x
        for x in inputs
    ]


def hold(module: torch.nn.Module, path: str, x: Tensor) -> None:
    """Make ``module.path`` that parameter or buffer, and the modules on the way to it."""
    *on_the_way, name = path.split(".")
    for inner in on_the_way:
        if inner not in module._modules:
            module.add_module(inner, torch.nn.Module())
        module = module.get_submodule(inner)
    [value] = make([x], {})
    module.register_parameter(name, value) if x.parameter else module.register_buffer(name, value)


def _memory(size: int, x: Tensor) -> torch.Tensor:
    """Bytes, of which the first has the address ``skew`` modulo 16; one storage."""
    if not (x.skew and size) or x.device != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=_there(x))
    block = bytearray(size + 16)
    start = (x.skew - torch.frombuffer(block, dtype=torch.uint8).data_ptr()) % 16
    return torch.frombuffer(block, dtype=torch.uint8, offset=start, count=size)


def _there(x: Tensor) -> str:
    """Its device; of a GPU that is not here, only what the tensor looks like can be had."""
    return x.device if torch.cuda.is_available() or not x.device.startswith("cuda") else "cpu"


def _flat(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a storage, as one tensor that is no view."""
    n = whole.nbytes // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), 0, (n,), (1,))


def _made(x: Tensor, memory: Mapping[int, torch.Tensor]) -> torch.Tensor:
    n = extent(x.size, x.stride)
    whole = memory[x.storage[0]] if x.storage is not None else _memory((x.offset + n) * x.dtype.itemsize, x)
    flat = torch.empty(0, dtype=x.dtype, device=whole.device).set_(whole.untyped_storage(), x.offset, (n,), (1,))
    if isinstance(x.data, str):
        raw = bytearray(zlib.decompress(base64.b64decode(x.data)))
        flat.copy_(torch.frombuffer(raw, dtype=x.dtype) if raw else flat)
    elif x.data is not None:
        flat.copy_(torch.tensor(x.data, dtype=x.dtype))
    else:
        flat.copy_(_drawn(x, n))
    if x.storage is not None and whole.dtype == x.dtype:  # several views of one tensor
        t = whole.as_strided(x.size, x.stride, x.offset)
    else:
        t = torch.empty(0, dtype=x.dtype, device=whole.device).set_(whole.untyped_storage(), x.offset, x.size, x.stride)
    return torch.nn.Parameter(t, x.grad) if x.parameter else t.requires_grad_(x.grad)


def _drawn(x: Tensor, n: int) -> torch.Tensor:
    g, (low, high) = torch.Generator().manual_seed(x.seed), x.between
    if x.dtype == torch.bool:
        return torch.rand(n, generator=g) < 0.5
    if x.dtype.is_complex:
        return torch.complex(torch.rand(n, generator=g) - 0.5, torch.rand(n, generator=g) - 0.5)
    if x.dtype.is_floating_point:
        bell = torch.rand(4, n, generator=g, dtype=torch.float64).mean(0)  # as weights are: few are near the ends
        return low + (high - low) * bell
    return torch.randint(int(low), min(int(high), 2**62) + 1, (n,), generator=g)


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """An expression as sympy prints it, of ints or SymInts."""
    functions = {"FloorDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b, "Max": max, "Min": min}
    return eval(text, {**functions, "__builtins__": {}}, dict(names))
