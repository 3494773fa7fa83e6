"""One call of ``scaled_dot_product_attention`` in the place of what ``attention`` found."""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._python_dispatch import TorchDispatchMode

from .storages import value

MASKS = -1e4  # a score so low, or lower, has no weight beside any other
ABSORBS = -1e30  # no score changes a number so low, or lower
HIDES = {torch.float16: -6e4}  # where none is so low: what a score changes by its last digits at most
LOW = -1e3  # a bias so low in all of a row would take digits from the scores
LONG = 1024  # keys: with fewer, two products and a softmax of ours are faster on a CPU, except in 16 bits
TILE, FLOPS_PER_SECOND, BYTES_PER_SECOND, LAUNCHES = 128, 2.5e14, 3e12, 8e-6  # of short lengths, on an H100
BIASED = 3.3e-8  # seconds per tile whose scores get a bias or a mask, on an H200
FLASH, NARROW = 256, 128  # widths up to which there is a flash kernel, and the other one keeps its results in registers
BLOCK_FLOPS, WIDE_BLOCK_FLOPS = 1.2e12, 4.8e11  # of one of the other kernel's blocks, per second, narrow and wide
AT_ONCE = 2 * 132  # of its blocks
PRODUCT_FLOPS, ODD_PRODUCT_FLOPS = 4e14, 1e14  # per second, of rows that are aligned and that are not
SCORES = 2**27  # stored where two products are faster
IN_PLACE = [getattr(operator, n) for n in dir(operator) if n.startswith("i") and hasattr(operator, f"__{n[1:]}__")]
WRITING = {"__setitem__", *(f"__{f.__name__}__" for f in IN_PLACE)}  # methods
_MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode")
CONTIGUOUS = ("contiguous", "reshape", "flatten")


class Refused(Exception):
    """Why a softmax is not replaced."""


_TWO = "add sub subtract mul multiply div divide true_divide matmul"
_OPERANDS = dict.fromkeys(_TWO.split(), ("input", "other")) | {
    "bmm": ("input", "mat2"), "baddbmm": ("input", "batch1", "batch2"), "where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask", "value"), "softmax": ("input", "dim"), "dropout": ("input", "p"),
}  # fmt: skip
_OF_METHODS = {"where": ("self", "condition", "other")}


def named(node: Any) -> str:
    """The name of the function or method that is called, of an op without overload; of one in place, the other's."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target._schema.name.partition("::")[2]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rstrip("_") if not name.startswith("_") else name


def positional(graph: torch.fx.Graph) -> None:
    """Operands that are given by name (``torch.bmm(input=q, mat2=k)``) become positional ones."""
    for node in graph.nodes:
        names = _OPERANDS.get(named(node), ())
        if names and node.kwargs and not isinstance(node.target, torch._ops.OpOverload):
            names = _OF_METHODS.get(node.target, names)
            args, kwargs = list(node.args), dict(node.kwargs)
            while len(args) < len(names) and names[len(args)] in kwargs:
                args.append(kwargs.pop(names[len(args)]))
            node.args, node.kwargs = tuple(args), kwargs


def writes(node: Node) -> bool:
    """May the call write to a tensor, or change a mode that later calls depend on?"""
    target = node.target
    if node.op == "call_method":
        name = str(target)
        return name in WRITING or name.endswith("_") and not name.startswith("__")
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = getattr(target, "__name__", "")
    if name in _MODES or target is operator.setitem or "out" in node.kwargs:
        return True
    if getattr(target, "__module__", "") == "torch.nn.functional":
        try:
            return bool(inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
        except (TypeError, ValueError):
            pass
    if getattr(target, "__module__", "") == "_operator":  # and_ is no call in place
        return target in IN_PLACE
    return name.endswith("_") and not name.startswith("__")


def equal(a: Any, b: Any) -> bool:
    """Are they equal whatever the sizes are? (Adds no guard.)"""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return statically_known_true(a == b)


@dataclass(frozen=True)
class Operand:
    """q, k or v: a node's tensor, permuted by ``order`` or with its last two dimensions swapped."""

    node: Node
    flip: bool = False
    order: tuple[int, ...] | None = None

    def __call__(self, t: Any) -> Any:
        t = t.permute(self.order) if self.order is not None and self.order != tuple(range(len(self.order))) else t
        return t.transpose(-2, -1) if self.flip else t

    def value(self) -> torch.Tensor:
        return self(value(self.node))


