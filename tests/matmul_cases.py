"""Matrix products as hand-made Templates with a Tiling: every kind of kernel, operand layout, epilogue and edge.

One list serves three readers: Triton's interpreter (no GPU), ahead-of-time compilation, and a real GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hand_loops import axis

from reflib.generate.kernel import Kernel
from reflib.generate.matmul import generate_matmul
from reflib.ir.expr import Expr, IntLike, Sym, ceildiv, expr
from reflib.ir.interpret import run_template
from reflib.ir.loops import Acc, BodyBuilder, LoopNest, Origin
from reflib.ir.ops import value_dtype
from reflib.ir.program import Buffer, Config, KernelNode, Template, Tiling, View
from reflib.target import parse_target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, F64, F16, BF16, BOOL = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool
TILED = Tiling("tiled", 32, 32, 32)
PERSISTENT = Tiling("persistent", 32, 32, 32)
SPLIT = Tiling("split", 32, 32, 32, splits=3, reducers=8)
WARPS = Tiling("split", 32, 32, 64, splits=5, warps_k=4, reducers=64)
TURNED = Tiling("tiled", 16, 64, 32, turned=True)
KINDS = {
    "tiled": TILED, "turned": TURNED, "persistent": PERSISTENT,
    "split": SPLIT, "split warps": WARPS,
}  # fmt: skip

Epilogue = Callable[["Slot"], None]


@dataclass
class Slot:
    """What an epilogue is written with: the builder, the product's value, the indices of its axes."""

    b: BodyBuilder
    acc: int
    z: Expr
    y: Expr
    x: Expr
    case: MatmulCase

    def load(self, name: str, index: Expr) -> int:
        return self.b.load(name, index, value_dtype(self.case.tensors[name].dtype))

    def store(self, name: str, value: int) -> None:
        """All of the output ``name``, in its strides."""
        t = self.case.tensors[name]
        at = [self.z, self.y, self.x][3 - t.dim() :]
        index = sum((i * s for i, s in zip(at, t.stride())), expr(0))
        self.b.store(name, index, self.b.cast(value, t.dtype))


def plain(s: Slot) -> None:
    s.store("out", s.acc)


