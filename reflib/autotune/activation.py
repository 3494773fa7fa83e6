"""Matmuls and their activation as one call of the library.

cuBLASLt can apply relu and the tanh form of GELU, and add a bias, where it writes the product. ATen offers that as one
operator, ``_addmm_activation`` (PyTorch PR 74490), which no eager program calls by itself. So where an activation is
the only reader of a product on a CUDA device, the two become one choice: its variants are the matmul's, each with
the activation behind it, and that call. A matmul without a bias gets a bias of zeros, which costs a row of reads.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..fuse.dependencies import dependencies
from ..ir.expr import expr
from ..ir.loops import LoopNest, Op
from ..ir.program import Buffer, Choice, Extern, Node, Program, Variant, View, full_view
from ..ir.rename import renamed

aten = torch.ops.aten


def with_activations(program: Program) -> Program:
    """Every matmul followed by its activation as one Choice. Assumes a legal order, and that nothing is fused."""
    for choice in [n for n in program.nodes if isinstance(n, Choice)]:
        program = with_activation(program, choice)
    return program


def with_activation(program: Program, choice: Choice) -> Program:
    """One matmul and its activation as one Choice, of the same name; ``program`` itself where none follows."""
    reader = _activation_after(program, choice)
    return program if reader is None else _joined(program, choice, *reader)


def _activation_after(program: Program, choice: Choice) -> tuple[LoopNest, bool] | None:
    """The one reader of a plain matmul's result, if it is an activation of cuBLASLt's; and is it GELU?"""
    default = choice.variants[0].nodes[0]
    if len(choice.outputs) != 1 or not isinstance(default, Extern) or not _plain_product(program, default):
        return None
    made = choice.outputs[0]
    depends = dependencies(program)
    readers = depends.readers.get(made, [])
    if made in depends.needed or len(readers) != 1 or len(depends.writers[made]) != 1:
        return None
    node = program.nodes[readers[0]]
    if not isinstance(node, LoopNest) or len(node.origins) != 1 or len(node.stores()) != 1 or len(node.loads()) != 1:
        return None
    load, store = node.loads()[0], node.stores()[0]
    before, after = program.buffers[load.buffer], program.buffers[store.buffer]
    same = load.index == store.index and before.dtype == after.dtype and before.extent == after.extent
    if not same or after.kind != "temp" or load.mask is not None or len(depends.writers[after.name]) != 1:
        return None
    ops = {s.op for s in node.body if isinstance(s, Op)}
    if node.origins[0].op == "aten.relu.default":
        return node, False
    if node.origins[0].op == "aten.gelu.default" and "tanh" in ops:
        return node, True
    return None


def _plain_product(program: Program, e: Extern) -> bool:
    """aten.mm, or aten.addmm of a vector, unscaled, of matrices on a CUDA device, into contiguous memory."""
    if e.target not in (aten.mm.default, aten.addmm.default):  # of another op the first result may be unused: None
        return False
    out = program.buffers[e.outputs[0]]
    if not _has_cublaslt(out.device) or e.kwargs or out.strides != (out.shape[1], expr(1)):
        return False
    if e.target is aten.mm.default:
        return True
    bias = e.args[0]
    return isinstance(bias, View) and bias.shape == out.shape[1:] and bias.strides == (expr(1),)


def _has_cublaslt(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _joined(program: Program, choice: Choice, activation: LoopNest, gelu: bool) -> Program:
    """The choice writes the activation's values; the activation's own buffer is no more."""
    made, gone = choice.outputs[0], activation.writes()[0]
    default, out = choice.variants[0].nodes[0], program.buffers[made]
    assert isinstance(default, Extern)
    if default.target is aten.mm.default and out.shape[1].constant is None:
        return program  # a matmul without a bias needs one of zeros, whose length is not known
    raw = f"{made}_raw"  # in every variant: only one of them will be
    variants = [_followed(program, a, activation, made, gone, raw) for a in choice.variants]
    buffers, constants = dict(program.buffers), dict(program.constants)
    if default.target is aten.mm.default:
        zeros = Buffer(f"{made}_no_bias", out.dtype, out.device, (out.shape[1],), (expr(1),), "const")
        buffers[zeros.name] = zeros
        with unset_fake_temporarily():  # compiling goes on under a fake mode
            device = out.device if torch.cuda.is_available() else "cpu"  # for a target it need not be there
            constants[zeros.name] = torch.zeros(int(out.shape[1]), dtype=out.dtype, device=device)
        args = (full_view(zeros), *default.args)
    else:
        args = default.args
    name = f"aten._addmm_activation ({'gelu' if gelu else 'relu'})"
    call = Extern(
        f"{choice.name}_activation", aten._addmm_activation.default, args, (("use_gelu", gelu),), (made,),
        out=(aten._addmm_activation.out, ("out",)), origins=(*choice.origins, *activation.origins),
    )  # fmt: skip
    whole = replace(
        choice, op=f"{choice.op} + {'gelu' if gelu else 'relu'}",
        variants=(variants[0], Variant(name, (call,)), *variants[1:]),
    )  # fmt: skip
    del buffers[gone]
    nodes = [whole if n is choice else n for n in program.nodes if n is not activation]
    nodes = _with_name(nodes, {gone: made})
    outputs = tuple(replace(o, buffer=made) if isinstance(o, View) and o.buffer == gone else o for o in program.outputs)
    return replace(program, nodes=tuple(nodes), buffers=buffers, outputs=outputs, constants=constants)


def _followed(program: Program, a: Variant, act: LoopNest, made: str, gone: str, raw: str) -> Variant:
    """``a`` into a buffer of its own, then the activation from there."""
    nodes, buffers = renamed(a.nodes, a.buffers, {made: raw})
    (then,), _ = renamed((act,), (), {made: raw, gone: made, act.name: f"{act.name}_behind"})
    temp = replace(program.buffers[made], name=raw)
    return replace(a, nodes=(*nodes, then), buffers=(*buffers, temp))


def _with_name(nodes: Iterable[Node], names: dict[str, str]) -> list[Node]:
    """The nodes with buffers renamed, in a Choice's variants too."""
    old = set(names)
    out: list[Node] = []
    for n in nodes:
        if isinstance(n, Choice) and old & {*n.reads(), *n.writes()}:
            variants = tuple(replace(a, nodes=tuple(_with_name(a.nodes, names))) for a in n.variants)
            out.append(replace(n, variants=variants))
        elif old & {*n.reads(), *n.writes()}:
            out += renamed((n,), (), names)[0]
        else:
            out.append(n)
    return out