@dataclass(frozen=True)
class Term:
    """A bias: ``node * times``, added to scores of ``rank`` dimensions."""

    node: Node
    times: float
    rank: int


@dataclass(frozen=True)
class Fill:
    """Scores of ``rank`` dimensions become ``value`` where ``node`` is true, or false if ``inverted``."""

    node: Node
    value: float
    inverted: bool
    rank: int


@dataclass(frozen=True)
class Parts:
    """Attention, found. first, second: its products. heads: the number by which a tensor of three dimensions is split.
    order: of the result's dimensions, if it is permuted. nodes: all that the call replaces but ``second``, from
    ``first`` on."""

    q: Operand
    k: Operand
    v: Operand
    first: Node
    second: Node
    scale: float
    factors: tuple[tuple[str, Node], ...]
    steps: tuple[Term | Fill, ...]
    heads: int | None
    order: tuple[int, ...] | None
    nodes: tuple[Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.first).dtype


Of = Callable[[Node], Any]  # what stands for a node: a fake tensor or a Proxy
Masks = tuple[Any, Any]  # what SDPA gets as attn_mask, and what the queries are multiplied by; or None


# -- the call ---------------------------------------------------------------------------------------
def attend(parts: Parts, of: Of, masks: Masks, contiguous: bool = False, hides: str = "") -> Any:
    """The result of the second product. ``contiguous``: laid out as the products are. ``hides``: gradients of rows
    that are hidden by a "number", or "filled" with -inf, are needed."""
    q, k, v = (_operand(parts, o, of) for o in (parts.q, parts.k, parts.v))
    mask, weight = masks
    if weight is None or hides == "filled":
        seen = q
    else:  # 0 in rows that are hidden by a number, with the gradient of the scores as if it were not
        seen = torch.where(weight == 0, q - q.detach(), q * weight) if hides == "number" else q * weight
    out = F.scaled_dot_product_attention(seen, k, v, attn_mask=mask, scale=parts.scale)
    if hides == "number":
        out = _node(hidden, out, q, k, v, weight, parts.scale)
    elif hides == "filled":
        out = _node(filled, out, v, weight)
    out = out.contiguous() if contiguous else out
    rank = value(parts.second).dim()
    if rank == 3:
        out = out.squeeze(0) if parts.heads is None else out.flatten(0, 1)
    elif rank == 2:
        out = out.squeeze(0).squeeze(0)
    elif rank > 4:  # (windows of heads)
        batch = _batch(parts, value(parts.second))
        out = out.unflatten(0, tuple(_size(parts, i, n, of) for i, n in enumerate(batch[:-1])))
    return out if parts.order is None else out.permute(parts.order)


def _operand(parts: Parts, o: Operand, of: Of) -> Any:
    """q, k or v in four dimensions: batch, heads, length, width."""
    t, fake = o(of(o.node)), o.value()
    product = value(parts.second if o is parts.v else parts.first)
    if o is parts.q:
        for how, by in parts.factors:
            t = t / of(by) if how == "truediv" else t * of(by)
    if fake.dtype != parts.dtype:  # autocast does this to products
        t = t.to(parts.dtype)
    batch = _batch(parts, product)
    if not equal(list(fake.shape[:-2]), batch):
        t = t.expand(*(_size(parts, i, n, of) for i, n in enumerate(batch)), -1, -1)
    if fake.stride(-1) != 1:
        t = t.contiguous()
    if fake.dim() == 3:
        return t.unsqueeze(0) if parts.heads is None else t.unflatten(0, (-1, parts.heads))
    return t.flatten(0, -4) if fake.dim() > 4 else t if fake.dim() == 4 else t.unsqueeze(0).unsqueeze(0)


def _batch(parts: Parts, product: torch.Tensor) -> list[Any]:
    """The dimensions before the last two, as they are before the result is permuted."""
    if parts.order is not None and product is value(parts.second):
        product = product.permute([parts.order.index(d) for d in range(len(parts.order))])
    return list(product.shape[:-2])


