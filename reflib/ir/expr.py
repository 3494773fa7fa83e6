"""Integer index expressions: sizes, strides, offsets, launch grids.

Grammar::

    expr ::= sum of terms            term ::= int * atom * ... * atom
    atom ::= Sym(name)               a size known at run time only (s0 >= lo)
           | Var(name, size)         a loop variable, 0 <= var < size
           | Ref(id, size)           a loop body's value used as an index, 0 <= value < size
           | FloorDiv(expr, expr) | Mod(expr, expr) | Max(expr, expr) | Min(expr, expr)

An :class:`Expr` is kept in one normal form, a polynomial over atoms, so that two indices are
equal exactly when ``==`` says so (for what the rules below can see). A ``Var`` carries its own bound;
``floordiv`` and ``mod`` can therefore simplify without any context: ``(i*8 + j) // 8`` is ``i`` when
``j``'s size is 8. Division rounds down; every divisor is positive.

NB: TorchInductor uses sympy here, which is far more general and takes most of its compile time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, Union, dataclass_transform

Monomial = tuple["Atom", ...]
IntLike = Union["Expr", int]


class Atom:
    """Base of the things an expression is built from. Atoms are ordered by :attr:`key`."""

    key: str

    def __lt__(self, other: Atom) -> bool:
        return self.key < other.key


T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def _atom(cls: T) -> T:
    """Frozen dataclass whose text form ``key`` is computed once; equality and hash go by ``key``."""
    cls = dataclass(frozen=True, eq=False, repr=False)(cls)  # type: ignore[assignment]
    cls.__hash__ = lambda self: hash(self.key)  # type: ignore
    cls.__eq__ = lambda self, other: isinstance(other, Atom) and self.key == other.key  # type: ignore
    cls.__repr__ = lambda self: self.key  # type: ignore
    return cls


@_atom
class Sym(Atom):
    """A run-time size. ``lo`` is the least value it can take, ``hi`` the greatest (None: unknown);
    ``hint`` is the value seen when tracing, used only to choose, never to prove."""

    name: str
    lo: int = 0
    hi: int | None = None
    hint: int | None = None

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.name


@_atom
class Var(Atom):
    """A loop variable, ``0 <= var < size``."""

    name: str
    size: Expr

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.name


@_atom
class Ref(Atom):
    """Statement ``id``'s value (an ``Indirect``), used as an index: ``0 <= value < size``."""

    id: int
    size: Expr

    @property
    def key(self) -> str:  # type: ignore[override]
        return f"%{self.id}"


