"""Fused attention for few queries in Triton: which programs there are, and what part of the keys each has.

A program has a block of rows: queries of ``packed`` heads that share their keys, head by head, so that these are read
once for all of them, and products have rows enough for tensor cores. Its ``part`` is one of ``splits`` about equal
ranges of the blocks of keys; of those in a block mask's lists, if there is one: the list of blocks that are cut, and
then that of whole ones, count as one. With several parts a program stores its sums as they are (``lower.flex_decode``
combines them); with one part, results.

NB: TorchInductor's kernel gives each program a range of the keys instead, whatever the mask leaves of it.
"""

from ..ir.expr import Atom, Expr, IntLike, Var, expr
from .flex_printer import FlexPrinter
from .triton_facts import blocks, paren


class DecodePrinter(FlexPrinter):
    """``group``: the program's number among those of a batch, by heads. ``row``: of its rows, ``h`` and ``m`` are the
    head and the query."""

    @property
    def each(self) -> Expr:
        """Queries of one head."""
        return self.given["q"].shape[2]

    def _coordinates(self) -> dict[Atom, IntLike]:
        found = super()._coordinates()
        packed = self.kernel.packed
        if packed > 1:
            y, group = expr(Var("y", self.length["m"])), expr(Var("group", self.heads // packed))
            here = {"h": group * packed + y // self.each, "m": y % self.each}
            found |= {a.var: here[a.var.name] for a in self.kernel.slot.axes if a.var.name in here}
        return found

    def queries(self) -> Expr:
        packed, group = self.kernel.packed, "h" if self.kernel.packed == 1 else "group"
        programs = self._programs(group)
        self.put("y = row[:, None]")
        if self.ragged["m"]:
            self.put(f"ymask = y < {self.size(self.length['m'])}")
        if packed == 1:
            self.put("m = row")
        elif self.each == 1:
            self.put(f"h = group * {packed} + row")
        else:
            self.put(f"h = group * {packed} + row // {self.size(self.each)}")
            self.put(f"m = row % {self.size(self.each)}")
        self.put("d = tl.arange(0, DBLOCK)")
        self.put("e = tl.arange(0, EBLOCK)")
        shared = self.kernel.groups // packed
        kv_head = group if shared == 1 else f"({group} // {shared})"
        self.put(f"k_at = {self.place('k', 'b', kv_head)}")
        self.put(f"v_at = {self.place('v', 'b', kv_head)}")
        dims = [*self._rows("[:, None]", 2), (3, "d", "[None, :]")]
        self.put(f"q = {self.read(self.place('q', 'b', self._head), 'q', dims)}")
        return programs

    def _programs(self, group: str) -> Expr:
        """Which one this is: of the blocks of rows, parts, groups and batches; the first ones are neighbours. Returns
        how many there are."""
        rows, below = f"tl.arange(0, MBLOCK){self.wide}", expr(1)
        self.put(f"pid = tl.program_id(0){self.wide}")
        names = ("tile", "part", group)
        sizes = blocks(self.length["m"], self.block["m"]), expr(self.kernel.splits), self.heads // self.kernel.packed
        for name, size in zip(names, sizes):
            if size != 1 or name == group:
                over = "" if below == 1 else f" // {paren(self.size(below))}"
                self.put(f"{name} = pid{over} % {paren(self.size(size))}")
            below = below * size
        self.put(f"b = pid // {paren(self.size(below))}")
        self.put(f"row = {rows}" if sizes[0] == 1 else f"row = tile * MBLOCK + {rows}")
        return below * self.batch

    @property
    def _head(self) -> str:
        """The head of all rows, if it is one."""
        return "h" if self.kernel.packed == 1 else ""

    def _rows(self, index: str, queries: int) -> list[tuple[int, str, str]]:
        """The rows of an argument of which ``queries`` is the dimension of queries."""
        if self.kernel.packed == 1:
            return [(queries, "m", index)]
        return [(1, "h", index), *([(queries, "m", index)] if self.each != 1 else [])]

    def inside(self, name: str, index: str) -> list[str]:
        if name == "n":
            return super().inside(name, index)
        once = name == "h" or self.kernel.packed == 1  # (of the two, one has the condition of rows)
        return [f"(row{index} < {self.size(self.length['m'])})"] if once and self.ragged["m"] else []

    def write_rows(self, role: str, value: str) -> None:
        parts = "acc" in self.given
        queries = 3 if parts else 2
        wide = role in ("out", "acc")
        e = [(queries + 1, "e", "[None, :]")] if wide else []
        at = self.place(role, "b", self._head, [(2, "part")] if parts else [])
        self.write(at, role, [*self._rows("[:, None]" if wide else "", queries), *e], value)

    # -- keys -------------------------------------------------------------------------------------------
    def walk(self, walked: str) -> tuple[str, str]:
        block = self.block[walked]
        return self._ours(self.size(self.length[walked] // block), block)

    def _ours(self, count: str, step: int = 1) -> tuple[str, str]:
        """Where this program's range of ``count`` blocks begins and ends, in units of which ``step`` are a block."""
        splits = self.kernel.splits
        if splits == 1:
            return "0", count if step == 1 else f"{paren(count)} * {step}"
        times = "" if step == 1 else f" * {step}"
        self.put(f"first = {paren(count)} * part // {splits}{times}")
        self.put(f"last = {paren(count)} * (part + 1) // {splits}{times}")
        return "first", "last"

    def rest_is_ours(self) -> str:
        splits = self.kernel.splits
        return "" if splits == 1 else f"part == {splits - 1}"

    def mask_row(self, blocks: int) -> str:
        return "0"  # the queries are in one block of the mask

    def walk_list(self, which: str, each: int) -> tuple[str, str]:
        if self.kernel.splits == 1:
            return super().walk_list(which, each)
        if which:
            return "tl.maximum(first - cut, 0)", "tl.maximum(last - cut, 0)"
        more = "full_num" in self.given
        self.put(f"cut = count * {each}")
        if more:
            self.put(f"whole = tl.load({self.place('full_num', 'b', 'h', [(2, '0')])})")
        self._ours(f"cut + whole * {each}" if more else "cut")
        return "tl.minimum(first, cut)", "tl.minimum(last, cut)"
