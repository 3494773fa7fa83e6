"""How an exported graph is called: which inputs are weights, the required arguments, and where results go. Plain data,
made from an ExportedProgram or read from a package."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ReflibError
from ..ir.expr import Expr, Sym, expr
from ..ir.program import Assume, Program, holds


@dataclass(frozen=True)
class Expected:
    """A tensor. ``begins``: so many elements of its storage are before its first one; None: any number."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    begins: int | None = None


@dataclass(frozen=True)
class Argument:
    """One of the flattened arguments. ``tensor``: None for a value that is not a tensor; it must equal ``value``,
    unless that is a symbol."""

    name: str
    tensor: Expected | None
    value: Any = None


@dataclass(frozen=True)
class Output:
    """``kind``: a "result" of the graph is returned; "same" returns argument ``target`` itself, which the graph wrote
    to. (A weight is not returned itself: it may have been assigned rather than written to, and earlier results must not
    change.) Among what is written: "weight" or "argument" ``target``."""

    kind: str
    target: str = ""


@dataclass(frozen=True)
class Guard:
    """``what`` is "at_least" 0, "equal" to 0, or "differs" from it (``kind``); ``text``: the condition for messages."""

    kind: str
    what: Expr
    text: str

    @property
    def fact(self) -> Assume:
        return Assume(self.kind, self.what, 0)

    def holds(self, sizes: dict[str, int]) -> bool:
        return holds(self.fact, sizes)


@dataclass(frozen=True)
class Convention:
    """``inputs``: of the graph, in order: a weight's name, or "" for the caller's next argument. ``ranges``: of symbols
    (least, most or None). ``devices``: each input's type of device, "" if it is no tensor. ``guards``: what else was
    true of the sizes at capture, and must be in every call. ``written``: weights and arguments that the graph writes
    to."""

    inputs: tuple[str, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    in_spec: Any
    out_spec: Any
    ranges: dict[str, tuple[int, int | None]]
    devices: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    written: tuple[Output, ...] = ()


@dataclass(frozen=True)
class Source:
    """Determines a symbol: argument number ``argument`` itself ("value"), or its size or stride ("size", "stride") in
    ``dim``, equals ``times * symbol + plus``."""

    symbol: Sym
    argument: int
    what: str
    dim: int
    times: int
    plus: int

    def place(self, arguments: tuple[Argument, ...]) -> str:
        """It in the caller's terms: ``x.shape[0]``."""
        name = arguments[self.argument].name
        return {"value": name, "size": f"{name}.shape[{self.dim}]", "stride": f"{name}.stride({self.dim})"}[self.what]


def sources(arguments: tuple[Argument, ...]) -> tuple[Source, ...]:
    """One per symbol, chosen as in ``plan``: ints first, then sizes and strides that are a symbol, then linear ones."""
    given: list[tuple[int, str, int, Expr]] = []
    for i, a in enumerate(arguments):
        if a.tensor is not None:
            given += [(i, "size", d, e) for d, e in enumerate(a.tensor.shape)]
            given += [(i, "stride", d, e) for d, e in enumerate(a.tensor.strides)]
    ints = [(i, "value", 0, expr(a.value)) for i, a in enumerate(arguments) if isinstance(a.value, Sym)]
    found: dict[Sym, Source] = {}
    for direct in (True, False):
        for i, what, d, e in (*ints, *given):
            if (linear := e.linear()) is not None and (not direct or e == expr(linear[0])):
                found.setdefault(linear[0], Source(linear[0], i, what, d, *linear[1:]))
    return tuple(found.values())


def expect_told(e: Expr, known: Set[Sym], what: str) -> None:
    """Raises ReflibError if no argument determines one of its symbols."""
    if unknown := sorted(e.symbols() - known, key=str):
        raise ReflibError(
            f"{what} cannot be checked when it is called: no argument tells what {unknown[0]} is; add one that is an "
            f"int, or has a size, of this number alone"
        )


WEIGHTS = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR", "CUSTOM_OBJ")


def without_tokens(exported: Any, program: Program) -> Program:
    """``program`` without the tokens by which torch.export orders ops with side effects: nodes are in order anyway."""
    from ..capture.exported import WRITTEN

    sig = exported.graph_signature
    returned = [s for s in sig.output_specs if s.kind.name not in WRITTEN]
    return replace(
        program,
        inputs=tuple(x for s, x in zip(sig.input_specs, program.inputs, strict=True) if s.kind.name != "TOKEN"),
        outputs=tuple(x for s, x in zip(returned, program.outputs, strict=True) if s.kind.name != "TOKEN"),
    )


def of_exported(exported: Any, program: Program) -> Convention:
    """``exported``'s convention, in terms of ``program``, its graph after ``lower`` and ``without_tokens``.

    Raises ReflibError for inputs and outputs that are not supported.
    """
    from ..capture.exported import BEGINS, WRITTEN, ranges_of
    from .guards import guards_of  # (sympy, which loading a package does not need)

    sig = exported.graph_signature
    inputs, arguments = [], []
    begins = {n.name: n.meta.get(BEGINS) for n in exported.graph.find_nodes(op="placeholder")}
    for spec, x in zip([s for s in sig.input_specs if s.kind.name != "TOKEN"], program.inputs, strict=True):
        kind = spec.kind.name
        if kind == "USER_INPUT":
            inputs.append("")
            arguments.append(_argument(spec.arg, x, program, begins.get(spec.arg.name)))
        elif kind in WEIGHTS:
            inputs.append(spec.target)
        else:
            raise ReflibError(f"an exported program with a {kind} input ({spec.target}) is not supported")
    outputs, written = [], []
    same: dict[str, str] = {}  # arguments that are results, by the name of their new value
    for spec in sig.output_specs:
        name, kind = getattr(spec.arg, "name", ""), WRITTEN.get(spec.kind.name)
        if kind is not None:
            written.append(Output(kind, spec.target))
            same |= {name: spec.target} if kind == "argument" else {}
        elif spec.kind.name == "USER_OUTPUT":
            outputs.append(Output("same", same[name]) if name in same else Output("result"))
        elif spec.kind.name != "TOKEN":
            raise ReflibError(f"an exported program with a {spec.kind.name} output is not supported")
    return Convention(
        tuple(inputs), tuple(arguments), tuple(outputs), exported.call_spec.in_spec, exported.call_spec.out_spec,
        ranges_of(exported),
        tuple(program.buffers[x].device.type if isinstance(x, str) else "" for x in program.inputs),
        guards_of(exported),
        tuple(written),
    )  # fmt: skip


def _argument(arg: Any, x: Any, program: Program, begins: int | None) -> Argument:
    if isinstance(x, str):
        b = program.buffers[x]
        return Argument(arg.name, Expected(b.dtype, b.device, b.shape, b.strides, begins))
    return Argument(arg.name, None, x if isinstance(x, Sym) else getattr(arg, "value", x))
