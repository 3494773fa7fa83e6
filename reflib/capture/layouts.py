"""Convolutions in channels-last order on a GPU, inside a graph whose inputs and outputs keep the user's strides.

cuDNN's tensor-core convolutions read and write NHWC. Given NCHW they transpose what they read and what they write,
each a pass over memory that does nothing else. So in a graph of convolutions the tensors between them are better kept
in NHWC: a copy where such tensors begin, a copy back where an output must have its own strides, and both of these fuse
with the elementwise work around them.

It pays when what the convolutions read and write is more than what has to be copied at the graph's edges::

    sum of bytes(x) + bytes(y) over the convolutions y = conv(x)   >   bytes copied in + bytes copied out

(Of gradients alike.) A residual stream that begins as an NCHW argument would stay NCHW by PyTorch's rules, and each
``x + conv(x)`` read one of the two across. So where such tensors begin they are copied as well (``_beginnings``).

(Weights are transposed either way.) Convolutions of halves over one dimension (audio) are made convolutions over planes
of one row, as ATen does when it calls cuDNN; planes have such an order.

Done on the functional graph, the joint one where there are gradients: convolutions get channels-last operands, every
fake value after them is computed again, and strides follow by PyTorch's own rules; so forward and backward agree about
what is saved. Nothing else changes but the order in memory, hence no numerics.

A graph is left alone if it has sizes known at run time only, control flow, or, of a tensor in channels-last order, an
op that takes strides as numbers or one that draws random numbers (they would fall on other elements); and for grouped
convolutions for which cuDNN is not known to have good NHWC kernels (``_suits``).

NB: TorchInductor decides by counting convolutions and their channels (#99773), and converts while it lowers.
"""

import operator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..options import Options
from .copies import copied

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # ops: operands to lay out, first
LAST = torch.channels_last
HALVES = (torch.float16, torch.bfloat16)
MAX_GROUP = 64  # channels
FEW = 8  # channels of float32: less than a sector of memory per pixel
# Their CUDA kernels read arguments as if they were contiguous, which autograd's formulas make them (derivatives.yaml);
# in a traced graph nothing is left of that where they already were.
CONTIGUOUS = {
    aten._weight_norm_interface, aten._weight_norm_interface_backward, aten._cdist_forward, aten._cdist_backward,
    aten._pdist_forward, aten._pdist_backward, aten.segment_reduce, aten._segment_reduce_backward,
    aten._thnn_fused_lstm_cell, aten._thnn_fused_lstm_cell_backward_impl, aten._thnn_fused_gru_cell,
    aten._thnn_fused_gru_cell_backward, aten._cudnn_rnn, aten._cudnn_rnn_backward,
}  # fmt: skip
Axes = tuple[int, ...]
_STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)


class _Refused(Exception):
    pass


