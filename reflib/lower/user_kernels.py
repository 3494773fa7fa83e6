"""Triton kernels of the user's: ``torch.library.triton_op``, ``wrap_triton``, and ``kernel[grid](...)`` under Dynamo.

PyTorch captures a call as ``triton_kernel_wrapper_functional``: it returns the new values of the tensors that the
kernel writes (which it finds in Triton's IR). Here each of these is a buffer of its own, a copy, made by a loop nest,
of what the kernel is given; a tensor that was never filled needs none. The launch is an Extern that writes to them,
whose target is a :class:`~reflib.ir.user_kernel.UserKernel`: it keeps its place, and is dropped only with the program.
``fuse.in_place`` drops a copy whose original is not needed any more: then the kernel writes where the user meant it to.
``schedule`` makes a kernel of it like any other: our launcher, packages and C++ need nothing else.

Arguments are what Triton would have specialized the kernel for. A number known now is a constant of its type (1: a
``constexpr``); a size first known at run time is computed from the program's sizes. What is not supported stays
PyTorch's launch, with the reason.

NB: TorchInductor compiles the kernel with its own signature and arguments in their order (``UserDefinedTritonKernel``,
``define_user_defined_triton_kernel``), and lets Triton's autotuner choose among its configurations at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

from .. import logs
from ..capture.launch_arguments import defaults
from ..errors import LoweringError
from ..ir.expr import Expr, expr
from ..ir.program import Choice, Extern, Variant, View, full_view
from ..ir.user_kernel import UserKernel
from .body import nest
from .context import LoweringContext
from .kernel_text import KernelText, literal
from .lower import origin
from .rules import RULES, Unsupported

CLUSTER = 8  # thread blocks
SCRATCH = 128  # bytes of global memory for a descriptor
_EMPTY = ("empty", "new_empty")
_AMD = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")  # settings that other GPUs do not have
# Given at a launch (or by @triton.heuristics, which win), or by a configuration; else:
_SETTINGS: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
Piece = str | int


def without_launcher(node: torch.fx.Node) -> None:
    """Where it was launched from ends with the user's line: Dynamo looks into ``@triton.heuristics``."""
    trace = node.meta.get("stack_trace") or ""
    if "triton/runtime/" in trace:
        node.meta["stack_trace"] = trace[: trace.rindex("File", 0, trace.index("triton/runtime/"))]


def launched(cx: LoweringContext, *, kernel_idx: int, **how: Any) -> dict[str, View]:
    """The new values of what the kernel writes, by argument. Raises LoweringError for bad input, naming the kernel."""
    kernel = kernel_side_table.get_kernel(kernel_idx)
    function, configs = _function(kernel)
    without_launcher(cx.node)
    cx = replace(cx, origin=replace(origin(cx.node), op=function.__name__))
    _check(cx, kernel, function)
    try:
        return _launched(cx, function, configs, **how)
    except Unsupported as e:
        why = f"the Triton kernel {function.__name__}: {e}"
        if cx.low.within - {""}:  # a candidate for an op: it alone is out; PyTorch's launch could not be measured
            raise LoweringError(why) from None
        raise Unsupported(why) from None
    except LoweringError as e:
        raise LoweringError(f"{e} ({_where(cx)[1]})") from None


def _launched(
    cx: LoweringContext,
    function: Any,
    configs: list[Any],
    constant_args_idx: int,
    grid: Any,
    tma_descriptor_metadata: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    tensors_to_clone: Any,
) -> dict[str, View]:
    if not cx.on_gpu:
        raise Unsupported("there is no code of it for a CPU")
    if not tensors_to_clone:
        raise Unsupported("it writes to no tensor that the program knows")
    name, start = cx.low.next_node(), len(cx.low.nodes)
    fakes = cx.node.kwargs["kwargs"]
    written: dict[View, View] = {}  # one that is given twice is one piece of memory for the kernel, as it is eagerly
    for n in tensors_to_clone:
        if kwargs[n] not in written:
            written[kwargs[n]] = _new(cx, n, kwargs[n], fakes[n].meta["val"])  # type: ignore[index, union-attr]
    given = {n: written.get(v, v) if isinstance(v, View) else v for n, v in kwargs.items()}
    given |= kernel_side_table.get_constant_args(constant_args_idx)
    call = KernelCall(cx, function, given, tma_descriptor_metadata)
    if set(tensors_to_clone) == {n for n, v in given.items() if isinstance(v, View)}:
        logs.get("fallback").info("%s: every tensor it is given counts as written (%s)", *_where(cx))
    buffers = tuple(v.buffer for v in written.values())
    if len(configs) == 1 or not cx.low.choices or cx.low.options.batch_invariant:
        cx.low.nodes.append(call.extern(cx.low.next_node(), configs[0], grid[0], buffers))
    else:  # each with copies of its own: so it can be run again, and is measured with what it is given
        copies = [replace(n, name=f"{name}_copy{i}") for i, n in enumerate(cx.low.nodes[start:])]
        del cx.low.nodes[start:]
        cx.low.nodes.append(_choice(call, name, copies, configs, grid, buffers))
    return {n: written[kwargs[n]] for n in tensors_to_clone}


