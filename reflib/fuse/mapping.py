"""How the axes of two loop nests correspond, found through one element that both touch.

Both indices are linear: a sum of stride * axis. Sorted by stride they are two ways of writing the same mixed-radix
number, and the common refinement of the two lists of sizes is an iteration space that both can use::

    a: 32 (stride 1)                    pieces: 8 (stride 1), 4 (stride 8)
    b:  8 (stride 1), 4 (stride 8)      a = 8*hi + lo,  b0 = hi, b1 = lo

So reshapes and transposes need no division and no copy. Axes that the index does not contain (reduced or broadcast)
are matched with each other through another shared buffer, or else in their natural order.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ir.expr import ONE, Atom, Expr, IntLike, Ref, Var, divide_exact, expr
from ..ir.loops import Axis
from .result import Reason

Env = dict[Atom, IntLike]
_names = itertools.count()


@dataclass
class Piece:
    """One axis of the common space: part of axis ``a`` of one side and ``b`` of the other, or of one alone."""

    size: Expr
    a: Axis | None
    b: Axis | None


@dataclass
class Mapping:
    """The common space, and each side's variables in it. ``env_a``/``env_b`` are empty where nothing changes."""

    axes: tuple[Axis, ...]
    env_a: Env
    env_b: Env
    only_a: tuple[Axis, ...]
    only_b: tuple[Axis, ...]
    pairs: tuple[tuple[Axis, Axis | None, Axis | None], ...]  # (new axis, from a, from b)


def fresh(size: Expr) -> Var:
    """A loop variable with a name that nothing else has."""
    return Var(f"t{next(_names)}", size)


def strides_of(index: Expr, axes: Sequence[Axis]) -> tuple[list[Expr], Expr] | None:
    """The coefficient of each axis and what is left; None when ``index`` is not linear in the axes, or uses a value."""
    out = []
    for a in axes:
        c = index.coefficient(a.var)
        if c is None or c.variables():
            return None
        out.append(c)
    own = {a.var for a in axes}
    rest = Expr(tuple(t for t in index.terms if own.isdisjoint(t[0])))
    if any(isinstance(x, (Var, Ref)) for x in rest.atoms()):
        return None
    return out, rest


def match(
    a_axes: Sequence[Axis], ia: Expr, b_axes: Sequence[Axis], ib: Expr, others: Iterable[tuple[Expr, Expr]] = ()
) -> Mapping | Reason:
    """The common space in which ``ia`` (over ``a_axes``) and ``ib`` (over ``b_axes``) are one index.

    ``others``: further pairs of indices into one buffer, used to match the axes that ``ia`` and ``ib`` do not contain.
    """
    same = _same_space(a_axes, ia, b_axes, ib)
    if same is not None:
        return same
    sa, sb = strides_of(ia, a_axes), strides_of(ib, b_axes)
    if sa is None or sb is None:
        return Reason("index", "the elements are chosen by an index that is not linear in the loops")
    if sa[1] != sb[1]:
        return Reason("index", f"the elements start at {sa[1]} in one and at {sb[1]} in the other")
    la = [(a, s) for a, s in zip(a_axes, sa[0], strict=True) if s.terms]
    lb = [(b, s) for b, s in zip(b_axes, sb[0], strict=True) if s.terms]
    pieces = _refine(la, lb)
    if pieces is None:
        return Reason("space", f"loops over {_sizes(la)} and {_sizes(lb)} have no common form")
    rest_a = [a for a, s in zip(a_axes, sa[0], strict=True) if not s.terms]
    rest_b = [b for b, s in zip(b_axes, sb[0], strict=True) if not s.terms]
    if rest_a and rest_b:
        more = _match_rest(rest_a, rest_b, others)
        if more is None:
            text = f"{_sizes([(a, ONE) for a in rest_a])} and {_sizes([(b, ONE) for b in rest_b])}"
            return Reason("space", f"rows of {text} have no common form")
        pieces += more
        rest_a = rest_b = []
    pieces += [Piece(a.size, a, None) for a in rest_a] + [Piece(b.size, None, b) for b in rest_b]
    return _mapping(a_axes, b_axes, pieces, tuple(rest_a), tuple(rest_b))


