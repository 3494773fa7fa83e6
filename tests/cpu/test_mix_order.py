"""Column sums in the kernel that reduces the rows: a tensor is read once for both (``fuse.mix_order``)."""

import importlib.util
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, fused, kernels
from interpreter import chosen, results

import reflib
from reflib.errors import VerifyError
from reflib.fuse.mix_order import column_sums
from reflib.generate.compile_triton import compile_kernel, resources
from reflib.ir.expr import Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Axis, BodyBuilder, LoopNest, Store
from reflib.ir.printer import format_loop_nest
from reflib.ir.program import Buffer, Program, full_view
from reflib.ir.verify import verify
from reflib.target import parse_target

SMALL = replace(GPU, units=2)  # such kernels are made for 16,384 elements and 32 rows already
BF16, F32 = torch.bfloat16, torch.float32
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], w, b)


def layer_norm_scaled(x: Any, w: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], w)


def rms_norm(x: Any, w: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], w)


def biased_softmax(x: Any, b: Any) -> Any:
    return torch.softmax(x + b, -1)


def residual_norm(x: Any, w: Any, b: Any) -> Any:
    h = torch.sin(x) * 2
    return h + F.layer_norm(F.gelu(h), x.shape[-1:], w, b)


FUNCTIONS: list[tuple[Callable[..., Any], int]] = [
    (layer_norm, 2), (layer_norm_scaled, 1), (rms_norm, 1), (biased_softmax, 1), (residual_norm, 2),
]  # fmt: skip


def backward(
    fn: Any, shape: tuple[int, ...], vectors: int, dtype: Any = BF16, rows: bool = False, **options: Any
) -> Any:
    """The backward for sm_90. ``rows``: their number is not known."""
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    if rows:
        torch._dynamo.mark_dynamic(x, 0)
    more = [torch.empty(shape[-1], dtype=dtype, requires_grad=True) for _ in range(vectors)]
    return reflib.explain(fn, x, *more, target="sm_90", verify=True, **options).backward


def accesses(e: Any, points: int) -> Counter[str]:
    """How many kernels load, and how many store, each tensor of that size."""
    program, out = e.fused, Counter()
    for n in kernels(e.stages.fused):
        out.update(b for b in (*n.reads(), *n.writes()) if program.buffers[b].numel.hint() >= points)
    return out


