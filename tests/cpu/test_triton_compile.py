"""Generated Triton compiles ahead of time for every listed GPU, to the code it should become."""

import importlib.util
import pickle
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_loops import axis
from triton_cases import (
    BF16,
    F32,
    Case,
    compile_all,
    kernel_cases,
    norm,
    op_cases,
    pointwise,
    rand,
    several,
    shifted_windows,
)

from reflib import cache, explain, failures
from reflib.errors import DeviceError, ToolchainError
from reflib.generate import compile_triton
from reflib.generate.compile_triton import alike, compile_kernel, resources
from reflib.generate.triton import generate_triton
from reflib.ir.expr import Sym, expr
from reflib.ir.float8 import CASTS
from reflib.ir.loops import BodyBuilder, LoopNest, map_stmt
from reflib.ir.ops import OPS
from reflib.ir.program import Buffer, Config, Tiling
from reflib.options import Options
from reflib.schedule.heuristics import choose_configs
from reflib.target import Target, parse_target
from reflib.wrap import build
from tests.matmul_cases import MatmulCase

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
ARCHS = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
REPRESENTATIVE = [
    "add_broadcast", "half_to_half", "bool_out", "transpose", "gather", "pad", "several", "one_number", "softmax",
    "layer_norm_bf16", "softmax_looped", "layer_norm_dynamic", "layer_norm_dynamic_fallback",
]  # fmt: skip
RNG_NAMES = random.Random(22).sample(sorted(kernel_cases()), 6)


def all_ops(dtype: torch.dtype, names: list[str]) -> Case:
    """One kernel that stores the result of many ops of one dtype."""
    i = axis("i", 512)
    b = BodyBuilder()
    tensors = {f"x{k}": rand(512).to(dtype) for k in range(3)}
    values = [b.load(f"x{k}", i.var, dtype) for k in range(3)]
    for name in names:
        spec = OPS[name]
        args = values[: spec.arity]
        if name == "where":
            args = [b.op("gt", values[0], values[1]), *values[1:]]
        result = b.op(name, *args)
        b.store(f"out_{name}", i.var, result)
        tensors[f"out_{name}"] = torch.zeros(512, dtype=b.dtype(result))
    return Case((LoopNest("ops", (i,), tuple(b.body)),), tensors, config=Config("none", xblock=512))


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_representative_kernels(arch: str) -> None:
    cases = kernel_cases()
    target = parse_target(arch)
    kernels = [cases[n]().kernel(f"k_{n}", arch) for n in REPRESENTATIVE]
    for b in compile_all(kernels, target).values():
        assert b.image[:4] == b"\x7fELF" and b.arch == arch
        assert b.shared <= target.shared and b.scratch == 0
        assert ("ptx" in b.ptx or ".version" in b.ptx) == (target.kind == "cuda")


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "gfx942"])
@pytest.mark.sample(3)
def test_every_op(arch: str) -> None:
    ops = {n: s for n, s in OPS.items() if s.result != "given"}
    names = {
        F32: [n for n, s in ops.items() if s.kind in ("float", "number", "any")],
        torch.float64: [n for n, s in ops.items() if s.kind in ("float", "number", "any")],
        torch.int64: [n for n, s in ops.items() if s.kind in ("int", "number", "any", "intbool")],
        torch.uint8: [n for n, s in ops.items() if s.kind in ("int", "number", "any", "intbool")],
        torch.bool: [n for n, s in ops.items() if s.kind in ("any", "intbool") and n != "where"],
    }
    kernels = []
    for dtype, wanted in names.items():
        for k in range(0, len(wanted), 20):
            name = f"ops_{str(dtype).removeprefix('torch.')}_{k}"
            kernels.append(all_ops(dtype, wanted[k : k + 20]).kernel(name, arch))
    compile_all(kernels, parse_target(arch))


