"""Into how many pieces ``split`` cuts a reduction under ``Options.batch_invariant``: by its length alone.

The order of a sum's additions may depend on how many elements it has, never on how many sums there are: they may be the
results of other rows. So where a row is cut depends on its length. What is reduced over the batch itself (the gradient
of a bias, the statistics of a batch norm) needs no rule of its own: its length is the batch's.

Columns are cut from WHOLE + 1 rows on, into pieces of PIECE rows or more; contiguous rows of SHORT elements or more
into pieces of EACH or more. A softmax of rows in memory keeps one kernel for its maximum, sum and results until a
program is busy with a row for 10 us: that it is one follows from the graph, and so from no number of rows either.

Maxima and sums of integers have no order, and are cut as fits the machine. So does a length known only at run time
stay whole: it might be a short one, and a program that was compiled for that one alone would not cut it.
"""

from ..ir.loops import LoopNest, Reduce

WHOLE, PIECE = 512, 256  # rows of columns
SHORT, EACH = 1 << 14, 1 << 12  # elements of a row
LONG = 1 << 18  # a row for which one program takes 10 us or more
LANES = 128  # of a column: ``schedule.one_order.COLUMN_LANES``
MOST = 512  # pieces, for a second step that is short


def has_order(loops: LoopNest) -> bool:
    """Does a result depend on the order in which its elements are combined?"""
    found = [s for s in loops.body if isinstance(s, Reduce)]
    return any(s.kind in ("sum", "prod", "m2") and (s.dtype.is_floating_point or s.dtype.is_complex) for s in found)


def one_launch(loops: LoopNest) -> bool:
    """Is its order the same in all launches? Rows of up to LANES elements are added up alike, however they lie in
    memory (``schedule.one_order``); the lanes of others are those of the launch's largest part."""
    length = loops.rnumel.constant
    return not loops.reduced or not has_order(loops) or length is not None and length <= LANES


def pieces_by_length(length: int | None, columns: bool, whole: bool, gpu: bool) -> int:
    """``whole``: is it kept whole for as long as one program is not busy with it for too long?"""
    if length is None or length < (LONG if whole or not gpu else WHOLE + 1 if columns else SHORT):
        return 1
    if whole or not gpu:
        return min(MOST, 1 << (length // LONG).bit_length() + 2)
    return min(MOST, 1 << (length // (PIECE if columns else EACH)).bit_length() - 1)
