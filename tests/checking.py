"""The one definition of *wrong*.

A result is wrong if its error against a float64 reference is more than twice eager's own error plus a small floor, or
if it has another structure, dtype, shape, stride, requires_grad or alias than eager's. What was done to the inputs
(mutation) and to their gradients counts as results. Integers and booleans must be equal.

The error of a tensor is the worst of its elements' errors, each relative to the element and to the typical element:
``|x - ref| / (|ref| + mean |ref|)``. An element that equals eager's, or differs from it by an
ulp or so, is right. Where eager's own error is so large that it is noise (a sum whose terms cancel), or eager's result
is 0 everywhere, as the reference but for its last digits, a few rounding errors of numbers about 1 are right.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

FLOOR = {torch.float64: 1e-11, torch.float32: 3e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
NOISE = 100
_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


@dataclass
class Outcome:
    """What a call gave: the leaves of its result, its inputs afterwards, gradients; or the error it raised."""

    leaves: list[Any] = field(default_factory=list)
    structure: Any = None
    inputs: list[Any] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    aliases: list[tuple[int, ...]] = field(default_factory=list)
    error: Exception | None = None


# -- making calls -----------------------------------------------------------------------------------
def clone(tree: Any, cache: dict[int, Any] | None = None) -> Any:
    """A copy of every tensor in ``tree``: strides, offsets, alignment, requires_grad and sharing of storage kept."""
    storages: dict[int, Any] = {} if cache is None else cache

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if t.layout != torch.strided or t.is_quantized or type(t) not in (torch.Tensor, torch.nn.Parameter):
            return t.detach().clone().requires_grad_(t.requires_grad)
        old = t.untyped_storage()
        new = storages.setdefault(old._cdata, None) or _copy_storage(old)
        storages[old._cdata] = new
        out = torch.empty(0, dtype=t.dtype, device=t.device).set_(new, t.storage_offset(), t.shape, t.stride())
        if t.is_conj():
            out = out.conj()
        if t.is_neg():
            out = torch._neg_view(out)
        if isinstance(t, torch.nn.Parameter):
            out = torch.nn.Parameter(out, t.requires_grad)
        return out.requires_grad_(t.requires_grad)

    return tree_map(one, tree)


def _copy_storage(old: Any) -> Any:
    skew = old.data_ptr() % 16 if old.device.type == "cpu" else 0
    if not skew or not old.nbytes():
        return old.clone()
    block = bytearray(old.nbytes() + 32)
    base = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
    start = (skew - base) % 16
    new = torch.frombuffer(block, dtype=torch.uint8, offset=start, count=old.nbytes())
    new.copy_(torch.empty(0, dtype=torch.uint8).set_(old, 0, (old.nbytes(),), (1,)))
    return new.untyped_storage()


def widen(tree: Any) -> Any:
    """``tree`` with every float as float64 and every complex as complex128, dtypes among the arguments too."""

    def one(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return _WIDER.get(x, x)
        if not isinstance(x, torch.Tensor) or x.dtype not in _WIDER or x.is_quantized:
            return x
        wide = x.detach().to(_WIDER[x.dtype])
        if wide.layout == torch.strided and wide.numel() and wide.stride() != x.stride():
            wide = wide.expand(x.shape) if 0 in x.stride() else wide
        return wide.requires_grad_(x.requires_grad)

    return tree_map(one, tree)


class _Widening(TorchFunctionMode):
    """What the function itself rounds to a narrower float stays wide, too: eager's error counts those roundings."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        narrow = lambda x: _WIDER.get(x, x) if isinstance(x, torch.dtype) else x  # noqa: E731
        return func(*(narrow(a) for a in args), **{k: narrow(v) for k, v in (kwargs or {}).items()})


