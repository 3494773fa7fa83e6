"""Triton kernels of the user's are kernels of the program: on a machine without a GPU, their numbers in Triton's
interpreter, their code by Triton's own compiler, packages, tuning, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

import reflib
from reflib.capture import triton_there
from reflib.capture.triton_there import triton_of_gpu
from reflib.errors import CaptureError, DeviceError, GenerateError, PackageError, ToolchainError
from reflib.generate.compile_triton import compile_kernel
from reflib.generate.user_kernel import packed
from reflib.ir.data import decode, encode
from reflib.ir.expr import Sym, expr
from reflib.package import archive, manifest
from reflib.schedule.user_kernels import variants
from reflib.target import parse_target
from tests.interpreter import interpreted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
if not torch.cuda.is_available():
    from tests import user_kernels
    from tests.user_kernels import add_kernel, explain, kernel, launches
    from tests.user_kernels_interpreting import job

Tensor = torch.Tensor
SIZE = 64
GPU = parse_target("sm_90")


def test_numbers(tmp_path: Path) -> None:
    """Of all cases, run by the text of their kernels alone; dynamic sizes too. (Eight programs and a process: seconds.)
    Then each launch is compiled for two architectures."""
    jobs, wanted, kernels = {}, {}, []
    for name, (fn, eager, args) in user_kernels.cases().items():
        if name == "branching":  # the child runs straight programs
            continue
        dynamic = name in ("plain", "both", "described")
        torch._dynamo.reset()
        e = explain(fn, *args, dynamic=dynamic)
        program, sizes = e.scheduled, {}
        for b, x in zip([n for n in program.inputs if isinstance(n, str)], args, strict=True):
            facts = zip((*program.buffers[b].shape, *program.buffers[b].strides), (*x.shape, *x.stride()))
            sizes |= {s.atom.name: n for s, n in facts if isinstance(s.atom, Sym)}
        assert bool(sizes) == dynamic
        copies = iter([torch.empty(5000, dtype=x.dtype).as_strided(x.shape, x.stride()).copy_(x) for x in args])
        jobs[name] = job(e.stages, tuple(next(copies) if isinstance(i, str) else sizes[i.name] for i in program.inputs))
        mine = [x.clone() for x in args]
        result = eager(*mine)
        wanted[name] = [*(result if isinstance(result, tuple) else (result,)), *mine]
        kernels += [k for k in e.kernels if "_kernel" in k.name]
        if name == "tuples":
            assert len(launches(e)[0].mutates) == 2, "of three tensors"
        if name == "in place":
            assert "copy" not in e.wrapper and "clone" not in e.wrapper, "the kernel writes to the argument itself"
    torch.save(jobs, tmp_path / "job")
    interpreted("user_kernels_interpreting.py", str(tmp_path / "job"))
    for name, got in torch.load(tmp_path / "job").items():
        for a, b in zip(got, wanted[name], strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    found = {k.name.split("_", 1)[1]: [compile_kernel(k, parse_target(a)) for a in ("sm_80", "sm_90")] for k in kernels}
    assert {n: b.scratch for n, (b, _) in found.items() if b.scratch} == {"matrix_kernel": 256}
    assert "add_kernel_relu" in found and all(b.image for both in found.values() for b in both)


def test_a_launch_is_a_kernel_of_the_program() -> None:
    @torch.library.triton_op("user_kernels::add", mutates_args=())
    def added(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(add_kernel)[(8, 3)](x, y, out, x.numel(), BLOCK=128)
        return out

    x, y = torch.randn(1000), torch.randn(1000)
    for fn, names in (
        (user_kernels.plain, ["k0_mul", "k1_add_kernel_relu"]),
        (lambda x, y: added(x * 2, y).relu(), ["k0_mul", "k1_add_kernel", "k2_relu"]),
    ):
        e = explain(fn, x, y)
        (launch,) = launches(e)
        assert launch.mutates == ("add_kernel_out",) and "copy_" not in str(e.graph)
        assert [k.name for k in e.kernels] == names, "no copy, no call"
        assert launch.origins[0].source.startswith(("user_kernels.py:", "test_user_kernels.py:"))
        assert "launched as its call says" in next(d.reason for d in e.decisions if "add_kernel" in d.region)
        k = e.kernels[1]
        assert k.aligned == (0, 1, 2) and "n=tl.full((), 1000, tl.int32)" in k.source and "tests" not in k.source
        assert decode(encode(launch)) == launch
    assert not stands_in()
    assert e.kernels[1].grid == 2**62 + 2 * 2**31 + 8 and "add_kernel(stream" in e.wrapper.replace("k1_", "")
    e = explain(user_kernels.chained, x, y)
    assert [(k.num_warps, k.num_stages) for k in e.kernels if "add_kernel" in k.name] == [(2, 3), (4, 5)]
    with pytest.raises(GenerateError, match="add_kernel is a Triton kernel: there is no code of it for cpu"):
        variants("k", launch, e.program.buffers, parse_target("cpu"))


def test_sizes_at_run_time() -> None:
    """As Triton specializes: multiples of 16, of 32 bits; then of 32 bits; then any."""
    e = explain(user_kernels.plain, torch.randn(1024), torch.randn(1024), dynamic=True)
    (node,) = (n for n in e.scheduled.nodes if n.name == "k1_add_kernel_relu")
    facts = [["at_most", "aligned", "divisible"], ["at_most"], []]
    assert [[a.kind for a in v.predicate] for v in node.variants] == facts
    found = [e.stages.kernels[v.kernel.name] for v in node.variants]
    assert [k.index_type for k in found] == ["int32", "int32", "int64"] and found[0].grid == found[2].grid
    assert "// 16) * 16" in found[0].source and "// 16) * 16" not in found[1].source
    n, m = (expr(Sym(name, lo, None, 64)) for name, lo in (("n", 2), ("m", 0)))
    for y, z in ((1, 1), (5, 1), (1, 7), (0, 3), (70000, 1), (4, 2**15 - 1), (1, 2**15), (1, 40000)):
        g = int(packed((n, m + y - 1, expr(z))).evaluate({"n": 9, "m": 1}))
        xyz = (g & (2**31 - 1), 1 + (g >> 31 & 0xFFFF), 1 + (g >> 47 & 0x7FFF)) if g >> 62 else (g, 1, 1)
        most = (9, 2**16, min(z, 2**15)) if z >= 2**15 else (9, min(y, 2**16), z)
        assert xyz == ((0, 1, 1) if y == 0 else most), "no GPU accepts what is too large"


def test_packages_need_no_module_of_the_users(tmp_path: Path) -> None:
    """Plain launches and triton_op, with heuristics; Python has no part in the call."""

    @torch.library.triton_op("user_kernels::sums", mutates_args={"y"})
    def sums(y: Tensor) -> Tensor:
        total = torch.zeros(1, device=y.device)
        torch.library.wrap_triton(add_kernel)[(1, 2)](y, y, y, y.numel(), BLOCK=128)
        return total

    @triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
    @triton.jit
    def doubled(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        doubled[(1,)](x, out, x.numel())
        return user_kernels.plain(out, y) + sums(y)

    path = reflib.aot_compile(fn, (torch.randn(100), torch.randn(100)), tmp_path / "p.reflib", ["sm_80"], ptx=False)
    file = archive.open(path)
    (v,) = manifest.read(file.manifest).variants
    assert not v.python and not v.needs, "no call of PyTorch's"
    names = [k.name.split("_", 1)[1] for k in v.kernels if not k.name.endswith("_fallback")]
    assert sum(n.startswith("add_kernel") for n in names) == 2 and "doubled_mul" in names
    text = bytes(file.view(v.text)).decode()
    assert f"stream0, {2**62 + 2**31 + 1}, " in text, "a grid of two dimensions"


def test_a_descriptor_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(PyTorch drops such a launch: what the kernel would have written was garbage.) Triton 3.6 asks for addresses. The
    grid may ask for a default. (Where Dynamo runs an op on fake tensors on a GPU, PyTorch's call of it fails.)"""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def check(self: Any) -> None:
        assert self.base.data_ptr() % 16 == 0 and self.base.dtype.itemsize == 4 and self.strides[-1] == 1

    def asking(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        a, b = (TensorDescriptor.from_tensor(t, [16, 32]) for t in (x, out))
        torch.library.wrap_triton(user_kernels.matrix_kernel)[lambda meta: (x.shape[0] // meta["M"],)](a, b)
        return out

    monkeypatch.setattr(TensorDescriptor, "__post_init__", check)
    triton_there._prepare.cache_clear()
    op = torch.library.triton_op("test_user_kernels::asking", asking, mutates_args=())
    for fn in (user_kernels.described_in_an_op, op, asking):
        (launch,) = launches(explain(fn, torch.randn(48, 64)))
        assert dict(launch.kwargs)["grid"][0] == 3
    for fn in (user_kernels.described, user_kernels.described_in_an_op, op, asking):
        path = reflib.aot_compile(fn, (torch.randn(48, 64),), tmp_path / "p.reflib", ["sm_90"], ptx=False)
        (v,) = manifest.read(archive.open(path).manifest).variants
        assert not v.python and any("matrix_kernel" in k.name for k in v.kernels)


@pytest.mark.parametrize("as_in_2_11", [False, True])
def test_launches_in_branches_and_loops_are_packaged(
    as_in_2_11: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(torch.export drops calls in branches that return nothing: what the kernel would have written was garbage. In
    PyTorch 2.11 a higher-order op never has side effects, whatever it was registered as.)"""
    if as_in_2_11:
        whole = torch._library.utils.is_impure
        monkeypatch.setattr(
            torch._library.utils,
            "is_impure",
            lambda op, **how: not isinstance(op, torch._ops.HigherOrderOperator) and whole(op, **how),
        )
        triton_there._prepare.cache_clear()
    args = torch.randn(100), torch.randn(100)
    e = explain(user_kernels.branching, *args)  # (nothing is computed)
    assert sum("_add_kernel" in k.name for k in e.kernels) == 2 and "aten.mul" not in e.wrapper
    path = reflib.aot_compile(user_kernels.branching, args, tmp_path / "p.reflib", ["sm_90"], ptx=False)
    (v,) = manifest.read(archive.open(path).manifest).variants
    names = [k.name for k in v.kernels if "_add_kernel" in k.name and "fallback" not in k.name]
    assert not v.needs and len(names) == 2


def test_defaults_have_types_as_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Dynamo leaves them off, with a GPU there, and where only another configuration gives one."""

    @triton.jit
    def scaled(x, out, n, by=3, bias=None, BLOCK: tl.constexpr = 128):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * by, mask=i < n)

    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128, "by": 4})]
    tuned = triton.autotune(configs, key=[])(scaled)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out, more = (torch.empty_like(x, dtype=torch.int32) for _ in range(2))
        scaled[(1,)](x, out, x.numel())
        tuned[(2,)](x, more, x.numel())
        return out, more

    for captured in (False, True):
        if captured:
            usual = triton_kernel_wrap.TritonHOPifier.call_triton_kernel.__wrapped__
            monkeypatch.setattr(triton_kernel_wrap.TritonHOPifier, "call_triton_kernel", usual)
        torch._dynamo.reset()
        for call in launches(explain(fn, torch.ones(100, dtype=torch.int8))):
            pieces = {p[0]: p[1:] for p in call.target.call}
            assert pieces["by="] == ("tl.full((), 3, tl.int32)",) and pieces["bias="] == ("None",)


