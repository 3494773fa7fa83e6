"""Split-K on a GPU, compiled and called as a user does: many streams at once, graphs, what came just before."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch

import reflib
from reflib.wrap.zeros import Zeros

Tensor = torch.Tensor
SIZES = [(16, 16, 4096), (48, 40, 12288), (64, 64, 32768)]


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


@pytest.fixture
def compiled() -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    torch._dynamo.reset()
    f = reflib.compile(product)
    yield f
    torch._dynamo.reset()


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, device="cuda", generator=g).half()
    return a, (torch.randn(k, n, device="cuda", generator=g) / k**0.5).half()


def close(got: Tensor, a: Tensor, b: Tensor) -> bool:
    return bool((got.double() - (a.double() @ b.double()).relu()).abs().max() < 2e-3 * max(1, float(got.abs().max())))


@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_split_and_repeats_bit_for_bit(sizes: tuple[int, int, int]) -> None:
    a, b = operands(*sizes)
    f = reflib.compile(product)
    first = f(a, b)
    assert close(first, a, b)
    assert all(torch.equal(f(a, b), first) for _ in range(200))
    source = "".join(k.source for k in reflib.explain(product, a, b).kernels)
    assert "SPLITS" in source and (torch.cuda.get_device_capability() < (9, 0) or "gdc_wait()" in source)


def test_a_graph_replayed_while_others_call(compiled: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = operands(64, 64, 16384)
    first = compiled(a, b)
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs += [compiled(a, b) for _ in range(5)]
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for graph, s in zip(graphs, streams):
            with torch.cuda.stream(s):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            results.append(compiled(a, b))
        results.append(compiled(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(r, first) for r in [*results, *outs])


def test_what_is_not_finite(compiled: Callable[[Tensor, Tensor], Tensor]) -> None:
    """No NaN of the data is taken for a part that is not there yet; those with odd bits neither."""
    a, b = operands(48, 40, 8192)
    clean = compiled(a, b)
    odd = torch.tensor([0x7C01, -0x0001, 0x7E00, -0x03FF, 0x7DA6], dtype=torch.int16, device="cuda").view(torch.float16)
    dirty = a.clone()
    dirty[0, :5], dirty[1, 4000:4005], dirty[2, 17], dirty[3, 8191] = odd, odd, float("inf"), -float("inf")
    got = compiled(dirty, b)
    assert bool(got[:2].isnan().all())
    want = torch.relu(dirty.float() @ b.float())
    assert torch.equal(got[2:4].isinf(), want[2:4].isinf()) and torch.equal(got[4:], clean[4:])
    assert torch.equal(compiled(a, b), clean), "the workspace is as it was"


# -- the workspace ----------------------------------------------------------------------------------
def test_words_are_aligned_and_there_are_enough_for_captures() -> None:
    zeros = Zeros()
    stream = torch.cuda.Stream()
    seen = []
    measuring = ExitStack()
    with torch.cuda.stream(stream):
        for count in (0, 3, 5000, 3_000_001, 7):
            words = zeros(0, stream.cuda_stream, count)
            assert words.numel() >= count and words.data_ptr() % 16 == 0 and not words.any()
        measuring.enter_context(zeros.for_a_while())
        for _ in range(3 * Zeros.CALLS):  # as many captures as anyone makes, a call before each
            zeros(0, stream.cuda_stream, 3_000_001)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                mine = [zeros(0, stream.cuda_stream, n) for n in (1025, 3_000_001, 100)]
            assert mine[1] is mine[2], "calls of one graph run one after another"
            assert all(w.data_ptr() % 16 == 0 for w in mine)
            seen.append(mine[1])
    torch.cuda.synchronize()
    places = sorted(w.data_ptr() for w in seen)
    assert all(b - a >= 4 * 3_000_001 for a, b in pairwise(places)), "no graph shares with another"
    assert not any(bool(w.any()) for w in seen)
    measuring.close()  # the captures are over, and their words are given up
    assert len(zeros.of) == 1
