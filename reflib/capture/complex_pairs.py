"""Complex numbers as pairs of real ones.

No kernel of ours computes with complex numbers, so each op on them would be a call of ATen, and each view between them
and real numbers a copy: a rotary embedding by ``torch.polar`` moved eight times the bytes that it must. Written with
two real tensors, it is one kernel::

    view_as_complex(x)        x[..., 0], x[..., 1]
    a * b                     a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re
    view_as_real(z)           cat([z.re[..., None], z.im[..., None]], -1)

Complex nodes that one op connects are rewritten together, if every op on them has a rule here, none is a result of the
graph, and no two results lie in the storage of one, each seen through another one. A complex input is read as real
once, and a Fourier transform reads and writes pairs (``spectra``). Forward and backward are one graph still, so that
what is saved between them is real, too. With ``numerics="eager"`` nothing is changed: a product with a real number
leaves out that with zero.

NB: TorchInductor leaves all of them to ATen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import detect_fake_mode
from torch.fx import GraphModule, Node, map_arg

from ..options import Options
from .copies import copied
from .spectra import SPECTRA

aten = torch.ops.aten
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Pair(NamedTuple):
    """The real and the imaginary part: a node or a number each."""

    re: Any
    im: Any


def complex_pairs(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with real pairs. module: a functional ATen graph with ``meta["val"]``."""
    if options.numerics == "eager" or not any(map(_is_complex, module.graph.nodes)):
        return module
    out = copied(module)
    nodes = _rewritable(out)
    pairs: dict[Node, Pair] = {}
    both: dict[Any, Node] = {}

    def parts(n: Node) -> Any:
        if not _is_complex(n):
            return n
        if n not in pairs:  # an input
            pairs[n] = write.halves(write(aten.view_as_real.default, n))
        return pairs[n]

    for node in nodes:
        write = _Writer(node, parts, both)
        with out.graph.inserting_before(node):
            made = RULES[node.target](write, *map_arg(node.args, parts), **map_arg(node.kwargs, parts))
        if isinstance(made, Pair):
            pairs[node] = made
        else:
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
    for node in reversed(nodes):
        out.graph.erase_node(node)
    out.recompile()
    return out


