"""Products of padded operands, for sizes that cuBLAS has no fast kernels for.

Tensor-core kernels move 16 bytes at a time: 8 halves, 4 of tf32. They are for operands whose contiguous dimension, row
stride and address are multiples of that. A vocabulary of 30522 or 51865 is none, and cuBLAS takes kernels that move 4
or 2 bytes. So where the arithmetic outweighs the copies, operands are copied with zeros after their rows and columns,
the product goes to a buffer with as much padding, and the part that counts is read from there::

    a[M, K] @ b[K, N]  =  ((a, 0)[M', K'] @ (b, 0)[K', N'])[:M, :N]

The copies are loop nests like others: what makes an operand or reads the result fuses with them, and an operand of two
products is copied once. Rows after those of a result cost nothing: the result is the memory before them. The sums are
the same, with zeros added. An operand of which only the number of rows is none is not copied: what those rows after
the last multiple add is added to the product of the others (``_without_the_rest``).

**When** (measured on an H200 in bfloat16): a kernel that moves 4 bytes takes about three times as long (2048 x 30522 x
768: 420 us, padded 145), one that moves 2 bytes seven times. It computes whole tiles, of which a narrow operand fills a
part; but vectors have kernels of their own, small matrices in batches lose, and so does a large operand that is copied
to be read once. What is lost, in operations, is compared with what could be computed while the copies move their bytes.
What loop nests alone read is not copied: they read it between its padding (``fuse/padded_rows``).

NB: TorchInductor measures both ways for each product, and returns results with the padding's strides. Here outputs
keep eager's.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from reflib.ir.expr import Expr, expr
from reflib.ir.loops import LoopNest
from reflib.ir.program import Extern, Tiling, Variant, View
from reflib.target import device_target, parse_target

from .body import NestBuilder, Value, nest
from .candidates import Failed, arguments, variants
from .context import LoweringContext, contiguous_strides
from .custom_ops import CustomOpConfig
from .extern import OUT_VARIANTS
from .indexing import both

Sizes = tuple[int, int, int]  # M, N, K

BYTES = 16
SLOWER = {1: 7, 2: 3, 4: 3}  # how many times, by the elements of which all sizes and strides are multiples
TILE = 64, 64, 32  # of M, N and K, at least
BALANCE = 170  # operations while a byte is moved: 650 TFLOP/s and 3.8 TB/s, as reached on an H200
LONG = 32  # times 16: rows of an operand that make a few more of them a small part
LAUNCHES = 4e9  # operations while two or three more kernels are launched
IN_PLACE = Tiling("persistent", 128, 256, 64, 8, 3)  # of nine the fastest, for each of four products (see above)
IN_PLACE_SHARED = 180 << 10  # bytes of shared memory that it takes


# -- when -------------------------------------------------------------------------------------------
def padded_sizes(cx: LoweringContext, a: View, b: View, bias: View | None) -> Sizes | None:
    """The sizes with which a[.., M, K] @ b[.., K, N] had better be multiplied. None: with its own."""
    known = all(e.constant is not None for v in (a, b) for e in (*v.shape, *v.strides, v.offset))
    if not known or not _on_cuda(cx):
        return None
    step = BYTES // a.dtype.itemsize
    *batch, m, k = (_int(e) for e in a.shape)
    n = _int(b.shape[-1])
    align = math.gcd(step, n, *_multiples(a), *_multiples(b))
    if align == step:
        return None
    rows = _up(m, step) if _by_columns(a) else m
    depth = _up(k, step) if not _by_columns(a) or _by_columns(b) else k
    sizes = rows, _up(n, step), depth
    left = _is_moved(cx, a, (rows, depth))
    right = _is_moved(cx, b, sizes[:0:-1]) and not (bias is None and _only_long(b, sizes[1], depth))
    copied = m * k * left + k * n * right
    copied += m * n * (sizes[1] != n or rows != m and math.prod(batch) > 1) * (not _is_read_by_nests(cx.node))
    copied += m * n * (bias is not None and bias.shape[-2:] == (m, n))
    low, high, moved = min(m, n), max(m, n), left if m >= n else right
    whole = low >= TILE[0] or (low > 1 and high >= TILE[0] and not moved)
    lost = 2 * math.prod(map(max, (m, n, k), TILE if whole else (1, 1, 1))) * (SLOWER[align] - 1)
    cost = BALANCE * 2 * copied * a.dtype.itemsize
    return sizes if math.prod(batch) * (lost - cost) > LAUNCHES else None


def in_place(cx: LoweringContext, a: View, b: View, sizes: Sizes) -> Tiling | None:
    """For a product with ``padded_sizes``: how our own kernel writes its result; None if it had better be padded."""
    step, named = BYTES // a.dtype.itemsize, cx.low.options.target
    rows_alone = len(a.shape) == 2 and math.gcd(step, *_multiples(a), *_multiples(b)) == step
    narrow = sizes[0] < IN_PLACE.m or 2 * sizes[1] < IN_PLACE.n
    if a.dtype.itemsize != 2 or not rows_alone or narrow or not _is_returned(cx.node):
        return None
    target = device_target(cx.device.type, cx.device.index or 0) if named is None else parse_target(named)
    return IN_PLACE if target.capability >= 90 and target.shared >= IN_PLACE_SHARED else None


def _is_returned(node: Any) -> bool:
    """Does the graph return it, or a view of it, or what is computed of each of its elements?"""
    seen, todo = {node}, [node]
    while todo:
        users = todo.pop().users.keys() - seen
        if any(u.op == "output" for u in users):
            return True
        seen |= users
        todo += [u for u in users if _is_pointwise(u.target)]
    return False


def _is_read_by_nests(node: Any) -> bool:
    """Do loop nests alone read it, themselves or through views? They read it between its padding."""
    users = list(node.users)
    return (
        bool(users)
        and all(u.op == "call_function" and _is_pointwise(u.target) for u in users)
        and all(torch.Tag.pointwise in u.target.tags or _is_read_by_nests(u) for u in users)
    )


def _is_pointwise(target: Any) -> bool:
    if target in (torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default):
        return True
    schema = getattr(target, "_schema", None)
    is_view = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return is_view or torch.Tag.pointwise in getattr(target, "tags", ())


def _on_cuda(cx: LoweringContext) -> bool:
    if cx.low.options.target is not None:
        return parse_target(cx.low.options.target).kind == "cuda"
    return cx.device.type == "cuda" and torch.version.hip is None


def _int(e: Expr) -> int:
    assert e.constant is not None
    return e.constant


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _by_columns(v: View) -> bool:
    """Are the matrices stored column by column?"""
    return v.strides[-2] == 1 and v.strides[-1] != 1


def _multiples(v: View) -> list[int]:
    """What has to be a multiple: size of the contiguous dimension, strides of the others, offset."""
    inner = len(v.shape) - (2 if _by_columns(v) else 1)
    strides = [s for d, (s, n) in enumerate(zip(v.strides, v.shape)) if d != inner and n != 1]
    return [_int(e) for e in (v.shape[inner], *strides, v.offset)]


def _is_moved(cx: LoweringContext, v: View, shape: tuple[int, ...]) -> bool:
    """Is it copied by a kernel of its own? What a loop nest makes, that one stores with padding."""
    nodes = reversed(cx.low.nodes if cx.low.buffers[v.buffer].kind == "temp" else [])
    return _is_copied(v, shape) and not isinstance(next((n for n in nodes if v.buffer in n.writes()), None), LoopNest)


def _is_copied(v: View, shape: tuple[int, ...]) -> bool:
    step = BYTES // v.dtype.itemsize
    return v.shape[-2:] != shape or math.gcd(step, *_multiples(v)) != step


# -- by the model, where nothing is measured ----------------------------------------------------------
def padded_product(
    cx: LoweringContext, target: Any, args: tuple[View, ...], scale: dict[str, Any], sizes: Sizes
) -> View:
    """``target([bias,] a, b)`` by padded operands, with eager's strides."""
    m, n, k = sizes
    *bias, a, b = args
    if not bias and not scale and _only_long(b, n, k):
        target, bias, a, b = _without_the_rest(cx, a, b, k)
        given = [*bias, a, b]
    else:
        given = [_padded(cx, v, _of_bias(v.shape, m, n)) for v in bias]
        given += [_padded(cx, a, (m, k)), _padded(cx, b, (k, n))]
    made = cx.temp("padded", (*a.shape[:-2], m, n), cx.dtype)
    out = OUT_VARIANTS[target]
    reason = f"library call, of operands padded to multiples of {BYTES} bytes"
    cx.low.nodes.append(
        Extern(
            cx.low.next_node(), target, tuple(given), tuple(scale.items()), (made.buffer,),
            out=(out, ("out",)), reason=reason, origins=(cx.origin,),
        )
    )  # fmt: skip
    result = replace(made, shape=cx.shape)
    return result if result.strides == contiguous_strides(cx.shape) else nest(cx, lambda k: k.load(result))