def test_parts_have_names_of_their_own() -> None:
    @triton.jit
    def named(pair, pair_0, pair_1, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(pair[0] + i, mask=i < n) * pair[1] + tl.load(pair_0 + i, mask=i < n) * pair_1
        tl.store(out + i, v, mask=i < n)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        named[(1,)]((x, 3.0), y, 5, out, x.numel(), BLOCK=128)
        return out

    (call,) = launches(explain(fn, torch.randn(100), torch.randn(100)))
    pieces = {p[0]: p[1:] for p in call.target.call}
    assert [call.args[pieces[n][0]].buffer for n in ("pair_0_=", "pair_0=")] == ["arg0_1", "arg1_1"]
    assert "3.0" in pieces["pair_1_="][0] and "5" in pieces["pair_1="][0]
    assert "pair=(pair_0_, pair_1_, ), pair_0=pair_0, pair_1=pair_1" in call.target.source


def test_clusters_and_limits_of_registers(tmp_path: Path) -> None:
    """Both are in the machine code; a cluster's blocks are counted in the grid. It is no default: not all GPUs have
    clusters."""

    def tuned(*configs: Any) -> Callable[..., Any]:
        tried = triton.autotune([triton.Config({"BLOCK": 64}, **c) for c in configs], key=[])(add_kernel)

        def fn(x: Tensor, y: Tensor) -> Tensor:
            out = torch.empty_like(x)
            tried[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]), 3)](x, y, out, x.numel())
            return out

        return fn

    def at_launch(kernel: Any, **settings: Any) -> Callable[..., Any]:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            out = torch.empty_like(x)
            kernel[(16, 3)](x, y, out, x.numel(), **settings)
            return out

        return fn

    configs = triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])(add_kernel)

    args = torch.randn(1000), torch.randn(1000)
    for fn, says, blocks in (
        (tuned({"num_ctas": 2}), ".reqnctapercluster 2", 32), (tuned({"maxnreg": 64}), ".maxnreg 64", 16),
        (at_launch(add_kernel, BLOCK=64, maxnreg=64), ".maxnreg 64", 16),
        (at_launch(add_kernel, BLOCK=64, num_ctas=2), ".reqnctapercluster 2", 32),
        (at_launch(configs, num_ctas=2), ".reqnctapercluster 2", 32),
    ):  # fmt: skip
        torch._dynamo.reset()
        e = explain(fn, *args)
        k = kernel(e, "add_kernel")
        assert k.grid == 2**62 + 2 * 2**31 + blocks and says in compile_kernel(k, GPU).ptx
        (launch,) = launches(e)
        assert decode(encode(launch)) == launch
    torch._dynamo.reset()
    e = explain(tuned({"num_ctas": 2}, {"num_warps": 2}), *args)
    assert not kernel(e, "add_kernel").settings and len(e.decisions[0].candidates) == 1
    with pytest.raises(ToolchainError, match=r"(?s)add_kernel.*num_ctas > 1 requires NVIDIA SM90"):
        reflib.aot_compile(tuned({"num_ctas": 2}), args, tmp_path / "p.reflib", ["sm_80"], ptx=False)


