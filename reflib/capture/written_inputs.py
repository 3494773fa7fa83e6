"""What a forward reads of an input that the call also writes is saved for the backward, never computed again there.

torch's partitioner recomputes what is cheap from the inputs: of ``y = w * b.exp(); b.mul_(0.5)`` the backward gets
``b`` and takes its exponential. By then ``b`` has its new value: its gradient is wrong if the graph writes ``b``,
and autograd refuses the changed tensor if AOTAutograd writes it after the graph. Eager has saved what it needs, so the
readers are marked as to be saved; a backward that needs ``b`` itself is refused, as in eager.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from ..options import Options

aten = torch.ops.aten


def save_before_written(joint: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Tag the readers for the partitioner; what the user's own checkpoint policy recomputes is left to it."""
    for given in _written(joint):
        for reader in _readers(given):
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return joint


def _written(joint: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Inputs that the graph writes, or AOTAutograd after it."""
    outputs = joint.graph.output_node().meta.get("desc", ())  # what each is, by AOTAutograd's own descriptors
    after = [o.mutated_input for o in outputs if isinstance(o, InputMutationAOTOutput)]
    given = [n for n in joint.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    return [n for n in given if n.meta.get("desc") in after or any(_copies_to(u, n) for u in n.users)]


def _copies_to(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is aten.copy_.default and user.args[0] is node


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads ``node``'s values, itself or through views."""
    for user in node.users:
        if user.op != "call_function" or user.target is aten.copy_.default:
            continue
        if _storage(user) == _storage(node):
            yield from _readers(user)
        else:
            yield user


def _storage(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else node