def padded_operands(cx: LoweringContext, a: View, b: View, sizes: Sizes) -> tuple[View, View]:
    """``a`` and ``b`` with zeros after their depth, in rows of 16 bytes, of the rows and columns that they had."""
    m, n, k = sizes
    left, right = _padded(cx, a, (m, k)), _padded(cx, b, (k, n))
    left = replace(left, shape=(*left.shape[:-2], a.shape[-2], left.shape[-1]))
    return left, replace(right, shape=(*right.shape[:-1], b.shape[-1]))


def _only_long(b: View, n: int, k: int, total: torch.dtype | None = None) -> bool:
    """Would ``b`` be copied for a few rows more, which are few beside its own, and what they add fits in ``total``?"""
    rows = _int(b.shape[-2])
    if (total or b.dtype) == torch.float16:  # the rest alone may be more than it holds
        return False
    return not _is_copied(b, (rows, n)) and rows != k and not _by_columns(b) and rows >= LONG * BYTES


def _without_the_rest(cx: LoweringContext, a: View, b: View, k: int) -> tuple[Any, list[View], View, View]:
    """a @ b as ``rest + a[:, :K'] @ b[:K']``, where K' is a multiple and ``b`` need not be copied. The rest is rounded
    once more, of which it is too small a part to matter: it is summed over less than ``1 / LONG`` of K."""
    depth = _int(b.shape[-2])
    whole = depth - depth % (BYTES // b.dtype.itemsize)
    a = replace(_padded(cx, a, (_int(a.shape[-2]), k)), shape=a.shape)
    rest = _rest(cx, a, b, cx.dtype)
    left = replace(a, shape=(*a.shape[:-1], expr(whole)))
    right = replace(b, shape=(*b.shape[:-2], expr(whole), b.shape[-1]))
    add = torch.ops.aten.addmm.default if len(a.shape) == 2 else torch.ops.aten.baddbmm.default
    return add, [rest], left, right


def _rest(cx: LoweringContext, a: View, b: View, dtype: torch.dtype) -> View:
    """What the rows of ``b`` after the last multiple add."""
    depth = _int(b.shape[-2])
    whole = depth - depth % (BYTES // b.dtype.itemsize)
    rest = cx.temp("rest", (*a.shape[:-1], b.shape[-1]), dtype)
    added = NestBuilder(cx, rest.shape)
    *batch, row, column = added.coords
    total: Value | None = None
    for d in range(whole, depth):
        term = added.load(a, [*batch, row, d]) * added.load(b, [*batch, d, column])
        total = term if total is None else total + term
    assert total is not None
    added.store(rest, total)
    added.finish()
    return rest


def _of_bias(shape: tuple[Any, ...], m: int, n: int) -> tuple[int, ...]:
    """The last sizes of a bias that is broadcast over m x n as it was over less."""
    wanted = (m, n)[2 - min(2, len(shape)) :]
    return tuple(1 if old == 1 else new for old, new in zip(shape[-2:], wanted))


def _padded(cx: LoweringContext, v: View, sizes: tuple[int, ...]) -> View:
    """``v`` with its last ``sizes``, zeros where it has no elements; itself if it is fine as it is."""
    if v.shape[len(v.shape) - len(sizes) :] == sizes and (len(sizes) < 2 or not _is_copied(v, sizes)):
        return v
    if len(sizes) == 2 and _by_columns(v):
        return _transposed(_padded(cx, _transposed(v), sizes[::-1]))
    writers = [node for node in cx.low.nodes if v.buffer in node.writes()]
    key = v, sizes, len(writers)  # v may be written to between two uses
    if key not in cx.low.moved:
        made = cx.low.moved[key] = cx.temp("operand", (*v.shape[: len(v.shape) - len(sizes)], *sizes), v.dtype)
        if any(isinstance(node, LoopNest) for node in writers):
            _copy(cx, v, replace(made, shape=v.shape))  # over the points of v, so that it fuses with what makes v
            _fill(cx, made, v.shape)
        else:
            _copy(cx, v, made)
    return cx.low.moved[key]


def _copy(cx: LoweringContext, v: View, out: View) -> None:
    """``v`` into ``out``, which may be larger: zeros there."""
    k = NestBuilder(cx, out.shape)
    inside: Value | None = None
    for at, new, old in zip(k.coords, out.shape, v.shape):
        inside = inside if new == old else both(inside, k.index(at) < old)
    k.store(out, k.load(v, k.coords, inside))
    k.finish()


def _fill(cx: LoweringContext, out: View, shape: tuple[Expr, ...]) -> None:
    """Zeros into ``out`` after the first ``shape``: to the right of all rows, then below them."""
    for d in reversed(range(len(shape))):
        if out.shape[d] != shape[d]:
            rest = (*out.shape[:d], out.shape[d] - shape[d], *shape[d + 1 :])
            k = NestBuilder(cx, rest)
            k.store(replace(out, shape=rest, offset=out.offset + shape[d] * out.strides[d]), 0.0)
            k.finish()


def _transposed(v: View) -> View:
    def swapped(of: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*of[:-2], of[-1], of[-2])

    return replace(v, shape=swapped(v.shape), strides=swapped(v.strides))


# -- as a candidate, where products are measured --------------------------------------------------------
def padded_mm(self: torch.Tensor, mat2: torch.Tensor, *, m: int, n: int, k: int) -> torch.Tensor:
    """``aten.mm`` and ``aten.bmm``."""
    out = torch.matmul(_zeros_after(self, (m, k)), _zeros_after(mat2, (k, n)))
    return out[..., : self.shape[-2], : mat2.shape[-1]]


def padded_addmm(
    self: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, m: int, n: int, k: int
) -> torch.Tensor:
    """``aten.addmm`` and ``aten.baddbmm``."""
    bias = _zeros_after(self, _of_bias(tuple(self.shape), m, n))
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    out = add(bias, _zeros_after(a, (m, k)), _zeros_after(b, (k, n)), beta=beta, alpha=alpha)
    return out[..., : a.shape[-2], : b.shape[-1]]


def _zeros_after(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    after = [size - old for size, old in zip(sizes, x.shape[x.dim() - len(sizes) :])]
    return F.pad(x, [p for size in reversed(after) for p in (0, size)])


def padded_variants(
    cx: LoweringContext, target: Any, args: tuple[View, ...], scale: dict[str, Any], out: View, sizes: Sizes
) -> tuple[list[Variant], Failed]:
    """The padded product as a variant of ``target([bias,] a, b)``, which writes ``out``."""
    fn = padded_addmm if len(args) == 3 else padded_mm
    m, n, k = sizes
    config = CustomOpConfig(fn, m=m, n=n, k=k)
    return variants(cx, target, [config], arguments(target, args, scale), [out], choices=False)
