"""What the Triton printer asks about a part before it prints a line, and the spelling of numbers."""

from __future__ import annotations

import math

import torch

from ..choose.axes import Space
from ..ir.expr import Expr
from ..ir.loops import Const, Index, Load, Op, Reduce, Stmt, Store, stmt_args
from ..ir.program import Buffer
from .triton_ops import SHARP

HALF = (torch.float16, torch.bfloat16)


def pointer_name(buffer: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in buffer) + "_ptr"


def blocks(size: Expr, block: int) -> Expr:
    return (size + (block - 1)) // block


def paren(text: str) -> str:
    """Parentheses, unless ``text`` is a single word or number, or has them already."""
    word = text.replace("_", "").replace(".", "").isalnum()
    wrapped = text[0] == "(" and text[-1] == ")" and text.count("(") == 1
    return text if word or wrapped else f"({text})"


def varying(space: Space) -> list[bool]:
    """For each statement: does it run once per point of r? (``loops.varies_with_r`` over the linear variable)"""
    out: list[bool] = []
    for s in space.body:
        index = s.index if isinstance(s, (Load, Store)) else s.expr if isinstance(s, Index) else None
        inside = index is not None and space.r is not None and index.has(space.r)
        inside = inside or any(out[a] for a in stmt_args(s))
        out.append(inside and not isinstance(s, Reduce))
    return out


def phases(space: Space) -> list[int]:
    out: list[int] = []
    for s in space.body:
        out.append(max((out[a] + isinstance(space.body[a], Reduce) for a in stmt_args(s)), default=0))
    return out


def wants_exact(space: Space, buffers: dict[str, Buffer]) -> bool:
    """Could a last-bit difference in a float32 quotient show in what is stored?"""
    if any(buffers[s.buffer].dtype not in HALF for s in space.stores if _is_float(space, s.value)):
        return True
    return any(_is_sharp(space, s) for s in space.body)


def _is_sharp(space: Space, s: Stmt) -> bool:
    if isinstance(s, Reduce):
        return s.kind.startswith("arg") and _is_float(space, s.args[0])
    if not isinstance(s, Op):
        return False
    sharp = s.op in SHARP or (s.op == "cast" and not s.dtype.is_floating_point)
    return sharp and any(_is_float(space, a) for a in s.args)


def _is_float(space: Space, i: int) -> bool:
    return space.body[i].dtype.is_floating_point  # type: ignore[union-attr]


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        value = float(value)
        if math.isnan(value):
            return "float('nan')"
        return repr(value) if math.isfinite(value) else f"float('{'-' if value < 0 else ''}inf')"
    return str(int(value))


def const(s: Const) -> str:
    return literal(s.value, s.dtype)


def plain(s: Stmt) -> bool:
    """May the constant stand as a bare Python number beside a tensor of its dtype?"""
    if not isinstance(s, Const):
        return False
    if s.dtype == torch.float32:
        return math.isfinite(s.value) and (s.value == 0 or 1e-30 < abs(s.value) < 1e30)
    return s.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64) and 0 <= s.value < 128


def const_mask(text: str) -> str:
    """A constant mask, as a one-bit value."""
    return f"tl.full([], {text}, tl.int1)" if text in ("0", "1") else text


def extreme_text(kind: str, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float('-inf')" if kind == "max" else "float('inf')"
    info = torch.iinfo(dtype)
    return str(info.min if kind == "max" else info.max)
