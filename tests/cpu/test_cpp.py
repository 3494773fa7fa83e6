"""Loop nests in C++: every shape of nest, on awkward sizes, against the interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from cpp_running import Case, build
from hand_loops import axis

from reflib.ir.expr import Sym, expr
from reflib.ir.loops import BodyBuilder, Loops, Origin

F, B, H, I = torch.float32, torch.bfloat16, torch.float16, torch.int64


def randn(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def loops(name: str, axes, b: BodyBuilder) -> Loops:
    return Loops(name, tuple(axes), tuple(b.body), (Origin(name, "model.py:3 in forward: y = f(x)"),))


def bias_gelu(rows: int, cols: int, dtype: torch.dtype = F) -> Case:
    i, j, b = axis("i", rows), axis("j", cols), BodyBuilder()
    e = expr(i.var) * cols + expr(j.var)
    t = b.op("add", b.load("x", e, F), b.load("bias", j.var, F))
    half = b.op("mul", t, b.const(0.5, F))
    erf = b.op("erf", b.op("mul", t, b.const(0.5**0.5, F)))
    b.store("y", e, b.op("mul", half, b.op("add", erf, b.const(1.0, F))))
    x, bias = randn(rows, cols, dtype=dtype), randn(cols, dtype=dtype)
    return Case(loops("gelu", (i, j), b), {"x": x, "bias": bias, "y": torch.zeros_like(x)})


def softmax(rows: int, cols: int, dim: int = 1, in_place: bool = False, dtype: torch.dtype = F) -> Case:
    """Over the last axis (along memory) or the first (across it)."""
    i, j = axis("i", rows, "p" if dim else "r"), axis("j", cols, "r" if dim else "p")
    b, e = BodyBuilder(), expr(i.var) * cols + expr(j.var)
    x = b.load("x", e, F)
    z = b.op("exp", b.op("sub", x, b.reduce("max", x, dtype=F)))
    out = b.op("div", z, b.reduce("sum", z, dtype=F))
    b.store("x" if in_place else "y", e, out)
    tensors = {"x": randn(rows, cols, dtype=dtype)}
    if not in_place:
        tensors["y"] = torch.zeros(rows, cols, dtype=dtype)
    return Case(loops("softmax", (i, j), b), tensors)


def layer_norm(rows: int, cols: int) -> Case:
    """Row values are stored as well (mean), and used after both reductions."""
    i, j, b = axis("i", rows), axis("j", cols, "r"), BodyBuilder()
    e, n = expr(i.var) * cols + expr(j.var), b.const(1.0 / cols, F)
    x = b.load("x", e, F)
    mean = b.op("mul", b.reduce("sum", x, dtype=F), n)
    d = b.op("sub", x, mean)
    var = b.op("mul", b.reduce("sum", b.op("mul", d, d), dtype=F), n)
    b.store("mean", i.var, mean)
    b.store("y", e, b.op("mul", d, b.op("rsqrt", b.op("add", var, b.const(1e-5, F)))))
    x0 = randn(rows, cols)
    return Case(loops("layer_norm", (i, j), b), {"x": x0, "mean": torch.zeros(rows), "y": torch.zeros(rows, cols)})


def transpose(rows: int, cols: int, dtype: torch.dtype = F) -> Case:
    i, j, b = axis("i", rows), axis("j", cols), BodyBuilder()
    t = b.load("x", expr(j.var) * rows + expr(i.var), F)
    b.store("y", expr(i.var) * cols + expr(j.var), b.op("add", t, b.load("r", i.var, F)))
    return Case(
        loops("transpose", (i, j), b),
        {"x": randn(cols, rows, dtype=dtype), "r": randn(rows), "y": torch.zeros(rows, cols, dtype=dtype)},
    )


def batch_stats(n: int, c: int, hw: int) -> Case:
    """Reduced axes on both sides of the parallel one."""
    i, k, j, b = axis("n", n, "r"), axis("c", c), axis("hw", hw, "r"), BodyBuilder()
    x = b.load("x", (expr(i.var) * c + expr(k.var)) * hw + expr(j.var), F)
    b.store("sum", k.var, b.reduce("sum", x, dtype=F))
    b.store("largest", k.var, b.reduce("max", x, dtype=F))
    return Case(loops("stats", (i, k, j), b), {"x": randn(n, c, hw), "sum": torch.zeros(c), "largest": torch.zeros(c)})


def reshape_roll(n: int, m: int, shift: int) -> Case:
    """// and % in the index, of something that can be negative."""
    i, b = axis("i", n * m), BodyBuilder()
    source = (expr(i.var) - shift) % (n * m)
    b.store("y", i.var, b.load("x", (source % n) * m + source // n, F))
    b.store("q", i.var, b.index((expr(i.var) - shift) // m))
    return Case(loops("roll", (i,), b), {"x": randn(n, m), "y": torch.zeros(n * m), "q": torch.zeros(n * m, dtype=I)})


def pad(n: int, before: int, after: int, dtype: torch.dtype = F) -> Case:
    i, b = axis("i", n + before + after), BodyBuilder()
    at = b.index(expr(i.var) - before)
    inside = b.op("and", b.op("ge", at, b.const(0, I)), b.op("lt", at, b.const(n, I)))
    b.store("y", i.var, b.load("x", expr(i.var) - before, F, inside, 7.5))
    return Case(loops("pad", (i,), b), {"x": randn(n, dtype=dtype), "y": torch.zeros(n + before + after, dtype=dtype)})


def gather(rows: int, cols: int, per: str, values: list[int]) -> Case:
    """An embedding (``per`` row) or a gather (``per`` element)."""
    i, j, b = axis("i", len(values)), axis("j", cols), BodyBuilder()
    index = torch.tensor(values)
    if per == "element":
        index = index[:, None].expand(len(values), cols).contiguous()
    at = expr(i.var) if per == "row" else expr(i.var) * cols + expr(j.var)
    row = b.indirect(b.load("index", at, I), rows)
    b.store("y", expr(i.var) * cols + expr(j.var), b.load("x", row * cols + expr(j.var), F))
    return Case(
        loops("gather", (i, j), b), {"x": randn(rows, cols), "index": index, "y": torch.zeros(len(values), cols)}
    )


def scalar_gather(value: int) -> Case:
    b = BodyBuilder()
    b.store("y", 0, b.load("x", b.indirect(b.load("index", 0, I), 5), F))
    return Case(loops("pick", (), b), {"x": randn(5), "index": torch.tensor([value]), "y": torch.zeros(1)})


def gathered_sum(values: list[int]) -> Case:
    i, j, b = axis("i", 3), axis("j", len(values), "r"), BodyBuilder()
    at = b.indirect(b.load("index", j.var, I), 6)
    b.store("y", i.var, b.reduce("sum", b.load("x", expr(i.var) * 6 + at, F), dtype=F))
    return Case(loops("sum", (i, j), b), {"x": randn(3, 6), "index": torch.tensor(values), "y": torch.zeros(3)})


def full_sum(n: int, dtype: torch.dtype = F) -> Case:
    i, b = axis("i", n, "r"), BodyBuilder()
    b.store("y", 0, b.reduce("sum", b.load("x", i.var, dtype), dtype=dtype))
    return Case(loops("sum", (i,), b), {"x": randn(n).to(dtype), "y": torch.zeros(1, dtype=dtype)})


def constant_sum(rows: int, n: int) -> Case:
    """What is summed does not change along r."""
    i, j, b = axis("i", rows), axis("j", n, "r"), BodyBuilder()
    b.store("y", i.var, b.reduce("sum", b.load("x", i.var, F), dtype=F))
    return Case(loops("sum", (i, j), b), {"x": randn(rows), "y": torch.zeros(rows)})


def weighted_columns(rows: int, cols: int) -> Case:
    """Across memory, with a value that depends on the row alone, one on the column alone, and two phases."""
    i, j, b = axis("i", rows, "r"), axis("j", cols), BodyBuilder()
    x = b.load("x", expr(i.var) * cols + expr(j.var), F)
    w, c = b.load("w", i.var, F), b.op("exp", b.load("c", j.var, F))
    weight = b.reduce("sum", w, dtype=F)  # the same for every column
    s = b.op("div", b.reduce("sum", b.op("mul", b.op("mul", x, w), c), dtype=F), weight)
    b.store("y", expr(i.var) * cols + expr(j.var), b.op("sub", x, b.op("mul", s, c)))
    b.store("s", j.var, s)
    w0 = randn(rows).abs() + 1
    tensors = {"x": randn(rows, cols), "w": w0, "c": randn(cols)}
    return Case(loops("weighted", (i, j), b), {**tensors, "y": torch.zeros(rows, cols), "s": torch.zeros(cols)})


def symbolic(rows: int, cols: int) -> Case:
    m, n = Sym("s0", lo=0, hint=64), Sym("s1", lo=0, hint=128)
    i, j, b = axis("i", expr(m)), axis("j", expr(n), "r"), BodyBuilder()
    e = expr(i.var) * expr(n) + expr(j.var)
    x = b.load("x", e, F)
    s = b.reduce("sum", x, dtype=F)
    b.store("y", e, b.op("add", x, s))
    case = Case(
        loops("rows", (i, j), b), {"x": randn(rows, cols), "y": torch.zeros(rows, cols)}, {"s0": rows, "s1": cols}
    )
    return case


def in_place_twice(n: int) -> Case:
    """A store that an earlier pass could do, into what a later pass reads again."""
    i, j, b = axis("i", 4), axis("j", n, "r"), BodyBuilder()
    e = expr(i.var) * n + expr(j.var)
    x = b.load("x", e, F)
    y = b.op("mul", x, b.const(2.0, F))
    b.store("x", e, y)
    b.store("out", e, b.op("sub", y, b.reduce("max", y, dtype=F)))
    return Case(loops("twice", (i, j), b), {"x": randn(4, n), "out": torch.zeros(4, n)})


def integers(dtype: torch.dtype, op: str, constant: int) -> Case:
    """Integer constants where C++ would take them for int."""
    i, b = axis("i", 50), BodyBuilder()
    x, c = b.load("x", i.var, dtype), b.const(constant, dtype)
    b.store("y", i.var, b.op(op, x, c))
    b.store("z", i.var, b.op(op, c, x))
    b.store("c", i.var, b.op("maximum", b.op("neg", c), b.op("mul", c, c)))
    x0 = torch.arange(-25, 25).to(dtype)
    zero = torch.zeros_like(x0)
    return Case(loops(op, (i,), b), {"x": x0, "y": zero, "z": zero, "c": zero})


def largest_constant(rows: int) -> Case:
    i, j, b = axis("i", rows), axis("j", 5, "r"), BodyBuilder()
    b.store("y", i.var, b.reduce("max", b.const(3, I), dtype=I))
    return Case(loops("max", (i, j), b), {"y": torch.zeros(rows, dtype=I)})


def confusing_names() -> Case:
    """Buffers named like axes, tile ends, accumulators, keywords, and like each other once made identifiers."""
    i, j, b = axis("i", 40), axis("j", 50, "r"), BodyBuilder()
    x = b.load("i", expr(j.var) * 40 + expr(i.var), F)
    v = b.op("add", x, b.load("v0", i.var, F))
    v = b.op("add", v, b.load("a.b", i.var, F))
    v = b.op("add", v, b.load("a_b", i.var, F))
    b.store("float", i.var, b.reduce("sum", v, dtype=F))
    b.store("i_from", i.var, b.reduce("max", v, dtype=F))
    tensors = {n: randn(40) for n in ("v0", "a.b", "a_b", "float", "i_from")}
    return Case(loops("names", (i, j), b), {"i": randn(50, 40), **tensors})


def two_parts() -> Case:
    parts = []
    tensors: dict[str, torch.Tensor] = {}
    for k, n in enumerate((5, 70000)):
        i, b = axis("i", n), BodyBuilder()
        b.store(f"p{k}", i.var, b.op("sub", b.load(f"p{k}", i.var, F), b.load("auto", 0, F)))
        parts.append(loops(f"part{k}", (i,), b))
        tensors[f"p{k}"] = randn(n)
    return Case(parts, {**tensors, "auto": torch.tensor([0.5])})


def random_nest(seed: int) -> Case:
    """Permuted inputs, a few reduced axes, two phases, whatever the seed says."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 3, 7, 16, 33, 70]) for _ in range(rng.randint(1, 3))]
    kinds = [rng.choice("pr") for _ in sizes]
    axes = [axis(f"i{d}", n, k) for d, (n, k) in enumerate(zip(sizes, kinds, strict=True))]
    b = BodyBuilder()

    def place(order: list[int]) -> object:
        out, step = expr(0), 1
        for d in reversed(order):
            out, step = out + expr(axes[d].var) * step, step * sizes[d]
        return out

    everything = list(range(len(sizes)))
    total = torch.Size(sizes).numel()
    loads = []
    for k in range(2):
        order = rng.sample(everything, len(everything))
        loads.append(b.load(f"x{k}", place(order), F))  # type: ignore[arg-type]
    v = b.op(rng.choice(["add", "mul", "maximum"]), *loads)
    if "r" in kinds:
        s = b.reduce(rng.choice(["sum", "max", "min"]), v, dtype=F)
        v = b.op("sub", b.op(rng.choice(["tanh", "exp"]), v), s)
        rows = [d for d in everything if kinds[d] == "p"]
        b.store("s", place(rows), s)  # type: ignore[arg-type]
        if rng.random() < 0.5:
            b.store("s2", place(rows), b.reduce("sum", v, dtype=F))  # type: ignore[arg-type]
    b.store("y", place(rng.sample(everything, len(everything))), v)  # type: ignore[arg-type]
    tensors = {"x0": randn(total), "x1": randn(total).flip(0).contiguous(), "y": torch.zeros(total)}
    return Case(loops("nest", axes, b), {**tensors, "s": torch.zeros(total), "s2": torch.zeros(total)})


CASES = {
    "gelu": bias_gelu(5, 33), "gelu_big": bias_gelu(70, 1000), "gelu_flat": bias_gelu(3, 40000),
    "gelu_bf16": bias_gelu(7, 65, B), "gelu_f16": bias_gelu(7, 65, H), "gelu_empty": bias_gelu(0, 3),
    "softmax": softmax(6, 100), "softmax_long": softmax(3, 20000), "softmax_one": softmax(4, 1),
    "softmax_columns": softmax(50, 33, 0), "softmax_columns_wide": softmax(9, 5000, 0),
    "softmax_in_place": softmax(6, 100, in_place=True), "softmax_long_in_place": softmax(2, 20000, in_place=True),
    "softmax_columns_in_place": softmax(50, 33, 0, in_place=True), "softmax_bf16": softmax(6, 100, dtype=B),
    "layer_norm": layer_norm(8, 130), "layer_norm_big": layer_norm(40, 3000),
    "transpose": transpose(70, 130), "transpose_small": transpose(3, 5), "transpose_bf16": transpose(64, 65, B),
    "batch_stats": batch_stats(3, 5, 49), "batch_stats_one": batch_stats(20, 40, 1),
    "roll": reshape_roll(6, 7, 10), "pad": pad(20, 3, 50), "pad_bf16": pad(20, 0, 9, B),
    "embedding": gather(9, 70, "row", [0, -1, 8, 3]), "gather": gather(9, 7, "element", [0, -9, 8]),
    "pick": scalar_gather(-2), "gathered_sum": gathered_sum([0, 5, -1, 3]),
    "sum": full_sum(10000), "sum_int": full_sum(100, I), "sum_double": full_sum(5000, torch.float64),
    "sum_empty": full_sum(0), "constant_sum": constant_sum(5, 11), "weighted": weighted_columns(40, 33),
    "weighted_wide": weighted_columns(30, 4200), "symbolic": symbolic(30, 2000), "symbolic_empty": symbolic(3, 0),
    "channels_last": transpose(64, 200),
    **{f"{op}_{str(d)[6:]}_{abs(c)}": integers(d, op, c) for op in ("remainder", "floordiv", "sub", "shl")
       for d, c in ((I, 7), (torch.int32, -3), (torch.int8, 5), (torch.uint8, 200), (I, 2**40))},
    "confusing_names": confusing_names(),
    "largest_constant": largest_constant(3),
    "in_place_twice": in_place_twice(100), "two_parts": two_parts(),
    **{f"random{seed}": random_nest(seed) for seed in range(40)},
}  # fmt: skip
FAILING = {
    "embedding_above": gather(9, 70, "row", [0, 9]), "embedding_below": gather(9, 70, "row", [-10]),
    "gather_above": gather(9, 7, "element", [0, 9, 1]), "embedding_of_nothing": gather(0, 4, "row", [0]),
    "pick_above": scalar_gather(5), "gathered_sum_above": gathered_sum([0, 6]),
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return build({f"k_{n}": c for n, c in {**CASES, **FAILING}.items()})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_as_interpreted(name, threads, library):
    case = CASES[name]
    got, want = case.run(library, threads), case.interpreted()
    for n in case.tensors:
        w = want[n]
        size = w.abs().max().item() if w.numel() and w.is_floating_point() else 1.0
        rtol = 1e-2 if w.dtype in (B, H) else 2e-5
        torch.testing.assert_close(got[n], w, rtol=rtol, atol=2e-5 * max(1.0, size), msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", FAILING)
def test_an_index_out_of_range_is_reported_not_followed(name, library):
    assert FAILING[name].call(library)[1] == 1


def test_sums_are_as_exact_as_torchs(library):
    for n in (100_000, 3_000_000):
        case = full_sum(n)
        case.tensors["x"] += 3
        got = case.run(build({f"exact_{n}": case}))["y"]
        exact = case.tensors["x"].double().sum()
        assert (got.double() - exact).abs() <= 2 * (case.tensors["x"].sum().double() - exact).abs() + 1e-7 * exact


def test_the_text_is_readable():
    source = softmax(64, 1000).generate("k_softmax").source
    assert "// softmax: model.py:3 in forward: y = f(x)" in source
    assert "for (int64_t i = 0; i < 64; ++i) {" in source and "op::exp(v2)" in source
    assert source.count("op::exp") == 1, "the exponentials of a short row are kept, not computed again"
    assert max(map(len, source.splitlines())) < 160


def test_axes_are_joined_and_sorted():
    i, j, b = axis("i", 8), axis("j", 16), BodyBuilder()
    b.store("y", expr(i.var) + expr(j.var) * 8, b.load("x", expr(i.var) + expr(j.var) * 8, F))
    source = Case(loops("copy", (i, j), b), {"x": randn(128), "y": randn(128)}).generate("k").source
    assert "for (int64_t j_i = 0; j_i < 128; ++j_i)" in source


def test_symbols_are_arguments_in_order():
    k = symbolic(3, 4).generate("k")
    assert [s.name for s in k.symbols] == ["s0", "s1"] and k.language == "cpp" and k.grid == 1
    assert "int64_t s0, int64_t s1, int threads" in k.source
