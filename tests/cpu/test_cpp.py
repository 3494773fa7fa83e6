"""Loop nests in C++: every shape of nest, on awkward sizes, against the interpreter."""

import ctypes
import random
from typing import Any

import pytest
import torch
import triton_cases as cases
from cpp_running import Case, as_cpp, build, one
from hand_loops import axis

from reflib.generate.cpp import HEADER
from reflib.ir.expr import expr
from reflib.ir.loops import BodyBuilder, LoopNest, Origin
from reflib.toolchain import build_library

F, B, H, I = torch.float32, torch.bfloat16, torch.float16, torch.int64


def randn(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def loops(name: str, axes, b: BodyBuilder) -> LoopNest:
    return LoopNest(name, tuple(axes), tuple(b.body), (Origin(name, "model.py:3 in forward: y = f(x)"),))


def bias_gelu(rows: int, cols: int, dtype: torch.dtype = F) -> Case:
    def gelu(b: BodyBuilder, x: int, bias: int) -> int:
        t = b.op("add", x, bias)
        erf = b.op("erf", b.op("mul", t, b.const(0.5**0.5, F)))
        return b.op("mul", b.op("mul", t, b.const(0.5, F)), b.op("add", erf, b.const(1.0, F)))

    x = randn(rows, cols, dtype=dtype), lambda i, j: i * cols + j
    bias = randn(cols, dtype=dtype), lambda i, j: j
    return as_cpp(cases.pointwise((rows, cols), {"x": x, "bias": bias}, gelu, dtype))


def transpose(rows: int, cols: int, dtype: torch.dtype = F) -> Case:
    x, r = (randn(cols, rows, dtype=dtype), lambda i, j: j * rows + i), (randn(rows), lambda i, j: i)
    return as_cpp(cases.pointwise((rows, cols), {"x": x, "r": r}, lambda b, x, r: b.op("add", x, r), dtype))


def norm(*args: Any, **kwargs: Any) -> Case:
    return as_cpp(cases.norm(*args, **kwargs))


def gather(values: list[int], cols: int, each: bool = False) -> Case:
    """Rows of nine, or elements."""
    index = torch.tensor(values)
    return as_cpp(cases.gather(index[:, None].expand(len(values), cols).contiguous() if each else index, 9, cols))


def reshape_roll(n: int, m: int, shift: int) -> Case:
    """// and % in the index, of something that can be negative."""
    i, b = axis("i", n * m), BodyBuilder()
    source = (expr(i.var) - shift) % (n * m)
    b.store("y", i.var, b.load("x", (source % n) * m + source // n, F))
    b.store("q", i.var, b.index((expr(i.var) - shift) // m))
    return one(loops("roll", (i,), b), {"x": randn(n, m), "y": torch.zeros(n * m), "q": torch.zeros(n * m, dtype=I)})


def scalar_gather(value: int) -> Case:
    b = BodyBuilder()
    b.store("y", 0, b.load("x", b.indirect(b.load("index", 0, I), 5), F))
    return one(loops("pick", (), b), {"x": randn(5), "index": torch.tensor([value]), "y": torch.zeros(1)})


def gathered_sum(values: list[int]) -> Case:
    i, j, b = axis("i", 3), axis("j", len(values), "r"), BodyBuilder()
    at = b.indirect(b.load("index", j.var, I), 6)
    b.store("y", i.var, b.reduce("sum", b.load("x", expr(i.var) * 6 + at, F), dtype=F))
    return one(loops("sum", (i, j), b), {"x": randn(3, 6), "index": torch.tensor(values), "y": torch.zeros(3)})


def full_sum(n: int, dtype: torch.dtype = F) -> Case:
    i, b = axis("i", n, "r"), BodyBuilder()
    b.store("y", 0, b.reduce("sum", b.load("x", i.var, dtype), dtype=dtype))
    return one(loops("sum", (i,), b), {"x": randn(n).to(dtype), "y": torch.zeros(1, dtype=dtype)})


def constant_sum(rows: int, n: int) -> Case:
    """What is summed does not change along r."""
    i, j, b = axis("i", rows), axis("j", n, "r"), BodyBuilder()
    b.store("y", i.var, b.reduce("sum", b.load("x", i.var, F), dtype=F))
    return one(loops("sum", (i, j), b), {"x": randn(rows), "y": torch.zeros(rows)})


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
    return one(loops("weighted", (i, j), b), {**tensors, "y": torch.zeros(rows, cols), "s": torch.zeros(cols)})


def in_place_twice(n: int) -> Case:
    """A store that an earlier pass could do, into what a later pass reads again."""
    i, j, b = axis("i", 4), axis("j", n, "r"), BodyBuilder()
    e = expr(i.var) * n + expr(j.var)
    x = b.load("x", e, F)
    y = b.op("mul", x, b.const(2.0, F))
    b.store("x", e, y)
    b.store("out", e, b.op("sub", y, b.reduce("max", y, dtype=F)))
    return one(loops("twice", (i, j), b), {"x": randn(4, n), "out": torch.zeros(4, n)})


def integers(dtype: torch.dtype, op: str, constant: int) -> Case:
    """Integer constants where C++ would take them for int."""
    i, b = axis("i", 50), BodyBuilder()
    x, c = b.load("x", i.var, dtype), b.const(constant, dtype)
    b.store("y", i.var, b.op(op, x, c))
    b.store("z", i.var, b.op(op, c, x))
    b.store("c", i.var, b.op("maximum", b.op("neg", c), b.op("mul", c, c)))
    x0 = torch.arange(-25, 25).to(dtype)
    zero = torch.zeros_like(x0)
    return one(loops(op, (i,), b), {"x": x0, "y": zero, "z": zero, "c": zero})


def largest_constant(rows: int) -> Case:
    i, j, b = axis("i", rows), axis("j", 5, "r"), BodyBuilder()
    b.store("y", i.var, b.reduce("max", b.const(3, I), dtype=I))
    return one(loops("max", (i, j), b), {"y": torch.zeros(rows, dtype=I)})


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
    return one(loops("names", (i, j), b), {"i": randn(50, 40), **tensors})


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
    return one(loops("nest", axes, b), {**tensors, "s": torch.zeros(total), "s2": torch.zeros(total)})


CASES = {
    **{name: as_cpp(make()) for name, make in cases.kernel_cases().items()},
    "gelu": bias_gelu(5, 33), "gelu_big": bias_gelu(70, 1000), "gelu_flat": bias_gelu(3, 40000),
    "gelu_bf16": bias_gelu(7, 65, B), "gelu_f16": bias_gelu(7, 65, H), "gelu_empty": bias_gelu(0, 3),
    "softmax_long": norm("softmax", 3, 20000), "softmax_one": norm("softmax", 4, 1),
    "softmax_columns": norm("softmax", 33, 50, across=True),
    "softmax_columns_wide": norm("softmax", 5000, 9, across=True),
    "softmax_in_place": norm("softmax", 6, 100, out="x"), "softmax_long_in_place": norm("softmax", 2, 20000, out="x"),
    "softmax_columns_in_place": norm("softmax", 33, 50, across=True, out="x"),
    "layer_norm_130": norm("layer_norm", 8, 130), "layer_norm_big": norm("layer_norm", 40, 3000),
    "transpose_bias": transpose(70, 130), "transpose_small": transpose(3, 5), "transpose_bf16": transpose(64, 65, B),
    "batch_stats": as_cpp(cases.batch_norm_stats(3, 5, 49)),
    "batch_stats_one": as_cpp(cases.batch_norm_stats(20, 40, 1)),
    "reshape_roll": reshape_roll(6, 7, 10), "pad_far": as_cpp(cases.pad(1, 20, 3, 50)),
    "pad_bf16": as_cpp(cases.pad(1, 20, 0, 9, B)),
    "embedding": gather([0, -1, 8, 3], 70), "gather_each": gather([0, -9, 8], 7, each=True),
    "pick": scalar_gather(-2), "gathered_sum": gathered_sum([0, 5, -1, 3]),
    "sum": full_sum(10000), "sum_int": full_sum(100, I), "sum_double": full_sum(5000, torch.float64),
    "sum_empty": full_sum(0), "constant_sum": constant_sum(5, 11), "weighted": weighted_columns(40, 33),
    "weighted_wide": weighted_columns(30, 4200), "symbolic": norm("softmax", 30, 2000, dynamic=True),
    "symbolic_empty": norm("rms_norm", 3, 0, dynamic=True), "channels_last": transpose(64, 200),
    **{f"{op}_{str(d)[6:]}_{abs(c)}": integers(d, op, c) for op in ("remainder", "floordiv", "sub", "shl")
       for d, c in ((I, 7), (torch.int32, -3), (torch.int8, 5), (torch.uint8, 200), (I, 2**40))},
    "confusing_names": confusing_names(),
    "largest_constant": largest_constant(3),
    "in_place_twice": in_place_twice(100), "two_parts": as_cpp(cases.several(5, 70000)),
    **{f"random{seed}": random_nest(seed) for seed in range(40)},
}  # fmt: skip
FAILING = {
    "embedding_above": gather([0, 9], 70), "embedding_below": gather([-10], 70),
    "gather_above": gather([0, 9, 1], 7, each=True), "pick_above": scalar_gather(5),
    "embedding_of_nothing": as_cpp(cases.gather(torch.tensor([0]), 0, 4)), "gathered_sum_above": gathered_sum([0, 6]),
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return build({f"k_{n}": c for n, c in {**CASES, **FAILING}.items()})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_as_interpreted(name, threads, library):
    case = CASES[name]
    got, want = case.run(library, threads), case.expected()
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


def moved(dtype: torch.dtype) -> Case:
    """y = x and z = x + x, of elements with every pattern of bits."""
    i, b = axis("i", 2**16), BodyBuilder()
    x = b.load("x", expr(i.var), F)
    b.store("y", expr(i.var), x)
    b.store("z", expr(i.var), b.op("add", x, x))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return one(loops("moved", (i,), b), {"x": every, "y": torch.zeros_like(every), "z": torch.zeros_like(every)})


def test_a_half_that_is_only_moved_keeps_its_bits():
    found = {f"moved_{str(d)[6:]}": moved(d) for d in (H, B)}
    library = build(found)
    for case in found.values():
        x, got = case.tensors["x"], case.run(library)
        assert torch.equal(got["y"].view(torch.int16), x.view(torch.int16)), "NaNs have bits of their own"
        assert torch.equal((x + x).nan_to_num(), got["z"].nan_to_num())


def test_threads_share_columns_in_tiles_as_wide_as_can_be():
    """The width of a tile, and sums of columns whose last tile is narrower."""
    i, r, b = axis("i", 1000), axis("r", 300, "r"), BodyBuilder()
    b.store("y", expr(i.var), b.reduce("sum", b.load("x", expr(i.var) + expr(r.var) * 1000, F), dtype=F))
    case = one(loops("columns", (i, r), b), {"x": randn(300, 1000), "y": randn(1000)})
    library, want = build({"columns": case}), case.tensors["x"].double().sum(0).float()
    assert case.made is not None and "op::tile_width(1000, threads, 64, 1000)" in case.made.source
    for threads in (1, 2, 3, 5, 16, 50):
        torch.testing.assert_close(case.run(library, threads)["y"], want, rtol=1e-5, atol=1e-4)
    given = [(1024, t, 64, 256) for t in (1, 2, 3, 4, 16, 99)] + [(100, 1, 64, 100), (4000, 16, 64, 256)]
    text = "".join(f"out[{n}] = op::tile_width({str(g)[1:-1]});" for n, g in enumerate(given))
    found = torch.zeros(len(given), dtype=torch.int64)
    path = build_library([f'extern "C" void widths(int64_t* out) {{ {text} }}'], header=HEADER)
    ctypes.CDLL(str(path)).widths(ctypes.c_void_p(found.data_ptr()))
    assert found.tolist() == [256, 256, 176, 256, 64, 64, 100, 256]


def test_the_text_is_readable():
    source = norm("softmax", 64, 1000).generate("k_softmax").source
    assert "// softmax: model.py:3 in forward: y = f(x)" in source
    assert "for (int64_t i = 0; i < 64; ++i) {" in source and "op::exp(v2)" in source
    assert source.count("op::exp") == 1, "the exponentials of a short row are kept, not computed again"
    assert max(map(len, source.splitlines())) < 160


def test_axes_are_joined_and_sorted():
    i, j, b = axis("i", 8), axis("j", 16), BodyBuilder()
    b.store("y", expr(i.var) + expr(j.var) * 8, b.load("x", expr(i.var) + expr(j.var) * 8, F))
    source = one(loops("copy", (i, j), b), {"x": randn(128), "y": randn(128)}).generate("k").source
    assert "for (int64_t j_i = 0; j_i < 128; ++j_i)" in source


def test_symbols_are_arguments_in_order():
    k = norm("softmax", 3, 4, dynamic=True).generate("k")
    assert [s.name for s in k.symbols] == ["s0", "s1"] and k.language == "cpp" and k.grid == 1
    assert "int64_t s0, int64_t s1, int threads" in k.source
