"""tests/semantics.py and stages.py on CUDA, and what only CUDA has."""

import pytest
import torch

from tests.results import *  # noqa: F403
from tests.semantics import *  # noqa: F403
from tests.semantics import Compiled, randn
from tests.stages import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_numbers_on_the_cpu_are_arguments(wrapper: str) -> None:
    def f(x: torch.Tensor, a: torch.Tensor, d: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.tensor(64.0) * 3) * torch.sqrt(a) + d - n

    x = randn(1000, device="cuda")
    numbers = [torch.tensor(0.3), torch.tensor(1e-9, dtype=torch.float64), torch.tensor(-(2**40))]
    compiled = Compiled(f, wrapper=wrapper)
    for k in (1, 7):
        args = [k * n for n in numbers]
        torch.testing.assert_close(compiled(x, *args), f(x, *args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # no copy from pageable memory in it
        y = compiled(x, *args)
    graph.replay()
    torch.testing.assert_close(y, f(x, *args))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_cache_is_written_in_place(wrapper: str) -> None:
    def step(cache: torch.Tensor, position: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, position, k.cos() * 2)
        return torch.nn.functional.scaled_dot_product_attention(k, cache, cache)

    mine, eager = (torch.zeros(4, 8, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    compiled = Compiled(step, wrapper=wrapper)
    for i in (3, 4000, 17):
        k, position = torch.randn(4, 8, 1, 64, device="cuda").bfloat16(), torch.tensor([i], device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = compiled(mine, position, k)
        peak = torch.cuda.max_memory_allocated() - before
        torch.testing.assert_close(got, step(eager, position, k))
        torch.testing.assert_close(mine, eager)
        assert i == 3 or peak < mine.nbytes // 2


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_more_than_2_to_the_31_elements(dynamic: bool) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB")
    compiled = Compiled(lambda x: x + 1, dynamic=dynamic)
    compiled(torch.zeros(1000, dtype=torch.int8, device="cuda"))
    x = torch.zeros(2**31 + 5, dtype=torch.int8, device="cuda")
    x[-1] = 3
    y = compiled(x)
    assert [int(y[i]) for i in (0, 2**30, 2**31 - 1, 2**31 + 3, -1)] == [1, 1, 1, 1, 4]
    rows = torch.ones(2**16, 2**15 + 1, dtype=torch.float16, device="cuda")
    sums = Compiled(lambda x: x.float().sum(-1), dynamic=dynamic)(rows)
    assert bool((sums == 2**15 + 1).all())
