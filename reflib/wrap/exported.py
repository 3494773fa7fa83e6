"""Calling a compiled ExportedProgram: take the arguments apart, add parameters, run, give outputs and mutations back.

The short way is for a graph that looks at its arguments itself: a C++ wrapper does, at their sizes too and at what was
assumed of these. ``host.entry`` calls it, from C to C++; where arguments are not all by position, or results not just
returned, a printed function of Python's (``structure.py``) goes before and after. What that or the graph refuses goes
the long way, which looks at everything again in Python: it says what does not fit, and copies what is only laid out in
another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ReflibError
from ..ir.expr import Expr, Sym, expr
from . import structure
from .convention import WEIGHTS, Argument, Convention, Expected, expect_told, sources
from .runtime import has_memory


class ExportedCallable:
    """``call(list) -> outputs``, a graph, by its calling convention. Inference only: runs without gradients.

    ``weights``: the tensors that the convention names. ``call`` may be a ``wrap.Wrapped``, which is loaded when first
    called."""

    # A slot: Python calls what is in it with no function in between.
    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]

    def __init__(self, convention: Convention, weights: Mapping[str, Any], call: Callable[[list], Any]):
        self.convention, self._weights = convention, weights
        self._call: Any = call
        self._state = [weights[name] if name else None for name in convention.inputs]
        self._given = [i for i, name in enumerate(convention.inputs) if not name]
        self._at = {a.name: i for i, a in enumerate(convention.arguments)}
        self._apart = structure.takes_apart(convention.in_spec)
        self._sources = sources(convention.arguments)
        for g in convention.guards:
            expect_told(g.what, self._sources, f"{g.text}, which was assumed of its sizes,")
        self.__call__ = self._first
        self.__signature__ = inspect.signature(self._first)  # (which is looked for in the class)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        return self.open()(*args, **kwargs)

    def open(self) -> Callable[..., Any]:
        """Load the graph, and choose the way that calls take from now on."""
        c = self.convention
        now: Callable[..., Any] = self._long
        after = self._given == list(range(len(c.inputs) - len(self._given), len(c.inputs)))  # the weights
        if after and getattr(self._call, "checks_inputs", False):
            now = self._short(self._call.load())
        self.__call__ = now
        return now

    # -- the short way ------------------------------------------------------------------------------
    def _short(self, graph: Callable[[list], tuple]) -> Callable[..., Any]:
        from .host import entry

        c = self.convention
        head = [self._weights[name] for name in c.inputs if name]
        kinds = "".join(map(_kind, c.arguments)).encode()
        positional = c.in_spec == pytree.tree_structure((tuple(kinds), {})) and b"-" not in kinds
        returned = all(o.kind == "result" for o in c.outputs)
        if positional and returned:
            if c.out_spec.is_leaf():
                return entry(graph, head, kinds, True, self._long)
            if c.out_spec == pytree.tree_structure(tuple(c.outputs)):
                return entry(graph, head, kinds, False, self._long)
        names: dict[str, Any] = {"apart": self._apart, "long": self._long, "refused": _refused}
        names["run"] = entry(graph, head, kinds, False, lambda *args: _refused)
        exec(compile(self._printed(names), "<reflib call>", "exec"), names)
        return names["call"]

    def _printed(self, names: dict[str, Any]) -> str:
        """``call``, which takes arguments apart, writes to what the program writes to, and puts results together."""
        c = self.convention
        fits = [_is(f"args[{i}]", a.value, names) for i, a in enumerate(c.arguments) if _kind(a) == "-"]
        writes, user = [], []
        for i, o in enumerate(c.outputs):
            if o.kind == "result":
                user.append(f"results[{i}]")
            elif o.kind == "same":
                user.append(f"args[{self._at[o.target]}]")
            else:
                weight = o.kind == "weight"
                to = structure.bound(self._weights[o.target], names) if weight else f"args[{self._at[o.target]}]"
                writes.append(f"            {to}.copy_(results[{i}])")
        return "\n".join([
            "def call(*args_, **kwargs):",
            "    args = apart(args_, kwargs)",
            f"    if {' and '.join(['args is not None', *fits])}:",
            "        results = run(*args)",
            "        if results is not refused:",
            *writes,
            f"            return {structure.built(c.out_spec, user, names)}",
            "    return long(*args_, **kwargs)",
        ]) + "\n"  # fmt: skip

    # -- the long way -------------------------------------------------------------------------------
    def _long(self, *args: Any, **kwargs: Any) -> Any:
        c = self.convention
        flat = self._apart(args, kwargs)
        if flat is None:
            spec = pytree.tree_structure((args, kwargs))
            raise ReflibError(f"called with arguments of structure {spec}, but it was exported with {c.in_spec}")
        given = [_fitting(a, x) for a, x in zip(c.arguments, flat)]
        sizes = self._sizes(given)
        for guard in c.guards:
            if not guard.holds(sizes):
                here = ", ".join(f"{s.name} = {sizes[s.name]}" for s in sorted(guard.what.symbols(), key=str))
                raise ReflibError(f"it was exported where {guard.text} holds of the arguments' sizes; here {here}")
        values = list(self._state)
        for i, x, argument in zip(self._given, given, c.arguments):
            values[i] = _of_sizes(argument, x, sizes)
        with torch.no_grad():
            results = self._call(values)
        user = []
        for output, value in zip(c.outputs, results):
            if output.kind == "result":
                user.append(value)
            elif output.kind == "same":
                user.append(flat[self._at[output.target]])
            elif output.kind == "weight":
                self._weights[output.target].copy_(value)
            else:
                flat[self._at[output.target]].copy_(value)
        return pytree.tree_unflatten(user, c.out_spec)

    def _sizes(self, given: list[Any]) -> dict[str, int]:
        """The value of every symbol, within its range."""
        sizes: dict[str, int] = {}
        for s in self._sources:
            x, name = given[s.argument], s.symbol.name
            have = x if s.what == "value" else x.shape[s.dim] if s.what == "size" else x.stride(s.dim)
            n = sizes[name] = (have - s.plus) // s.times
            least, most = self.convention.ranges.get(name, (None, None))
            if least is not None and n < least or most is not None and n > most:
                argument = self.convention.arguments[s.argument]
                want = expr(s.symbol) * s.times + s.plus
                said = f"{want}, with {name} = {n}" if (s.times, s.plus) != (1, 0) else name
                limit = "or more" if most is None else f"to {most}"
                what = "stride" if s.what == "stride" else "size"
                raise ReflibError(
                    f"argument {argument.name}: {what} {have} for {said}, which was exported for {least} {limit}"
                )
        return sizes


_refused = object()  # what a call gives that has to take the long way


def _kind(a: Argument) -> str:
    """As ``host.entry`` wants it."""
    return "t" if a.tensor is not None else "i" if isinstance(a.value, Sym) else "-"


def _is(at: str, value: Any, names: dict[str, Any]) -> str:
    """The condition that ``at`` is ``value``, which is no tensor."""
    if value is None or isinstance(value, bool):
        return f"{at} is {value}"
    return f"type({at}) is {structure.bound(type(value), names)} and {at} == {structure.bound(value, names)}"


# -- what the long way looks at ---------------------------------------------------------------------------
def _fitting(argument: Argument, got: Any) -> Any:
    """``got``, if it is what the program was exported for, whatever its size."""
    name, want = f"argument {argument.name}", argument.tensor
    if want is None and isinstance(argument.value, Sym):
        if type(got) is not int:
            raise ReflibError(f"{name}: expected an int, got {type(got).__name__}")
        return got
    if want is None:
        if type(got) is not type(argument.value) or got != argument.value:
            raise ReflibError(f"{name}: it was exported with {argument.value!r}, got {got!r}")
        return got
    if not isinstance(got, torch.Tensor):
        raise ReflibError(f"{name}: expected a tensor, got {type(got).__name__}")
    if not has_memory(got):
        raise ReflibError(
            f"{name}: a tensor with memory of its own is needed, got {type(got).__name__}; torch.vmap, torch.func and "
            f"fake tensors go through the model itself, not through what was compiled of it"
        )
    if got.layout is not torch.strided:
        raise ReflibError(f"{name}: layout {got.layout}, but it was exported with torch.strided")
    for what, have, asked in (
        ("dtype", got.dtype, want.dtype), ("device", got.device, want.device), ("ndim", got.ndim, len(want.shape)),
    ):  # fmt: skip
        if have != asked:
            raise ReflibError(f"{name}: {what} {have}, but it was exported with {asked}")
    return got.resolve_neg()


def _of_sizes(argument: Argument, got: Any, sizes: Mapping[str, int]) -> Any:
    """``got``, if it has the sizes that it must have; a copy where only its strides are others. No Dynamo guards this
    call, and the kernels believe what they were compiled for."""
    name, want = f"argument {argument.name}", argument.tensor
    if want is None:
        if isinstance(argument.value, Sym) and got != (known := sizes[argument.value.name]):
            raise ReflibError(f"{name}: {got}, but {argument.value.name} is {known}, the size of another argument")
        return got
    for d, (n, e) in enumerate(zip(got.shape, want.shape)):
        if n != (wanted := _value(e, n, sizes)):
            text = f"{e} = {wanted}" if e.constant is None else str(e)
            raise ReflibError(f"{name}: size {n} in dimension {d}, but it was exported with {text}")
    return _laid_out(got, want, sizes)


def _laid_out(got: torch.Tensor, want: Expected, sizes: Mapping[str, int]) -> torch.Tensor:
    strides = tuple(_value(e, n, sizes) for e, n in zip(want.strides, got.stride()))
    if got.stride() == strides or all(n == 1 or s == h for n, s, h in zip(got.shape, strides, got.stride())):
        return got
    return torch.empty_strided(got.shape, strides, dtype=got.dtype, device=got.device).copy_(got)


def _value(want: Expr, have: int, sizes: Mapping[str, int]) -> int:
    """The number that a size must be; whatever it is, if no argument tells."""
    return int(want.evaluate(sizes)) if all(s.name in sizes for s in want.symbols()) else have


def weights_of(exported: Any) -> dict[str, Any]:
    """An ExportedProgram's own tensors, by the names of its inputs."""
    out = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name in WEIGHTS:
            held = exported.state_dict if spec.target in exported.state_dict else exported.constants
            out[spec.target] = held[spec.target]
    return out
