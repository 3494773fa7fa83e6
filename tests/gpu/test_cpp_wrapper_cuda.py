"""The wrapper in C++ on CUDA: its boundary, memory, errors, and the way without a C extension."""

from pathlib import Path

import pytest
import torch

import reflib
from reflib.errors import ArgumentError
from reflib.wrap.host import address
from tests.composition import FALLBACKS
from tests.cpp_wrapping import explained
from tests.processes import python


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(4, 6, device="cuda")
    call = explained(lambda x: torch.relu(x) + 1, x).stages.call
    for bad in (x.cpu(), x.half(), x[:2], x.t(), 3):
        with pytest.raises(ArgumentError, match=r"argument 0 \(\w+\): expected float32 \[4, 6\].* on cuda:0; got"):
            call([bad])
    assert torch.equal(call([x])[0], x + 1)


def test_memory_of_the_device_is_flat() -> None:
    x = torch.randn(256, 256, device="cuda")
    call = explained(lambda x: (torch.softmax(x.sort(1).values @ x, -1), x.t()), x).stages.call
    call([x])
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        call([x])
    assert torch.cuda.memory_allocated() == before


def test_no_memory_is_torchs_error() -> None:
    """PyTorch's C interface says why since 2.13; before it prints that, and there is only a RuntimeError to raise."""
    says = address("torch_exception_get_what_without_backtrace")
    error, text = (torch.OutOfMemoryError, "out of memory") if says else (RuntimeError, "step empty add: it failed")
    f = reflib.compile(lambda x: x.expand(1 << 24, 1 << 18) + 1, wrapper="cpp")
    with pytest.raises(error, match=text):
        f(torch.ones(1, device="cuda"))
    x = torch.ones(5, device="cuda")
    assert torch.equal(reflib.compile(lambda x: x + 1, wrapper="cpp")(x), x + 1)


def test_the_profiler_shows_launches() -> None:
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(1000, device="cuda")
    e = explained(lambda x: torch.softmax(x, 0) * 2, x)
    e.stages.call([x])
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        e.stages.call([x])
        torch.cuda.synchronize()
    names = {event.key for event in p.key_averages()}
    assert any(k.name in n for k in e.kernels for n in names), names


OTHER_WAYS = (
    FALLBACKS
    + """
for name in ("dynamic_shapes", "training", "custom_ops_in_python", "misaligned_views", "another_stream",
             "captured_in_a_cuda_graph", "split_k_words_under_capture", "early_launches"):
    for wrapper in ("cpp", "package"):
        with pytest.MonkeyPatch.context() as m:
            run(name, "cuda", wrapper, m, Path(tempfile.mkdtemp()))
assert host.extension() is None
"""
)


@pytest.mark.parametrize("way", ["layout unknown", "no Python.h"])
def test_other_ways(way: str, root: Path) -> None:
    python(OTHER_WAYS.format(ctypes=way == "no Python.h"), env={"PYTHONPATH": str(root)}, seconds=600)