@_atom
class Call(Atom):
    """``fn`` is one of ``//``, ``%``, ``max``, ``min``."""

    fn: str
    a: Expr
    b: Expr
    key: str = field(init=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.fn in ("max", "min"):
            text = f"{self.fn}({self.a}, {self.b})"
        else:  # in parentheses, as a factor must be: 3*(i//4) is not (3*i)//4
            text = f"({_operand(self.a)}{self.fn}{_operand(self.b)})"
        object.__setattr__(self, "key", text)


def _operand(e: Expr) -> str:
    """``e`` as an operand of // or %: a sum or a product needs parentheses, an atom or a number does not."""
    simple = not e.terms or len(e.terms) == 1 and (not e.terms[0][0] or e.terms[0][1] == 1 and len(e.terms[0][0]) == 1)
    return str(e) if simple and not str(e).startswith("-") else f"({e})"


class Expr:
    """A polynomial with integer coefficients over atoms, in normal form. Immutable."""

    __slots__ = ("_hash", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]):
        self.terms = terms
        self._hash: int | None = None

    # -- building -------------------------------------------------------------------------------
    def __add__(self, other: IntLike) -> Expr:
        other = expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) + c
        return _join_div_mod(_normal(out))

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: IntLike) -> Expr:
        return self + (-expr(other))

    def __rsub__(self, other: IntLike) -> Expr:
        return expr(other) + (-self)

    def __mul__(self, other: IntLike) -> Expr:
        other = expr(other)
        if other.terms == ONE.terms:
            return self
        if self.terms == ONE.terms:
            return other
        if len(other.terms) == 1 and not other.terms[0][0]:  # by a number: the order of terms stays
            k = other.terms[0][1]
            return Expr(tuple((m, c * k) for m, c in self.terms))
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = tuple(sorted(m1 + m2)) if m1 and m2 else m1 or m2
                out[m] = out.get(m, 0) + c1 * c2
        return _join_div_mod(_normal(out))

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Expr:
        return floordiv(self, expr(other))

    def __rfloordiv__(self, other: IntLike) -> Expr:
        return floordiv(expr(other), self)

    def __mod__(self, other: IntLike) -> Expr:
        return mod(self, expr(other))

    # -- looking --------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            c = self.constant
            self._hash = hash(self.terms) if c is None else hash(c)
        return self._hash

    @property
    def constant(self) -> int | None:
        """The value, if this is a plain integer; else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def atoms(self) -> set[Atom]:
        """Every atom, those inside // and % included, together with the sizes of none."""
        out: set[Atom] = set()
        for m, _ in self.terms:
            for a in m:
                out.add(a)
                if isinstance(a, Call):
                    out |= a.a.atoms() | a.b.atoms()
        return out

    def symbols(self) -> set[Sym]:
        return {a for a in self.atoms() if isinstance(a, Sym)}

    def variables(self) -> set[Var]:
        return {a for a in self.atoms() if isinstance(a, Var)}

    def has(self, atom: Atom) -> bool:
        atoms = [a for m, _ in self.terms for a in m]
        return any(a == atom or (isinstance(a, Call) and (a.a.has(atom) or a.b.has(atom))) for a in atoms)

    def coefficient(self, atom: Atom) -> Expr | None:
        """``c`` such that ``self == c*atom + rest`` with no ``atom`` in ``c`` or ``rest``; None if not linear in it."""
        out = ZERO
        for m, c in self.terms:
            n = sum(a == atom for a in m)
            if any(isinstance(a, Call) and (a.a.has(atom) or a.b.has(atom)) for a in m) or n > 1:
                return None
            if n:
                out = out + Expr(((tuple(a for a in m if a != atom), c),))
        return out

    def linear(self) -> tuple[Sym, int, int] | None:
        """(s, c, d) of an expression ``c * s + d`` in one symbol; None for another."""
        symbols = self.symbols()
        sym = next(iter(symbols), None)
        if sym is None or len(symbols) > 1:
            return None
        d = self.subs({sym: 0}).constant
        c = (self - d).subs({sym: 1}).constant if d is not None else None
        return (sym, c, d) if c and d is not None and self == c * expr(sym) + d else None

    def subs(self, env: Mapping[Atom, IntLike]) -> Expr:
        """Replace atoms; the result is simplified again."""
        if not env or not any(a in env or isinstance(a, Call) for m, _ in self.terms for a in m):
            return self
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            if not any(a in env or isinstance(a, Call) for a in m):
                out[m] = out.get(m, 0) + c
                continue
            term = expr(c)
            for a in m:
                term = term * _subs_atom(a, env)
            for new, k in term.terms:
                out[new] = out.get(new, 0) + k
        return _join_div_mod(_normal(out))

    def evaluate(self, env: Mapping[Any, Any]) -> Any:
        """The value, with atoms (or their names) looked up in ``env``: ints or integer tensors."""
        total: Any = 0
        for m, c in self.terms:
            term: Any = c
            for a in m:
                term = term * _evaluate_atom(a, env)
            total = total + term
        return total

    def hint(self, unknown: int = 1024) -> int:
        """A typical value: symbols at their traced value. For choosing only, never for correctness."""
        env = {s: unknown if s.hint is None else s.hint for s in self.symbols()}
        return int(self.evaluate(env))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return format_expr(self)

    def __int__(self) -> int:
        c = self.constant
        if c is None:
            raise TypeError(f"{self} is not known before run time")
        return c

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value; compare with == or ask expr.constant")