def channels_last(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with convolutions in channels-last order, if that pays.

    module: a functional ATen graph with ``meta["val"]``."""
    if not (gpu and options.channels_last) or not _may(module.graph):
        return module
    read = sum(map(_moved, module.graph.nodes))
    plain = _laid_out(module, set(), read)
    begin = _beginnings(plain.graph) if plain is not None else set()
    return (_laid_out(module, begin, read) if begin else None) or plain or module


def _laid_out(module: GraphModule, begin: set[str], read: int) -> GraphModule | None:
    """A copy in channels-last order, if less than ``read`` bytes are copied for it. begin: as ``_beginnings``."""
    out = copied(module)
    try:
        moved = _lay_out(out.graph, begin)
    except _Refused:
        return None
    if not moved or read <= moved:
        return None
    out.recompile()
    return out


def _beginnings(graph: torch.fx.Graph) -> set[str]:
    """Where tensors begin that should be in channels-last order themselves.

    An op of tensors in two orders reads some of them across, and so does a convolution's copy. Copied where it begins,
    a tensor is in the others' order, and so is what follows from it: that pays if what is read across is more than
    what is copied."""
    begin: dict[Node, tuple[Node, Axes]] = {}  # of what is in NCHW: where it began, and which of its axes it has
    across: dict[Node, int] = {}
    for n in graph.nodes:
        if n.op == "output" or n.target in CONVOLUTIONS or _mutates(n):
            continue
        value, operands = n.meta.get("val"), _largest(n)
        known = [a for a in operands if a in begin]
        copy = n.target is aten.clone.default and n.kwargs.get("memory_format") is LAST
        for a in known:
            first, axes = begin[a]
            if copy or any(_is_last(b.meta["val"], axes) for b in operands):
                across[first] = across.get(first, 0) + _bytes(a.meta["val"])
        if not _is_plane(value):
            continue
        alike = [begin[a] for a in known if _looks(a.meta["val"])[:2] == _looks(value)[:2]]
        if n.target is aten.permute.default and known:
            first, axes = begin[known[0]]
            begin[n] = first, tuple(axes[d] for d in n.args[1])  # type: ignore[union-attr, index, misc]
        elif alike:
            begin[n] = alike[0]
        elif value.is_contiguous() and not value.is_contiguous(memory_format=LAST):
            begin[n] = n, (0, 1, 2, 3)
    return {n.name for n, size in across.items() if size > _bytes(n.meta["val"])}


def _largest(n: Node) -> list[Node]:
    """Of its operands of four dimensions."""
    found = [a for a in n.all_input_nodes if _is_plane(a.meta.get("val"))]
    most = max((a.meta["val"].numel() for a in found), default=0)
    return [a for a in found if a.meta["val"].numel() == most]


def _is_plane(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _is_last(t: torch.Tensor, axes: Axes) -> bool:
    """Is ``t``, whose dimensions are these of N, C, H and W, in channels-last order, and no other?"""
    nchw = t.permute([axes.index(d) for d in range(4)])
    return nchw.is_contiguous(memory_format=LAST) and not nchw.is_contiguous()


def _mutates(n: Node) -> bool:
    schema = getattr(n.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _may(graph: torch.fx.Graph) -> bool:
    """Are there convolutions to lay out, and nothing that forbids it?"""
    found, training = False, any(n.target is aten.convolution_backward.default for n in graph.nodes)
    for n in graph.nodes:
        values = [v for v in pytree.tree_leaves(n.meta.get("val")) if isinstance(v, (torch.Tensor, torch.SymInt))]
        if any(isinstance(v, torch.SymInt) or not _static(v) for v in values):
            return False
        plain = isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem
        if n.op == "call_function" and not plain:
            return False
    for n in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if not _suits(n, training):
            return False
        found = found or ((n.args[0].meta["val"].dim() == 4 or _is_line(n)) and not _few_apart(n))
    return found


def _few_apart(n: Node) -> bool:
    """Is it depthwise, in float32, of few channels? ATen has kernels for NCHW; of NHWC, cuDNN's are generic (2 blurs of
    4 channels, 20 MB each, took 382 us on an H200; TorchInductor's whole step, with gradients, took 321)."""
    x = n.args[0].meta["val"]
    return x.dtype == torch.float32 and x.shape[1] < FEW and 1 < n.args[8] == x.shape[1]


def _suits(n: Node, training: bool) -> bool:
    """Is a convolution as fast in NHWC? One in groups (not depthwise) is where cuDNN transposes anyway, for its kernels
    of halves (resnext50 on an H200 in bfloat16, 4 to 32 channels per group: 67 transposes, 3.5 ms; NHWC in
    TorchInductor 2.0 ms). Gradients, float32 and wide groups were not measured. Float32 between numbers of channels
    that are no multiples of 4 keeps its precision in NCHW; NHWC kernels round to tf32 where the user allows it."""
    x, w, groups = n.args[0].meta["val"], n.args[1].meta["val"], n.args[8]
    if x.dtype == torch.float32 and x.shape[1] % 4 and w.shape[0] % 4:
        return False
    if groups in (1, x.shape[1]):
        return True
    return x.dtype in HALVES and not training and x.shape[1] // groups <= MAX_GROUP


def _is_line(n: Node) -> bool:
    """A convolution over one dimension, of halves, not depthwise: cuDNN has NHWC kernels alone for these too."""
    operands = CONVOLUTIONS[n.target]
    x, groups = n.args[operands - 2].meta["val"], n.args[operands + 6]
    return x.dim() == 3 and x.dtype in HALVES and (groups == 1 or groups != x.shape[1])


def _moved(n: Node) -> int:
    """Bytes that a convolution, or its backward, reads and writes, but for weights."""
    if n.target not in CONVOLUTIONS:
        return 0
    operands, result = n.args[: CONVOLUTIONS[n.target] - 1], n.meta["val"]
    results = [result] if isinstance(result, torch.Tensor) else result[:1]  # None: no gradient of what it reads
    return sum(map(_bytes, _tensors([*(a.meta["val"] for a in operands), *results])))  # type: ignore[union-attr]


def _packet(n: Node) -> Any:
    return getattr(n.target, "overloadpacket", None)


def _static(t: torch.Tensor) -> bool:
    return all(isinstance(s, int) for s in t.shape) and t.layout == torch.strided


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _lay_out(graph: torch.fx.Graph, begin: set[str]) -> int:
    """Operands in channels-last order, then every value after them again. Returns the bytes of tensors, other than
    weights, that are copied at the edges: inputs, and outputs that must have their old strides. Raises _Refused."""
    moved = 0
    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes if n.op == "placeholder"])
    if mode is None:
        raise _Refused
    changed: set[Node] = set()
    copies: dict[Node, Node] = {}  # by what is copied
    known: dict[Any, Any] = {}  # by an op and what its arguments look like: what its result does
    with mode, torch.no_grad():
        for node in list(graph.nodes):
            if node.target in CONVOLUTIONS and _is_line(node) and not _stays(node):
                changed.update(_as_plane(graph, node))
        for node in list(graph.nodes):
            if node.op == "output":
                moved += _restore(graph, node, changed)
                break
            if node.op == "call_function":
                moved += _follow(graph, node, copies, changed, known)
            if node.name in begin and not node.meta["val"].is_contiguous(memory_format=LAST):
                moved += _begin(graph, node, changed)
    return moved


