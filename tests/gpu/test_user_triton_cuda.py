"""Triton kernels of the user's on a GPU, beside the same calls in eager mode: what PyTorch's own tests of user-defined
Triton kernels are about, under every wrapper and in packages, and what a launch costs the host."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.ir.program import Choice, Extern, KernelNode, walk
from tests.semantics import Compiled

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
user_kernels = pytest.importorskip("tests.user_kernels")
stores = pytest.importorskip("tests.user_kernel_stores")

Tensor = torch.Tensor
add_kernel, grid = user_kernels.add_kernel, user_kernels.grid
LARGE = 2**31 + 16


def clones(args: Any) -> list[Any]:
    return [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda").copy_(a) for a in args]


def same(fn: Callable[..., Any], *args: Any, calls: bool = False, **options: Any) -> Compiled:
    """Compiled and in eager mode, twice: results, and what is in the arguments afterwards. ``calls``: PyTorch may
    launch."""
    compiled = Compiled(fn, **options)
    for _ in range(2):
        mine, theirs = clones(args), clones(args)
        got, want = compiled(*mine), fn(*theirs)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine, theirs)
    nodes = [n for s in compiled.stages for n in walk(s.scheduled.nodes)]
    if not calls:
        assert not any(isinstance(n, Extern) and "triton" in str(n.target) for n in nodes)
    return compiled


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [n for n in user_kernels.cases() if n != "tuples"])
def test_the_cases(name: str, dynamic: bool, wrapper: str) -> None:
    if name.startswith("described") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA descriptors")
    fn, eager, args = user_kernels.cases()[name]
    summed = name == "summed"  # (a heuristic of a dynamic size: PyTorch captures around the launch)
    mine, theirs = clones(args), clones(args)
    compiled = Compiled(fn, dynamic=dynamic, wrapper=wrapper)
    torch.testing.assert_close(compiled(*mine), eager(*theirs))
    torch.testing.assert_close(mine, theirs)
    assert compiled.stages or summed and dynamic
    if name != "summed":
        same(fn, *args, dynamic=dynamic, wrapper=wrapper)


@triton.jit
def scalars_kernel(x, out, n, i1, i16, wide, negative, f, flag, none, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i * i1, mask=i < n) * SCALE + f + negative
    v += (wide // i16).to(tl.float32)
    if flag:
        v = -v
    if none is not None:
        v += tl.load(none)
    tl.store(out + i, v, mask=i < n)


@pytest.mark.parametrize("n", [1, 16, 1000, 1024])
def test_numbers_as_arguments(n: int) -> None:
    def fn(x: Tensor, flag: bool, wide: int, f: float, extra: Tensor | None) -> Tensor:
        out = torch.empty_like(x)
        scalars_kernel[grid(x.numel())](x, out, x.numel(), 1, 16, wide, -3, f, flag, extra, SCALE=0.5, BLOCK=128)
        return out * 2

    x = torch.randn(n, device="cuda")
    for flag, wide, f, extra in ((True, LARGE, 0.1, None), (False, 5, 1.0, torch.ones(1, device="cuda"))):
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="reflib", dynamic=dynamic)
            torch.testing.assert_close(compiled(x, flag, wide, f, extra), fn(x, flag, wide, f, extra))


@pytest.mark.parametrize("way", ["python", "cpp", "package"])
def test_a_grid_that_a_tensor_decides(way: str, tmp_path: Path) -> None:
    """As eagerly: the call waits for the number; no programs run for one that is not positive."""

    def fn(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        add_kernel[(n.item(),)](x, y, out, x.numel(), BLOCK=64)
        return out

    args = [torch.randn(300, device="cuda") for _ in "xy"]
    if way == "package":
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
        example = (*args, torch.tensor(2, device="cuda"))
        compiled = reflib.load(reflib.aot_compile(fn, example, tmp_path / "p.reflib", [capability]))
    else:
        compiled = torch.compile(fn, backend="reflib", options={"wrapper": way})
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (3, 5, 1, 0, -2, 4):
            count = torch.tensor(n, device="cuda")
            want = torch.where(torch.arange(300, device="cuda") < 64 * n, args[0] + args[1], 0)
            torch.testing.assert_close(compiled(*args, count), want)


def test_sizes_change_between_calls() -> None:
    """Each variant of a kernel: multiples of 16 and not, addresses that are aligned and not; an empty tensor."""
    compiled = Compiled(user_kernels.plain, dynamic=True)
    base = torch.randn(5000, device="cuda")
    for n, offset in ((1024, 0), (1000, 0), (1023, 1), (4096, 3), (2, 0)):
        x, y = base[offset : offset + n], base[-n:]
        torch.testing.assert_close(compiled(x, y), user_kernels.plain(x, y))
    assert len(compiled.stages) == 1


def test_views_and_dtypes() -> None:
    """Views of inputs that are written to, of other dtypes; eager says what stays."""

    @triton.jit
    def negate(x, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, -tl.load(x + i, mask=i < n), mask=i < n)

    def fn(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        negate[(1,)](x[2:100:1], 98, BLOCK=128)
        negate[(1,)](x.view(torch.int32)[200:], 28, BLOCK=32)
        y = x.t() if x.dim() == 2 else x
        negate[(1,)](k, k.numel(), BLOCK=64)
        return y + 1, k * 2

    same(fn, torch.randn(228), torch.arange(64, dtype=torch.int16))
    same(fn, torch.randn(228), torch.randn(64).to(torch.bfloat16), wrapper="cpp")


def test_two_kernels_in_one_op_and_a_gradient() -> None:
    @torch.library.triton_op("user_triton_cuda::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        a, b = torch.empty_like(x), torch.empty_like(x)
        torch.library.wrap_triton(add_kernel)[grid(x.numel())](x, x, a, x.numel(), BLOCK=128)
        torch.library.wrap_triton(add_kernel)[grid(x.numel())](a, x, b, x.numel(), BLOCK=64)
        return b

    twice.register_autograd(lambda ctx, g: g * 3)
    x = torch.randn(1000, device="cuda", requires_grad=True)
    y = x.detach().clone().requires_grad_()
    compiled = Compiled(lambda x: twice(x.sin()).cos().sum())
    compiled(x).backward()
    twice(y.sin()).cos().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert not any("twice" in str(e.target) for e in compiled.externs)


def test_in_a_branch() -> None:
    def fn(x: Tensor) -> Tensor:
        def doubled(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            add_kernel[grid(x.numel())](x, x, out, x.numel(), BLOCK=128)
            return out

        return torch.cond(x.sum() > 0, doubled, lambda x: x - 1, (x,)) + 1

    for sign in (1, -1):
        x = sign * torch.rand(1000, device="cuda")
        compiled = torch.compile(fn, backend="reflib")
        torch.testing.assert_close(compiled(x), x * 2 + 1 if sign > 0 else x)


# -- what follows, where the kernel stores ----------------------------------------------------------------
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*stores.WHOLE])
def test_what_follows_is_computed_at_the_store(name: str, dtype: torch.dtype, wrapper: str) -> None:
    """Several ops and operands, the plain result as well, an update in place."""

    def fn(x: Tensor, row: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        v = stores.WHOLE[name](x)
        y.add_(v)
        return (v + row).relu() * 2, v, torch.where(v > 0, v, y)

    args = [torch.randn(s, dtype=dtype) for s in ((37, 50), (50,), (37, 50))]
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = same(fn, *args, dynamic=dynamic, wrapper=wrapper)
        kernels = [n for s in compiled.stages for n in walk(s.scheduled.nodes) if isinstance(n, KernelNode)]
        launched = [p.target for k in kernels for p in k.parts if isinstance(p, Extern)]
        assert launched and (dynamic or all(t.appended for t in launched))  # (a block of 64 is a row of 50, not of n)


# -- tuning -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isolate", [False, True])
def test_configurations_are_measured(isolate: bool) -> None:
    """``reset_to_zero`` and ``restore_value``: a candidate that is run many times writes to copies."""
    y = torch.randn(1 << 16, device="cuda")
    mine, theirs = y.clone(), y.clone()
    compiled = Compiled(user_kernels.summed, autotune="blocking", isolate=isolate, cache_decisions=False)
    got, want = compiled(mine), user_kernels.eager_summed(theirs)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-1)
    torch.testing.assert_close(mine, theirs)
    (s,) = compiled.stages
    assert any(isinstance(n, Choice) for n in s.program.nodes)
    d = next(d for d in s.decisions if d.op == "sums_kernel")
    assert {c.status for c in d.candidates} == {"ok"} and len(d.candidates) == 2


@torch.library.custom_op("user_triton_cuda::theirs", mutates_args=())
def theirs(x: Tensor, y: Tensor) -> Tensor:
    return x + y


theirs.register_fake(lambda x, y: torch.empty_like(x))


def test_a_candidate_that_launches() -> None:
    def launching(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(add_kernel)[grid(x.numel())](x, y, out, x.numel(), BLOCK=1024)
        return out

    reflib.register_custom_op_autotuning(theirs, configs=[launching])
    x, y = torch.randn(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    e = reflib.explain(lambda x, y: theirs(x * 2, y) + 1, x, y, autotune="blocking", cache_decisions=False)
    row = next(c for c in e.decisions[0].candidates if str(c.key.variant) == "launching")
    assert row.status == "ok" and row.error is not None and row.error < 1e-6, row


# -- packages, and the host's time ----------------------------------------------------------------------
@pytest.mark.parametrize("name", user_kernels.cases())
def test_a_package(name: str, tmp_path: Path) -> None:
    if name.startswith("described") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA descriptors")
    fn, eager, args = user_kernels.cases()[name]
    mine, theirs = clones(args), clones(args)
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    f = reflib.load(reflib.aot_compile(fn, tuple(mine), tmp_path / "p.reflib", [capability]))
    torch.testing.assert_close(f(*mine), eager(*theirs))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.alone
def test_a_launch_costs_what_ours_does() -> None:
    """Host time per call of a program of eight launches, beside the same of generated kernels (in a C++ wrapper)."""

    def ours(x: Tensor, y: Tensor) -> Tensor:
        for i in range(8):
            x = torch.softmax(x + y, i % 2)
        return x

    def users(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(8):
            out = torch.empty_like(x)
            add_kernel[(1,)](x, y, out, x.numel(), BLOCK=256)
            x = out
        return x

    x = torch.randn(16, 16, device="cuda")
    times = {}
    for fn in (ours, users):
        compiled = Compiled(fn, wrapper="cpp")
        compiled(x, x)
        launches = compiled.kernels
        call = compiled.stages[0].call
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call([x])
            best = min(best, time.perf_counter() - start)
        times[fn.__name__] = best / 20 / launches
    print({k: f"{v * 1e6:.2f} us per launch" for k, v in times.items()})
    assert times["users"] <= 1.25 * times["ours"] + 0.5e-6
