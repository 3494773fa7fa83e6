"""Kernels as hand-made LoopNests, to be generated in Triton: every op, every reduction, every shape of kernel.

One list serves four readers: Triton's interpreter (no GPU), ahead-of-time compilation, a real GPU, and C++ (test_cpp).
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from hand_loops import (
    FLOATS,
    axis,
    contiguous,
    eager_traps,
    every_op,
    hostile,
    op_loops,
    operands,
    reduce_loops,
    short,
)

from reflib.generate.compile_triton import Binary, compile_kernel
from reflib.generate.kernel import Kernel
from reflib.generate.triton import generate_triton
from reflib.ir.expr import Expr, Sym, expr
from reflib.ir.interpret import run_loops
from reflib.ir.loops import BodyBuilder, LoopNest, Origin
from reflib.ir.ops import value_dtype
from reflib.ir.program import Buffer, Config
from reflib.options import Options
from reflib.schedule.heuristics import choose_configs
from reflib.target import Target, parse_target

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
BOOL, I64, I32 = torch.bool, torch.int64, torch.int32


@dataclass
class Case:
    """One kernel: its parts, what is in the buffers before, sizes by symbol. ``config``: instead of the heuristic's."""

    parts: tuple[LoopNest, ...]
    tensors: dict[str, torch.Tensor]
    sizes: dict[str, int] = field(default_factory=dict)
    config: Config | None = None
    shapes: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    fallback: bool = False

    @property
    def buffers(self) -> dict[str, Buffer]:
        out = {}
        for name, t in self.tensors.items():
            shape = self.shapes.get(name, tuple(map(expr, t.shape)))
            strides = tuple(map(expr, t.stride()))
            if name in self.shapes:
                strides = contiguous(shape)
            out[name] = Buffer(name, t.dtype, t.device, shape, strides, "temp" if name.startswith("out") else "input")
        return out

    def kernel(self, name: str, target: str = "sm_90") -> Kernel:
        """The kernel of the fast variant or its fallback, or of ``config``."""
        t = parse_target(target)
        v = choose_configs(self.parts, self.buffers, t, Options())[-1 if self.fallback else 0]
        aligned = tuple(a.what for a in v.predicate if a.kind == "aligned")
        return generate_triton(name, self.parts, self.config or v.kernel.config, self.buffers, t, aligned)

    def expected(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """What the interpreter makes of it."""
        memory = {n: storage(t) for n, t in self.tensors.items()}
        for p in self.parts:
            run_loops(p, memory, self.sizes)
        return {n: memory[n].as_strided(t.shape, t.stride()) for n, t in self.tensors.items()}


def storage(t: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor's storage, flat."""
    count = t.untyped_storage().nbytes() // t.itemsize
    return t.as_strided((count,), (1,), 0).clone()


def compile_all(kernels: Iterable[Kernel], target: Target) -> dict[str, Binary]:
    """By name; several at once, since Triton's passes and ptxas release the GIL."""
    kernels = list(kernels)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip((k.name for k in kernels), pool.map(lambda k: compile_kernel(k, target), kernels)))


def rand(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def op_case(name: str, dtype: torch.dtype, to: torch.dtype | None = None) -> Case:
    args = operands(name, hostile(dtype), points=1001)
    fine = ~eager_traps(name, args)
    loops, tensors = op_loops(name, [a[fine] for a in args], to)
    return Case((loops,), tensors, config=Config("none", xblock=4096))


def op_cases() -> dict[str, Callable[[], Case]]:
    """name -> maker, for every op and every dtype it takes."""
    return {key: lambda case=case: op_case(*case) for key, case in every_op().items()}


# -- reductions -------------------------------------------------------------------------------------
PERSISTENT = Config("persistent", xblock=4, rblock=128, num_warps=4)
TURNED = replace(PERSISTENT, extras=(("across", "persistent"),))
LOOPED = Config("looped", xblock=2, rblock=16, num_warps=1)


def reduce_case(kind: str, dtype: torch.dtype, across: bool, config: Config) -> Case:
    loops, tensors = reduce_loops(kind, hostile(dtype), across)
    return Case((loops,), tensors, config=config)


def reduce_cases() -> dict[str, Callable[[], Case]]:
    kinds = {
        "sum": (F32, F64, I64, I32, torch.int16), "prod": (F32, I64),
        "max": (*FLOATS, I32, torch.uint8), "min": (F32, I64),
        "any": (BOOL,), "all": (BOOL,), "argmax": (F32, I64), "argmin": (F32, torch.int8),
    }  # fmt: skip
    out: dict[str, Callable[[], Case]] = {}
    for kind, dtypes in kinds.items():
        configs = (PERSISTENT, LOOPED) if kind.startswith("arg") else (PERSISTENT, LOOPED, TURNED)
        for dtype, across, config in itertools.product(dtypes, (False, True), configs):
            turned = "_turned" if config is TURNED else ""
            name = f"{kind}_{short(dtype)}_{'across' if across else 'along'}_{config.reduction}{turned}"
            out[name] = lambda kind=kind, dtype=dtype, across=across, config=config: reduce_case(
                kind, dtype, across, config
            )
    return out


# -- whole kernels ----------------------------------------------------------------------------------
def pointwise(
    shape: Sequence[int], loads: dict[str, tuple[torch.Tensor, Callable[..., Expr]]], fn: Callable[..., int],
    out: torch.dtype = F32, out_index: Callable[..., Expr] | None = None, **more: object,
) -> Case:  # fmt: skip
    """``out[...] = fn(builder, *values)`` over a grid; each load is a tensor and its index of the axes' variables."""
    axes = tuple(axis(f"i{k}", n) for k, n in enumerate(shape))
    vs = [expr(a.var) for a in axes]
    b = BodyBuilder()
    values = [b.load(n, f(*vs), value_dtype(t.dtype)) for n, (t, f) in loads.items()]
    result = fn(b, *values)
    flat = sum((v * s for v, s in zip(vs, contiguous([expr(n) for n in shape]))), expr(0))
    b.store("out", out_index(*vs) if out_index else flat, result)
    tensors = {n: t for n, (t, _) in loads.items()}
    tensors["out"] = torch.zeros(tuple(shape), dtype=out)
    return Case((LoopNest("pointwise", axes, tuple(b.body)),), tensors, **more)  # type: ignore[arg-type]


def add_one(b: BodyBuilder, x: int) -> int:
    return b.op("add", x, b.const(1, b.dtype(x)))


def norm(
    kind: str, m: int, n: int, dtype: torch.dtype = F32, config: Config | None = None, dynamic: bool = False,
    across: bool = False, out: str = "out",
) -> Case:  # fmt: skip
    """softmax, layer_norm or rms_norm of ``m`` rows; ``dynamic``: both sizes are symbols; ``across``: a row's elements
    are not neighbours in memory; ``out``: ``x`` to write over the input."""
    rows, cols = (expr(Sym("s0", 0, None, m)), expr(Sym("s1", 0, None, n))) if dynamic else (expr(m), expr(n))
    i, j = axis("i", rows), axis("j", cols, "r")
    at = expr(j.var) * rows + expr(i.var) if across else expr(i.var) * cols + expr(j.var)
    shape = (n, m) if across else (m, n)
    b = BodyBuilder()
    x = b.load("x", at, F32)
    tensors = {"x": rand(*shape, dtype=dtype)}
    if kind == "softmax":
        e = b.op("exp", b.op("sub", x, b.reduce("max", x, dtype=F32)))
        y = b.op("div", e, b.reduce("sum", e, dtype=F32))
    else:
        count = b.cast(b.index(cols), F32)
        d = x
        if kind == "layer_norm":
            mean = b.op("div", b.reduce("sum", x, dtype=F32), count)
            d = b.op("sub", x, mean)
            b.store("out_mean", i.var, mean)
            tensors["out_mean"] = torch.zeros(m)
        var = b.op("div", b.reduce("sum", b.op("mul", d, d), dtype=F32), count)
        y = b.op("mul", d, b.op("rsqrt", b.op("add", var, b.const(1e-5, F32))))
        tensors["w"] = rand(n, dtype=dtype, seed=1)
        y = b.op("mul", y, b.load("w", j.var, F32))
        if kind == "layer_norm":
            tensors["b"] = rand(n, dtype=dtype, seed=2)
            y = b.op("add", y, b.load("b", j.var, F32))
    b.store(out, at, y)
    tensors |= {} if out == "x" else {"out": torch.zeros(*shape, dtype=dtype)}
    known = {"x": (rows, cols), "out": (rows, cols), "w": (cols,), "b": (cols,), "out_mean": (rows,)}
    shapes = {k: s for k, s in known.items() if k in tensors} if dynamic else {}
    sizes = {"s0": m, "s1": n} if dynamic else {}
    origin = Origin(kind, "model.py:3 in forward: y = f(x)")
    return Case((LoopNest(kind, (i, j), tuple(b.body), (origin,)),), tensors, sizes, config, shapes)


def gather(index: torch.Tensor, rows: int = 10, cols: int = 24, checked: bool | str = True, **more: object) -> Case:
    """Rows of a table by an index tensor, negative indices wrapped; with one of two dimensions, element by element."""
    n = len(index)
    i, j = axis("i", n), axis("j", cols)
    b = BodyBuilder()
    at = expr(i.var) * cols + expr(j.var)
    row = b.indirect(b.load("index", i.var if index.dim() == 1 else at, index.dtype), rows, checked)
    b.store("out", at, b.load("x", row * cols + expr(j.var), F32))
    tensors = {"x": rand(rows, cols), "index": index, "out": torch.zeros(n, cols)}
    return Case((LoopNest("gather", (i, j), tuple(b.body)),), tensors, **more)  # type: ignore[arg-type]


def scatter_like() -> Case:
    """An indirect store, and an index that is a value."""
    i = axis("i", 50)
    b = BodyBuilder()
    place = b.indirect(b.load("index", i.var, I64), 50)
    b.store("out", place, b.cast(b.index(expr(i.var) * 3 + 1), F32))
    perm = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    return Case((LoopNest("scatter", (i,), tuple(b.body)),), {"index": perm, "out": torch.zeros(50)})


def pad(m: int = 6, n: int = 10, before: int = 2, after: int = 2, dtype: torch.dtype = F32) -> Case:
    """A load with a condition: rows padded on either side."""
    cols = before + n + after
    i, j = axis("i", m), axis("j", cols)
    b = BodyBuilder()
    at = b.index(expr(j.var) - before)
    ok = b.op("and", b.op("ge", at, b.const(0, I64)), b.op("lt", at, b.const(n, I64)))
    v = b.load("x", expr(i.var) * n + expr(j.var) - before, F32, ok, -1.5)
    b.store("out", expr(i.var) * cols + expr(j.var), v)
    tensors = {"x": rand(m, n, dtype=dtype), "out": torch.zeros(m, cols, dtype=dtype)}
    return Case((LoopNest("pad", (i, j), tuple(b.body)),), tensors)


def rolled() -> Case:
    """An index with a remainder of something negative: Python's, not C's."""
    i = axis("i", 40)
    b = BodyBuilder()
    b.store("out", i.var, b.load("x", (expr(i.var) - 13) % 40, F32))
    return Case((LoopNest("roll", (i,), tuple(b.body)),), {"x": rand(40), "out": torch.zeros(40)})


def several(*sizes: int) -> Case:
    """Independent parts in one launch."""
    parts, tensors = [], {}
    for n, size in enumerate(sizes):
        i = axis("i", size)
        b = BodyBuilder()
        b.store(f"out{n}", i.var, b.op("mul", b.load(f"x{n}", i.var, F32), b.const(n + 0.5, F32)))
        parts.append(LoopNest(f"part{n}", (i,), tuple(b.body)))
        tensors |= {f"x{n}": rand(size, seed=n), f"out{n}": torch.zeros(size)}
    return Case(tuple(parts), tensors)


def last_block_apart(n: int, dynamic: bool = False, k: int = 1) -> Case:
    """A size that is no multiple of 16, in blocks of 128: whole blocks without a mask, the last with one. One value is
    used by both, one buffer is read by a gather, and the row of a broadcast begins anywhere."""
    parts, tensors, shapes = [], {}, {}
    for part in range(k):
        size = expr(Sym(f"s{part}", 2, None, n)) if dynamic else expr(n)
        i, b, tag = axis("i", size), BodyBuilder(), f"_{part}"
        x = b.load("x" + tag, i.var, F32)
        bias = b.load("bias" + tag, expr(i.var) % 7, F32)
        again = b.load("x" + tag, size - 1 - expr(i.var), F32)
        b.store("out" + tag, i.var, b.op("add", b.op("mul", x, bias), b.op("mul", again, b.const(part + 0.5, F32))))
        parts.append(LoopNest(f"part{part}", (i,), tuple(b.body)))
        tensors |= {"x" + tag: rand(n, seed=part), "bias" + tag: rand(7), "out" + tag: torch.zeros(n)}
        shapes |= {"x" + tag: (size,), "out" + tag: (size,)} if dynamic else {}
    sizes = {f"s{part}": n for part in range(k)} if dynamic else {}
    return Case(tuple(parts), tensors, sizes, Config(xblock=128, num_warps=1), shapes)


def in_place(config: Config) -> Case:
    """Adds to ``x`` and uses the old values after a reduction: a looped kernel must not read what it wrote."""
    i, j = axis("i", 3), axis("j", 50, "r")
    at = expr(i.var) * 50 + expr(j.var)
    b = BodyBuilder()
    x = b.load("x", at, F32)
    b.store("x", at, b.op("add", x, b.const(1, F32)))
    total = b.reduce("sum", x, dtype=F32)
    b.store("out", at, b.op("mul", x, total))
    return Case(
        (LoopNest("in_place", (i, j), tuple(b.body)),), {"x": rand(3, 50), "out": torch.zeros(3, 50)}, config=config,
    )  # fmt: skip


def batch_norm_stats(batch: int = 4, channels: int = 5, points: int = 30) -> Case:
    """Two reduced axes that do not merge, around a parallel one."""
    n, c, h = axis("n", batch, "r"), axis("c", channels), axis("h", points, "r")
    b = BodyBuilder()
    x = b.load("x", (expr(n.var) * channels + expr(c.var)) * points + expr(h.var), F32)
    b.store("out", c.var, b.reduce("sum", b.op("mul", x, x), dtype=F32))
    b.store("out_most", c.var, b.reduce("max", x, dtype=F32))
    tensors = {"x": rand(batch, channels, points), "out": torch.zeros(channels), "out_most": torch.zeros(channels)}
    return Case((LoopNest("stats", (n, c, h), tuple(b.body)),), tensors)


def of_nothing() -> Case:
    """A sum over no elements."""
    i, j = axis("i", 4), axis("j", 0, "r")
    b = BodyBuilder()
    b.store("out", i.var, b.reduce("sum", b.load("x", expr(j.var), F32), dtype=F32))
    return Case((LoopNest("of_nothing", (i, j), tuple(b.body)),), {"x": torch.zeros(1), "out": torch.ones(4)})


def one_number() -> Case:
    """A full reduction, a scalar beside it, and a constant reduced."""
    j = axis("j", 300, "r")
    b = BodyBuilder()
    s = b.reduce("sum", b.load("x", j.var, F32), dtype=F32)
    count = b.reduce("sum", b.const(1, F32), dtype=F32)
    b.store("out", 0, b.op("add", b.op("div", s, count), b.load("y", 0, F32)))
    return Case((LoopNest("mean", (j,), tuple(b.body)),), {"x": rand(300), "y": rand(1), "out": torch.zeros(1)})


def asserted_cases() -> dict[str, Callable[[], Case]]:
    """Rows that are there, and some that are not, by a kernel that asserts they are."""
    return {
        "inside": lambda: gather(torch.tensor([0, 3, -1, 9, -10, 5, 5]), checked="no 'such' row"),
        "outside": lambda: gather(torch.tensor([0, 3, -11, 9]), checked="no 'such' row"),
        "one_outside": lambda: gather(torch.tensor([10]), cols=1, checked="no 'such' row"),
    }


def kernel_cases() -> dict[str, Callable[[], Case]]:
    looped = Config("looped", xblock=2, rblock=16, num_warps=1)
    small = Config("looped", xblock=1, rblock=64, num_warps=1)
    out: dict[str, Callable[[], Case]] = {
        "add_broadcast": lambda: pointwise(
            (6, 40),
            {
                "x": (rand(6, 40), lambda i, j: i * 40 + j),
                "y": (rand(40), lambda i, j: j),
                "z": (rand(6), lambda i, j: i),
            },
            lambda b, x, y, z: b.op("add", b.op("mul", x, y), z)),
        "half_to_half": lambda: pointwise((1000,), {"x": (rand(1000, dtype=BF16), lambda i: i)}, add_one, BF16),
        "float16": lambda: pointwise((1000,), {"x": (rand(1000, dtype=F16), lambda i: i)}, add_one, F16),
        "bool_out": lambda: pointwise(
            (100,), {"x": (rand(100), lambda i: i)}, lambda b, x: b.op("gt", x, b.const(0, F32)), BOOL),
        "bool_in": lambda: pointwise((100,), {"x": (rand(100) > 0, lambda i: i)}, lambda b, x: b.cast(x, F32)),
        "transpose": lambda: pointwise((48, 70), {"x": (rand(70, 48), lambda i, j: j * 48 + i)}, add_one),
        "permute_3d": lambda: pointwise(
            (5, 20, 30), {"x": (rand(30, 5, 20), lambda i, j, k: k * 100 + i * 20 + j)}, add_one),
        "permute_untiled": lambda: pointwise(
            (5, 4, 3), {"x": (rand(3, 5, 4), lambda i, j, k: k * 20 + i * 4 + j)}, add_one),
        "strided": lambda: pointwise((20, 10), {"x": (rand(20, 30)[:, ::3], lambda i, j: i * 30 + j * 3)}, add_one),
        "channels": lambda: pointwise(
            (2, 6, 35),
            {"x": (rand(2, 6, 35), lambda n, c, h: n * 210 + c * 35 + h), "w": (rand(6), lambda n, c, h: c)},
            lambda b, x, w: b.op("mul", x, w)),
        "one": lambda: pointwise((1,), {"x": (rand(1), lambda i: i)}, add_one),
        "constants": lambda: pointwise((30,), {}, lambda b: b.op("add", b.const(2, F32), b.const(float("inf"), F32))),
        "gather": lambda: gather(torch.tensor([0, 3, -1, 9, -10, 5, 5])),
        "gather_int32": lambda: gather(torch.tensor([0, 3, -1, 9], dtype=I32)),
        "gather_wide": lambda: gather(torch.tensor([0, 3, -1, 9]), fallback=True),
        "scatter_like": scatter_like, "pad": pad, "roll": rolled, "several": lambda: several(100, 800, 1500),
        "in_place_persistent": lambda: in_place(Config("persistent", xblock=1, rblock=64, num_warps=1)),
        "in_place_looped": lambda: in_place(looped),
        "last_block_apart": lambda: last_block_apart(1003),
        "last_block_apart_dynamic": lambda: last_block_apart(1003, True),
        "last_block_apart_whole": lambda: last_block_apart(1024, True),
        "last_block_apart_less_than_one": lambda: last_block_apart(101, True),
        "last_block_apart_several": lambda: last_block_apart(515, True, 3),
        "batch_norm_stats": batch_norm_stats, "of_nothing": of_nothing, "one_number": one_number,
    }  # fmt: skip
    for kind in ("softmax", "layer_norm", "rms_norm"):
        out[f"{kind}"] = lambda kind=kind: norm(kind, 6, 100, F32)
        out[f"{kind}_bf16"] = lambda kind=kind: norm(kind, 9, 128, BF16)
        out[f"{kind}_looped"] = lambda kind=kind: norm(kind, 5, 100, F32, looped)
        out[f"{kind}_looped_even"] = lambda kind=kind: norm(kind, 3, 128, F32, small)
        out[f"{kind}_dynamic"] = lambda kind=kind: norm(kind, 6, 96, F32, dynamic=True)
        out[f"{kind}_dynamic_fallback"] = lambda kind=kind: replace(
            norm(kind, 6, 100, F32, dynamic=True), fallback=True
        )
    return out


def shifted_windows(shift: int, window: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Of a batch of images, channels last: its windows, after a shift, and the sums over their places."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        side, channels = x.shape[1] // window, x.shape[3]
        w = x.roll((-shift, -shift), (1, 2)).view(-1, side, window, side, window, channels)
        w = w.permute(0, 1, 3, 2, 4, 5).contiguous()
        return w, w.view(-1, channels).sum(0)

    return f
