"""Program: what ``lower`` returns and every later stage refines, until ``wrap`` prints it.

Grammar::

    program  ::= inputs buffers nodes outputs
    node     ::= LoopNest                 a kernel to generate (loops.py)
               | Extern                   a call of ATen, or of any other callable
               | Template                 a hand-written kernel with a slot for what follows it: a matmul
               | Choice                   several equivalent variants, of which ``autotune`` keeps the best
               | Variants                 several variants, one of which runs: decided at every call
               | KernelNode               a kernel with its launch configuration, made by ``schedule``
    variant  ::= name: predicate -> node ...

**Order.** ``nodes`` is a legal order of execution. A stage may reorder nodes only as ``fuse.dependencies`` allow:
reads after writes, writes after reads, writes after writes, all by *storage* (views share it), and effects in order.

**Buffers** have exactly the sizes and strides that eager would give (fake tensors say which), so a view in the
captured graph is the same storage with other sizes, strides and offset: a :class:`View`. A load's index is linear in
a buffer's storage, so views cost nothing and need no node.

**Variants** are the one mechanism behind input ranges, conditions of an implementation on its sizes, and fast kernels
that assume alignment: one of several implementations runs, the first whose predicate holds. The last one's predicate
is empty: it is the fallback and always works. An entry is a list of nodes, so Variants nest: the entries for two ranges
of a size each hold kernels, which ``schedule`` makes Variants of a fast kernel and its fallback.

**Choices** hold their variants over the *same* buffers: each reads the choice's inputs and writes its outputs, with
temporaries of its own, so that deciding is replacing one node by several (``autotune``). The first variant is the
default. A choice that different variants win at different sizes becomes a Variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from .expr import Expr, Sym, expr, product
from .loops import LoopNest, Origin


@dataclass(frozen=True)
class Buffer:
    """A storage and the tensor that covers it. ``kind``: ``input``, ``const`` (a tensor in the captured graph) or
    ``temp`` (written by a kernel, or returned by a call or filled through its ``out=``). ``strides``: in elements.
    Index expressions in a LoopNest count from the tensor's first element, whatever its storage offset."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    kind: str = "temp"

    @cached_property
    def numel(self) -> Expr:
        return product(self.shape)

    @cached_property
    def extent(self) -> Expr:
        """Elements from the first to one past the last one reached by the strides (0 for an empty tensor)."""
        if any(s == 0 for s in self.shape):
            return expr(0)
        top = expr(1)
        for size, stride in zip(self.shape, self.strides):
            top = top + (size - 1) * stride
        return top

    @cached_property
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
    ``outputs``: one entry per returned value, flattened: a buffer name, None (unused, or not a tensor), or a View of an
    argument, of which it is an alias.
    ``symbols``: (Sym, output position, dim, ~dim or None): sizes, strides and numbers first known after the call.
    ``mutates``: buffers written in place. ``effect``: keep in order with other effects (random state, print).
    ``out``: the overload with ``out=`` and its keyword names, when outputs can be preallocated; else None.
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
    reason: str = ""  # why this is not a LoopNest, for REFLIB_LOGS=fallback and explain
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[str]:
        return list(dict.fromkeys(v.buffer for v in iter_views((self.args, self.kwargs))))

    def writes(self) -> list[str]:
        return [*dict.fromkeys([o for o in self.outputs if isinstance(o, str)] + list(self.mutates))]


