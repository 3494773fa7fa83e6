"""The one text form of the IR. It follows the grammars in the docstrings of ``loops`` and ``program``.

It is for reading and for goldens; ``data.to_data`` is the form that can be read back.
"""

from typing import Any

import torch

from .expr import Expr
from .loops import Acc, Const, Index, Indirect, Load, LoopNest, Op, Reduce, Scan, Stmt, Store
from .program import Buffer, Choice, Extern, KernelNode, Node, Program, Template, Variant, View


def format_program(program: Program) -> str:
    """The whole program: inputs and buffers with their layouts, nodes in order, outputs."""
    names = [i if isinstance(i, str) else "_" if i is None else str(i) for i in program.inputs]
    lines = [f"program({', '.join(names)})"]
    lines += [f"  {format_buffer(b)}" for b in program.buffers.values()]
    lines += ["  " + line for n in program.nodes for line in format_node(n).splitlines()]
    lines.append(f"  return {', '.join(_leaf(o) for o in program.outputs)}")
    return "\n".join(lines)


def format_buffer(b: Buffer) -> str:
    """``buf0: temp float32[4, 8] strides (8, 1) on cpu``."""
    return f"{b.name}: {b.kind} {dtype_name(b.dtype)}{_sizes(b.shape)} strides {_tuple(b.strides)} on {b.device}"


def format_node(node: Node) -> str:
    if isinstance(node, LoopNest):
        return format_loop_nest(node)
    if isinstance(node, Extern):
        return format_extern(node)
    if isinstance(node, Template):
        return format_template(node)
    if isinstance(node, KernelNode):
        lines = [line for part in node.parts for line in format_node(part).splitlines()]
        return "\n".join([f"kernel {node.name} {node.config.reduction}", *("  " + line for line in lines)])
    kind, note = ("choice", f"  # {node.op}") if isinstance(node, Choice) else ("variants", "")
    lines = [f"{kind} {node.name}: {', '.join(node.outputs)}{note}"]
    lines += ["  " + line for v in node.variants for line in _format_variant(v)]
    lines += [f"  # {name}: {status}: {why}" for name, status, why in node.failed] if isinstance(node, Choice) else []
    return "\n".join(lines)


def _format_variant(v: Variant) -> list[str]:
    predicate = " and ".join(f"{a.kind}({a.what}, {a.value})" for a in v.predicate) or "always"
    lines = [f"variant {predicate}:  # {v.name}", *("  " + format_buffer(b) for b in v.buffers)]
    return lines + ["  " + line for n in v.nodes for line in format_node(n).splitlines()]


def format_template(t: Template) -> str:
    """The product on the first line, then the epilogue's statements."""
    how = dtype_name(t.dtype) + (f" {t.precision}" if t.dtype == torch.float32 else "")
    how += f"; {t.tiling or 'no tiling chosen'}" + ("; closed" if t.closed else "")
    first = f"template {t.name}: acc = {_leaf(t.a)} @ {_leaf(t.b)}  # {how}"
    return "\n  ".join([first, *(x for p in (*t.prologues, t.epilogue) for x in format_loop_nest(p).splitlines())])


def format_loop_nest(loops: LoopNest) -> str:
    """A LoopNest over several lines; the first names it, its axes and the ATen ops it came from."""
    axes = ", ".join(f"{a.var.name} < {a.size} : {a.kind}" for a in loops.axes)
    ops = " ".join(dict.fromkeys(o.op for o in loops.origins))
    lines = [f"loops {loops.name} [{axes}] {{" + (f"  # {ops}" if ops else "")]
    lines += ["  " + format_stmt(i, s) for i, s in enumerate(loops.body)]
    return "\n".join([*lines, "}"])


def format_stmt(i: int, s: Stmt) -> str:
    """One statement; ``i`` is its position, which is its value's name."""
    if isinstance(s, Store):
        how = {"": "=", "atomic": "atomic +="}.get(s.reduce, "+=")
        return f"store {s.buffer}[{s.index}] {how} %{s.value}"
    return f"%{i} = {_right_side(s)} : {dtype_name(s.dtype)}"


def format_extern(e: Extern) -> str:
    outs = ", ".join(_leaf(o) for o in e.outputs)
    args = [_leaf(a) for a in e.args] + [f"{k}={_leaf(v)}" for k, v in e.kwargs]
    notes = [f"mutates {', '.join(e.mutates)}"] if e.mutates else []
    notes += ["effect"] if e.effect else []
    notes += [f"{s} from output {o}" + ("" if d is None else f" dim {d}") for s, o, d in e.symbols]
    comment = f"  # {'; '.join(notes)}" if notes else ""
    return f"extern {e.name}: {outs or '_'} = {e.target}({', '.join(args)}){comment}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _right_side(s: Load | Const | Index | Acc | Op | Indirect | Reduce | Scan) -> str:
    if isinstance(s, Load):
        mask = "" if s.mask is None else f" if %{s.mask} else {s.other}"
        return f"load {s.buffer}[{s.index}]{mask}"
    if isinstance(s, Const):
        return f"const {s.value}"
    if isinstance(s, Index):
        return f"index {s.expr}"
    if isinstance(s, Acc):
        return "acc"
    if isinstance(s, Indirect):
        how = " skips" if s.skips else "" if s.checked else " unchecked"
        return f"indirect {'' if s.wraps else '0 <= '}%{s.arg} < {s.size}{how}"
    values = " ".join(f"%{a}" for a in s.args)
    if isinstance(s, Op):
        return f"{s.op} {values}"
    return f"{'reduce' if isinstance(s, Reduce) else 'scan'} {s.kind} {values}"


def _leaf(x: Any) -> str:
    if isinstance(x, View):
        offset = "" if x.offset == 0 else f" + {x.offset}"
        return f"{x.buffer}{offset}{_sizes(x.shape)}{_tuple(x.strides)}"
    if isinstance(x, Expr):
        return str(x)
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(_leaf(v) for v in x) + ")"
    return str(x)


def _sizes(sizes: tuple[Expr, ...]) -> str:
    return "[" + ", ".join(str(s) for s in sizes) + "]"


def _tuple(items: tuple[Expr, ...]) -> str:
    return "(" + ", ".join(str(s) for s in items) + ")"