def expr(value: IntLike | Atom) -> Expr:
    """An int, an atom or an Expr, as an Expr."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Atom):
        return Expr((((value,), 1),))
    return Expr((((), int(value)),)) if value else ZERO


def _normal(terms: dict[Monomial, int]) -> Expr:
    kept = [(m, c) for m, c in terms.items() if c]
    return Expr(tuple(sorted(kept, key=_term_key) if len(kept) > 1 else kept))


def _term_key(term: tuple[Monomial, int]) -> tuple:
    return tuple(a.key for a in term[0])


ZERO = Expr(())
ONE = Expr((((), 1),))


# -- remembering ------------------------------------------------------------------------------------
Answer = TypeVar("Answer")


class _Remembered(threading.local):
    """Answers inside one question: to prove a bound takes sums, sums are simplified, and that takes proofs of bounds,
    often the same ones again, which without this grows exponentially with the nesting of // and %. It lasts for one
    question only, because atoms are equal by name: another kernel's variable may have another size."""

    depth = 0

    def __init__(self) -> None:
        self.answers: dict[tuple, Any] = {}


_remembered = _Remembered()


def _remember(fn: Callable[..., Answer]) -> Callable[..., Answer]:
    name = fn.__name__

    @wraps(fn)
    def ask(a: Expr, b: Expr | int = 24) -> Answer:
        r = _remembered
        key = (name, a.terms, b.terms if isinstance(b, Expr) else b)
        if r.depth and key in r.answers:
            return r.answers[key]
        r.depth += 1
        try:
            answer = r.answers[key] = fn(a, b)
        finally:
            r.depth -= 1
            if not r.depth:
                r.answers = {}
        return answer

    return ask


def _join_div_mod(e: Expr) -> Expr:
    """``(a//d)*d*c + (a%d)*c`` is ``a*c``: undo a split that nothing needs any more."""
    for m, c in e.terms:
        for a in m:
            if isinstance(a, Call) and a.fn == "%":
                rest = Expr(((tuple(x for x in m if x is not a), c),))
                want = rest * a.b * floordiv(a.a, a.b)
                have = dict(e.terms)
                if want.terms and all(have.get(wm) == wc for wm, wc in want.terms):
                    for wm, _ in want.terms:
                        del have[wm]
                    del have[m]
                    return _normal(have) + rest * a.a
    return e


# -- division ---------------------------------------------------------------------------------------
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
    return _normal(out)


def _divide_polynomial(n: Expr, d: Expr) -> Expr | None:
    """Long division by a sum: only an exact quotient counts."""
    quotient, rest = ZERO, n
    lead_m, lead_c = max(d.terms, key=lambda t: (len(t[0]), _term_key(t))) if d.terms else ((), 0)
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
        if k is None:
            rest[m] = c
            continue
        if c // dc:
            q[k] = q.get(k, 0) + c // dc
        if c % dc:
            rest[m] = c % dc
    return _normal(q), _normal(rest)


def _common_factor(n: Expr, d: Expr) -> Expr:
    """The greatest single term that divides both."""
    g = math.gcd(*(c for _, c in n.terms), *(c for _, c in d.terms))
    monomials = [m for m, _ in n.terms + d.terms]
    common: list[Atom] = []
    for a in monomials[0]:
        if all(a in m for m in monomials[1:]) and a not in common and isinstance(a, Sym):
            common.append(a)
    return Expr(((tuple(sorted(common)), g),))


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


@_remember
def floordiv(n: Expr, d: Expr) -> Expr:
    """``n // d``, rounded down, simplified; ``d`` must be positive."""
    nc, dc = n.constant, d.constant
    if dc is not None and dc <= 0:
        raise ZeroDivisionError(f"index division by {dc}: {n} // {d}")
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
    small = _drop_small(rest, d)
    if small is not None:
        a, _, g = small
        return q + floordiv(a, divide_exact(d, g))  # type: ignore[arg-type]
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        inner = rest.terms[0][0][0]
        if isinstance(inner, Call) and inner.fn == "//":
            return q + floordiv(inner.a, inner.b * d)
    return q + expr(Call("//", rest, d))


