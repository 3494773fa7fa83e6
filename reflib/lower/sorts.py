"""Sorts of short rows: sort, argsort, topk, kthvalue, median, in the kernel that makes or uses the row.

**Keys.** A row is sorted as integers: ``%i = scan sort %key`` (``ir/scans.py``) permutes a row that one program holds,
and knows nothing of floats, ties or positions. These are in the key, made and taken apart by ordinary operations that
fuse with what is around::

    key = order-preserving bits of the value | position in the row | is it -0.0?

* A float's bits, those below the sign flipped where it is negative, compare as the float does. NaN, of any sign, is
  above infinity: last, or first of a descending sort, as in eager. -0.0 has the bits of 0.0, so that the two are equal,
  and a bit behind the position in which it differs. Descending: the value's bits are inverted, the position's are not.
* The position makes every sort stable, and sorts a pair of value and index as one number, in one statement. Both
  results take the same key apart: in one kernel, the row is sorted once.
* Where only the values are wanted there is no position: a key of 32 bits for a float32, half of the instructions
  of one of 64. (Then -0.0 comes before 0.0, whatever their order was; not for ``numerics="eager"``.)
* bfloat16 and float16 have 16 and 19 bits as float32 values, and share 32 with a position. A float64 or int64 with its
  position has more than 64: that stays a call, unless they are known to be positions themselves.

Bits are not sorted: a scan counts those that come first, and so tells each element's place. Rows may be of any length.

With positions no two keys of a row are equal. ``topk`` of few takes k minima, each of the keys above the last one: no
sort, and a longer row. ``kthvalue`` and the medians read one place of the sorted row, a reduction over it
(so do ``x.sort().values[:, k]`` and a ``gather``: ``fuse/picks.py``).

**Limits.** A row is in one program's registers, padded to a power of two with keys that come last. A bitonic network
takes log2(n) (log2(n) + 1) / 2 steps: 10 for 16 elements, 45 for 512. These are 50 and 175 instructions per element
with keys of 32 bits, 90 and 310 with 64 (ptxas, sm_90). On an H100, rows of 1,024 take a third to two thirds of ATen's
time, rows of 2,048 with indices 1.5 to 2 times as long; 16 minima take as long as half of the network of 256 elements,
32 more than ATen; columns of a matrix are slower. Longer rows, and those of a length that is not known, are left to
ATen's radix sort. So are rows on a CPU: loops there go over a row in order, and hold none of it.

NB: TorchInductor carries the index beside the value through the network; topk, kthvalue and medians are calls there,
or, if that is asked for, sorts (``triton.decompose_sort_ops``).

References: K. E. Batcher, "Sorting networks and their applications", 1968; Duane Merrill's CUB (``TwiddleIn``: the
bits of a float that sort as integers).
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, nest, where
from .context import LoweringContext
from .extern import used_results
from .indexing import axis
from .matmul import MOVED
from .rules import Unsupported, rule
from .scans import check_rows, scan

LONGEST = 1024  # elements of a sorted row
LONGEST_TOP = 16384  # of one whose few greatest are wanted
FEW = 16  # minima, one after another
ACROSS = 4  # rows along which memory does not run are that much shorter

# Of values, as they are in a kernel: the bits that their order takes, and the low bits that are always 0.
WIDTH = {
    torch.bool: 2, torch.uint8: 9, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64,
    torch.float16: 19, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64,
}  # fmt: skip
ZEROS = {torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True)
class Key:
    """Of elements of ``dtype``. ``place``: bits of the position, ``signs``: 1 if it tells -0.0 from 0.0."""

    dtype: torch.dtype
    descending: bool
    place: int = 0
    signs: int = 0

    @property
    def packed(self) -> torch.dtype:
        width = WIDTH[self.dtype] + self.place + self.signs
        if width > 64:
            raise Unsupported(f"{self.dtype} and a position in more than 64 bits")
        return torch.int32 if width <= 32 else torch.int64

    @property
    def ordered(self) -> torch.dtype:
        """An integer for the value alone."""
        return torch.int64 if WIDTH[self.dtype] > 32 else torch.int32

    @property
    def low(self) -> int:
        """Bits below the sign, of a float."""
        return WIDTH[self.dtype] - 1

    def of(self, v: Value, position: Value) -> Value:
        """The key of a value of this dtype."""
        negative_zero = None
        if self.dtype.is_floating_point:
            bits = Value(v.kernel, v.kernel.b.op("to_bits", v.id, dtype=self.ordered))
            bits = bits.op("shr", ZEROS[self.dtype]) if self.dtype in ZEROS else bits
            key = _flipped(bits, self.low)
            if self.place:
                key, negative_zero = where(v.eq(0), 0, key), v.eq(0) & v.op("signbit")
            nan = torch.tensor(float("nan"), dtype=torch.float64 if self.low == 63 else torch.float32)
            key = where(v.isnan(), int(nan.abs().view(self.ordered)) >> ZEROS.get(self.dtype, 0), key)
        else:
            key = v.to(self.ordered)
        key = (~key if self.descending else key).to(self.packed)
        if self.place:
            key = key.op("shl", self.place) | position.to(self.packed)
        if self.signs:
            assert negative_zero is not None
            key = key.op("shl", 1) | negative_zero.to(self.packed)
        return key

    def value(self, key: Value) -> Value:
        low = self.place + self.signs
        bits = (key.op("shr", low) if low else key).to(self.ordered)
        bits = ~bits if self.descending else bits
        if not self.dtype.is_floating_point:
            return bits.to(self.dtype)
        bits = _flipped(bits, self.low)
        bits = bits.op("shl", ZEROS[self.dtype]) if self.dtype in ZEROS else bits
        wide = torch.float64 if self.low == 63 else torch.float32
        value = Value(key.kernel, key.kernel.b.op("from_bits", bits.id, dtype=wide))
        return where((key & 1).ne(0), -0.0, value) if self.signs else value

    def position(self, key: Value) -> Value:
        return ((key.op("shr", 1) if self.signs else key) & ((1 << self.place) - 1)).to(torch.int64)


def _flipped(bits: Value, low: int) -> Value:
    """The ``low`` bits inverted where the number is negative: there and back."""
    return bits ^ (bits.op("shr", low) & ((1 << low) - 1))


Choice = Callable[[NestBuilder, Value, Value], Value]  # (nest, value, key) -> a key of the row


def _length(cx: LoweringContext, x: View, dim: int, longest: int) -> int:
    d = axis(dim, len(x.shape)) if x.shape else 0
    n = x.shape[d].constant if x.shape else 1
    if not cx.on_gpu or cx.low.options.batch_invariant:
        raise Unsupported("library call")
    if x.shape and x.strides[d] != 1 and any(s == 1 and n != 1 for s, n in zip(x.strides, x.shape)):
        longest //= ACROSS
    if n is None or not 1 <= n <= min(longest, cx.low.options.persistent_limit):
        raise Unsupported(f"a row of {'unknown length' if n is None else n}")
    check_dtype(x.dtype)
    return n


def _key(cx: LoweringContext, x: View, n: int, descending: bool, unique: bool = False) -> Key:
    """What of values and positions the graph uses. ``unique``: no two of a row may be equal."""
    used, dtype = used_results(cx, list(cx.fake)), _positions(cx.node.args[0]) or x.dtype
    if 1 not in used and not unique and cx.low.options.numerics != "eager":
        return Key(dtype, descending)
    signs = 0 in used and x.dtype.is_floating_point
    return Key(dtype, descending, max(1, (n - 1).bit_length()), int(signs))


def _positions(node: Any) -> torch.dtype | None:
    """What holds the elements of ``node``, if these are positions in a row that a topk or a sort has found: of 64 bits
    they have few. (The best tokens in their order: topk, and then a sort of where they are.)"""
    while node.target in MOVED:
        node = node.args[0]
    if node.target is not operator.getitem or node.args[1] != 1 or node.args[0].target not in _FOUND:
        return None
    most = max(node.args[0].args[0].meta["val"].shape, default=1)
    return torch.int16 if isinstance(most, int) and most < 2**15 else None


_FOUND = (torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


def _choose(cx: LoweringContext, x: View, dim: int, key: Key, outs: list[View], choices: list[Choice]) -> list[View]:
    """``outs``: values, positions. Of each row one for each choice; of a choice that varies along the row, all."""
    used = used_results(cx, list(cx.fake))
    d = axis(dim, len(x.shape)) if x.shape else 0
    for i in sorted(used):
        k = NestBuilder(cx, x.shape, [d] if x.shape else [])
        v = k.load(x).to(x.dtype)
        keys = key.of(v, k.index(k.coords[d] if x.shape else 0))
        for j, choice in enumerate(choices):
            chosen, at = choice(k, v, keys), list(k.coords)
            if outs[i].shape != x.shape:
                at[d : d + 1] = [expr(j)] if len(outs[i].shape) == len(at) else []  # (without keepdim)
            k.store(outs[i], (key.position if i else key.value)(chosen), at)
        k.finish()
    return outs


def _sorted(k: NestBuilder, v: Value, key: Value) -> Value:
    return scan(k, "sort", key)


def _bits(cx: LoweringContext) -> bool:
    """Are all elements 0 or 1? A bool, or a number made of one."""
    node = cx.node.args[0]
    while isinstance(node, torch.fx.Node) and node.target is torch.ops.aten._to_copy.default:
        node = node.args[0]
    return isinstance(node, torch.fx.Node) and node.meta["val"].dtype == torch.bool


def _parted(cx: LoweringContext, x: View, dim: int, descending: bool) -> list[View]:
    """Bits in order: places are stored to where they go."""
    d, outs, used = axis(dim, len(x.shape)), [cx.out(0), cx.out(1)], used_results(cx, list(cx.fake))
    check_rows(cx, x, dim, "sum")
    k = NestBuilder(cx, x.shape, [d])
    early = k.load(x).to(torch.bool)
    early = early if descending else ~early
    count = k.reduce("sum", early.to(torch.int32))
    here = k.index(k.coords[d]).to(torch.int32)
    if 0 in used:
        first = here < count
        k.store(outs[0], (first if descending else ~first).to(x.dtype))
    if 1 in used:
        until = scan(k, "sum", early.to(torch.int32))
        place = where(early, until - 1, count + here - until).to(torch.int64)
        at = k.b.indirect(place.id, x.shape[d], checked=False, wraps=False)
        k.store(outs[1], k.index(k.coords[d]), [*k.coords[:d], at, *k.coords[d + 1 :]])
    k.finish()
    return outs


@rule("sort.default")
def sort(cx: LoweringContext, x: View, dim: int = -1, descending: bool = False) -> list[View]:
    if cx.on_gpu and x.shape and x.shape[axis(dim, len(x.shape))] != 1 and _bits(cx):
        return _parted(cx, x, dim, descending)
    key = _key(cx, x, _length(cx, x, dim, LONGEST), descending)
    return _choose(cx, x, dim, key, [cx.out(0), cx.out(1)], [_sorted])


@rule("sort.stable")
def sort_stable(
    cx: LoweringContext, x: View, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[View]:
    return sort(cx, x, dim, descending)


@rule("topk.default")
def topk(cx: LoweringContext, x: View, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[View]:
    """Of equals the first ones. In order, whether that is asked for or not."""
    count = expr(k).constant
    if count is None or count < 1:
        raise Unsupported(f"the first {k}")
    n = _length(cx, x, dim, LONGEST_TOP if count <= FEW else LONGEST)
    key = _key(cx, x, n, largest, unique=True)
    outs = [cx.out(0), cx.out(1)]
    if count == n:
        return _choose(cx, x, dim, key, outs, [_sorted])
    if n > LONGEST or count <= min(FEW, _steps(n) // 2):
        return _choose(cx, x, dim, key, outs, [functools.partial(_least, j) for j in range(count)])
    whole = [cx.temp("sorted", x.shape, o.dtype) for o in outs]
    _choose(cx, x, dim, key, whole, [_sorted])
    part = lambda k, rows: k.load(replace(rows, shape=k.shape))  # noqa: E731
    return [nest(cx, functools.partial(part, rows=rows), out) for out, rows in zip(outs, whole)]


def _steps(n: int) -> int:
    """Of the network that sorts n elements."""
    log = (n - 1).bit_length()
    return log * (log + 1) // 2


def _least(rank: int, k: NestBuilder, v: Value, keys: Value) -> Value:
    """The key of this rank, each the least of those above the one before."""
    last = k.reduce("min", keys)
    for _ in range(rank):
        last = k.reduce("min", where(keys > last, keys, torch.iinfo(keys.dtype).max))
    return last


# -- one place of the sorted row ----------------------------------------------------------------------------------
def _at(k: NestBuilder, key: Value, place: Value) -> Value:
    position = next((c for d, c in enumerate(k.coords) if d in k.reduced), expr(0))
    return k.reduce("max", where(k.index(position).eq(place), scan(k, "sort", key), torch.iinfo(key.dtype).min))


def _place(cx: LoweringContext, x: View, dim: int, place: Callable[[NestBuilder, Value, int], Value]) -> list[View]:
    n = _length(cx, x, dim, LONGEST)
    choices: list[Choice] = [lambda k, v, key: _at(k, key, place(k, v, n))]
    return _choose(cx, x, dim, _key(cx, x, n, False), [cx.out(0), cx.out(1)], choices)


@rule("kthvalue.default")
def kthvalue(cx: LoweringContext, x: View, k: int, dim: int = -1, keepdim: bool = False) -> list[View]:
    return _place(cx, x, dim, lambda nest, v, n: nest.index(expr(k) - 1))


@rule("median.dim")
def median(cx: LoweringContext, x: View, dim: int, keepdim: bool = False) -> list[View]:
    """The lower one of two. NaN, which comes last, if there is one."""
    return _place(cx, x, dim, lambda k, v, n: where(k.reduce("any", v.isnan()), n - 1, k.index((n - 1) // 2)))


@rule("nanmedian.dim")
def nanmedian(cx: LoweringContext, x: View, dim: int, keepdim: bool = False) -> list[View]:
    def place(k: NestBuilder, v: Value, n: int) -> Value:
        return (k.reduce("sum", (~v.isnan()).to(torch.int64)) - 1).maximum(0).op("shr", 1)

    return _place(cx, x, dim, place)
