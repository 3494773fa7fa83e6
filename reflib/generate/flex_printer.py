"""What the kernels of fused attention share: arguments, the slot, a block of scores, loops over blocks.

In the text ``b`` and ``h`` are the program's batch and head of queries, ``m`` and ``n`` the queries and keys of a
block, ``d`` and ``e`` the elements of a query's and of a value's head. A block of scores has rows ``y`` and columns
``x``: queries and keys, or in ``dkv`` keys and queries. ``score`` is a block before the softmax; ``FACTOR`` takes it
to base 2, where the hardware has the exponential function.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch

from ..errors import GenerateError
from ..ir.expr import Atom, Expr, IntLike, Var, expr
from ..ir.flex import INPUTS, RESULTS, FlexKernel
from ..ir.loops import Load, Store
from ..ir.program import Buffer, Extern, KernelNode, View
from ..ir.transforms import needed, substitute, varying
from ..schedule.axes import Space
from ..target import Target
from .kernel import Kernel
from .triton import HEADER, LIBDEVICE, known_multiples
from .triton_facts import blocks, const_mask, paren, pointer_name
from .triton_ops import TL, Needs, helper_text
from .triton_statements import StatementPrinter, Value

BLOCK = frozenset("yx")
Step = Callable[[bool], None]


class SlotPrinter(StatementPrinter):
    """Prints the slot: what does not vary along a row once (``outside``), the rest where it is asked for."""

    def outside(self, results: Iterable[str]) -> None:
        """What the columns have no part in, before the loops."""
        self.values = {}
        inner = varying(self.space.body, {self.space.x})
        self._print(i for i in self._needed(results) if not inner[i])
        self.kept = dict(self.values)

    def value(self, result: str) -> Value:
        self._print(self._needed([result]))
        return self.results[result]

    @property
    def sums(self) -> list[str]:
        """Buffers that the slot adds to."""
        return list(dict.fromkeys(s.buffer for s in self.space.body if isinstance(s, Store) and s.reduce))

    def add(self, counted: str) -> None:
        """Adds a block's terms to these; of scores that are not ``counted`` none ("": of all)."""
        self.counted = counted
        self._print(self._needed(self.sums))

    def again(self) -> None:
        """At the top of a loop's body: names inside it are not there yet."""
        self.values = dict(self.kept)
        self.results: dict[str, Value] = {}

    def _needed(self, results: Iterable[str]) -> list[int]:
        wanted = set(results)
        body = self.space.body
        return needed(body, [i for i, s in enumerate(body) if isinstance(s, Store) and s.buffer in wanted])

    def _print(self, positions: Iterable[int]) -> None:
        for i in positions:
            if i not in self.values:
                self.statement(i)

    def _load(self, i: int, s: Load) -> None:
        if s.buffer in INPUTS:
            self.values[i] = Value(s.buffer, BLOCK)
        else:
            super()._load(i, s)

    def _store(self, s: Store) -> None:
        if s.reduce:
            self._add(s)
            return
        v = self.values[s.value]
        self.results[s.buffer] = Value(const_mask(v.text) if s.buffer == "mask" else self._typed(s.value), v.dims)

    def _add(self, s: Store) -> None:
        """Terms at one place are summed before. (One that is 0 is not added: its place may be none.)"""
        text, masks, dims = self._access(s.index, [])
        term = f"tl.broadcast_to({self._typed(s.value)}, [YBLOCK, XBLOCK])"
        term = f"tl.where({self.counted}, {term}, 0.0)" if self.counted else term
        if not dims:
            term = f"tl.sum({term})"
        for axis, d in enumerate("yx") if dims else ():
            term = term if d in dims else f"tl.sum({term}, {axis}, keep_dims=True)"
        self.put(f"term = {term}")
        mask = " & ".join(["(term != 0.0)", *masks])
        self.put(f"tl.atomic_add({self._place(s.buffer, text)}, term, mask={mask}, sem='relaxed')")