def _follow(
    graph: torch.fx.Graph, node: Node, copies: dict[Node, Node], changed: set[Node], known: dict[Any, Any]
) -> int:
    """``node``'s value for its arguments in their new order, which is a convolution's own; returns the bytes copied."""
    moved, operands = 0, CONVOLUTIONS.get(node.target, 0)
    stays = operands and _stays(node)
    if operands and not stays and node.args[0].meta["val"].dim() == 4:
        moved = _convolve(graph, node, operands, copies)
    elif not any(a in changed for a in node.all_input_nodes):
        return 0
    elif stays or getattr(node.target, "namespace", "aten") not in ("aten", "prims") or _packet(node) in CONTIGUOUS:
        return _for_others(graph, node, changed)  # an op of the user's may rely on its arguments' strides
    _again(graph, node, known)
    same = all(_same(a, b) for a, b in zip(*(_tensors(node.meta[k]) for k in ("val", "old")), strict=True))
    (changed.discard if same else changed.add)(node)
    return moved


def _stays(node: Node) -> bool:
    """Does a convolution keep NCHW, at the end of a graph, as it makes more of each pixel than it reads: a head of many
    classes? In both orders it is a product, and it reads a copy of what is smaller. (Copies of the larger tensor, back
    and of its gradient, would be at the peak: with all that is saved.)"""
    operands = CONVOLUTIONS[node.target]
    x, w, (stride, pad) = node.args[operands - 2], node.args[operands - 1], node.args[operands + 1 : operands + 3]
    y = node if operands == 2 else node.args[0]
    at_end = all(u.op == "output" for u in y.users) if operands == 2 else y.op == "placeholder"  # type: ignore[union-attr]
    sizes = [*w.meta["val"].shape[2:], *stride]  # type: ignore[union-attr, misc]
    pointwise = set(sizes) == {1} and not any(pad) and not node.args[operands + 4] and node.args[operands + 6] == 1  # type: ignore[arg-type]
    return pointwise and at_end and _bytes(y.meta["val"]) > _bytes(x.meta["val"])  # type: ignore[union-attr]


def _as_plane(graph: torch.fx.Graph, node: Node) -> list[Node]:
    """A convolution over one dimension as one over two, the first of size 1: so ATen gives it to cuDNN. Returns the
    results whose order in memory is another one already: ATen follows operands of planes, and ignores those of lines.
    """
    operands = CONVOLUTIONS[node.target]
    args, moved = list(node.args), []
    with graph.inserting_before(node):
        args[:operands] = [_made(graph, aten.unsqueeze.default, a, 2) for a in args[:operands]]
    first = operands + 1  # stride, padding, dilation, transposed, output_padding
    for i, of_one in ((first, 1), (first + 1, 0), (first + 2, 1), (first + 4, 0)):
        args[i] = [of_one, *args[i]]  # type: ignore[misc]
    node.args = tuple(args)
    results = [node] if operands == 2 else [n for n in node.users if _tensors(n.meta.get("val")) and n.args[1] != 2]
    before, node.meta = node.meta["val"], {**node.meta, "val": _run(node)}
    for n in results:
        old = n.meta["val"] if n is not node else before
        n.meta = {**n.meta, "val": _run(n)}
        with graph.inserting_after(n):
            line = _made(graph, aten.squeeze.dim, n, 2)
        n.replace_all_uses_with(line, delete_user_cb=lambda user, line=line: user is not line)
        line.meta["old"] = old
        if not _same(line.meta["val"], old):
            moved.append(line)
    return moved


def _made(graph: torch.fx.Graph, target: Any, source: Any, dim: int) -> Node:
    node = graph.call_function(target, (source, dim))
    node.meta = {k: v for k, v in source.meta.items() if k != "old"}
    node.meta["val"] = _run(node)
    return node