def test_every_op_has_a_form() -> None:
    covered = {n.rsplit("_", 1)[0] for n in op_cases() if not n.startswith("cast")} | {"cast"}
    assert covered == set(OPS) - set(CASTS.values())  # (these in test_float8)


# -- what the code becomes --------------------------------------------------------------------------
def made_for(rows: int, cols: int, kind: str):
    """The fast kernel of a norm at a real size (the buffers' contents do not matter)."""
    small = norm(kind, 2, cols, BF16)
    i, j = axis("i", rows), small.parts[0].axes[1]
    part = LoopNest(kind, (i, j), tuple(_resized(s, small, i) for s in small.parts[0].body))
    buffers = {}
    for n, b in small.buffers.items():
        shape = (expr(rows), *b.shape[1:]) if n in ("x", "out") else b.shape
        buffers[n] = Buffer(n, b.dtype, b.device, shape, b.strides, b.kind)
    target = parse_target("sm_90")
    v = choose_configs((part,), buffers, target, Options())[0]
    aligned = [a.what for a in v.predicate if a.kind == "aligned"]
    kernel = generate_triton(f"k_{kind}_{rows}_{cols}", (part,), v.kernel.config, buffers, target, aligned)
    return kernel, compile_kernel(kernel, target)


def _resized(s, case: Case, i):
    same = {k: k for k in range(len(case.parts[0].body))}
    return map_stmt(s, same, {case.parts[0].axes[0].var: expr(i.var)})


