"""Integer index expressions: sizes, strides, offsets, launch grids.

Grammar::

    expr ::= sum of terms            term ::= int * atom * ... * atom
    atom ::= Sym(name)               a size known at run time only (s0 >= lo)
           | Var(name, size)         a loop variable, 0 <= var < size
           | Ref(id, size)           a loop body's value used as an index, 0 <= value < size
           | FloorDiv(expr, expr) | Mod(expr, expr) | Max(expr, expr) | Min(expr, expr)

An :class:`Expr` is kept in one normal form, a polynomial over atoms, so that two indices are
equal exactly when ``==`` says so (as far as the rules of ``division`` go). A ``Var`` carries its own bound;
``floordiv`` and ``mod`` can therefore simplify without any context: ``(i*8 + j) // 8`` is ``i`` when
``j``'s size is 8. Division rounds down; every divisor is positive.

Three files that need one another: the polynomial (here), // and % (``division``), proofs about ranges (``bounds``).
All names are imported from here.

NB: TorchInductor uses sympy here, which is far more general and takes most of its compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union, dataclass_transform

Monomial = tuple["Atom", ...]
IntLike = Union["Expr", int]


class Atom:
    """Base of what an expression is built from. Atoms are ordered by :attr:`key`."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.name)


@_atom
class Var(Atom):
    """A loop variable, ``0 <= var < size``."""

    name: str
    size: Expr

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.name)


@_atom
class Ref(Atom):
    """Statement ``id``'s value (an ``Indirect``), used as an index: ``0 <= value < size``."""

    id: int
    size: Expr

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"%{self.id}")


@_atom
class BinOp(Atom):
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
    simple = e.atom is not None or e.constant is not None and e.constant >= 0
    return str(e) if simple else f"({e})"


class Expr:
    """A polynomial with integer coefficients over atoms, in normal form. Immutable."""

    __slots__ = ("_atoms", "_hash", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]):
        self.terms = terms
        self._hash: int | None = None
        self._atoms: frozenset[Atom] | None = None

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
        return join_div_mod(normal(out))

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
        return join_div_mod(normal(out))

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Expr:
        return floordiv(self, expr(other))

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

    @property
    def atom(self) -> Atom | None:
        """The atom, if this is one and nothing else; else None."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def atoms(self) -> frozenset[Atom]:
        """Every atom, those inside // and % included, together with the sizes of none."""
        if self._atoms is None:
            found = {a for m, _ in self.terms for a in m}
            inside = (e.atoms() for a in found if isinstance(a, BinOp) for e in (a.a, a.b))
            self._atoms = frozenset(found).union(*inside)
        return self._atoms

    def symbols(self) -> set[Sym]:
        return {a for a in self.atoms() if isinstance(a, Sym)}

    def variables(self) -> set[Var]:
        return {a for a in self.atoms() if isinstance(a, Var)}

    def has(self, atom: Atom) -> bool:
        return atom in self.atoms()

    def coefficient(self, atom: Atom) -> Expr | None:
        """``c`` such that ``self == c*atom + rest`` with no ``atom`` in ``c`` or ``rest``; None if not linear in it."""
        out = ZERO
        if not self.has(atom):
            return out
        for m, c in self.terms:
            n = m.count(atom)
            if any(isinstance(a, BinOp) and (a.a.has(atom) or a.b.has(atom)) for a in m) or n > 1:
                return None
            if n:
                out = out + Expr(((tuple(a for a in m if a != atom), c),))
        return out

    def linear(self) -> tuple[Sym, int, int] | None:
        """(s, c, d) of an expression ``c * s + d`` in one symbol; None for another."""
        sym = next(iter(self.symbols()), None)
        if sym is None or self.atoms() != {sym}:
            return None  # (a quotient may not be defined at 0)
        d = self.subs({sym: 0}).constant
        c = (self - d).subs({sym: 1}).constant if d is not None else None
        return (sym, c, d) if c and d is not None and self == c * expr(sym) + d else None

    def subs(self, env: Mapping[Atom, IntLike]) -> Expr:
        """Replace atoms; the result is simplified again."""
        if not env or env.keys().isdisjoint(self.atoms()):
            return self
        return self._subs(env, {})

    def _subs(self, env: Mapping[Atom, IntLike], done: dict[Atom, Expr]) -> Expr:
        """``done``: atoms replaced already; // and % of one expression often contain the same one."""
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            if not any(a in env or isinstance(a, BinOp) for a in m):
                out[m] = out.get(m, 0) + c
                continue
            term = expr(c)
            for a in m:
                if a not in done:
                    done[a] = _subs_atom(a, env, done)
                term = term * done[a]
            for new, k in term.terms:
                out[new] = out.get(new, 0) + k
        return join_div_mod(normal(out))

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
        if self.constant is not None:
            return self.constant
        env = {s: unknown if s.hint is None else s.hint for s in self.symbols()}
        return int(self.evaluate(env))

    def __repr__(self) -> str:
        return format_expr(self)

    def __int__(self) -> int:
        c = self.constant
        if c is None:
            raise TypeError(f"{self} is not known before run time")
        return c

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value; compare with == or read expr.constant")


