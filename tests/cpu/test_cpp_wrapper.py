"""The wrapper in C++: its boundary, what it holds and lets go of, errors, threads."""

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.wrap import cpp
from tests.cpp_wrapping import W, X, affine, count, explained, python_op
from tests.processes import true_in_a_fork

Tensor = torch.Tensor
ROUNDS = int(os.environ.get("REFLIB_CALLS", 20_000))
SILENT = "it failed; see stderr"  # torch 2.11's C interface prints why and keeps it from callers


# -- the boundary -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([X.double(), W], r"argument 0 \(\w+\): expected float32 \[4, 6\].* on cpu; got torch.float64 \[4, 6\]"),
        ([X, W[None]], r"argument 1 \(\w+\): expected float32 \[6\].*; got torch.float32 \[1, 6\]"),
        ([X[:3], W], r"argument 0 .*expected float32 \[4, 6\].*; got torch.float32 \[3, 6\]"),
        ([X.t().contiguous().t(), W], r"argument 0 .*strides \[6, 1\].*; got .*strides \[1, 4\]"),
        ([X, 2.0], r"argument 1 .*expected float32 \[6\].*; got float"),
        ([X, None], r"argument 1 .*; got NoneType"),
        ([X.to("meta"), W], r"argument 0 .* on cpu; got .* on meta"),
        ([X], r"takes 2 arguments, got 1"),
        ([X, W, W], r"takes 2 arguments, got 3"),
    ],
    ids=["dtype", "rank", "size", "strides", "float", "none", "device", "few", "many"],
)
def test_what_does_not_fit_is_refused(args: list, says: str) -> None:
    call = explained(affine, X, W).stages.call
    assert torch.equal(call([X, W])[0], affine(X, W))
    before = [sys.getrefcount(a) for a in args]
    for _ in range(3):
        with pytest.raises(reflib.ReflibError, match=says):
            call(list(args))
    assert [sys.getrefcount(a) for a in args] == before
    assert torch.equal(call([X, W])[0], affine(X, W))


def test_it_takes_one_list() -> None:
    call = explained(affine, X, W).stages.call.load()
    for bad in ((X, W), X, None):
        with pytest.raises(TypeError, match="takes one list"):
            call(bad)
    with pytest.raises(TypeError):
        call()
    with pytest.raises(TypeError):
        call([X, W], out=3)


def test_a_size_is_an_int() -> None:
    e = explained(lambda x: x * x.shape[0], torch.ones(5), dynamic=True)
    call = e.stages.call
    x = torch.ones(7)
    args = [x if isinstance(i, str) else x.shape[0] for i in e.stages.scheduled.inputs]
    assert len(args) == 2, "a symbol and a tensor"
    at = next(i for i, a in enumerate(args) if isinstance(a, int))
    assert float(call(list(args))[0][0]) == 7
    for bad in (2.5, "7", None, 2**70, True):
        with pytest.raises(reflib.ReflibError, match=rf"argument {at} \(\w+\): expected an int of 64 bits; got \w+"):
            call([*args[:at], bad, *args[at + 1 :]])


def test_strides_of_a_dimension_of_one_do_not_matter() -> None:
    call = explained(lambda x: x + 1, torch.ones(1, 6)).stages.call
    odd = torch.ones(12).as_strided((1, 6), (77, 1))
    assert torch.equal(call([odd])[0], torch.full((1, 6), 2.0))