@_remember
def mod(n: Expr, d: Expr) -> Expr:
    """``n % d`` with the sign of ``d`` (positive), simplified."""
    nc, dc = n.constant, d.constant
    if dc is not None and dc <= 0:
        raise ZeroDivisionError(f"index modulo {dc}: {n} % {d}")
    if nc is not None and dc is not None:
        return expr(nc % dc)
    _, rest = _split_multiples(n, d)
    if not rest.terms or in_range(rest, d):
        return rest
    small = _drop_small(rest, d)
    if small is not None:
        a, b, g = small
        return g * mod(a, divide_exact(d, g)) + b  # type: ignore[arg-type]
    g = _common_factor(rest, d)
    if g != 1:
        return g * mod(divide_exact(rest, g), divide_exact(d, g))  # type: ignore[arg-type]
    return expr(Call("%", rest, d))


def maximum(a: IntLike, b: IntLike) -> Expr:
    a, b = expr(a), expr(b)
    if nonneg(a - b):
        return a
    return b if nonneg(b - a) else expr(Call("max", a, b))


def minimum(a: IntLike, b: IntLike) -> Expr:
    a, b = expr(a), expr(b)
    if nonneg(b - a):
        return a
    return b if nonneg(a - b) else expr(Call("min", a, b))


def ceildiv(n: IntLike, d: IntLike) -> Expr:
    """``ceil(n / d)``."""
    return (expr(n) + expr(d) - 1) // d


def product(items: Iterable[IntLike]) -> Expr:
    out = ONE
    for item in items:
        out = out * item
    return out


# -- proving ----------------------------------------------------------------------------------------
@_remember
def in_range(e: Expr, size: Expr) -> bool:
    """Can ``0 <= e < size`` be proved?"""
    return nonneg(e) and nonneg(size - 1 - e)


@_remember
def nonneg(e: Expr, steps: int = 24) -> bool:
    """Can ``e >= 0`` be proved? Bounded atoms go, one a step, to the end of their range that makes ``e`` least;
    size symbols are shifted to ``lo + t``; what is left must have no negative coefficient."""
    if e.constant is not None:
        return e.constant >= 0
    if all(c > 0 and all(_atom_nonneg(a) for a in m) for m, c in e.terms):
        return True
    if steps == 0:
        return False
    bounded = _pick_bounded(e)
    if bounded is not None:
        atom, c, upper = bounded
        rest = e - c * expr(atom)
        if nonneg(c, steps - 1):
            return nonneg(rest, steps - 1)
        return nonneg(-c, steps - 1) and nonneg(rest + c * upper, steps - 1)
    choices = [a for m, _ in e.terms for a in m if isinstance(a, Call) and a.fn in ("max", "min")]
    if choices:
        return any(_nonneg_choice(e, a, steps) for a in choices)
    if any(not isinstance(a, Sym) for m, _ in e.terms for a in m):
        return False
    shifted = e.subs({s: expr(Sym(s.name + "'")) + s.lo for s in e.symbols() if s.lo})
    return all(c >= 0 for _, c in shifted.terms)


def _nonneg_choice(e: Expr, a: Call, steps: int) -> bool:
    """max(x, y) is at least x and at least y; min(x, y) at most: enough if it helps."""
    c = e.coefficient(a)
    if c is None or not nonneg(c if a.fn == "max" else -c, steps - 1):
        return False
    rest = e - c * expr(a)
    return nonneg(rest + c * a.a, steps - 1) or nonneg(rest + c * a.b, steps - 1)


def _pick_bounded(e: Expr) -> tuple[Atom, Expr, Expr] | None:
    """A bounded atom in which ``e`` is linear, its coefficient and its upper bound. Loop variables go first: a ``//``
    or ``%`` may contain them."""
    atoms = list(dict.fromkeys(a for m, _ in e.terms for a in m if not isinstance(a, Sym)))
    for a in sorted(atoms, key=lambda a: isinstance(a, Call)):
        c = e.coefficient(a)
        upper = None if c is None else _atom_upper(a)
        if c is not None and upper is not None and not upper.has(a):
            return a, c, upper
    return None


