"""The rules of the IR, checked. ``verify`` runs after every stage in tests and under ``Options(verify=True)``.

A violation is a bug in a stage, so the message names the node, the statement and the rule. What cannot be decided
(an index with ``//`` or with symbols of unknown size) passes; the interpreter checks it on real values.
"""

from dataclasses import replace
from typing import NoReturn

import torch

from ..errors import VerifyError
from . import float8, random  # noqa: F401  (its op)
from .expr import ZERO, Expr, Ref, Sym, Var, nonneg, product
from .loops import (
    Acc,
    Const,
    Index,
    Indirect,
    Load,
    LoopNest,
    Op,
    Reduce,
    Scan,
    Stmt,
    Store,
    stmt_args,
    stmt_exprs,
)
from .ops import OPS, REDUCTIONS, VALUE_DTYPES, value_dtype
from .printer import format_stmt
from .program import (
    Buffer,
    Choice,
    Extern,
    KernelNode,
    Node,
    Program,
    Template,
    Variants,
    full_view,
    iter_views,
    symbols_in,
)
from .regions import Region
from .scans import SCANS
from .transforms import varying
from .user_kernel import Launched

ATOMIC = (torch.float32, torch.float64, torch.int32, torch.int64)  # dtypes of atomic additions
_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_KINDS = {
    "float": lambda d: d.is_floating_point,
    "int": lambda d: d in _INTS,
    "bool": lambda d: d == torch.bool,
    "intbool": lambda d: d == torch.bool or d in _INTS,
    "number": lambda d: d != torch.bool,
    "any": lambda d: True,
}


def verify(program: Program) -> None:
    """Check all of ``program``; raises VerifyError at the first broken rule."""
    known = _verify_buffers(program)
    written = {n for n, b in program.buffers.items() if b.kind != "temp"}
    names: set[str] = set()
    for node in program.nodes:
        if node.name in names:
            raise VerifyError(f"{node.name}: two nodes have this name")
        names.add(node.name)
        for b in [*node.reads(), *node.writes()]:
            if b not in program.buffers:
                raise VerifyError(f"{node.name}: buffer {b} is not declared")
        # a kernel may read what it wrote
        own = isinstance(node, (LoopNest, Variants, Template)) or isinstance(getattr(node, "target", 0), Launched)
        own = own or isinstance(node, Extern) and node.out is not None  # (its results are among its arguments)
        inside = set(node.writes()) if own else set()
        for b in node.reads():
            if b not in written and b not in inside:
                raise VerifyError(f"{node.name}: reads {b} before any node has written it")
        _verify_node(program, node, known, written)
        written |= set(node.writes())
    for v in iter_views(program.outputs):
        if v.buffer not in written:
            raise VerifyError(f"outputs: {v.buffer} is returned but never written")


def _verify_buffers(program: Program) -> set[Sym]:
    """Tables agree with each other; returns the size symbols known when the program starts."""
    known: set[Sym] = set()
    for i in program.inputs:
        if isinstance(i, str) and (i not in program.buffers or program.buffers[i].kind != "input"):
            raise VerifyError(f"inputs: {i} is not declared as an input buffer")
        if isinstance(i, Expr):
            known |= i.symbols()
        elif isinstance(i, Sym):
            known.add(i)
    for name, b in program.buffers.items():
        if name != b.name:
            raise VerifyError(f"buffers: {b.name} is filed under the name {name}")
        if len(b.shape) != len(b.strides):
            raise VerifyError(f"buffers: {name} has {len(b.shape)} sizes and {len(b.strides)} strides")
        if b.kind not in ("input", "const", "temp"):
            raise VerifyError(f"buffers: {name} has the unknown kind {b.kind!r}")
        if b.kind == "const" and name not in program.constants:
            raise VerifyError(f"buffers: {name} is a constant without a value")
        if b.kind == "input":
            known |= {s for e in (*b.shape, *b.strides) for s in e.symbols()}
    return known