def _is_complex(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_complex()


def _rewritable(module: GraphModule) -> list[Node]:
    """Nodes, in order, of all sets of connected ones that have rules, and in which something is computed."""
    nodes = [n for n in module.graph.nodes if _is_complex(n) or any(map(_is_complex, n.all_input_nodes))]
    calls, apart = dict.fromkeys(n for n in nodes if n.op not in ("placeholder", "get_attr")), _seen_apart(module)

    def connected(todo: list[Node]) -> set[Node]:
        found = set(todo)
        for n in todo:
            near = [a for a in n.all_input_nodes if _is_complex(a)] + (list(n.users) if _is_complex(n) else [])
            todo += [m for m in near if m in calls and m not in found]
            found.update(near)
        return found

    refused = connected([n for n in calls if n.target not in RULES or not _has_parts(n) or n in apart])
    computed = connected([n for n in calls if n.target in COMPUTED])
    return [n for n in calls if n in computed - refused]


def _seen_apart(module: GraphModule) -> set[Node]:
    """Complex nodes on whose storage, seen through another one of them, a further result lies, too."""
    through: dict[int, set[Node]] = {}
    for n in module.graph.output_node().all_input_nodes:
        if isinstance(value := n.meta.get("val"), torch.Tensor) and value.layout == torch.strided:
            place = value.untyped_storage()._cdata
            while not _is_complex(n) and n.all_input_nodes and _lies_at(n.all_input_nodes[0], place):
                n = n.all_input_nodes[0]
            through.setdefault(place, set()).add(n)
    return {n for seen in through.values() if len(seen) > 1 for n in seen if _is_complex(n)}


def _lies_at(node: Node, place: int) -> bool:
    """Is it, or are some of its tensors, in that storage?"""
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    strided = (v for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided)
    return any(v.untyped_storage()._cdata == place for v in strided)


def _has_parts(node: Node) -> bool:
    """Can its rule be applied to these operands?"""
    complexes = [n for n in (node, *node.all_input_nodes) if _is_complex(n)]
    if any(n.meta["val"].dtype not in PARTS or n.op != "call_function" and n.meta["val"].is_conj() for n in complexes):
        return False
    if any(isinstance(v, complex) for v in node.kwargs.values()):
        return False
    if RULES[node.target] is not each:
        return True
    others = (n.meta["val"] for n in node.all_input_nodes if not _is_complex(n))
    indices = all(not isinstance(v, torch.Tensor) or v.dtype in (torch.int32, torch.int64) for v in others)
    return indices and "dtype" not in node.kwargs


class _Writer:
    """Writes what one node becomes: its own nodes, with values, in its place. ``both``: by a pair, or the complex node
    that it stands for, a tensor that has both parts."""

    def __init__(self, node: Node, parts: Callable[[Node], Any], both: dict[Any, Node]):
        self.node, self.value, self.parts, self.both = node, node.meta["val"], parts, both
        self.dtype = PARTS.get(self.value.dtype, self.value.dtype)
        self.mode = detect_fake_mode([n.meta["val"] for n in (node, *node.all_input_nodes)])

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.node.graph.call_function(op, args, kwargs)
        made.meta = {k: v for k, v in self.node.meta.items() if k != "tensor_meta"}
        value = lambda n: n.meta["val"]  # noqa: E731
        with self.mode:
            made.meta["val"] = op(*map_arg(args, value), **map_arg(kwargs, value))
        return made

    def halves(self, x: Node) -> Pair:
        pair = Pair(self(aten.select.int, x, -1, 0), self(aten.select.int, x, -1, 1))
        self.both[pair] = x
        return pair

    # -- arithmetic of parts, which are nodes or numbers ----------------------------------------------
    def binary(self, op: Any, x: Any, y: Any) -> Any:
        if not isinstance(x, Node) and not isinstance(y, Node):
            return {aten.mul: x * y, aten.add: x + y, aten.sub: x - y}[op]
        if not isinstance(x, Node):
            if op is aten.sub:
                return self.add(self(aten.neg.default, y), x)
            x, y = y, x
        return self(op.Tensor if isinstance(y, Node) else op.Scalar, x, y)

    def mul(self, x: Any, y: Any) -> Any:
        for a, b in ((x, y), (y, x)):
            if not isinstance(a, Node) and a in (0, 1, -1):
                return 0 if a == 0 else b if a == 1 else self.neg(b)
        return self.binary(aten.mul, x, y)

    def add(self, x: Any, y: Any) -> Any:
        for a, b in ((x, y), (y, x)):
            if not isinstance(a, Node) and a == 0:
                return b
        return self.binary(aten.add, x, y)

    def sub(self, x: Any, y: Any) -> Any:
        return x if not isinstance(y, Node) and y == 0 else self.binary(aten.sub, x, y)

    def neg(self, x: Any) -> Any:
        return self(aten.neg.default, x) if isinstance(x, Node) else -x

    def whole(self, x: Any) -> Node:
        """A part as a tensor of the result's size."""
        if not isinstance(x, Node):
            return self(aten.full.default, self.sizes(), x, dtype=self.dtype, device=self.value.device)
        if x.meta["val"].dtype != self.dtype:
            x = self(aten._to_copy.default, x, dtype=self.dtype)
        return x if x.meta["val"].shape == self.value.shape else self(aten.expand.default, x, self.sizes())

    def sizes(self) -> list[Any]:
        """The result's, found in the operands where they are symbols."""
        return [s if isinstance(s, int) else self.size(d, s) for d, s in enumerate(self.value.shape)]

    def size(self, d: int, s: Any) -> Node:
        for n in self.node.all_input_nodes:
            n = n if not _is_complex(n) else self.parts(n).re
            value, d_own = n.meta["val"], d - self.value.dim()
            if isinstance(value, torch.Tensor) and value.dim() >= -d_own and value.shape[d_own] == s:
                return self(aten.sym_size.int, n, d_own)
        given = next(a for a in self.node.args if isinstance(a, (list, tuple)))  # the sizes of zeros
        return given[d]  # type: ignore[return-value]

    def pair(self, re: Any, im: Any) -> Pair:
        return Pair(self.whole(re), self.whole(im))


def _pair(x: Any) -> Pair:
    """An operand: also a real tensor, or a number."""
    if isinstance(x, complex):
        return Pair(x.real, x.imag)
    return x if isinstance(x, Pair) else Pair(x, 0)


# -- rules: (writer, the op's arguments, complex tensors as Pairs) -> Pair, or a node if the result is real -----------
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
COMPUTED: set[Any] = set()  # ops that compute something


def rule(*ops: Any, computes: bool = True) -> Callable[[Rule], Rule]:
    def keep(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, fn))
        COMPUTED.update(ops if computes else ())
        return fn

    return keep


@rule(
    aten.alias.default, aten.detach.default, aten.clone.default, aten.view.default, aten._unsafe_view.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.select.int, aten.slice.Tensor, aten.flip.default,
    aten.index.Tensor, aten.index_select.default, aten.cat.default, aten.slice_scatter.default,
    aten.select_scatter.default, computes=False,
)  # fmt: skip
@rule(aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default)
def each(d: _Writer, *args: Any, **kwargs: Any) -> Pair:
    """What is the same for both parts."""
    op = d.node.target
    found = []
    for i in (0, 1):
        mine = [_part(a, i) for a in args]
        if op in (aten.view.default, aten._unsafe_view.default):
            mine[0] = _viewable(d, mine[0], mine[1])
        found.append(d(op, *mine, **{k: _part(v, i) for k, v in kwargs.items()}))
    return Pair(*found)