def expr(value: IntLike | Atom) -> Expr:
    """An int, an atom or an Expr, as an Expr."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Atom):
        return Expr((((value,), 1),))
    return Expr((((), int(value)),)) if value else ZERO


def normal(terms: dict[Monomial, int]) -> Expr:
    kept = [(m, c) for m, c in terms.items() if c]
    return Expr(tuple(sorted(kept, key=term_key) if len(kept) > 1 else kept))


def term_key(term: tuple[Monomial, int]) -> tuple:
    return tuple(a.key for a in term[0])


ZERO = Expr(())
ONE = Expr((((), 1),))


def product(items: Iterable[IntLike]) -> Expr:
    out = ONE
    for item in items:
        out = out * item
    return out


# -- walking ----------------------------------------------------------------------------------------
def _subs_atom(a: Atom, env: Mapping[Atom, IntLike], done: dict[Atom, Expr]) -> Expr:
    if a in env:
        return expr(env[a])
    if isinstance(a, BinOp):
        x, y = a.a._subs(env, done), a.b._subs(env, done)
        return {"//": floordiv, "%": mod, "max": maximum, "min": minimum}[a.fn](x, y)
    return expr(a)


def _evaluate_atom(a: Atom, env: Mapping[Any, Any]) -> Any:
    if a in env:
        return env[a]
    if isinstance(a, BinOp):
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
    """Text in Python's syntax; ``atom`` prints an atom (default: its key). The Triton printer passes one of its own,
    which also writes division."""
    atom = atom or (lambda a: a.key)
    if not e.terms:
        return "0"
    # Variables first, the constant last, as in a formula written by hand.
    parts: list[str] = []
    for m, c in sorted(e.terms, key=lambda t: (not t[0],)):
        number = [str(abs(c))] if abs(c) != 1 or not m else []
        text = "*".join([*number, *map(atom, m)])
        sign = "-" if c < 0 else "+"
        parts.append((f" {sign} " if parts else ("-" if c < 0 else "")) + text)
    return "".join(parts)


# Last, since both are written with what is above.
from .bounds import in_range, max_value, nonneg, upper_bound  # noqa: E402
from .division import ceildiv, divide_exact, floordiv, join_div_mod, maximum, minimum, mod  # noqa: E402

__all__ = [
    "ONE", "ZERO", "Atom", "BinOp", "Expr", "IntLike", "Ref", "Sym", "Var", "ceildiv", "divide_exact", "expr",
    "floordiv", "format_expr", "in_range", "max_value", "maximum", "minimum", "mod", "nonneg", "product", "upper_bound",
]  # fmt: skip