def _atom_nonneg(a: Atom) -> bool:
    if isinstance(a, Sym):
        return a.lo >= 0
    if isinstance(a, Call):
        if a.fn == "%":
            return True
        if a.fn == "max":
            return nonneg(a.a) or nonneg(a.b)
        return nonneg(a.a) and nonneg(a.b)
    return True


def _atom_upper(a: Atom) -> Expr | None:
    """The greatest value of a bounded atom that can be negative in no case; None if unknown."""
    if isinstance(a, (Var, Ref)):
        return a.size - 1
    if isinstance(a, Call) and a.fn == "%":
        return a.b - 1
    if isinstance(a, Call) and a.fn == "//" and nonneg(a.a):
        top = upper_bound(a.a)
        return None if top is None else floordiv(top, a.b)
    return None


def upper_bound(e: Expr) -> Expr | None:
    """An expression without loop variables that ``e`` never exceeds; None if there is none to be seen."""
    for _ in range(64):
        a = next((a for m, _ in e.terms for a in m if isinstance(a, (Var, Ref, Call))), None)
        if a is None:
            return e
        c = e.coefficient(a)
        upper = _atom_upper(a)
        if c is None or upper is None or upper.has(a):
            return None
        rest = e - c * expr(a)
        if nonneg(c):
            e = rest + c * upper
        elif nonneg(-c) and _atom_nonneg(a):
            e = rest
        else:
            return None
    return None


def max_value(e: Expr) -> int | None:
    """The greatest value as an int (symbols at ``hi``), or None when unbounded."""
    top = upper_bound(e)
    if top is None:
        return None
    total = 0
    for m, c in top.terms:
        term = c
        for a in m:
            if not isinstance(a, Sym) or a.hi is None or a.lo < 0:
                return None
            term *= a.hi if c > 0 else a.lo
        total += term
    return total


# -- walking ----------------------------------------------------------------------------------------
def _subs_atom(a: Atom, env: Mapping[Atom, IntLike]) -> Expr:
    if a in env:
        return expr(env[a])
    if isinstance(a, Call):
        x, y = a.a.subs(env), a.b.subs(env)
        return {"//": floordiv, "%": mod, "max": maximum, "min": minimum}[a.fn](x, y)
    return expr(a)


def _evaluate_atom(a: Atom, env: Mapping[Any, Any]) -> Any:
    if a in env:
        return env[a]
    if isinstance(a, Call):
        x, y = a.a.evaluate(env), a.b.evaluate(env)
        if a.fn == "//":
            return x // y
        if a.fn == "%":
            return x % y
        if hasattr(x, "clamp") or hasattr(y, "clamp"):
            import torch

            fn = torch.maximum if a.fn == "max" else torch.minimum
            return fn(torch.as_tensor(x), torch.as_tensor(y))
        return max(x, y) if a.fn == "max" else min(x, y)
    if a.key in env:
        return env[a.key]
    raise KeyError(f"no value for {a!r}")


def format_expr(e: Expr, atom: Callable[[Atom], str] | None = None) -> str:
    """Text in Python's syntax; ``atom`` prints an atom (default: its key). Printers for Triton and
    C++ pass their own ``atom`` and so decide how division is written."""
    atom = atom or (lambda a: a.key)
    if not e.terms:
        return "0"
    # Variables first, the constant last: reads like the formula one would write by hand.
    parts: list[str] = []
    for m, c in sorted(e.terms, key=lambda t: (not t[0],)):
        factors = [atom(a) for a in m]
        if not factors:
            text = str(abs(c))
        else:
            text = "*".join(factors) if abs(c) == 1 else f"{abs(c)}*" + "*".join(factors)
        sign = "-" if c < 0 else "+"
        parts.append((f" {sign} " if parts else ("-" if c < 0 else "")) + text)
    return "".join(parts)