def _same_space(a_axes: Sequence[Axis], ia: Expr, b_axes: Sequence[Axis], ib: Expr) -> Mapping | None:
    """The common case, found quickly: axis by axis the same sizes and the same strides."""
    if len(a_axes) != len(b_axes) or any(a.size != b.size for a, b in zip(a_axes, b_axes, strict=True)):
        return None
    env_b: Env = {b.var: expr(a.var) for a, b in zip(a_axes, b_axes, strict=True)}
    atoms = ia.atoms()
    if ib.subs(env_b) != ia or not all(a.var in atoms for a in a_axes) or any(isinstance(x, Ref) for x in atoms):
        return None
    kinds = ["r" if "r" in (a.kind, b.kind) else "p" for a, b in zip(a_axes, b_axes, strict=True)]
    axes = tuple(Axis(a.var, kind) for a, kind in zip(a_axes, kinds, strict=True))
    return Mapping(axes, {}, env_b, (), (), tuple(zip(axes, a_axes, b_axes, strict=True)))


def _sizes(axes: Sequence[tuple[Axis, Expr]]) -> str:
    return "[" + ", ".join(str(a.size) for a, _ in axes) + "]"


def _refine(la: list[tuple[Axis, Expr]], lb: list[tuple[Axis, Expr]]) -> list[Piece] | None:
    """Common refinement of two lists of (axis, stride), from the least stride up. Pieces of an axis: lowest first."""

    def key(item: tuple[Axis, Expr]) -> int:
        return abs(item[1].hint())

    qa = [(a, a.size, s) for a, s in sorted(la, key=key)]
    qb = [(b, b.size, s) for b, s in sorted(lb, key=key)]
    out = []
    while qa and qb:
        (a, na, s), (b, nb, t) = qa.pop(0), qb.pop(0)
        if s != t:
            return None
        if na == nb:
            out.append(Piece(na, a, b))
        elif (k := divide_exact(nb, na)) is not None:
            out.append(Piece(na, a, b))
            qb.insert(0, (b, k, t * na))
        elif (k := divide_exact(na, nb)) is not None:
            out.append(Piece(nb, a, b))
            qa.insert(0, (a, k, s * nb))
        else:
            return None
    return None if qa or qb else out


def _match_rest(rest_a: list[Axis], rest_b: list[Axis], others: Iterable[tuple[Expr, Expr]]) -> list[Piece] | None:
    for ia, ib in others:
        sa, sb = [ia.coefficient(a.var) for a in rest_a], [ib.coefficient(b.var) for b in rest_b]
        if all(s is not None and s.terms for s in sa + sb):
            pieces = _refine(list(zip(rest_a, sa, strict=True)), list(zip(rest_b, sb, strict=True)))  # type: ignore
            if pieces is not None:
                return pieces
    return _refine(_row_major(rest_a), _row_major(rest_b))


def _row_major(axes: list[Axis]) -> list[tuple[Axis, Expr]]:
    step, out = ONE, []
    for a in reversed(axes):
        out.append((a, step))
        step = step * a.size
    return out


def _mapping(
    a_axes: Sequence[Axis],
    b_axes: Sequence[Axis],
    pieces: list[Piece],
    only_a: tuple[Axis, ...],
    only_b: tuple[Axis, ...],
) -> Mapping:
    """Name the pieces (an axis of ``a`` that was not split keeps its variable) and write both sides in them."""
    news: list[Axis] = []
    for p in pieces:
        kind = "r" if "r" in (p.a and p.a.kind, p.b and p.b.kind) else "p"
        whole = p.a is not None and p.a.size == p.size
        news.append(Axis(p.a.var if whole and p.a else fresh(p.size), kind))
    order: list[Axis] = []
    env_a, env_b = _environment(a_axes, news, [p.a for p in pieces]), _environment(b_axes, news, [p.b for p in pieces])
    lead = [p.b for p in pieces] if only_b else [p.a for p in pieces]
    for axis in b_axes if only_b else a_axes:
        mine = [n for n, side in zip(news, lead, strict=True) if side is not None and side.var == axis.var]
        order += reversed(mine)
    pairs = tuple((n, p.a, p.b) for n, p in zip(news, pieces, strict=True))
    return Mapping(tuple(order), env_a, env_b, only_a, only_b, pairs)


def _environment(axes: Sequence[Axis], news: list[Axis], sides: list[Axis | None]) -> Env:
    """Each axis' variable as a sum of its pieces (which are listed lowest first)."""
    env: Env = {}
    for axis in axes:
        step, total = ONE, expr(0)
        for n, side in zip(news, sides, strict=True):
            if side is not None and side.var == axis.var:
                total = total + step * expr(n.var)
                step = step * n.size
        if total != expr(axis.var):
            env[axis.var] = total
    return env