class FlexPrinter:
    """The lines of one kernel. ``rows``, ``columns``: which of m and n the rows and columns of a block are."""

    def __init__(
        self, node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str], rows: str = "m"
    ):
        (x,) = node.parts
        assert isinstance(x, Extern) and isinstance(x.target, FlexKernel) and x.target.tiling is not None
        self.call, self.kernel, self.tiling = x, x.target, x.target.tiling
        self.node, self.buffers, self.target, self.aligned = node, buffers, target, aligned
        self.given = dict(x.kwargs)
        self.rows, self.columns = rows, "n" if rows == "m" else "m"
        q, k = self.given["q"].shape, self.given["k"].shape
        self.batch, self.heads, self.length = q[0], q[1], {"m": q[2] * self.kernel.packed, "n": k[2]}
        self.head = {"d": q[3], "e": self.given["v"].shape[3]}
        self.block = {"m": self.tiling.m, "n": self.tiling.n}
        whole = dict(node.config.extras).get("whole", ())
        self.ragged = {name: name not in whole for name in "mn"}
        self.needs = Needs()
        self.slot = self._slot()
        self.constants = {"MBLOCK": self.tiling.m, "NBLOCK": self.tiling.n}
        self.constants |= {f"{n.upper()}BLOCK": _power(size) for n, size in self.head.items()}
        self.constants |= {"YBLOCK": self.block[self.rows], "XBLOCK": self.block[self.columns]}
        # The maximum can be taken before the scores are scaled, in one multiplication with the sum, if nothing else
        # comes between and the order stays.
        self.plain = not self.kernel.stores("modified") and self.kernel.scale > 0
        self.factor = (self.kernel.scale if self.plain else 1.0) / math.log(2)

    def _slot(self) -> SlotPrinter:
        """Of the user's functions, with the buffers that they read by name."""
        substituted = substitute(self.kernel.slot.body, self._coordinates())
        body = tuple(self._captured(s) if isinstance(s, (Load, Store)) else s for s in substituted)
        y, x = (Var(d, self.length[n]) for d, n in (("y", self.rows), ("x", self.columns)))
        shown = torch.float32 if self.kernel.exact else torch.float16  # what a last bit of the results could show in
        results = {n: Buffer(n, torch.bool if n == "mask" else shown, torch.device("cpu"), (), ()) for n in RESULTS}
        masks = {"y": self.ragged[self.rows], "x": self.ragged[self.columns]}
        space = Space("tile", body, x, y)
        return SlotPrinter(space, self.node.config, {**self.buffers, **results}, self.needs, masks)

    def _coordinates(self) -> dict[Atom, IntLike]:
        """What the slot's variables are here: rows y, columns x, and names of the text."""
        names = {self.rows: "y", self.columns: "x"}
        return {a.var: expr(Var(names.get(a.var.name, a.var.name), a.size)) for a in self.kernel.slot.axes}

    def _captured(self, s: Load | Store) -> Load | Store:
        if s.buffer in (*INPUTS, *RESULTS):
            return s
        v = self.given["captured"][int(s.buffer)]
        if v.strides != self.kernel.strides[int(s.buffer)]:
            raise GenerateError(f"{self.kernel.__name__}: the captured tensor {v.buffer} was moved")
        return replace(s, buffer=v.buffer, index=s.index + v.offset)

    # -- text -------------------------------------------------------------------------------------------
    def finish(self, grid: Expr) -> Kernel:
        p, c = self.slot, self.node.config
        p.symbols |= grid.symbols()
        symbols, pointers = tuple(sorted(p.symbols)), list(p.pointers)
        lines = [*self._about(), *known_multiples(c, symbols), *p.lines]
        params = ", ".join([*map(pointer_name, pointers), *(s.name for s in symbols)])
        used = "\n".join(lines)
        constants = ", ".join(f"{k}: tl.constexpr = {v}" for k, v in self.constants.items() if k in used)
        head = f"@triton.jit\ndef {self.node.name}(\n    {params},\n    {constants},\n):\n"
        helpers = helper_text(self.needs)
        source = HEADER + (LIBDEVICE if self.needs.libdevice else "") + "\n\n" + (f"{helpers}\n\n" if helpers else "")
        source += head + "".join(f"    {line}\n" for line in lines)
        sure = (i for i, b in enumerate(pointers) if self.buffers[b].kind == "temp" or b in self.aligned)
        return Kernel(
            self.node.name, "triton", source, tuple((b, self.buffers[b].dtype) for b in pointers), symbols, grid,
            c.num_warps, c.num_stages, c.index, tuple(sure), keep_loops=True,
        )  # fmt: skip

    def _about(self) -> list[str]:
        m, n = self.given["q"].shape[2], self.length["n"]
        dtype = str(self.kernel.dtype).removeprefix("torch.")
        heads = f"heads of {self.head['d']}" + (f" and {self.head['e']}" if self.head["d"] != self.head["e"] else "")
        about = f"{self.batch} x {self.heads} of {m} queries, {n} keys, {heads}, {dtype}; {self.tiling}"
        return [f"# {self.call.origins[0].op}: {about}"]

    def put(self, line: str) -> None:
        self.slot.put(line)

    def indent(self, by: int) -> None:
        self.slot.indent = " " * (len(self.slot.indent) + 4 * by)

    def size(self, e: IntLike) -> str:
        return self.slot.size(expr(e))

    @property
    def wide(self) -> str:
        return ".to(tl.int64)" if self.node.config.index == "int64" else ""

    # -- arguments --------------------------------------------------------------------------------------
    def place(self, role: str, batch: str, head: str, more: Sequence[tuple[int, str]] = ()) -> str:
        """The address of an argument's element: of this batch and head ("": of the first), at (dimension, index) of
        ``more``."""
        v: View = self.given[role]
        parts = [self.slot.pointer(v.buffer)] + ([self.size(v.offset)] if v.offset != 0 else [])
        for d, name in ((0, batch), (1, head), *more):
            if v.shape[d] != 1 and name:
                parts.append(name if v.strides[d] == 1 else f"{name} * {paren(self.size(v.strides[d]))}")
        return " + ".join(parts)

    def read(self, at: str, role: str, dims: Sequence[tuple[int, str, str]], whole: bool = False) -> str:
        """A block of an argument at address ``at``. ``dims``: (dimension, name, how it is indexed) of each side."""
        text, masks = self._side(at, role, dims, whole)
        return f"tl.load({text}{f', mask={masks}, other=0.0' if masks else ''})"

    def write(self, at: str, role: str, dims: Sequence[tuple[int, str, str]], value: str) -> None:
        text, masks = self._side(at, role, dims, False)
        v: View = self.given[role]
        self.put(f"tl.store({text}, {value}.to({TL[v.dtype]}){f', mask={masks}' if masks else ''})")

    def _side(self, at: str, role: str, dims: Sequence[tuple[int, str, str]], whole: bool) -> tuple[str, str]:
        v: View = self.given[role]
        parts, masks = [], []
        for d, name, index in dims:
            parts.append(f"{name}{index}" if v.strides[d] == 1 else f"{name}{index} * {paren(self.size(v.strides[d]))}")
            if name in self.head:
                if _power(self.head[name]) != self.head[name]:
                    masks.append(f"({name}{index} < {self.head[name]})")
            elif not whole:
                masks += self.inside(name, index)
        return f"{at} + ({' + '.join(parts)})", " & ".join(masks)

    def inside(self, name: str, index: str) -> list[str]:
        """The condition that queries or keys are before the end, if some may not be."""
        return [f"({name}{index} < {self.size(self.length[name])})"] if self.ragged[name] else []

    def write_rows(self, role: str, value: str) -> None:
        """A result of the block's queries: a number of each, or (out) a row."""
        index, e = ("[:, None]", [(3, "e", "[None, :]")]) if role == "out" else ("", [])
        self.write(self.place(role, "b", "h"), role, [(2, "m", index), *e], value)

    def dot(self, a: str, b: str, acc: str = "") -> str:
        precision = ""
        if self.kernel.dtype == torch.float32:
            tf32 = self.kernel.precision == "tf32" and (self.target.kind != "hip" or self.target.arch == "gfx942")
            precision = f', input_precision="{"tf32" if tf32 else "ieee"}"'
        return f"tl.dot({a}, {b}{f', {acc}' if acc else ''}{precision})"

    def narrow(self, text: str) -> str:
        """As an operand of a product."""
        return text if self.kernel.dtype == torch.float32 else f"{text}.to({TL[self.kernel.dtype]})"

    # -- parts ------------------------------------------------------------------------------------------
    def programs(self, blocked: str, heads: Expr) -> Expr:
        """One per block of queries (or keys), head and batch. The last blocks first: under a causal mask they have the
        most to do. (dkv: the first ones have.)"""
        count = blocks(self.length[blocked], self.block[blocked])
        head, n = "h" if blocked == "m" else "kv_head", self.size(count)
        self.put(f"pid = tl.program_id(0){self.wide}")
        self.put(f"tiles = {n}")
        self.put("tile = tiles - 1 - pid % tiles" if blocked == "m" else "tile = pid % tiles")
        self.put(f"{head} = pid // tiles % {paren(self.size(heads))}")
        self.put(f"b = pid // (tiles * {paren(self.size(heads))})")
        return count * heads * self.batch

    def queries(self) -> Expr:
        """A program's block of queries, and where its keys and values are. Returns the number of programs."""
        programs = self.programs("m", self.heads)
        kv_head = "h" if self.kernel.groups == 1 else f"(h // {self.kernel.groups})"
        self.span("m", "tile * MBLOCK")
        self.put("d = tl.arange(0, DBLOCK)")
        self.put("e = tl.arange(0, EBLOCK)")
        self.put(f"k_at = {self.place('k', 'b', kv_head)}")
        self.put(f"v_at = {self.place('v', 'b', kv_head)}")
        self.put(f"q = {self.read(self.place('q', 'b', 'h'), 'q', [(2, 'm', '[:, None]'), (3, 'd', '[None, :]')])}")
        return programs

    def span(self, name: str, start: str) -> None:
        """The block's queries or keys, as a row or a column of the scores."""
        self.put(f"{name} = {start} + tl.arange(0, {name.upper()}BLOCK){self.wide}")
        d, index = ("y", "[:, None]") if name == self.rows else ("x", "[None, :]")
        self.put(f"{d} = {name}{index}")
        if self.slot.masks[d]:
            self.put(f"{d}mask = {d} < {self.size(self.length[name])}")

    def over(self, walked: str, results: Sequence[str], step: Step) -> None:
        """``step(masked)`` for every block of the keys (dkv: queries) ``walked`` that the mask leaves anything of."""
        self.slot.outside(results)
        if self.kernel.blocks[0]:
            self._listed(walked, step, "")
            if "full_num" in self.given:
                self._listed(walked, step, "full_")
            return
        if self._end(walked) != "0":
            first, last = self.walk(walked)
            self.put(f"for start in tl.range({first}, {last}, {walked.upper()}BLOCK, {self._stages}):")
            self._body(walked, "start", step, True)
        if self.ragged[walked]:
            self._rest(walked, step)

    def walk(self, walked: str) -> tuple[str, str]:
        """From where to where this program walks along whole blocks."""
        return "0", self._end(walked)

    def rest_is_ours(self) -> str:
        """The condition that this program has the block at the end. Empty: all have."""
        return ""

    def walk_list(self, which: str, each: int) -> tuple[str, str]:
        """From where to where this program walks along a list, ``each`` blocks per entry."""
        return "0", f"{which}count" if each == 1 else f"{which}count * {each}"

    def _end(self, walked: str) -> str:
        """Up to where blocks are whole."""
        length, block = self.length[walked], self.block[walked]
        return self.size(length // block * block if self.ragged[walked] else length)

    def _rest(self, walked: str, step: Step) -> None:
        """The block at the end, if there is one that is not whole."""
        end = self._end(walked)
        conditions = [self.rest_is_ours()]
        if self.length[walked].constant is None:
            conditions.append(f"{end} < {self.size(self.length[walked])}")
        if text := " and ".join(filter(None, conditions)):
            self.put(f"if {text}:")
        self._body(walked, end, step, True, rest=True, inside=bool(text))

    def _listed(self, walked: str, step: Step, which: str) -> None:
        """The blocks of one list. A block of the mask is one of scores, or several."""
        sizes = dict(zip("mn", self.kernel.blocks))
        kept = "n" if walked == "m" else "m"
        each = sizes[walked] // self.block[walked]
        if (length := self.length[walked].constant) is not None:  # a block of the mask may be as large as an integer
            each = max(1, min(each, -(-length // self.block[walked])))
        row = self.mask_row(sizes[kept] // self.block[kept])
        self.put("# blocks that the mask cuts" if not which else "# blocks that it leaves whole")
        self.put(f"{which}count = tl.load({self.place(f'{which}num', 'b', 'h', [(2, paren(row))])})")
        self.put(f"{which}at = {self.place(f'{which}idx', 'b', 'h', [(2, paren(row))])}")
        first, last = self.walk_list(which, each)
        stride = self.given[f"{which}idx"].strides[3]
        following = f"tl.minimum({'i + 1' if each == 1 else f'(i + 1) // {each}'}, {which}count - 1)"
        following += "" if stride == 1 else f" * {paren(self.size(stride))}"
        # An iteration begins with its block's number in a register: were it read there, keys and values could only be
        # requested once it has arrived, and Triton would divide the stages between the two.
        start = (
            "" if first == "0" or stride == 0 else f" + tl.minimum({first} // {each}, tl.maximum({which}count - 1, 0))"
        )
        start += "" if not start or stride == 1 else f" * {paren(self.size(stride))}"
        self.put(f"next = tl.load({which}at{start})")
        self.put(f"for i in tl.range({first}, {last}, {self._stages}):")
        inside = "" if each == 1 else f" + i % {each} * {self.block[walked]}"
        self.put(f"    start = next{self.wide} * {sizes[walked]}{inside}")
        if stride != 0:  # all of the list are one block: read again, it made Triton 3.6's pipeliner fail
            self.put(f"    next = tl.load({which}at + {following})")
        self._body(walked, "start", step, not which)

    def mask_row(self, blocks: int) -> str:
        """Which row (dkv: column) of the mask's blocks, ``blocks`` of ours each, is this program's."""
        return "tile" if blocks == 1 else f"tile // {blocks}"

    @property
    def _stages(self) -> str:
        return f"num_stages={self.tiling.num_stages}"

    def _body(self, walked: str, start: str, step: Step, masked: bool, rest: bool = False, inside: bool = True) -> None:
        ragged, self.ragged[walked] = self.ragged[walked], rest or (self.ragged[walked] and bool(self.kernel.blocks[0]))
        self.slot.masks["x"] = self.ragged[walked]
        self.indent(inside)
        self.slot.again()
        self.span(walked, start)
        step(masked)
        self.indent(-inside)
        self.slot.masks["x"] = self.ragged[walked] = ragged

    # -- scores -----------------------------------------------------------------------------------------
    def modified(self, masked: bool) -> None:
        """``weight``: ``score``, a product of queries and keys, as the softmax gets it, but for FACTOR. (Rows beyond
        the end are not stored; columns count.)"""
        if not self.plain:
            self.put(f"score = score * {self.kernel.scale!r}")
        name = "score"
        if self.kernel.stores("modified"):
            v = self.slot.value("modified")
            shape = "" if v.dims == BLOCK else f"tl.broadcast_to({v.text}, [YBLOCK, XBLOCK])"
            self.put(f"weight = {shape or v.text}")
            name = "weight"
        if where := self.counted(masked):
            self.put(f'weight = tl.where({where}, {name}, float("-inf"))')
        elif name == "score":
            self.put("weight = score")

    def counted(self, masked: bool) -> str:
        """Which scores of a block count: those of the mask, in columns before the end. Empty: all."""
        conditions = [self.slot.value("mask").text] if masked and self.kernel.stores("mask") else []
        conditions += ["xmask"] if self.slot.masks["x"] else []
        return " & ".join(map(paren, conditions))

    def constant(self, name: str, value: float) -> str:
        self.constants[name] = value  # type: ignore[assignment]
        return name


def _power(size: Expr) -> int:
    """The block of a head of this size: a power of two, at least 16."""
    assert size.constant is not None
    return 1 << max(4, (size.constant - 1).bit_length())