def _part(x: Any, i: int) -> Any:
    if isinstance(x, Pair):
        return x[i]
    return [_part(y, i) for y in x] if isinstance(x, (list, tuple)) else x


def _viewable(d: _Writer, x: Node, sizes: Any) -> Node:
    """``x``, or a copy if the part cannot be seen so."""
    value = lambda n: n.meta["val"]  # noqa: E731
    try:
        with d.mode:
            x.meta["val"].view(map_arg(sizes, value))
    except (RuntimeError, ValueError):
        return d(aten.clone.default, x, memory_format=torch.contiguous_format)
    return x


rule(aten.view_as_complex.default, computes=False)(lambda d, x: d.halves(x))


@rule(aten.view_as_real.default, computes=False)
def view_as_real(d: _Writer, z: Pair) -> Node:
    """One tensor for all that see the complex one: results of the graph may share it."""
    seen = d.both.get(z) or d.both.get(d.node.args[0]) or _interleaved(d, z)
    return d.both.setdefault(d.node.args[0], seen)


def _interleaved(d: _Writer, z: Pair) -> Node:
    """With dimensions in memory in the order of the complex tensor's, on which the layout of what reads it depends."""
    given: Any = d.node.args[0]
    strides = [s.node.hint if isinstance(s, torch.SymInt) else s for s in given.meta["val"].stride()]
    order = [] if None in strides else sorted(range(len(strides)), key=lambda i: -strides[i])
    moved = order != sorted(order)
    parts = (d(aten.permute.default, x, order) if moved else x for x in z)
    both = d(aten.cat.default, [d(aten.unsqueeze.default, x, -1) for x in parts], -1)
    return d(aten.permute.default, both, [*map(order.index, range(len(order))), len(order)]) if moved else both


@rule(*SPECTRA)
def transform(d: _Writer, x: Any, *args: Any) -> Any:
    if (half := _half_spectrum(d.node)) is not None:
        return d.pair(_real_part(d, d.parts(half), *args[:2]), 0)
    made = d(SPECTRA[d.node.target], _together(d, x) if isinstance(x, Pair) else x, *args)
    return d.halves(made) if d.value.is_complex() else made


def _together(d: _Writer, z: Pair) -> Node:
    """Both parts in one tensor: the one that they were read from, if any."""
    return d.both.get(z) or _interleaved(d, z)


