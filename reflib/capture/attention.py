"""Attention written by hand becomes one call of ``scaled_dot_product_attention``.

``softmax(q @ k.T * scale + bias) @ v`` writes and reads a tensor of (queries x keys) per head several times; the fused
kernels keep it on chip. On a CPU that decides less: beside two products and our softmax, PyTorch's call took 1/50 to
1/2 of the time in bfloat16, where products are slow, but in float32 1.2 to 1.35 times as long for 128 keys and as long
for 1024 (one thread, width 64). So there float32 and float64 are left alone up to ``attention_call.LONG`` keys, or if
their number is not known; from there on it saves the memory.

**Where.** In the graph of torch calls before autograd sees it: Dynamo's, or torch.export's, whose ATen calls have the
same names. So the call's own backward comes with it, in training and inference, and nothing has to be found a second
time in a joint graph where its derivative is mixed with others'. The price is that spellings vary and that calls may
write in place: one table of names (``_score``), and a graph in which something is written between the two products is
left alone.

**How.** By algebra, from the softmax outwards. Up to the first product, each call on the way is a factor, a term, a
fill of masked scores, a cast or a view that splits or merges batch and heads; down to the second there are casts,
views and dropout that does nothing. Whatever else is on the way, or another use of scores or probabilities, is a reason
to leave it alone: ``REFLIB_LOGS=attention`` prints it. How q, k and v were made does not matter: what is multiplied is
what is passed, k transposed back. Of more than four dimensions all before the last three are one batch.

**When it is exact enough.** Scores are scaled, summed and exponentiated in float32 or wider, so results are as exact
as eager's or more. What needs care is rows in which every key is masked (``attention_call.attend``):

- Every score is -inf: eager gives NaN, the fused kernels 0. The queries of such rows are multiplied by NaN, and all
  gradients are NaN, as eager's are. Not behind a ``masked_fill``, where eager has no gradient of scores: there all keys
  of such rows are seen and the result is made NaN (``attention_call.Filled``; not if a bias that is an input is added).
- Masked by a finite number that no score changes (``finfo.min``): eager weighs all keys alike. CUDA's kernels multiply
  by log2(e), which overflows to -inf, and all kernels save a log-sum in which the number of keys is lost, so their
  gradients are wrong. The bias of such rows is shifted so that its largest is 0, and their queries are multiplied by 0.
  Eager still derives scores that do not change the result: where gradients are asked for and a bias may hide a row,
  theirs are put in (``attention_call.Hidden``). Where two masks may hide keys of one row, it is left alone. (An input
  that hides a row by -inf in some places and by a number in all others: gradients of k are not eager's.)
- ``masked_fill`` with a finite number, -10000 or less: a boolean mask, dead rows treated likewise. -100 is refused: it
  leaves masked keys a weight. Together with a bias, only -inf or a number that no score changes.

Gradients of q and k come from the rounded result instead of from the probabilities, as in all such kernels: a row of
the scores' gradients then has not exactly the sum 0. What lives by that cancellation (the gradient of the weights of k,
where all keys are nearly alike: 1e-4 of other gradients in a set transformer) is off by 3 to 10 times as much as
eager's in bfloat16.

Refused as well: dropout that drops (the call would draw other random numbers); a bias wider than the scores;
scores rounded to a narrower dtype in between; shapes, dtypes and gradients (of a bias, on CPUs) for which PyTorch has
no fused kernel, asked by running the call on fake tensors: its composite one is what the user wrote; what
``torch.utils.checkpoint`` computes again, which would carry the random state of calls that may draw.

float32 on CUDA: the memory-efficient kernel splits each factor in two TF32 parts and adds three products
(``OpMultiplyAddFastF32`` in ATen's ``gemm_kernel_utils.h``), so it is about as exact as float32; what ``allow_tf32``
says of matrix products is not asked.

An infinite q or k in 16 bits on a CPU gives 0 in places where eager gives NaN: that is the kernel's.

NB: TorchInductor lists whole models' spellings as patterns (``fx_passes/fuse_attention.py``) and traces each, forward
and joint.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..logs import get as logger
from ..options import Options
from .attention_call import (
    ABSORBS,
    MASKS,
    Fill,
    Operand,
    Parts,
    Refused,
    Term,
    equal,
    named,
    positional,
    replace_by_call,
    writes,
)
from .mask_values import hides_rows
from .storages import value

ADD, MUL = ("add", "iadd"), ("mul", "imul", "multiply")
SUB, DIV = ("sub", "isub", "subtract"), ("div", "truediv", "itruediv", "divide", "true_divide")
CAST = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy")
SAME = ("contiguous", "clone")
VIEW = ("view", "reshape", "_unsafe_view", "unflatten", "flatten", "unsqueeze", "squeeze")
DROPOUT = ("dropout", "dropout_")
PRODUCT = ("matmul", "bmm", "einsum")


def attention(module: GraphModule, options: Options) -> GraphModule:
    """``module`` with attention written by hand replaced by calls, in place, also in the graphs inside it.

    module: a graph of torch's functions or of ATen, not functional, with fake tensors in ``meta``.
    """
    if not options.attention or options.numerics == "eager":
        return module
    for inner in graphs(module):
        memo: dict[Any, Any] = {}
        if softmaxes := [n for n in inner.graph.nodes if named(n) == "softmax"]:
            positional(inner.graph)
        if sum([_one(inner, n, memo) for n in softmaxes]):
            inner.recompile()
    return module


def graphs(module: GraphModule) -> Iterator[GraphModule]:
    """The graph and those inside it that run as they are."""
    yield module
    for node in module.graph.nodes:
        inner = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule):
            if any(named(u) == "tag_activation_checkpoint" for u in node.users):
                logger("attention").info("%s is left as it is: it is computed again in backward", node.target)
            else:
                yield from graphs(inner)


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def change_calls(module: GraphModule, change: Callable[[torch.fx.Graph, Node, dict[str, Any]], bool]) -> GraphModule:
    """``module`` with each call of ``scaled_dot_product_attention`` given to ``change``, with its arguments by name:
    has it put another one in its place?"""
    for inner in graphs(module):
        calls = [n for n in inner.graph.nodes if named(n) == "scaled_dot_product_attention"]
        if sum([change(inner.graph, n, dict(zip(NAMES, n.args)) | n.kwargs) for n in calls]):
            inner.recompile()
    return module


def _one(module: GraphModule, softmax: Node, memo: dict[Any, Any]) -> bool:
    _read_results(module.graph, softmax)
    try:
        parts = _probabilities(_scores_of(softmax), softmax)
        _used_here_only(parts)
        _compatible(parts.steps)
        if written := _written(parts.first, parts):
            raise Refused(f"{written.name} writes to a tensor, or switches a mode, between the two products")
        for key, (mask, _) in list(memo.items()):
            if parts.second < mask or _written(mask, parts):
                del memo[key]
        replace_by_call(module, parts, memo, hides_rows(parts))
    except Refused as e:
        if any(named(n) in (*PRODUCT, "baddbmm") for n in _ancestors(softmax)):
            logger("attention").info("%s is left as it is: %s", softmax.name, e)
        return False
    logger("attention").info("%s: scaled_dot_product_attention", softmax.name)
    return True


# -- what a node is ---------------------------------------------------------------------------------
def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), torch.Tensor)


def argument(node: Node, i: int, name: str, default: Any = None) -> Any:
    return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)


def number(node: Any) -> float | None:
    """A number, or what a tensor of one number made in the graph holds; else None."""
    if named(node) in ("full", "tensor", "scalar_tensor", "detach", "lift_fresh_copy"):
        if named(node) == "full" and (value(node) is None or value(node).dim()):
            return None
        return number(argument(node, 1, "fill_value") if named(node) == "full" else argument(node, 0, "data"))
    return float(node) if isinstance(node, (int, float)) and not isinstance(node, bool) else None


def _ancestors(node: Node, depth: int = 10) -> Iterator[Node]:
    for n in node.all_input_nodes if depth else ():
        if is_tensor(n):
            yield n
            yield from _ancestors(n, depth - 1) if len(n.all_input_nodes) <= 2 else ()


def _read_results(graph: torch.fx.Graph, softmax: Node) -> None:
    """``s.masked_fill_(m, c); softmax(s)``: a call in place returns what it wrote to; its result may be read."""
    for node in graph.nodes:
        if node is softmax:
            break
        if node.op == "call_method" and writes(node) and is_tensor(node.args[0]):
            for user in list(node.args[0].users):
                if user > node and user.op != "output":
                    user.replace_input_with(node.args[0], node)


# -- up, to the first product -----------------------------------------------------------------------
@dataclass(frozen=True)
class Scores:
    """What is known of scores, as far as a node: parts of ``q @ k.T * scale * factors + steps``."""

    q: Operand
    k: Operand
    product: Node
    scale: float = 1.0
    factors: tuple[tuple[str, Node], ...] = ()  # ("mul" or "truediv", what the queries are to be multiplied with)
    steps: tuple[Term | Fill, ...] = ()  # in order
    heads: int | None = None  # in a tensor of three dimensions, batch and heads are one
    nodes: tuple[Node, ...] = field(default=(), compare=False)


def _scores_of(softmax: Node) -> Scores:
    x = softmax.args[0] if softmax.args else None
    dim = argument(softmax, 1, "dim")
    if not is_tensor(x) or not isinstance(dim, int):
        raise Refused("not a softmax of a tensor over one dimension")
    if dim not in (-1, value(x).dim() - 1):
        raise Refused("the softmax is not over the last dimension")
    s = _score(x)
    wide = [value(n).dtype for n in (*s.nodes, softmax)]
    if any(torch.promote_types(d, value(s.product).dtype) != d for d in wide):
        raise Refused("scores are rounded to a narrower dtype")
    return s


def _score(node: Any) -> Scores:
    """``node`` as scores. Raises Refused."""
    if not is_tensor(node):
        raise Refused("scores that are no tensor")
    name, x = named(node), value(node)
    if name in (*PRODUCT, "baddbmm") and not writes(node):
        return _with(_product(node), node)
    of = _which(node)
    if writes(node) and node.args[0] is not of:
        raise Refused(f"{node.name} writes to a bias")
    s = _score(of)
    if name in VIEW:
        return _with(replace(s, heads=_heads(s.heads, value(of), x)), node)
    if name in (*CAST, *SAME):
        return _with(s, node)
    if not equal(list(x.shape), list(value(of).shape)):
        raise Refused(f"{name} broadcasts the scores")
    if name in (*ADD, *SUB):
        other = node.args[1] if node.args[0] is of else node.args[0]
        times = float(node.kwargs.get("alpha", 1)) * (-1 if name in SUB else 1)
        return _with(_added(s, other, times, x.dim()), node)
    if name in (*MUL, *DIV):
        if node.kwargs.get("rounding_mode"):
            raise Refused("a rounded quotient")
        return _with(_scaled(s, node.args[1] if node.args[0] is of else node.args[0], name in DIV), node)
    return _with(_filled(s, node, of), node)


def _which(node: Node) -> Node:
    """Which argument of a call holds the scores."""
    name, args = named(node), node.args
    if name in (*VIEW, *CAST, *SAME, *DIV, *SUB, "masked_fill"):
        candidates = args[:1]
    elif name in (*ADD, *MUL):
        candidates = args[:2]
    elif name == "where" and len(args) == 3:
        candidates = args[:1] if node.op == "call_method" else args[1:]
    else:
        raise Refused(f"{name or node.op} is among what makes the scores")
    whole = [a for a in candidates if is_tensor(a) and (name in VIEW or value(a).dim() == value(node).dim())]
    for a in whole[:-1]:
        try:
            _score(a)
            return a
        except Refused:
            pass
    if not whole:
        raise Refused(f"{name} of no scores")
    return whole[-1]


def _with(s: Scores, node: Node) -> Scores:
    return replace(s, nodes=(*s.nodes, node))


def _product(node: Node) -> Scores:
    """The first product, or a ``baddbmm`` that begins with the bias."""
    name, args = named(node), node.args
    if name == "einsum":
        q, k = _einsum(node, last=True)[:2]
        return Scores(q, k, node)
    q, k = args[1:3] if name == "baddbmm" else args[:2]
    s = Scores(Operand(q), Operand(k, flip=True), node)
    if not (is_tensor(q) and is_tensor(k) and value(q).dim() == value(k).dim() == value(node).dim()):
        raise Refused("a product of tensors of other dimensions")
    if name == "baddbmm":
        alpha, beta = number(node.kwargs.get("alpha", 1)), number(node.kwargs.get("beta", 1))
        if alpha is None or beta is None:
            raise Refused("a product with a symbolic factor")
        s = replace(s, scale=alpha)
        s = s if beta == 0 else _added(s, args[0], beta, 3)
    return s


def _einsum(node: Node, last: bool) -> tuple[Operand, Operand, tuple[int, ...] | None]:
    """An einsum of two tensors as a batched product: its operands, as (batch ..., rows, columns) and (batch ...,
    rows of the second when ``last`` else what is summed, the other), and how the result's dimensions are ordered."""
    given = node.args[1:] if len(node.args) != 2 else node.args[1]
    pair = list(given) if isinstance(given, (list, tuple)) else []
    text = str(node.args[0]).replace(" ", "")
    left, _, out = text.partition("->")
    a, _, b = left.partition(",")
    if len(pair) != 2 or not out or not all(map(is_tensor, pair)) or "." in text or "," in b:
        raise Refused("an einsum of another kind")
    batch = [c for c in (out if last else a) if c in a and c in b and c in out]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    summed = [c for c in a if c in b and c not in out]
    plain = [*batch, *rows, *columns]
    if not len(rows) == len(columns) == len(summed) == 1 or sorted(plain) != sorted(out) or len(set(a)) != len(a):
        raise Refused("an einsum of another kind")
    if len(set(b)) != len(b):
        raise Refused("an einsum of another kind")
    if last and list(out) != plain:
        raise Refused("an einsum whose scores are ordered in another way")
    first = Operand(pair[0], order=tuple(map(a.index, [*batch, *rows, *summed])))
    inner = [*columns, *summed] if last else [*summed, *columns]
    second = Operand(pair[1], order=tuple(map(b.index, [*batch, *inner])))
    return first, second, None if list(out) == plain else tuple(map(plain.index, out))


