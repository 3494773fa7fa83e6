"""Facts about a part that the Triton printer needs before it prints a line, and the spelling of numbers."""

import math
from dataclasses import dataclass

import torch

from ..ir.expr import Expr
from ..ir.loops import Const, Op, Reduce, Stmt, Store, stmt_args
from ..ir.program import Buffer
from ..schedule.axes import Space
from .triton_ops import SHARP

HALF = (torch.float16, torch.bfloat16)
MANY = 128  # addends: a sum's own roundings outweigh a last-bit difference in each


@dataclass(frozen=True)
class Form:
    """What a statement becomes: ``text`` with ``{0}``, ``{1}`` for the values of ``args``; it calls ``helper``."""

    text: str
    args: tuple[int, ...]
    helper: str = ""


def pointer_name(buffer: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in buffer) + "_ptr"


def blocks(size: Expr, block: int) -> Expr:
    return (size + (block - 1)) // block


def paren(text: str) -> str:
    """Parentheses, unless ``text`` is a single word or number, or has them already."""
    word = text.replace("_", "").replace(".", "").isalnum()
    wrapped = text[0] == "(" and text[-1] == ")" and text.count("(") == 1
    return text if word or wrapped else f"({text})"


def exact_values(space: Space, buffers: dict[str, Buffer]) -> set[int]:
    """Statements of which a last bit could show in what is stored: in full precision, in an integer or truth value."""
    exact: set[int] = set()
    for i, s in reversed(list(enumerate(space.body))):
        if isinstance(s, Store):
            if s.reduce != "sum" and buffers[s.buffer].dtype not in HALF:
                exact.add(s.value)
        elif _is_sharp(space, s) or (i in exact and not _hides(space, s)):
            exact.update(stmt_args(s))
    return exact


def _is_sharp(space: Space, s: Stmt) -> bool:
    if isinstance(s, Reduce):
        return s.kind.startswith("arg") and _is_float(space, s.args[0])
    sharp = isinstance(s, Op) and (s.op in SHARP or (s.op == "cast" and not s.dtype.is_floating_point))
    return sharp and any(_is_float(space, a) for a in stmt_args(s))


def _hides(space: Space, s: Stmt) -> bool:
    """A sum of many does, and a rounding to half precision."""
    if isinstance(s, Reduce):
        return s.kind == "sum" and space.r is not None and space.r.size.hint() >= MANY
    return isinstance(s, Op) and s.op in ("to_f16", "to_bf16")


def _is_float(space: Space, i: int) -> bool:
    return space.body[i].dtype.is_floating_point  # type: ignore[union-attr]


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        value = float(value)
        if math.isnan(value):
            return "float('nan')"
        return repr(value) if math.isfinite(value) else f"float('{'-' if value < 0 else ''}inf')"
    return str(int(value))


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
