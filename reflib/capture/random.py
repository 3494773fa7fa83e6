"""Random operators as functions of a seed, so that they become loops and fuse.

An ATen call that draws random numbers is a kernel of its own, whose result, and for the backward a mask, goes through
memory. So on a GPU (``Options(fallback_random=...)`` says otherwise) each such op of a functional graph is written with
``reflib::random``, whose elements depend on a seed, the op's number in the graph and the element's position::

    y, mask = native_dropout(x, p)     becomes     keep = reflib::random(seed, 1, "uniform", x.shape) >= p
                                                   y, mask = x * keep * (1 / (1 - p)), keep

The seed is one ``randint`` per call of the graph and device. So ``torch.manual_seed`` repeats the numbers, each call
has others, PyTorch's generator advances, and CUDA graphs, wrappers and packages need nothing new. In a joint graph the
forward saves the seed, 8 bytes, and the backward draws the numbers again. Positions are counted in row-major order
of the sizes, whatever the order in memory.

On a CPU the default is eager's numbers: there a number costs about what eager's does, more than the memory traffic that
fusing saves; and it is on CPUs that results are compared with eager's.

Left to ATen, with eager's numbers: ops that take a generator, those without a rule below (``multinomial``,
``randperm``), what is inside of control flow, and attention's own dropout.

NB: TorchInductor gives every op a seed of its own, in one tensor, and a word of each counter's four to every element.
"""

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch._functorch import config
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.random import philox
from ..options import Options
from .copies import copied

aten = torch.ops.aten
LIBRARY = torch.library.Library("reflib", "FRAGMENT")
# kind: "uniform": in [0, 1); "normal"; "bits": an int64 of 63 random bits. ``order``: of the dimensions in memory.
LIBRARY.define("random(Tensor seed, int stream, str kind, SymInt[] size, int[] order, ScalarType dtype) -> Tensor")
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}  # of a uniform number: all that 1 - 2^-n has
WORD = 0xFFFFFFFF