def _heads(heads: int | None, before: torch.Tensor, after: torch.Tensor) -> int | None:
    """The number of heads, by which a view splits the first dimension or joins the first two."""
    small, large = sorted((before, after), key=lambda t: t.dim())
    if equal(list(small.shape), list(large.shape)):
        return heads
    if (small.dim(), large.dim()) != (3, 4) or not equal(list(small.shape[1:]), list(large.shape[2:])):
        raise Refused("scores are viewed in another shape")
    n = large.shape[1]
    if not isinstance(n, int) or heads not in (None, n) or not equal(small.shape[0], large.shape[0] * n):
        raise Refused("batch and heads are joined, and the number of heads is not known")
    return n


def _added(s: Scores, other: Any, times: float, rank: int) -> Scores:
    if not is_tensor(other) or value(other).dim() == 0 or value(other).dtype == torch.bool:
        raise Refused("a number or a boolean is added to the scores")
    return replace(s, steps=(*s.steps, Term(other, times, rank)))


def _scaled(s: Scores, other: Any, divided: bool) -> Scores:
    by = number(other)
    if by is not None:
        by = (1 / by if by else math.inf) if divided else by
        if not (0 < by < math.inf) or any(isinstance(t, Fill) for t in s.steps):
            raise Refused("scores are scaled by no positive number, or after they were masked")
        return replace(
            s, scale=s.scale * by, steps=tuple(replace(t, times=t.times * by) for t in s.steps if isinstance(t, Term))
        )
    if s.steps or not isinstance(other, Node):
        raise Refused("scores are scaled by a tensor after a bias was added")
    t, q = value(other), s.q.value()
    if isinstance(t, torch.Tensor):
        if t.dim() and (not equal(t.shape[-1], 1) or t.dim() > q.dim() or s.heads):
            raise Refused("scores are multiplied by a tensor")
        if t.is_complex() or (t.dim() and torch.promote_types(t.dtype, q.dtype) != q.dtype):
            raise Refused("scores are scaled by a wider tensor")
    return replace(s, factors=(*s.factors, ("truediv" if divided else "mul", other)))


