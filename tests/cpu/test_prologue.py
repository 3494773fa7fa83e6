"""Operands that a product computes as it reads them: which, when, the same values, and what the code becomes."""

import importlib.util
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import chosen, results
from prologue_cases import (
    FUNCTIONS,
    TILINGS,
    bytes_,
    case,
    computing,
    int4,
    int4_halves,
    linear,
    lowered,
    masked,
    per_column,
    per_group,
    prologue_cases,
    scales,
)

import reflib
from reflib.autotune.matmul import _tiled, fits, template_variants
from reflib.autotune.prologue import NAME, with_prologues
from reflib.autotune.question import question_of
from reflib.autotune.roofline import Problem, estimate, resident
from reflib.autotune.split_k import all_splits
from reflib.autotune.subprogram import splice
from reflib.errors import VerifyError
from reflib.fuse import fuse
from reflib.generate.compile_triton import compile_kernel, resources
from reflib.ir.data import from_data, to_data
from reflib.ir.interpret import interpret
from reflib.ir.program import Choice, KernelNode, Program, Template, Tiling
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.package import archive, manifest
from reflib.pipeline import _retarget
from reflib.target import parse_target
from tests.bench.moved import least

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
BF16 = torch.bfloat16
H200 = parse_target("sm_90")
BLOCKING = Options(autotune="blocking")


def with_winner(program: Program) -> Program:
    """With the variant in place that computes operands; what it does not need is gone."""
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    winner = next(v for v in choice.variants if v.name == NAME)
    return fuse(splice(program, choice, winner), Options(), parse_target("sm_90")).program


def on_cpu(program: Program) -> Program:
    return _retarget(program, parse_target("cpu"))


def names(program: Program) -> list[str]:
    return [v.name for n in program.nodes if isinstance(n, Choice) for v in n.variants]


# -- values -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_eager(name: str) -> None:
    """Operands are such that the product is exact: what differs would be a rounding more or less."""
    fn, make = FUNCTIONS[name]
    program = lowered(fn, make())
    whole = with_winner(program)
    verify(whole)
    assert len(whole.nodes) == 1, "no producer is left"
    assert str(from_data(json.loads(json.dumps(to_data(whole))))) == str(whole)
    (got,) = interpret(on_cpu(whole), make())
    torch.testing.assert_close(got, fn(*make()), rtol=0, atol=0)


def test_the_operand_is_rounded() -> None:
    """A product of weights that were not rounded to bfloat16 would be another one."""
    w, s = torch.full((64, 32), 3, dtype=torch.int8), torch.full((32,), 1.0 + 2**-7)
    args = torch.eye(64).to(BF16), w, s.to(BF16)
    (got,) = interpret(on_cpu(with_winner(lowered(per_column, args))), args)
    assert torch.equal(got, per_column(*args)) and float(got[0, 0]) != 3 * (1 + 2**-7)


@needs_triton
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", prologue_cases())
def test_in_tritons_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    found = results("triton_interpreting.py", "computed", *chosen(request))["computed"]
    assert not found[name]


def test_a_nest_that_is_no_operands() -> None:
    args = FUNCTIONS["relu"][1]()
    program = with_winner(lowered(FUNCTIONS["relu"][0], args))
    (t,) = program.nodes
    assert isinstance(t, Template)
    short = replace(t.prologues[0], axes=t.prologues[0].axes[:1])
    with pytest.raises(VerifyError, match="prologue of computed_a must run over"):
        verify(replace(program, nodes=(replace(t, prologues=(short,)),)))


# -- when -------------------------------------------------------------------------------------------
X = torch.zeros(16, 64, dtype=BF16)
W8 = torch.zeros(48, 64, dtype=torch.int8)
S = torch.ones(48, dtype=BF16)


