"""Recorded calls of exported programs and packages, whose callers are not checked: what they keep, and how long."""

import copy
import gc
import weakref

import pytest
import torch

import reflib
from reflib.wrap import cuda_graphs
from tests.cpu.test_cuda_graphs import HOW, Counting, exported, recorder  # noqa: F401 - a fixture

X, TOTAL = torch.randn(5, 6), torch.zeros(4)


def recorded(f):
    return getattr(f, "_exported", f)._recorded()


@pytest.mark.parametrize("how", HOW)
def test_arguments_that_require_grad_are_not_kept(recorder, tmp_path, how):  # noqa: F811
    f = exported(tmp_path, how, Counting(), X, TOTAL)
    total, ends = torch.zeros(4), []
    for _ in range(9):
        x = torch.randn(5, 6, requires_grad=True)
        got = f(x, total, by=3)
        assert not got["y"].requires_grad and not got["first"].requires_grad
        assert got["first"].data_ptr() == x.data_ptr()
        ends.append(weakref.ref(x))
    assert recorder.replayed > 3
    del x, got
    assert not any(end() is not None for end in ends)


@pytest.mark.parametrize("how", HOW)
def test_an_argument_of_a_subclass_ends_no_recordings(recorder, tmp_path, how):  # noqa: F811
    class Other(torch.Tensor):
        pass

    model = Counting()
    f, eager = exported(tmp_path, how, copy.deepcopy(model), X, TOTAL), model
    mine, theirs = torch.zeros(4), torch.zeros(4)
    for k in range(18):
        x = torch.randn(5, 6)
        got = f(x if k % 3 else x.as_subclass(Other), mine, by=3)
        torch.testing.assert_close(got["y"], eager(x, theirs, by=3)["y"].detach())
    assert recorder.replayed > 3 and not recorded(f).failed


@pytest.mark.parametrize("how", ["package", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_stream_and_size_has_its_recordings(recorder, tmp_path, monkeypatch, how, dynamic):  # noqa: F811
    """Where one has as many as it may have, another has some still; only recordings of a call's own sizes are tried."""
    f = exported(tmp_path, how, Counting(), X, TOTAL, dynamic=dynamic)
    for stream in (0, 1):
        monkeypatch.setattr(recorder, "stream", lambda device, stream=stream: stream)
        kept = [f(X, TOTAL, by=3) for _ in range(12)]
        assert recorder.recorded == cuda_graphs.RECORDINGS * (stream + 1) and len(kept) == 12
        before = recorder.replayed
        f(X, TOTAL, by=3)
        assert recorder.replayed == before, "the checked fast path, without a recording"
    one = recorded(f)
    tried = []
    for recordings in one.recordings.values():
        for r in recordings:
            r.run = lambda args, r=r: tried.append(r)
    if dynamic:
        f(torch.randn(7, 6), TOTAL, by=3)
        assert not set(tried) & {r for rs in one.recordings.values() for r in rs}
    for wrong in ([3], "x", None):
        with pytest.raises(reflib.ReflibError, match="argument x: expected a tensor"):
            f(wrong, TOTAL, by=3)


def test_unloading_needs_no_collector(recorder, tmp_path):  # noqa: F811
    f = exported(tmp_path, "package", Counting(), X, TOTAL)
    for _ in range(5):
        f(X, torch.zeros(4), by=3)
    held = [weakref.ref(t) for t in f._state.values()]
    gc.disable()
    try:
        f.unload()
        assert held and not any(end() is not None for end in held)
    finally:
        gc.enable()
