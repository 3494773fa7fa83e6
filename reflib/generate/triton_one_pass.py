"""Looped reductions in one pass over the row where the definition takes two.

**Variance.** ``m2`` is the sum of squared distances from the mean. Each lane keeps the mean and the m2 of its own
elements and takes in the n-th by Welford's recurrence ("Note on a method for calculating corrected sums of squares and
products", 1962, doi:10.1080/00401706.1962.10490022)::

    d = x - mean;  mean += d / n;  m2 += d * (x - mean)

``n`` is the same in all lanes: in the last step, lanes beyond the row take in their own mean, which changes nothing.
(With weights, ``n`` is a lane's own sum of them; so D. H. D. West, "Updating mean and variance estimates", 1979.)
After the loop the lanes are combined as Chan, Golub and LeVeque do ("Updating formulae and a pairwise algorithm for
computing sample variances", 1979), all at once: ``m2 = sum m2_i + sum n_i (mean_i - mean)^2``. Lanes exchange numbers
through shared memory, some 10 instructions per column of a thread and several barriers each time, so they do it twice:
for the mean, which needs no exchange of its own if the kernel has the row's sum, and for both sums of ``d_i = mean_i -
mean``: ``m2 = sum (m2_i + n_i d_i^2) - (sum n_i d_i)^2 / n``. The last term is what the mean's rounding errors add.

**Softmax.** ``sum f * exp(v - t)``, where ``t`` is made of ``max v``, in the pass that finds the maximum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Each lane keeps the greatest ``m`` so far and the sum
``s`` of ``f * exp(v - m)``; where ``m`` grows, ``s`` is scaled. Either the new power or the scale is 1, so an element
takes one exponential. With the row's maximum M the result is ``sum s_i * exp(m_i - M)``, times ``exp(M - t)``: 1 where
``t`` is M, and where M is infinite just what the definition gives for any ``t`` (NaN for softmax, 0 or infinity for
logsumexp). Until then, infinities of one sign have distance 0.

**Columns** whose number of rows is not a multiple of the block's have their last step by itself, behind the loop.

**Random words** of a row's elements, which lie one after another, are made four at a time, as Philox makes them: a
quarter as many counters as elements, and what they give joined. (In a straight kernel LLVM sees that neighbours share a
counter; not behind a loop's variable.) The row's first word need not be the first of its counter: then the loop begins
up to three elements before the row. (50,257 columns, a Gumbel noise and argmax: 138 instructions per element, so 91.)

With none of these, a body is printed as ``PartPrinter`` prints it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.expr import Expr, expr
from ..ir.loops import Index, Load, Op, Reduce, Scan, Stmt, Store
from ..ir.transforms import needed
from .triton_body import BLOCK, ROW, PartPrinter
from .triton_facts import literal, paren
from .triton_ops import TL, nan_helper, print_op
from .triton_statements import Value


@dataclass(frozen=True)
class Online:
    """A sum in the pass of the maximum ``top``: of ``power``, an ``exp(v - at)``, times factors known in that pass.
    ``phase``: its own, in which ``at`` is known."""

    top: int
    power: int
    at: int
    phase: int


def online_sums(body: Sequence[Stmt], inside: Sequence[bool], phase: Sequence[int]) -> dict[int, Online]:
    """By statement, the sums that share a maximum's pass; none of a pass that something else needs anyway."""
    found = {i: o for i in range(len(body)) if (o := _online(body, inside, phase, i)) is not None}
    stays = {
        phase[i]
        for i, s in enumerate(body)
        if i not in found and (isinstance(s, Reduce) or (isinstance(s, Store) and inside[i]))
    }
    return {i: o for i, o in found.items() if o.phase not in stays}


