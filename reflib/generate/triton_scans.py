"""Scans in Triton. They plug into ``generate.SCANS``; ``ir/scans.py`` says what a scan is.

In a loop over a long row, ``carry`` holds the value before the block, one per row: ``[XBLOCK, 1]``. It is combined with
the scan of the block, whose last column is the next carry. Past the row's end there are only values that nothing reads:
no mask is needed.
"""

import torch

from ..ir.loops import Scan
from ..ir.scans import start
from .triton_body import PartPrinter
from .triton_facts import literal
from .triton_ops import TL, nan_helper
from .triton_statements import Value


def combine(printer: PartPrinter, s: Scan, dtype: torch.dtype) -> str:
    """The function that combines an earlier and a later value (and index)."""
    if s.kind in ("max", "min"):
        name = f"{s.kind}imum"
        helper = nan_helper(name, dtype) if dtype.is_floating_point else f"{name}_int"
    else:
        helper = {"sum": "sum_of", "prod": "product_of"}.get(s.kind, f"{s.kind}_so_far")
    return printer.needs.helper(helper)


def _scan_at(printer: PartPrinter, i: int) -> tuple[Scan, list[torch.dtype], list[str]]:
    """The statement, the dtypes of its operands, and the names that carry their values."""
    s = printer.space.body[i]
    assert isinstance(s, Scan)
    names, dtypes = [f"{n}{i}{printer.tag}" for n in ("carry", "at")], [printer.dtype(a) for a in s.args]
    dtypes = dtypes * 2 if s.kind == "logsumexp" else dtypes
    return s, dtypes, names[: len(dtypes)]


def declare(printer: PartPrinter, i: int) -> None:
    """What precedes the row."""
    s, dtypes, carries = _scan_at(printer, i)
    before = literal(start(s.kind, dtypes[0]), dtypes[0])
    first = ("1.0", before) if s.kind == "linear" else (before, "1.0" if s.kind == "logsumexp" else "0")
    for name, value, dtype in zip(carries, first, dtypes):
        printer.put(f"{name} = tl.full([XBLOCK, 1], {value}, {TL[dtype]})")


def scan(printer: PartPrinter, i: int) -> None:
    s, dtypes, carries = _scan_at(printer, i)
    if s.kind == "sort":  # what is beyond the row comes last
        last = str(torch.iinfo(s.dtype).max)
        keys = printer.operand(s.args[0], s.dtype)
        keys = f"tl.where(rmask{printer.tag}, {keys}, {last})" if printer.masks["r"] else keys
        return printer._bind(i, f"tl.sort({keys}, 1)", frozenset("xr"))
    helper = combine(printer, s, dtypes[0])
    blocks = [printer.operand(a, dtype) for a, dtype in zip(s.args, dtypes)]
    if s.kind == "logsumexp":  # pairs (m, n) that stand for m + log(n): no logarithm, and one exponential, each time
        blocks.append(f"tl.full([XBLOCK, RBLOCK], 1.0, {TL[dtypes[0]]})")
    names = [f"so_far{i}{printer.tag}", printer.name(i)][-len(blocks) :]
    operand = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
    printer.put(f"{', '.join(names)} = tl.associative_scan({operand}, 1, {helper})")
    if printer.config.reduction == "looped":
        printer.put(f"{', '.join(names)} = {helper}({', '.join([*carries, *names])})")
        last = f"{printer.arange('r')} == RBLOCK - 1"
        for carry, name, dtype in zip(carries, names, dtypes):
            back = f".to({TL[dtype]})" if dtype.itemsize < 4 else ""
            printer.put(f"{carry} = tl.sum(tl.where({last}, {name}, 0), axis=1, keep_dims=True){back}")
    if s.kind == "logsumexp":
        printer.put(f"{names[-1]} = {names[0]} + {printer.needs.lib('log')}({names[-1]})")
    printer.values[i] = Value(names[-1], frozenset("xr"))


_ARG = '''
def {name}_so_far(a, i, b, j):
    """The {which} value's index; NaN wins, then the later one."""
    take = (b != b) | ((a == a) & (b {sign} a))
    return tl.where(take, b, a), tl.where(take, j, i)
'''
HELPERS = {
    "linear_so_far": '''
def linear_so_far(a, x, b, y):
    """Of z -> a z + x, and then z -> b z + y."""
    return a * b, b * x + y
''',
    "argmax_so_far": _ARG.format(name="argmax", which="greatest", sign=">="),
    "argmin_so_far": _ARG.format(name="argmin", which="least", sign="<="),
    "logsumexp_so_far": '''
def logsumexp_so_far(a, i, b, j):
    """The greater value, NaN first, and how many times its exponential both together are. (Of equal infinities any
    multiple will do.)"""
    apart = tl.abs(a - b)
    less = tl.where(apart < 128.0, tl.exp2(apart * -1.4426950408889634), 0.0)
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), tl.where(a > b, i + j * less, i * less + j)
''',
}
