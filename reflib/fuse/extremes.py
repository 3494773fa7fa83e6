"""The greatest value of an increasing function is its value at the greatest argument: a pass over the row less.

Sampling keeps the words that are not much less likely than the likeliest::

    p = softmax(x);  keep = p >= 0.05 * p.amax(-1)

``p`` is ``exp(x - max x) / sum``, which grows with x, as computed too: the same rounded operations in the same order.
So ``amax p`` is ``exp(max x - max x) / sum``, once per row, where the maximum as written is another loop over it.

Increasing are: a rounding, an exponential, a difference to (or sum with) the row's own maximum of the same argument or
a number, a product with or quotient by a number over 0, or by the sum of such powers, which is 1 or more. That is so
where there is no number, too: NaN is the maximum of any row that has it, and these functions keep it.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite, nan

from ..ir.loops import BodyBuilder, Const, LoopNest, Op, Reduce, Stmt, map_stmt, stmt_args
from ..ir.transforms import eliminate_dead, phases
from ..options import Options
from ..target import Target
from .result import Fused

_ALONE = ("exp", "to_f16", "to_bf16")


def extremes(fused: Fused, options: Options, target: Target) -> Fused:
    """The same kernels, without maxima that follow from another one of the same rows."""
    return fused.mapped(without_followers)


def without_followers(loops: LoopNest) -> LoopNest:
    """``loops``, each such maximum computed from the one that it follows from."""
    if sum(_is_max(s) for s in loops.body) < 2:
        return loops
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        found = _followed(loops.body, i) if _is_max(s) else None
        if found is None:
            ids[i] = b.add(map_stmt(s, ids))
            continue
        top, steps = found
        at = ids | {loops.body[top].args[0]: ids[top]}  # type: ignore[union-attr]
        for step in steps:
            at[step] = b.add(map_stmt(loops.body[step], at))
        ids[i] = at[steps[-1]] if steps else ids[top]
    return replace(loops, body=eliminate_dead(tuple(b.body)))


def _is_max(s: Stmt) -> bool:
    return isinstance(s, Reduce) and s.kind == "max" and s.dtype.is_floating_point


def _followed(body: Sequence[Stmt], i: int) -> tuple[int, list[int]] | None:
    """(another maximum, of an earlier pass; the statements that lead from its argument to that of maximum ``i``). In
    one pass both cost little, and sums of powers may share it with either."""
    steps, level = list[int](), phases(body)
    at: int | None = body[i].args[0]  # type: ignore[union-attr]
    while at is not None:
        for top in range(i):
            if _is_max(body[top]) and stmt_args(body[top]) == (at,) and level[top] < level[i]:
                return top, steps[::-1]
        steps.append(at)
        at = _argument(body, at)
    return None


def _argument(body: Sequence[Stmt], i: int) -> int | None:
    """The operand with which statement ``i`` increases, all others being the same along the row."""
    s = body[i]
    if not isinstance(s, Op) or not s.dtype.is_floating_point:
        return None
    a, *rest = s.args
    if s.op in _ALONE or (s.op == "cast" and body[a].dtype.is_floating_point):  # type: ignore[union-attr]
        return a
    if s.op == "sub":
        own = body[rest[0]] == Reduce("max", (a,), s.dtype)
        return a if own or isfinite(_number(body[rest[0]])) else None
    if s.op == "div":
        return a if _sums_powers(body, rest[0]) or 0 < _number(body[rest[0]]) < inf else None
    for x, c in ((a, *rest), (*rest, a)) if s.op in ("add", "mul") else ():
        if isfinite(_number(body[c])) and (s.op == "add" or _number(body[c]) > 0):
            return x
    return None


def _sums_powers(body: Sequence[Stmt], i: int) -> bool:
    """Is it a sum of ``exp(v - max v)``?"""
    s = body[i]
    power = body[s.args[0]] if isinstance(s, Reduce) and s.kind == "sum" else None
    apart = body[power.args[0]] if isinstance(power, Op) and power.op == "exp" else None
    if not isinstance(apart, Op) or apart.op != "sub":
        return False
    return body[apart.args[1]] == Reduce("max", apart.args[:1], apart.dtype)


def _number(s: Stmt) -> float:
    return float(s.value) if isinstance(s, Const) else nan
