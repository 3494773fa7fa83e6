"""Program: what ``lower`` returns and every later stage refines, until ``wrap`` prints it.

Grammar::

    program ::= inputs buffers nodes outputs
    node    ::= Loops                     a kernel to generate (loops.py)
              | Extern                    a call of ATen, or of anything else that can be called
              | Template                  a hand-written kernel with a slot for what follows it: a matrix product
              | Choice                    one of several equivalent node lists, not yet decided
              | Dispatch                  several node lists for one thing, by size: decided at every call
              | Region                    a kernel after choosing: arms, tried in order
    arm     ::= predicate -> Loops ... | Template, launch parameters, workspace

**Order.** ``nodes`` is a legal order of execution. A stage may reorder nodes only as ``dependencies`` allow:
reads after writes, writes after reads, writes after writes, all by *storage* (views share it), and effects in order.

**Buffers** have exactly the sizes and strides that eager would give (fake tensors say which), so a view in the
captured graph is the same storage with other sizes, strides and offset: a :class:`View`. A load's index is linear in
a buffer's storage, so views cost nothing and need no node.

**Choices** hold their alternatives as nodes over the *same* buffers: each alternative reads the choice's inputs and
writes its outputs, with temporaries of its own, so that deciding is replacing one node by several (``choose``). The
first alternative is the default. A choice that is won by different alternatives at different sizes becomes a Dispatch.

**Regions and arms** are the one mechanism behind input ranges, per-architecture kernels, background tuning and the
general fallback: fixed reads and writes, several ways to do it, each valid under a predicate. The last arm of a
region has an empty predicate: it always works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    ``at_most`` (``what``: an Expr, ``value``: an int), ``at_least`` (Expr, int), ``divisible`` (Expr, int), ``equal``
    and ``differs`` (Expr, int), ``arch`` (str, str)."""

    kind: str
    what: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is generated and launched: plain data, made by ``choose`` and read by ``generate``.

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
    """How a Template's kernel is cut up: plain data, a candidate of ``choose``.

    ``kind``: ``tiled`` (a program per output tile, software pipelined), ``persistent`` (one program per multiprocessor
    walks over tiles, operands come through TMA descriptors; sm_90 and later) or ``split`` (``splits`` programs share a
    tile's K, in one launch; their parts are added in a fixed order before the epilogue).
    ``m``, ``n``, ``k``: block sizes. ``group``: tiles in a column of L2-friendly order.
    ``warps_k``: how many ways the warps of one program share a block's K (``split`` only).
    ``reducers``: programs more per tile that add up a piece of it each, as the parts arrive (CUDA); 0: who finishes
    last adds all parts up alone (``split`` only; ``generate.matmul_split``).
    ``turned``: the transposed product is formed, so that columns are what Hopper's wgmma takes 64 of (for ``m`` < 64;
    not ``persistent``).
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
            text += f" splits {self.splits}" + (f"+{self.reducers}" if self.reducers else "")
            text += f" wk{self.warps_k}" if self.warps_k > 1 else ""
        return text


@dataclass(frozen=True, slots=True)
class Template:
    """A matrix product: acc[b, m, n] = sum over k of a[b, m, k] * b[b, k, n], then ``epilogue`` at every point.

    ``a``, ``b``: views of shape [B, M, K] and [B, K, N], any strides (B is 1 for a plain product). A view whose buffer
    has another dtype than ``dtype`` is cast to it as it is read (the prologue).
    ``epilogue``: a Loops over the parallel axes ([b,] m, n), b left out when B is the constant 1; its ``acc``
    statement is the product, of dtype ``acc_dtype``. It makes every store of the kernel.
    ``dtype``: what the operands are multiplied as. ``precision``: ``ieee`` or ``tf32`` (float32 only).
    ``tiling``: None until chosen. ``closed``: ``fuse`` adds nothing to it, no epilogue and no prologue.
    """

    name: str
    a: View
    b: View
    epilogue: Loops
    dtype: torch.dtype
    precision: str = "ieee"
    tiling: Tiling | None = None
    closed: bool = False

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

    def operands(self) -> list[str]:
        return list(dict.fromkeys((self.a.buffer, self.b.buffer)))

    def reads(self) -> list[str]:
        return list(dict.fromkeys([*self.operands(), *self.epilogue.reads()]))

    def writes(self) -> list[str]:
        return self.epilogue.writes()

    def symbols(self) -> list[Sym]:
        return sorted(symbols_in((self.a, self.b)) | set(self.epilogue.symbols()))


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to do a Choice: ``nodes`` in order, with temporaries ``buffers`` of their own.

    ``guards``: what tracing it assumed of the sizes; without them it may not be used.
    ``patches``: sorted (option, value) pairs to compile it with.
    ``params``: the parameters it was registered with, for people.
    """

    name: str
    nodes: tuple[Node, ...]
    buffers: tuple[Buffer, ...] = ()
    guards: tuple[Assume, ...] = ()
    patches: tuple[tuple[str, Any], ...] = ()
    params: tuple[tuple[str, Any], ...] = ()

    def reads(self) -> list[str]:
        made = {b.name for b in self.buffers}
        return list(dict.fromkeys(b for n in self.nodes for b in n.reads() if b not in made))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Sizes to decide separately at. ``size``: the expression dispatched on; ``splits``: ascending; range i is
    splits[i-1] < size <= splits[i], the last one open, tuned up to ``upper``. ``what``: ``x.size(0)``, for people."""

    size: Expr
    splits: tuple[int, ...]
    upper: int
    what: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Something to be decided by ``choose``: ``alternatives[0]`` is the default (the eager op).

    ``op``: what is done, for people and tables. ``outputs``: buffers every alternative writes. ``failed``: (name,
    status, why) of candidates that could not become alternatives. ``min_speedup``: how much faster than the default a
    winner must be. ``graph_timing``: time by CUDA-graph replay (False: with launches in it).
    ``inputs_from``: (buffer, key) of inputs whose measuring data a registered function makes.
    ``custom``: an op that was registered; its candidates are its own (a matrix product's are reflib's).
    """

    name: str
    op: str
    outputs: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    failed: tuple[tuple[str, str, str], ...] = ()
    min_speedup: float = 1.0
    graph_timing: bool = True
    ranges: Ranges | None = None
    inputs_from: tuple[tuple[str, str], ...] = ()
    custom: bool = False
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[str]:
        return list(dict.fromkeys(b for a in self.alternatives for b in a.reads() if b not in self.outputs))

    def writes(self) -> list[str]:
        return list(self.outputs)