def _online(body: Sequence[Any], inside: Sequence[bool], phase: Sequence[int], i: int) -> Online | None:
    s = body[i]
    if not isinstance(s, Reduce) or s.kind != "sum":
        return None
    for power, factors in _powers(body, s.args[0]):
        difference = body[body[power].args[0]]
        if not isinstance(difference, Op) or difference.op != "sub" or inside[difference.args[1]]:
            continue
        v, at = difference.args
        for top in needed(body, [at]):
            found = body[top] == Reduce("max", (v,), s.dtype) and inside[v] and phase[top] + 1 == phase[i]
            if found and all(phase[f] <= phase[top] for f in factors):
                return Online(top, power, at, phase[i])
    return None


def _powers(body: Sequence[Any], i: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The exponentials that statement ``i`` is a multiple of, each with its other factors."""
    s = body[i]
    if not isinstance(s, Op):
        return
    if s.op == "exp":
        yield i, ()
    elif s.op == "mul":
        for a, b in (s.args, s.args[::-1]):
            yield from ((power, (b, *more)) for power, more in _powers(body, a))


class OnePassPrinter(PartPrinter):
    """Names, for reduction 7: ``acc7`` its lanes, ``mean7`` and ``n7`` a variance's; of a maximum that sums share,
    ``new7`` its argument, ``e7`` the exponentials of all its sums, ``scale7`` what these are scaled by."""

    one_pass = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.online = online_sums(self.space.body, self.inside, self.phase)
        self.tops = {o.top: {p.power for p in self.online.values() if p.top == o.top} for o in self.online.values()}
        for i, o in self.online.items():
            self.phase[i] = self.phase[o.top]
        self.finished: set[int] = set()  # a sum is, when a variance needs it
        self.words, self.shift = self._words()
        self.masks["r"] = self.masks.get("r", False) or self.shift

    def _needed(self, p: int) -> list[int]:
        """Without the exponentials that the maximum's accumulator makes."""
        made = {power for top, powers in self.tops.items() for power in powers if self.phase[top] == p}
        results = (i for i in self._results() if self.phase[i] == p)
        return needed(self.space.body, results, follow=lambda i: self.inside[i] and i not in made)

    def _row(self, p: int) -> None:
        super()._row(p)
        for i, o in self.online.items():
            if o.phase == p:
                self._finish_online(i, o)

    def _declare(self, i: int) -> None:
        s = self._reduction(i)
        if s.kind == "m2":
            full = self._shape(BLOCK)
            shapes = ("[]" if len(s.args) == 1 else full, full, full)
            for name, shape in zip(self._lanes(i), shapes, strict=True):
                self.put(f"{name} = tl.full({shape}, 0.0, {TL[s.dtype]})")
        else:
            super()._declare(i)

    def _accumulate(self, i: int) -> None:
        if self._reduction(i).kind == "m2":
            self._welford(i)
        elif i in self.tops:
            self._online_max(i)
        elif i in self.online:
            s, acc = self._reduction(i), f"acc{i}{self.tag}"
            value = self._masked(self.operand(s.args[0], s.dtype), "0.0")
            self.put(f"{acc} = {acc} * scale{self.online[i].top}{self.tag} + {value}")
        else:
            super()._accumulate(i)

    def _finish(self, i: int) -> None:
        if self._reduction(i).kind == "m2":
            self._finish_m2(i)
        elif i not in self.online and i not in self.finished:  # (sums of a maximum's pass wait for their row's ``at``)
            self.finished.add(i)
            super()._finish(i)

    def _steps(self, wanted: list[int], end: str) -> None:
        """Of columns the last, shorter step by itself: ptxas does not unroll a loop whose loads have masks, and a
        thread waits for one load after another. (A loop over one long row is better not unrolled, and one of many
        loads is not unrolled.)"""
        end = self.size(self._rsize() + 3) if self.shift else end
        n, block, body = self._rsize().constant, self.block["r"], [self.space.body[i] for i in wanted]
        long = sum(isinstance(s, Load) for s in body) > 4 or any(isinstance(s, Scan) for s in body)
        if n is None or n < block or not self.masks["r"] or self.block["x"] == 1 or long:
            return super()._steps(wanted, end)
        whole = n - n % block
        self.masks["r"] = False
        super()._steps(wanted, str(whole))
        self.masks["r"] = True
        self._step(wanted, f"{whole} + ")

    # -- random words ---------------------------------------------------------------------------
    def _words(self) -> tuple[Expr | None, bool]:
        """Of a row, the place of its first random word, if the others follow it, and whether that is not known to be a
        counter's first."""
        x, r, body = self.space.x, self.space.r, self.space.body
        ats = [body[s.args[2]] for s in body if isinstance(s, Op) and s.op == "philox"]
        at = next((s.expr for s in ats if isinstance(s, Index) and s.expr.has(x)), None)
        if at is None or r is None or at.coefficient(r) != 1 or self.block["r"] % 4:
            return None, False
        first = at - expr(r)
        shift = any(c % 4 for _, c in first.terms)
        ordered = any(isinstance(s, Scan) or isinstance(s, Reduce) and s.kind == "m2" for s in body)
        return (None, False) if shift and (ordered or self.block["x"] > 1) else (first, shift)

    def _looped(self) -> None:
        if self.shift and self.words is not None:
            self.put(f"shift{self.tag} = {paren(self.address(self.words))} % 4")
        super()._looped()

    def _r_block(self, start: str) -> None:
        self.start = start.removesuffix(" + ") + (f" - shift{self.tag}" if self.shift else "")
        super()._r_block(f"{self.start} + " if start else "")
        if self.shift:
            self.put(f"rmask{self.tag} = rmask{self.tag} & (r{self.tag} >= 0)")

    def _op(self, i: int, s: Op) -> None:
        at = self.space.body[s.args[-1]]
        r = self.space.r
        if s.op != "philox" or self.words is None or r is None or at != Index(self.words + expr(r), torch.int64):
            return super()._op(i, s)
        seed, stream = (self._typed(a) for a in s.args[:2])
        first = f"{self.address(self.words)} + {self.start}"
        text = f"{self.needs.helper('philox_row')}({seed}, {stream}, {first}, XBLOCK, RBLOCK)"
        self._bind(i, text, frozenset("xr"))

    # -- variance -------------------------------------------------------------------------------
    def _welford(self, i: int) -> None:
        """``n`` counts the elements of any lane; where they have weights, each lane's."""
        s, (n, mean, acc) = self._reduction(i), self._lanes(i)
        weight = "1.0"
        if len(s.args) > 1:
            weight = f"weight{i}{self.tag}"
            self.put(f"{weight} = {self._masked(self.operand(s.args[1], s.dtype), '0.0')}")
        value = self._masked(self.operand(s.args[0], s.dtype), mean)
        self.put(f"{n} += {weight}")
        self.put(f"{mean}, {acc} = {self.needs.helper('welford')}({mean}, {acc}, {value}, {weight}, {n})")

    def _finish_m2(self, i: int) -> None:
        s, (n, mean, acc) = self._reduction(i), self._lanes(i)
        share, whole, sums = f"share{i}{self.tag}", f"whole{i}{self.tag}", self.needs.helper("two_sums")
        if len(s.args) > 1:
            self.put(f"{whole}, {share} = tl.reduce(({n} * {mean}, {n}), 1, {sums}, keep_dims=True)")
            self.put(f"{share} = 1.0 / tl.maximum({share}, 1.0)")
            self.put(f"{whole} = {whole} * {share}")
        else:
            self.put(f"{n} = {self._counts(s)}  # of each lane")
            self.put(f"{share} = 1.0 / tl.maximum({self._number(self._rsize(), s)}, 1.0)")
            total = self._finished_sum(i)
            of_lanes = f"tl.sum({mean} * ({n} * {share}), axis=1, keep_dims=True)"
            self.put(f"{whole} = {of_lanes if total is None else f'{total} * {share}'}")
        tiny = 4 * torch.finfo(s.dtype).eps
        self._bind(i, f"{self.needs.helper('chan')}({mean}, {acc}, {n}, {whole}, {share}, {tiny})", ROW)

    def _finished_sum(self, i: int) -> str | None:
        """The sum of the same elements, if the row has it."""
        same = Reduce("sum", self._reduction(i).args, self._reduction(i).dtype)
        for j, other in enumerate(self.space.body):
            if other == same and self.phase[j] == self.phase[i] and j not in self.online:
                self._finish(j)
                return self.values[j].text
        return None

    def _counts(self, s: Reduce) -> str:
        """How many elements each lane has."""
        n, block = self._rsize(), self.block["r"]
        if n.constant is not None and n.constant % block == 0:
            return self._number(expr(n.constant // block), s)
        return f"(({self.size(n + (block - 1))} - {self.arange('r')}) // RBLOCK).to({TL[s.dtype]})"

    def _number(self, n: Expr, s: Reduce) -> str:
        if n.constant is not None:
            return f"tl.full([], {literal(n.constant, s.dtype)}, {TL[s.dtype]})"
        return f"{paren(self.size(n))}.to({TL[s.dtype]})"

    def _lanes(self, i: int) -> tuple[str, str, str]:
        return f"n{i}{self.tag}", f"mean{i}{self.tag}", f"acc{i}{self.tag}"

    # -- softmax --------------------------------------------------------------------------------
    def _online_max(self, i: int) -> None:
        s = self._reduction(i)
        acc, new, e, scale = (f"{name}{i}{self.tag}" for name in ("acc", "new", "e", "scale"))
        value = self._masked(self.operand(s.args[0], s.dtype), "float('-inf')")
        self.put(f"{new} = {value}")
        self.put(f"{e} = {self._exp(i, f'(0.0 - tl.abs({new} - {acc}))')}")
        self.put(f"{scale} = tl.where({new} > {acc}, {e}, 1.0)")
        self.put(f"{e} = tl.where({new} >= {acc}, 1.0, {e})")
        self.put(f"{acc} = {self.needs.helper(nan_helper('maximum', s.dtype))}({acc}, {new})")
        for power in self.tops[i]:
            self.values[power] = Value(e, frozenset("xr"))

    def _finish_online(self, i: int, o: Online) -> None:
        top, at = self.values[o.top].text, self.values[o.at].text
        lanes = f"acc{o.top}{self.tag}"
        distance = f"tl.where({lanes} == {top}, 0.0, {lanes} - {top})"
        total = f"tl.sum(acc{i}{self.tag} * {self._exp(o.top, distance)}, axis=1, keep_dims=True)"
        self._bind(i, f"{total} * {self._exp(o.top, f'({top} - {at})')}", ROW)

    def _exp(self, top: int, text: str) -> str:
        dtype, exact = self._reduction(top).dtype, not self.exact.isdisjoint(self.tops[top])
        return print_op(self.needs, "exp", dtype, dtype, [text], exact)


HELPERS = {
    "welford": '''
def welford(mean, m2, x, weight, n):
    """Takes x, weight times, into a mean and a sum of squared distances; n: the sum of weights until now."""
    d = x - mean
    mean = mean + d * (weight / tl.maximum(n, 1.0))
    return mean, m2 + d * (x - mean) * weight
''',
    "chan": '''
def chan(mean, m2, n, whole, share, tiny):
    """A row's sum of squared distances, of what its lanes have. ``whole`` is its mean but for rounding errors, which
    ``off`` makes up for; ``share``: 1 / n of the row. Less than ``tiny`` of what they come to is nothing: all values
    are equal."""
    d = mean - whole
    off, m2 = tl.reduce((n * d, m2 + n * d * d), 1, two_sums, keep_dims=True)
    rest = m2 - off * (off * share)
    return tl.where(rest < tiny * m2, 0.0, rest)
''',
    "two_sums": """
def two_sums(a, b, c, d):
    return a + c, b + d
""",
}
