"""Pointwise kernels in blocks of rows (``schedule.rows``): a pointer per row, to which columns are added.

Added first, the row's part of an address is computed once per row, and columns that are a constant apart become
constants of the instructions: Triton adds offsets in 32 bits, and a constant cannot be taken out of a sum that may
overflow.

Rows that are not aligned are read element by element, whatever Triton knows of x. What it knows makes it give a thread
two or four neighbours of a vector that all rows share, as if these could be read at once: another distribution than the
rows', so that they would be exchanged through shared memory, with a barrier for each. There x is said to be no range.
"""

from collections.abc import Iterable

from ..ir.expr import Expr, Ref
from .triton_body import PartPrinter
from .triton_facts import paren
from .triton_statements import Dims, Value

BLOCK: Dims = frozenset("xy")


def _refs(e: Expr) -> bool:
    return any(isinstance(a, Ref) for a in e.atoms())


class RowsPrinter(PartPrinter):
    """Of a part whose space's mode is ``rows``."""

    def _range(self, d: str, pid: str) -> None:
        super()._range(d, pid)
        shared = any(s.index.variables() == {self.space.x} and not _refs(s.index) for s in self.space.loads)
        if d == "x" and shared and self.masks["x"] and not self._sixteens(self.space.x.size):
            self.put(f"x{self.tag} = tl.max_contiguous(x{self.tag}, [1, 1])  # element by element, as the rows are")

    def _access(self, index: Expr, more: Iterable[Value]) -> tuple[str, list[str], Dims]:
        text, masks, dims = super()._access(index, more)
        if self._dims(index) == BLOCK:
            column = tuple(t for t in index.terms if self._dims(Expr((t,))) == {"x"})
            row = tuple(t for t in index.terms if t not in column)
            text = " + ".join(paren(self.address(Expr(part))) for part in (row, column) if part)
        return text, masks, dims

    def _place(self, buffer: str, offset: str) -> str:
        return self.pointer(buffer) if offset == "0" else f"{self.pointer(buffer)} + {offset}"