def random(seed: Any, stream: int, kind: str, size: Any, order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The op in eager PyTorch: what ``lower/random`` writes as a loop nest. The bits are the same."""
    i = torch.arange(torch.Size(size).numel(), device=seed.device)

    def word(at: torch.Tensor) -> torch.Tensor:
        return philox(seed.reshape(()), torch.tensor(stream, device=seed.device), at)

    value = drawn(kind, dtype, word, i, operator.lshift)
    return _empty(seed, stream, kind, size, order, dtype).copy_(value.view(size))


def drawn(kind: str, dtype: torch.dtype, word: Callable[[Any], Any], at: Any, shift: Callable[[Any, int], Any]) -> Any:
    """The number at position ``at``, of ``word(i)``, the i-th word (int32): of tensors, or of values in a loop nest."""
    if kind == "uniform" and dtype != torch.float64:
        return (word(at) & (2 ** DIGITS[dtype] - 1)).to(torch.float32) * 2.0 ** -DIGITS[dtype]
    if kind == "uniform":
        high, low = (word(2 * at) & 0x3FFFFFF).to(dtype), (word(2 * at + 1) & 0x7FFFFFF).to(dtype)
        return high * 2.0**-26 + low * 2.0**-53
    if kind == "normal":  # Box and Muller, "A note on the generation of random normal deviates", 1958
        wide, words, least = (torch.float64, 4, 2.0**-32) if dtype == torch.float64 else (torch.float32, 2, 1.0)
        radius, angle, *more = ((word(words * at + k).to(torch.int64) & WORD).to(wide) for k in range(words))
        if more:  # the digits of a float64 that the first words do not fill
            radius, angle = radius + more[0] * 2.0**-32, angle + more[1] * 2.0**-32
        return (((radius + least) * 2.0**-32).log() * -2.0).sqrt() * (angle * (math.tau * 2.0**-32)).cos()
    low, high = word(2 * at).to(torch.int64) & WORD, word(2 * at + 1).to(torch.int64) & (WORD >> 1)
    return low | shift(high, 32)


def _empty(seed: Any, stream: int, kind: str, size: Any, order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in this order."""
    back = [list(order).index(d) for d in range(len(order))]
    return seed.new_empty([size[d] for d in order], dtype=dtype).permute(back)


LIBRARY.impl("random", random, "CompositeExplicitAutograd")
LIBRARY.impl("random", _empty, "Meta")
RANDOM = torch.ops.reflib.random.default


def own_numbers(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy with its random ops rewritten. module: a functional ATen graph with ``meta["val"]``."""
    if options.fallback_random or not any(n.target in _REWRITTEN for n in module.graph.nodes):
        return module
    out = copied(module)
    later = after_the_forward(out.graph)
    seeds: dict[torch.device, Node] = {}
    for stream, node in enumerate([n for n in out.graph.nodes if n.target in _REWRITTEN]):
        values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
        mode = detect_fake_mode(values)
        on_gpu = values[0].device.type == "cuda" or (gpu and options.target is not None)
        eagers = options.fallback_random is None and not on_gpu
        if mode is None or eagers or node in later or not _can(node, values[0]):
            continue
        with out.graph.inserting_before(node):
            made = _REWRITTEN[node.target](_Drawing(node, values[0], seeds, stream, mode), *node.args)
        if made is not None:
            _replace(node, made if isinstance(made, tuple) else (made,), values)
    out.recompile()
    return out


def after_the_forward(graph: torch.fx.Graph) -> set[Node]:
    """What depends on the gradients of a joint graph's results. A backward that is run again draws other numbers."""
    out: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if tangent or not out.isdisjoint(node.all_input_nodes):
            out.add(node)
    return out


def _can(node: Node, value: torch.Tensor) -> bool:
    """Not of a generator of the user's; nor where the order of dimensions in memory depends on data."""
    known = all(isinstance(s, int) or s.node.hint is not None for s in value.stride())
    return node.kwargs.get("generator") is None and value.device.type in ("cpu", "cuda") and known


def _seed(graph: torch.fx.Graph, device: torch.device, mode: AbstractContextManager) -> Node:
    """64 bits from PyTorch's generator, before all else. (A range of 2^64 is more than ``randint`` takes.)"""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        kwargs = {"dtype": torch.int64, "device": device}
        seed = graph.call_function(aten.randint.low, (-(2**63), 2**63 - 1, [1]), kwargs)
    with mode:
        seed.meta = {"val": torch.empty(1, **kwargs), "recompute": CheckpointPolicy.MUST_SAVE}
    return seed


def _replace(node: Node, made: tuple[Node, ...], values: Sequence[torch.Tensor]) -> None:
    """``made`` instead of ``node``'s results, which had these ``values``."""
    for n, value in zip(made, values, strict=True):
        n.meta["val"] = value
    if len(made) == 1:
        node.replace_all_uses_with(made[0])
    for user in list(node.users):  # of several results
        user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Drawing:
    """Writes what one random op becomes: its own nodes, with values, in its place."""

    def __init__(
        self, node: Node, value: torch.Tensor, seeds: dict[torch.device, Node], stream: int,
        mode: AbstractContextManager,
    ):  # fmt: skip
        self.node, self.value, self.seeds, self.stream, self.mode = node, value, seeds, stream, mode

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.node.graph.call_function(op, args, kwargs)
        made.meta = dict(self.node.meta)
        value = lambda n: n.meta["val"]  # noqa: E731
        with self.mode:
            made.meta["val"] = op(*torch.fx.map_arg(args, value), **torch.fx.map_arg(kwargs, value))
        return made

    def numbers(self, kind: str, size: Any, dtype: torch.dtype) -> Node:
        """``reflib::random``, laid out in memory like the result. It is cheaper to compute again than to save."""
        strides = [s if isinstance(s, int) else s.node.hint for s in self.value.stride()]
        order = sorted(range(len(strides)), key=lambda d: -strides[d])
        device = self.value.device
        if device not in self.seeds:
            self.seeds[device] = _seed(self.node.graph, device, self.mode)
        made = self(RANDOM, self.seeds[device], self.stream, kind, size, order, dtype)
        return self.again(made)

    def again(self, node: Node) -> Node:
        """For the partitioner: the backward computes it again."""
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return node

    def like(self, x: Node, kind: str, dtype: torch.dtype | None = None) -> Node:
        """As many numbers as ``x`` has elements, by default of the result's dtype."""
        shape = x.meta["val"].shape
        size = [n if isinstance(n, int) else self(aten.sym_size.int, x, d) for d, n in enumerate(shape)]
        return self.numbers(kind, size, dtype or self.value.dtype)

    def below(self, x: Node, p: Any) -> Node:
        """Bools, true with probability ``p``: a number, or a node like ``x`` of floats."""
        p_dtype = p.meta["val"].dtype if isinstance(p, Node) else torch.float32
        u = self.like(x, "uniform", torch.float64 if p_dtype == torch.float64 else torch.float32)
        if isinstance(p, Node):  # saving the bools takes less than saving p
            return self(aten.lt.Tensor, u, p)
        return self.again(self(aten.lt.Scalar, u, p))

    def affine(self, x: Node, scale: Any, shift: Any) -> Node:
        """x * scale + shift, of numbers or nodes."""
        for op, y, nothing in ((aten.mul, scale, 1), (aten.add, shift, 0)):
            if isinstance(y, Node) or y != nothing:
                x = self(op.Tensor if isinstance(y, Node) else op.Scalar, x, y)
        return x


Made: TypeAlias = Node | tuple[Node, ...] | None  # None: this case is left to ATen


def _dropout(d: _Drawing, x: Node, p: float, train: bool | None = True) -> Made:
    if train is False or not 0 < p < 1 or not x.meta["val"].is_floating_point():
        return None
    keep = d.below(x, 1.0 - p)
    made = d(aten.mul.Scalar, d(aten.mul.Tensor, x, keep), 1.0 / (1.0 - p))
    if config.activation_memory_budget == 1:  # this, or what is made of it: x + dropout(y)
        made.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return made, keep


def _bernoulli(d: _Drawing, x: Node, p: Any = None) -> Made:
    if isinstance(p, Node) or p is None and not x.meta["val"].is_floating_point():
        return None
    return d(aten._to_copy.default, d.below(x, x if p is None else p), dtype=d.value.dtype)


def _floats(kind: str) -> Callable[..., Made]:
    """``rand``, ``randn``: of a size, or like a tensor."""

    def rewrite(d: _Drawing, what: Any, *_: Any) -> Made:
        if not d.value.is_floating_point():
            return None
        return d.like(what, kind) if isinstance(what, Node) else d.numbers(kind, what, d.value.dtype)

    return rewrite


def _uniform(d: _Drawing, x: Node, low: float = 0.0, high: float = 1.0) -> Made:
    """low <= number < high: what is rounded to high is low, as in eager."""
    if (low, high) == (0.0, 1.0):
        return d.like(x, "uniform")
    wide = torch.float64 if d.value.dtype == torch.float64 else torch.float32
    made = d.affine(d.like(x, "uniform", wide), high - low, low)
    made = d(aten._to_copy.default, made, dtype=d.value.dtype)
    lowest = d(aten.full.default, [], low, dtype=d.value.dtype, device=d.value.device)
    return d(aten.where.self, d(aten.ge.Scalar, made, high), lowest, made)


def _normal_of_tensors(d: _Drawing, mean: Any, std: Any = 1.0, like: Node | None = None) -> Made:
    """Like the one of the result's shape, if the other is broadcast."""
    given = [n for n in (like, mean, std) if isinstance(n, Node) and n.meta["val"].shape == d.value.shape]
    return d.affine(d.like(given[0], "normal"), std, mean) if given and d.value.is_floating_point() else None


def _exponential(d: _Drawing, x: Node, rate: float = 1.0) -> Made:
    """-log(1 - u) / rate; never 0, of which gumbel_softmax takes the logarithm."""
    z = d(aten.neg.default, d(aten.log1p.default, d(aten.neg.default, d.like(x, "uniform", torch.float32))))
    z = d.affine(d(aten.clamp_min.default, z, 2.0**-25), 1.0 / rate, 0)
    least = 2.0**-24 if d.value.dtype == torch.float16 else 2.0**-126
    return d(aten.clamp_min.default, d(aten._to_copy.default, z, dtype=d.value.dtype), least)


def _integers(d: _Drawing, low: Any, high: Any, what: Any, *_: Any) -> Made:
    """low <= number < high, each as likely as another to one part in 2^63 / (high - low)."""
    if isinstance(low, Node) or isinstance(high, Node) or not 0 < high - low < 2**62:
        return None
    bits = d.like(what, "bits", torch.int64) if isinstance(what, Node) else d.numbers("bits", what, torch.int64)
    return d(aten._to_copy.default, d.affine(d(aten.remainder.Scalar, bits, high - low), 1, low), dtype=d.value.dtype)


_REWRITTEN: dict[Any, Callable[..., Made]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.rand.default: _floats("uniform"),
    aten.rand_like.default: _floats("uniform"),
    aten.uniform.default: _uniform,
    aten.randn.default: _floats("normal"),
    aten.randn_like.default: _floats("normal"),
    aten.normal_functional.default: lambda d, x, mean=0.0, std=1.0: _normal_of_tensors(d, mean, std, x),
    aten.normal.Tensor_float: _normal_of_tensors,
    aten.normal.float_Tensor: _normal_of_tensors,
    aten.normal.Tensor_Tensor: _normal_of_tensors,
    aten.exponential.default: _exponential,
    aten.randint.default: lambda d, high, size, *_: _integers(d, 0, high, size),
    aten.randint.low: _integers,
    aten.randint_like.default: lambda d, x, high, *_: _integers(d, 0, high, x),
    aten.randint_like.low_dtype: lambda d, x, low, high, *_: _integers(d, low, high, x),
}