def _filled(s: Scores, node: Node, of: Node) -> Scores:
    """``masked_fill`` or ``where``."""
    if named(node) == "masked_fill":
        mask, fill, inverted = argument(node, 1, "mask"), argument(node, 2, "value"), False
    else:
        condition, x, y = (node.args[i] for i in ((1, 0, 2) if node.op == "call_method" else (0, 1, 2)))
        mask, fill, inverted = condition, y if x is of else x, x is of
    c = number(fill)
    if c is None or not is_tensor(mask) or value(mask).dtype != torch.bool:
        raise Refused("masked scores are filled with something else than a number")
    if c > MASKS:
        raise Refused(f"masked scores are {c:g}, which leaves them a weight")
    return replace(s, steps=(*s.steps, Fill(mask, c, inverted, value(node).dim())))


# -- down, to the second ----------------------------------------------------------------------------
def _probabilities(s: Scores, softmax: Node) -> Parts:
    """From the softmax to the second product. Raises Refused."""
    nodes, node, heads = list(s.nodes), softmax, s.heads
    while True:
        nodes.append(node)
        users = [u for u in node.users if named(u) != "type_as" or u.args[0] is node]
        if len(users) != 1:
            raise Refused(f"{node.name} has {len(users)} uses: probabilities are needed elsewhere")
        (user,) = users
        name = named(user)
        if name in PRODUCT:
            break
        if name in VIEW:
            heads = _heads(heads, value(node), value(user))
        elif name in DROPOUT:
            if argument(user, 2, "training", user.kwargs.get("train", True)) and argument(user, 1, "p", 0.5) != 0:
                raise Refused("dropout draws eager's random numbers")
        elif name not in (*CAST, *SAME):
            raise Refused(f"{name or user.op} is done to the probabilities")
        node = user
    if name == "einsum":
        p, v, order = _einsum(user, last=False)
        if p.order != tuple(range(value(node).dim())):
            raise Refused("an einsum of another kind")
    else:
        p, v, order = Operand(user.args[0]), Operand(user.args[1]), None  # type: ignore[arg-type]
    if p.node is not node or v.node is node or not is_tensor(v.node) or v.value().dim() != value(node).dim():
        raise Refused("probabilities are not what comes first in the second product")
    if value(user).dtype != value(s.product).dtype:
        raise Refused("the two products are of different dtypes")
    ranks = {value(n).dim() for n in (s.product, user)}
    if len(ranks) > 1 and (ranks != {3, 4} or heads is None):
        raise Refused("products of different numbers of dimensions")
    return Parts(s.q, s.k, v, s.product, user, s.scale, s.factors, s.steps, heads, order, tuple(nodes))


def _written(after: Node, parts: Parts) -> Node | None:
    """A call that may write to a tensor, from ``after`` to the second product, where the new call reads all."""
    inside, node = set(parts.nodes), after
    while node is not parts.second:
        node = node.next
        if node not in inside and writes(node):
            return node
    return None


def _used_here_only(parts: Parts) -> None:
    inside = {*parts.nodes, parts.second}
    for node in parts.nodes:
        if any(u not in inside for u in node.users):
            raise Refused(f"{node.name} has {len(node.users)} uses: scores are needed elsewhere")


def _compatible(steps: tuple[Term | Fill, ...]) -> None:
    fills = [t for t in steps if isinstance(t, Fill)]
    if len(fills) < len(steps) and any(t.value > ABSORBS for t in fills):
        raise Refused("masked scores are a number that scores can change, and a bias is added")
    if len({t.value for t in fills}) > 1:
        raise Refused("masked scores are of several numbers")