def _convolve(graph: torch.fx.Graph, node: Node, operands: int, copies: dict[Node, Node]) -> int:
    """The operands of a convolution in channels-last order; returns the bytes of inputs that are copied for it."""
    moved, weight = 0, node.args[operands - 1]
    args = list(node.args)
    for i, operand in enumerate(node.args[:operands]):
        assert isinstance(operand, Node)
        value = operand.meta["val"]
        if value.is_contiguous(memory_format=LAST):
            continue
        if operand not in copies:
            with graph.inserting_before(node):
                copies[operand] = graph.call_function(aten.clone.default, (operand,), {"memory_format": LAST})
            copies[operand].meta = {**operand.meta, "val": aten.clone.default(value, memory_format=LAST)}
            moved += _bytes(value) if operand is not weight else 0
        args[i] = copies[operand]
    node.args = tuple(args)
    return moved


def _begin(graph: torch.fx.Graph, node: Node, changed: set[Node]) -> int:
    """``node`` copied in channels-last order, for all that reads it; returns the bytes copied."""
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder") if node.op == "placeholder" else node
    with graph.inserting_after(last):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": LAST})
    copy.meta = {"old": node.meta["val"], **node.meta}
    copy.meta["val"] = _run(copy)
    other = lambda user: user is not copy and user.op != "output" and not _mutates(user)  # noqa: E731
    node.replace_all_uses_with(copy, delete_user_cb=other)
    changed.add(copy)
    return _bytes(node.meta["val"])


def _for_others(graph: torch.fx.Graph, node: Node, changed: set[Node]) -> int:
    """``node``'s arguments copied, with their old strides; returns the bytes copied."""
    moved = 0
    for a in node.all_input_nodes:
        if a in changed and isinstance(a.meta["val"], torch.Tensor):
            node.replace_input_with(a, _copied(graph, a, node, a.meta["old"]))
            moved += _bytes(a.meta["val"])
    return moved


def _again(graph: torch.fx.Graph, node: Node, known: dict[Any, Any]) -> None:
    """``node``'s value for its arguments' new values; the one before is ``meta["old"]``."""
    target, old = node.target, node.meta.get("old", node.meta.get("val"))
    if target in _STRIDED or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise _Refused
    try:
        value = _run(node, known)
    except (RuntimeError, ValueError):  # a view that this order in memory does not allow
        if target not in (aten.view.default, aten._unsafe_view.default):
            raise _Refused from None
        source = node.args[0]
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        copy.meta = {**source.meta, "val": _run(copy)}  # type: ignore[union-attr]
        node.args = (copy, *node.args[1:])
        value = _run(node)
    node.meta = {**node.meta, "val": value, "old": old}


def _run(node: Node, known: dict[Any, Any] | None = None) -> Any:
    """``node``'s value. The blocks of a model are alike: what ``known`` has is not computed again, which takes four
    times as long as to make a tensor. Of a view the storage counts, too."""
    value = lambda n: n.meta.get("val")  # noqa: E731
    args, kwargs = torch.fx.map_arg(node.args, value), torch.fx.map_arg(node.kwargs, value)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = node.target, spec, *((type(x), _looks(x) if isinstance(x, torch.Tensor) else x) for x in leaves)
    if known is not None and key in known:
        shape, strides, dtype, device = known[key]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    as_if = node.target is aten.convolution.default and made.is_cuda and not torch.backends.cudnn.is_available()
    if as_if and LAST in map(suggest_memory_format, args[:2]):
        made = made.contiguous(memory_format=LAST)  # as cuDNN has it, which this build does not know
    if known is not None and type(made) is FakeTensor and not getattr(node.target, "is_view", True):
        known[key] = _looks(made)
    return made


def _looks(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.device


def _restore(graph: torch.fx.Graph, output: Node, changed: set[Node]) -> int:
    """Outputs with their old strides; returns the bytes copied."""
    moved = 0

    def as_before(node: Node) -> Node:
        nonlocal moved
        if node not in changed or not isinstance(node.meta["val"], torch.Tensor):
            return node
        value, old = node.meta["val"], node.meta["old"]
        moved += _bytes(value)
        return _copied(graph, node, output, old)

    output.args = torch.fx.map_arg(output.args, as_before)
    return moved


def _copied(graph: torch.fx.Graph, node: Node, before: Node, like: torch.Tensor) -> Node:
    """A copy of ``node`` with the strides of ``like``, a dense tensor. Raises _Refused if ``like`` has gaps."""
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d) if like.shape[d] != 1 else -like.numel())
    back = [order.index(d) for d in range(like.dim())]
    with graph.inserting_before(before):
        for target, *more in ((aten.permute.default, order), (aten.clone.default,), (aten.permute.default, back)):
            made = graph.call_function(target, (node, *more))
            if target is aten.clone.default:
                made.kwargs = {"memory_format": torch.contiguous_format}
            made.meta = {k: v for k, v in node.meta.items() if k != "old"}
            made.meta["val"] = _run(made)
            node = made
    if not _same(node.meta["val"], like):
        raise _Refused
    return node


def _tensors(tree: Any) -> list[Any]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One order in memory? (Strides of dimensions of size 1 say nothing.)"""
    return all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n != 1)
