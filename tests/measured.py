"""Small programs to measure: buffers, and relu(x @ w)."""

from collections.abc import Sequence
from typing import Any

import torch

from reflib.ir.expr import IntLike, Var, expr
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.program import Buffer, Extern, Program, full_view
from tests.hand_loops import contiguous

CPU = torch.device("cpu")


def buffer(
    name: str, shape: Sequence[IntLike], dtype: torch.dtype, kind: str = "temp", device: torch.device = CPU
) -> Buffer:
    """Contiguous."""
    shape = tuple(map(expr, shape))
    return Buffer(name, dtype, device, shape, contiguous(shape), kind)


def matmul_relu(
    m: IntLike, n: int, k: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU,
    target: Any = torch.ops.aten.mm.default,
) -> Program:  # fmt: skip
    """relu(x @ w): a call of ``target``, then a LoopNest. Symbols in ``m`` are inputs, too."""
    m = expr(m)
    shapes = {"x": (m, k), "w": (k, n), "p": (m, n), "y": (m, n)}
    kinds = {"x": "input", "w": "input"}
    t = {name: buffer(name, shape, dtype, kinds.get(name, "temp"), device) for name, shape in shapes.items()}
    call = Extern("mm", target, (full_view(t["x"]), full_view(t["w"])), (), ("p",))
    i, j = Var("i", m), Var("j", expr(n))
    b = BodyBuilder()
    value = b.load("p", expr(i) * n + j, torch.float32)
    b.store("y", expr(i) * n + j, b.op("maximum", value, b.const(0.0, torch.float32)))
    relu = LoopNest("relu", (Axis(i, "p"), Axis(j, "p")), tuple(b.body))
    return Program((*m.symbols(), "x", "w"), t, (call, relu), (full_view(t["y"]),))
