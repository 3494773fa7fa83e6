"""One LoopNest as C++ loops: rows, tiles, passes, accumulators. ``cpp.py`` shows their shapes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.expr import product
from ..ir.loops import Axis, Const, Index, Indirect, Load, Op, Reduce, Scan, Stmt, Store, stmt_args
from ..ir.program import Buffer
from ..ir.scans import start
from . import cpp_text as text
from .cpp_nest import Nest, Segment, crossing_axis, depends_on, repeated, segments

PARALLEL_WORK = 32768  # cheap operations that are worth starting threads for
SUM_BLOCK = 1024  # floats added up in float before the sum is added to a double
SUM_ROWS = 256  # the same for sums of columns
TILE, NARROW = 1024, 64  # columns per tile, each with its accumulators: a page of memory at most, some lines at least
SQUARE = 64  # side of the tiles in which a transposed operand is read
KEPT_ROW = 8192  # longest row of values that is kept from one pass for the next


@dataclass
class Writer:
    """Lines of code at an indentation. ``checks``: bounds checks in them."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0
    checks: int = 0

    def line(self, s: str) -> None:
        self.lines.append("  " * self.depth + s)

    def block(self, head: str) -> AbstractContextManager[None]:
        return self.blocks([head])

    @contextmanager
    def blocks(self, heads: Sequence[str]) -> Iterator[None]:
        for h in heads:
            self.line(f"{h} {{" if h else "{")
            self.depth += 1
        yield
        for _ in heads:
            self.depth -= 1
            self.line("}")


def loop(a: Axis, start: str = "0", stop: str | None = None) -> str:
    v = text.identifier(a.var.name)
    return f"for (int64_t {v} = {start}; {v} < {stop or text.index(a.size)}; ++{v})"


def tile_loop(a: Axis, tile: int | str) -> str:
    v = text.identifier(a.var.name)
    return f"for (int64_t {v}_from = 0; {v}_from < {text.index(a.size)}; {v}_from += {tile})"


def _block_loops(a: Axis, block: int | None) -> tuple[list[str], str]:
    """The loop over ``a`` in blocks: (over blocks, over one). In one loop if it is not longer than a block, or None."""
    if block is None or (a.size.constant and a.size.constant <= block):
        return [], loop(a)
    v = text.identifier(a.var.name)
    return [tile_loop(a, block)], loop(a, f"{v}_from", f"op::min<int64_t>({v}_from + {block}, {text.index(a.size)})")


