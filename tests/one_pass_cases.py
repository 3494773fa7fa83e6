"""Variances and softmax sums as hand-made LoopNests, on the rows at which one pass goes wrong first: Triton's
interpreter and ahead-of-time compilation share them. Sizes are random, with a fixed seed."""

import itertools
import random
from collections.abc import Callable

import torch
from hand_loops import axis
from triton_cases import BF16, F16, F32, F64, Case

from reflib.ir.expr import Expr, Sym, expr
from reflib.ir.loops import BodyBuilder, LoopNest
from reflib.ir.ops import value_dtype
from reflib.ir.program import Config

LOOPED = Config("looped", xblock=2, rblock=16, num_warps=1)
WIDE = Config("looped", xblock=1, rblock=128, num_warps=2)
PERSISTENT = Config("persistent", xblock=4, rblock=256, num_warps=2)
ROWS = 6
Rows = Callable[[int, torch.Generator], torch.Tensor]  # (length, generator) -> float64 [ROWS, length]


def normal(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, n, generator=g, dtype=torch.float64)


def _outlier(n: int, g: torch.Generator) -> torch.Tensor:
    x = normal(n, g)
    x[:, :1] = 3e4
    return x


def _first_differs(n: int, g: torch.Generator) -> torch.Tensor:
    x = torch.full((ROWS, n), 12.34, dtype=torch.float64)
    x[:, :1] = torch.tensor([[0], [12.35], [-3e4], [1e-3], [12.34], [-12.34]])
    return x


