"""Cheaper forms for parts that store only half precision.

Such a part cannot show a last-bit difference in float32, so the number of instructions counts: at 4 TB/s an H200 has
time for about 28 of them per bf16 element that is read and written, and the CUDA library's ``erf`` alone takes 28. The
forms here have no branch, one or two of the hardware's approximations (``tl.exp2``, a reciprocal), and a relative error
of a few 1e-6 where half precision rounds by 2e-4; in the tails, too, as far as float16 reaches (in bfloat16, a normal
distribution below 1e-9 has an absolute error below 1e-12):

* ``0.5 * (1 + erf(x / sqrt 2))`` of GELU, as written, cancels for negative x. erfc does not: it is 2 to the power of a
  polynomial, and the normal distribution is half of it on one side, one minus that on the other.
* ``1 + tanh(u)`` is ``2 / (1 + exp(-2u))``.
* A power is 2 to the power of a logarithm, where the base is not negative or the exponent a number that is no integer.
  Not of what is added up in full precision: there the hardware's logarithm would show.
* A square root is the hardware's approximation, also of what it would take for 0.
* ``a / (1 + exp(b))``, and ``a / sum(exp(b))`` over a row, need no care for divisors that are tiny.

``cheap_forms`` finds them in a body; ``erf`` and ``tanh`` alone have helpers as well. Powers under 2^-126 become 0.

Two forms are for every part, since they lose nothing. Division by a power of two is a multiplication. And where a body
has several exact divisions and square roots, each the call of a function for what is out of range: not that the calls
are made, but the elements of a thread are computed one after another because of them. Those here correct the hardware's
approximation by what it leaves, as the hardware's own fast path does, and keep the approximation where that is NaN.

A third, in rows of which bytes are stored or that are divided twice (by several statements, or in several passes over
the row): where a whole row has one divisor, its reciprocal is computed per row, and each quotient corrected by what it
leaves is the exact one (P. Markstein, IBM J. Res. Dev. 34, 1990): 6 instructions without a branch, none of them one of
the hardware's approximations, of which a multiprocessor starts 16 per cycle, and a cast to int8 is another. Stored in
half precision, in a loop over a long row, the quotient is not corrected.
"""

import math
from collections.abc import Sequence

import torch

from ..ir.loops import Const, Indirect, Op, Reduce, Stmt, Store, stmt_args
from ..ir.program import Config
from ..ir.transforms import needed, phases, varying
from ..schedule.axes import Space
from .triton_facts import Form

_STRAIGHT = {"div": "divide", "sqrt": "root", "sigmoid": "logistic"}
SEVERAL = 3  # exact divisions and roots of an element
MANY = 4  # elements of a row that a thread has


def cheap_forms(space: Space, exact: set[int], config: Config) -> tuple[dict[int, Form], set[int]]:
    """The forms by statement, of those in ``exact`` exact ones; and the statements whose values nothing uses."""
    finder, forms, share = _Finder(space), {}, _share(space, config)
    each = varying(space.body, space.reduced_vars)  # not once per row
    slow = {i: f for i in exact if (space.r is None or each[i]) and (f := finder.straight(i)) is not None}
    slow |= {i: f for i in slow if (f := finder.by_row(i, each)) is not None}  # to the bit what it is once per row
    stores = {i for i, s in enumerate(space.body) if isinstance(s, Store)}
    looped = share >= MANY and config.reduction == "looped"  # in registers, rows wait for memory
    rows = {i: f for i in exact if share >= MANY and (f := finder.by_row(i, each)) is not None}
    narrow = any(s.dtype.itemsize == 1 for s in space.body if isinstance(s, Op) and s.dtype != torch.bool)
    if sum(_passes(space, config, each, i) for i in rows) < 2 and not narrow:
        rows = {}  # float32 takes memory as long as one division
    if not exact.isdisjoint(stores):  # a kernel for eager's bits: all are exact
        slow, rows = {}, {}
    elif len(slow) < SEVERAL:
        slow = {}
    summed = _summed(space.body, exact)
    for i, s in enumerate(space.body):
        rough = i not in exact and not (i in summed and getattr(s, "op", "") == "pow")
        cheap = finder.form(i) or (finder.by_row(i, each, "_half") if looped else None) if rough else None
        if (f := finder.halved(i) or rows.get(i) or slow.get(i) or cheap) is not None:
            forms[i] = f
    live: set[int] = set()
    # An index into what holds one number everywhere is in no address; it may still have to be checked.
    stack = [i for i, s in enumerate(space.body) if isinstance(s, (Store, Reduce)) or getattr(s, "checked", False)]
    while stack:
        i = stack.pop()
        if i not in live:
            live.add(i)
            stack += forms[i].args if i in forms else stmt_args(space.body[i])
    dead = {i for i, s in enumerate(space.body) if isinstance(s, (Op, Indirect)) and i not in live}
    return {i: f for i, f in forms.items() if i in live}, dead


