"""The rows of the composition table that only a GPU has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from tests.checking import check
from tests.composition.table import IN_A_FILE, Tensor, compiled, cuda_feature, same
from tests.semantics import randn


def wide(device: str = "cuda", m: int = 48, n: int = 40, k: int = 12288) -> tuple[Tensor, Tensor]:
    """A product that is split along its depth."""
    return randn(m, k, device=device).half(), (randn(k, n, device=device) / k**0.5).half()


@cuda_feature
def another_stream(device: str, wrapper: str) -> None:
    c = compiled(lambda x: torch.softmax(x * 2, -1), wrapper)
    x = randn(512, 512, device=device)
    want = torch.softmax(x * 2, -1)
    c(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.mul_(1)
        got = c(x)
    stream.synchronize()
    torch.testing.assert_close(got, want)


def replayed(fn: Callable[..., Any], c: Callable[..., Any], *args: Tensor, tolerance: float = 1e-5) -> None:
    """Capture a call, and replay it with other data in its inputs."""
    for _ in range(2):
        c(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = c(*args)
    for i in range(3):
        for a in args:
            a.copy_(a.flip(0) * (1 + i / 4))
        graph.replay()
        torch.testing.assert_close(out, fn(*args), rtol=tolerance, atol=tolerance)


@cuda_feature
def captured_in_a_cuda_graph(device: str, wrapper: str) -> None:
    f = lambda x, w: (torch.softmax(x @ w, -1) + 1).sum(0)  # noqa: E731
    c = compiled(f, wrapper)
    replayed(f, c, randn(64, 96, device=device), randn(96, 32, device=device), tolerance=1e-3)


@cuda_feature
def split_k_words_under_capture(device: str, wrapper: str) -> None:
    """Its counters must be zero at every replay, and not be shared."""
    f = lambda a, b: torch.relu(a @ b)  # noqa: E731
    c = compiled(f, wrapper)
    a, b = wide(device)
    c(a, b)
    replayed(f, c, a, b, tolerance=1e-2)


@cuda_feature
def split_k_on_many_streams(device: str, wrapper: str) -> None:
    """More programs than fit on the GPU, by far: none may wait for one that cannot start."""
    c = compiled(lambda a, b: torch.relu(a @ b), wrapper)
    a, b = wide(device, 64, 64, 32768)
    first = c(a, b)
    streams = [torch.cuda.Stream() for _ in range(16)]
    torch.cuda.synchronize()
    results = []
    for _ in range(100):
        for s in streams:
            with torch.cuda.stream(s):
                results.append(c(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(r, first) for r in results)


@cuda_feature
def early_launches(device: str, wrapper: str) -> None:
    """Launched early (programmatic dependent launch), a kernel must not read its input before the kernel before has
    written it, nor may the next one write over what it still reads: the same with a wait after every step."""
    c = compiled(lambda a, b: torch.relu(a @ b), wrapper)
    a, b = wide(device, 64, 4096, 4096)
    down, up = b[:, :64].contiguous(), b[:64] * 11

    def steps(wait: Callable[[], None]) -> list[Tensor]:
        x, out = a, []
        for i in range(40):
            y = c(x, down)
            wait()
            x = y @ up
            wait()
            scaled = x * (i + 1)
            out.append(c(scaled, down))
            wait()
            scaled.fill_(float("nan"))
            out.append(c(x, down))  # the same kernel again, with the same workspace
            wait()
        return out

    want = steps(torch.cuda.synchronize)
    for _ in range(5):
        assert all(torch.equal(g, w) for g, w in zip(steps(lambda: None), want))
    assert all(bool(w.isfinite().all()) for w in want[:8])


@cuda_feature
def two_devices(device: str, wrapper: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2).to(y.device) + y.sin()

    args = randn(100, 3, device="cuda:0"), randn(100, 3, device="cuda:1")
    if wrapper in IN_A_FILE:  # it is loaded for one GPU
        said = {"package": "argument y: device cuda:1, but it was exported with cuda:0"}
        with pytest.raises(reflib.ReflibError, match=said.get(wrapper, r"1 \(y\): it is on GPU 1, where")):
            compiled(f, wrapper)(*args)
    else:
        same(f, wrapper, *args)
    g = lambda x: x.sum(-1) + 1  # noqa: E731
    c = compiled(g, wrapper)
    for where in ("cuda:1", "cuda:0", "cuda:1"):
        check(g, c, randn(100, 3, device=where))
    assert torch.cuda.current_device() == 0


@cuda_feature
def from_a_thread_that_never_saw_the_gpu(device: str, wrapper: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    f = lambda x: torch.softmax(x * 2, -1)  # noqa: E731
    c = compiled(f, wrapper)
    x = randn(64, 64, device=device)
    c(x)
    with ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(c, x).result(), f(x))


@cuda_feature
def numbers_of_a_cpu(device: str, wrapper: str) -> None:
    """A CPU scalar among tensors of the GPU, and kernels of both in one graph."""
    x, y, s = randn(33, device=device), randn(33, device="cpu"), torch.tensor(2.5)
    same(lambda x: (x.cpu() * 2 + 1).to(x.device) + x, wrapper, x)
    if wrapper in IN_A_FILE:  # what it is called with lies on its GPU
        said = {"package": "argument s: device cpu, but it was exported with cuda:0"}
        with pytest.raises(reflib.ReflibError, match=said.get(wrapper, r"\(s\): expected .* on cuda:0; got .* on cpu")):
            compiled(lambda x, s: x * s + 1, wrapper)(x, s)
    else:
        same(lambda x, s: x * s + 1, wrapper, x, s)
        same(lambda x, y: (x.cpu() * 2 + y).to(x.device) + x, wrapper, x, y)


@cuda_feature
def operands_that_are_computed(device: str, wrapper: str) -> None:
    """Weights of 8 and of 4 bits, unpacked in the product's kernel, with an epilogue; also where sizes may change."""

    def f(x: Tensor, w: Tensor, p: Tensor, s: Tensor) -> Any:
        low = torch.stack([p & 15, p >> 4], -1).view(p.shape[0], -1)
        return torch.relu(x @ (w.to(x.dtype) * s[:, None]).t()), x @ ((low.to(x.dtype) - 8) * s[:, None]).t()

    s = (torch.rand(512, device=device) / 64).bfloat16()
    w, p = (torch.randint(-99, 99, (512, k), device=device).to(d) for k, d in ((1024, torch.int8), (512, torch.uint8)))
    c = compiled(f, wrapper)
    check(f, c, randn(16, 1024, device=device).bfloat16(), w, p, s)
    assert all("operands computed" in str(d.winner) for stages in c.stages for d in stages.decisions if d.op)
    c = compiled(f, wrapper, dynamic=True)
    for rows in (16, 3, 400):
        check(f, c, randn(rows, 1024, device=device).bfloat16(), w, p, s)
    check(f, compiled(f, wrapper, autotune="blocking"), randn(16, 1024, device=device).bfloat16(), w, p, s)


