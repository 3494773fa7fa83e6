"""Every op and every reduction as hand-made LoopNest, with operands: what the C++ and the Triton tests share."""

import itertools
from collections.abc import Callable, Sequence

import torch

from reflib.ir import random  # noqa: F401  (its op)
from reflib.ir.expr import Expr, Var, expr
from reflib.ir.float8 import CASTS
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.ops import OPS, VALUE_DTYPES, value_dtype

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
TAKES = {
    "float": FLOATS, "int": INTS, "bool": (torch.bool,), "intbool": (torch.bool, *INTS),
    "number": (*INTS, *FLOATS), "any": VALUE_DTYPES,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def axis(name: str, size: int | Expr, kind: str = "p") -> Axis:
    return Axis(Var(name, expr(size)), kind)


def contiguous(shape: Sequence[int | Expr]) -> tuple[Expr, ...]:
    """The strides of a contiguous buffer."""
    strides: list[Expr] = []
    step = expr(1)
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


def hostile(
    dtype: torch.dtype, more: Callable[[torch.finfo], Sequence[float]] = lambda f: (), ordinary: int = 24
) -> torch.Tensor:
    """Values at which things go wrong, and twice ``ordinary`` others. ``more``: further values of floats."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True])
    if not dtype.is_floating_point:
        i = torch.iinfo(dtype)
        edge = [0, 1, 2, 3, 7, 8, 31, 63, 64, 100, i.max, i.max - 1, i.min, i.min + 1, -1, -2, -3, -7, -64, -100]
        return torch.tensor([e for e in edge if i.min <= e <= i.max], dtype=dtype)
    f = torch.finfo(dtype)
    edge = [
        0.0, 1, 0.5, 1.5, 2.5, 3, 1e-3, 20, 88.5, 89, 1e5, f.max, f.tiny, f.eps, float("inf"), 0.9999999, 10.0, 1e-20,
        33.3, *more(f),
    ]  # fmt: skip
    values = torch.tensor([*edge, *(-e for e in edge), float("nan")], dtype=dtype)
    others = (torch.randn(ordinary, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(2))
    return torch.cat([values, next(others), 10 * next(others)])


def every_op() -> dict[str, tuple[str, torch.dtype, torch.dtype | None]]:
    """(name, dtype, dtype to cast to) of every op and every dtype it takes, by a key."""
    cases: dict[str, tuple[str, torch.dtype, torch.dtype | None]] = {}
    for name, spec in OPS.items():
        if name == "cast":
            pairs = itertools.permutations(VALUE_DTYPES, 2)
            cases |= {f"cast_{short(a)}_{short(b)}": (name, a, b) for a, b in pairs}
        elif name in ("from_bits", "to_bits"):
            pairs = ((torch.int32, torch.float32), (torch.int64, torch.float64))
            cases |= {f"{name}_{short(a)}": (name, a, b) for a, b in (p if name[0] == "f" else p[::-1] for p in pairs)}
        elif name in CASTS.values():
            continue  # tests/cpu/test_float8.py
        elif name == "philox":
            cases["philox_int64"] = (name, torch.int64, torch.int32)
        else:
            cases |= {f"{name}_{short(dtype)}": (name, dtype, None) for dtype in TAKES[spec.kind]}
    return cases


def operands(name: str, v: torch.Tensor, points: int) -> list[torch.Tensor]:
    """Operands for op ``name`` made of the values ``v``: these and ``points`` between -20 and 20 for one operand,
    every pair for two, a few thousand triples for three."""
    arity = OPS[name].arity
    if arity == 1:
        more = torch.linspace(-20, 20, points, dtype=v.dtype) if v.dtype.is_floating_point else v
        return [torch.cat([v, more])]
    if arity == 2:
        pairs = torch.cartesian_prod(v, v)
        return [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]
    few = v[:: max(1, len(v) // 12)]
    triples = torch.cartesian_prod(few, few, few)
    first = triples[:, 0] if name != "where" else triples[:, 0] > 0
    return [first.contiguous(), triples[:, 1].contiguous(), triples[:, 2].contiguous()]


def eager_traps(name: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where eager's integer division would end the process: the least integer by -1."""
    if args[0].dtype not in INTS or name not in ("floordiv", "truncdiv", "remainder", "fmod"):
        return torch.zeros(len(args[0]), dtype=torch.bool)
    return (args[1] == -1) & (args[0] == torch.iinfo(args[0].dtype).min)


def op_loops(name: str, args: Sequence[torch.Tensor], to: torch.dtype | None = None) -> tuple[LoopNest, Tensors]:
    """``out = name(x0, x1, ...)``, element by element; and the buffers."""
    n = args[0].numel()
    i, b = axis("i", n), BodyBuilder()
    values = [b.load(f"x{k}", i.var, a.dtype) for k, a in enumerate(args)]
    out = b.op(name, *values, dtype=to)
    b.store("out", i.var, out)
    tensors = {f"x{k}": a for k, a in enumerate(args)}
    tensors["out"] = torch.zeros(n, dtype=b.dtype(out))
    return LoopNest(name, (i,), tuple(b.body)), tensors


def reduce_loops(kind: str, pool: torch.Tensor, across: bool, rows: int = 5, n: int = 70) -> tuple[LoopNest, Tensors]:
    """Along memory (x[i, j] over j), or across it (x[j, i] over j), of values out of ``pool``; and the buffers."""
    dtype, g = pool.dtype, torch.Generator().manual_seed(1)
    if dtype.is_floating_point and kind in ("sum", "prod", "m2"):
        pool = torch.randn(50, dtype=dtype, generator=g)
    x = pool[torch.randint(len(pool), (rows, n), generator=g)]
    if dtype.is_floating_point and kind in ("max", "min", "argmax", "argmin"):
        x[:3] = torch.where(x[:3].isnan(), torch.zeros_like(x[:3]), x[:3])  # rows without a NaN as well
    x = x.t().contiguous() if across else x
    i, j, b = axis("i", rows), axis("j", n, "r"), BodyBuilder()
    index = expr(j.var) * rows + expr(i.var) if across else expr(i.var) * n + expr(j.var)
    v = b.load("x", index, value_dtype(dtype))
    args = (v, b.index(j.var)) if kind[:3] == "arg" else (v,)
    out = torch.int64 if kind[:3] == "arg" else dtype
    b.store("out", i.var, b.reduce(kind, *args, dtype=out))
    return LoopNest(kind, (i, j), tuple(b.body)), {"x": x, "out": torch.zeros(rows, dtype=out)}
