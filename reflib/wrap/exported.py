"""Calling a compiled ExportedProgram: flatten the arguments, add parameters, run, give outputs and mutations back.

The short way is for what most programs are: tensors by position in, one tensor or a tuple of them out, nothing mutated,
and a graph that looks at its arguments itself (a C++ wrapper does). Whatever such a graph refuses goes the long way,
which says more, and copies what is only laid out in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ArgumentError, ReflibError

PLAIN = (torch.Tensor, torch.nn.Parameter)
STRIDED = torch.strided
OURS = {str(Path(__file__).parent / "wrap.py"), str(Path(__file__).parents[1] / "background.py"), __file__}


def _is_plain_tensor(t: Any) -> bool:
    return type(t) in PLAIN and t.layout is STRIDED and not t.is_neg()


def _inside(e: BaseException) -> bool:
    """Was it raised by what the graph called, not by the graph when it looked at its arguments?"""
    tb = e.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in OURS:
        tb = tb.tb_next
    return tb is not None


class ExportedCallable:
    """``program``'s calling convention around ``call(list) -> outputs``. Inference only: runs without gradients."""

    def __init__(self, program: Any, call: Callable[[list], Any]):
        self._program = program
        self._call = call
        self._in_spec = program.call_spec.in_spec
        self._out_spec = program.call_spec.out_spec
        sig = program.graph_signature
        self._state: list[Any] = []  # an argument each; None where the caller gives one
        for spec in sig.input_specs:
            kind = spec.kind.name
            if kind == "USER_INPUT":
                self._state.append(None)
            elif kind in ("PARAMETER", "BUFFER"):
                table = program.state_dict if spec.target in program.state_dict else program.constants
                self._state.append(table[spec.target])
            elif kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
                self._state.append(program.constants[spec.target])
            else:
                raise ReflibError(
                    f"reflib.compile: an exported program with a {kind} input ({spec.target}) is not supported"
                )
        self._by_name = {s.target: t for s, t in zip(sig.input_specs, self._state) if t is not None}
        self._user = [i for i, s in enumerate(sig.input_specs) if s.kind.name == "USER_INPUT"]
        self._user_at = {s.arg.name: n for n, s in enumerate(x for x in sig.input_specs if x.kind.name == "USER_INPUT")}
        self._outputs = sig.output_specs
        fakes = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
        self._expected = [(sig.input_specs[i].arg.name, fakes[i]) for i in self._user]
        self._ranges = {str(s): r for s, r in program.range_constraints.items()}
        self._short = self._is_plain() and getattr(call, "checks_inputs", False)
        self._one = self._out_spec.is_leaf()
        self._head = [t for t in self._state if t is not None]
        self._least = [
            (i, d, r.lower)
            for i, (_, fake) in enumerate(self._expected)
            for d, n in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ())
            if isinstance(n, torch.SymInt) and (r := self._ranges.get(str(n.node.expr))) is not None and r.lower > 0
        ]

    def _large_enough(self, args: tuple[Any, ...]) -> bool:
        """Graphs take sizes from 0 up; the program may have been exported for more."""
        return all(args[i].shape[d] >= least for i, d, least in self._least)

    def _is_plain(self) -> bool:
        """Tensors by position, after parameters; outputs that are the caller's, in a tuple or alone."""
        positional = self._in_spec == pytree.tree_structure((tuple(self._user), {}))
        tensors = all(isinstance(fake, torch.Tensor) for _, fake in self._expected)
        after = self._user == list(range(len(self._state) - len(self._user), len(self._state)))
        given = all(o.kind.name == "USER_OUTPUT" for o in self._outputs)
        out = self._out_spec
        flat_out = out.is_leaf() or out == pytree.tree_structure(tuple(range(len(self._outputs))))
        return positional and tensors and after and given and flat_out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._short and not kwargs and len(args) == len(self._user):
            grad = torch.is_grad_enabled()
            if grad:
                torch._C._set_grad_enabled(False)
            try:
                if all(map(_is_plain_tensor, args)) and self._large_enough(args):
                    results = self._call([*self._head, *args])
                    return results[0] if self._one else results
            except ArgumentError as e:
                if _inside(e):
                    raise
            finally:
                if grad:
                    torch._C._set_grad_enabled(True)
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ReflibError(f"called with arguments of structure {spec}, but it was exported with {self._in_spec}")
        values = list(self._state)
        sizes: dict[str, int] = {}
        for i, v, (name, fake) in zip(self._user, flat, self._expected):
            values[i] = self._checked(name, v, fake, sizes) if isinstance(fake, torch.Tensor) else v
        with torch.no_grad():
            results = self._call(values)
        user = []
        for spec_out, value in zip(self._outputs, results):
            kind = spec_out.kind.name
            if kind == "USER_OUTPUT":
                user.append(value)
            elif kind == "BUFFER_MUTATION":
                self._by_name[spec_out.target].copy_(value)
            elif kind == "USER_INPUT_MUTATION":
                flat[self._user_at[spec_out.target]].copy_(value)
            else:
                raise ReflibError(f"reflib.compile: an exported program with a {kind} output is not supported")
        return pytree.tree_unflatten(user, self._out_spec)

    def _checked(self, name: str, got: Any, fake: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
        """``got``, if it is what the program was exported for; a copy where only its strides are others. No Dynamo
        guards this call, and the kernels believe what they were compiled for."""
        if not isinstance(got, torch.Tensor):
            raise ReflibError(f"argument {name}: expected a tensor, got {type(got).__name__}")
        if is_traceable_wrapper_subclass(got) or is_fake(got) or torch._C._functorch.is_functorch_wrapped_tensor(got):
            raise ReflibError(f"argument {name}: a tensor with memory of its own is needed, got {type(got).__name__}")
        if got.layout is not torch.strided:
            raise ReflibError(f"argument {name}: layout {got.layout}, but it was exported with torch.strided")
        if got.is_neg():
            got = got.resolve_neg()
        for what in ("dtype", "device", "ndim"):
            have, want = getattr(got, what), getattr(fake, what)
            if have != want and not (what == "device" and have.type == want.type and want.index is None):
                raise ReflibError(f"argument {name}: {what} {have}, but it was exported with {want}")
        for d, (have, want) in enumerate(zip(got.shape, fake.shape)):
            if have != self._value(want, have, sizes):
                known = f"{want} = {self._value(want, have, sizes)}" if isinstance(want, torch.SymInt) else want
                raise ReflibError(f"argument {name}: size {have} in dimension {d}, but it was exported with {known}")
        strides = tuple(self._value(s, h, sizes) for s, h in zip(fake.stride(), got.stride()))
        if got.stride() == strides or all(n == 1 or s == h for n, s, h in zip(got.shape, strides, got.stride())):
            return got
        return torch.empty_strided(got.shape, strides, dtype=got.dtype, device=got.device).copy_(got)

    def _value(self, want: Any, have: int, sizes: dict[str, int]) -> int:
        """The number that a size must be. A symbol met for the first time is what it is here, within its range."""
        if not isinstance(want, torch.SymInt):
            return int(want)
        e = want.node.expr
        if e.is_Symbol and str(e) not in sizes:
            r = self._ranges.get(str(e))
            if r is not None and not r.lower <= have <= r.upper:
                raise ReflibError(f"size {have} for {e}, which was exported for {r.lower} to {r.upper}")
            sizes[str(e)] = have
        known = {s: sizes[str(s)] for s in e.free_symbols if str(s) in sizes}
        value = e.subs(known) if known else e
        return int(value) if value.is_number else have
