"""The rules of the IR, checked. ``verify`` runs after every stage in tests and under ``Options(verify=True)``.

A violation is a bug in a stage, so the message names the node, the statement and the rule. What cannot be decided
(an index with ``//`` or with symbols of unknown size) passes; the interpreter checks it on real values.
"""

from dataclasses import replace

import torch

from ..errors import VerifyError
from . import float8, random  # noqa: F401  (its op)
from .expr import ZERO, Expr, Ref, Sym, Var, nonneg, product, upper_bound
from .loops import Acc, Index, Indirect, Load, LoopNest, Op, Reduce, Scan, Stmt, Store, stmt_args, stmt_exprs
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


def fail_if(broken: bool, rule: str) -> None:
    if broken:
        raise VerifyError(rule)


def verify(program: Program) -> None:
    """Check all of ``program``; raises VerifyError at the first broken rule."""
    known = _verify_buffers(program)
    written = {n for n, b in program.buffers.items() if b.kind != "temp"}
    names: set[str] = set()
    for node in program.nodes:
        fail_if(node.name in names, f"{node.name}: two nodes have this name")
        names.add(node.name)
        for b in [*node.reads(), *node.writes()]:
            fail_if(b not in program.buffers, f"{node.name}: buffer {b} is not declared")
        # a kernel may read what it wrote
        own = isinstance(node, (LoopNest, Variants, Template)) or isinstance(getattr(node, "target", 0), Launched)
        own = own or isinstance(node, Extern) and node.out is not None  # (its results are among its arguments)
        inside = set(node.writes()) if own else set()
        for b in node.reads():
            fail_if(b not in written and b not in inside, f"{node.name}: reads {b} before any node has written it")
        _verify_node(program, node, known, written)
        written |= set(node.writes())
    for v in iter_views(program.outputs):
        fail_if(v.buffer not in written, f"outputs: {v.buffer} is returned but never written")


def _verify_buffers(program: Program) -> set[Sym]:
    """Tables agree with each other; returns the size symbols known when the program starts."""
    known: set[Sym] = set()
    for i in program.inputs:
        declared = not isinstance(i, str) or i in program.buffers and program.buffers[i].kind == "input"
        fail_if(not declared, f"inputs: {i} is not declared as an input buffer")
        if isinstance(i, Expr):
            known |= i.symbols()
        elif isinstance(i, Sym):
            known.add(i)
    for name, b in program.buffers.items():
        fail_if(name != b.name, f"buffers: {b.name} is filed under the name {name}")
        ranks = len(b.shape), len(b.strides)
        fail_if(len(set(ranks)) > 1, f"buffers: {name} has {ranks[0]} sizes and {ranks[1]} strides")
        fail_if(b.kind not in ("input", "const", "temp"), f"buffers: {name} has the unknown kind {b.kind!r}")
        fail_if(b.kind == "const" and name not in program.constants, f"buffers: {name} is a constant without a value")
        if b.kind == "input":
            known |= {s for e in (*b.shape, *b.strides) for s in e.symbols()}
    return known


def _verify_node(program: Program, node: Node, known: set[Sym], written: set[str]) -> None:
    if isinstance(node, Extern):
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
            outputs = node.outputs
            if isinstance(node, Region):  # a loop may not run at all, and what is carried is there
                outputs = () if node.repeats else tuple(o for o in outputs if (o, o) not in node.carried)
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
        fail_if(v.buffer in buffers, f"{t.name}: {v.buffer} is computed as it is read, and must not be in memory")
        made = Buffer(v.buffer, v.dtype, buffers[p.reads()[0]].device, v.shape, v.strides)
        verify_loops(p, {**buffers, v.buffer: made}, known, written)


def verify_loops(
    loops: LoopNest, buffers: dict[str, Buffer], known: set[Sym], written: set[str], acc: bool = False
) -> None:
    """Every rule about one LoopNest. ``written``: buffers that hold data before it runs. ``acc``: it is an epilogue."""
    if not acc and any(isinstance(s, Acc) for s in loops.body):
        raise VerifyError(f"{loops.name}: acc has a meaning only in a template's epilogue")
    axes = {a.var for a in loops.axes}
    fail_if(len(axes) != len(loops.axes), f"{loops.name}: two axes have one variable")
    for a in loops.axes:
        fail_if(a.kind not in ("p", "r"), f"{loops.name}: axis {a.var} has the unknown kind {a.kind!r}")
        unknown = sorted(a.size.symbols() - known)
        fail_if(bool(unknown), f"{loops.name}: axis {a.var}'s size {a.size} uses {unknown}, not known here")
    inside = _Inside(loops, buffers, axes, known, set(written))
    level = None
    for i, s in enumerate(loops.body):
        inside.check(i, s)
        if isinstance(s, Store):
            level = level or varying(loops.body, loops.reduced_vars)
            inside.check_store_races(i, s, level)
    devices = {buffers[b].device for b in [*loops.reads(), *loops.writes()]}
    fail_if(len(devices) > 1, f"{loops.name}: touches buffers on {' and '.join(sorted(map(str, devices)))}")


