"""What a kernel needs, read from its binary, and how many programs fit; when an epilogue is fused unmeasured."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, check_same, kernels, lowered, templated, templates
from test_matmul_choice import H200, HALF, OFF, product

import reflib
from reflib.autotune.decide import with_tiling
from reflib.autotune.matmul import apart, template_variants
from reflib.autotune.points import _pruning
from reflib.autotune.question import question_of
from reflib.autotune.ranges import key_of
from reflib.autotune.report import Report, epilogue_verdict, occupancy, report
from reflib.autotune.subprogram import splice
from reflib.fuse import fuse
from reflib.generate import generate
from reflib.generate.compile_triton import Binary, compile_kernel, resources
from reflib.generate.kernel import Kernel
from reflib.generate.matmul import generate_matmul
from reflib.ir.data import from_data, to_data
from reflib.ir.expr import expr
from reflib.ir.program import Choice, Program, Template, Tiling, Variant, fallback_kernels
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.schedule import schedule
from reflib.target import Target, parse_target

CUDA = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]

# Three arrays of 128 words a thread that are needed from beginning to end: they cannot stay in 255 registers.
GREEDY = """
import triton
import triton.language as tl


@triton.jit
def greedy(x, y, N: tl.constexpr = 4096):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(x + N + i)
    c = tl.load(x + 2 * N + i)
    total = tl.sum(a * b + c, axis=0)
    tl.store(y + i, a * total)
    tl.store(y + N + i, b * total)
    tl.store(y + 2 * N + i, c * total)
"""

# Reducing a large angle takes an array on the stack, and a function of its own.
SINE = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def sine(x, y, N: tl.constexpr = 256):
    i = tl.arange(0, N)
    tl.store(y + i, libdevice.sin(tl.load(x + i)))
"""


def compiled(source: str, name: str, arch: str) -> Binary:
    pointers = (("x", torch.float32), ("y", torch.float32))
    return compile_kernel(
        Kernel(name, "triton", source, pointers, (), expr(1), 1, 1, "int32", (0, 1)), parse_target(arch)
    )


def multiplied(arch: str, tiling: Tiling) -> Binary:
    t, buffers = product(256, 256, 256)
    target = parse_target(arch)
    node = template_variants("mm", replace(t, tiling=tiling), buffers, target)[0].kernel
    part = node.parts[0]
    assert isinstance(part, Template)
    return compile_kernel(generate_matmul(node, buffers, target, ["x", "y"]), target)


def of(binary: Binary) -> Report:
    return report(binary, parse_target(binary.arch))


# -- reading ----------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", CUDA)
def test_the_bytes_say_what_the_tool_says(arch: str) -> None:
    tiling = Tiling("tiled", 64, 64, 32, 4, 2)
    made = [compiled(GREEDY, "greedy", arch), compiled(SINE, "sine", arch), multiplied(arch, tiling)]
    for binary in made:
        r, tool = of(binary), resources(binary)
        assert (r.registers, r.stack, r.shared) == (tool["registers"], tool["stack"], binary.shared + tool["shared"])
        assert r.threads == 32 * binary.num_warps and r.blocks
    greedy, sine, mm = (of(b) for b in made)
    assert greedy.spills and not sine.spills and sine.stack
    assert mm.spills == (arch == "sm_75")  # no tensor cores: both operands are in registers


