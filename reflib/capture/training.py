"""What of a captured graph is so because the model was in training mode. A package would go on doing it."""

from typing import Any

import torch


def in_training(program: Any) -> tuple[str, ...]:
    """The ops of an ExportedProgram that would do something else after ``model.eval()``, and what they do."""
    found: dict[str, str] = {}
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload) and (does := _does(_given(node))):
                found[node.target._schema.name.partition("::")[2]] = does
    return tuple(f"{op} {does}" for op, does in sorted(found.items()))


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of the schema."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), node.args)) | node.kwargs


def _does(given: dict[str, Any]) -> str:
    if given.get("dropout_p"):  # of attention, which has no other flag
        return "draws random numbers"
    if not (given.get("training") or given.get("train")):
        return ""
    if "running_mean" in given:  # a norm without any takes the batch's in inference too
        return "updates its running statistics" if given["running_mean"] is not None else ""
    return "draws random numbers" if given.get("p", given.get("dropout", 1)) else ""