@dataclass
class MatmulCase:
    """``a`` [B,] M, K and ``b`` [B,] K, N in any strides, and ``out``. ``dynamic``: sizes are symbols. ``wide``:
    64-bit indices. ``units``: multiprocessors. ``extra``: what else the epilogue reads and writes (``out...``)."""

    a: torch.Tensor
    b: torch.Tensor
    tiling: Tiling = TILED
    dtype: torch.dtype = F16
    out: torch.dtype | None = None
    epilogue: Epilogue = plain
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    dynamic: bool = False
    wide: bool = False
    precision: str = "ieee"
    divisible: bool = True
    units: int = 7
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        a, b = (t if t.dim() == 3 else t[None] for t in (self.a, self.b))
        batch, m, k = a.shape
        n = b.shape[2]
        self.shape = (m, n) if self.a.dim() == 2 else (batch, m, n)
        self.tensors = {"a": storage(self.a), "b": storage(self.b)}
        out = {} if "out" in self.extra else {"out": torch.zeros(self.shape, dtype=self.out or self.dtype)}
        self.tensors |= out | self.extra
        self.make_template(a, b, (batch, m, n, k))

    def make_template(self, a: torch.Tensor, b: torch.Tensor, sizes: tuple[int, ...]) -> None:
        batch, m, n, k = map(expr, sizes)
        strides = [tuple(map(expr, t.stride())) for t in (a, b)]
        if self.dynamic:
            names = dict(zip("mnk", ("s0", "s1", "s2")))
            m, n, k = (expr(Sym(names[d], 0, None, v)) for d, v in zip("mnk", sizes[1:]))
            self.sizes = {"s0": sizes[1], "s1": sizes[2], "s2": sizes[3]}
            by_value = {a.shape[1]: m, a.shape[2]: k, b.shape[2]: n}
            strides = [tuple(by_value.get(int(s), s) for s in each) for each in strides]
        views = [
            View(name, shape, stride, expr(t.storage_offset()), t.dtype)
            for name, t, shape, stride in zip("ab", (a, b), ((batch, m, k), (batch, k, n)), strides)
        ]
        axes = (*([axis("b", batch)] if len(self.shape) == 3 and sizes[0] != 1 else []), axis("i", m), axis("j", n))
        build = BodyBuilder()
        index = [expr(0)] * (3 - len(axes)) + [expr(x.var) for x in axes]
        self.epilogue(Slot(build, build.add(Acc(F32)), *index, self))
        loops = LoopNest("mm", axes, tuple(build.body), (Origin("aten.mm"),))
        self.template = Template("mm", views[0], views[1], loops, self.dtype, self.precision, self.tiling)

    # -- as the generator wants it --------------------------------------------------------------
    def node(self, name: str) -> KernelNode:
        t, space = self.tiling, []
        if t.kind == "split":
            batch, m, n, _ = self.template.sizes
            tiles = batch * ceildiv(m, t.m) * ceildiv(n, t.n)
            space.append(_space(f"{name}_parts", "zeros", torch.int32, tiles * (t.splits * t.m * t.n)))
        if t.kind == "persistent":
            space.append(_space(f"{name}_scratch", "scratch", torch.uint8, 256 * self.units))
        known = tuple(s for s, v in self.sizes.items() if v % 16 == 0) if self.divisible else ()
        config = Config(
            "matmul", num_warps=t.num_warps, num_stages=t.num_stages, index="int64" if self.wide else "int32",
            extras=(("divisible", known),) if known else (),
        )  # fmt: skip
        return KernelNode(name, (self.template,), config, tuple(space))

    def buffers(self) -> dict[str, Buffer]:
        return {
            n: Buffer(n, t.dtype, t.device, tuple(map(expr, t.shape)), tuple(map(expr, t.stride())), "input")
            for n, t in self.tensors.items()
        }

    def kernel(self, name: str, target: str = "sm_90") -> Kernel:
        node, buffers = self.node(name), self.buffers()
        for b in node.workspace:
            if b.kind != "scratch":
                fill = float("nan") if b.kind == "temp" else 0
                self.tensors[b.name] = torch.full((int(b.numel.evaluate(self.sizes)),), fill, dtype=b.dtype)
                self.zeros |= {b.name} if b.kind == "zeros" else set()
        aligned = () if self.wide else tuple(buffers)
        chip = replace(parse_target(target), units=self.units)
        return generate_matmul(node, buffers, chip, aligned)

    def expected(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """What the interpreter makes of it."""
        memory = {n: storage(t).clone() for n, t in self.tensors.items()}
        run_template(self.template, memory, self.sizes)
        outs = {n: t for n, t in self.tensors.items() if n.startswith("out")}
        return {n: memory[n].as_strided(t.shape, t.stride()) for n, t in outs.items()}


def storage(t: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, flat."""
    count = t.untyped_storage().nbytes() // t.itemsize
    return t.as_strided((count,), (1,), 0)


def _space(name: str, kind: str, dtype: torch.dtype, count: IntLike) -> Buffer:
    return Buffer(name, dtype, torch.device("cpu"), (expr(count),), (expr(1),), kind)


def problem(case: MatmulCase, got: dict[str, torch.Tensor]) -> str:
    """What is wrong with the buffers after the kernel has run, or nothing."""
    wrong = []
    for name, want in case.expected().items():
        g = got[name]
        if not want.dtype.is_floating_point:
            bad = g != want
        else:  # operands are such that the product is exact
            eps = 2 * torch.finfo(want.dtype).eps
            bad = ~((g.double() - want.double()).abs() <= eps * want.double().abs() + 1e-6)
        if bool(bad.any()):
            at = bad.flatten().nonzero().flatten()[:4].tolist()
            values = f"got {g.flatten()[at].tolist()} want {want.flatten()[at].tolist()}"
            wrong.append(f"{name}: {int(bad.sum())} of {bad.numel()} wrong, at {at}; {values}")
    wrong += [f"{n} is not zero again" for n, t in got.items() if n in case.zeros and bool(t.any())]
    return "; ".join(wrong)


# -- operands ---------------------------------------------------------------------------------------
def rand(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> torch.Tensor:
    """Small multiples of 1/4: products and their sums are exact, in any order."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randint(-8, 9, shape, generator=g) / 4).to(dtype)


def columns(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> torch.Tensor:
    """Contiguous in the last dimension but one."""
    return rand(*shape[:-2], shape[-1], shape[-2], dtype=dtype, seed=seed).mT


def every_other(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> torch.Tensor:
    """A slice with a step and an offset: no dimension is contiguous."""
    return rand(*shape[:-1], 2 * shape[-1] + 3, dtype=dtype, seed=seed)[..., 3::2]


def padded(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> torch.Tensor:
    """Rows that are longer than what is used of them, from an offset of 16 bytes on."""
    more = 32 // dtype.itemsize
    return rand(*shape[:-1], -(-shape[-1] // 16) * 16 + more, dtype=dtype, seed=seed)[
        ..., more // 2 : more // 2 + shape[-1]
    ]


# -- epilogues --------------------------------------------------------------------------------------
def relu(s: Slot) -> None:
    s.store("out", s.b.op("maximum", s.acc, s.b.const(0, F32)))


def bias_1d(s: Slot) -> None:
    s.store("out", s.b.op("add", s.acc, s.load("bias", s.x)))


def row_scale(s: Slot) -> None:
    s.store("out", s.b.op("mul", s.acc, s.load("scale", s.y)))


def scales(n: int) -> torch.Tensor:
    return 2.0 ** (torch.arange(n) % 5 - 2)


def scaled(s: Slot) -> None:
    """By row and by column, as ``_scaled_mm``."""
    value = s.b.op("mul", s.acc, s.load("rows", s.y))
    s.store("out", s.b.op("mul", value, s.load("columns", s.x)))


def bias_2d_gelu(s: Slot) -> None:
    """gelu(to_half(acc) + residual), as ``F.gelu(x @ w + r)``, unrounded between."""
    b, n = s.b, s.case.shape[-1]
    v = b.op("add", s.acc, s.load("residual", s.y * n + s.x))
    half, root = b.op("mul", v, b.const(0.5, F32)), b.op("mul", v, b.const(math.sqrt(0.5), F32))
    s.store("out", b.op("mul", half, b.op("add", b.op("erf", root), b.const(1.0, F32))))


def several(s: Slot) -> None:
    """The product rounded, its sign, and twice it in another layout."""
    b = s.b
    s.store("out", s.acc)
    s.store("out_sign", b.op("gt", s.acc, b.const(0, F32)))
    s.store("out_turned", b.op("mul", s.acc, b.const(2.0, F32)))


def indexed(s: Slot) -> None:
    """Adds the point's own number, a gathered row and a value that is read only where the product is positive."""
    b, n = s.b, s.case.shape[-1]
    v = b.op("add", s.acc, b.cast(b.index(s.y * n + s.x), F32))
    row = b.indirect(b.load("ids", s.y, torch.int64), 5)
    v = b.op("add", v, s.load("table", row * n + s.x))
    where = b.op("gt", s.acc, b.const(0, F32))
    v = b.op("add", v, b.load("residual", s.y * n + s.x, F32, where, 7.0))
    s.store("out", v)


# -- the list ---------------------------------------------------------------------------------------
Make = Callable[[], MatmulCase]


def matmul_cases() -> dict[str, Make]:
    cases: dict[str, Make] = {}

    def add(name: str, make: Callable[..., MatmulCase], kinds: Any = KINDS) -> None:
        for kind in kinds:
            cases[f"{name}, {kind}"] = lambda kind=kind: make(KINDS[kind])

    _layouts(add)
    _sizes(add)
    _epilogues(add)
    _dtypes(add)
    return cases


NO_TMA = ("tiled", "turned", "split", "split warps")


def _layouts(add: Callable[..., None]) -> None:
    add("rows x rows", lambda t: MatmulCase(rand(64, 96), rand(96, 64, seed=1), t))
    add("rows x columns", lambda t: MatmulCase(rand(64, 96), columns(96, 64, seed=1), t))
    add("columns x rows", lambda t: MatmulCase(columns(64, 96), rand(96, 64, seed=1), t))
    add("columns x columns", lambda t: MatmulCase(columns(64, 96), columns(96, 64, seed=1), t))
    add("padded", lambda t: MatmulCase(padded(50, 72), padded(72, 40, seed=1), t))
    add("every other", lambda t: MatmulCase(every_other(40, 50), every_other(50, 40, seed=1), t), NO_TMA)
    add("expanded rows", lambda t: MatmulCase(rand(96).expand(64, 96), rand(96, 40), t), NO_TMA)
    add("expanded depth", lambda t: MatmulCase(rand(64, 1).expand(64, 96), rand(1, 40).expand(96, 40), t), NO_TMA)
    add("one number", lambda t: MatmulCase(rand(1, 1).expand(64, 96), rand(96, 40), t), NO_TMA)
    add("one operand", _gram, NO_TMA)


def _gram(t: Tiling) -> MatmulCase:
    a = rand(48, 64)
    case = MatmulCase(a, a.t(), t)
    case.make_template(a[None], a.t()[None], (1, 48, 48, 64))
    case.template = replace(case.template, b=replace(case.template.b, buffer="a"))
    return case


def _sizes(add: Callable[..., None]) -> None:
    for m, n, k in ((33, 70, 65), (1, 1, 1), (5, 200, 7), (200, 3, 300), (96, 64, 32), (16, 16, 0)):
        add(f"{m} x {n} x {k}", lambda t, s=(m, n, k): MatmulCase(rand(s[0], s[2]), rand(s[2], s[1]), t), NO_TMA)
        shape = (m, n, max(k, 1))
        add(f"{m} x {n} x {k}", lambda t, s=shape: MatmulCase(padded(s[0], s[2]), padded(s[2], s[1]), t),
            ("persistent",))  # fmt: skip
    for m, n, k in ((0, 16, 16), (16, 0, 16), (0, 16, 0)):
        add(f"empty {m} x {n} x {k}", lambda t, s=(m, n, k): MatmulCase(rand(s[0], s[2]), rand(s[2], s[1]), t), NO_TMA)
    for m, n, k in ((64, 80, 96), (50, 48, 33)):
        add(f"dynamic {m} x {n} x {k}", lambda t, s=(m, n, k): MatmulCase(
            rand(s[0], s[2]), rand(s[2], s[1]), t, dynamic=True), NO_TMA)  # fmt: skip
    add("dynamic 64 x 80 x 96", lambda t: MatmulCase(rand(64, 96), rand(96, 80), t, dynamic=True), ("persistent",))
    add("wide", lambda t: MatmulCase(columns(40, 90), rand(90, 50), t, wide=True), NO_TMA)
    add("wide dynamic", lambda t: MatmulCase(rand(40, 90), rand(90, 50), t, wide=True, dynamic=True), NO_TMA)
    add("batch", lambda t: MatmulCase(rand(3, 40, 70), columns(3, 70, 50), t), NO_TMA)
    add("batch, one b", lambda t: MatmulCase(rand(3, 64, 64), rand(64, 32).expand(3, 64, 32), t, wide=True), NO_TMA)
    add("many tiles", lambda t: MatmulCase(rand(350, 40), padded(40, 300), t))
    for count, reducers in ((8, 1), (9, 2), (13, 1)):
        many = Tiling("split", 64, 64, 32, splits=count, reducers=reducers)
        add(f"parts in groups, {count} splits, {reducers} reducers", lambda t, many=many: MatmulCase(
            rand(80, 640), rand(640, 96), many, dynamic=True), ("split",))  # fmt: skip
    for count, reducers in ((4, 2), (13, 8), (64, 64), (100, 256)):  # pieces of 512, 128, 16 and 4 points
        many = Tiling("split", 32, 32, 16, splits=count, reducers=reducers)
        add(
            f"pieces, {count} splits",
            lambda t, many=many: MatmulCase(
                rand(50, 1600), rand(1600, 20), many, epilogue=bias_1d, extra={"bias": rand(20)}
            ),
            ("split",),
        )
    turned = Tiling("split", 16, 64, 32, splits=3, reducers=8, turned=True)
    add("turned 20 x 100 x 400", lambda t: MatmulCase(rand(20, 400), columns(400, 100), turned), ("split",))
    add("many tiles, dynamic", lambda t: MatmulCase(rand(352, 48), rand(48, 304), t, dynamic=True))


def _epilogues(add: Callable[..., None]) -> None:
    def operands(k: int = 72) -> tuple[torch.Tensor, torch.Tensor]:
        return rand(56, k), rand(k, 48, seed=1)

    add("relu", lambda t: MatmulCase(*operands(), t, epilogue=relu))
    add("bias", lambda t: MatmulCase(*operands(), t, epilogue=bias_1d, extra={"bias": rand(48)}))
    add("row scale", lambda t: MatmulCase(*operands(), t, epilogue=row_scale, extra={"scale": rand(56, dtype=F32)}))
    add("gelu", lambda t: MatmulCase(*operands(8), t, epilogue=bias_2d_gelu, extra={"residual": rand(56, 48)}))
    add("gelu float32", lambda t: MatmulCase(
        rand(56, 8, dtype=F32), rand(8, 48, dtype=F32), t, F32, epilogue=bias_2d_gelu,
        extra={"residual": rand(56, 48, dtype=F32)}))  # fmt: skip
    add("several", lambda t: MatmulCase(*operands(), t, epilogue=several, extra={
        "out": torch.zeros(56, 48, dtype=F16), "out_sign": torch.zeros(56, 48, dtype=BOOL),
        "out_turned": torch.zeros(48, 56).t()}))  # fmt: skip
    add("indexed", lambda t: MatmulCase(*operands(), t, epilogue=indexed, out=F32, extra={
        "ids": torch.arange(56) % 5, "table": rand(5, 48), "residual": rand(56, 48, dtype=F32)}))  # fmt: skip
    add("batch relu", lambda t: MatmulCase(rand(2, 40, 70), rand(2, 70, 50), t, epilogue=relu), NO_TMA)


def _dtypes(add: Callable[..., None]) -> None:
    for name, source, dtype, out in (
        ("float32", F32, F32, F32), ("bfloat16", BF16, BF16, F32), ("float32 as float16", F32, F16, F16),
        ("float32 as bfloat16", F32, BF16, F32), ("float16 as float32", F16, F32, F32),
        ("bfloat16 as float16", BF16, F16, F32), ("float16 as bfloat16", F16, BF16, F32),
    ):  # fmt: skip
        kinds = KINDS if "as" not in name or name == "float32 as float16" else NO_TMA
        add(name, lambda t, s=source, d=dtype, o=out: MatmulCase(
            rand(40, 80, dtype=s), rand(80, 48, dtype=s), t, d, o), kinds)  # fmt: skip
    add("float64, bool as float32", lambda t: MatmulCase(
        rand(40, 70, dtype=F64), rand(70, 50) > 0, t, F32), NO_TMA)  # fmt: skip
    add("tf32", lambda t: MatmulCase(
        rand(40, 80, dtype=F32), rand(80, 48, dtype=F32), t, F32, precision="tf32"))  # fmt: skip
    for name, a, b in (("e4m3", E4M3, E4M3), ("e5m2 x e4m3", E5M2, E4M3)):
        for kind in ("tiled", "turned", "persistent", "split"):
            add(f"{name}, scaled", lambda t, a=a, b=b: MatmulCase(
                rand(40, 96, dtype=a), columns(96, 48, dtype=b), t, a, F16, epilogue=scaled,
                extra={"rows": scales(40), "columns": scales(48)}), (kind,))  # fmt: skip
    add("e4m3, ragged", lambda t: MatmulCase(
        rand(33, 80, dtype=E4M3), columns(80, 50, dtype=E4M3), t, E4M3, BF16), ("tiled", "split"))  # fmt: skip
    add("e4m3 as float16", lambda t: MatmulCase(rand(20, 64), columns(64, 48, dtype=E4M3), t, F16), ("tiled", "split"))