@dataclass(frozen=True, slots=True)
class Assume:
    """One fact that a variant's code relies on. ``kind``: ``aligned`` (``what``: a buffer name, ``value``: bytes),
    ``at_most`` (``what``: an Expr, ``value``: an int), ``at_least``, ``divisible``, ``equal`` or ``differs`` (same)."""

    kind: str
    what: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is generated and launched: plain data, made by ``schedule`` and read by ``generate``.

    ``reduction``: ``none``, ``persistent`` (a row lives in registers), ``looped`` or ``matmul`` (the rest is in the
    Template's Tiling).
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
class Tiling:
    """How a Template's kernel is cut into blocks: plain data, a candidate of ``autotune``.

    ``kind``: ``tiled`` (one thread block per output tile, software pipelined), ``persistent`` (one thread block per
    multiprocessor loops over tiles, operands are loaded through TMA descriptors; sm_90 and later), ``split``
    (``splits`` thread blocks share a tile's K, in one launch; partial results are added in a fixed order before the
    epilogue) or ``row`` (a single one, multiplied without tensor cores; any block sizes).
    ``m``, ``n``, ``k``: block sizes. ``group``: tiles in a column of the L2-friendly order.
    ``warps_k``: into how many parts the warps of one thread block divide a block's K (``split`` only).
    ``reducers``: additional thread blocks per tile, which each add up a part of it as partial results arrive (``split``
    only; ``generate.matmul_split``).
    ``turned``: the transposed product is computed, so that the columns are the dimension of which Hopper's wgmma takes
    64 (for ``m`` < 64; not ``persistent``).
    """

    kind: str
    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    warps_k: int = 1
    group: int = 8
    reducers: int = 0
    turned: bool = False

    def __str__(self) -> str:
        text = f"{self.kind} {self.m}x{self.n}x{self.k} w{self.num_warps} s{self.num_stages}"
        text += " turned" if self.turned else ""
        if self.kind == "split":
            text += f" splits {self.splits}+{self.reducers}"
        return text + (f" wk{self.warps_k}" if self.warps_k > 1 else "")  # (of split ones only)


@dataclass(frozen=True, slots=True)
class Template:
    """A matmul: acc[b, m, n] = sum over k of a[b, m, k] * b[b, k, n], then ``epilogue`` at every point.

    ``a``, ``b``: views of shape [B, M, K] and [B, K, N], any strides (B is 1 for a plain matmul). A view whose buffer
    has another dtype than ``dtype`` is cast to it as it is read.
    ``epilogue``: a LoopNest over the parallel axes ([b,] m, n), without b where B is the constant 1; its ``acc``
    statement is the product, of dtype ``acc_dtype``. It contains every store of the kernel.
    ``dtype``: of the operands as multiplied. ``precision``: ``ieee``, ``tf32`` (float32), ``fast`` (float8).
    ``tiling``: None until chosen. ``closed``: ``fuse`` adds no epilogue.
    ``prologues``: each, over an operand's [b,] rows, columns, computes it as it is read: its buffer is not in memory.
    """

    name: str
    a: View
    b: View
    epilogue: LoopNest
    dtype: torch.dtype
    precision: str = "ieee"
    tiling: Tiling | None = None
    closed: bool = False
    prologues: tuple[LoopNest, ...] = ()

    @property
    def sizes(self) -> tuple[Expr, Expr, Expr, Expr]:
        """(B, M, N, K)."""
        return self.a.shape[0], self.a.shape[1], self.b.shape[2], self.a.shape[2]

    @property
    def acc_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def origins(self) -> tuple[Origin, ...]:
        return self.epilogue.origins

    def prologue(self, v: View) -> LoopNest | None:
        return next((p for p in self.prologues if v.buffer in p.writes()), None)

    def operands(self) -> list[str]:
        nests = ((v, self.prologue(v)) for v in (self.a, self.b))
        return list(dict.fromkeys(b for v, p in nests for b in (p.reads() if p else [v.buffer])))

    def reads(self) -> list[str]:
        return list(dict.fromkeys([*self.operands(), *self.epilogue.reads()]))

    def writes(self) -> list[str]:
        return self.epilogue.writes()

    def symbols(self) -> list[Sym]:
        return sorted(symbols_in((self.a, self.b)).union(*(p.symbols() for p in (*self.prologues, self.epilogue))))


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several implementations: ``nodes`` in order, valid where all of ``predicate`` hold.
    ``name``: ``triton``, ``fast``, ``512 < s0 <= 2048: decompose_k(8)``.
    ``buffers``: temporaries of its own, in a Choice (once it has been decided they are in the program's table).
    ``patches``: sorted (option, value) pairs to compile with. ``params``: what it was registered with, to be shown.
    """

    name: str
    nodes: tuple[Node, ...]
    predicate: tuple[Assume, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    patches: tuple[tuple[str, Any], ...] = ()
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def kernel(self) -> KernelNode:
        """The one kernel that it consists of, in Variants made by ``schedule``."""
        (node,) = self.nodes
        assert isinstance(node, KernelNode)
        return node

    def reads(self) -> list[str]:
        """What its nodes read and no earlier one of them wrote."""
        made = {b.name for b in self.buffers}
        out: dict[str, None] = {}
        for n in self.nodes:
            out |= dict.fromkeys(b for b in n.reads() if b not in made)
            made |= set(n.writes())
        return list(out)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of a size that are decided separately. ``size``: the expression; ``splits``: ascending; range i is
    splits[i-1] < size <= splits[i], the last one open, tuned up to ``upper``. ``what``: ``x.size(0)``, for messages.
    ``inner``: the ranges of another size, into which each of these is divided."""

    size: Expr
    splits: tuple[int, ...]
    upper: int
    what: str
    inner: Ranges | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Something to be decided by ``autotune``: ``variants[0]`` is the default (the eager op).

    ``op``: its name in messages and tables. ``outputs``: buffers that every variant writes. ``failed``: (name, status,
    why) of candidates that could not become variants. ``min_speedup``: how much faster than the default a winner must
    be. ``graph_timing``: time by CUDA-graph replay (False: with launches in it).
    ``inputs_from``: (buffer, key) of inputs whose data for measuring comes from a registered function.
    ``custom``: a registered op, whose candidates come with it (those of a matmul are reflib's).
    """

    name: str
    op: str
    outputs: tuple[str, ...]
    variants: tuple[Variant, ...]
    failed: tuple[tuple[str, str, str], ...] = ()
    min_speedup: float = 1.0
    graph_timing: bool = True
    ranges: Ranges | None = None
    inputs_from: tuple[tuple[str, str], ...] = ()
    custom: bool = False
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[str]:
        return list(dict.fromkeys(b for v in self.variants for b in v.reads() if b not in self.outputs))

    def writes(self) -> list[str]:
        return list(self.outputs)


@dataclass(frozen=True)
class Variants:
    """Several implementations that write the same ``outputs``; the first whose predicate holds runs. The last one's
    predicate is empty: the fallback. Temporaries of all variants are in the program's table of buffers.
    ``schedule`` makes one of every LoopNest and Template, whose entries are one kernel each (``of_kernels``): a fast
    one, and a fallback if that assumes anything."""

    name: str
    outputs: tuple[str, ...]
    variants: tuple[Variant, ...]
    origins: tuple[Origin, ...] = ()

    @cached_property
    def of_kernels(self) -> bool:
        """Is every variant one kernel?"""
        return all(len(v.nodes) == 1 and isinstance(v.nodes[0], KernelNode) for v in self.variants)

    def inside(self) -> set[str]:
        """Temporaries: written in a variant, and not used outside."""
        return {b for v in self.variants for n in v.nodes for b in n.writes()} - set(self.outputs)

    @cached_property
    def _reads(self) -> list[str]:
        inside = self.inside()
        return list(dict.fromkeys(b for v in self.variants for b in v.reads() if b not in inside))

    def reads(self) -> list[str]:
        return [*self._reads]

    def writes(self) -> list[str]:
        return list(self.outputs)


@dataclass(frozen=True, slots=True)
class KernelNode:
    """One scheduled kernel. ``parts``: independent loop nests launched together (mostly one), or a Template or Extern.
    ``workspace``: buffers that only this kernel uses. One whose ``kind`` is ``temp`` holds nothing before and after;
    ``zeros`` holds zeros, which the kernel leaves zero; ``scratch`` is for Triton's descriptors."""

    name: str
    parts: tuple[LoopNest | Template | Extern, ...]
    config: Config
    workspace: tuple[Buffer, ...] = ()

    def reads(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.parts for b in p.reads()))

    def writes(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.parts for b in p.writes()))

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(o for p in self.parts for o in p.origins)


Node = LoopNest | Extern | Template | Choice | Variants | KernelNode


@dataclass(frozen=True)
class Program:
    """``inputs``: buffer names and size symbols in call order (``None``: an argument that is unused or plain data).
    ``outputs``: View, Expr (a symbolic int), None or plain data; the last ``saved`` are for a backward.
    ``buffers``: by name, in order of creation.
    ``constants``: the tensors behind ``const`` buffers (by name), and other captured objects an Extern needs.
    ``weights``: inputs that are the same in every call (parameters), where capture finds out.
    ``tuned``: (size, least, most, what, op): sizes an op was decided for; a call outside them is logged once.
    ``checks``: (facts, text): what must hold of the inputs' sizes in every call, and the text of the error.
    """

    inputs: tuple[Any, ...]
    buffers: dict[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict, compare=False)
    weights: tuple[str, ...] = ()
    tuned: tuple[tuple[Expr, int, int, str, str], ...] = ()
    checks: tuple[tuple[tuple[Assume, ...], str], ...] = ()
    saved: int = 0

    def __str__(self) -> str:
        from .printer import format_program

        return format_program(self)

    def output_buffers(self) -> set[str]:
        return {v.buffer for v in self.outputs if isinstance(v, View)}


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Every node; those in a Variants follow it."""
    for n in nodes:
        yield n
        if isinstance(n, Variants):
            for v in n.variants:
                yield from walk(v.nodes)


def kernel_with_fallback(
    kernel: KernelNode, predicate: tuple[Assume, ...] = (), fallback: KernelNode | None = None
) -> tuple[Variant, ...]:
    """``kernel`` where ``predicate`` holds, else ``fallback``, which gets a name of its own."""
    if fallback is None:
        return (Variant("only", (kernel,), predicate),)
    fallback = replace(fallback, name=f"{kernel.name}_fallback")
    return Variant("fast", (kernel,), predicate), Variant("fallback", (fallback,))


def kernel_variants(nodes: Iterable[Node]) -> Iterator[Variants]:
    """Every Variants of kernels, nested ones included: one per LoopNest and Template before ``schedule``."""
    return (n for n in walk(nodes) if isinstance(n, Variants) and n.of_kernels)


def kernel_nodes(nodes: Iterable[Node]) -> Iterator[KernelNode]:
    """Every kernel, fallbacks included."""
    return (n for n in walk(nodes) if isinstance(n, KernelNode))


def fallback_kernels(nodes: Iterable[Node]) -> set[str]:
    """Names of the kernels that run only where a faster one's predicate fails."""
    return {v.kernel.name for n in kernel_variants(nodes) for v in n.variants[1:]}


def kernels_and_calls(nodes: Iterable[Node]) -> tuple[int, int]:
    """How many scheduled kernels (fallbacks left out) and calls are in ``nodes``, all ranges of sizes together."""
    return sum(1 for _ in kernel_variants(nodes)), sum(isinstance(n, Extern) for n in walk(nodes))


def holds(a: Assume, sizes: Any) -> bool:
    """Is the fact about sizes true for these (symbol name -> int)? (``aligned`` is one about an address.)"""
    value = int(a.what.evaluate(sizes))
    return {
        "at_most": value <= a.value,
        "at_least": value >= a.value,
        "divisible": a.kind == "divisible" and value % a.value == 0,
        "equal": value == a.value,
        "differs": value != a.value,
    }[a.kind]


def iter_views(tree: Any) -> Iterator[View]:
    """Every View in nested tuples, lists and dicts."""
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for t in tree.values() if isinstance(tree, dict) else tree:
            yield from iter_views(t)


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
        parts = (*leaf.shape, *leaf.strides, leaf.offset) if isinstance(leaf, View) else (leaf,)
        out.update(*(e.symbols() for e in parts if isinstance(e, Expr)))

    map_tree(tree, visit)
    return out


def node_symbols(n: Node) -> set[Sym]:
    """The size symbols a node uses, those inside its variants included."""
    if isinstance(n, Extern):
        return symbols_in((n.args, n.kwargs))
    if isinstance(n, KernelNode):
        return set().union(*map(node_symbols, n.parts))
    if not isinstance(n, (Choice, Variants)):
        return set(n.symbols())
    out = symbols_in([f.what for v in n.variants for f in v.predicate])
    out |= symbols_in([full_view(b) for v in n.variants for b in v.buffers])
    if isinstance(n, Choice) and n.ranges is not None:
        out |= n.ranges.size.symbols()
    return out.union(*(node_symbols(m) for v in n.variants for m in v.nodes))


def full_view(b: Buffer) -> View:
    """All of ``b``, as itself."""
    return View(b.name, b.shape, b.strides, expr(0), b.dtype)
