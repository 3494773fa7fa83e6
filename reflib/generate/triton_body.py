"""One part of a kernel: a LoopNest printed as the lines of a Triton function.

``triton_statements`` prints single statements. This file decides which points a program computes, and in which pass
over a row (``transforms.phases``) a statement is printed:

* persistent: the row fits one block, so all passes are straight-line code;
* looped: one ``for`` per pass. Values of an earlier pass that a later one needs are loaded and computed again, except
  results of reductions. A reduction keeps a whole block of partial results and combines them once, after its loop.
"""

from collections.abc import Collection

import torch

from ..ir.expr import Expr, Sym, expr
from ..ir.loops import Const, Index, Load, Reduce, Scan, Store
from ..ir.ops import identity
from ..ir.program import Buffer, Config
from ..ir.transforms import needed, phases, varying
from ..schedule.axes import Space, step
from ..seams import Seam
from .triton_facts import blocks, literal, paren
from .triton_ops import TL, Needs, nan_helper, print_cast
from .triton_statements import ORDER, StatementPrinter

# How a scan is printed, (PartPrinter, position) -> None: "declare" before a loop, "scan" inside it, or where the row is
# in one block. None: programs with scans cannot be printed (no rule of the core makes one).
SCANS = Seam("generate.SCANS")
BLOCK = frozenset("xr")  # the dimensions of a row's elements
ROW = frozenset("x")  # the dimensions of a reduction's result


