"""Program: what ``lower`` returns and every later stage refines, until ``wrap`` prints it.

Grammar::

    program ::= inputs buffers nodes outputs
    node    ::= Loops                     a kernel to generate (loops.py)
              | Extern                    a call of ATen, or of anything else that can be called
              | Template                  a hand-written kernel with slots (matmul; from issue 3 on)
              | Choice                    one of several equivalent programs (issue 3)
              | Region                    what is left after choosing: arms, tried in order
    arm     ::= predicate -> Loops ..., launch parameters, workspace

**Order.** ``nodes`` is a legal order of execution. A stage may reorder nodes only as ``dependencies`` allow:
reads after writes, writes after reads, writes after writes, all by *storage* (views share it), and effects in order.

**Buffers** have exactly the sizes and strides that eager would give (fake tensors say which), so a view in the
captured graph is the same storage with other sizes, strides and offset: a :class:`View`. A load's index is linear in
a buffer's storage, so views cost nothing and need no node.

**Regions and arms** are the one mechanism behind input ranges, per-architecture kernels, background tuning and the
general fallback: fixed reads and writes, several ways to do it, each valid under a predicate. The last arm of a
region has an empty predicate: it always works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .expr import Expr, Sym, expr, product
from .loops import Loops, Origin


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage and the tensor that covers it. ``kind``: ``input``, ``const`` (a tensor in the captured graph) or
    ``temp`` (made by a node: ``loops`` allocated before, ``extern`` returned by the call or filled through ``out=``).
    ``strides`` and ``offset`` (elements) say how ``shape`` lies in the storage. Index expressions in a Loops count from
    the tensor's first element (``data_ptr()``), so an input's ``offset`` is 0 here whatever its storage offset is."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    kind: str = "temp"

    @property
    def numel(self) -> Expr:
        return product(self.shape)

    @property
    def extent(self) -> Expr:
        """Elements from the first to one past the last that the strides reach (0 for an empty tensor)."""
        if any(s == 0 for s in self.shape):
            return expr(0)
        top = expr(1)
        for size, stride in zip(self.shape, self.strides):
            top = top + (size - 1) * stride
        return top

    @property
    def nbytes(self) -> Expr:
        return self.extent * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A buffer seen through sizes, strides and an element offset, possibly as another dtype of the same width."""

    buffer: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of ``target`` (an OpOverload, or any callable such as a higher-order op).

    ``args``/``kwargs``: nested tuples/lists/dicts of View, Expr (a symbolic int), and plain data.
    ``outputs``: one entry per returned value, nested like the return value flattened in order:
    a buffer name, None (not used, or not a tensor), or an alias View of an argument.
    ``symbols``: (Sym, output position, dim or None): sizes first known when the call returns.
    ``mutates``: buffers the call writes in place. ``effect``: keep in order with other effects (random state, print).
    ``out``: the out-variant's OpOverload and its keyword names, when outputs can be preallocated; else None.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Any, ...]
    mutates: tuple[str, ...] = ()
    effect: bool = False
    out: tuple[Any, tuple[str, ...]] | None = None
    symbols: tuple[tuple[Sym, int, int | None], ...] = ()
    reason: str = ""  # why this is not a Loops, for REFLIB_LOGS=fallback and explain
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[str]:
        return list(dict.fromkeys(v.buffer for v in iter_views((self.args, self.kwargs))))

    def writes(self) -> list[str]:
        return [*dict.fromkeys([o for o in self.outputs if isinstance(o, str)] + list(self.mutates))]


@dataclass(frozen=True, slots=True)
class Assume:
    """One fact an arm's code relies on. ``kind``: ``aligned`` (``what``: a buffer name, ``value``: bytes),
    ``at_most`` (``what``: an Expr, ``value``: an int), ``divisible`` (Expr, int), ``arch`` (str, str)."""

    kind: str
    what: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is generated and launched: plain data, made by ``choose`` and read by ``generate``.

    ``reduction``: ``none``, ``persistent`` (a row lives in registers) or ``looped``.
    ``xblock``/``rblock``: elements of the parallel / reduced space per program and step (GPU).
    ``index``: ``int32`` or ``int64``. ``extras``: sorted (name, value) pairs for what only one generator reads.
    """

    reduction: str = "none"
    xblock: int = 1024
    rblock: int = 1
    num_warps: int = 4
    num_stages: int = 1
    index: str = "int32"
    extras: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    """``parts``: independent Loops launched as one kernel (usually one). Predicate: all of ``predicate`` hold."""

    predicate: tuple[Assume, ...]
    parts: tuple[Loops, ...]
    config: Config
    workspace: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Fixed inputs and outputs, several ways to compute them; the last arm's predicate is empty."""

    name: str
    arms: tuple[Arm, ...]

    @property
    def device_parts(self) -> tuple[Loops, ...]:
        return self.arms[-1].parts

    def reads(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.arms[-1].parts for b in p.reads()))

    def writes(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.arms[-1].parts for b in p.writes()))

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(o for p in self.arms[-1].parts for o in p.origins)


Node = Loops | Extern | Region


@dataclass(frozen=True)
class Program:
    """``inputs``: buffer names and size symbols in call order (``None``: an argument that is unused or plain data).
    ``outputs``: View, Expr (a symbolic int), None or plain data. ``buffers``: by name, in order of creation.
    ``constants``: the tensors behind ``const`` buffers (by name), and other captured objects an Extern needs.
    """

    inputs: tuple[Any, ...]
    buffers: dict[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        from .printer import format_program

        return format_program(self)

    def producer(self) -> dict[str, Node]:
        """Which node makes each temp buffer first."""
        out: dict[str, Node] = {}
        for n in self.nodes:
            for b in n.writes():
                out.setdefault(b, n)
        return out

    def users(self) -> dict[str, list[Node]]:
        """Which nodes read each buffer."""
        out: dict[str, list[Node]] = {b: [] for b in self.buffers}
        for n in self.nodes:
            for b in n.reads():
                out[b].append(n)
        return out

    def output_buffers(self) -> set[str]:
        return {v.buffer for v in self.outputs if isinstance(v, View)}


def iter_views(tree: Any) -> Iterator[View]:
    """Every View in nested tuples, lists and dicts."""
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for t in tree:
            yield from iter_views(t)
    elif isinstance(tree, dict):
        yield from iter_views(list(tree.values()))


def map_tree(tree: Any, fn: Any) -> Any:
    """Nested tuples, lists and dicts with ``fn`` applied to the leaves."""
    if isinstance(tree, tuple):
        return tuple(map_tree(t, fn) for t in tree)
    if isinstance(tree, list):
        return [map_tree(t, fn) for t in tree]
    if isinstance(tree, dict):
        return {k: map_tree(v, fn) for k, v in tree.items()}
    return fn(tree)


def symbols_in(tree: Any) -> set[Sym]:
    """The size symbols of every Expr and View in nested tuples, lists and dicts."""
    out: set[Sym] = set()

    def visit(leaf: Any) -> None:
        if isinstance(leaf, Expr):
            out.update(leaf.symbols())
        elif isinstance(leaf, View):
            for e in (*leaf.shape, *leaf.strides, leaf.offset):
                out.update(e.symbols())

    map_tree(tree, visit)
    return out


def full_view(b: Buffer) -> View:
    """All of ``b``, as itself."""
    return View(b.name, b.shape, b.strides, expr(0), b.dtype)