@pytest.mark.each
@pytest.mark.parametrize("kind", ["softmax", "layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "rows,cols", [(576000, 512), (131072, 1024), (65536, 2048), (32768, 4096), (4096, 8192), (4096, 16384)]
)
def test_rows_read_16_bytes_and_do_not_spill(kind: str, rows: int, cols: int) -> None:
    kernel, binary = made_for(rows, cols, kind)
    used = resources(binary)
    assert used["stack"] == 0
    programs = 65536 // (used["registers"] * binary.num_warps * 32)
    assert programs >= (2 if cols <= 8192 else 1), "programs that fit one multiprocessor's registers"
    loads = re.findall(r"ld\.global[.\w:]*", binary.ptx)
    assert loads and all(".v4" in ld for ld in loads), loads
    xblock = int(re.search(r"XBLOCK: tl.constexpr = (\d+)", kernel.source)[1])  # type: ignore[index]
    assert kernel.grid == -(-rows // xblock)


def test_pointwise_reads_and_writes_16_bytes() -> None:
    n = 1 << 21  # enough for whole blocks
    for dtype in (BF16, F32):
        loads = {"x": (torch.zeros(n, dtype=dtype), lambda i: i)}
        case = pointwise((n,), loads, lambda b, x: b.op("maximum", x, b.const(0, F32)), dtype)
        binary = compile_kernel(case.kernel("relu"), parse_target("sm_90"))
        accesses = re.findall(r"(?:ld|st)\.global[.\w:]*", binary.ptx)
        assert len(accesses) >= 2 and all("v4" in a for a in accesses)


@pytest.mark.parametrize("size", [(1 << 21) + 3, Sym("s0", 2, None, 1 << 21)], ids=["odd", "dynamic"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_pointwise_of_any_size_reads_and_writes_16_bytes(size: int | Sym, dtype: torch.dtype) -> None:
    i, b = axis("i", expr(size)), BodyBuilder()
    b.store("out", i.var, b.op("maximum", b.load("x", i.var, F32), b.load("y", i.var, F32)))
    part = LoopNest("both", (i,), tuple(b.body))
    cpu = torch.device("cpu")
    buffers = {n: Buffer(n, dtype, cpu, (expr(size),), (expr(1),), "input") for n in ("x", "y", "out")}
    target = parse_target("sm_90")
    variants = choose_configs((part,), buffers, target, Options())
    for v in variants:
        aligned = [a.what for a in v.predicate if a.kind == "aligned"]
        kernel = generate_triton("both", (part,), v.kernel.config, buffers, target, aligned)
        assert ("a whole block" in kernel.source) == bool(aligned), "no use where a buffer begins anywhere"
        accesses = re.findall(r"(?:ld|st)\.global[.\w:]*", compile_kernel(kernel, target).ptx)
        assert sum("v4" in a for a in accesses) >= 3 * bool(aligned)
    assert len(variants) == 2


def test_only_sizes_that_need_it_have_their_last_block_apart() -> None:
    def text(n: int) -> str:
        return pointwise((n,), {"x": (rand(n), lambda i: i)}, lambda b, x: b.op("neg", x)).kernel("k").source

    assert "a whole block" in text(100_003)
    for n in (100_000 // 16 * 16, 1 << 20, 100):  # a multiple of 16, of the block, less than a block
        assert "a whole block" not in text(n)


def test_transposes_are_wide_on_both_sides() -> None:
    x = rand(256, 256, dtype=BF16)
    case = pointwise((256, 256), {"x": (x, lambda i, j: j * 256 + i)}, lambda b, v: b.op("neg", v), BF16)
    kernel = case.kernel("turn")
    assert "YBLOCK" in kernel.source
    binary = compile_kernel(kernel, parse_target("sm_90"))
    assert all("v4" in i for i in re.findall(r"(?:ld|st)\.global[.\w:]*", binary.ptx))


# -- variants ---------------------------------------------------------------------------------------
def test_arms_state_what_they_assume() -> None:
    target = parse_target("sm_90")
    case = norm("softmax", 4, 4096, BF16, dynamic=True)
    fast, fallback = choose_configs(case.parts, case.buffers, target, Options())
    assert {a.kind for a in fast.predicate} == {"aligned", "at_most", "divisible"}
    assert fallback.predicate == () and fallback.kernel.config.index == "int64"
    static = norm("softmax", 4, 512, BF16)
    temps = {n: Buffer(n, b.dtype, b.device, b.shape, b.strides, "temp") for n, b in static.buffers.items()}
    assert len(choose_configs(static.parts, temps, target, Options())) == 1


def test_huge_tensors_use_64_bits() -> None:
    n = 2**31 + 8
    i = axis("i", n)
    b = BodyBuilder()
    b.store("out", i.var, b.op("neg", b.load("x", i.var, F32)))
    buffers = {k: Buffer(k, BF16, torch.device("cpu"), (expr(n),), (expr(1),), "input") for k in ("x", "out")}
    part = LoopNest("neg", (i,), tuple(b.body))
    fast = choose_configs((part,), buffers, parse_target("sm_90"), Options())[0]
    assert fast.kernel.config.index == "int64"
    s = Sym("s0", 0, None, 2**32)
    dynamic = LoopNest("neg", (axis("i", expr(s)),), part.body)
    buffers = {k: Buffer(k, BF16, torch.device("cpu"), (expr(s),), (expr(1),), "input") for k in ("x", "out")}
    assert choose_configs((dynamic,), buffers, parse_target("sm_90"), Options())[0].kernel.config.index == "int64"


# -- the compiler's own behaviour -------------------------------------------------------------------
def test_warm_start_does_not_import_triton() -> None:
    kernel = several(100, 800).kernel("warm")
    compile_kernel(kernel, parse_target("sm_90"))
    code = (
        "import sys, pickle\n"
        "from reflib.generate.compile_triton import compile_kernel\n"
        "from reflib.target import parse_target\n"
        "k = pickle.loads(bytes.fromhex(sys.argv[1])); b = compile_kernel(k, parse_target('sm_90'))\n"
        "assert b.name == 'warm' and 'triton' not in sys.modules, 'triton was imported'"
    )
    subprocess.run([sys.executable, "-c", code, pickle.dumps(kernel).hex()], check=True)


def test_damaged_entries_are_rebuilt() -> None:
    kernel, target = several(100, 800).kernel("damaged"), parse_target("sm_80")
    first = compile_kernel(kernel, target)
    path = cache.get("triton", compile_triton._key(compile_triton._nameless(kernel), target))
    assert path is not None
    path.write_bytes(b"not a binary")
    assert compile_kernel(kernel, target) == first


def test_binaries_name_no_path_of_this_machine() -> None:
    binary = compile_kernel(several(100, 800).kernel("paths"), parse_target("sm_90"))
    assert str(cache.root()).encode() not in binary.image and str(cache.root()) not in binary.ptx


PERSONALITY = Path("/proc/thread-self/personality")


@pytest.fixture
def may_fix_addresses() -> None:
    before = PERSONALITY.read_text() if PERSONALITY.exists() else ""
    with compile_triton.same_addresses():
        if not before or PERSONALITY.read_text() == before:
            pytest.skip("this system, or this container, does not allow it")


def test_processes_that_are_started_have_the_same_addresses(may_fix_addresses: None) -> None:
    """Whatever the limit of the stack is, from which the others are counted as a rule."""
    before = PERSONALITY.read_text()
    code = "print([line.split()[0] for line in open('/proc/self/maps') if '[stack]' not in line])"
    found = set()
    with compile_triton.same_addresses():
        for limit in ("1000000", "65536", "8192", "8192"):
            shell = ["sh", "-c", f'ulimit -S -s {limit} && exec "$@"', "sh"]
            found.add(subprocess.check_output([*shell, sys.executable, "-S", "-c", code]))
    assert len(found) == 1 and PERSONALITY.read_text() == before


def test_machine_code_for_blackwell_is_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_fix_addresses: None
) -> None:
    x, w, bias = (torch.randn(*shape, dtype=BF16) for shape in ((64, 256), (256, 256), (256,)))
    found = explain(lambda x, w, b: x + torch.relu(torch.addmm(b, x, w)), x, w, bias, target="sm_100")
    images = []
    for i in range(6):
        (tmp_path / str(i)).mkdir(mode=0o700)
        monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / str(i)))  # Triton keeps what it compiled in there
        images.append(compile_kernel(found.kernels[0], parse_target("sm_100")).image)
    assert len(set(images)) == 1


def test_too_much_shared_memory() -> None:
    turn = pointwise((256, 256), {"x": (rand(256, 256), lambda i, j: j * 256 + i)}, lambda b, v: b.op("neg", v))
    with pytest.raises(DeviceError, match="shared memory"):
        compile_kernel(turn.kernel("small"), Target("cuda", "sm_90", 1024, 1))


def test_stages_that_do_not_fit_are_fewer() -> None:
    case = MatmulCase(torch.randn(256, 512).half(), torch.randn(512, 256).half(), Tiling("tiled", 128, 128, 64, 8, 8))
    target = parse_target("sm_90")
    kernel = case.kernel("many", "sm_90")
    with pytest.raises(DeviceError, match="8 stages"):
        compile_kernel(kernel, target)
    assert target.shared / 2 < compile_kernel(kernel, target, True).shared <= target.shared


def test_threads_take_turns_in_tritons_front_end_and_meet_in_the_assembler(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    inside, most, meet = threading.Semaphore(1), [], threading.Barrier(2)
    make_ir, make_cubin = ASTSource.make_ir, CUDABackend.make_cubin

    def alone(*args: Any) -> Any:
        most.append(inside.acquire(blocking=False))
        time.sleep(0.05)
        try:
            return make_ir(*args)
        finally:
            inside.release()

    def together(*args: Any) -> Any:
        meet.wait(60)  # raises if no other thread gets here
        return make_cubin(*args)

    monkeypatch.setattr(ASTSource, "make_ir", alone)
    monkeypatch.setattr(CUDABackend, "make_cubin", together)
    kernels = [several(100, 800 + 8 * i).kernel(f"thread{i}") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda k: compile_kernel(k, parse_target("sm_90")), kernels))
    assert most == [True] * 4 and len({b.image for b in made}) == 4
    assert not compile_triton._front_end.locked()


def test_a_kernel_that_is_refused_leaves_the_front_end(fresh_cache: Path) -> None:
    kernel = several(100, 800).kernel("bad")
    broken = replace(kernel, source=kernel.source.replace("tl.load", "tl.no_such_thing"))
    for _ in range(2):
        with pytest.raises(ToolchainError, match="refused kernel bad for sm_90"):
            compile_kernel(broken, parse_target("sm_90"))
        assert not compile_triton._front_end.locked()


@pytest.mark.parametrize("always", [False, True])
def test_an_assembler_that_is_killed_runs_again_alone(
    always: bool, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what Triton leaves in the temporary folder, a file of PTX per attempt, nothing stays."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.errors import PTXASError

    make_cubin: Any = CUDABackend.make_cubin
    tried: list[bool] = []

    def starved(*args: Any) -> Any:
        tried.append(failures.ALONE.locked())
        if always or len(tried) == 1:
            left = tmp_path / f"{len(tried)}.ptx"
            left.write_text("// PTX")
            raise PTXASError(f"`ptxas` failed with error code -9\nRepro command: ptxas {left} -o {left}.o\n")
        return make_cubin(*args)

    monkeypatch.setattr(CUDABackend, "make_cubin", starved)
    kernel = several(100, 800).kernel("starved")
    if always:
        with pytest.raises(ToolchainError, match=r"compile fewer at once, Options\(compile_threads=1\)"):
            compile_kernel(kernel, parse_target("sm_90"))
    else:
        assert compile_kernel(kernel, parse_target("sm_90")).image
    assert tried == [False, True] and not list(tmp_path.glob("*.ptx"))


_TWICE = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry two(.param .u64 p) {
	.reg .b16 %rs<2>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<2>;
	ld.param.b64 	%rd1, [p];
	mov.u32 	%r1, %ctaid.x;
	mov.u32 	%r2, %tid.x;
	mov.b32 	%r3, 131075;
	add.s16x2 	%r4, %r1, %r3;
	add.s16x2 	%r5, %r2, %r3;
	mov.b32 	{%rs1, _}, %r5;
	mov.b32 	%r6, {%rs1, %rs1};
	st.global.b32 	[%rd1], %r4;
	st.global.b32 	[%rd1+4], %r6;
	ret;
}
"""


def test_packed_adds_are_taken_apart(tmp_path: Path) -> None:
    """ptxas loses a constant that is added to two numbers at once (triton-lang/triton#11581)."""
    from triton import knobs

    def machine_code(text: str) -> str:
        (tmp_path / "two.ptx").write_text(text)
        files = ["-arch=sm_90a", str(tmp_path / "two.ptx"), "-o", str(tmp_path / "two.cubin")]
        subprocess.run([knobs.nvidia.ptxas.path, *files], check=True)
        read = [knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "two.cubin")]
        return subprocess.run(read, check=True, capture_output=True, text=True).stdout

    apart = compile_triton.without_packed_adds(_TWICE)
    assert "16x2" not in apart and apart.count("add.s16 ") == 4
    assert "VIADD.16x2" in machine_code(_TWICE)
    code = machine_code(apart)
    assert "16x2" not in code and code.count("0x3") >= 2  # the constant is added to both


def test_no_kernel_adds_two_numbers_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows and columns of shifted windows are numbers that LLVM narrows to 16 bits and packs."""
    before, apart = [], compile_triton.without_packed_adds
    monkeypatch.setattr(compile_triton, "without_packed_adds", lambda ptx: (before.append(ptx), apart(ptx))[1])
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path))
    made = explain(shifted_windows(3, 7), torch.ones(8, 28, 28, 96).bfloat16(), target="sm_90")
    for kernel in made.kernels:
        assert "16x2" not in compile_kernel(kernel, parse_target("sm_90")).ptx
    assert any("add.s16x2" in ptx for ptx in before)


# -- kernels that differ in names -------------------------------------------------------------------
def test_layers_that_are_alike_are_compiled_once(monkeypatch) -> None:
    def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = torch.layer_norm(x + x @ w, (256,))
        return torch.layer_norm(x * 2, (512, 256))

    e = explain(model, torch.zeros(512, 256), [torch.zeros(256, 256) for _ in range(3)], target="sm_90")
    first, target = alike(e.kernels), parse_target("sm_90")
    (repeated,) = (k for k in set(first.values()) if list(first.values()).count(k) == 3 and k.aligned)
    for k in (k for k, one in first.items() if one is repeated):
        made, one = compile_kernel(k, target), compile_kernel(repeated, target)
        assert made.ptx.replace(k.name, one.name) == one.ptx and made.shared == one.shared

    compiled: list[str] = []
    monkeypatch.setattr(build, "_target", lambda device: target)
    monkeypatch.setattr(build, "compile_kernel", lambda k, target, fewer_stages: compiled.append(k.name) or k)
    kernels, program = {k.name: k for k in e.kernels}, e.stages.scheduled
    begun = build.start_building(program, kernels, Options())
    assert all(future.result() is first[k] for k, future in begun.items())
    assert len(begun) > len(set(compiled)) == len(compiled)
    again = build.start_building(program, kernels, Options(), {repeated: begun[repeated]})
    assert all(again[k] is begun[repeated] for k in begun if first[k] is repeated)


def test_what_makes_other_machine_code_is_not_alike() -> None:
    kernel = kernel_cases()["add_broadcast"]().kernel("k0_add", "sm_90")
    renamed = replace(kernel, name="k1_sum", source=kernel.source.replace("k0_add", "k1_sum"), grid=expr(7))
    assert alike([kernel, renamed])[renamed] is kernel
    half = tuple((name, BF16) for name, _ in kernel.buffers)
    others = [replace(kernel, num_warps=8), replace(kernel, aligned=()), replace(kernel, buffers=half)]
    others += [replace(kernel, source=kernel.source + "#"), replace(kernel, exact=True), replace(kernel, scratch=128)]
    swapped = tuple(reversed(kernel.buffers))  # the pointers change places, and the text does not
    others.append(replace(kernel, buffers=swapped))
    assert all(alike([kernel, k])[k] is k for k in others)
    body = "def {0}(x0_ptr):\n    tl.store(x0_ptr, tl.{0}(tl.load(x0_ptr)))\n"  # kernels that are called like an op
    exp, log = (replace(kernel, name=op, source=body.format(op)) for op in ("exp", "log"))
    assert alike([exp, log])[log] is log


@pytest.mark.parametrize("name", RNG_NAMES)
def test_a_kernel_under_another_name_is_assembled_alone(
    name: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... from the first one's PTX: to what the whole compiler makes of it, byte for byte."""
    target = parse_target("sm_90")
    first = kernel_cases()[name]().kernel("mov", "sm_90")  # (as an instruction is)
    own = re.sub(r"^(def )mov\b", r"\1k17_mov", first.source, flags=re.M)
    second = replace(first, name="k17_mov", source=own)
    whole = compile_triton._compile(second, target, compile_triton._key(second, target))
    asked: list[str] = []
    kept = compile_triton._compile
    monkeypatch.setattr(compile_triton, "_compile", lambda k, *rest: (asked.append(k.name), kept(k, *rest))[1])
    binaries = [compile_kernel(k, target) for k in (first, second, first, second)]
    assert asked == ([first.name, second.name] if "device_assert" in first.source else [first.name])
    assert binaries[0] == binaries[2] and binaries[0].entry == first.name and binaries[1] == binaries[3]
    assert binaries[1].ptx.split() == whole.ptx.split()
    assert replace(binaries[1], ptx=whole.ptx) == whole
