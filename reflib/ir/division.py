"""Division of index expressions: ``//`` and ``%`` with every simplification, exact division, max and min."""

import math

from .bounds import in_range, nonneg, remembered
from .expr import ONE, ZERO, BinOp, Expr, IntLike, Monomial, Sym, expr, normal, term_key


def divide_exact(n: IntLike, d: IntLike) -> Expr | None:
    """``n / d`` if it is exact: term by term for a single term ``d``, by long division for a sum; else None."""
    n, d = expr(n), expr(d)
    if n == d:
        return ONE
    if len(d.terms) != 1:
        return _divide_polynomial(n, d)
    (dm, dc) = d.terms[0]
    out: dict[Monomial, int] = {}
    for m, c in n.terms:
        q = _monomial_div(m, dm)
        if q is None or c % dc:
            return None
        out[q] = out.get(q, 0) + c // dc
    return normal(out)


def _divide_polynomial(n: Expr, d: Expr) -> Expr | None:
    """Long division by a sum: only an exact quotient counts."""
    quotient, rest = ZERO, n
    lead_m, lead_c = max(d.terms, key=lambda t: (len(t[0]), term_key(t))) if d.terms else ((), 0)
    for _ in range(len(n.terms) + 1):
        if not rest.terms:
            return quotient
        for m, c in sorted(rest.terms, key=lambda t: -len(t[0])):
            q = _monomial_div(m, lead_m)
            if q is not None and lead_c and c % lead_c == 0:
                step = Expr(((q, c // lead_c),))
                break
        else:
            return None
        quotient, rest = quotient + step, rest - step * d
    return None


def _monomial_div(m: Monomial, d: Monomial) -> Monomial | None:
    rest = list(m)
    for a in d:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest)


def _split_multiples(n: Expr, d: Expr) -> tuple[Expr, Expr]:
    """``n == q*d + rest``, ``q`` taken from the terms that ``d`` divides."""
    if len(d.terms) != 1:
        whole = divide_exact(n, d)
        return (ZERO, n) if whole is None else (whole, ZERO)
    dm, dc = d.terms[0]
    q: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for m, c in n.terms:
        k = _monomial_div(m, dm)
        if k is not None:
            q[k] = q.get(k, 0) + c // dc
        rest[m] = c if k is None else c % dc
    if any(c < 0 and rest[m] > 0 for m, c in n.terms):  # 16*i + 15 - j, backwards through 16
        backwards = normal({m: c for m, c in n.terms if rest[m]})
        if in_range(backwards, d):
            return _split_multiples(n - backwards, d)[0], backwards
    return normal(q), normal(rest)


def _common_factor(n: Expr, d: Expr) -> Expr:
    """The greatest single term that divides both."""
    terms = n.terms + d.terms
    common = {a for a in terms[0][0] if isinstance(a, Sym) and all(a in m for m, _ in terms)}
    return Expr(((tuple(sorted(common)), math.gcd(*(c for _, c in terms))),))


def _drop_small(n: Expr, d: Expr) -> tuple[Expr, Expr, Expr] | None:
    """``n == g*a + b`` with ``d == g*k`` and ``0 <= b < g``: returns (a, b, g), so that
    ``n // d == a // k`` and ``n % d == g*(a % k) + b``."""
    for m, c in n.terms:
        if not m:
            continue
        g = _common_factor(Expr(((m, c),)), d)
        if g == 1:
            continue
        a, b = _split_multiples(n, g)
        if b.terms and a.terms and in_range(b, g):
            return a, b, g
    return None


@remembered(lambda n, d: expr(BinOp("//", n, d)))
def floordiv(n: Expr, d: Expr) -> Expr:
    """``n // d``, rounded down, simplified; ``d`` must be positive."""
    nc, dc = n.constant, d.constant
    if nc is not None and dc is not None:
        return expr(nc // dc)
    if dc == 1:
        return n
    q, rest = _split_multiples(n, d)
    if not rest.terms or in_range(rest, d):
        return q
    g = _common_factor(rest, d)
    if g != 1:
        return q + floordiv(divide_exact(rest, g), divide_exact(d, g))  # type: ignore[arg-type]
    if (small := _drop_small(rest, d)) is not None:
        a, _, g = small
        return q + floordiv(a, divide_exact(d, g))  # type: ignore[arg-type]
    inner = rest.atom
    if isinstance(inner, BinOp) and inner.fn == "//":
        return q + floordiv(inner.a, inner.b * d)
    return q + expr(BinOp("//", rest, d))


@remembered(lambda n, d: expr(BinOp("%", n, d)))
def mod(n: Expr, d: Expr) -> Expr:
    """``n % d`` with the sign of ``d`` (positive), simplified."""
    nc, dc = n.constant, d.constant
    if nc is not None and dc is not None:
        return expr(nc % dc)
    _, rest = _split_multiples(n, d)
    if not rest.terms or in_range(rest, d):
        return rest
    inner = rest.atom
    if isinstance(inner, BinOp) and inner.fn == "%" and divide_exact(inner.b, d) is not None:
        return mod(inner.a, d)
    if (small := _drop_small(rest, d)) is not None:
        a, b, g = small
        return g * mod(a, divide_exact(d, g)) + b  # type: ignore[arg-type]
    g = _common_factor(rest, d)
    if g != 1:
        return g * mod(divide_exact(rest, g), divide_exact(d, g))  # type: ignore[arg-type]
    return expr(BinOp("%", rest, d))


def maximum(a: IntLike, b: IntLike) -> Expr:
    a, b = expr(a), expr(b)
    if nonneg(a - b):
        return a
    return b if nonneg(b - a) else expr(BinOp("max", a, b))


def minimum(a: IntLike, b: IntLike) -> Expr:
    a, b = expr(a), expr(b)
    if nonneg(b - a):
        return a
    return b if nonneg(a - b) else expr(BinOp("min", a, b))


def ceildiv(n: IntLike, d: IntLike) -> Expr:
    """``ceil(n / d)``."""
    return (expr(n) + expr(d) - 1) // d


def join_div_mod(e: Expr) -> Expr:
    """``(a//d)*d*c + (b%d)*c``, where ``a%d`` is ``b%d``, is ``a*c``, and with ``(a//d)%n`` for ``a//d`` it is
    ``a%(d*n)*c``: a split undone that is not needed any more."""
    divided = [(m, c, a) for m, c in e.terms for a in m if isinstance(a, BinOp)] if len(e.terms) > 1 else []
    for m, c, a in divided:
        if (found := _split(e, a)) is not None:
            quotient, d, whole = found
            rest = Expr(((tuple(x for x in m if x is not a), c),))
            digits = [b for _, _, b in divided if b.fn == "%" and b.a == quotient]
            have = dict(e.terms)
            for upper, n in ((quotient, None), *((expr(b), b.b) for b in digits)):
                want = rest * d * upper
                if want.terms and all(have.get(wm) == wc for wm, wc in want.terms):
                    kept = normal({t: k for t, k in e.terms if t != m and t not in dict(want.terms)})
                    return kept + rest * (whole if n is None else mod(whole, d * n))
    return e


def _split(e: Expr, a: BinOp) -> tuple[Expr, Expr, Expr] | None:
    """(q, d, n) with ``n == q*d + a``, if q may be in ``e``: of ``n % d``, and of ``n % (d*k) // d``. Nothing is proved
    for it: what simplifies the quotient has simplified the remainder, but for an ``n`` that is a quotient itself."""
    inner = a.a.atom
    if a.fn == "//" and isinstance(inner, BinOp) and inner.fn == "%":
        k = divide_exact(inner.b, a.b)
        return None if k is None else (floordiv(inner.a, inner.b), k, floordiv(inner.a, a.b))
    if a.fn != "%":
        return None
    if isinstance(inner, BinOp) and inner.fn == "//":
        return floordiv(inner.a, inner.b * a.b), a.b, a.a
    around = (x for m, _ in e.terms for y in m if isinstance(y, BinOp) for x in (y, y.a.atom))
    atoms = (x for x in around if isinstance(x, BinOp) and x.fn == "//" and x.b == a.b)
    return next(((expr(x), x.b, x.a) for x in atoms if x.a == a.a or mod(x.a, x.b) == expr(a)), None)
