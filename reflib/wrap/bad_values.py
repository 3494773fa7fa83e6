"""``Options(check_nan=True)``: after each kernel and call, are the floating-point values that it wrote numbers?

NaN is reported always; infinities where what was read has none, and the kernel has none among its constants (masks are
filled with -inf). What was bad before it was read is told apart: the first bad step of a graph is the one to look at.
NB: TorchInductor's ``nan_asserts`` names the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ReflibError
from ..ir.loops import Const, LoopNest
from ..ir.program import Extern, KernelNode
from ..options import Options
from ..plan import Call, Launch

if TYPE_CHECKING:
    from .cpp import CppPrinter
    from .python import PythonPrinter

LINES = 12  # of the user's code, in a message
# What is told of each step instead: (node, the tensors that it writes) -> None.
watching: list[Callable[[Any, Sequence[Any]], None]] = []


class BadValue(ReflibError):
    """``buffers``: what was found to be bad, by the names of the graph's nodes: the one written, then those read."""

    def __init__(self, message: str, buffers: Sequence[str] = ()):
        super().__init__(message)
        self.buffers = tuple(buffers)


def check_nan(node: KernelNode | Extern, wrote: Sequence[Any], read: Sequence[Any]) -> None:
    """``wrote``: the tensors that ``node`` writes; ``read``: those that it only reads. Raises BadValue."""
    if watching:
        watching[-1](node, wrote)
        return
    names = node.writes()
    others = [b for b in node.reads() if b not in names]
    for name, t in zip(names, wrote):
        what = _bad(t)
        if not what:
            continue
        before = [(b, bad, x) for b, x in zip(others, read) if (bad := _bad(x))]
        if what == "NaN" or not (before or infinite_by_itself(node)):
            before = [(b, bad, x) for b, bad, x in before if what == bad or bad == "NaN"]
            raise BadValue(_message(node, name, what, t, before), [name, *(b for b, _, _ in before)])


def _bad(t: Any) -> str:
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or not (t.is_floating_point() or t.is_complex()):
        return ""
    t = t.float() if t.itemsize < 2 else t  # floats of 8 bits have no isfinite
    if bool(torch.isfinite(t).all()):
        return ""
    return "NaN" if bool(torch.isnan(t).any()) else "infinity"


def infinite_by_itself(node: KernelNode | Extern) -> bool:
    if isinstance(node, Extern):
        values = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    else:
        loops = [p if isinstance(p, LoopNest) else p.epilogue for p in node.parts if not isinstance(p, Extern)]
        values = [s.value for p in loops for s in p.body if isinstance(s, Const)]
        values += [s.other for p in loops for s in p.body if hasattr(s, "other")]
    return any(isinstance(v, float) and math.isinf(v) for v in values)


def _message(node: KernelNode | Extern, name: str, what: str, t: torch.Tensor, before: Sequence[Any]) -> str:
    lines = [f"check_nan: {step_of(node)} wrote {what} into {name} {tuple(t.shape)}, first at {_first(t, what)}"]
    for b, bad, x in before:
        lines.append(f"it was there before: {b}, which this reads, has {bad} first at {_first(x, bad)}")
    if not before:
        passed = "" if node.reads() else " (none)"
        lines.append(f"what it only reads has no {what}{passed}")
    return "\n  ".join(lines) + "".join(origins_of(node))


def step_of(node: KernelNode | Extern) -> str:
    return f"call {node.target}" if isinstance(node, Extern) else f"kernel {node.name}"


def origins_of(node: KernelNode | Extern) -> list[str]:
    """Lines: its ops, by the user's line: the first bad value may come from any of a kernel's."""
    ops: dict[str, dict[str, None]] = {}
    for o in node.origins:
        ops.setdefault(o.source, {})[o.op] = None
    origins = [f"{', '.join(found)}{f' at {source}' if source else ''}" for source, found in ops.items()]
    return [f"\n  {line}" for line in (*origins[:LINES], *(["..."] if len(origins) > LINES else []))]


def _first(t: torch.Tensor, what: str) -> list[int]:
    t = t.float() if t.itemsize < 2 else t
    bad = torch.isnan(t) if what == "NaN" else torch.isinf(t)
    return [int(i) for i in torch.nonzero(bad)[0]]


def named(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """``call``; with ``check_nan``, its errors also say in which modules of the model the values are computed."""
    if not options.check_nan or isinstance(what, torch.fx.GraphModule):
        return call
    nodes = {n.name: n for n in what.graph.nodes}

    def run(args: list) -> Any:
        try:
            return call(args)
        except BadValue as e:
            more = [f"{b}: {about}" for b in e.buffers if (about := module_of(nodes.get(b)))]
            raise BadValue("\n  ".join([str(e), *more]), e.buffers) from None

    return run


def module_of(node: torch.fx.Node | None) -> str:
    """Where in the model a node of a graph is computed."""
    if node is None:
        return ""
    if node.op == "placeholder":
        return "an input of the graph"
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [where for where, _ in stack.values()][-1:]
    return f"computed in {path[0]}" if path else ""


# -- the text of a check --------------------------------------------------------------------------------
def check_in_python(printer: PythonPrinter, step: Launch | Call) -> None:
    printer.put(_text(printer, step)[0])


def check_in_cpp(printer: CppPrinter, step: Launch | Call) -> None:
    """Through Python."""
    text, used = _text(printer.inner, step)
    which = printer._function("check_nan", used, [text], [])
    printer.needs[printer.functions[which]] = "check_nan"
    printer.put(printer._python_call(which, [f"tensor({printer.name(b)})" for b in used], 0))


def _text(printer: PythonPrinter, step: Launch | Call) -> tuple[str, list[str]]:
    """The call of ``check_nan`` after a step, and the buffers that it names."""
    node = step.kernel if isinstance(step, Launch) else step.extern
    wrote, read = node.writes(), [b for b in node.reads() if b not in node.writes()]
    return f"check_nan({printer._bind_constant(node)}, [{', '.join(wrote)}], [{', '.join(read)}])", [*wrote, *read]
