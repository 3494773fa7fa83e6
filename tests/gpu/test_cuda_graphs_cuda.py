"""CUDA graphs for real: eager's results, random numbers that go on, what cannot be recorded, and the host's time."""

import statistics
import time
from itertools import pairwise

import pytest
import torch

import reflib


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_inference_and_its_time(wrapper):
    """A program of 16 kernels: a replay takes the host at most half of what the launches take."""

    def fn(x, w):
        for i in range(8):
            x = torch.softmax(torch.relu(x @ w), i % 2)
        return x

    w = torch.randn(64, 64, device="cuda") / 8
    plain = reflib.compile(fn, wrapper=wrapper)
    torch._dynamo.reset()
    graphs = reflib.compile(fn, wrapper=wrapper, cuda_graphs=True)
    kept = []
    for _ in range(12):
        x = torch.randn(32, 64, device="cuda")
        kept.append((graphs(x, w), fn(x, w), x))
    for ours, theirs, _ in kept:
        torch.testing.assert_close(ours, theirs)
    del kept
    times = {}
    for name, f in (("plain", plain), ("graphs", graphs)):
        for _ in range(20):
            f(x, w)
        rounds = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            f(x, w)
            rounds.append(time.perf_counter() - start)
        times[name] = statistics.median(rounds) * 1e6
    print(f"host time of 16 kernels, {wrapper}: {times['plain']:.1f} -> {times['graphs']:.1f} µs")
    assert times["graphs"] < 0.5 * times["plain"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_with_dropout(accumulate):
    """Random numbers are drawn anew at each replay, the same ones in forward and backward."""
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(256, 8)
    model = torch.nn.Sequential(*layers).cuda()
    f = reflib.compile(model, cuda_graphs=True)
    plain = torch.nn.Sequential(*model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    for i in range(20):
        x = torch.randn(32, 64, device="cuda")
        y = f(x)
        seen.append(y.detach().clone())
        y.square().mean().backward()
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    same = [torch.equal(a, b) for a, b in pairwise(seen)]
    assert not any(same) and all(p.isfinite().all() for p in model.parameters())
    model.eval()
    x = torch.randn(32, 64, device="cuda")
    for _ in range(5):
        torch.testing.assert_close(f(x), plain(x))


def test_the_seed_repeats_what_a_replay_draws():
    f = reflib.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x), cuda_graphs=True)
    x, drawn = torch.randn(1000, device="cuda"), []
    for _ in range(4):
        f(x)
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        drawn.append(f(x))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_a_cache_that_is_written():
    def step(cache, v, pos):
        cache[:, pos] = v
        return (cache * cache).sum(1)

    f = reflib.compile(step, cuda_graphs=True)
    ours, theirs = torch.zeros(8, 16, device="cuda"), torch.zeros(8, 16, device="cuda")
    for i in range(12):
        v, pos = torch.randn(8, device="cuda"), torch.tensor(i, device="cuda")
        torch.testing.assert_close(f(ours, v, pos), step(theirs, v, pos))
        torch.testing.assert_close(ours, theirs)


def test_what_cannot_be_recorded_runs():
    f = reflib.compile(lambda x: torch.nonzero(x.relu()).sum() + 1, cuda_graphs=True)
    for _ in range(5):
        x = torch.randn(50, device="cuda")
        assert f(x) == torch.nonzero(x.relu()).sum() + 1


def test_inside_of_the_callers_own_graph():
    f = reflib.compile(lambda x: (x * 2).sin(), cuda_graphs=True)
    x = torch.randn(100, device="cuda")
    for _ in range(4):
        f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(y, (x * 2).sin())