def _choice(
    call: KernelCall, name: str, copies: list[Any], configs: list[Any], grid: Any, buffers: tuple[str, ...]
) -> Choice:
    """Among the configurations of ``@triton.autotune``; the first one that is supported is the default. (Those with a
    cluster come last: not all GPUs have them.)"""
    made: dict[str, Variant] = {}
    failed: list[tuple[str, str, str]] = []
    for config, sizes in zip(configs, grid, strict=True):
        named = config.all_kwargs() | config.kwargs
        title = ", ".join(f"{k}={v}" for k, v in named.items() if k != "num_ctas" or v != 1)
        try:
            made[title] = Variant(title, (*copies, call.extern(f"{name}_launch", config, sizes, buffers)))
        except Unsupported as e:
            failed.append((title, "unsupported", str(e)))
    if not made:
        raise Unsupported(failed[0][2])
    origin = call.cx.origin
    alone = [v for v in made.values() if "num_ctas=" not in v.name]
    last = [v for v in made.values() if v not in alone]
    return Choice(name, origin.op, buffers, (*alone, *last), tuple(failed), custom=True, origins=(origin,))


def _function(kernel: Any) -> tuple[Any, list[Any]]:
    """The ``@triton.jit`` function, and its configurations (None: it has none)."""
    from triton.runtime import Autotuner, JITFunction

    configs = list(kernel.configs) if isinstance(kernel, Autotuner) else [None]
    function = kernel.fn if isinstance(kernel, Autotuner) else kernel
    if type(function) is not JITFunction:  # (a Gluon kernel's class is one of its)
        raise Unsupported(f"a {type(function).__name__}, not a compiled Triton function")
    return function, configs


def _check(cx: LoweringContext, kernel: Any, function: Any) -> None:
    """What Triton would find out at the first call."""
    unknown = [k for k in getattr(kernel, "keys", ()) if k not in function.arg_names]
    if unknown:
        raise LoweringError(
            f"the key {unknown[0]!r} of @triton.autotune is no argument of the Triton kernel {' ('.join(_where(cx))}); "
            f"its arguments are {', '.join(function.arg_names)}"
        )


def _where(cx: LoweringContext) -> tuple[str, str]:
    return cx.origin.op, cx.origin.source or "its line is not known"


def _new(cx: LoweringContext, name: str, v: View, fake: torch.Tensor) -> View:
    """A buffer that the kernel writes, with what it is given in it. What is in one that was just allocated is open."""
    _on_gpu(cx, name, v)
    if any(s == 0 and n != 1 for s, n in zip(v.strides, v.shape)):
        raise Unsupported(f"it writes to {name}, whose elements share memory")
    new = full_view(cx.low.new_buffer(f"{cx.origin.op}_{name}", fake))
    makers = [n for n in cx.low.nodes if isinstance(n, Extern) and v.buffer in n.outputs]
    if not any(str(n.target).partition(".")[2].startswith(_EMPTY) for n in makers):
        nest(replace(cx, origin=replace(cx.origin, op="clone")), lambda k: k.load(v), new)
    return new


def _on_gpu(cx: LoweringContext, name: str, v: View) -> None:
    if cx.low.buffers[v.buffer].device.type == "cpu" and cx.low.options.target is None:
        raise Unsupported(f"its argument {name} is on the CPU")


