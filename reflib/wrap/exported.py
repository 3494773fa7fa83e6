"""Calling a compiled ExportedProgram: flatten the arguments, add parameters, run, give outputs and mutations back.

That is the long way. The short way (``host.entry``) is for what most programs are: tensors by position in, one tensor
or a tuple of them out, nothing mutated, and a graph that looks at its arguments itself (a C++ wrapper does). Whatever
such a graph refuses goes the long way, which says more, and copies what is only laid out in another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ReflibError
from ..ir.expr import Expr, Sym, expr
from .convention import WEIGHTS, Argument, Convention


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
        self.__call__ = self._first
        self.__signature__ = inspect.signature(self._first)  # (which is looked for in the class)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        return self.open()(*args, **kwargs)

    def open(self) -> Callable[..., Any]:
        """Load the graph, and choose the way that calls take from now on."""
        now: Callable[..., Any] = self._long
        if self._is_plain() and getattr(self._call, "checks_inputs", False):
            from .host import entry

            head = [self._weights[name] for name in self.convention.inputs if name]
            one = self.convention.out_spec.is_leaf()
            now = entry(self._call.load(), head, len(self._given), one, self._least(), self._long)
        self.__call__ = now
        return now

    def _least(self) -> list[tuple[int, int, int]]:
        """(argument, dimension, size): graphs take sizes from 0 up; the program may have been exported for more."""
        return [
            (i, d, least)
            for i, a in enumerate(self.convention.arguments)
            for d, n in enumerate(a.tensor.shape if a.tensor else ())
            if n.constant is None and (least := self.convention.ranges.get(str(n), (0, None))[0]) > 0
        ]

    def _is_plain(self) -> bool:
        """Tensors by position, after the weights; outputs that are the caller's, in a tuple or alone."""
        c, n = self.convention, len(self._given)
        positional = c.in_spec == pytree.tree_structure((tuple(self._given), {}))
        tensors = all(a.tensor is not None for a in c.arguments)
        after = self._given == list(range(len(c.inputs) - n, len(c.inputs)))
        given = all(o.kind == "result" for o in c.outputs)
        flat_out = c.out_spec.is_leaf() or c.out_spec == pytree.tree_structure(tuple(range(len(c.outputs))))
        return positional and tensors and after and given and flat_out and not c.guards

    def _long(self, *args: Any, **kwargs: Any) -> Any:
        c = self.convention
        flat, spec = pytree.tree_flatten((args, self._in_order(kwargs)))
        if spec != c.in_spec:
            raise ReflibError(f"called with arguments of structure {spec}, but it was exported with {c.in_spec}")
        values = list(self._state)
        sizes: dict[str, int] = {}
        for i, got, argument in zip(self._given, flat, c.arguments):
            values[i] = self._checked(argument, got, sizes)
        for guard in c.guards:
            if not guard.holds(sizes):
                here = ", ".join(f"{s.name} = {sizes[s.name]}" for s in sorted(guard.what.symbols(), key=str))
                raise ReflibError(f"it was exported where {guard.text} holds of the arguments' sizes; here {here}")
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

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As they were when it was exported: a caller may name them in any order."""
        spec = self.convention.in_spec
        named = (spec.child(1) if hasattr(spec, "child") else spec.children_specs[1]).context
        return {k: kwargs[k] for k in named} if kwargs and set(kwargs) == set(named) else kwargs

    def _checked(self, argument: Argument, got: Any, sizes: dict[str, int]) -> Any:
        """``got``, if it is what the program was exported for; a copy where only its strides are others. No Dynamo
        guards this call, and the kernels believe what they were compiled for."""
        name, want = f"argument {argument.name}", argument.tensor
        if want is None and isinstance(argument.value, Sym):
            if type(got) is not int:
                raise ReflibError(f"{name}: expected an int, got {type(got).__name__}")
            if got != (known := self._value(expr(argument.value), got, sizes)):
                raise ReflibError(f"{name}: {got}, but {argument.value.name} is {known}, the size of another argument")
            return got
        if want is None:
            if type(got) is not type(argument.value) or got != argument.value:
                raise ReflibError(f"{name}: it was exported with {argument.value!r}, got {got!r}")
            return got
        if not isinstance(got, torch.Tensor):
            raise ReflibError(f"{name}: expected a tensor, got {type(got).__name__}")
        if is_traceable_wrapper_subclass(got) or is_fake(got) or torch._C._functorch.is_functorch_wrapped_tensor(got):
            raise ReflibError(f"{name}: a tensor with memory of its own is needed, got {type(got).__name__}")
        if got.layout is not torch.strided:
            raise ReflibError(f"{name}: layout {got.layout}, but it was exported with torch.strided")
        if got.is_neg():
            got = got.resolve_neg()
        for what, have, asked in (
            ("dtype", got.dtype, want.dtype), ("device", got.device, want.device), ("ndim", got.ndim, len(want.shape)),
        ):  # fmt: skip
            if have != asked:
                raise ReflibError(f"{name}: {what} {have}, but it was exported with {asked}")
        for d, (n, e) in enumerate(zip(got.shape, want.shape)):
            if n != (wanted := self._value(e, n, sizes)):
                text = f"{e} = {wanted}" if e.constant is None else str(e)
                raise ReflibError(f"{name}: size {n} in dimension {d}, but it was exported with {text}")
        strides = tuple(self._value(e, n, sizes) for e, n in zip(want.strides, got.stride()))
        if got.stride() == strides or all(n == 1 or s == h for n, s, h in zip(got.shape, strides, got.stride())):
            return got
        return torch.empty_strided(got.shape, strides, dtype=got.dtype, device=got.device).copy_(got)

    def _value(self, want: Expr, have: int, sizes: dict[str, int]) -> int:
        """The number that a size must be. A symbol met for the first time is what it is here, within its range."""
        symbols = {s.name for s in want.symbols()}
        linear = want.linear()
        if linear is not None and linear[0].name not in sizes:
            name, (_, times, plus) = linear[0].name, linear
            value = (have - plus) // times
            least, most = self.convention.ranges.get(name, (0, None))
            if value < least or most is not None and value > most:
                limit = "or more" if most is None else f"to {most}"
                said = "" if want == linear[0] else f", with {name} = {value}"
                raise ReflibError(f"size {have} for {want}{said}, which was exported for {least} {limit}")
            sizes[name] = value
        return int(want.evaluate(sizes)) if symbols <= sizes.keys() else have


def weights_of(exported: Any) -> dict[str, Any]:
    """An ExportedProgram's own tensors, by the names of its inputs."""
    out = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name in WEIGHTS:
            held = exported.state_dict if spec.target in exported.state_dict else exported.constants
            out[spec.target] = held[spec.target]
    return out
