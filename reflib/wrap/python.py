"""The Python printer: steps become the text of one function, ``call(args)``.

``args`` is a list which ``call`` empties, so that an input's memory can go as soon as its last reader has run
(AOTAutograd's boxed convention). Helpers the text uses are in ``runtime.py``; kernels and ATen calls are bound to
names once, when the text is executed; a call needs no lookups.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..generate.kernel import Kernel
from ..ir.expr import Atom, BinOp, Expr, Sym, expr, format_expr
from ..ir.program import Assume, Buffer, Extern, Origin, Program, View, full_view, iter_views, kernel_nodes, walk
from ..lower.extern import OUT_VARIANTS
from ..plan import Alloc, Branch, Call, Check, Free, Launch, Let, Note, Plan, Return, Step
from ..seams import Seam

Kernels = Mapping[str, Kernel]
SIGNS = {"at_most": "<=", "at_least": ">=", "equal": "==", "differs": "!="}  # by Assume.kind
# Prints a step of a class that the core does not have, by its name: (PythonPrinter, step) -> None; "check_nan": what
# follows a Launch or a Call under Options(check_nan=True).
STEPS = Seam("wrap.STEPS")


def py(e: Expr | int) -> str:
    """An index expression in Python (whose // and % round down, as ours do)."""

    def atom(a: Atom) -> str:
        if isinstance(a, BinOp):
            x, y = py(a.a), py(a.b)
            return f"int_{a.fn}({x}, {y})" if a.fn in ("max", "min") else f"(({x}) {a.fn} ({y}))"
        return a.key

    return format_expr(expr(e), atom)


def _tuple(items: Any) -> str:
    items = [py(i) for i in items]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


class PythonPrinter:
    """Prints a Plan. ``source`` is the text; ``names`` holds what the text refers to and cannot say itself."""

    def __init__(self, program: Program, plan: Plan, kernels: Kernels, check_nan: bool = False):
        self.program = program
        self.plan = plan
        self.kernels = kernels
        self.check_nan = check_nan
        self.names: dict[str, Any] = {}
        self.addresses: set[str] = set()  # buffers that are ints
        self.header: list[str] = []
        self.lines: list[str] = []
        self.pad = ""
        self.passed_on = passed_on(program)
        self.gpu = sorted({b.device.index or 0 for b in program.buffers.values() if b.device.type == "cuda"})

    def print(self) -> str:
        self._entry()
        body_start = len(self.lines)
        for step in self.plan.steps:
            self._step(step)
        body = self.lines[body_start:]
        if self.gpu:
            streams = [f"    {self.stream(d)} = current_stream({d})" for d in self.gpu]
            body = [f"with device_guard({self.gpu[0]}):", *streams, *("    " + line for line in body)]
        lines = [*self.header, "", "", "def call(args):", *("    " + x for x in [*self.lines[:body_start], *body])]
        return "\n".join(lines) + "\n"

    def stream(self, device: int) -> str:
        return "stream" if len(self.gpu) == 1 else f"stream{device}"

    # -- entry ----------------------------------------------------------------------------------
    def _entry(self) -> None:
        inputs = enumerate(self.program.inputs)
        names = [x if isinstance(x, str) else getattr(x, "name", f"unused_{i}") for i, x in inputs]
        if names:
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        self.lines.append("args.clear()")
        for name in sorted(self._assumed_aligned()):
            self.lines.append(f"aligned_{name} = {name}.data_ptr() % 16 == 0")

    def _assumed_aligned(self) -> set[str]:
        variants = [v for n in walk(self.program.nodes) for v in getattr(n, "variants", ())]
        return {a.what for v in variants for a in v.predicate if a.kind == "aligned"}

    # -- steps ----------------------------------------------------------------------------------
    def _step(self, step: Step) -> None:
        if (own := STEPS.get(type(step).__name__)) is not None:
            own(self, step)
        elif isinstance(step, Let):
            value = f"{step.buffer}.{step.what}({step.dim})"
            if (step.times, step.plus) != (1, 0):
                value = f"({value} - {step.plus}) // {step.times}"
            self.put(f"{step.sym.name} = {value}")
        elif isinstance(step, Check):
            sizes = "".join(f", {s}={s}" for s in checked_symbols(step))
            self.put(f"expect_sizes({' and '.join(map(_condition, step.facts))}, {step.text!r}{sizes})")
        elif isinstance(step, Alloc):
            self._alloc(step)
        elif isinstance(step, Launch):
            self._launch(step)
        elif isinstance(step, Branch):
            self._branch(step)
        elif isinstance(step, Note):
            inside = f"{step.least} <= {py(step.size)} <= {step.most}"
            args = f"{step.what!r}, {py(step.size)}, {step.least}, {step.most}, {step.op!r}"
            self.put(f"if not {inside}: outside({args})")
        elif isinstance(step, Call):
            self._call(step.extern)
        elif isinstance(step, Free):
            self.put(f"del {step.buffer}")
        elif isinstance(step, Return):
            self.put(f"return {self.value(step.outputs)}")
        if self.check_nan and isinstance(step, (Launch, Call)):
            STEPS["check_nan"](self, step)

    def _alloc(self, step: Alloc) -> None:
        b = self.program.buffers[step.buffer]
        if step.reuse is None:
            device = b.device.type
            if device == "cpu" or device == "cuda" and (b.device.index or 0) == self.gpu[0]:
                text = f"alloc_{device}({_tuple(b.shape)}, {_tuple(b.strides)}, {b.dtype})"
            else:
                text = f'alloc({_tuple(b.shape)}, {_tuple(b.strides)}, dtype={b.dtype}, device="{b.device}")'
            self.put(f"{b.name} = {text}")
            return
        old = self.program.buffers[step.reuse]
        if (old.shape, old.strides) == (b.shape, b.strides):
            self.put(f"{b.name} = {old.name}  # takes over its storage")
        else:
            self.put(f"{b.name} = as_view({old.name}, {_tuple(b.shape)}, {_tuple(b.strides)}, 0)")

    def put(self, line: str) -> None:
        self.lines.append(self.pad + line)

    def _branch(self, step: Branch) -> None:
        self.put(f"if {' and '.join(_condition(a) for a in step.predicate)}:")
        self._block(step.then)
        self.put("else:")
        self._block(step.otherwise)

    def _block(self, steps: tuple[Step, ...]) -> None:
        self.pad += "    "
        for s in steps:
            self._step(s)
        if not steps:
            self.put("pass")
        self.pad = self.pad[:-4]

    def _launch(self, step: Launch) -> None:
        kernel = self.kernels[step.kernel.name]
        device = self.program.buffers[step.kernel.writes()[0]].device
        args = [n if n in self.addresses else f"{n}.data_ptr()" for n, _ in kernel.buffers]
        args += [s.name for s in kernel.symbols]
        comment = _comment(step.kernel.parts[0].origins)
        if kernel.grid == 0:
            self.put(f"pass  # {kernel.name}: nothing to do for an empty tensor")
        elif kernel.language == "cpp":
            self.put(f"{kernel.name}({', '.join([*args, 'threads()'])}){comment}")
        elif device.type == "cpu":  # Triton's interpreter
            self.put(f"{kernel.name}({', '.join(['None', py(kernel.grid), *args])}){comment}")
        else:
            index, pad = device.index or 0, self.pad
            if index != self.gpu[0]:  # streams, and Triton's descriptors, belong to the current device
                self.put(f"with device_guard({index}):")
                self.pad += "    "
            self._workspace(step.kernel.workspace, index)
            args += [f"{b.name}.data_ptr()" for b in step.kernel.workspace if b.kind == "scratch"]
            self.put(f"{kernel.name}({', '.join([self.stream(index), py(kernel.grid), *args])}){comment}")
            for b in step.kernel.workspace:
                self.put(f"del {b.name}")
            self.pad = pad

    def _workspace(self, buffers: tuple[Buffer, ...], device: int) -> None:
        for b in buffers:
            if b.kind == "zeros":
                self.put(f"{b.name} = zeros({device}, {self.stream(device)}, {py(b.numel)})")
            else:
                self.put(f"{b.name} = alloc_cuda({_tuple(b.shape)}, {_tuple(b.strides)}, {b.dtype})")

    def _call(self, x: Extern) -> None:
        args = [self.value(a) for a in x.args] + [f"{k}={self.value(v)}" for k, v in x.kwargs]
        comment = _comment(x.origins)
        if x.out is not None:
            overload, keys = x.out
            outs = [self.value(dict(x.kwargs)[k]) if o is None else o for k, o in zip(keys, x.outputs)]
            args += [f"{k}={o}" for k, o in zip(keys, x.outputs) if o is not None]  # (None: it is among kwargs)
            call = f"{self._bind(overload)}({', '.join(args)})"
            known = overload in OUT_VARIANTS.values()
            self.put((call if known else f"given_back([{', '.join(outs)}], {str(overload)!r})({call})") + comment)
            return
        call = f"{self._bind(x.target)}({', '.join(args)})"
        if not any(isinstance(o, (str, View)) for o in x.outputs) and not x.symbols:
            self.put(call + comment)
            return
        many = len(x.outputs) != 1 or self._returns_sequence(x)
        result = f"out_{x.name}"
        self.put(f"{result} = {'flat' if many else ''}({call}){comment}")
        for i, o in enumerate(x.outputs):
            item = f"{result}[{i}]" if many else result
            if isinstance(o, str):
                b, op = self.program.buffers[o], "" if str(x.target)[:5] == "aten." else f", op={str(x.target)!r}"
                expected = f"expect({item}, {_tuple(b.shape)}, {_tuple(b.strides)}{op})"
                self.put(f"{o} = {item if o in self.passed_on else expected}")
        for sym, i, dim in x.symbols:
            item = f"{result}[{i}]" if many else result
            # NB: sizes of the results may be in terms of these, so they are bound before the checks above
            at = len(self.lines) - sum(isinstance(o, str) for o in x.outputs)
            how = "" if dim is None else f".size({dim})" if dim >= 0 else f".stride({~dim})"
            self.lines.insert(at, f"{self.pad}{sym.name} = {item}{how}")
        self.put(f"del {result}")

    def _returns_sequence(self, x: Extern) -> bool:
        """May the result be anything but one tensor or number? (A higher-order op's is a nest, or a dict.)"""
        if isinstance(x.target, torch._ops.OpOverload):
            returns = x.target._schema.returns
            return len(returns) > 1 or (len(returns) == 1 and "[]" in str(returns[0].type))
        return isinstance(x.target, torch._ops.HigherOrderOperator) or not x.symbols

    def _bind(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            name = str(target).replace(".", "_").replace("::", "_")
            line = f"{name} = torch.ops.{target}"
            if line not in self.header:
                self.header.append(line)
            return name
        base = getattr(target, "__name__", type(target).__name__)
        name = "call_" + "".join(c if c.isalnum() else "_" for c in base)
        while self.names.get(name, target) is not target:
            name += "_"
        self.names[name] = target
        return name

    # -- values ---------------------------------------------------------------------------------
    def value(self, v: Any) -> str:
        """Any argument or output as Python text."""
        if isinstance(v, View):
            return self._view(v)
        if isinstance(v, (Expr, Sym)):
            return py(expr(v))
        if isinstance(v, (list, tuple)):
            inner = ", ".join(self.value(x) for x in v)
            return f"[{inner}]" if isinstance(v, list) else f"({inner}{',' if len(v) == 1 else ''})"
        if isinstance(v, dict):
            return "{" + ", ".join(f"{k!r}: {self.value(x)}" for k, x in v.items()) + "}"
        if isinstance(v, (torch.dtype, torch.memory_format, torch.layout)):
            return str(v)
        if isinstance(v, torch.device):
            return f"torch.device({str(v)!r})"
        if isinstance(v, float) and not math.isfinite(v):
            return f'float("{v}")'
        if v is None or isinstance(v, (bool, int, float, str)):
            return repr(v)
        return self._bind_constant(v)

    def _bind_constant(self, v: Any) -> str:
        for name, have in self.names.items():
            if have is v:
                return name
        name = f"object_{len(self.names)}"
        self.names[name] = v
        return name

    def _view(self, v: View) -> str:
        b: Buffer = self.program.buffers[v.buffer]
        if v == full_view(b):
            return b.name
        text = b.name
        if v.dtype != b.dtype:
            text = f"{text}.view({v.dtype})"
        return f"as_view({text}, {_tuple(v.shape)}, {_tuple(v.strides)}, {py(v.offset)})"


def passed_on(program: Program) -> set[str]:
    """Buffers that calls return and that only calls, or the caller, use as a whole, in whichever layout."""
    externs = [n for n in walk(program.nodes) if isinstance(n, Extern)]
    out = {o for n in externs for o in n.outputs if isinstance(o, str)}
    views = [v for n in externs for v in iter_views((n.args, n.kwargs, n.outputs))] + list(iter_views(program.outputs))
    seen = {v.buffer for v in views if v != full_view(program.buffers[v.buffer])}
    saved = {v.buffer for v in iter_views(program.outputs[len(program.outputs) - program.saved :])}
    return out - seen - saved - {b for n in kernel_nodes(program.nodes) for b in n.reads()}


def checked_symbols(check: Check) -> list[str]:
    """What the check is about, for its message."""
    return sorted({s.name for a in check.facts for s in a.what.symbols()})


def _condition(a: Assume) -> str:
    if a.kind == "aligned":
        return f"aligned_{a.what}"
    if a.kind == "divisible":
        return f"({py(a.what)}) % {a.value} == 0"
    return f"{py(a.what)} {SIGNS[a.kind]} {a.value}"


def _comment(origins: tuple[Origin, ...]) -> str:
    if not origins:
        return ""
    ops = list(dict.fromkeys(o.op.removeprefix("aten.") for o in origins))
    return "  # " + ", ".join(ops[:6]) + (", ..." if len(ops) > 6 else "")