def test_of_other_bytes_nothing_is_known() -> None:
    binary = multiplied("sm_90", Tiling("tiled", 64, 64, 32, 4, 2))
    for image in (b"", b"no binary", binary.image[:64], binary.image[: len(binary.image) // 2]):
        broken = replace(binary, image=image)
        assert (of(broken).registers, of(broken).stack, of(broken).blocks) == (None, None, None)
    assert of(replace(binary, entry="another")).registers is None
    amd = of(multiplied("gfx942", Tiling("tiled", 64, 64, 32, 4, 2)))
    assert amd.registers is None and amd.shared and amd.threads == 256 and (amd.blocks, amd.limit) == (None, "")


# -- occupancy --------------------------------------------------------------------------------------
def made(registers: int = 32, shared: int = 0, threads: int = 128, arch: str = "sm_90", stack: int = 0) -> Report:
    r = Report("k", arch, registers, stack, shared, threads)
    blocks, limit = occupancy(r, parse_target(arch))
    return replace(r, blocks=blocks, limit=limit)


@dataclass(frozen=True)
class Case:
    """By NVIDIA's occupancy calculator."""

    arch: str
    registers: int
    shared: int
    threads: int
    blocks: int
    limit: str


CASES = [
    Case("sm_90", 32, 0, 128, 16, "registers and threads"),
    Case("sm_90", 32, 0, 32, 32, "blocks"),
    Case("sm_90", 64, 0, 256, 4, "registers"),
    Case("sm_90", 65, 0, 256, 3, "registers"),  # 72: in units of 8 for each thread of a warp
    Case("sm_90", 255, 0, 256, 1, "registers"),
    Case("sm_90", 168, 0, 128, 3, "registers"),
    Case("sm_90", 128, 112 * 1024, 128, 2, "shared memory"),
    Case("sm_90", 128, 113 * 1024, 128, 2, "shared memory"),  # each with 1 KB more: 228 are enough
    Case("sm_90", 128, 113 * 1024 + 1, 128, 1, "shared memory"),
    Case("sm_90", 168, 227 * 1024, 256, 1, "registers and shared memory"),
    Case("sm_80", 32, 163 * 1024, 128, 1, "shared memory"),
    Case("sm_86", 40, 0, 128, 12, "registers and threads"),
    Case("sm_86", 32, 99 * 1024, 128, 1, "shared memory"),
    Case("sm_89", 16, 0, 32, 24, "blocks"),
    Case("sm_75", 64, 32 * 1024, 128, 2, "shared memory"),  # nothing more for each
    Case("sm_75", 32, 0, 256, 4, "threads"),
    Case("sm_120", 32, 0, 64, 24, "threads and blocks"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_occupancy(case: Case) -> None:
    r = made(case.registers, case.shared, case.threads, case.arch)
    assert r.blocks == case.blocks
    assert r.limit == case.limit


def test_what_cannot_be_launched() -> None:
    assert made(255, 0, 512).blocks == 0 and made(255, 0, 512).limit == "registers"
    assert made(32, 228 * 1024).blocks == 0 and made(32, 228 * 1024).limit == "shared memory"


def test_nothing_is_said_about_others() -> None:
    r = Report("k", "sm_87", 32, 0, 0, 128)
    assert occupancy(r, Target("cuda", "sm_87", 163 * 1024, 16)) == (None, "")
    assert occupancy(replace(r, arch="sm_90", registers=None), H200) == (None, "")


# -- epilogues --------------------------------------------------------------------------------------
def test_an_epilogue_that_costs_nothing_is_fused() -> None:
    verdict, why = epilogue_verdict(made(96), made(90), 2_000_000)
    assert verdict == "fuse" and "2.0 MB" in why and "spills nothing" in why
    assert epilogue_verdict(made(32), made(120), 1)[0] == "fuse"  # more of them is better still
    verdict, why = epilogue_verdict(made(255, stack=80), made(255, stack=80), 1000)
    assert verdict == "fuse" and "1.0 KB" in why and "nothing more" in why


@pytest.mark.parametrize("fused, plain, saved, why", [
    (made(100), made(96), 0, "no bytes"),
    (made(255, stack=312), made(255), 1000, "spills 312 bytes per thread, without 0"),
    (made(96, stack=8), made(96), 1000, "spills 8 bytes"),
    (made(129), made(128), 1000, "3 instead of 4 thread blocks"),
    (made(32, 100 * 1024), made(32, 50 * 1024), 1000, "shared memory"),
    (replace(made(32), blocks=None), made(32), 1000, "does not say"),
    (made(32), replace(made(32), stack=None), 1000, "does not say"),
])  # fmt: skip
def test_what_is_not_certain_is_measured(fused: Report, plain: Report, saved: int, why: str) -> None:
    verdict, text = epilogue_verdict(fused, plain, saved)
    assert verdict == "measure" and why in text


# -- apart ------------------------------------------------------------------------------------------
def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w + b)


def ways(tiling: Tiling) -> tuple[Program, Choice, Variant]:
    """A program with a choice, and its Triton variant in these blocks."""
    args = [torch.randn(*s).half() for s in ((256, 256), (256, 512), (512,))]
    program = reflib.explain(linear, *args, target="sm_90", dynamic=False).program
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    return program, choice, with_tiling(next(a for a in choice.variants if a.name == "triton"), tiling)


def binaries(program: Program, choice: Choice, a: Variant) -> dict[str, Binary]:
    """The fast kernels, the product's first."""
    fused = fuse(splice(program, choice, a), OFF, H200)
    chosen, _ = schedule(fused, OFF, lambda device: H200)
    made = generate(chosen, lambda device: H200)
    return {n: compile_kernel(k, H200) for n, k in made.items() if n not in fallback_kernels(chosen.nodes)}


def test_a_product_with_its_epilogue_apart() -> None:
    program, choice, a = ways(Tiling("tiled", 64, 128, 64, 4, 3))
    b = apart(a)
    assert str(key_of(b)) == f"{key_of(a)}, epilogue apart" and "; closed" in str(splice(program, choice, b))
    with_it, without = binaries(program, choice, a), binaries(program, choice, b)
    assert (len(with_it), len(without)) == (1, 2)
    (fused,), (plain, _) = ([of(x) for x in each.values()] for each in (with_it, without))
    assert fused.registers and plain.registers and fused.shared == plain.shared
    verdict, why = epilogue_verdict(fused, plain, 2 * 256 * 512 * HALF.itemsize)
    assert fused.stack is not None and plain.stack is not None and fused.blocks and plain.blocks
    assert (verdict == "fuse") == (fused.stack <= plain.stack and fused.blocks >= plain.blocks), why


@pytest.mark.parametrize("limit", ["registers", "shared memory", "registers and shared memory"])
def test_apart_is_compiled_where_registers_alone_limit(limit: str) -> None:
    """Else the product alone, which needs as much shared memory, cannot run in more blocks at once."""
    program, choice, _ = ways(Tiling("tiled", 64, 128, 64, 4, 3))
    q = question_of(program, choice, H200, Options.make({"autotune": "blocking"}), {})
    prune = _pruning(q, H200)
    assert prune is not None
    found = [key for key in q.candidates if key.apart]
    for key in found:
        name, whole = str(key), str(replace(key, apart=False))
        assert prune(name, {}) is None  # not known yet
        fused = replace(made(200), limit=limit, blocks=1)
        why = prune(name, {whole: [fused]})
        assert why == "" if limit == "registers" else why and "fused unmeasured" in why
        assert prune(name, {whole: [replace(fused, stack=400)]}) == ""  # it spills
    assert found


@pytest.mark.parametrize("tiling", [Tiling("tiled", 128, 256, 64, 8, 4), Tiling("tiled", 128, 128, 64, 4, 3)], ids=str)
def test_apart_would_not_run_in_more_blocks_where_shared_memory_limits(tiling: Tiling) -> None:
    program, choice, a = ways(tiling)
    fused, plain = (of(next(iter(binaries(program, choice, x).values()))) for x in (a, apart(a)))
    assert "shared memory" in fused.limit and plain.blocks == fused.blocks
    assert epilogue_verdict(fused, plain, 1000)[0] == "fuse"


def test_a_closed_product_takes_in_nothing_and_computes_the_same() -> None:
    def fn(x, w, b, r):
        return (F.gelu(x.half() @ w + b) + r,)

    args = [torch.randn(4, 6), torch.randn(6, 8).half(), torch.randn(8).half(), torch.randn(4, 8).half()]
    program = templated(lowered(fn, args))
    closed = replace(
        program, nodes=tuple(replace(n, closed=True) if isinstance(n, Template) else n for n in program.nodes)
    )
    verify(closed)
    assert from_data(json.loads(json.dumps(to_data(closed)))) == closed
    assert "; closed" in str(closed) and "; closed" not in str(program)
    f, g = (fuse(p, OFF, GPU) for p in (program, closed))
    check_same(closed, g, fn, args)
    assert (len(templates(f)), len(kernels(f))) == (1, 1)  # the cast before it
    (t,) = templates(g)
    assert t.closed and t.a.dtype == HALF and len(kernels(g)) == 2  # the cast before it, and all that comes after
    assert any("epilogue apart" in r.reason.text for r in g.refusals)
    assert str(fuse(g.program, OFF, GPU).program) == str(g.program)
