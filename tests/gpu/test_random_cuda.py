"""Random numbers in a GPU's kernels: the CPU's bits, seeds, CUDA graphs, both directions; long rows in one pass."""

import pytest
import torch
import torch.nn.functional as F

from reflib.capture.random import RANDOM
from tests.semantics import Compiled, compare, randn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_bits_are_the_cpus(dtype: torch.dtype) -> None:
    size = [129, 1001]

    def f(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return RANDOM(seed, 3, "uniform", size, [0, 1], dtype), RANDOM(seed, 4, "normal", size, [0, 1], dtype)

    seed = torch.tensor([-1234567890123456789])
    want, got = f(seed), Compiled(f)(seed.cuda())
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(f(seed.cuda())[0].cpu(), want[0])
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_residual_in_both_directions(wrapper: str, dtype: torch.dtype) -> None:
    """The default on a GPU. Rows of 768: one kernel forward; where y was dropped its gradient is 0."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + F.dropout(y, 0.3), (768,))

    x = randn(300, 768, device="cuda", dtype=dtype)
    y = randn(300, 768, device="cuda", dtype=dtype, grad=True)
    compiled = Compiled(f, wrapper=wrapper)
    torch.cuda.manual_seed(1)
    first, second = compiled(x, y), compiled(x, y)
    torch.cuda.manual_seed(1)
    assert torch.equal(compiled(x, y), first) and not torch.equal(second, first)
    first.square().sin().sum().backward()
    kept = y.grad != 0
    assert abs(kept.float().mean() - 0.7) < 0.01
    want = F.layer_norm((x.float() + y.float() * kept / 0.7), (768,))
    assert (want - first.float()).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-4)
    assert len(compiled.stages[0].scheduled.nodes) == 2  # the seed and the kernel


def test_each_replay_of_a_graph_draws_others() -> None:
    x = torch.ones(1000, 100, device="cuda")
    compiled = Compiled(lambda x: F.dropout(x, 0.5))
    for _ in range(3):
        compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert all(abs((f == 0).float().mean() - 0.5) < 0.01 for f in found)


@pytest.mark.parametrize("rows, length", [(8, 128_256), (4, 1 << 20), (3, 100_003), (241, 12_000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_rows(rows: int, length: int, dtype: torch.dtype) -> None:
    x = randn(rows, length, device="cuda", dtype=dtype) * 3
    compare(lambda x: x.softmax(-1), x)
    compare(lambda x: x.logsumexp(-1), x)
    compare(lambda x, t: F.cross_entropy(x, t), x, torch.arange(rows, device="cuda") * 7)