@dataclass(frozen=True, slots=True)
class DispatchArm:
    """One arm of a Dispatch: ``nodes`` run if all of ``predicate`` hold (and no earlier arm's did).
    ``label``: ``512 < s0 <= 2048: decompose_k(8)``. ``patches``: sorted (option, value) pairs for its kernels."""

    predicate: tuple[Assume, ...]
    nodes: tuple[Node, ...]
    label: str = ""
    patches: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Several node lists that write the same ``outputs``; the last arm's predicate is empty. Temporaries of all arms
    are in the program's table of buffers."""

    name: str
    outputs: tuple[str, ...]
    arms: tuple[DispatchArm, ...]
    origins: tuple[Origin, ...] = ()

    def inside(self) -> set[str]:
        """Temporaries: written in an arm, and nobody else's business."""
        return {b for a in self.arms for n in a.nodes for b in n.writes()} - set(self.outputs)

    def reads(self) -> list[str]:
        made = self.inside() | set(self.outputs)
        return list(dict.fromkeys(b for a in self.arms for n in a.nodes for b in n.reads() if b not in made))

    def writes(self) -> list[str]:
        return list(self.outputs)


@dataclass(frozen=True, slots=True)
class Arm:
    """``parts``: independent Loops launched as one kernel (usually one), or one Template. Predicate: all of
    ``predicate`` hold. ``workspace``: buffers of this arm's kernel alone. One whose ``kind`` is ``temp`` holds nothing
    before and after; ``zeros`` holds zeros, which the kernel leaves zero; ``scratch`` is for Triton's descriptors."""

    predicate: tuple[Assume, ...]
    parts: tuple[Loops | Template, ...]
    config: Config
    workspace: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Fixed inputs and outputs, several ways to compute them; the last arm's predicate is empty."""

    name: str
    arms: tuple[Arm, ...]

    @property
    def device_parts(self) -> tuple[Loops | Template, ...]:
        return self.arms[-1].parts

    def reads(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.arms[-1].parts for b in p.reads()))

    def writes(self) -> list[str]:
        return list(dict.fromkeys(b for p in self.arms[-1].parts for b in p.writes()))

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(o for p in self.arms[-1].parts for o in p.origins)


Node = Loops | Extern | Template | Choice | Dispatch | Region


@dataclass(frozen=True)
class Program:
    """``inputs``: buffer names and size symbols in call order (``None``: an argument that is unused or plain data).
    ``outputs``: View, Expr (a symbolic int), None or plain data. ``buffers``: by name, in order of creation.
    ``constants``: the tensors behind ``const`` buffers (by name), and other captured objects an Extern needs.
    ``weights``: inputs that stay the same from call to call (parameters), as far as capture knows.
    ``tuned``: (size, least, most, what, op): sizes an op was decided for; a call outside them is logged once.
    ``checks``: (facts, text): what must hold of the inputs' sizes in every call, and how people say it.
    """

    inputs: tuple[Any, ...]
    buffers: dict[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict, compare=False)
    weights: tuple[str, ...] = ()
    tuned: tuple[tuple[Expr, int, int, str, str], ...] = ()
    checks: tuple[tuple[tuple[Assume, ...], str], ...] = ()

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


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Every node, those in a Dispatch's arms included (after the Dispatch)."""
    for n in nodes:
        yield n
        if isinstance(n, Dispatch):
            for arm in n.arms:
                yield from walk(arm.nodes)


def regions(nodes: Iterable[Node]) -> Iterator[Region]:
    """Every Region, those in a Dispatch's arms included."""
    return (n for n in walk(nodes) if isinstance(n, Region))


def holds(a: Assume, sizes: Any) -> bool:
    """Is the fact about sizes true for these (symbol name -> int)?"""
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


def node_symbols(n: Node) -> set[Sym]:
    """The size symbols a node uses, those inside a choice's alternatives and a dispatch's arms included."""
    if isinstance(n, Extern):
        return symbols_in((n.args, n.kwargs))
    if isinstance(n, Choice):
        out = symbols_in([full_view(b) for a in n.alternatives for b in a.buffers])
        out |= _assumed(p for a in n.alternatives for p in a.guards)
        out |= n.ranges.size.symbols() if n.ranges is not None else set()
        return out.union(*(node_symbols(m) for a in n.alternatives for m in a.nodes))
    if isinstance(n, Dispatch):
        out = _assumed(p for a in n.arms for p in a.predicate)
        return out.union(*(node_symbols(m) for a in n.arms for m in a.nodes))
    if isinstance(n, Region):
        return _assumed(p for a in n.arms for p in a.predicate).union(*(p.symbols() for p in n.device_parts))
    return set(n.symbols())


def _assumed(facts: Iterable[Assume]) -> set[Sym]:
    return symbols_in([f.what for f in facts])


def full_view(b: Buffer) -> View:
    """All of ``b``, as itself."""
    return View(b.name, b.shape, b.strides, expr(0), b.dtype)