class Emitter:
    """Writes one LoopNest. ``names``: the buffers' names in C++."""

    def __init__(
        self, w: Writer, nest: Nest, buffers: dict[str, Buffer], names: dict[str, str], one_order: bool = False
    ):
        self.w, self.nest, self.loops = w, nest, nest.loops
        self.body: tuple[Any, ...] = nest.loops.body
        self.buffers, self.names = buffers, names
        self.by_column = depends_on(self.loops, nest.column)
        self.by_step = depends_on(self.loops, nest.rows[-1] if nest.rows else None)
        self.raw: dict[int, torch.dtype] = {}  # loads whose element has a name as it is in memory
        self.given: dict[int, str] = {}  # statements whose value is in a tile, and where
        self.leave = "continue"  # what to do when a bounds check fails
        self.one_order = one_order  # of sums, whatever the compiler makes of the loops

    def emit(self) -> None:
        if any(a.size == 0 for a in self.loops.parallel):
            return
        if not self.nest.rows:
            self._pointwise()
        elif self.nest.column is None:
            self._along_memory()
        else:
            self._across_memory()

    # -- threads --------------------------------------------------------------------------------
    def _threads(self, loops: int, kind: str = "") -> None:
        """The pragma that spreads the next ``loops`` nested loops over threads, if there is enough work."""
        heavy = sum(isinstance(s, Op) and s.op in text.EXPENSIVE for s in self.body)
        enough = PARALLEL_WORK // (1 + 4 * heavy)
        work = self.loops.numel * (self.loops.rnumel if self.nest.rows else 1)
        size = work.constant
        if size is not None and size < enough:
            if kind:
                self.w.line(f"#pragma omp {kind}")
            return
        condition = "" if size is not None else f" if ({text.index(work)} >= {enough})"
        nested = f" collapse({loops})" if loops > 1 else ""
        mode = " " + kind if kind else ""
        self.w.line(f"#pragma omp parallel for{mode}{nested} schedule(static) num_threads(threads){condition}")

    # -- the three shapes -----------------------------------------------------------------------
    def _pointwise(self) -> None:
        column, outer = self.nest.column, self.nest.outer
        everything = range(len(self.body))
        if column is None:
            self.leave = "return failed"
            self._statements(everything)
            return
        across, jumping = crossing_axis(self.nest)
        if across is not None and min(across.size.hint(), column.size.hint()) >= 16:
            self._transposing(column, across, jumping)
            return
        rows_are_parallel = product(a.size for a in outer).hint() >= 16
        if rows_are_parallel:
            self._threads(len(outer))
        with self.w.blocks([loop(a) for a in outer]):
            self.leave = "continue" if outer else "return failed"
            self._statements(i for i in everything if not self.by_column[i])
            self.leave = "continue"
            simd = "" if self._checks(i for i in everything if self.by_column[i]) else "simd"
            if not rows_are_parallel:
                self._threads(1, simd)
            elif simd:
                self.w.line("#pragma omp simd")
            with self.w.block(loop(column)):
                self._statements(i for i in everything if self.by_column[i])

    def _transposing(self, column: Axis, across: Axis, jumping: Sequence[int]) -> None:
        """Square tiles: loads strided along the column are read along memory into a tile, and used from there."""
        others = [a for a in self.nest.outer if a is not across]
        self._threads(len(others) + 2)
        tiles = [tile_loop(across, SQUARE), tile_loop(column, SQUARE)]
        with self.w.blocks([*(loop(a) for a in others), *tiles]):
            a, c = (text.identifier(x.var.name) for x in (across, column))
            for name, axis in ((a, across), (c, column)):
                self._tile_end(name, axis, SQUARE)
            for i in jumping:
                self.w.line(f"{text.CTYPE[self.body[i].dtype]} tile{i}[{SQUARE}][{SQUARE + 1}];")
            with self.w.block(loop(column, f"{c}_from", f"{c}_to")):
                self.w.line("#pragma omp simd")
                with self.w.block(loop(across, f"{a}_from", f"{a}_to")):
                    for i in jumping:
                        self.w.line(f"tile{i}[{c} - {c}_from][{a} - {a}_from] = {self._value(i)};")
            self.given = {i: f"tile{i}[{c} - {c}_from][{a} - {a}_from]" for i in jumping}
            with self.w.block(loop(across, f"{a}_from", f"{a}_to")):
                self.rows_of_tile(loop(column, f"{c}_from", f"{c}_to"))

    def rows_of_tile(self, columns: str) -> None:
        """A row of a tile in which some values are given; ``columns``: the head of the loop over it."""
        inner: list[int] = []
        for i, s in enumerate(self.body):
            if self.by_column[i] or i in self.given or any(a in inner for a in stmt_args(s)):
                inner.append(i)
        self._statements(i for i in range(len(self.body)) if i not in inner)
        if not self._checks(inner):
            self.w.line("#pragma omp simd")
        with self.w.block(columns):
            self._statements(inner)

    def _tile_end(self, name: str, axis: Axis, size: int | str) -> None:
        self.w.line(f"const int64_t {name}_to = op::min<int64_t>({name}_from + {size}, {text.index(axis.size)});")

    def _checks(self, statements: Iterable[int]) -> bool:
        """Is there a bounds check among ``statements``? Such a loop may exit early, so it is not vectorised."""
        return any(isinstance(self.body[i], Indirect) for i in statements)

    def _along_memory(self) -> None:
        kept = self._kept_row()
        if self.nest.outer:
            self._threads(len(self.nest.outer))
        with self.w.blocks([loop(a) for a in self.nest.outer] or ["for (int row = 0; row < 1; ++row)"]):
            self._scan_accumulators("")
            for i in kept:
                length = text.index(self.nest.rows[-1].size)
                self.w.line(f"{text.CTYPE[self.body[i].dtype]} kept{i}[{length}];")
            for segment in segments(self.loops, kept):
                if segment.over_r:
                    self._pass_along(segment.statements, kept)
                else:
                    self._statements(segment.statements)

    def _kept_row(self) -> list[int]:
        """Expensive values that several passes need, if a row of them fits into the first-level cache."""
        size = self.nest.rows[-1].size.constant
        found = repeated(self.loops, text.EXPENSIVE)
        return found if len(self.nest.rows) == 1 and size and size * len(found) <= KEPT_ROW else []

    def _pass_along(self, statements: Sequence[int], kept: Sequence[int]) -> None:
        """One pass over the reduced axes of a row: accumulators before, their values after."""
        reduces = [i for i in statements if isinstance(self.body[i], Reduce)]
        plain = [i for i in statements if i not in reduces]
        inner = self.nest.rows[-1]
        blocked, scans = self._blocked(reduces), self._start_scans(statements)
        for i in reduces:
            if i not in blocked:
                self._start(i)
            else:
                self.w.line(f"double total{i} = 0;")
        step = text.identifier(inner.var.name)
        over_blocks, over_one = _block_loops(inner, SUM_BLOCK if blocked else None)
        stored = blocked if self.one_order else []  # and added up after the loop, by code that says in which order
        at = f"{step} - {step}_from" if over_blocks else step
        with self.w.blocks([loop(a) for a in self.nest.rows[:-1]]):
            self._statements(i for i in plain if not self.by_step[i])
            with self.w.blocks(over_blocks):
                for i in blocked:
                    if i in stored:
                        self.w.line(f"float acc{i}[{min(SUM_BLOCK, inner.size.constant or SUM_BLOCK)}];")
                    else:
                        self._start(i)
                if not scans and not self._checks(i for i in plain if self.by_step[i]) and not self._ordered(reduces):
                    self._simd([i for i in reduces if i not in stored])
                with self.w.block(over_one):
                    self._with_kept([i for i in plain if self.by_step[i]], reduces, kept, step)
                    for i in reduces:
                        if i in stored:
                            self.w.line(f"acc{i}[{at}] = {self._name(self.body[i].args[0])};")
                        else:
                            self._combine(i, f"acc{i}")
                for i in blocked:
                    whole = text.index(inner.size)
                    count = f"op::min<int64_t>({SUM_BLOCK}, {whole} - {step}_from)" if over_blocks else whole
                    value = f"op::sum_in_order(acc{i}, {count})" if i in stored else f"acc{i}"
                    self.w.line(f"total{i} += {value};")
        for i in reduces:
            value = f"(float)total{i}" if i in blocked else f"acc{i}"
            self.w.line(f"const {text.CTYPE[self.body[i].dtype]} v{i} = {value};")

    def _across_memory(self) -> None:
        """Rows of columns: every value that outlives one loop over the tile is an array over the tile's columns."""
        column = self.nest.column
        assert column is not None
        c = text.identifier(column.var.name)
        tile = min(TILE, column.size.constant or TILE)
        step: int | str = tile
        if tile > NARROW:  # one for each thread, and not many on one page, which each has to find
            step = f"{c}_step"
            columns = text.index(product(a.size for a in self.nest.outer) * column.size)
            self.w.line(f"const int64_t {step} = op::tile_width({columns}, threads, {NARROW}, {tile});")
        self._threads(len(self.nest.outer) + 1)
        with self.w.blocks([*(loop(a) for a in self.nest.outer), tile_loop(column, step)]):
            self._tile_end(c, column, step)
            parts = segments(self.loops)
            kept = self._kept(parts)
            self._scan_accumulators(f"[{tile}]")
            for i in kept:
                self.w.line(f"{text.CTYPE[self.body[i].dtype]} kept{i}[{tile}];")
            for segment in parts:
                if segment.over_r:
                    self._pass_across(segment.statements, kept, tile)
                else:
                    self._statements(i for i in segment.statements if not self.by_column[i])
                    self._over_tile([i for i in segment.statements if self.by_column[i]], kept)

    def _kept(self, parts: Sequence[Segment]) -> list[int]:
        """Column values that one loop over the tile computes and another one uses, and reductions' results."""
        where = {i: k for k, s in enumerate(parts) for i in s.statements if not s.over_r}
        kept = {i for i, s in enumerate(self.body) if isinstance(s, Reduce)}
        for k, s in enumerate(parts):
            for i in s.statements:
                for a in stmt_args(self.body[i]):
                    if self.by_column[a] and where.get(a, k) != k:
                        kept.add(a)
        return sorted(kept)

    def _pass_across(self, statements: Sequence[int], kept: Sequence[int], tile: int) -> None:
        reduces = [i for i in statements if isinstance(self.body[i], Reduce)]
        plain = [i for i in statements if i not in reduces]
        column = self.nest.column
        assert column is not None
        c = text.identifier(column.var.name)
        blocked = self._blocked(reduces)
        in_tile = f"for (int64_t t = 0; t < {c}_to - {c}_from; ++t)"
        self._start_scans(statements, in_tile)
        for i in reduces:
            self.w.line(f"{self._acc_type(i)} acc{i}[{tile}];")
            if i in blocked:
                self.w.line(f"double total{i}[{tile}];")
        with self.w.block(in_tile):
            for i in reduces:
                self.w.line(f"acc{i}[t] = {text.start(self.body[i].kind, self.body[i].dtype)};")
                if i in blocked:
                    self.w.line(f"total{i}[t] = 0;")
        over_blocks, over_one = _block_loops(self.nest.rows[-1], SUM_ROWS if blocked else None)
        with self.w.blocks([*(loop(a) for a in self.nest.rows[:-1]), *over_blocks]):
            with self.w.block(over_one):
                self._statements(i for i in plain if not self.by_column[i])
                self._over_tile([i for i in plain if self.by_column[i]], kept, reduces)
            if blocked:
                self.w.line("#pragma omp simd")
                with self.w.block(in_tile):
                    for i in blocked:
                        self.w.line(f"total{i}[t] += acc{i}[t]; acc{i}[t] = 0;")
        if reduces:
            with self.w.block(in_tile):
                for i in reduces:
                    value = f"(float)total{i}[t]" if i in blocked else f"acc{i}[t]"
                    self.w.line(f"kept{i}[t] = {value};")

    def _over_tile(self, statements: list[int], kept: Sequence[int], reduces: Sequence[int] = ()) -> None:
        """One loop over the tile's columns."""
        column = self.nest.column
        assert column is not None
        if not statements and not reduces:
            return
        c = text.identifier(column.var.name)
        checked = self._checks(statements)
        if not checked:
            self.w.line("#pragma omp simd")
        with self.w.block(loop(column, f"{c}_from", f"{c}_to")):
            self._with_kept(statements, reduces, kept, f"{c} - {c}_from")
            for i in reduces:
                self._combine(i, f"acc{i}[{c} - {c}_from]")
        if checked:
            self.w.line("if (failed) continue;")

    def _with_kept(self, statements: list[int], reduces: Sequence[int], kept: Sequence[int], at: str) -> None:
        """Statements of a loop: what it, or its ``reduces``, needs of another loop is read, and what is kept stored."""
        for i in sorted(self._used((*statements, *reduces)) & set(kept) - set(statements)):
            self.w.line(f"const {text.CTYPE[self.body[i].dtype]} v{i} = kept{i}[{at}];")
            self.raw.pop(i, None)
        self._statements(statements)
        for i in statements:
            if i in kept:
                self.w.line(f"kept{i}[{at}] = v{i};")

    # -- reductions -----------------------------------------------------------------------------
    def _acc_type(self, i: int) -> str:
        """An accumulator's type. Compilers vectorise reductions of int, not of bool."""
        return "int" if self.body[i].kind in ("any", "all") else text.CTYPE[self.body[i].dtype]

    def _blocked(self, reduces: Sequence[int]) -> list[int]:
        """The sums that are added up in blocks: those of float32."""
        return [i for i in reduces if self.body[i].kind == "sum" and self.body[i].dtype == torch.float32]

    def _ordered(self, reduces: Sequence[int]) -> bool:
        """Is one of these to be formed in order, but not in blocks: a product, a sum in double?"""
        found = [self.body[i] for i in reduces if i not in self._blocked(reduces)]
        return self.one_order and any(s.kind in ("sum", "prod") and s.dtype.is_floating_point for s in found)

    def _used(self, statements: Iterable[int]) -> set[int]:
        return {a for i in statements for a in stmt_args(self.body[i])}

    def _start(self, i: int) -> None:
        s, dtype = self.body[i], self.body[i].dtype
        self.w.line(f"{self._acc_type(i)} acc{i} = {text.start(s.kind, dtype)};")

    def _combine(self, i: int, acc: str) -> None:
        s = self.body[i]
        value = self._name(s.args[0])
        if isinstance(self.body[s.args[0]], Const):
            value = f"({text.CTYPE[s.dtype]}){value}"
        self.w.line(text.combine(s.kind, acc, value))

    def _simd(self, reduces: Sequence[int]) -> None:
        kinds: dict[str, list[str]] = {}
        for i in reduces:
            s = self.body[i]
            kinds.setdefault(text.clause(s.kind), []).append(f"acc{i}")
        self.w.line("#pragma omp simd" + "".join(f" reduction({k}:{', '.join(v)})" for k, v in kinds.items()))

    # -- scans ----------------------------------------------------------------------------------
    def _scan_accumulators(self, size: str) -> None:
        """Variables for what each scan has come to, of an arg* for the index as well."""
        for i, s in enumerate(self.body):
            if isinstance(s, Scan):
                self.w.line(f"{text.scan_type(s, self.body[s.args[0]].dtype)} acc{i}{size};")
                if s.kind.startswith("arg"):
                    self.w.line(f"int64_t at{i}{size};")

    def _start_scans(self, statements: Sequence[int], in_tile: str = "") -> list[int]:
        """A pass begins; returns the scans in it. ``in_tile``: the head of the loop over a tile's columns."""
        scans = [i for i in statements if isinstance(self.body[i], Scan)]
        place = "[t]" if in_tile else ""
        with self.w.blocks([in_tile] if in_tile and scans else []):
            for i in scans:
                s = self.body[i]
                first = text.literal(start(s.kind, self.body[s.args[0]].dtype), self.body[s.args[0]].dtype)
                self.w.line(f"acc{i}{place} = {first};" + (f" at{i}{place} = 0;" if s.kind.startswith("arg") else ""))
        return scans

    def _scan(self, i: int, s: Scan) -> None:
        c = self.nest.column and text.identifier(self.nest.column.var.name)
        acc, at = (f"{name}{i}[{c} - {c}_from]" if c else f"{name}{i}" for name in ("acc", "at"))
        dtypes = [self.body[a].dtype for a in s.args]
        values = [f"({text.CTYPE[d]}){self._name(a)}" for a, d in zip(s.args, dtypes)]
        self.w.line(text.scan(s.kind, acc, at, values))
        made = at if s.kind.startswith("arg") else acc
        self.w.line(f"const {text.CTYPE[s.dtype]} v{i} = ({text.CTYPE[s.dtype]}){made};")

    # -- statements -----------------------------------------------------------------------------
    def _statements(self, positions: Iterable[int]) -> None:
        for i in positions:
            self._statement(i, self.body[i])

    def _statement(self, i: int, s: Stmt) -> None:
        if isinstance(s, Const):
            return  # written where it is used
        if isinstance(s, Store):
            b = self.buffers[s.buffer]
            target = f"{self.names[s.buffer]}[{text.index(s.index)}]"
            if self.raw.get(s.value) == b.dtype:
                self.w.line(f"{target}.bits = raw{s.value};")
            else:
                self.w.line(f"{target} = {text.stored(self._name(s.value), b.dtype)};")
        elif isinstance(s, Indirect):
            self._indirect(i, s)
        elif isinstance(s, Scan):
            self._scan(i, s)
        else:
            value = self._raw(i, s) or self._value(i)
            self.w.line(f"const {text.CTYPE[s.dtype]} v{i} = {value};")

    def _raw(self, i: int, s: Stmt) -> str:
        """An element that is stored as it was loaded: its bits get a name before they are widened."""
        self.raw.pop(i, None)
        if not isinstance(s, Load) or s.mask is not None or i in self.given:
            return ""
        dtype = self.buffers[s.buffer].dtype
        moved = any(isinstance(t, Store) and t.value == i and self.buffers[t.buffer].dtype == dtype for t in self.body)
        if not moved or not text.is_half(dtype):
            return ""
        self.raw[i] = dtype
        self.w.line(f"const uint16_t raw{i} = {self.names[s.buffer]}[{text.index(s.index)}].bits;")
        return text.loaded(f"{text.CTYPE[dtype]}{{raw{i}}}", dtype)

    def _name(self, i: int) -> str:
        """Statement ``i``'s value where it is used: its name, or the constant itself."""
        s = self.body[i]
        return text.literal(s.value, s.dtype) if isinstance(s, Const) else f"v{i}"

    def _value(self, i: int) -> str:
        s = self.body[i]
        if i in self.given:
            return self.given[i]
        if isinstance(s, Index):
            value = text.index(s.expr)
            return value if s.dtype == torch.int64 else text.cast(f"({value})", torch.int64, s.dtype)
        if isinstance(s, Load):
            element = f"{self.names[s.buffer]}[{text.index(s.index)}]"
            value = text.loaded(element, self.buffers[s.buffer].dtype)
            return value if s.mask is None else f"{self._name(s.mask)} ? {value} : {text.literal(s.other, s.dtype)}"
        if isinstance(s, Reduce):  # over axes of size 1, which are gone: the one element, or its position
            return self._name(s.args[-1])
        assert isinstance(s, Op)
        names = [self._name(a) for a in s.args]
        dtype = self.body[s.args[0]].dtype
        if dtype == torch.int64 and all(isinstance(self.body[a], Const) for a in s.args):
            names[0] = f"(int64_t){names[0]}"
        if s.op == "where" and s.dtype.is_floating_point:
            made = [isinstance(b := self.body[a], Op) and b.op not in ("where", "cast") for a in s.args]
            names[1:] = [f"op::chosen({n})" if m else n for n, m in zip(names[1:], made[1:])]
        if s.op in ("maximum", "minimum") and isinstance(self.body[s.args[1]], Const):
            names.reverse()  # of two zeros the second operand is taken: not the number, in eager's clamps
        return text.operation(s, tuple(names), dtype)

    def _indirect(self, i: int, s: Indirect) -> None:
        assert not s.skips, "lowered so for GPUs alone"
        self.w.checks += 1
        size = text.index(s.size)
        arg = self._name(s.arg)
        self.w.line(f"const int64_t v{i} = {f'{arg} < 0 ? {arg} + {size} : {arg}' if s.wraps else arg};")
        failed = f"__atomic_store_n(&failed, {self.w.checks}, __ATOMIC_RELAXED)"
        self.w.line(f"if ((uint64_t)v{i} >= (uint64_t)({size})) {{ {failed}; {self.leave}; }}")