class PartPrinter(StatementPrinter):
    """Prints one part; with a ``tag``, of several in one kernel. ``aligned``: buffers at multiples of 16 bytes."""

    one_pass = False  # does it print m2?

    def __init__(
        self,
        space: Space,
        config: Config,
        buffers: dict[str, Buffer],
        needs: Needs,
        tag: str = "",
        aligned: Collection[str] = (),
    ):
        self.block = {"x": config.xblock, "y": dict(config.extras).get("yblock", 1), "r": config.rblock}
        self.vars = {v.name: v for v in space.variables}
        super().__init__(space, config, buffers, needs, {d: self._needs_mask(d) for d in ORDER[space.mode]}, tag)
        self.peeled = self._peels(aligned)
        self.inside = varying(space.body, space.reduced_vars)
        self.phase = phases(space.body)

    # -- the whole part -------------------------------------------------------------------------
    def print(self) -> list[str]:
        self._prologue()
        looped = self.space.mode == "reduction" and self.config.reduction == "looped"
        if looped:
            self._looped()
        elif self.peeled:
            self._whole_or_last()
        else:
            if self.space.mode == "reduction":
                self._r_block("")
            self.statements()
        return self.lines

    def statement(self, i: int) -> None:
        if isinstance(self.space.body[i], Reduce):
            self._reduce(i)
        elif isinstance(self.space.body[i], Scan):
            SCANS["scan"](self, i)
        else:
            super().statement(i)

    def programs(self) -> Expr:
        """How many programs the part needs."""
        x, y, z = self.space.x, self.space.y, self.space.z
        n = blocks(x.size, self.block["x"])
        if y is not None:
            n = n * blocks(y.size, self.block["y"])
        return n if z is None else n * z.size

    def _prologue(self) -> None:
        """Which x (and y, z) this program computes."""
        pid = f"pid{self.tag}"
        if not self.tag:  # (of several parts the caller has bound it)
            self.put(f"pid = tl.program_id(0){'.to(tl.int64)' if self.wide else ''}")
        if self.space.mode == "tile":
            assert self.space.y is not None
            nx, ny = (self.size(blocks(v.size, self.block[v.name])) for v in (self.space.x, self.space.y))
            xpid, rest = (f"{pid} % {paren(nx)}", f"{pid} // {paren(nx)}") if nx != "1" else ("0", pid)
            self._range("x", xpid)
            if self.space.z is None:
                self._range("y", rest)
            else:
                self._range("y", f"{rest} % {paren(ny)}" if ny != "1" else "0")
                self.put(f"z{self.tag} = {rest} // {paren(ny)}" if ny != "1" else f"z{self.tag} = {rest}")
        else:
            self._range("x", pid)

    def _range(self, d: str, pid: str) -> None:
        at, piece = f"{paren(pid)} * {d.upper()}BLOCK + {self.arange(d)}", dict(self.config.extras).get("piece")
        self.put(f"{d}{self.tag} = " + (f"tl.max_contiguous({at}, {piece})" if piece else at))
        if self.masks[d] and not self.peeled:
            self._mask(d)

    def _mask(self, d: str) -> None:
        self.put(f"{d}mask{self.tag} = {d}{self.tag} < {self.size(self.vars[d].size)}")

    def arange(self, d: str) -> str:
        text = f"tl.arange(0, {d.upper()}BLOCK)"
        if len(self.order) == 1:
            return text
        return text + ("[:, None]" if self.order[0] == d else "[None, :]")

    def _r_block(self, start: str) -> None:
        wide = ".to(tl.int64)" if self.wide else ""
        self.put(f"r{self.tag} = {start}{self.arange('r')}{wide}")
        if self.masks["r"]:
            self.put(f"rmask{self.tag} = r{self.tag} < {self.size(self._rsize())}")

    def _rsize(self) -> Expr:
        assert self.space.r is not None
        return self.space.r.size

    def _needs_mask(self, d: str) -> bool:
        n = self.vars[d].size.constant
        if self.block[d] == 1 and d != "r":
            return False  # the grid has exactly as many programs
        return n is None or n % self.block[d] != 0 or n == 0

    def _peels(self, aligned: Collection[str]) -> bool:
        """Is the last block printed separately? In a flat kernel the mask of a size that is no multiple of 16, as far
        as Triton can prove, breaks each access of 16 bytes into single elements, distributed over threads as if it were
        whole: half the bandwidth for a bfloat16. Whole blocks need no mask."""
        n, x = self.space.x.size, self.space.x
        if self.space.mode != "1d" or not self.masks["x"] or self._sixteens(n):
            return False
        if n.constant is not None and n.constant < self.block["x"]:
            return False  # no block is whole
        moves = [s for s in self.space.body if isinstance(s, (Load, Store)) and s.buffer in aligned]
        return any(step(s.index, x) == 1 for s in moves)

    def _sixteens(self, n: Expr) -> bool:
        """Can Triton prove that ``n`` is a multiple of 16?"""
        known = dict(self.config.extras).get("divisible", ())
        return all(c % 16 == 0 or any(isinstance(a, Sym) and a.name in known for a in m) for m, c in n.terms)

    def _whole_or_last(self) -> None:
        """The statements twice: without a mask, and for the last block with one."""
        pid = f"pid{self.tag}"
        self.put(f"if {pid} * XBLOCK + XBLOCK <= {self.size(self.space.x.size)}:  # a whole block")
        self._under(False)
        self.put("else:")
        self._under(True)

    def _under(self, mask: bool) -> None:
        self.masks["x"], self.indent, self.values = mask, self.indent + "    ", {}
        if mask:
            self._mask("x")
        self.statements()
        self.indent = self.indent[4:]

    # -- passes ---------------------------------------------------------------------------------
    def _looped(self) -> None:
        """Row statements as early as possible, one loop per pass, row stores at the end."""
        body = self.space.body
        last = self._place_stores()
        passes = [self._needed(p) for p in range(last + 1)]
        row_stores = [i for i, s in enumerate(body) if isinstance(s, Store) and not self.inside[i]]
        for p, wanted in enumerate(passes):
            self._row(p)
            self.reread = {i for later in passes[p + 1 :] for i in later}
            if wanted:
                self._loop(wanted)
        for p in range(last + 1, max([*self.phase, last]) + 1):
            self._row(p)
        for i in row_stores:
            self.statement(i)

    def _row(self, p: int) -> None:
        """What is computed once per row, before pass ``p``."""
        for i, s in enumerate(self.space.body):
            if self.phase[i] == p and not self.inside[i] and not isinstance(s, (Reduce, Store)):
                self.statement(i)

    def _place_stores(self) -> int:
        """The number of the last pass. A store to a buffer that is also read moves to that pass: passes read again."""
        body = self.space.body
        last = max((self.phase[i] for i in self._results()), default=0)
        read = {s.buffer for s in body if isinstance(s, Load)}
        for i, s in enumerate(body):
            if isinstance(s, Store) and self.inside[i] and s.buffer in read:
                self.phase[i] = last
        return last

    def _needed(self, p: int) -> list[int]:
        """The statements inside pass ``p``'s loop: what its reductions and stores are made of, in order."""
        results = (i for i in self._results() if self.phase[i] == p)
        return needed(self.space.body, results, follow=self.inside.__getitem__)

    def _results(self) -> list[int]:
        """The reductions, and the stores inside their loops."""
        body = enumerate(self.space.body)
        return [i for i, s in body if isinstance(s, Reduce) or isinstance(s, Store) and self.inside[i]]

    def _loop(self, wanted: list[int]) -> None:
        body = self.space.body
        for i in wanted:
            if isinstance(body[i], Reduce):
                self._declare(i)
            elif isinstance(body[i], Scan):
                SCANS["declare"](self, i)
        self._steps(wanted, self.size(self._rsize()))
        for i in wanted:
            if isinstance(body[i], Reduce):
                self._finish(i)
            else:
                self.values.pop(i, None)  # names inside the loop end with it

    def _steps(self, wanted: list[int], end: str) -> None:
        self.put(f"for r0{self.tag} in range(0, {end}, RBLOCK):")
        self.indent += "    "
        self._step(wanted, f"r0{self.tag} + ")
        self.indent = self.indent[:-4]

    def _step(self, wanted: list[int], start: str) -> None:
        self._r_block(start)
        for i in wanted:
            if isinstance(self.space.body[i], Reduce):
                self._accumulate(i)
            else:
                self.statement(i)

    # -- reductions -----------------------------------------------------------------------------
    def operand(self, i: int, dtype: torch.dtype) -> str:
        """A reduction's argument as a full block of ``dtype``."""
        v = self.values[i]
        if isinstance(self.space.body[i], Const):
            return f"tl.full({self._shape(BLOCK)}, {v.text}, {TL[dtype]})"
        text = print_cast(v.text, self.dtype(i), dtype)
        text = f"({text})" if " " in text else text
        whole = v.dims == {"x", "r"} or (v.dims == {"r"} and self.block["x"] == 1)
        return text if whole else f"tl.broadcast_to({text}, {self._shape(BLOCK)})"

    def _accumulator(self, s: Reduce) -> tuple[torch.dtype, str, str]:
        """(dtype, identity, helper that combines two) of a reduction other than arg*; bools count as int32."""
        dtype = torch.int32 if s.dtype == torch.bool else s.dtype
        if s.kind in ("argmax", "argmin"):
            dtype = self.dtype(s.args[0])
            dtype = torch.int32 if dtype == torch.bool else dtype
        kind = {"any": "max", "all": "min", "argmax": "max", "argmin": "min"}.get(s.kind, s.kind)
        if kind in ("max", "min"):
            name = "maximum" if kind == "max" else "minimum"
            helper = nan_helper(name, dtype) if dtype.is_floating_point else f"{name}_int"
            if s.kind in ("any", "all"):  # of an empty row: False, True
                return dtype, "0" if kind == "max" else "1", helper
            return dtype, literal(identity(kind, dtype), dtype), helper
        return dtype, "0" if kind == "sum" else "1", "sum_of" if kind == "sum" else "product_of"

    def _reduction(self, i: int) -> Reduce:
        s = self.space.body[i]
        assert isinstance(s, Reduce)
        return s

    def _masked(self, text: str, identity: str) -> str:
        return f"tl.where(rmask{self.tag}, {text}, {identity})" if self.masks["r"] else text

    def _reduce(self, i: int) -> None:
        """In one step: the row is in the block."""
        s = self._reduction(i)
        dtype, identity, helper = self._accumulator(s)
        value = self._masked(self.operand(s.args[0], dtype), identity)
        if s.kind in ("argmax", "argmin"):
            self._first(i, value, self._positions(s))
        else:
            self._combine(i, value, dtype, helper)

    def _declare(self, i: int) -> None:
        s = self._reduction(i)
        dtype, identity, _ = self._accumulator(s)
        self.put(f"acc{i}{self.tag} = tl.full({self._shape(BLOCK)}, {identity}, {TL[dtype]})")
        if s.kind in ("argmax", "argmin"):
            at = self._position_dtype(s)
            last = 0 if self._in_order(s) else torch.iinfo(at).max
            self.put(f"at{i}{self.tag} = tl.full({self._shape(BLOCK)}, {last}, {TL[at]})")

    def _accumulate(self, i: int) -> None:
        s = self._reduction(i)
        dtype, identity, helper = self._accumulator(s)
        acc, value = f"acc{i}{self.tag}", self._masked(self.operand(s.args[0], dtype), identity)
        if s.kind in ("argmax", "argmin"):
            at, helper = f"at{i}{self.tag}", f"{s.kind}_{'next' if self._in_order(s) else 'of'}"
            self.put(f"{acc}, {at} = {self.needs.helper(helper)}({acc}, {at}, {value}, {self._positions(s)})")
        elif helper in ("sum_of", "product_of"):
            keep = "" if dtype.itemsize >= 4 else f".to({TL[dtype]})"
            sign = "+" if helper == "sum_of" else "*"
            self.put(f"{acc} = ({acc} {sign} {value}){keep}" if keep else f"{acc} = {acc} {sign} {value}")
        else:
            self.put(f"{acc} = {self.needs.helper(helper)}({acc}, {value})")

    def _in_order(self, s: Reduce) -> bool:
        """Of an argmax: are its positions 0, 1, ..., so that a loop meets the smaller one first?"""
        at, r = self.space.body[s.args[1]], self.space.r
        return isinstance(at, Index) and r is not None and at.expr == expr(r)

    def _position_dtype(self, s: Reduce) -> torch.dtype:
        return torch.int32 if self._in_order(s) and not self.wide else torch.int64

    def _positions(self, s: Reduce) -> str:
        dtype = self._position_dtype(s)
        return self._masked(self.operand(s.args[1], dtype), str(torch.iinfo(dtype).max))

    def _finish(self, i: int) -> None:
        s = self._reduction(i)
        dtype, _, helper = self._accumulator(s)
        if s.kind in ("argmax", "argmin"):
            self._first(i, f"acc{i}{self.tag}", f"at{i}{self.tag}")
        else:
            self._combine(i, f"acc{i}{self.tag}", dtype, helper)

    def _combine(self, i: int, value: str, dtype: torch.dtype, helper: str) -> None:
        if helper == "sum_of" and dtype.itemsize >= 4:
            text = f"tl.sum({value}, axis={self.order.index('r')}, keep_dims=True)"
        else:
            text = f"tl.reduce({value}, {self.order.index('r')}, {self.needs.helper(helper)}, keep_dims=True)"
        self._bind(i, f"{text} != 0" if self.dtype(i) == torch.bool else text, ROW)

    def _first(self, i: int, value: str, index: str) -> None:
        """The extreme, then the least of its positions: shorter than one reduction of pairs."""
        s = self._reduction(i)
        last = torch.iinfo(self._position_dtype(s)).max
        best = f"tl.reduce({value}, 1, {self.needs.helper(self._accumulator(s)[2])}, keep_dims=True)"
        self._bind(i, f"{self.needs.helper('first_of')}({value}, {best}, {index}, {last}).to({TL[s.dtype]})", ROW)