def _share(space: Space, config: Config) -> int:
    """Elements of a row that a thread has: of several rows per program, what it reads at once."""
    share = config.rblock // (32 * config.num_warps)
    return share if space.r is None or config.xblock == 1 else max(share, math.gcd(space.r.size.constant or 1, MANY))


def _passes(space: Space, config: Config, each: Sequence[bool], i: int) -> int:
    """In how many passes over the row is statement ``i`` computed?"""
    body, level = space.body, phases(space.body)
    results = [k for k, s in enumerate(body) if isinstance(s, Reduce) or (isinstance(s, Store) and each[k])]
    made = [needed(body, (k for k in results if level[k] == p), each.__getitem__) for p in {level[k] for k in results}]
    return sum(i in ids for ids in made) if config.reduction == "looped" else 1


def _summed(body: Sequence[Stmt], exact: set[int]) -> set[int]:
    """Statements of which a sum, alone, hides the last bit."""
    out: set[int] = set()
    todo = [a for i in exact if isinstance(body[i], Reduce) for a in stmt_args(body[i])]
    while todo:
        i = todo.pop()
        if i not in out:
            out.add(i)
            todo += [] if getattr(body[i], "op", "") in ("to_f16", "to_bf16") else stmt_args(body[i])
    return out


class _Finder:
    def __init__(self, space: Space):
        self.body = space.body
        self.users: dict[int, int] = {}
        for s in space.body:
            for a in stmt_args(s):
                self.users[a] = self.users.get(a, 0) + 1

    def form(self, i: int) -> Form | None:
        s = self.body[i]
        if not isinstance(s, Op) or s.dtype.itemsize != 4:
            return None
        if s.op == "mul":
            return self._gelu(*s.args) or self._gelu(*reversed(s.args)) or self._normal_cdf(i)
        if s.op == "add":
            return self._one_plus_tanh(i)
        if s.op == "div":
            return self._divide(*s.args)
        if s.op == "sqrt":
            return Form("root_half({0})", s.args, "root_half")
        return self._power(*s.args) if s.op == "pow" else None

    def halved(self, i: int) -> Form | None:
        """Exact division takes a branch and some 10 instructions; by a power of two (a mean's) it is a product."""
        s = self.body[i]
        if not self._is(i, "div") or s.dtype not in (torch.float32, torch.float64):  # type: ignore[union-attr]
            return None
        a, b = s.args  # type: ignore[union-attr]
        by = self._number(b)
        power = 0 < by < 2**100 and math.frexp(by)[0] == 0.5 and by > 2**-100
        return Form(f"{{0}} * {1 / by!r}", (a,)) if power else None

    def straight(self, i: int) -> Form | None:
        """An exact division or root without branches."""
        s = self.body[i]
        helper = _STRAIGHT.get(getattr(s, "op", ""))
        if helper is None or s.dtype != torch.float32 or self.halved(i):  # type: ignore[union-attr]
            return None
        return Form(f"{helper}({', '.join('{%d}' % n for n in range(len(s.args)))})", s.args, helper)  # type: ignore

    def by_row(self, i: int, each: Sequence[bool], kind: str = "") -> Form | None:
        """A division of a row's elements by one number, exact or (``_half``) nearly."""
        s = self.body[i]
        if not self._is(i, "div") or s.dtype != torch.float32:  # type: ignore[union-attr]
            return None
        a, b = s.args  # type: ignore[union-attr]
        if not each[a] or each[b] or isinstance(self.body[b], Const):
            return None
        return Form(f"divide_row{kind}({{0}}, {{1}})", (a, b), f"divide_row{kind}")

    # -- patterns -------------------------------------------------------------------------------
    def _gelu(self, half: int, sum_: int) -> Form | None:
        """(x * 0.5) * (erf(x / sqrt 2) + 1)"""
        x = self._over_root_two(sum_)
        if x is None or self._times(half, 0.5) != x:
            return None
        return Form("{0} * normal_cdf_half({0})", (x,), "normal_cdf_half")

    def _normal_cdf(self, i: int) -> Form | None:
        """(erf(x / sqrt 2) + 1) * 0.5"""
        sum_ = self._times(i, 0.5)
        x = None if sum_ is None else self._over_root_two(sum_)
        return None if x is None else Form("normal_cdf_half({0})", (x,), "normal_cdf_half")

    def _over_root_two(self, i: int) -> int | None:
        """x, where ``i`` is erf(x / sqrt 2) + 1."""
        erf = self._plus_one(i, "erf")
        if erf is None:
            return None
        x = self._times(erf, math.sqrt(0.5))
        return self._times(erf, math.sqrt(2), "div") if x is None else x

    def _one_plus_tanh(self, i: int) -> Form | None:
        u = self._plus_one(i, "tanh")
        if u is None:
            return None
        return Form(f"libdevice.fast_dividef(2.0, 1.0 + tl.exp2({{0}} * {-2 / math.log(2)}))", (u,))

    def _power(self, x: int, y: int) -> Form | None:
        base, e = self.body[x], self._number(y)
        least = max(
            (self._number(a) for a in stmt_args(base)), key=lambda n: -math.inf if n != n else n, default=math.nan
        )
        positive = any(self._is(x, op) for op in ("exp", "exp2", "sigmoid", "abs", "sqrt"))
        if positive or (self._is(x, "maximum") and least >= 0) or (math.isfinite(e) and e != int(e)):
            text = "pow_half({0}, {1})"
            return Form(text if math.isfinite(e) else f"tl.where({{1}} == 0.0, 1.0, {text})", (x, y), "pow_half")
        return None

    def _divide(self, a: int, b: int) -> Form | None:
        if self._plus_one(b, "exp", single=False) is not None:
            return Form("libdevice.fast_dividef({0}, {1})", (a, b))
        s = self.body[b]
        if isinstance(s, Reduce) and s.kind == "sum" and self._is(s.args[0], "exp"):
            return Form("{0} * (1.0 / {1})", (a, b))
        return None

    # -- pieces ---------------------------------------------------------------------------------
    def _is(self, i: int, op: str) -> bool:
        s = self.body[i]
        return isinstance(s, Op) and s.op == op

    def _number(self, i: int) -> float:
        s = self.body[i]
        return float(s.value) if isinstance(s, Const) else math.nan

    def _times(self, i: int, factor: float, op: str = "mul") -> int | None:
        """x, where ``i`` is x * factor."""
        if not self._is(i, op):
            return None
        a, b = self.body[i].args  # type: ignore[union-attr]
        if op == "mul" and math.isclose(self._number(a), factor, rel_tol=1e-6):
            a, b = b, a
        return a if math.isclose(self._number(b), factor, rel_tol=1e-6) else None

    def _plus_one(self, i: int, op: str, single: bool = True) -> int | None:
        """The operand, where ``i`` is ``op(operand) + 1``; ``single``: the only use of ``op(operand)``."""
        if not self._is(i, "add"):
            return None
        a, b = self.body[i].args  # type: ignore[union-attr]
        if self._number(a) == 1:
            a, b = b, a
        if self._number(b) != 1 or not self._is(a, op) or (single and self.users[a] > 1):
            return None
        return self.body[a].args[0]  # type: ignore[union-attr]