@dataclass
class KernelCall:
    """One call: ``given`` by the user's argument names. Its pieces of text, and ``values``, which they number."""

    cx: LoweringContext
    function: Any
    given: Mapping[str, Any]
    descriptors: Mapping[str, Any]

    def extern(self, name: str, config: Any, grid: Any, written: tuple[str, ...]) -> Extern:
        """The launch with one of the kernel's configurations."""
        self.values: list[Any] = []
        self.scratch = 0
        given = {**self.given, **(config.kwargs if config is not None else {})}
        own = {p.name: p for p in self.function.params}
        # (Triton passes a default as a number of a type; in a call it would be a constant, which has the other's type.)
        given |= {n: v for n, v in defaults(self.function, given).items() if not own[n].is_constexpr}
        asked = {n: given.get(n, getattr(config, n, value)) for n, value in _SETTINGS.items()}
        if unknown := [n for n in given if n not in own and n not in (*_AMD, *_SETTINGS)]:
            raise Unsupported(f"the setting {unknown[0]}")
        warps, stages = int(asked.pop("num_warps")), int(asked.pop("num_stages"))
        settings = _settings(asked)
        self.text = KernelText(self.function.__name__)
        function = self.text.function(self.function)
        call = tuple((f"{n}=", *self.argument(p, n, given[n])) for n, p in own.items() if n in given)
        source = str(self.text)
        self.scratch += SCRATCH * source.count("make_tensor_descriptor(")
        self.scratch *= dict(settings).get("num_ctas", 1)
        target = UserKernel(function, source, call, warps, stages, self.scratch, settings)
        self._check_grid(grid)
        sizes = tuple(map(expr, grid))
        return Extern(name, target, tuple(self.values), (("grid", sizes),), (), written, origins=(self.cx.origin,))

    def _check_grid(self, grid: Sequence[Any]) -> None:
        """CUDA's limits, where the sizes are known. (Our launcher has room for fewer programs in the last axis.)"""
        named = f"the Triton kernel {self.cx.origin.op} has a grid of"
        if not grid:
            raise LoweringError(f"{named} no sizes: give it one to three")
        for axis, (size, most) in enumerate(zip(grid, (2**31 - 1, 2**16 - 1, 2**16 - 1))):
            if not isinstance(size, (int, Expr)) or isinstance(size, Expr) and self.cx.low.symbols.is_float(size):
                kind = "float" if isinstance(size, Expr) else type(size).__name__
                raise LoweringError(f"{named} {size} programs in axis {axis}, a {kind}: give it an int (triton.cdiv)")
            if (known := expr(size).constant) is not None and not 0 <= known <= most:
                raise LoweringError(f"{named} {size} programs in axis {axis}; the limit is {most}")
        sizes = tuple(map(expr, grid))
        if sizes[2].constant is not None and sizes[2].constant >= 2**15:
            raise Unsupported(f"a grid of {sizes[2]} programs in axis 2")

    # -- arguments ------------------------------------------------------------------------------------
    def argument(self, p: Any, name: str, value: Any) -> tuple[Piece, ...]:
        """As Triton's launcher would pass it to the parameter ``p``."""
        if name in self.descriptors:
            return self._descriptor(name, value)
        if p.is_constexpr:
            return (self._constant(name, value),)
        if isinstance(value, (tuple, list)):
            inner = [piece for v in value for piece in (*self.argument(p, name, v), ", ")]
            return ("(", *inner, ")")
        if isinstance(value, View):
            _on_gpu(self.cx, name, value)
            return (self._value(value),)
        if isinstance(value, Expr) and self.cx.low.symbols.is_float(value):
            number = self.cx.float_tensor(value, self.cx.device)
            return ("tl.load(", self._value(number), f").to(tl.{p.annotation_type or 'float32'})")
        if isinstance(value, Expr) and value.constant is None:
            wide = {"i64": ".to(tl.int64)", "i32": ".to(tl.int32)"}.get(p.annotation_type, "")
            return (self._value(value), wide)
        value = int(value) if isinstance(value, Expr) else value
        return (_number(value, p) if type(value) in (bool, int, float) else self._constant(name, value),)

    def _value(self, value: View | Expr) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _constant(self, name: str, value: Any) -> str:
        """A compile-time constant's text."""
        value = int(value) if isinstance(value, Expr) else value
        text = self.text.named(value, value.__name__) if hasattr(value, "cache_key") else literal(value)
        if text is None:
            tensor = isinstance(value, torch.Tensor)  # PyTorch keeps tensors in tuples out of the graph
            what = "tuple with a tensor in it" if tensor else type(value).__name__
            raise Unsupported(f"its argument {name} is a {what}")
        return text

    def _descriptor(self, name: str, v: View) -> tuple[Piece, ...]:
        """A descriptor that the host would make (TMA), made by the kernel."""
        kind, details = self.descriptors[name]
        if kind != "stable":
            raise Unsupported(f"its argument {name} is a descriptor of Triton's old interface; use TensorDescriptor")
        self.scratch += SCRATCH
        sizes = list(_joined(self._value(e) for e in v.shape))
        strides = list(_joined(self._value(e) for e in v.strides[:-1]))
        block = ", ".join(str(int(b)) for b in details[0])
        return (
            "tl.make_tensor_descriptor(", self._value(v), ", [", *sizes, "], [", *strides,
            ", 1" if strides else "1", f"], [{block}])",
        )  # fmt: skip


def _settings(asked: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    if (asked["num_ctas"] or 1) > CLUSTER:
        raise Unsupported(f"a cluster of {asked['num_ctas']} thread blocks; all GPUs that have clusters take {CLUSTER}")
    return tuple((n, int(value)) for n, value in asked.items() if value and (n, value) != ("num_ctas", 1))


def _joined(pieces: Any) -> Iterator[Piece]:
    for i, piece in enumerate(pieces):
        yield from ((", ", piece) if i else (piece,))


_TYPES = {"u1": "int1", **{f"{a}{n}": f"{b}{n}" for a, b in (("i", "int"), ("u", "uint")) for n in (8, 16, 32, 64)},
          "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # fmt: skip


def _number(value: bool | int | float, p: Any) -> str:
    """A number that is no ``constexpr``, in the type that Triton gives it: what the parameter says, or its own."""
    if type(value) is int and value == 1 and not (p.do_not_specialize or p.annotation_type):
        return "1"
    if isinstance(value, bool):
        own = "u1"
    elif isinstance(value, float):
        own = "fp32"
    else:
        own = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full((), {text}, tl.{_TYPES[p.annotation_type or own]})"


RULES[triton_kernel_wrapper_functional] = launched