def _half_spectrum(node: Node) -> Node | None:
    """Of the gradient of a real transform, whose real part only is read: the half of the spectrum that is not zeros."""
    args: Any = node.args
    if node.target is not aten._fft_c2c.default or args[3] or len(args[1]) != 1:
        return None
    value, x, dim = node.meta["val"], args[0], args[1][0] % node.meta["val"].dim()
    if x.target is not aten.slice_scatter.default:
        return None
    (zeros, half, *where), n = x.args, value.shape[dim]
    real = aten.view_as_real.default, aten.select.int
    read = [(v.target, u.target, *u.args[1:]) for v in node.users for u in v.users]
    first = (*real, -1, 0), (*real, value.dim(), 0)
    if zeros.target is not aten.new_zeros.default or not read or any(r not in first for r in read):
        return None
    return half if isinstance(n, int) and where in ([dim, 0, n // 2 + 1], [dim - value.dim(), 0, n // 2 + 1]) else None


def _real_part(d: _Writer, z: Pair, dims: Any, normalization: int) -> Node:
    """By the transform to real numbers, which adds the conjugate of all but the first and the middle one itself."""
    dim = dims[0] % d.value.dim()
    n = d.value.shape[dim]
    k = d(aten.arange.default, n // 2 + 1, dtype=torch.int64, device=d.value.device)
    twice = d(aten.bitwise_and.Tensor, d(aten.gt.Scalar, k, 0), d(aten.lt.Scalar, k, (n + 1) // 2))
    twice = d(aten.view.default, twice, [n // 2 + 1, *[1] * (d.value.dim() - 1 - dim)])
    halved = Pair(*(d(aten.where.self, twice, d.mul(x, 0.5), x) for x in z))
    return d(SPECTRA[aten._fft_c2r.default], _together(d, halved), dims, normalization, n)


@rule(aten.copy.default, computes=False)
def copy(d: _Writer, _: Any, x: Any, *__: Any) -> Any:
    return d.pair(*_pair(x)) if d.value.is_complex() else d.whole(_pair(x).re)


rule(aten.complex.default, computes=False)(lambda d, re, im: d.pair(re, im))


@rule(aten.polar.default)
def polar(d: _Writer, r: Node, angle: Node) -> Pair:
    return d.pair(*(d.mul(r, d(f, angle)) for f in (aten.cos.default, aten.sin.default)))


@rule(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default, computes=False)
def conj(d: _Writer, z: Any) -> Pair:
    """Also of a number: the gradient of a product with one asks for that."""
    re, im = _pair(z)
    return d.pair(re, d.neg(im))


@rule(aten.where.self)
def where(d: _Writer, mask: Node, x: Any, y: Any) -> Pair:
    return Pair(*(d(aten.where.self, mask, d.whole(a), d.whole(b)) for a, b in zip(_pair(x), _pair(y), strict=True)))


@rule(aten.masked_fill.Scalar)
def masked_fill(d: _Writer, z: Pair, mask: Node, y: Any) -> Pair:
    return Pair(*(d(aten.masked_fill.Scalar, a, mask, b) for a, b in zip(z, _pair(y), strict=True)))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(d: _Writer, x: Any, y: Any) -> Pair:
    a, b = _pair(x), _pair(y)
    return d.pair(d.sub(d.mul(a.re, b.re), d.mul(a.im, b.im)), d.add(d.mul(a.re, b.im), d.mul(a.im, b.re)))


def _sum(d: _Writer, op: Callable[[Any, Any], Any], x: Any, y: Any, alpha: Any) -> Pair:
    return d.pair(*(op(a, d.mul(b, alpha)) for a, b in zip(_pair(x), _pair(y), strict=True)))


rule(aten.add.Tensor, aten.add.Scalar)(lambda d, x, y, *, alpha=1: _sum(d, d.add, x, y, alpha))
rule(aten.sub.Tensor, aten.sub.Scalar)(lambda d, x, y, *, alpha=1: _sum(d, d.sub, x, y, alpha))
rule(aten.rsub.Tensor, aten.rsub.Scalar)(lambda d, x, y, alpha=1: _sum(d, d.sub, y, x, alpha))


@rule(aten.div.Tensor, aten.div.Scalar)
def div(d: _Writer, x: Any, y: Any) -> Pair:
    """By a complex number: both scaled by its larger part, as eager does, so that no square overflows, and a finite
    one by 0 is infinite, by an infinity 0 (R. L. Smith, "Algorithm 116: Complex division", 1962)."""
    a, b = _pair(x), _pair(y)
    if not isinstance(y, (Pair, complex)):
        return d.pair(*(d.binary(aten.div, p, b.re) if isinstance(p, Node) else p for p in a))
    (p, q), (c, s) = d.pair(*a), d.pair(*b)
    swap = d(aten.lt.Tensor, d(aten.abs.default, c), d(aten.abs.default, s))  # then both times -i
    pick = lambda no, yes: d(aten.where.self, swap, yes, no)  # noqa: E731
    p, q, c, s = pick(p, q), pick(q, d.neg(p)), pick(c, s), pick(s, d.neg(c))
    ratio = d(aten.masked_fill.Scalar, d(aten.div.Tensor, s, c), d(aten.eq.Scalar, c, 0), 0)
    by = d.add(c, d.mul(s, ratio))
    re, im = d.add(p, d.mul(q, ratio)), d.sub(q, d.mul(p, ratio))
    return d.pair(d(aten.div.Tensor, re, by), d(aten.div.Tensor, im, by))


rule(aten.abs.default)(lambda d, z: d(aten.hypot.default, z.re, z.im))
rule(aten.angle.default)(lambda d, z: d(aten.atan2.default, z.im, z.re))
rule(aten.exp.default)(lambda d, z: polar(d, d(aten.exp.default, z.re), z.im))


@rule(aten.sgn.default)
def sgn(d: _Writer, z: Pair) -> Pair:
    size = d(aten.hypot.default, z.re, z.im)
    zero = d(aten.eq.Scalar, size, 0)
    return d.pair(*(d(aten.masked_fill.Scalar, d(aten.div.Tensor, x, size), zero, 0) for x in z))


@rule(aten.eq.Scalar)
def eq(d: _Writer, z: Pair, y: Any) -> Node:
    both = (d(aten.eq.Scalar, x, v) for x, v in zip(z, _pair(y), strict=True))
    return d(aten.bitwise_and.Tensor, *both)


@rule(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default, computes=False,
)  # fmt: skip
def zeros(d: _Writer, *_: Any, **__: Any) -> Pair:
    """Also of what may hold anything: autograd's copies of slices begin so."""
    return d.pair(0, 0)


rule(aten.scalar_tensor.default, aten.full.default, computes=False)(lambda d, *args, **_: d.pair(*_pair(args[-1])))


@rule(aten._to_copy.default, computes=False)
def to_copy(d: _Writer, x: Any, **_: Any) -> Any:
    """Between a real and a complex type, or two of these."""
    return d.pair(*_pair(x)) if d.value.is_complex() else d(aten._to_copy.default, x.re, dtype=d.dtype)
