"""Launches of the user's Triton kernels that are captured, and cannot be right (plugs into ``pipeline.CAPTURED``)."""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..logs import get as logger
from .advice import first_lines
from .launch_arguments import launches_seen
from .storages import value
from .triton_there import triton_of_gpu

_LAUNCH = "triton_kernel_wrapper_"


def check_launches(module: torch.fx.GraphModule, options: Any) -> torch.fx.GraphModule:
    """``module``. Raises CaptureError naming the kernel and its line, for what Dynamo lets pass: a grid that is a
    tensor, which nothing later can use; a kernel that stores, but to none of the tensors that it is given, which
    AOTAutograd drops; one in a ``triton_op`` that writes to what ``mutates_args`` leave out, which PyTorch forbids."""
    ops: dict[Any, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if _is_launch(node):
            _check_launch(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            ops.setdefault(node.target, node)
    for node in ops.values():
        _check_promises(node)
    return module


def exported_with_launches(*what: Any, **how: Any) -> Any:
    """``torch.export.export``. Raises CaptureError for a kernel that Dynamo saw launched, and that is not there."""
    with launches_seen() as seen:
        program = torch.export.export(*what, **how)
    launched = [n for n in _nodes(program.graph_module) if getattr(n.target, "__name__", "").startswith(_LAUNCH)]
    for name in sorted(seen - {*map(_kernel, launched)}):
        raise CaptureError(_drops(f"the Triton kernel {name}"))
    return program


def check_kept(before: torch.fx.GraphModule, after: torch.fx.GraphModule) -> None:
    """Raises CaptureError for a launch in a branch or a loop of ``before`` whose results are used there, and that is
    not in ``after``, which was made of it: what it would have written was garbage."""
    kept = {_identity(n) for n in _nodes(after) if getattr(n.target, "__name__", "").startswith(_LAUNCH)}
    for node in set(filter(_is_launch, _nodes(before))) - {*before.graph.nodes}:
        if _identity(node) not in kept and _is_used(node):
            raise CaptureError(_drops(_named(node)))


def _drops(kernel: str) -> str:
    return (
        f"torch.export of PyTorch {torch.__version__} drops the launch of {kernel}, which is in a branch of torch.cond "
        "or in a loop: launch it in a torch.library.triton_op, or outside"
    )


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for m in module.modules():
        yield from m.graph.nodes if isinstance(m, torch.fx.GraphModule) else ()


def _identity(node: torch.fx.Node) -> tuple[Any, Any]:
    return node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]


def _is_used(node: torch.fx.Node) -> bool:
    """Is a tensor that it is given used later?"""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return any(order[user] > order[node] for x in node.all_input_nodes for user in x.users)


def _is_launch(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == f"{_LAUNCH}mutation"


def _check_launch(node: torch.fx.Node) -> None:
    sizes = (size for grid in node.kwargs["grid"] for size in grid if isinstance(size, torch.fx.Node))  # type: ignore[union-attr]
    if any(isinstance(value(size), torch.Tensor) for size in sizes):
        raise CaptureError(
            f"the grid of {_named(node)} is a tensor: a grid is made of numbers; n.item() is one, and waits for the GPU"
        )
    if why := _stores_elsewhere(node):
        raise CaptureError(
            f"{_named(node)} {why}: a kernel cannot store to an address that it reads from memory; give it the tensor"
        )


def _check_promises(call: torch.fx.Node) -> None:
    """Of a call of a ``triton_op``: what the kernels write that are launched in it."""
    from torch._library import custom_ops, triton
    from torch.fx.experimental.proxy_tensor import make_fx

    schema = call.target._schema  # type: ignore[union-attr]
    known = getattr(triton, "triton_ops_to_kernels", ())  # (where PyTorch has it elsewhere, nothing is checked)
    op = getattr(custom_ops, "OPDEFS", {}).get(schema.name) if schema.name in known else None
    if op is None:
        return
    names = [a.name for a in schema.arguments]
    given: dict[str, Any] = torch.fx.map_arg({**dict(zip(names, call.args)), **call.kwargs}, value)  # type: ignore[assignment]
    said = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    kept = {_memory(t): n for n, v in given.items() if n not in said for t in pytree.tree_leaves(v)}
    modes = (t.fake_mode for t in pytree.tree_leaves(given) if isinstance(t, FakeTensor))
    try:
        with triton_of_gpu(), next(modes, nullcontext()), torch.no_grad():
            traced = make_fx(lambda given: op._abstract_fn(**given))(given)  # type: ignore[misc]
    except Exception as e:  # AOTAutograd, which traces it next, says what is wrong
        logger("compile").info("what %s writes is not known: %s", schema.name, first_lines(e))
        return
    for node in filter(_is_launch, traced.graph.nodes):
        given = _given(node)
        written = _written(node)
        if len(written) > 1 and written == {n for n, v in given.items() if isinstance(v, torch.Tensor)}:
            written = _stored_to(node)  # so PyTorch says of all kernels that it cannot follow as well
        for name in sorted(written):
            if argument := kept.get(_memory(given[name])):
                promise = ", ".join(map(repr, sorted({*said, argument})))
                raise CaptureError(
                    f"{_named(node, call)} writes to {argument}, which the triton_op {schema.name} does not say: "
                    f"declare it with mutates_args={{{promise}}}, or write to a copy"
                )


def _memory(x: Any) -> int | None:
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None


def _given(node: torch.fx.Node) -> dict[str, Any]:
    return torch.fx.map_arg(node.kwargs["kwargs"], value)  # type: ignore[return-value]


def _named(node: torch.fx.Node, where: torch.fx.Node | None = None) -> str:
    """``the Triton kernel NAME (FILE:LINE)``. ``where``: the node whose line it is, if it is another one's."""
    name = _kernel(node)
    lines = re.findall(r'File "([^"]+)", line (\d+)', (where or node).meta.get("stack_trace") or "")
    path, number = lines[-1] if lines else ("", "")
    file = "cell" if "ipykernel_" in path else os.path.basename(path)  # as in lower.origin
    return f"the Triton kernel {name} ({f'{file}:{number}' if lines else 'its line is not known'})"


def _kernel(node: torch.fx.Node) -> str:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    while hasattr(kernel.fn, "fn"):  # (one that is tuned has a Triton function)
        kernel = kernel.fn
    return kernel.fn.__name__


def _written(node: torch.fx.Node) -> set[str]:
    """The arguments that a launch writes to; all tensors where PyTorch cannot tell."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    index, constants, descriptors = (
        node.kwargs[n] for n in ("kernel_idx", "constant_args_idx", "tma_descriptor_metadata")
    )
    with triton_of_gpu():
        return set(wrap.get_mutated_tensors(index, constants, _given(node), descriptors))  # type: ignore[arg-type]


def _ir(node: torch.fx.Node) -> tuple[str, list[str]]:
    """Of the kernel that is launched: its IR, and its arguments that are tensors, in order."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    kernel: Any = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    given = _given(node)
    known = given | wrap.kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    with triton_of_gpu():
        ttir, names = wrap.generate_ttir(kernel, known, node.kwargs["tma_descriptor_metadata"])  # type: ignore[arg-type]
        return str(ttir), [n for n in names if isinstance(given.get(n), torch.Tensor)]


def _stored_to(node: torch.fx.Node) -> set[str]:
    """The tensors that the kernel's stores name; none where functions are called, whose arguments have other names."""
    text, names = _ir(node)
    pointers = re.findall(r"(%\w+): !tt\.ptr", text)
    if text.count("tt.func ") != 1 or len(pointers) != len(names):
        return set()
    return {name for name, p in zip(names, pointers) if any(p in found for _, found in _places(text))}


def _stores_elsewhere(node: torch.fx.Node) -> str:
    """Does the kernel store to what is none of its tensors? What comes of it; "" if nothing is known against it."""
    given = _given(node)
    tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
    lost = bool(tensors) and not _written(node)
    if not lost and not any(t.dtype in (torch.int64, torch.uint64) for t in tensors):  # (none may hold addresses)
        return ""
    text, _ = _ir(node)
    if lost and ("tt.store" in text or "tt.atomic" in text or "tt.descriptor_store" in text):
        return "stores to none of the tensors that it is given, so PyTorch drops its launch"
    elsewhere = any(loaded and not found for loaded, found in _places(text))
    return "stores to what is none of the tensors that it is given" if elsewhere else ""


def _places(ttir: str) -> Iterator[tuple[bool, set[str]]]:
    """For each store of a kernel (its IR as text): is its place made of a loaded number, and of which arguments?"""
    made: dict[str, tuple[str, list[str]]] = {}  # a value: the operation, and what it is of
    stores, arguments = [], {*re.findall(r"(%\w+): !tt\.ptr", ttir)}
    for line in ttir.splitlines():
        for name, first in re.findall(r"(%[\w#]+) = (%[\w#]+)", line):  # what a loop carries
            made[name] = "", [first]
        if m := re.match(r'\s*(?:(%\w+)(?::\d+)? = )?"?([a-z_]+\.\w+)"?(.*)', line):
            name, op, rest = m.groups()
            values = re.findall(r"%[\w#]+", rest)
            stores += values[:1] if op.startswith(("tt.store", "tt.atomic")) else []
            if name and "iter_args" not in line:
                made[name] = op, values[:1] if op == "tt.addptr" else values
    for place in stores:
        seen, left = set[str](), [place]
        while left:
            if (value := left.pop()) not in seen:
                seen.add(value)
                op, operands = made.get(value, ("an argument", []))
                left += [] if op == "tt.load" else operands
        ops = {made[v][0] for v in seen if v in made}
        yield "tt.load" in ops, seen & arguments
