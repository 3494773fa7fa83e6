"""Calling a compiled ExportedProgram: flatten the arguments, add parameters, run, give outputs and mutations back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ReflibError


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ReflibError(f"called with arguments of structure {spec}, but it was exported with {self._in_spec}")
        values = list(self._state)
        for i, v in zip(self._user, flat):
            values[i] = v
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