def _size(parts: Parts, dim: int, size: Any, of: Of) -> Any:
    """A size to expand to: a number, or a dimension of another operand."""
    if isinstance(size, int):
        return size
    for o in (parts.q, parts.k, parts.v):
        if o.value().dim() > dim + 2 and equal(o.value().shape[dim], size):
            return o(of(o.node)).size(dim)
    raise Refused("a batch of unknown size is broadcast")


def masked(parts: Parts, of: Of, hides: str) -> Masks:
    """From a bias and masks: the mask for the call, and, for rows in which every key is masked, what the queries have
    to be multiplied by (module ``attention`` says why)."""
    if not parts.steps:
        return None, None
    if all(isinstance(t, Fill) for t in parts.steps):
        allowed = None
        for t in parts.steps:
            here = _aligned(parts, t, of)
            here = here if t.inverted else ~here  # type: ignore[union-attr]
            allowed = here if allowed is None else allowed & here
        live = allowed.any(-1, keepdim=True)  # type: ignore[union-attr]
        dead = math.nan if parts.steps[0].value == -math.inf else 0.0  # type: ignore[union-attr]
        return allowed | ~live, torch.where(live, 1.0, dead).to(parts.dtype)
    bias = None
    for t in parts.steps:
        here = _aligned(parts, t, of)
        if isinstance(t, Term):
            here = here if value(t.node).dtype == parts.dtype else here.to(parts.dtype)
            here = here if t.times == 1 else here * t.times
            bias = here if bias is None else bias + here
        else:
            here = ~here if t.inverted else here
            bias = torch.zeros_like(here, dtype=parts.dtype) if bias is None else bias
            bias = bias.masked_fill(here, t.value)
    top = bias.detach().amax(-1, keepdim=True)  # type: ignore[union-attr]
    weight = torch.ones_like(top)
    weight = weight.masked_fill(top <= HIDES.get(parts.dtype, ABSORBS), 0.0)
    bias = torch.where(top < LOW, bias - top, bias)
    bias = bias.masked_fill(top == -math.inf, 0.0) if hides == "filled" else bias
    return bias, weight.masked_fill(top == -math.inf, math.nan)


def _aligned(parts: Parts, t: Term | Fill, of: Of) -> Any:
    """A bias or mask in four dimensions."""
    fake, made = value(t.node), of(t.node)
    if isinstance(t, Term) and torch.promote_types(fake.dtype, parts.dtype) != parts.dtype:
        raise Refused(f"a bias of {fake.dtype} is wider than the scores of {parts.dtype}")
    rank = fake.dim()
    if t.rank == rank == 3 and parts.heads is not None and not equal(fake.shape[0], 1):
        made, rank = made.unflatten(0, (-1, parts.heads)), 4
    for _ in range(4 - rank):
        made = made.unsqueeze(0)
    if t.rank > 4 and any(not equal(n, 1) for n in fake.shape[:-3]):  # of one window of many
        batch = _batch(parts, value(parts.first))[:-1]
        made = made.expand(*(_size(parts, i, n, of) for i, n in enumerate(batch)), -1, -1, -1)
    return made.flatten(0, -4) if max(rank, t.rank) > 4 else made


# -- gradients of rows in which every key is hidden, by a number or by -inf --------------------------
class Hidden(torch.autograd.Function):
    """Attention's result, with what gradients of keys lack if the queries of hidden rows are 0: all keys have the same
    weight 1 / n there, so the scores' gradients are ``grad @ (v - mean of v) / n``, and their product with the queries
    is one of (width x width) per head."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(q, v, weight)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, v, weight = ctx.saved_tensors
        rows = torch.where(weight == 0, q, 0.0)
        apart = (v - v.mean(-2, keepdim=True)) * ctx.scale / v.shape[-2]
        return grad, None, apart @ (rows.mT @ grad).mT, None, None, None


class Filled(torch.autograd.Function):
    """Attention's result, NaN in rows that are filled with -inf, where ``weight`` is. Behind a fill there is no
    gradient, so such rows have none for queries and keys; all values get NaN, by weights that are NaN."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v, weight)
        return out * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        v, weight = ctx.saved_tensors
        blank = weight.isnan()
        values = torch.where(blank.any(-2, keepdim=True), math.nan, torch.zeros_like(v))
        return torch.where(blank, 0.0, grad), values, None