def stands_in() -> bool:
    """Is Triton told, in this thread, that there is a GPU?"""
    try:
        return isinstance(triton.runtime.driver.active, triton_there._Driver)
    except RuntimeError:  # there is none
        return False


def test_captures_in_threads_overlap() -> None:
    """Each thread has its own: the one that began first ends first, and only one that captures records launches."""
    launch, first, second = type(add_kernel[(1,)]), triton_of_gpu(recorded=True), triton_of_gpu(recorded=True)
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        assert stands_in() and type(add_kernel[(1,)]) is not launch
        assert type(other.submit(lambda: add_kernel[(1,)]).result()) is launch
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert not stands_in() and type(add_kernel[(1,)]) is launch and other.submit(stands_in).result()
        other.submit(second.__exit__, None, None, None).result()
        assert not other.submit(stands_in).result()


def test_a_grid_of_a_number_that_is_read_from_a_tensor() -> None:
    """One graph, as in a package; it waits for the number. Where Python needs it, nothing can launch: who, is said."""

    def reading(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        n = (x > 0).sum().item()
        add_kernel[(n // 3 + 1,)](x, y, out, n, BLOCK=64)
        return out

    def branching(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if (x > 0).sum().item() > 3:
            add_kernel[(8,)](x, y, out, x.numel(), BLOCK=64)
        return out

    args = torch.arange(300.0), torch.randn(300)
    (launch,) = launches(explain(reading, *args))
    assert str(dict(launch.kwargs)["grid"][0]) == "(u0//3) + 1"
    with pytest.raises(Exception, match=r"Triton kernel add_kernel \(test_user_kernels.py:\d+\) is launched outside"):
        explain(branching, *args)


def test_a_function_as_an_argument() -> None:
    @triton.jit
    def applying(x, out, F: tl.constexpr, both, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, both[0](F(tl.load(x + i))).to(both[1]))

    other = user_kernels.helpers.scaled

    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        applying[(1,)](x, out, user_kernels.scaled, (other, tl.float32), BLOCK=128)
        return out

    (k,) = explain(fn, torch.randn(128)).kernels
    assert k.source.count("return x * FACTOR") == 2 and compile_kernel(k, GPU).image


# -- what is refused, and what stays PyTorch's ------------------------------------------------------------
def of(function: Any, *args: Any, blocks: Any = (1,), **kwargs: Any) -> Callable[[Tensor], Tensor]:
    def launching(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        function[blocks](x, out, *args, **kwargs)
        return out

    return launching


def test_a_triton_op_keeps_its_promise(tmp_path: Path) -> None:
    """It writes to what ``mutates_args`` say; to a view of something else is an error."""

    def summing(kind: str, promised: tuple[str, ...]) -> Any:
        @torch.library.triton_op(f"user_kernels::promised{kind}", mutates_args=promised)
        def op(xs: list[Tensor], y: Tensor, by: float = 2.0) -> Tensor:
            torch.library.wrap_triton(add_kernel)[(8,)](xs[0] * by, y, xs[1][2:], 90, BLOCK=128)
            return y + 1

        return lambda x, y: op([x, z := y * 2], y=y) + z

    args = torch.randn(100), torch.randn(100)
    says = r"kernel add_kernel \(test_user_kernels.py:\d+\) writes to xs, which the triton_op \w+::promised\w+ does"
    for kind, promised in zip("ABCD", ((), ("y",), ("xs",), ("xs", "y")), strict=True):
        torch._dynamo.reset()
        fn = summing(kind, promised)
        if "xs" in promised:
            assert launches(explain(fn, *args, dynamic=True))
            continue
        with pytest.raises(Exception, match=says):
            explain(fn, *args, dynamic=True)
        with pytest.raises(CaptureError, match=says):
            reflib.aot_compile(fn, args, tmp_path / "p.reflib", ["sm_90"], ptx=False)


@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr = SIZE, DTYPE: tl.constexpr = tl.float32):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


LINE = r"test_user_kernels.py:\d+"


def test_what_is_refused() -> None:
    @triton.jit
    def with_global(x, out):
        tl.store(out + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)))

    thing = object()

    @triton.jit
    def with_object(x, out):
        tl.store(out, tl.load(x) + thing)

    @triton.jit
    def from_memory(x, out, addresses, n, BLOCK: tl.constexpr):
        to = tl.load(addresses).to(tl.pointer_type(tl.float32))
        tl.store(to + tl.arange(0, BLOCK), tl.load(x), mask=tl.arange(0, BLOCK) < n)

    def elsewhere(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        from_memory[(1,)](x, out, x.long(), 100, BLOCK=128)
        return out

    def a_tensor(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        plain[((x > 0).sum(),)](x, out, 4)
        return out

    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]
    for fn, says in (
        (of(with_global), rf"kernel with_global uses the global variable SIZE.*SIZE = tl.constexpr\(64\) \({LINE}"),
        (of(with_object), rf"kernel with_object uses thing, a object, which cannot be copied.*\({LINE}"),
        (of(triton.autotune(configs, key=["m"])(plain), 128),
         rf"key 'm' of @triton.autotune is no argument of the Triton kernel plain \({LINE}.*x, out, n, BLOCK"),
        (of(plain, 128, blocks=(1, 70000)), rf"kernel plain has a grid of 70000 programs in axis 1; .*65535 \({LINE}"),
        (of(plain, 128, blocks=()), rf"kernel plain has a grid of no sizes.* \({LINE}"),
        (a_tensor, rf"the grid of the Triton kernel plain \({LINE}\) is a tensor"),
        (elsewhere, rf"kernel from_memory \({LINE}\) stores to none of the tensors that it is given"),
    ):  # fmt: skip
        torch._dynamo.reset()
        with pytest.raises(Exception, match=says):
            explain(fn, torch.randn(128))


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_too_much_shared_memory_is_said_before_a_launch(arch: str) -> None:
    """Of explain for a target, with the kernel, its line, the bytes that it needs and there are, and what to do."""

    @triton.jit
    def hungry(x, y, out, DEPTH: tl.constexpr):
        i, k = tl.arange(0, 32), tl.arange(0, DEPTH)
        a, b = tl.load(x + i[:, None] * DEPTH + k[None, :]), tl.load(y + k[:, None] * 32 + i[None, :])
        tl.store(out + i[:, None] * 32 + i[None, :], tl.dot(a, b))

    def product(x: Tensor, y: Tensor) -> Tensor:
        out = x.new_empty(32, 32, dtype=torch.float32)
        hungry[(1,)](x, y, out, DEPTH=x.shape[1])
        return out

    for depth in (64, 2048):
        x = torch.zeros(32, depth, dtype=torch.bfloat16)
        torch._dynamo.reset()
        if depth == 64:
            assert len(launches(reflib.explain(product, x, x.T.contiguous(), target=arch))) == 1
            continue
        limit = parse_target(arch).shared
        needs = rf"kernel k0_hungry needs \d{{6}} bytes of shared memory; {arch} has {limit}"
        says = rf"(?s){needs}.*hungry at {LINE}.*fewer stages"
        with pytest.raises(DeviceError, match=says):
            reflib.explain(product, x, x.T.contiguous(), target=arch)


def test_why_triton_refuses_it_is_said(tmp_path: Path) -> None:
    """The kernel is called by ours: what Triton raises says only where, its cause why."""

    @triton.jit
    def misspelt(x, out):
        tl.store(out, tl.lod(x))

    with pytest.raises(ToolchainError, match=r"(?s)refused kernel k0_misspelt for sm_80.*no attribute 'lod'.*tl.lod"):
        reflib.aot_compile(of(misspelt), (torch.randn(8),), tmp_path / "p.reflib", ["sm_80"], ptx=False)


def test_what_our_launcher_does_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pair(NamedTuple):
        x: Tensor
        out: Tensor

    @triton.jit
    def of_pair(pair):
        tl.store(pair.out, tl.load(pair.x))

    def packed(x: Tensor) -> Tensor:
        of_pair[(1,)](Pair(x, out := torch.empty_like(x)))
        return out

    torch._dynamo.reset()
    e = explain(of(plain, 100, BLOCK=64, blocks=(1, 1, 40000)), torch.randn(128))
    assert not launches(e) and not e.kernels, "a grid that CUDA takes, and our launcher does not, is PyTorch's launch"
    gluon = type("GluonJITFunction", (triton.JITFunction,), {})(plain.fn)  # another language
    with pytest.raises(PackageError, match="PyTorch launches a GluonJITFunction, not a compiled Triton function"):
        reflib.aot_compile(of(gluon, 128), (torch.randn(128),), tmp_path / "p.reflib", ["sm_90"])
    clustered = triton.autotune([triton.Config({"BLOCK": 64}, num_ctas=16)], key=[])(plain)
    with pytest.raises(PackageError, match="PyTorch launches the Triton kernel plain: a cluster of 16 thread blocks"):
        reflib.aot_compile(of(clustered, 128), (torch.randn(128),), tmp_path / "p.reflib", ["sm_90"])
    with pytest.raises(CaptureError, match=rf"kernel of_pair \({LINE}\) is given pair, a Pair with a tensor in it"):
        reflib.aot_compile(packed, (torch.randn(128),), tmp_path / "p.reflib", ["sm_90"], ptx=False)
    monkeypatch.setenv("REFLIB_LOGS", "fallback")
    caplog.set_level("INFO", "reflib.fallback")
    (launch,) = launches(explain(of(plain, 100, DTYPE=tl.float32), torch.randn(128)))
    assert launch.mutates == ("plain_out",) and "as written" not in caplog.text, "defaults and types are known"
    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", lambda *how: 1 / 0)  # PyTorch's analysis finds nothing
    torch._dynamo.reset()
    (launch,) = launches(explain(of(plain, 100), torch.randn(128)))
    assert "plain: every tensor it is given counts as written" in caplog.text and len(launch.mutates) == 2
    with pytest.raises(reflib.ReflibError, match="plain is a Triton kernel: the interpreter"):
        replace(launch).target(None)