def test_what_is_not_computed() -> None:
    rows = torch.zeros(16, dtype=torch.int64)
    cases: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "a gather": (lambda x, w, i: x[i] @ w, (X, X.t().contiguous(), rows)),
        "a reduction": (lambda x, w: torch.softmax(x, -1) @ w, (X, X.t().contiguous())),
        "what the kernel that makes it computes": (lambda x, w: torch.relu(x @ w) @ w.t(), (X, X.t().contiguous())),
        "an input": (lambda x, w: x @ w, (X, X.t().contiguous())),
    }
    for what, (fn, args) in cases.items():
        assert NAME not in names(lowered(fn, args)), what


def test_other_readers() -> None:
    """What is stored anyway is read where it has fewer bytes; what has as few is computed again."""

    def weights(x, w, s):
        y = w.to(x.dtype) * s[:, None]
        return torch.cat([x @ y.t(), (x * 2) @ y.t()], 1)

    def mask(x, w, v):
        y = torch.relu(x)
        return torch.cat([y @ w, y @ v], 1)

    program = lowered(weights, (X, W8, S))
    assert names(program).count(NAME) == 2, "a byte is less than two"
    program = lowered(mask, (X, X.t().contiguous(), X.t().contiguous()))
    assert names(program).count(NAME) == 2, "as many, and one kernel less if both do"
    wide = lambda x, w: torch.cat([(y := x.half()) @ w, (y * 2) @ w], 1)  # noqa: E731
    assert NAME not in names(lowered(wide, (X.float(), X.t().half().contiguous())))


def test_a_source_that_is_overwritten() -> None:
    def fn(x, w, s):
        y = w.to(x.dtype) * s[:, None]
        w.copy_(w + 1)
        return x @ y.t()

    program = lowered(fn, (X, W8, S))
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    assert NAME in names(program), "the product comes first"
    plain = replace(choice, variants=tuple(v for v in choice.variants if v.name != NAME))
    late = (*(n for n in program.nodes if n is not choice), plain)  # a legal order as well
    assert NAME not in names(with_prologues(replace(program, nodes=late)))


def decided(fn: Callable[..., Any], *args: torch.Tensor, target: str = "sm_90", **options: Any) -> str:
    (d, *_) = reflib.explain(fn, *args, target=target, **options).decisions
    return str(d.winner)


@pytest.mark.parametrize("rows, computed", [(1, True), (16, True), (64, True), (65, False), (256, False)])
def test_unmeasured_it_is_for_few_rows(rows: int, computed: bool) -> None:
    x, w, s = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=torch.int8), S.new_ones(2048)
    assert decided(linear, x, w, s).startswith(NAME) == computed
    p = torch.zeros(2048, 512, dtype=torch.uint8)
    assert decided(int4, x, p, s.new_ones(2048, 8)).startswith(NAME) == computed