@cuda_feature
def scaled_products(device: str, wrapper: str) -> None:
    """Of 8-bit floats, with scales per row and column, and an epilogue: few results, so one kernel does it."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit floats in hardware")
    a, b = (randn(n, 512, device=device).to(torch.float8_e4m3fn) for n in (64, 48))
    f = lambda a, b, r, c: torch.relu(torch._scaled_mm(a, b.t(), r, c, out_dtype=torch.bfloat16))  # noqa: E731
    check(f, compiled(f, wrapper), a, b, torch.rand(64, 1, device=device), torch.rand(1, 48, device=device))


@cuda_feature
def grouped_products(device: str, wrapper: str) -> None:
    """A mixture of experts: rows by their expert, with groups that are empty, and the gradient of the experts."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 on tensor cores")

    def f(x: Tensor, w: Tensor, ends: Tensor) -> Any:
        y = torch._grouped_mm(x, w, offs=ends)
        return torch.relu(y), torch._grouped_mm(x.t(), y, offs=ends)

    x, w = (randn(*s, device=device).bfloat16() / 8 for s in ((256, 64), (4, 64, 96)))
    for autotune in ("off", "blocking"):
        c = compiled(f, wrapper, autotune=autotune)
        for ends in ((100, 100, 130, 256), (0, 7, 200, 256)):
            check(f, c, x, w, torch.tensor(ends, dtype=torch.int32, device=device))


@cuda_feature
def batched_products_with_a_bias(device: str, wrapper: str) -> None:
    """``baddbmm`` with alpha and beta, one kernel with what follows: small, so without measuring too."""

    def f(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(torch.baddbmm(c, a, b, beta=0.5, alpha=2)) + 1

    args = [randn(*s, device=device).bfloat16() for s in ((4, 1, 96), (4, 64, 128), (4, 128, 96))]
    for autotune in ("off", "blocking"):
        check(f, compiled(f, wrapper, autotune=autotune), *args)


@cuda_feature
def kernels_of_the_user(device: str, wrapper: str) -> None:
    """Launched in plain Triton: with neighbours, one that reads what another wrote, two outputs, in branches and loops,
    and with configurations, which are measured."""
    from tests import user_kernels  # (needs Triton)

    for name in ("plain", "chained", "both", "branching", "summed"):
        fn, eager, args = user_kernels.cases()[name]
        args = [x.to(device) for x in args]
        c = compiled(fn, wrapper, autotune="blocking" if name == "summed" else "off")
        torch.testing.assert_close(c(*[x.clone() for x in args]), eager(*args), rtol=1e-4, atol=1e-4)


@cuda_feature
def recorded_calls(device: str, wrapper: str) -> None:
    """``cuda_graphs=True``, with inputs that move and one that is written to."""

    def f(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        y = torch.softmax(torch.relu(x @ w), -1)
        cache.add_(y.sum(0))
        return (y + cache).sum(-1)

    c, w = compiled(f, wrapper, cuda_graphs=True), randn(64, 64, device=device)
    mine, theirs = torch.zeros(64, device=device), torch.zeros(64, device=device)
    for _ in range(8):
        x = randn(32, 64, device=device)
        torch.testing.assert_close(c(x, w, mine), f(x, w, theirs), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