@contextmanager
def _widening() -> Iterator[None]:
    """Where integers become floats, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(before)


class ReadingFirst(TorchFunctionMode):
    """An update reads all that it needs before it writes, as in a functional graph. (Eager's loops write as they go:
    of ``x.mul_(x[:1])`` the elements after the first are multiplied by the first one's new value.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        out = kwargs.pop("out", None)
        updates = name == "__setitem__" or name.endswith("_") and not name.endswith("__")
        if out is None and not (updates and args):
            return func(*args, **kwargs)
        written, read = ((), args) if out is not None else (args[:1], args[1:])
        there = {t.untyped_storage()._cdata for t in tensors((out, written))}
        one = lambda t: t.clone() if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in there else t  # noqa: E731
        read, kwargs = tree_map(one, (read, kwargs))
        return func(*written, *read, **kwargs, **({} if out is None else {"out": out}))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def call(
    fn: Callable[..., Any], args: Any, kwargs: Any = None, backward: bool = False, wide: bool = False, seed: int = 0
) -> Outcome:
    """Call ``fn`` on copies of the arguments, with a fixed random seed; with ``backward``, differentiate what it
    returned with respect to every argument that requires grad. ``wide``: in float64."""
    args, kwargs = clone((args, kwargs or {}))
    if wide:
        args, kwargs = widen((args, kwargs))
    out = Outcome(inputs=tensors((args, kwargs)))
    seed_all(seed)
    try:
        with torch.set_grad_enabled(backward), _widening() if wide else nullcontext():
            result = fn(*args, **kwargs)
        out.leaves, out.structure = tree_flatten(result)
        out.aliases = aliases(out.inputs, out.leaves)
        if backward:
            out.grads = gradients(out.leaves, out.inputs)
    except Exception as e:
        out.error = e
    return out


def gradients(leaves: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Gradients of fixed weighted sums of the results. The weights depend on shapes only."""
    results = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
    if not results or not wanted:
        return []
    generator = torch.Generator().manual_seed(7)
    weights = [_weight(t, generator) for t in results]
    return list(torch.autograd.grad(results, wanted, weights, allow_unused=True))


def _weight(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # representable in bfloat16, so that the float64 reference gets the very same weights
    w = torch.randint(-8, 9, t.shape, generator=generator).to(torch.float64) / 8 + 0.0625
    w = w.to(device=t.device, dtype=t.dtype)
    return w if t.layout == torch.strided else w.to_sparse(layout=t.layout)


def aliases(inputs: Sequence[Any], leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """For each result the first input or earlier result that shares its storage (input i: (0, i); result: (1, i))."""
    seen: dict[int, tuple[int, ...]] = {}
    out: list[tuple[int, ...]] = []
    for kind, group in ((0, inputs), (1, leaves)):
        for i, t in enumerate(group):
            where: tuple[int, ...] = ()
            if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel():
                where = seen.setdefault(t.untyped_storage().data_ptr(), (kind, i))
            if kind:
                out.append(where if where != (1, i) else ())
    return out


# -- judging ----------------------------------------------------------------------------------------
def wrong(actual: Outcome, eager: Outcome, reference: Outcome | None = None) -> list[str]:
    """What is wrong with ``actual``, in sentences; empty if it is right. Assumes eager raised nothing.

    reference: the call in float64; None, or one that failed or has another structure: eager's results stand for it.
    """
    if actual.error is not None:
        text = str(actual.error).partition("\n")[0][:300]
        return [f"raised {type(actual.error).__name__}: {text}"]
    out: list[str] = []
    coarse = max((FLOOR.get(t.dtype, 0.0) for t in eager.inputs if isinstance(t, torch.Tensor)), default=0.0)
    if actual.structure != eager.structure:
        return [f"returned {actual.structure}, eager {eager.structure}"]
    if actual.aliases != eager.aliases:
        out.append(f"aliases {actual.aliases}, eager's {eager.aliases}")
    for what in ("leaves", "inputs", "grads"):
        got, want = getattr(actual, what), getattr(eager, what)
        wide = getattr(reference, what) if reference is not None and reference.error is None else []
        wide = wide if len(wide) == len(want) else [None] * len(want)
        if len(got) != len(want):
            out.append(f"{len(got)} {what}, eager {len(want)}")
            continue
        name = {"leaves": "output", "inputs": "input", "grads": "gradient"}[what]
        for i, (g, w, r) in enumerate(zip(got, want, wide)):
            out += [f"{name} {i}: {p}" for p in wrong_leaf(g, w, r, what != "grads", coarse)]
    return out


def wrong_leaf(got: Any, want: Any, wide: Any = None, strict: bool = True, coarse: float = 0.0) -> list[str]:
    """What is wrong with one value. ``strict``: strides count (a gradient may be laid out as it likes). coarse: as in
    ``wrong_values``."""
    if not isinstance(want, torch.Tensor):
        return [] if _equal(got, want) else [f"is {got!r}, eager's {want!r}"]
    if not isinstance(got, torch.Tensor):
        return [f"is {type(got).__name__}, eager's a tensor"]
    for what in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(got, what) != getattr(want, what):
            return [f"{what} is {getattr(got, what)}, eager's {getattr(want, what)}"]
    out = []
    if strict and want.layout == torch.strided and not same_strides(got, want):
        out.append(f"strides {got.stride()}, eager's {want.stride()} (shape {tuple(want.shape)})")
    if not isinstance(wide, torch.Tensor) or wide.shape != want.shape:
        wide = None
    problem = wrong_values(got.detach(), want.detach(), None if wide is None else wide.detach(), coarse)
    return out + ([problem] if problem else [])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(b, float) and b != b:
        return isinstance(a, float) and a != a
    return type(a) is type(b) and (a == b or (isinstance(b, (float, complex)) and abs(a - b) <= 1e-5 * abs(b)))


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not b.numel() or all(n == 1 or s == t for n, s, t in zip(b.shape, a.stride(), b.stride()))


def wrong_values(got: torch.Tensor, want: torch.Tensor, wide: torch.Tensor | None, coarse: float = 0.0) -> str:
    """Empty, or how the values are wrong.

    coarse: the floor of the least precise input. Where eager's error shows that values were rounded to that dtype on
    their way, few of them may be rounded well by luck: theirs is not the measure."""
    if want.is_quantized:
        return "" if torch.equal(got, want) else "quantized values differ"
    if want.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
        wide = wide.to_dense() if wide is not None else None
    if want.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
        wide = torch.view_as_real(wide.resolve_conj()) if wide is not None and wide.is_complex() else None
    if not want.dtype.is_floating_point:
        bad = got != want
        n = int(bad.sum())
        return f"{n} of {want.numel()} values differ, first {_first(got, bad)} for {_first(want, bad)}" if n else ""
    floor = FLOOR.get(want.dtype, 0.25)
    ref = want.double() if wide is None else wide.double()
    g, w = got.double(), want.double()
    same = (g == w) | (g.isnan() & w.isnan())
    if bool(same.all()):
        return ""
    limit = torch.finfo(want.dtype).max
    ok = same | (g.isnan() & ref.isnan()) | (g.isinf() & (g.sign() == ref.sign()) & (ref.abs() > limit * 0.99))
    near = (g - w).abs() <= floor * w.abs()
    ok = ok | near
    finite = ref.abs() < limit
    typical = float(ref[finite].abs().mean()) if bool(finite.any()) else 0.0
    scale = torch.where(finite, ref.abs(), 0.0) + typical + torch.finfo(want.dtype).tiny
    both = finite & w.isfinite()
    own = float(((w - ref).abs() / scale)[both].max()) if bool(both.any()) else 0.0
    error = (g - ref).abs() / scale
    if own > 4 * floor:
        floor = max(floor, min(coarse, 16 * own))
    allowed = 2 * own + (floor if wide is not None else 4 * floor)
    ok = ok | (finite & (error <= allowed))
    if own > NOISE * floor or want.dtype == torch.float64:  # what cancels to nothing is noise; nothing is wider than
        # float64, so that eager's own noise does not show there
        ok = ok | ((g - ref).abs() <= 32 * torch.finfo(want.dtype).eps)
    if wide is not None and typical < 1e-12 and not bool(w.any()):  # all of it cancels: there is no other measure
        ok = ok | ((g - ref).abs() <= 4 * floor)
    if bool(ok.all()):
        return ""
    bad = ~ok
    worst = float(error[bad & error.isfinite()].max()) if bool((bad & error.isfinite()).any()) else float("nan")
    return (
        f"{int(bad.sum())} of {want.numel()} values wrong: error {worst:.3g}, eager's {own:.3g} (floor {floor:.3g}), "
        f"first {_first(got, bad)} for {_first(want, bad)}"
    )


def _first(t: torch.Tensor, mask: torch.Tensor) -> Any:
    return t.cpu()[mask.cpu()].flatten()[0].item()  # (CUDA picks no uint64)


# -- in one line ------------------------------------------------------------------------------------
def check(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    *args: Any,
    kwargs: Any = None,
    backward: bool = False,
    reference: bool = True,
    times: int = 1,
) -> None:
    """Assert that ``compiled`` is not wrong where ``fn`` is eager's. ``times``: call it so often (caches, swaps)."""
    eager = call(fn, args, kwargs, backward)
    wide = call(fn, args, kwargs, backward, wide=True) if reference else None
    for _ in range(times):
        actual = call(compiled, args, kwargs, backward)
        if eager.error is not None:
            assert actual.error is not None, f"eager raised {eager.error!r}, the compiled call did not"
            continue
        if actual.error is not None:
            raise actual.error
        problems = wrong(actual, eager, wide)
        assert not problems, "\n".join(problems)