def _broken(n: int, g: torch.Generator) -> torch.Tensor:
    x = normal(n, g)
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        x[row, n // 2 : n // 2 + 1] = value
    return x


VARIANCES: dict[str, Rows] = {
    "normal": normal,
    "large mean": lambda n, g: 1000 + normal(n, g),
    "tiny variance": lambda n, g: 1 + normal(n, g) / 1000,
    "constant": lambda n, g: torch.full((ROWS, n), 1234.567, dtype=torch.float64),
    "outlier first": _outlier,
    "first differs": _first_differs,
    "huge mean": lambda n, g: 1e6 + normal(n, g),
    "growing": lambda n, g: normal(n, g) + torch.arange(n, dtype=torch.float64),
    "inf and nan": _broken,
}


def _bed(dtype: torch.dtype, x: torch.Tensor, across: bool, dynamic: bool) -> tuple[LoopNest, BodyBuilder, int, Case]:
    """A loop nest over rows of ``x``, its builder, the loaded value, and a case with no body yet."""
    m, n = x.shape
    rows, cols = (expr(Sym("s0", 0, None, m)), expr(Sym("s1", 0, None, n))) if dynamic else (expr(m), expr(n))
    i, j = axis("i", rows), axis("j", cols, "r")
    at = expr(j.var) * rows + expr(i.var) if across else expr(i.var) * cols + expr(j.var)
    b = BodyBuilder()
    value = b.load("x", at, value_dtype(dtype))
    x = (x.t() if across else x).to(dtype).contiguous()
    shapes: dict[str, tuple[Expr, ...]] = {"x": (cols, rows) if across else (rows, cols)} if dynamic else {}
    case = Case((), {"x": x}, {"s0": m, "s1": n} if dynamic else {}, shapes=shapes)
    return LoopNest("one_pass", (i, j), ()), b, value, case


def variance_case(
    rows: Rows,
    dtype: torch.dtype,
    n: int,
    across: bool,
    config: Config,
    dynamic: bool,
    masked: bool = False,
    summed: bool = False,
) -> Case:
    """``out``: m2 of each row; ``masked``: of its first half, the others have weight 0; ``summed``: also its sum."""
    loops, b, v, case = _bed(dtype, rows(n, torch.Generator().manual_seed(n)), across, dynamic)
    i, j = loops.axes
    half = b.op("lt", b.index(expr(j.var) * 2), b.index(j.size))
    args = (b.op("where", half, v, b.const(0, b.dtype(v))), b.cast(half, b.dtype(v))) if masked else (v,)
    b.store("out", i.var, b.reduce("m2", *args, dtype=value_dtype(dtype)))
    if summed:
        b.store("sum", i.var, b.reduce("sum", v, dtype=value_dtype(dtype)))
    case.parts = (LoopNest(loops.name, loops.axes, tuple(b.body)),)
    for name in ("out", "sum") if summed else ("out",):
        case.tensors[name] = torch.full((ROWS,), 7, dtype=value_dtype(dtype))
        case.shapes |= {name: (i.size,)} if dynamic else {}
    case.config = config
    return case


def variance_cases() -> dict[str, Callable[[], Case]]:
    random.seed(0)
    out: dict[str, Callable[[], Case]] = {}
    for kind, dtype, across in itertools.product(VARIANCES, (F32, F64, F16, BF16), (False, True)):
        for config in (LOOPED, PERSISTENT):
            n, dynamic, masked = random.randint(2, 255), random.random() < 0.5, random.random() < 0.3
            dynamic = dynamic and config is LOOPED
            summed = random.random() < 0.5
            name = f"{kind}, {dtype}, {across=}, {config.reduction}, {n}, {dynamic=}, {masked=}, {summed=}"
            args = (VARIANCES[kind], dtype, n, across, config, dynamic, masked, summed)
            out[name] = lambda args=args: variance_case(*args)
    for n, config in itertools.product((0, 1, 16, 17), (LOOPED, PERSISTENT)):
        args = (normal, F32, n, False, config, False, False, n % 2 == 0)
        out[f"length {n}, {config.reduction}"] = lambda args=args: variance_case(*args)
    return out


def variance_problem(name: str, case: Case, outs: dict[str, torch.Tensor]) -> str:
    """Wrong: off by more than twice what Welford's recurrence along the rows is off by, in the kernel's dtype, and a
    rounding error of the input."""
    got = outs["out"].double()
    x = case.tensors["x"] if "across=False" in name or "length" in name else case.tensors["x"].t()
    n = (x.shape[1] + 1) // 2 if "masked=True" in name else x.shape[1]
    x = x[:, :n].double()
    exact = (x - x.mean(1, keepdim=True)).square().sum(1) if n else torch.zeros(len(x))
    dtype = case.tensors["out"].dtype
    theirs = _welford(x.to(dtype)).double()
    floor = torch.finfo(dtype).eps * (4 * exact + (exact * x.square().sum(1)).sqrt())  # of a constant row 0
    bad = (got - exact).abs() > 2 * (theirs - exact).abs().max() + floor
    if "constant" in name and "persistent" in name:  # the mean's rounding error, squared
        bad = got > n * (2 * torch.finfo(dtype).eps * x[:, 0]) ** 2
    bad = torch.where(exact.isfinite(), bad, got.isfinite())
    if "sum" in outs and not torch.allclose(outs["sum"], case.expected()["sum"], rtol=1e-4, atol=1e-3, equal_nan=True):
        return f"sums {outs['sum'].tolist()}, want {case.expected()['sum'].tolist()}"
    return f"got {got.tolist()}, want {exact.tolist()}, Welford has {theirs.tolist()}" if bool(bad.any()) else ""


def _welford(x: torch.Tensor) -> torch.Tensor:
    mean, m2 = torch.zeros_like(x[:, 0] if x.shape[1] else x.sum(1)), torch.zeros_like(x.sum(1))
    for k in range(x.shape[1]):
        d = x[:, k] - mean
        mean = mean + d / (k + 1)
        m2 = m2 + d * (x[:, k] - mean)
    return m2


# -- softmax ----------------------------------------------------------------------------------------
def _hostile_rows(n: int, g: torch.Generator) -> torch.Tensor:
    """One kind per row: ordinary; a wide range; nothing but -inf; -inf and others; one +inf; more, or a NaN."""
    x = normal(n, g)
    x[1] = (x[1] * 60).sort().values  # every element is a new maximum
    x[2] = float("-inf")
    x[3, torch.rand(n, generator=g) < 0.7] = float("-inf")
    x[4, n // 3] = float("inf")
    x[5, [n // 2, n - 1, 0]] = torch.tensor([float("inf"), float("inf"), 1.0], dtype=torch.float64)
    return x


def _with_nan(n: int, g: torch.Generator) -> torch.Tensor:
    x = 1000 * normal(n, g)
    x[0, n // 2], x[1, 0], x[2, n - 1] = float("nan"), float("nan"), float("inf")
    return x


SOFTMAX_ROWS = {"hostile": _hostile_rows, "nan": _with_nan, "normal": normal}
SUMS = ("plain", "guarded", "weighted", "masked", "two", "kept", "noisy")


def sum_case(kind: str, rows: Rows, dtype: torch.dtype, n: int, across: bool, config: Config, dynamic: bool) -> Case:
    """``out`` = sum of exp(x - max x); ``guarded``: an infinite maximum counts as 0; ``weighted``: times x^2;
    ``masked``: of the even columns; ``two``: also the weighted sum, less the minimum of max and 3; ``kept``: also a sum
    that does need the maximum first; ``noisy``: times random words, which are a result, as their sum and greatest."""
    loops, b, v, case = _bed(dtype, rows(n, torch.Generator().manual_seed(n)), across, dynamic)
    i, j = loops.axes
    t = value_dtype(dtype)
    top = b.reduce("max", v, dtype=t)
    at = b.op("where", b.op("isinf", top), b.const(0, t), top) if kind == "guarded" else top
    e = b.op("exp", b.op("sub", v, at))
    if kind in ("weighted", "two"):
        e = b.op("mul", e, b.op("mul", v, v))
    if kind == "masked":
        even = b.op("eq", b.index(expr(j.var) % 2), b.const(0, torch.int64))
        e = b.op("where", even, e, b.const(0, t))
    if kind == "noisy":
        at = b.index(expr(i.var) * j.size + expr(j.var))
        word = b.op("philox", b.const(2**40 + 7, torch.int64), b.const(3, torch.int64), at, dtype=torch.int32)
        noise = b.cast(b.op("and", word, b.const(63, torch.int32)), t)
        e = b.op("mul", e, noise)
    outs = [b.reduce("sum", e, dtype=t)]
    if kind == "noisy":
        first = b.reduce("argmax", noise, b.index(expr(j.var)), dtype=torch.int64)
        outs += [b.reduce("sum", noise, dtype=t), b.cast(first, t)]
        b.store("words", expr(i.var) * j.size + expr(j.var), word)
        case.tensors["words"] = torch.full((ROWS, n), 7, dtype=torch.int32)
        case.shapes |= {"words": (i.size, j.size)} if dynamic else {}
    if kind == "two":
        lower = b.op("minimum", top, b.const(3, t))
        outs.append(b.reduce("sum", b.op("exp", b.op("sub", v, lower)), dtype=t))
    if kind == "kept":
        outs.append(b.reduce("sum", b.op("abs", b.op("sub", v, top)), dtype=t))
    for k, o in enumerate(outs):
        b.store(f"out{k}", i.var, o)
        case.tensors[f"out{k}"] = torch.full((ROWS,), 7, dtype=t)
        case.shapes |= {f"out{k}": (i.size,)} if dynamic else {}
    case.parts = (LoopNest(loops.name, loops.axes, tuple(b.body)),)
    case.config = config
    return case


def sum_cases() -> dict[str, Callable[[], Case]]:
    random.seed(1)
    out: dict[str, Callable[[], Case]] = {}
    for kind, (how, rows), dtype in itertools.product(SUMS, SOFTMAX_ROWS.items(), (F32, F64, BF16)):
        n, across, dynamic = random.randint(3, 300), random.random() < 0.5, random.random() < 0.5
        config = random.choice((LOOPED, WIDE))
        name = f"{kind}, {how}, {dtype}, {n}, {across=}, rblock {config.rblock}, {dynamic=}"
        args = (kind, rows, dtype, n, across, config, dynamic)
        out[name] = lambda args=args: sum_case(*args)
    return out


def sum_problem(name: str, case: Case, got: dict[str, torch.Tensor]) -> str:
    """Against the definition, as the IR's interpreter has it; not finite where that is not."""
    wrong = []
    for b, w in case.expected().items():
        g, w = got[b].double(), w.double()
        rtol = 1e-12 if case.tensors["x"].dtype == torch.float64 else 2e-5
        if not torch.allclose(g, w, rtol=rtol, atol=1e-30, equal_nan=True):
            wrong.append(f"{b}: got {g.tolist()}, want {w.tolist()}")
    return "; ".join(wrong)
