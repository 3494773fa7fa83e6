"""What the forward saves for the backward: tags that tell torch's partitioner. (``budget`` limits it.)

- **What is read of an input that the call also writes** is saved. Torch recomputes what is cheap from the inputs: of
  ``y = w * b.exp(); b.mul_(0.5)`` the backward gets ``b`` and takes its exponential. By then ``b`` has its new value:
  its gradient is wrong if the graph writes ``b``, and autograd refuses the tensor if AOTAutograd writes it after the
  graph. A backward that needs ``b`` itself is refused, as in eager.
- **A copy of an input, in another order in memory**, is not saved: the backward has the input, and copies it again.
  Convolutions in channels-last order (``layouts``) read such copies of their weights, and torch saves whatever a call
  of the backward reads, however cheap it is. Eager has none, so they would be memory beyond its own (resnet50, 32
  images: 33 MB; to copy them again takes 66 MB of traffic of some 30 GB).
- **The caller's tensors**, and views of them, cost nothing: saved they hold no memory that could be freed. (A weight's
  transpose, a slice of an index tensor.) Which values are such is noted for ``plan/order``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..options import Options
from .clones import roots
from .random import after_the_forward
from .repeats import storages

aten = torch.ops.aten
LEAST_COPY = 1 << 16  # bytes; for fewer no kernel is worth its launch
CALLERS = "reflib_callers"  # in a node's meta, which goes with it when the graph is cut in two


def save_before_written(joint: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """Tag the readers of inputs that the graph writes, or AOTAutograd after it; what the user's own checkpoint policy
    recomputes is left to it."""
    outputs = joint.graph.output_node().meta.get("desc", ())  # what each is, by AOTAutograd's own descriptors
    after = [o.mutated_input for o in outputs if isinstance(o, InputMutationAOTOutput)]
    given = [n for n in joint.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    for n in given:
        copied = any(u.target is aten.copy_.default and u.args[0] is n for u in n.users)
        for reader in _readers(n) if copied or n.meta.get("desc") in after else ():
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return joint


def _readers(node: Node) -> Iterator[Node]:
    """What reads ``node``'s values, itself or through views."""
    for user in node.users:
        if user.op != "call_function" or user.target is aten.copy_.default:
            continue
        if isinstance(user.meta.get("val"), torch.Tensor) and storages(user) == storages(node):
            yield from _readers(user)
        else:
            yield user


def copy_again(joint: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """Tag large copies of inputs. One that is tagged already (of an input that is written) stays so."""
    root, backward = roots(joint.graph), after_the_forward(joint.graph)
    for node in joint.graph.nodes:
        if node.target is not aten.clone.default or node in backward or not _is_large(node):
            continue
        if root[node.args[0]].op == "placeholder" and not backward.isdisjoint(node.users):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    return joint


def _is_large(node: Node) -> bool:
    """(Of a size known now.)"""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and isinstance(n := made.numel(), int) and n * made.itemsize >= LEAST_COPY


def mark_callers(module: GraphModule, options: Any = None, gpu: bool = False) -> GraphModule:
    """Note which values are the caller's tensors, after all that makes nodes."""
    arguments = [n for n in module.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    given = set().union(*map(storages, arguments))
    for n in module.graph.nodes:
        if n.op != "output" and storages(n) & given:
            n.meta[CALLERS] = True
    return module


def is_callers(n: Node) -> bool:
    """Of a placeholder of a backward graph."""
    return n.name.startswith("primals_") or CALLERS in n.meta