def _verify_node(program: Program, node: Node, known: set[Sym], written: set[str]) -> None:
    if isinstance(node, Extern):
        for _, _, dim in node.symbols:
            if not (dim is None or isinstance(dim, int)):
                raise VerifyError(f"{node.name}: a symbol's dimension is {dim!r}")
        known |= {s for s, _, _ in node.symbols}
    elif isinstance(node, LoopNest):
        verify_loops(node, program.buffers, known, written)
    elif isinstance(node, Template):
        _verify_template(node, program.buffers, known, written)
    elif isinstance(node, KernelNode):
        _verify_kernel(node, program.buffers, known, written)
    else:
        _verify_variants(program, node, known, written)


def _verify_variants(program: Program, node: Choice | Variants, known: set[Sym], written: set[str]) -> None:
    if isinstance(node, Region):
        if node.counter is not None:
            known = known | {node.counter}
        written = written | set(node.stacked())
    if isinstance(node, Variants) and (not node.variants or node.variants[-1].predicate):
        raise VerifyError(f"{node.name}: the last variant must have no predicate, so that it always works")
    for v in node.variants:
        if not (isinstance(node, Variants) and node.of_kernels):
            inside = {b.name: b for b in v.buffers}
            outputs = () if isinstance(node, Region) and node.repeats else node.outputs  # a loop may not run at all
            _verify_list(program, f"{node.name}, {v.name}", v.nodes, outputs, inside, written, known)
            if isinstance(node, Region):  # what a condition reads, the body may use
                known = known | {s for n in v.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
            continue
        if (writes := sorted(v.kernel.writes())) != sorted(node.outputs):
            raise VerifyError(f"{node.name}: the variant {v.name} writes {writes}, not {sorted(node.outputs)}")
        _verify_kernel(v.kernel, program.buffers, known, written)


def _verify_kernel(kernel: KernelNode, buffers: dict[str, Buffer], known: set[Sym], written: set[str]) -> None:
    space = {b.name: b for b in kernel.workspace}
    buffers, written = {**buffers, **space}, written | set(space)
    for part in kernel.parts:
        if isinstance(part, Template):
            _verify_template(part, buffers, known, written)
        elif isinstance(part, LoopNest):
            verify_loops(part, buffers, known, written)


def _verify_list(
    program: Program,
    where: str,
    nodes: tuple[Node, ...],
    outputs: tuple[str, ...],
    own: dict[str, Buffer],
    written: set[str],
    symbols: set[Sym],
) -> None:
    """A variant's nodes: a small program by itself."""
    views = tuple(full_view(program.buffers[o]) for o in outputs)
    known = {n: replace(b, kind="input") for n, b in program.buffers.items() if n in written}
    rest = {n: b for n, b in program.buffers.items() if n not in written}
    inputs = tuple(symbols | symbols_in([full_view(b) for b in program.buffers.values()]))
    try:
        verify(replace(program, inputs=inputs, buffers={**rest, **known, **own}, nodes=nodes, outputs=views))
    except VerifyError as e:
        raise VerifyError(f"{where}: {e}") from None


def _verify_template(t: Template, buffers: dict[str, Buffer], known: set[Sym], written: set[str]) -> None:
    batch, m, n, k = t.sizes
    if len(t.a.shape) != 3 or len(t.b.shape) != 3 or t.b.shape[0] != batch or t.b.shape[1] != k:
        raise VerifyError(f"{t.name}: operands of shapes {t.a.shape} and {t.b.shape} cannot be multiplied")
    sizes = tuple(a.size for a in t.epilogue.axes)
    if sizes != ((m, n) if batch == 1 else (batch, m, n)) or t.epilogue.reduced:
        raise VerifyError(f"{t.name}: the epilogue runs over {sizes}, the product has {(batch, m, n)}")
    accs = [s for s in t.epilogue.body if isinstance(s, Acc)]
    if len(accs) != 1 or accs[0].dtype != t.acc_dtype:
        raise VerifyError(f"{t.name}: the epilogue must take the product once, as {t.acc_dtype}")
    if touched := set(t.writes()) & set(t.operands()):
        raise VerifyError(f"{t.name}: the epilogue writes {sorted(touched)}, which other programs still read")
    verify_loops(t.epilogue, buffers, known, written, acc=True)
    for p in t.prologues:
        (v,) = (v for v in (t.a, t.b) if t.prologue(v) is p)
        if tuple(a.size for a in p.axes) != (v.shape[1:] if batch == 1 else v.shape) or p.reduced:
            raise VerifyError(f"{t.name}: the prologue of {v.buffer} must run over {v.shape}, not {p.axes}")
        if v.buffer in buffers:
            raise VerifyError(f"{t.name}: {v.buffer} is computed as it is read, and must not be in memory")
        made = Buffer(v.buffer, v.dtype, buffers[p.reads()[0]].device, v.shape, v.strides)
        verify_loops(p, {**buffers, v.buffer: made}, known, written)


def verify_loops(
    loops: LoopNest, buffers: dict[str, Buffer], known: set[Sym], written: set[str], acc: bool = False
) -> None:
    """Every rule that concerns one LoopNest. ``written``: buffers that hold data before it runs. ``acc``: it is an
    epilogue."""
    if not acc and any(isinstance(s, Acc) for s in loops.body):
        raise VerifyError(f"{loops.name}: acc has a meaning only in a template's epilogue")
    axes = {a.var for a in loops.axes}
    if len(axes) != len(loops.axes):
        raise VerifyError(f"{loops.name}: two axes have one variable")
    for a in loops.axes:
        if a.kind not in ("p", "r"):
            raise VerifyError(f"{loops.name}: axis {a.var} has the unknown kind {a.kind!r}")
        if unknown := a.size.symbols() - known:
            raise VerifyError(f"{loops.name}: axis {a.var}'s size {a.size} uses {sorted(unknown)}, not known here")
    inside = _Inside(loops, buffers, axes, known, set(written))
    level = None
    for i, s in enumerate(loops.body):
        inside.check(i, s)
        if isinstance(s, Store):
            level = level or varying(loops.body, loops.reduced_vars)
            inside.check_store_races(i, s, level)
    devices = {buffers[b].device for b in [*loops.reads(), *loops.writes()]}
    if len(devices) > 1:
        raise VerifyError(f"{loops.name}: touches buffers on {' and '.join(sorted(map(str, devices)))}")


class _Inside:
    """Checks of one loop nest's body."""

    def __init__(self, loops: LoopNest, buffers: dict[str, Buffer], axes: set[Var], known: set[Sym], written: set[str]):
        self.loops, self.buffers, self.axes, self.known, self.written = loops, buffers, axes, known, written
        self.filled = frozenset(written)  # before this loop nest
        self.points = all(nonneg(a.size - 1) for a in loops.axes)
        self.known_ends = dict[Expr, tuple[Expr, Expr] | None]()  # most indices are used several times

    def fail(self, i: int, rule: str) -> NoReturn:
        raise VerifyError(f"{self.loops.name}: {format_stmt(i, self.loops.body[i])}: {rule}")

    def dtype(self, i: int, a: int) -> torch.dtype:
        if isinstance(self.loops.body[a], Store):
            self.fail(i, f"%{a} is a store, which has no value")
        return self.loops.body[a].dtype  # type: ignore[union-attr]

    def check(self, i: int, s: Stmt) -> None:
        body = self.loops.body
        for a in stmt_args(s):
            if not 0 <= a < i:
                self.fail(i, f"uses %{a}, which is not computed before it")
            self.dtype(i, a)
        for e in stmt_exprs(s):
            for atom in e.atoms():
                if isinstance(atom, Var) and atom not in self.axes:
                    self.fail(i, f"{atom} is not an axis of this LoopNest")
                if isinstance(atom, Ref) and not isinstance(body[atom.id], Indirect):
                    self.fail(i, f"{atom} is used as an index but is not an indirect")
                if isinstance(atom, Sym) and atom not in self.known:
                    self.fail(i, f"the size {atom} is not known here")
        if isinstance(s, (Load, Store)):
            self.check_access(i, s)
        elif isinstance(s, Op):
            self.check_op(i, s)
        elif isinstance(s, Reduce):
            self.check_reduce(i, s)
        elif isinstance(s, Scan):
            self.check_scan(i, s)
        elif isinstance(s, Indirect):
            if self.dtype(i, s.arg) not in (torch.int32, torch.int64):
                self.fail(i, "an indirect takes an int64, or an int32")
        elif s.dtype not in VALUE_DTYPES or isinstance(s, Index) and s.dtype not in _INTS:
            self.fail(i, f"{s.dtype} is not allowed here")
        elif isinstance(s, Const) and not isinstance(s.value, (bool, int, float)):
            self.fail(i, f"{s.value!r} is not a number")

    def check_access(self, i: int, s: Load | Store) -> None:
        buffer = self.buffers[s.buffer]
        have = s.dtype if isinstance(s, Load) else self.dtype(i, s.value)
        if have != value_dtype(buffer.dtype):
            self.fail(i, f"a value of {have} for a buffer of {buffer.dtype}")
        if isinstance(s, Store):
            self.written.add(s.buffer)
        else:
            if s.mask is not None and self.dtype(i, s.mask) != torch.bool:
                self.fail(i, "the mask is not a bool")
            if s.buffer not in self.written:
                self.fail(i, f"{s.buffer} is read before it is written")
        if isinstance(s, Store) or s.mask is None:
            self.check_bounds(i, s.index, buffer)

    def ends(self, index: Expr) -> tuple[Expr, Expr] | None:
        """``linear_ends``, where they are reached: no axis is empty."""
        if index not in self.known_ends:
            self.known_ends[index] = linear_ends(index) if self.points else None
        return self.known_ends[index]

    def check_bounds(self, i: int, index: Expr, buffer: Buffer) -> None:
        ends = self.ends(index)
        if ends is None:
            return
        if nonneg(ZERO - ends[0] - 1):
            self.fail(i, f"the index goes down to {ends[0]}")
        if nonneg(ends[1] - buffer.extent):
            self.fail(i, f"the index goes up to {ends[1]}, the buffer has {buffer.extent} elements")

    def check_op(self, i: int, s: Op) -> None:
        spec = OPS.get(s.op)
        if spec is None:
            self.fail(i, f"there is no op {s.op!r}")
        if len(s.args) != spec.arity:
            self.fail(i, f"takes {spec.arity} operands, has {len(s.args)}")
        dtypes = [self.dtype(i, a) for a in s.args]
        if s.op == "where" and dtypes.pop(0) != torch.bool:
            self.fail(i, "the condition is not a bool")
        if len(set(dtypes)) != 1:
            self.fail(i, f"operands of different dtypes {dtypes}")
        if not _KINDS[spec.kind](dtypes[0]):
            self.fail(i, f"takes {spec.kind} operands, not {dtypes[0]}")
        want = {"same": dtypes[0], "bool": torch.bool, "given": s.dtype}[spec.result]
        if s.dtype != want or s.dtype not in (*VALUE_DTYPES, *float8.CASTS):
            self.fail(i, f"gives {want}, is marked {s.dtype}")

    def check_reduce(self, i: int, s: Reduce) -> None:
        if s.kind not in REDUCTIONS:
            self.fail(i, f"there is no reduction {s.kind!r}")
        arg = s.kind.startswith("arg")
        count = 2 if arg or s.kind == "m2" and len(s.args) > 1 else 1
        if len(s.args) != count:
            self.fail(i, f"takes {count} operands, has {len(s.args)}")
        if arg and (self.dtype(i, s.args[1]) != torch.int64 or s.dtype != torch.int64):
            self.fail(i, "takes an int64 index and gives one")
        if not arg and s.dtype != self.dtype(i, s.args[0]):
            self.fail(i, f"reduces {self.dtype(i, s.args[0])} but is marked {s.dtype}")
        if s.kind in ("any", "all") and s.dtype != torch.bool:
            self.fail(i, "takes a bool")
        if s.kind == "m2" and not (s.dtype.is_floating_point and all(self.dtype(i, a) == s.dtype for a in s.args)):
            self.fail(i, "takes a float, and perhaps its weight")

    def check_scan(self, i: int, s: Scan) -> None:
        if s.kind not in SCANS:
            self.fail(i, f"there is no scan {s.kind!r}")
        if len(self.loops.reduced) != 1:
            self.fail(i, f"runs along one r axis, has {len(self.loops.reduced)}")
        dtypes = [self.dtype(i, a) for a in s.args]
        if len(dtypes) != (2 if s.kind.startswith("arg") else 1) or dtypes[1:] not in ([], [torch.int64]):
            self.fail(i, f"takes a value (an arg*: and an int64), has {dtypes}")
        if s.dtype != dtypes[-1] or dtypes[0] == torch.bool:
            self.fail(i, f"of {dtypes} is marked {s.dtype}")
        if s.kind == "logsumexp" and not s.dtype.is_floating_point:
            self.fail(i, "takes a float")

    def check_store_races(self, i: int, s: Store, level: list[bool]) -> None:
        """Each point that executes a store must write its own element (except scatters, whose index is a value). An
        empty tensor may have any strides: torch gives shape [0, 4] the strides (1, 0)."""
        atoms = s.index.atoms()
        if s.reduce == "atomic":
            self.check_atomic(i, s)
            return
        if s.reduce:
            self.check_sums(i, s)
            return
        if any(isinstance(a, Ref) for a in atoms) or any(a.size == 0 for a in self.loops.axes):
            return
        for a in self.loops.axes:
            if (a.kind == "p" or level[i] or level[s.value]) and a.var not in atoms and a.size != 1:
                self.fail(i, f"every {a.var} writes the same element")

    def check_atomic(self, i: int, s: Store) -> None:
        """It adds to what an earlier node stored, at every point; nothing else here touches the buffer."""
        buffer = self.buffers[s.buffer]
        if buffer.dtype not in ATOMIC:
            self.fail(i, f"no atomic addition of {buffer.dtype}")
        if s.buffer not in self.filled:
            self.fail(i, f"{s.buffer} is added to before it is filled")
        if self.loops.reduced or any(isinstance(o, (Reduce, Scan)) for o in self.loops.body):
            self.fail(i, "an atomic addition beside a reduction")
        others = [o for o in self.loops.body if isinstance(o, (Load, Store)) and o.buffer == s.buffer]
        if any(isinstance(o, Load) or o.reduce != "atomic" for o in others):
            self.fail(i, "another statement touches the sums")

    def check_sums(self, i: int, s: Store) -> None:
        """One index per column, counted from the start of a row; nothing else touches the rows."""
        buffer = self.buffers[s.buffer]
        if s.reduce != "sum" or buffer.dtype != torch.float32:
            self.fail(i, f"column sums of {buffer.dtype} are not float32")
        if any(isinstance(a, Ref) for a in s.index.atoms()):
            self.fail(i, "the column is a value")
        ends, columns = self.ends(s.index), product(buffer.shape[1:])
        if ends is not None and nonneg(ends[1] - columns):
            self.fail(i, f"the column goes up to {ends[1]} in rows of {columns}")
        if sum(isinstance(o, (Load, Store)) and o.buffer == s.buffer for o in self.loops.body) > 1:
            self.fail(i, "another statement touches the sums")


def linear_ends(e: Expr) -> tuple[Expr, Expr] | None:
    """Least and greatest value of an index that is linear in loop variables with coefficients of known sign.
    Both are reached, if no axis is empty. None for other indices."""
    low = high = e
    for v in sorted(e.variables()):
        c = e.coefficient(v)
        if c is None or c.variables():
            return None
        rest_low, rest_high = low - c * Expr((((v,), 1),)), high - c * Expr((((v,), 1),))
        if nonneg(c):
            low, high = rest_low, rest_high + c * (v.size - 1)
        elif nonneg(-c):
            low, high = rest_low + c * (v.size - 1), rest_high
        else:
            return None
    return None if any(not isinstance(a, Sym) for a in low.atoms() | high.atoms()) else (low, high)
