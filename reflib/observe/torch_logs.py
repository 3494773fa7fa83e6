"""PyTorch's own logs, with what reflib made of each graph in them: ``TORCH_LOGS`` and ``TORCH_TRACE``.

``TORCH_LOGS`` takes the names that it has for TorchInductor: ``output_code``, ``kernel_code``, ``fusion``,
``autotuning``, ``ir_pre_fusion``, ``ir_post_fusion``, ``schedule``, ``post_grad_graphs``. With ``TORCH_TRACE=folder``
the same goes into PyTorch's structured logs, which tlparse turns into pages, beside what Dynamo and autograd write
(graphs, guards, graph breaks, recompiles with their reasons).

NB: these are in ``torch._inductor/graph.py``, ``scheduler.py`` and ``select_algorithm.py`` there.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch._logging import getArtifactLogger, trace_structured

from ..ir.printer import format_program
from ..logs import get as logger
from ..pipeline import Stages
from .decisions import Decisions

_LOGGERS = "torch.reflib"  # below torch's own, whose handlers print it


def _kernels(s: Stages) -> str:
    return "\n\n".join(k.source for k in (s.kernels or {}).values())


def _fusion(s: Stages) -> str:
    assert s.fused is not None
    groups = [f"{g.name} ({g.kind}): {', '.join(g.members)}" for g in s.fused.groups]
    refusals = [f"not fused: {r.producer} and {r.consumer}: {r.reason}" for r in s.fused.refusals]
    return "\n".join([*groups, *refusals])


# Name in TORCH_LOGS -> the text.
ARTIFACTS: dict[str, Callable[[Stages], str]] = {
    "post_grad_graphs": lambda s: s.graph.module.print_readable(print_output=False),
    "ir_pre_fusion": lambda s: format_program(s.program) if s.program else "",
    "fusion": _fusion,
    "ir_post_fusion": lambda s: format_program(s.fused.program) if s.fused else "",
    "autotuning": lambda s: repr(Decisions(s.decisions)),
    "schedule": lambda s: format_program(s.scheduled) if s.scheduled else "",
    "output_code": lambda s: f"{s.wrapper or ''}\n\n{_kernels(s)}",
    "kernel_code": _kernels,
}
# In structured logs: (name that tlparse knows, what it says of it, the text). The rest are files that it links.
STRUCTURED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("inductor_post_grad_graph", {}, "post_grad_graphs"),
    ("inductor_output_code", {"filename": "reflib"}, "output_code"),
    *(("artifact", {"name": f"reflib_{name}", "encoding": "string"}, name)
      for name in ("ir_pre_fusion", "fusion", "ir_post_fusion", "autotuning", "schedule")),
)  # fmt: skip


def log(s: Stages) -> None:
    """Everything that is asked for, of one compiled graph. Nothing is raised."""
    try:
        for name, text in ARTIFACTS.items():
            artifact = getArtifactLogger(_LOGGERS, name)
            if artifact.isEnabledFor(logging.DEBUG):
                artifact.debug("%s, by reflib, of the %s graph:\n%s", name, s.graph.name, text(s))
        for kind, about, name in STRUCTURED:
            more = {"name": f"{about['name']}_{s.graph.name}"} if "name" in about else {}
            trace_structured(
                kind, lambda a={**about, **more}: a, payload_fn=lambda n=name: ARTIFACTS[n](s), expect_trace_id=False,
            )  # fmt: skip
    except Exception as e:
        logger("trace").warning("torch's logs lack the %s graph: %s: %s", s.graph.name, type(e).__name__, e)