# Least relative error, by Remez' weights. log2(erfc(t / sqrt 2)) - 1 for t in [0, 5.6], to 3.8e-6, and it still
# falls as it must up to t = 13, where the power is 0; log2(erfc(t)) for t in [0, 4], 1 - erfc(t) to 4.2e-6.
HELPERS = {
    "pow_half": '''
def pow_half(x, y):
    """x ** y, of an x >= 0 or a y that is no integer: good to 3e-7 times its logarithm."""
    small = tl.abs(x) < 1.1754944e-38  # the hardware's logarithm takes it for 0
    z = tl.where(small, tl.abs(x) * 18446744073709551616.0, tl.abs(x))
    p = tl.exp2((libdevice.fast_log2f(z) - tl.where(small, 64.0, 0.0)) * y)
    p = tl.where((x < 0.0) & (x > float("-inf")), float("nan"), p)
    return tl.where(x == 1.0, 1.0, p)
''',
    "divide": '''
def divide(a, b):
    """a / b, rounded once (but for one in a million)."""
    q = a / b
    p = tl.fma(tl.fma(0.0 - q, b, a), libdevice.fast_dividef(1.0, b), q)
    return tl.where((tl.abs(p) < float("inf")) & (q != 0.0), p, q)
''',
    "divide_row": '''
def divide_row(a, b):
    """a / b, rounded once (but for a quotient or dividend under 2^-100); b: one per row."""
    scale = tl.where(tl.abs(b) < 1e-30, 18446744073709551616.0, 1.0)
    scale = tl.where(b < 0.0, scale * -1.0, scale)  # of a positive divisor a quotient of 0 keeps its sign
    b *= scale
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), b)
    q = a * inverse
    p = tl.fma(tl.fma(q, b, a * -1.0), inverse * -1.0, q)
    return tl.where(p == p, p, q) * scale
''',
    "divide_row_half": '''
def divide_row_half(a, b):
    """a / b, good to 2 units in the last place; b: one per row."""
    scale = tl.where(tl.abs(b) > 1e30, 5.421010862427522e-20, tl.where(tl.abs(b) < 1e-30, 18446744073709551616.0, 1.0))
    return a * (1.0 / (b * scale)) * scale
''',
    "logistic": '''
def logistic(x):
    """1 / (1 + exp(-x)), its division rounded once (but for one in a million)."""
    b = 1.0 + libdevice.exp(0.0 - x)
    q = 1.0 / b
    return tl.where(b < float("inf"), tl.fma(tl.fma(0.0 - b, q, 1.0), q, q), q)
''',
    "root_half": '''
def root_half(x):
    """The square root, good to 2 units in the last place."""
    small = x < 1e-30
    q = tl.sqrt(tl.where(small, x * 18446744073709551616.0, x))
    return tl.where(small, q * 2.3283064365386963e-10, q)
''',
    "root": '''
def root(x):
    """The square root, rounded once (but for one in a million)."""
    small = x < 1e-30
    z = tl.where(small, x * 18446744073709551616.0, x)
    q = tl.sqrt(z)
    p = tl.fma(tl.fma(0.0 - q, q, z), 0.5 * tl.rsqrt(z), q)
    p = tl.where(tl.abs(p) < float("inf"), p, q)
    return tl.where(small, p * 2.3283064365386963e-10, p)
''',
    "normal_cdf_half": '''
def normal_cdf_half(x):
    """0.5 * (1 + erf(x / sqrt 2)), good to 4e-6 of the result down to 1e-9, to 1e-12 below."""
    t = tl.abs(x)
    p = t * -1.7561965e-06 + 6.0092996e-05
    p = p * t - 9.1908902e-04
    p = p * t + 8.4640854e-03
    p = p * t - 5.3871357e-02
    p = p * t - 4.5855496e-01
    p = p * t - 1.1512114
    tail = tl.exp2(p * t - 1.0)
    return tl.where(x < 0.0, tail, 1.0 - tail)
''',
    "erf_half": '''
def erf_half(x):
    """erf(x), good to 5e-6 of the result."""
    t = tl.abs(x)
    p = t * -2.6206215e-03 + 2.8737708e-02
    p = p * t - 1.4806092e-01
    p = p * t - 9.1859329e-01
    p = p * t - 1.6279002
    tail = tl.exp2(p * t)
    far = tl.where(x < 0.0, tail - 1.0, 1.0 - tail)
    return tl.where(t < 0.04, x * (1.1283792 - 0.37612639 * (x * x)), far)
''',
    "tanh_half": '''
def tanh_half(x):
    """tanh(x), good to 5e-6 of the result."""
    t = tl.abs(x)
    tail = tl.exp2(t * -2.8853900817779268)
    far = libdevice.fast_dividef(1.0 - tail, 1.0 + tail)
    far = tl.where(x < 0.0, 0.0 - far, far)
    return tl.where(t < 0.04, x * (1.0 - 0.33333334 * (x * x)), far)
''',
}
