"""Facts that code assumes: which of them cannot be proved and belong into a variant's predicate."""

from .expr import Expr, max_value, nonneg
from .program import Assume

INT32_LIMIT = 2**31 - 2**17  # a program's block may reach past the end, and that must not overflow either


def limit_facts(sizes: list[Expr]) -> tuple[Assume, ...] | None:
    """The facts by which ``sizes`` fit 32-bit indices, without those that are proved; None when one does not fit."""
    open_: list[Expr] = []
    for e in dict.fromkeys(sizes):
        top = max_value(e)
        if (top is None and e.hint() > INT32_LIMIT) or (top is not None and top > INT32_LIMIT):
            return None
        if top is None:
            open_.append(e)
    needed = [e for i, e in enumerate(open_) if not _implied(e, open_, i)]
    return tuple(Assume("at_most", e, INT32_LIMIT) for e in needed)


def _implied(e: Expr, others: list[Expr], at: int) -> bool:
    """Is another fact at least as strong? (Of two equal ones the first is kept.)"""
    return any(j != at and nonneg(o - e) and (j < at or not nonneg(e - o)) for j, o in enumerate(others))