class _Inside:
    """Checks of one loop nest's body."""

    def __init__(self, loops: LoopNest, buffers: dict[str, Buffer], axes: set[Var], known: set[Sym], written: set[str]):
        self.loops, self.buffers, self.axes, self.known, self.written = loops, buffers, axes, known, written
        self.filled = frozenset(written)  # before this loop nest
        self.points = all(nonneg(a.size - 1) for a in loops.axes)
        self.known_ends = dict[Expr, tuple[Expr, Expr] | None]()  # most indices are used several times

    def fail_if(self, broken: bool, i: int, rule: str) -> None:
        if broken:
            raise VerifyError(f"{self.loops.name}: {format_stmt(i, self.loops.body[i])}: {rule}")

    def dtype(self, i: int, a: int) -> torch.dtype:
        self.fail_if(isinstance(self.loops.body[a], Store), i, f"%{a} is a store, which has no value")
        return self.loops.body[a].dtype  # type: ignore[union-attr]

    def check(self, i: int, s: Stmt) -> None:
        body = self.loops.body
        for a in stmt_args(s):
            self.fail_if(not 0 <= a < i, i, f"uses %{a}, which is not computed before it")
            self.dtype(i, a)
        for e in stmt_exprs(s):
            for atom in e.atoms():
                foreign = isinstance(atom, Var) and atom not in self.axes
                value = isinstance(atom, Ref) and not isinstance(body[atom.id], Indirect)
                self.fail_if(foreign, i, f"{atom} is not an axis of this LoopNest")
                self.fail_if(value, i, f"{atom} is used as an index but is not an indirect")
                self.fail_if(isinstance(atom, Sym) and atom not in self.known, i, f"the size {atom} is not known here")
        if isinstance(s, (Load, Store)):
            self.check_access(i, s)
        elif isinstance(s, Op):
            self.check_op(i, s)
        elif isinstance(s, Reduce):
            self.check_reduce(i, s)
        elif isinstance(s, Scan):
            self.check_scan(i, s)
        elif isinstance(s, Indirect):
            integer = self.dtype(i, s.arg) in (torch.int32, torch.int64)
            self.fail_if(not integer, i, "an indirect takes an int64, or an int32")
        else:
            allowed = s.dtype in (_INTS if isinstance(s, Index) else VALUE_DTYPES)
            self.fail_if(not allowed, i, f"{s.dtype} is not allowed here")

    def check_access(self, i: int, s: Load | Store) -> None:
        buffer = self.buffers[s.buffer]
        have = s.dtype if isinstance(s, Load) else self.dtype(i, s.value)
        self.fail_if(have != value_dtype(buffer.dtype), i, f"a value of {have} for a buffer of {buffer.dtype}")
        if isinstance(s, Store):
            self.written.add(s.buffer)
        else:
            self.fail_if(s.mask is not None and self.dtype(i, s.mask) != torch.bool, i, "the mask is not a bool")
            self.fail_if(s.buffer not in self.written, i, f"{s.buffer} is read before it is written")
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
        self.fail_if(nonneg(ZERO - ends[0] - 1), i, f"the index goes down to {ends[0]}")
        beyond = nonneg(ends[1] - buffer.extent)
        self.fail_if(beyond, i, f"the index goes up to {ends[1]}, the buffer has {buffer.extent} elements")

    def check_op(self, i: int, s: Op) -> None:
        self.fail_if(s.op not in OPS, i, f"there is no op {s.op!r}")
        spec = OPS[s.op]
        self.fail_if(len(s.args) != spec.arity, i, f"takes {spec.arity} operands, has {len(s.args)}")
        dtypes = [self.dtype(i, a) for a in s.args]
        self.fail_if(s.op == "where" and dtypes.pop(0) != torch.bool, i, "the condition is not a bool")
        self.fail_if(len(set(dtypes)) != 1, i, f"operands of different dtypes {dtypes}")
        self.fail_if(not _KINDS[spec.kind](dtypes[0]), i, f"takes {spec.kind} operands, not {dtypes[0]}")
        want = {"same": dtypes[0], "bool": torch.bool, "given": s.dtype}[spec.result]
        right = s.dtype == want and s.dtype in (*VALUE_DTYPES, *float8.CASTS)
        self.fail_if(not right, i, f"gives {want}, is marked {s.dtype}")

    def check_reduce(self, i: int, s: Reduce) -> None:
        self.fail_if(s.kind not in REDUCTIONS, i, f"there is no reduction {s.kind!r}")
        arg, dtypes = s.kind.startswith("arg"), [self.dtype(i, a) for a in s.args]
        count = 2 if arg or s.kind == "m2" and len(s.args) > 1 else 1
        self.fail_if(len(s.args) != count, i, f"takes {count} operands, has {len(s.args)}")
        made = dtypes[1:] == [torch.int64] == [s.dtype] if arg else s.dtype == dtypes[0]
        self.fail_if(not made, i, f"reduces {dtypes} but is marked {s.dtype}")
        self.fail_if(s.kind in ("any", "all") and s.dtype != torch.bool, i, "takes a bool")
        floats = s.dtype.is_floating_point and set(dtypes) == {s.dtype}
        self.fail_if(s.kind == "m2" and not floats, i, "takes a float, and perhaps its weight")

    def check_scan(self, i: int, s: Scan) -> None:
        self.fail_if(s.kind not in SCANS, i, f"there is no scan {s.kind!r}")
        self.fail_if(len(self.loops.reduced) != 1, i, f"runs along one r axis, has {len(self.loops.reduced)}")
        dtypes = [self.dtype(i, a) for a in s.args]
        more = [torch.int64] if s.kind.startswith("arg") else dtypes[:1] if s.kind == "linear" else []
        self.fail_if(dtypes[1:] != more, i, f"takes a value (arg*: and an int64; linear: two values), has {dtypes}")
        self.fail_if(s.dtype != dtypes[-1] or dtypes[0] == torch.bool, i, f"of {dtypes} is marked {s.dtype}")
        self.fail_if(s.kind in ("logsumexp", "linear") and not s.dtype.is_floating_point, i, "takes a float")

    def check_store_races(self, i: int, s: Store, level: list[bool]) -> None:
        """Each point that executes a store must write its own element (except scatters, whose index is a value). An
        empty tensor may have any strides: torch gives shape [0, 4] the strides (1, 0)."""
        if s.reduce:
            return self.check_atomic(i, s, level) if s.reduce == "atomic" else self.check_sums(i, s)
        atoms = s.index.atoms()
        if any(isinstance(a, Ref) for a in atoms) or any(a.size == 0 for a in self.loops.axes):
            return
        for a in self.loops.axes:
            many = a.size != 1 and (a.kind == "p" or level[i] or level[s.value])
            self.fail_if(many and a.var not in atoms, i, f"every {a.var} writes the same element")

    def check_atomic(self, i: int, s: Store, level: list[bool]) -> None:
        """It adds to what an earlier node stored, once per row; nothing else here touches the buffer."""
        buffer = self.buffers[s.buffer]
        self.fail_if(buffer.dtype not in ATOMIC, i, f"no atomic addition of {buffer.dtype}")
        self.fail_if(s.buffer not in self.filled, i, f"{s.buffer} is added to before it is filled")
        each = level[i] or level[s.value] or any(isinstance(o, Scan) for o in self.loops.body)
        self.fail_if(each, i, "an atomic addition for each element of a row")
        others = {getattr(o, "reduce", "load") for o in self.touching(s.buffer)}
        self.fail_if(others != {"atomic"}, i, "another statement touches the sums")

    def check_sums(self, i: int, s: Store) -> None:
        """One index per column, counted from the start of a row; nothing else touches the rows."""
        buffer = self.buffers[s.buffer]
        right = s.reduce == "sum" and buffer.dtype == torch.float32
        self.fail_if(not right, i, f"column sums of {buffer.dtype} are not float32")
        self.fail_if(any(isinstance(a, Ref) for a in s.index.atoms()), i, "the column is a value")
        ends, columns = self.ends(s.index), product(buffer.shape[1:])
        if ends is not None:
            self.fail_if(nonneg(ends[1] - columns), i, f"the column goes up to {ends[1]} in rows of {columns}")
        others = [o for o in self.touching(s.buffer) if o is not s]
        apart = all(isinstance(o, Store) and o.reduce == "sum" and _apart(ends, self.ends(o.index)) for o in others)
        self.fail_if(not apart, i, "another statement touches the sums")

    def touching(self, buffer: str) -> list[Load | Store]:
        return [o for o in self.loops.body if isinstance(o, (Load, Store)) and o.buffer == buffer]


def _apart(one: tuple[Expr, Expr] | None, other: tuple[Expr, Expr] | None) -> bool:
    """Are two ranges of places known to have none in common?"""
    if one is None or other is None:
        return False
    return nonneg(one[0] - other[1] - 1) or nonneg(other[0] - one[1] - 1)


def linear_ends(e: Expr) -> tuple[Expr, Expr] | None:
    """Least and greatest value of an index that is linear in loop variables with coefficients of known sign.
    Both are reached, if no axis is empty. None for other indices."""
    atoms = e.atoms().union(*(v.size.atoms() for v in e.variables()))
    low, high = upper_bound(-e), upper_bound(e)
    linear = all(isinstance(a, Var | Sym) for a in atoms)
    return (-low, high) if linear and low is not None and high is not None else None