def hidden(out: Any, q: Any, k: Any, v: Any, weight: Any, scale: float) -> torch.Tensor:
    return Hidden.apply(out, q, k, v, weight, scale)


def filled(out: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Filled.apply(out, v, weight)


def _node(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result, or a node that calls it."""
    tracers = [a.tracer for a in args if isinstance(a, Proxy)]
    return tracers[0].create_proxy("call_function", function, args, {}) if tracers else function(*args)


# -- in the graph -----------------------------------------------------------------------------------
def replace_by_call(module: GraphModule, parts: Parts, memo: dict[Any, Masks], hides: str) -> None:
    """Put the call where the second product is. memo: masks that were made in this graph and can be used again; nodes.
    hides: as for ``attend``.

    Raises Refused, before anything is changed, if PyTorch has no fused kernel for it."""
    second = parts.second
    fake, contiguous = _tried(parts, hides)
    graph, tracer = module.graph, GraphAppendingTracer(module.graph)
    before = second.prev
    with graph.inserting_before(second):
        proxy: Of = lambda n: Proxy(n, tracer)  # noqa: E731
        key = (parts.steps, parts.dtype, parts.heads, hides == "filled")
        if parts.steps and key not in memo:
            mask, weight = masked(parts, proxy, hides)
            memo[key] = mask.node, weight.node
        mask, weight = map(proxy, memo[key]) if parts.steps else (None, None)
        out = attend(parts, proxy, (mask, weight), contiguous, hides).node
    node, field = before.next, "example_value" if "example_value" in second.meta else "val"
    with on_fakes(value(second)):
        while node is not second:
            node.meta.update({**second.meta, field: fake if node is out else _called(node)})
            node = node.next
    second.replace_all_uses_with(out)
    for node in (second, *reversed(parts.nodes)):
        graph.erase_node(node)
    out.name = second.name  # by which torch.export knows its results


def _called(node: Node) -> Any:
    """What the call makes of the values of its arguments."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _tried(parts: Parts, hides: str) -> tuple[torch.Tensor, bool]:
    """The call on fake tensors: its result, and must it be made contiguous? Raises Refused if no kernel is fused."""
    scores = value(parts.first)
    wide = scores.device.type == "cpu" and parts.dtype.itemsize > 2
    if wide and not statically_known_true(scores.shape[-1] >= LONG):
        raise Refused(f"on a CPU the call is slower for fewer than {LONG} keys of {parts.dtype}")
    if scores.device.type == "cuda" and parts.dtype.itemsize == 2 and _short(
        scores, parts.q.value().shape[-1], bool(parts.steps)
    ):  # fmt: skip
        raise Refused("a fused kernel's tiles are mostly padding at these lengths")
    if scores.device.type == "cuda" and parts.dtype.itemsize == 2 and _serial(
        scores, max(parts.q.value().shape[-1], parts.v.value().shape[-1]), bool(parts.steps)
    ):  # fmt: skip
        raise Refused("a fused kernel has few blocks, each with all keys, or wide ones")
    if not hasattr(value(parts.second), "fake_mode"):
        raise Refused("sizes and dtypes are not known")
    with on_fakes(value(parts.second)):
        try:
            with _Calls() as calls:
                masks = masked(parts, value, hides)
                fake = attend(parts, value, masks, False, hides)
            want = value(parts.second)
            contiguous = not (same_strides(fake, want) or copied_later(parts.second, parts.order))
            fake = attend(parts, value, masks, True, hides) if contiguous else fake
        except (RuntimeError, ValueError, TypeError, IndexError) as e:
            raise Refused(f"PyTorch refuses: {str(e).partition(chr(10))[0]}") from e
    if not equal(list(fake.shape), list(want.shape)) or fake.dtype != want.dtype:
        raise Refused("the call's result has another shape or dtype")
    if contiguous and not same_strides(fake, want):
        raise Refused("the products are not laid out in the usual order")
    known = fake.device.type == "cpu" or torch.cuda.is_available()  # else the GPU will choose, where there is one
    if known and not any("attention" in c and "math" not in c for c in calls.names):
        raise Refused("PyTorch has no fused kernel for these sizes, dtypes and gradients")
    return fake, contiguous


def _short(scores: torch.Tensor, width: Any, biased: bool = False) -> bool:
    """Are two products and a softmax clearly faster on a GPU? A fused kernel computes tiles of TILE queries and keys,
    whatever is in them (16 queries, 32 keys of width 96: 25 ns per head on an H100, where bytes say 6), and reads a
    bias for each (64 of width 32: 33 ns, the products 19; but of 49, whose rows are not aligned, the products are the
    slower ones); the products store scores, which are written and read three times. Not where sizes are unknown."""
    *batch, queries, keys = scores.shape
    if not all(isinstance(n, int) for n in (*batch, queries, keys, width)):
        return False
    if keys > TILE:  # then it is memory that counts, even for one query
        return False
    heads = math.prod(batch)
    tiles = math.ceil(queries / TILE)
    moved = 4 * (queries + keys) * width  # of q, k, v and the result, in bytes
    tile = max(TILE**2 * 4 * width / FLOPS_PER_SECOND, BIASED if biased and keys % 8 == 0 else 0)
    fused = heads * max(tiles * tile, moved / BYTES_PER_SECOND)
    apart = heads * (moved + 12 * queries * keys) / BYTES_PER_SECOND + LAUNCHES
    return fused > 1.3 * apart


def _serial(scores: torch.Tensor, width: Any, biased: bool) -> bool:
    """Are two products and a softmax clearly faster on a GPU, although there are many keys?

    With a bias or a mask, or of a great width, the kernel is PyTorch's memory-efficient one: a block for each 64
    queries of a head (32 of those wider than NARROW, whose results it adds up in memory), which goes through all keys.
    What is not there in parallel takes its time one after the other, while products are split along everything. (On an
    H200 10 x 212 queries of width 504, 4,242 keys, a mask: 70 blocks for 132 multiprocessors, 542 us, 4.8e11 FLOP/s
    per block, and 1,486 us backward; two products, their rows not aligned, 66 and 112 us, the softmax 49. A block that
    is not wide has half of what a multiprocessor has where they are many.) Not where sizes are unknown, and not if the
    scores are SCORES or more."""
    *batch, queries, keys = scores.shape
    if not all(isinstance(n, int) for n in (*batch, queries, keys, width)) or not (biased or width > FLASH):
        return False
    heads, rows, rate = math.prod(batch), 64, BLOCK_FLOPS
    if width > NARROW:
        rows, rate = 32, WIDE_BLOCK_FLOPS
    rounds = max(1.0, heads * math.ceil(queries / rows) / AT_ONCE)
    fused = max(rounds * 4 * rows * keys * width / rate, 4 * heads * (queries + keys) * width / BYTES_PER_SECOND)
    number, moved = heads * queries * keys, 4 * heads * (queries + keys) * width
    flops = ODD_PRODUCT_FLOPS if keys % 8 or width % 8 else PRODUCT_FLOPS
    apart = 4 * number * width / flops + (moved + 12 * number) / BYTES_PER_SECOND + LAUNCHES
    return number < SCORES and fused > 1.3 * apart


@contextmanager
def on_fakes(fake: Any) -> Iterator[None]:
    """Calls of fake tensors like ``fake``, without new guards. (The mode that will trace the graph is another.)"""
    env = fake.fake_mode.shape_env
    with fake.fake_mode, env.suppress_guards() if env is not None else nullcontext():
        yield


class _Calls(TorchDispatchMode):
    """The names of all calls, of attention those that it consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(equal(s, t) or equal(n, 1) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def copied_later(node: Node, order: tuple[int, ...] | None = None) -> bool:
    """Is all that is done with the result, permuted by ``order``, to bring heads and lengths in the order of the fused
    kernels' results, and to copy that? Then it is no matter how the result is laid out, and the copy is saved."""
    ordered = list(node.users) if order is None else [node]
    if order is None and value(node).dim() > 4:  # that copy is made in any case
        if not all(named(user) in ("transpose", "permute", "movedim") for user in ordered):
            return False
    elif order is None:
        swaps = {("transpose", 1, 2), ("transpose", 2, 1), ("permute", 0, 2, 1, 3), ("permute", (0, 2, 1, 3))}
        for user in ordered:
            given = tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in user.args[1:])
            if (named(user), *given) not in swaps:
                return False
    elif order != (0, 2, 1, 3):
        return False
    return all(n.users and all(named(u) in CONTIGUOUS for u in n.users) for n in ordered)