# -- what is held, and for how long -----------------------------------------------------------------
def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grows(step: Callable[[], Any], rounds: int) -> float:
    """Bytes of resident memory that a step adds, after it has settled."""
    for _ in range(rounds // 4):
        step()
    gc.collect()
    before = resident()
    for _ in range(rounds):
        step()
    gc.collect()
    return (resident() - before) / rounds


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("kind", ["kernels", "refused", "python", "raising", "views"])
@pytest.mark.sample(5)
def test_memory_is_flat(kind: str) -> None:
    x, w = torch.ones(64, 64), torch.ones(64)
    failing = [False]

    def body(t: Tensor) -> Tensor:
        if failing[0]:
            raise ValueError("on purpose")
        return t * 2

    op = python_op(body)
    fn: Any = {"views": lambda x, w: (x.t(), x[1:] * 2, x[:, 3], w.sum()), "kernels": affine, "refused": affine}.get(
        kind, lambda x, w: op(x * w).sort(1).values + op(w)
    )
    call = explained(fn, x, w).stages.call
    call([x, w])
    failing[0] = kind == "raising"
    bad = x[:5]

    def step() -> None:
        if kind == "refused":
            with pytest.raises(reflib.ReflibError):
                call([bad, w])
        elif kind == "raising":
            with pytest.raises(ValueError):
                call([x, w])
        else:
            call([x, w])

    rounds = ROUNDS if kind in ("kernels", "views") else ROUNDS // 5
    # a handle that is not freed would be 8 bytes at least, a tensor hundreds
    assert grows(step, rounds) < max(8, 2**20 / rounds)


def test_reference_counts_are_as_before() -> None:
    op = python_op(lambda x: x * 2)
    call = explained(lambda x, w: (op(x) + w, x, w.sum(), x[1:]), X, W).stages.call
    for _ in range(2):
        x, w = X.clone(), W.clone()
        out = call([x, w])
        held = sys.getrefcount(x), sys.getrefcount(w)
        del out
        assert (sys.getrefcount(x), sys.getrefcount(w)) == (2, 2), held


def test_inputs_are_dropped_as_soon_as_nobody_needs_them() -> None:
    alive: list[bool] = []
    ref: list[Any] = []

    def body(t: Tensor) -> Tensor:
        alive.append(ref[0]() is not None)
        return t + 0

    op = python_op(body)
    x = torch.ones(1000)
    ref.append(weakref.ref(x))
    call = explained(lambda x: op(x.sin().sort().values) + 1, x).stages.call
    del alive[:]
    x = None  # type: ignore[assignment]
    gc.collect()
    for keep in (False, True):
        x = torch.ones(1000)
        ref[0] = weakref.ref(x)
        args = [x]
        if not keep:
            x = None  # type: ignore[assignment]
        call(args)
        assert not args
    assert alive == [False, True]


# -- errors from Python -----------------------------------------------------------------------------
def test_an_exception_of_a_custom_op_is_itself() -> None:
    class Odd(Exception):
        pass

    raised: list[Exception] = []

    def where_it_happens(x: Tensor) -> Tensor:
        if float(x[0]) < 0:
            raised.append(Odd("not today", 42))
            raise raised[-1]
        return x.clone()

    f = reflib.compile(lambda x, op=python_op(where_it_happens): op(x * 1) + 1, wrapper="cpp")
    x = torch.ones(4)
    assert torch.equal(f(x), x + 1)
    with pytest.raises(Odd) as e:
        f(-x)
    assert e.value is raised[0] and e.value.args == ("not today", 42)
    frames = [f.name for f in e.traceback]
    assert "where_it_happens" in frames, frames
    assert torch.equal(f(x), x + 1)


def test_keyboard_interrupt_passes_through() -> None:
    def body(x: Tensor) -> Tensor:
        if float(x[0]) < 0:
            raise KeyboardInterrupt
        return x.clone()

    f = reflib.compile(lambda x, op=python_op(body): op(x * 1) + 1, wrapper="cpp")
    f(torch.ones(4))
    with pytest.raises(KeyboardInterrupt):
        f(-torch.ones(4))


def test_no_memory_is_torchs_error() -> None:
    f = reflib.compile(lambda x: x.expand(1 << 30, 1 << 28) + 1, wrapper="cpp")  # no address space is so large
    with pytest.raises(RuntimeError, match=rf"step empty \w+: (.*alloc|{SILENT})"):
        f(torch.ones(1))


def test_a_tensor_without_memory_is_an_error() -> None:
    @torch.library.custom_op(f"cpp_wrapper::op{next(count)}", mutates_args=())
    def sparse(x: Tensor) -> Tensor:
        return x.to_sparse()

    sparse.register_fake(torch.empty_like)  # (it says dense)
    f = reflib.compile(lambda x: sparse(x) + 1, wrapper="cpp")
    with pytest.raises(RuntimeError, match=f"storage|{SILENT}"):
        f(torch.eye(3))


def test_large_numbers_do_not_wrap_around() -> None:
    f = reflib.compile(lambda x, n: (x + 1, n * n * n), wrapper="cpp", dynamic=True)
    assert f(torch.ones(3), 5)[1] == 125
    with pytest.raises(OverflowError):
        f(torch.ones(3), 2**40)


def test_comments_stay_comments(tmp_path: Any) -> None:
    for i, name in enumerate(("a\n#error hi", "b\\", "c */ d")):
        scope: dict[str, Any] = {}
        exec(compile(f"def f(x): return x.sort()[0] + {i}", name, "exec"), scope)
        f = reflib.compile(scope["f"], wrapper="cpp")
        torch.testing.assert_close(f(torch.ones(3)), torch.ones(3) + i)


def test_auto_is_python_where_cpp_has_no_word_for_it(monkeypatch: Any) -> None:
    monkeypatch.delitem(cpp.DTYPES, torch.float64)
    f = lambda x: torch.relu(x) + 1  # noqa: E731
    x = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(reflib.compile(f, wrapper="auto")(x), f(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match='use wrapper="python"'):
        reflib.compile(f, wrapper="cpp")(x)


# -- threads ----------------------------------------------------------------------------------------
def test_the_first_calls_come_at_once() -> None:
    """Loading happens once, whichever thread is first."""
    call = explained(affine, X, W).stages.call
    start = threading.Barrier(8)

    def work(_: int) -> Tensor:
        start.wait(60)
        return call([X, W])[0]

    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(r, affine(X, W)) for r in pool.map(work, range(8)))


def test_others_run_while_a_kernel_does() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin().exp().tanh()
        return x

    x = torch.randn(1 << 23)
    call = explained(f, x).stages.call
    call([x])
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    call([x])
    end = time.perf_counter()
    stop.set()
    ticker.join()
    assert end - start > 0.02, "too short to tell"
    inside = [t for t in ticks if start + 0.002 < t < end - 0.002]
    assert len(inside) >= 3, (end - start, len(ticks))


def test_after_a_fork() -> None:
    torch.set_num_threads(1)
    f = reflib.compile(lambda x: torch.relu(x).sort().values + 1, wrapper="cpp")
    f(torch.ones(3))

    def both() -> bool:
        old = f(torch.ones(3))
        torch._dynamo.reset()
        new = reflib.compile(lambda x: x.exp() + 1, wrapper="cpp")(torch.zeros(3))
        return old.tolist() == new.tolist() == [2, 2, 2]

    assert true_in_a_fork(both)
    torch.set_num_threads(2)
