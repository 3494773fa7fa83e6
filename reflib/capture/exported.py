"""A program of ``torch.export`` as a Graph: whole, with the exporter's guards; no Dynamo runs at call time.

torch.export returns the new value of each buffer and argument that the model writes to, for the caller to copy back.
Here the graph writes it itself, as AOTAutograd's graphs do: ``copy_`` onto the input, in the end. So ``fuse.in_place``
finds it, and a cache is updated where it is.

**A program captured on a CPU, for a GPU** (``retargeted``). Its graph is captured once more when it is decomposed, from
fakes of its inputs: so it is enough that those lie on the GPU, and that the graph says so wherever it names a device
(factory functions, copies, checks, regions of autocast). What the model asked while it was captured (``x.is_cuda``) has
been answered for a CPU, and ``to("cpu")`` looks like ``to(x.device)`` there: both go to the GPU. Kernels that only a
CPU has are refused: they are in a program that was decomposed for it.

NB: ``torch.export.passes.move_to_device_pass`` moves the program itself and its weights, to a device that is here.
"""

import copy
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._functorch import config
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .advice import first_lines
from .copies import copied
from .graph import Graph
from .launch_checks import check_kept
from .returned import views_back
from .storages import counted_from, reaches_beyond

WRITTEN = {"BUFFER_MUTATION": "weight", "USER_INPUT_MUTATION": "argument"}  # in a signature: what is written to
BEGINS = "begins"  # of an input from the begin of whose storage elements are counted: so many before its first
Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
_OF_A_CPU = ("_for_cpu", "mkldnn", "onednn")
_CPU = torch.device("cpu")