# -- structure ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(2 * len(FUNCTIONS)))
@pytest.mark.sample(3)
def test_each_tensor_is_read_once(number: int) -> None:
    rng = random.Random(number)
    fn, vectors = FUNCTIONS[number // 2]
    columns = rng.choice([64, 512, 768, rng.randint(100, 4096), 4096])
    lead = [rng.randint(max(2200, 1_100_000 // columns), 20_000)]
    lead = [*rng.choice([[], [2], [2, 3]]), *lead] if number % 2 == 0 else lead
    e = backward(fn, (*lead, columns), vectors, rng.choice([BF16, F32]), rows=number % 2 == 1)
    mixed = [n for n in kernels(e.stages.fused) if column_sums(n)]
    assert len(mixed) == 1 and len(column_sums(mixed[0])) == vectors and len(e.kernels) == 2
    points = columns * torch.Size(lead).numel()
    assert set(accesses(e, points).values()) == {1}
    (kernel,) = [k for k in e.kernels if "sum0 = sum0 +" in k.source]
    two = columns <= 4096 and torch.Size(lead).numel() >= 128 * GPU.units
    assert "atomic" not in kernel.source and int(kernel.grid) == (2 if two else 1) * GPU.units


def test_several_column_sums_of_one_kernel_share_the_second_launch() -> None:
    e = backward(residual_norm, (40_000, 1000), 2)
    second = e.kernels[1]
    assert len(e.kernels) == 2 and second.source.count("tl.store") == 2


def test_a_program_with_a_norm_of_each_size_has_one_kernel_for_each() -> None:
    def two(x: Any, y: Any, w: Any, v: Any) -> Any:
        return F.layer_norm(x, (512,), w).sum() + F.rms_norm(y, (256,), v).sum() + (x.reshape(-1, 256) * y).sum()

    shapes = [(20_000, 512), (40_000, 256), (512,), (256,)]
    args = [torch.empty(s, dtype=BF16, requires_grad=True) for s in shapes]
    e = reflib.explain(two, *args, target="sm_90", verify=True).backward
    assert len([n for n in kernels(e.stages.fused) if column_sums(n)]) == 2


@pytest.mark.parametrize(
    "shape, dtype, options, text",
    [
        ((2000, 4096), BF16, {}, "2000 rows are too few for 132 programs"),
        ((6000, 10_000), BF16, {}, "registers do not hold rows of 10000 elements"),
        ((6000, 4096), BF16, {"persistent_limit": 1024}, "registers do not hold"),
        ((6000, 8192), F32, {}, "would not read less"),
        ((40_000, 512), BF16, {"dynamic": True}, "not known before run time"),
    ],
)
def test_what_does_not_pay_stays_apart_and_says_why(shape: Any, dtype: Any, options: Any, text: str) -> None:
    e = backward(layer_norm, shape, 2, dtype, **options)
    assert any(text in r.reason.text for r in e.refusals if r.reason.code == "columns")
    if "read less" not in text:
        assert not any(column_sums(n) for n in kernels(e.stages.fused))


def test_few_rows_are_no_subject() -> None:
    """Their sums are not cut in two: one kernel for rows, one for columns."""
    e = backward(layer_norm, (200, 64), 2)
    assert not any(column_sums(n) for n in kernels(e.stages.fused)) and len(e.kernels) <= 2
    assert not any(r.reason.code == "columns" for r in e.refusals)


@pytest.mark.parametrize("number", range(3))
def test_small_tensors_take_a_launch_less(number: int) -> None:
    """Also where there are fewer rows than make all multiprocessors busy, if each program's are few elements."""
    rng = random.Random(200 + number)
    columns, rows = rng.randint(64, 2000), rng.randint(260, 2100)
    columns = min(columns, 16_000 * min(132, rows // 8) // rows)
    fn, vectors = rng.choice(FUNCTIONS)
    e = backward(fn, (rows, columns), vectors, rng.choice([BF16, F32]))
    (mixed,) = [n for n in kernels(e.stages.fused) if column_sums(n)]
    assert len(column_sums(mixed)) == vectors and len(e.kernels) == 2
    (kernel,) = [k for k in e.kernels if "sum0 = sum0 +" in k.source]
    assert rows / int(kernel.grid) >= 8 and int(kernel.grid) <= GPU.units


def modulated(x: Any, s: Any, t: Any, w: Any) -> Any:
    """For each image a scale and a shift of its own; for all, a weight."""
    return F.layer_norm(x, x.shape[-1:], w) * (1 + s[:, None]) + t[:, None]


IMAGES = [(16, 256, 16), (48, 200, 48), (264, 64, 264), (90, 200, 0), (8, 240, 8), (8, 60, 0)]


@pytest.mark.parametrize("images, rows, groups", IMAGES)
def test_sums_of_each_image(images: int, rows: int, groups: int) -> None:
    """By programs of its own, if these are as many as multiprocessors are, and have rows enough."""
    args = [torch.empty(s, dtype=BF16, requires_grad=True) for s in ((images, rows, 640), *[(images, 640)] * 2, (640,))]
    e = reflib.explain(modulated, *args, target="sm_90", verify=True).backward
    found = [n for n in kernels(e.stages.fused) if column_sums(n)]
    assert [len(column_sums(n)) for n in found] == [3 if groups else 1]
    if groups:
        assert set(accesses(e, images * rows * 640).values()) == {1}
        counts = {e.fused.buffers[s.buffer].shape[0].hint() for s in column_sums(found[0])}
        assert max(counts) == groups * min(counts) and max(counts) >= 0.75 * -(-max(counts) // 132) * 132
    assert groups or images * rows < 1000 or any("groups of" in r.reason.text for r in e.refusals)


def test_off() -> None:
    e = backward(layer_norm, (32768, 512), 2, mix_orders=False)
    assert not any(column_sums(n) for n in kernels(e.stages.fused))
    assert not any(r.reason.code == "columns" for r in e.refusals)
    assert sorted(accesses(e, 32768 * 512).values()) == [1, 2, 2]


def test_columns_alone_and_other_directions_stay_as_they_are() -> None:
    def over_batches(x: Any) -> Any:  # columns of (T, C), rows of C
        return x.softmax(-1), x.sum(0)

    for fn, shape in ((lambda x: (x * 2).sum(0), (40_000, 512)), (over_batches, (5000, 16, 64))):
        e = reflib.explain(fn, torch.empty(shape), target="sm_90", verify=True)
        assert not any(column_sums(n) for n in kernels(e.stages.fused))


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_memory_runs_across_are_summed_apart(seed: int) -> None:
    """Of long ones registers hold few, a small part of each sector; and the rows' kernel holds as many as it can."""
    rng = random.Random(seed)
    n = rng.randint(1030, 2000)

    def f(x: Any, y: Any, w: Any) -> Any:
        return layer_norm_scaled(x.float() + y.float().t(), w)

    args = [torch.empty(s, dtype=BF16, requires_grad=True) for s in ((8192, n), (n, 8192), (n,))]
    rows = reflib.explain(f, *args, target="sm_90").backward.scheduled.nodes[0]
    launches = [n.config for v in rows.variants for n in v.nodes]
    assert launches[0].reduction == "persistent" and launches[0].xblock >= 4


def test_a_product_does_not_sum_columns() -> None:
    """A bias' gradient is the column sum of what an epilogue makes."""

    def mlp(x: Any, w: Any, b: Any, g: Any) -> Any:
        return F.rms_norm(F.gelu(x @ w + b), (512,), g)

    args = [torch.empty(s, dtype=BF16, requires_grad=True) for s in ((16384, 512), (512, 512), (512,), (512,))]
    e = reflib.explain(mlp, *args, target="sm_90", verify=True).backward
    assert [len(column_sums(n)) for n in kernels(e.stages.fused) if column_sums(n)] == [2]


# -- meaning ------------------------------------------------------------------------------------------
def both(x: Any, w: Any, b: Any) -> Any:
    """Rows and columns in one forward; the columns also of what the rows returned."""
    y = F.layer_norm(x, x.shape[-1:], w, b)
    return y, x.softmax(-1).sum(0), (y * x).sum(0) * 2, x.sum(-1)


@pytest.mark.parametrize("number", range(6))
def test_fused_programs_compute_the_same(number: int) -> None:
    rng = random.Random(100 + number)
    columns = rng.choice([rng.randint(3, 50), rng.randint(200, 900)])
    rows = rng.randint(max(33, 16_500 // columns), 20_000 // columns + 100)
    torch.manual_seed(number)
    args = [torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)]
    f = fused(both, args, SMALL, symbolic=False)
    (mixed,) = [n for n in kernels(f) if column_sums(n)]
    assert mixed.reduced and len(column_sums(mixed)) == 2
    again = reflib.fuse.fuse(f.program, reflib.Options(), SMALL)  # as after a choice: nothing is cut twice
    verify(again.program)
    for got, want in zip(interpret(again.program, args), both(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * rows)


def _program(body: Callable[[BodyBuilder, Any, Any], None]) -> Program:
    i, j = Axis(Var("i", expr(6)), "p"), Axis(Var("j", expr(5)), "p")
    b = BodyBuilder()
    body(b, expr(i.var), expr(j.var))
    cpu = torch.device("cpu")
    sizes = {"x": (expr(6), expr(5)), "part": (expr(3), expr(5))}
    buffers = {n: Buffer(n, F32, cpu, s, (expr(5), expr(1)), "input" if n == "x" else "temp") for n, s in sizes.items()}
    nest = LoopNest("sums", (i, j), tuple(b.body))
    return Program(("x",), buffers, (nest,), (full_view(buffers["part"]),))


def test_sums_are_over_all_points_also_where_the_value_is_one_of_all_rows() -> None:
    def body(b: BodyBuilder, i: Any, j: Any) -> None:
        b.store("part", j, b.load("x", j, F32), "sum")

    program, x = _program(body), torch.randn(6, 5)
    verify(program)
    assert "store part[j] += %0" in format_loop_nest(program.nodes[0])
    torch.testing.assert_close(interpret(program, [x])[0].sum(0), x[0] * 6)


@pytest.mark.parametrize(
    "body, text",
    [
        (lambda b, i, j: b.store("part", j + 1, b.load("x", 5 * i + j, F32), "sum"), "the column goes up to"),
        (lambda b, i, j: b.store("part", j, b.load("x", 5 * i + j, F32), "max"), "are not"),
        (lambda b, i, j: [b.store("part", j, b.load("x", k + j, F32), "sum") for k in (0, 5)], "another statement"),
    ],
)
def test_the_verifier_knows_the_rules(body: Any, text: str) -> None:
    with pytest.raises(VerifyError, match=text):
        verify(_program(body))


def test_a_store_of_a_sum_is_written_as_data() -> None:
    from reflib.ir.data import decode, encode

    s = Store("part", expr(3), 7, "sum")
    assert decode(encode(s)) == s


# -- code ---------------------------------------------------------------------------------------------
@triton
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "name",
    ["layer_norm", "layer_norm without bias", "rms_norm", "softmax of a sum", "norm of a gelu", "residual",
     "modulated norm", "gated norm"],
)  # fmt: skip
def test_in_tritons_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    """Backwards against float64: rows and columns of any size, static and dynamic, aligned and not."""
    found = results("mixed_programs.py", *chosen(request))
    mine = {case: wrong for case, wrong in found.items() if case.partition(",")[0] == name}
    assert len(mine) == 4 and {case: wrong for case, wrong in mine.items() if wrong} == {}


@triton
@pytest.mark.parametrize("fn, vectors, columns", [(layer_norm, 2, 4096), (rms_norm, 1, 512)])
def test_the_kernel_fits_in_registers(fn: Any, vectors: int, columns: int) -> None:
    e = backward(fn, (1 << 28 >> columns.bit_length(), columns), vectors)
    (kernel,) = [k for k in e.kernels if "sum0 = sum0 +" in k.source]
    used = resources(compile_kernel(kernel, parse_target("sm_90")))
    assert used["registers"] <= 128 and used["stack"] == 0


def test_the_c_plus_plus_wrapper_launches_one_program_per_row_of_partial_sums() -> None:
    e = reflib.explain(both, torch.empty(20_000, 64), torch.empty(64), torch.empty(64), target="sm_90", wrapper="cpp")
    assert len(e.kernels) == 2 and f"{2 * GPU.units}" in e.wrapper and e.kernels[0].name in e.wrapper


def test_pairs_of_two_lists_are_computed_again() -> None:
    """Rows and columns of all pairs are read nowhere: a kernel of both, of a program per list, would not read less."""

    def pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        d = (x[:, :, None] - y[:, None]).abs()
        return d.mean(2), d.sum(1)

    e = reflib.explain(pairs, torch.randn(34194, 16), torch.randn(34194, 16), target="sm_90")
    assert len(e.kernels) <= 2 and not any(column_sums(n) for n in e.fused.nodes)