@pytest.mark.parametrize("rows, n, k", [(1, 7168, 8192), (1, 8192, 1024), (16, 8192, 3584), (8, 2496, 3456)])
def test_unmeasured_it_has_warps_enough(rows: int, n: int, k: int) -> None:
    """To compute an operand takes instructions: 4 warps per multiprocessor took 3.5 times what memory needs. A warp has
    16 columns at most, which go from registers to mma.sync: as many times were lost where they are stored again."""
    p = Problem((1, rows, n, k), BF16, False, 2, 1, 0, "b")
    ranked = [c for c in (*_tiled(p, H200), *all_splits(p, H200)) if fits(p, c, H200)]
    best = min(ranked, key=lambda c: estimate(p, c, H200))
    programs = min(resident(p, best, H200), -(-p.tiles(best) * best.splits // H200.units))
    assert programs * best.num_warps >= 7 and best.n <= 16 * best.num_warps, best
    assert k % (best.k * best.splits) == 0 or best.k * best.splits > k // 4, "few blocks have what is behind the end"
    assert best.k >= 64, "a row's 64 bytes at least are read together"


@needs_triton
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fn", [linear, int4, per_column])
def test_unmeasured_one_row_is_no_tensor_cores_work(fn: Callable[..., Any], seed: int) -> None:
    """Weights along the depth are multiplied where they are computed; they are on their way 16 bytes at a time, and
    enough programs share them. Those across it (``per_column``), and more rows, are left to ``tl.dot``."""
    draw = random.Random(seed)
    n, k = 128 * draw.randrange(10, 60), 128 * draw.randrange(8, 60)
    x, s = torch.zeros(1, k, dtype=BF16), S.new_ones(n)
    packed = torch.zeros(n, k // 2, dtype=torch.uint8), s.new_ones(n, k // 128)
    plain = torch.zeros((k, n) if fn is per_column else (n, k), dtype=torch.int8), s
    weights = packed if fn is int4 else plain
    e = reflib.explain(fn, x, *weights, target="sm_90")
    assert (" row " in str(e.decisions[0].winner)) == (fn is not per_column)
    assert " row " not in decided(fn, torch.zeros(2, k, dtype=BF16), *weights)
    if fn is per_column:
        return
    kernel = e.stages.kernels[e.kernels[0].name]
    binary = compile_kernel(kernel, H200)
    used = resources(binary)
    assert used["stack"] == 0 and used["registers"] <= 128 and int(kernel.grid.evaluate({})) >= 2 * H200.units
    assert "mma" not in binary.ptx and re.search(r"cp\.async\.c[ag]\.shared\.global \[[^;]*, 0x(8|10)", binary.ptx)


@needs_triton
@pytest.mark.parametrize("fn, arch", [(linear, "sm_90"), (int4, "sm_90"), (int4, "sm_80")])
def test_bytes_become_floats_without_conversions(fn: Callable[..., Any], arch: str) -> None:
    """A multiprocessor converts 16 integers per cycle; memory delivers 20 bytes, or 40 weights of 4 bits."""
    x, s = torch.zeros(1, 1024, dtype=BF16), S.new_ones(2048)
    packed = torch.zeros(2048, 512, dtype=torch.uint8), s.new_ones(2048, 8)
    args = (torch.zeros(2048, 1024, dtype=torch.int8), s) if fn is linear else packed
    (kernel,) = reflib.explain(fn, x, *args, target=arch).kernels
    ptx = compile_kernel(kernel, parse_target(arch)).ptx
    assert not re.search(r"cvt\.rn\.f32\.[su]", ptx), "integers are converted one by one"
    if fn is int4:
        assert "tl.join(" in kernel.source and ("// 2)" in kernel.source), "nibbles are computed before they interleave"


def test_shared_values_are_computed_once() -> None:
    """What only neighbours that share an element have is computed in a short block; for another use it is spread."""
    p, s = torch.zeros(2048, 512, dtype=torch.uint8), S.new_ones(2048, 8)

    def repeated(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x @ ((p.repeat_interleave(2, 1) & 15).to(x.dtype) * s[:, :1]).t()

    (kernel,) = reflib.explain(repeated, torch.zeros(1, 1024, dtype=BF16), p, s, target="sm_90").kernels
    masked, spread = (next(i for i, line in enumerate(kernel.source.splitlines()) if text in line and " = " in line)
                      for text in ("and_bytes(v", "tl.broadcast_to(v"))  # fmt: skip
    assert masked < spread


def test_the_least_counts_what_the_operand_is_made_of() -> None:
    """Of ``tests.bench.moved``: the operand itself is nowhere in memory."""
    x, w, s = torch.zeros(16, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=torch.int8), S.new_ones(2048)
    graphs = reflib.explain(linear, x, w, s, target="sm_90").graphs
    assert least(graphs, []) == x.nbytes + w.nbytes + s.nbytes


@pytest.mark.parametrize("rows, looked_at", [(64, True), (65, False)])
def test_unmeasured_other_products_are_not_looked_at(rows: int, looked_at: bool) -> None:
    """In a transformer's training step, following every operand's chain took more than all other stages together."""
    program = lowered(linear, (torch.zeros(rows, 128, dtype=BF16), W8.new_zeros(256, 128), S.new_ones(256)))
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    plain = replace(choice, variants=tuple(v for v in choice.variants if v.name != NAME))
    program = replace(program, nodes=tuple(plain if n is choice else n for n in program.nodes))
    assert (NAME in names(with_prologues(program, measured=False))) == looked_at
    assert NAME in names(with_prologues(program))


def test_unmeasured_it_is_for_what_is_certain() -> None:
    x, s = torch.zeros(16, 1024, dtype=BF16), S.new_ones(2048)
    assert decided(int4_halves, x, torch.zeros(2048, 512, dtype=torch.uint8), s) == "aten", "a mask says what is read"
    assert decided(masked, x, x > 0, torch.zeros(1024, 2048, dtype=BF16)) == "aten", "no fewer bytes"
    w = torch.zeros(2048, 1024, dtype=torch.int8)
    assert decided(linear, x, w, s, target="sm_75") == "aten", "no tensor cores"


def test_8_bit_floats_where_triton_has_them() -> None:
    """Their cast is a call otherwise; it is gone."""
    x, s = torch.zeros(16, 1024, dtype=BF16), S.new_ones(2048)
    w = torch.zeros(2048, 1024, dtype=torch.float8_e4m3fn)
    assert decided(linear, x, w, s, target="sm_80") == "aten"
    e = reflib.explain(linear, x, w, s, target="sm_90")
    assert str(e.decisions[0].winner).startswith(NAME) and len(e.kernels) == 1 and "_to_copy(" not in e.wrapper


def test_measured_beside_the_producers_own_kernel() -> None:
    """All candidates have the same inputs and outputs, the weights' bytes among them."""
    x, w, s = torch.zeros(256, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=torch.int8), S.new_ones(2048)
    program = lowered(linear, (x, w, s))
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    q = question_of(program, choice, parse_target("sm_90"), BLOCKING, {})
    assert len(q.region.members) == 2 and set(q.region.inputs) == {n for n in program.inputs if isinstance(n, str)}
    variants = {key.variant for key in q.candidates}
    assert variants >= {"aten", "triton", NAME}
    kinds = {key.tiling.kind for key in q.candidates if key.variant == NAME}
    assert "tiled" in kinds and not kinds & {"persistent", "row"} and q.text
    again = lowered(linear, (x, w, s))
    assert question_of(again, next(n for n in again.nodes if isinstance(n, Choice)), parse_target("sm_90"), BLOCKING,
                       {}).text == q.text  # fmt: skip


def test_an_epilogue_follows() -> None:
    x, w, s = torch.zeros(16, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=torch.int8), S.new_ones(2048)
    e = reflib.explain(lambda x, w, s, b: torch.relu(linear(x, w, s) + b), x, w, s, s, target="sm_90")
    assert len(e.kernels) == 1 and str(e.decisions[0].winner).startswith(NAME)


# -- code -------------------------------------------------------------------------------------------
LARGE = {
    "per column": (per_column, (torch.int8, (8192, 1280)), (1280,)),
    "linear": (linear, (torch.int8, (1280, 8192)), (1280,)),
    "groups": (per_group, (torch.int8, (1280, 8192)), (1280, 64)),
    "int4": (int4, (torch.uint8, (1280, 4096)), (1280, 64)),
    "8-bit floats": (linear, (torch.float8_e4m3fn, (1280, 8192)), (1280,)),
}


@needs_triton
@pytest.mark.sample(6)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
def test_is_pipelined_onto_the_tensor_cores(name: str, arch: str) -> None:
    """Bytes are on their way to shared memory, 16 at a time, while others are multiplied; nothing spills."""
    fn, (dtype, shape), scale = LARGE[name]
    args = torch.zeros(64, 8192, dtype=BF16), torch.zeros(shape, dtype=dtype), torch.ones(scale, dtype=BF16)
    e = reflib.explain(fn, *args, target=arch)
    if name == "8-bit floats" and arch == "sm_80":  # which has none
        assert str(e.decisions[0].winner) == "aten"
        return
    target = parse_target(arch)
    kernel = e.stages.kernels[e.kernels[-1].name]
    binary = compile_kernel(kernel, target)
    product = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}[arch]
    assert re.search(product, binary.ptx) and binary.shared <= target.shared and resources(binary)["stack"] == 0
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10", binary.ptx)) >= 8
    loads = re.findall(r"ld\.global\S*\.b8|ld\.global\S*\.u8", binary.ptx)
    assert not loads, "weights byte by byte"


@needs_triton
@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kind", TILINGS)
def test_every_kind_compiles(kind: str, arch: str) -> None:
    if TILINGS[kind].reducers and not arch.startswith("sm"):
        pytest.skip("CUDA")
    for name in ("int4, groups of 32", "both", "batch"):
        compile_kernel(case(name, TILINGS[kind]).kernel("product", arch), parse_target(arch))


@needs_triton
def test_what_lies_past_the_end_is_not_read() -> None:
    """The fifth of five parts of a depth of 384 begins at 512: there is no fourth group of scales."""
    kernel = case("groups of 128", Tiling("split", 16, 16, 64, 4, 2, splits=5, reducers=1)).kernel("product")
    assert "yover128_b < 3" in kernel.source
    compile_kernel(kernel, parse_target("sm_90"))


def test_indices_are_wide_where_the_operand_is() -> None:
    """Halves of bytes: 2**30 of these are in memory, and 2**31 numbers are computed."""
    args = torch.empty(1, 2**16, dtype=BF16), torch.empty(2**15, 2**15, dtype=torch.uint8), S.new_ones(2**15, 1)
    for rows, index in ((2**15, "int64"), (2**14, "int32")):
        program = lowered(int4, (args[0], args[1][:rows], args[2][:rows]))
        t = replace(computing(program), tiling=TILINGS["tiled"])
        made = template_variants("product", t, program.buffers, parse_target("sm_90"))
        assert index in {k.config.index for v in made for k in v.nodes if isinstance(k, KernelNode)}
        assert index == "int32" or all(k.config.index == "int64" for v in made for k in v.nodes)


# -- wrappers, packages -----------------------------------------------------------------------------
@needs_triton
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("most", [None, 64, 1000])
def test_wrappers(wrapper: str, most: int | None) -> None:
    """``most``: rows in any call, where their number changes."""
    x, w, s = torch.zeros(16, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=torch.int8), S.new_ones(2048)
    if most is not None:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
    e = reflib.explain(linear, x, w, s, target="sm_90", wrapper=wrapper, verify=True)
    if most == 1000:
        assert str(e.decisions[0].winner) == "aten", "with many rows weights would be computed in each tile of them"
        return
    assert len(e.kernels) == 1 and str(e.decisions[0].winner).startswith(NAME)
    for kernel in e.stages.kernels.values():
        assert torch.int8 in [d for _, d in kernel.buffers] and "computed_b" not in [b for b, _ in kernel.buffers]


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", bytes_(256, 128, unsigned=True))
        self.register_buffer("s", scales(256, 2).to(BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(int4(x, self.w, self.s))


@needs_triton
@pytest.mark.slow
def test_a_package(tmp_path: Path) -> None:
    archs = ["sm_80", "sm_90", "sm_100"]
    path = reflib.aot_compile(Linear(), (torch.zeros(8, 256, dtype=BF16),), tmp_path / "m.reflib", archs)
    variants = manifest.read(archive.open(path).manifest).variants
    assert {v.arch for v in variants} >= set(archs)
    assert all(k.name.startswith("k0_") for v in variants for k in v.kernels), "one kernel, and its fallback"


@needs_triton
@pytest.mark.parametrize("batch", [64, 1024])
def test_float32_products_without_measuring(batch: int) -> None:
    """A small one computes its operand: a launch less, and nothing spilled. A large one takes as long as its
    arithmetic, at which the library is better."""
    x, y = torch.randn(batch, 64, 64), torch.randn(batch // 16, 64, 64).bfloat16()

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = y.float().exp()[:, None].expand(-1, 16, -1, -1).reshape(batch, 64, 64)
        return x @ each.transpose(1, 2)

    e = reflib.explain(fn, x, y, target="sm_90")
    products = [k for k in e.kernels if "tl.dot" in k.source]
    assert len(products) == (batch == 64)
    for k in products:
        assert resources(compile_kernel(k, parse_target("sm_90")))["stack"] == 0