@config.patch(functionalize_rng_ops=False)
def exported_graph(program: Any, decompositions: dict, rewrite: Rewrite = lambda m: m) -> tuple[Graph, Any]:
    """An ``ExportedProgram`` as a Graph (parameters, buffers and constants first among its inputs), and its signature.
    The graph returns what the signature does, but for new values of buffers and arguments, which it writes.
    ``rewrite``: of its graph, before it is decomposed (``pipeline.before_autograd``).

    Raises CaptureError for what is no ExportedProgram, writes to what is in another input's memory, or sees more of
    a storage than the tensor that is in it.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise CaptureError(f"expected a torch.export.ExportedProgram, got {type(program).__name__}")
    env = _shape_env(program)
    before = len(env.guards) if env is not None else 0
    given = program.graph.find_nodes(op="placeholder")
    counted = {given[i].name for i in counted_from(program.graph_module)}  # (once functional, views are of new values)
    program = _rewritten(program, rewrite)
    program = _functional(program, decompositions)  # in the same ShapeEnv: what it assumes is found there
    if env is not None:
        env.guards[before:] = [g for g in env.guards[before:] if not _of_two_or_more(g.expr)]
    _within(program.graph_module)
    _writes(program)
    for node in (n for n in program.graph.find_nodes(op="placeholder") if n.name in counted):
        node.meta[BEGINS] = node.meta["val"].storage_offset()
    held = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name in ("PARAMETER", "BUFFER")}
    return Graph(program.graph_module, "inference", frozenset(held), ranges=ranges_of(program)), program


def _rewritten(program: Any, rewrite: Rewrite) -> Any:
    """A copy of ``program`` with its graph rewritten. Calls in it may be no ATen ops until it is decomposed."""
    new = copy.copy(program)
    new._graph_module = rewrite(copied(program.graph_module))
    return new


def _functional(program: Any, decompositions: dict) -> Any:
    """Decomposed, and so is what ``torch.library.triton_op`` made, on a GPU: on a CPU it has another implementation."""
    vals = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    gpu = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in vals)
    try:
        made = program.run_decompositions(decompositions, decompose_custom_triton_ops=gpu)
        check_kept(program.graph_module, made.graph_module)
        return made
    except AssertionError as e:
        tensors = {n: t for n, t in program.state_dict.items() if isinstance(t, torch.Tensor) and t.data_ptr()}
        places = [t.untyped_storage().data_ptr() for t in tensors.values()]
        shared = ", ".join(n for n, at in zip(tensors, places) if places.count(at) > 1) or "two arguments"
        what = f"it writes to tensors that share memory with others ({shared}): give each memory of its own"
        why = f"torch.export cannot make the program functional ({first_lines(e)})"
        raise CaptureError(f"{why}; most likely {what}") from e


def _writes(program: Any) -> None:
    """What the graph returns only for the caller to copy it onto an input is copied there by the graph. A result that
    is a view of an argument's new value becomes a view of the argument. (Of a buffer's it does not: the buffer may have
    been assigned rather than written to, and earlier results must not change.)"""
    module, signature = program.graph_module, program.graph_signature
    out = module.graph.output_node()
    inputs = {s.arg.name: s for s in signature.input_specs}
    nodes = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
    buffers = {s.target: nodes[name] for name, s in inputs.items() if s.target is not None}
    results, arguments = [], []
    for spec, value in zip(signature.output_specs, out.args[0], strict=True):
        if spec.kind.name not in WRITTEN:
            results.append(value)
            continue
        to = buffers[spec.target] if spec.kind.name == "BUFFER_MUTATION" else nodes[spec.target]
        with module.graph.inserting_before(out):
            copy = module.graph.call_function(torch.ops.aten.copy_.default, (to, value))
        copy.meta = {**value.meta, "val": to.meta["val"]}
        arguments += [to] if to.name == spec.target else []
    views = ((views_back(module.graph, value, to) for to in arguments) for value in results)
    out.args = (tuple(next(filter(None, v), value) for v, value in zip(views, results)),)
    module.recompile()


def _shape_env(program: Any) -> Any:
    """The ShapeEnv of its symbols; None if all sizes are numbers."""
    for n in program.graph.nodes:
        val = n.meta.get("val")
        for s in (val, *(val.shape if isinstance(val, torch.Tensor) else ())):
            if isinstance(s, torch.SymInt):
                return s.node.shape_env
    return None


def ranges_of(exported: Any) -> dict[str, tuple[int, int | None]]:
    """What an ExportedProgram promises of its symbols: (least, most or None) by name. (A ShapeEnv says 2 or more of
    every size that varies; torch.export takes 0 and 1 back in.)"""
    return {str(s): _limits(r) for s, r in exported.range_constraints.items() if s.is_integer}


def _limits(r: Any) -> tuple[int, int | None]:
    least = int(r.lower) if r.lower > -(2**63) else -(2**63)  # (PyTorch says that its own infinity is finite)
    return least, int(r.upper) if r.upper.is_finite and r.upper < 2**62 else None


def _of_two_or_more(e: Any) -> bool:
    """A condition on one symbol that every number from 2 on meets. Tracing assumes it of every dynamic size;
    torch.export does not check it."""
    if not (isinstance(e, sympy.Rel) and e.lhs.is_Symbol and e.rhs.is_Integer):
        return False
    least = {sympy.StrictGreaterThan: 1, sympy.GreaterThan: 2, sympy.Unequality: 1}.get(type(e))
    return least is not None and int(e.rhs) <= least


# -- views of storages ----------------------------------------------------------------------------------
def _within(module: torch.fx.GraphModule) -> None:
    """A kernel is given where a tensor begins, and knows no storage."""
    for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        root = n
        while root.args and isinstance(root.args[0], torch.fx.Node):
            root = root.args[0]
        if reaches_beyond(n.meta.get("val"), root.meta.get("val")):
            what = f"{n.name} has elements of the storage of {root.name} that are not in {root.name}"
            raise CaptureError(f"{what}: give the model the tensor that has them, or a clone() of {root.name}")


# -- a program for another device ---------------------------------------------------------------------------
def retargeted(program: Any, device: torch.device, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of ``program``, whose tensors lie on the CPU, for ``device``. ``fake``: stands for a weight there. Raises
    CaptureError naming a kernel that ``device`` does not have."""
    new = copy.copy(program)
    new._graph_module = _moved(program.graph_module, device)
    new._state_dict = pytree.tree_map_only(torch.Tensor, fake, dict(program.state_dict))
    new._constants = pytree.tree_map_only(torch.Tensor, fake, dict(program.constants))
    return new


def _moved(module: torch.fx.GraphModule, device: torch.device) -> torch.fx.GraphModule:
    module = copied(module)
    for name, inner in list(module.named_children()):
        if isinstance(inner, torch.fx.GraphModule):
            setattr(module, name, _moved(inner, device))

    def place(a: Any) -> Any:
        return device if a == _CPU and isinstance(a, torch.device) else a

    def value(t: torch.Tensor) -> torch.Tensor:
        if t.device != _CPU:
            return t
        with t.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    for node in module.graph.nodes:
        if any(word in str(node.target) for word in _OF_A_CPU):
            raise CaptureError(
                f"the program calls {node.target}, which only a CPU has: export it for {device.type}, or pass it as "
                "torch.export.export returns it, without run_decompositions"
            )
        node.args = torch.fx.node.map_aggregate(node.args, place)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, place)
        if "autocast" in getattr(node.target, "__name__", ""):
            node.args = tuple(device.type if a == "cpu" else a for a in node.args)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, value, node.meta["val"])
    module.recompile()
    return module


# -- what of a program is so because the model was in training mode -------------------------------------------
def in_training(program: Any) -> tuple[str, ...]:
    """The ops of an ExportedProgram that would do something else after ``model.eval()``, and what they do. (A package
    would go on doing it.)"""
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
