"""The wrapper in C++: its boundary, what it holds and lets go of, threads, errors, and how it is built and found."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib import toolchain
from reflib.errors import ToolchainError
from reflib.wrap import cpp, host
from tests.composition import FALLBACKS
from tests.models import build

Tensor = torch.Tensor
ROUNDS = int(os.environ.get("REFLIB_CALLS", 20_000))
SILENT = "it failed; see stderr"  # torch 2.11's C interface prints why and keeps it from callers
count = iter(range(1000))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def explained(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        e = reflib.explain(fn, *args, wrapper="cpp", verify=True, **options)
    assert "int32_t reflib_call(" in e.wrapper
    return e


def python_op(body: Callable[[Tensor], Any]) -> Any:
    """A custom op in Python, from a tensor to another like it."""

    @torch.library.custom_op(f"cpp_wrapper::op{next(count)}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return body(x)

    op.register_fake(torch.empty_like)
    return op


# -- the boundary -----------------------------------------------------------------------------------
def affine(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x * w) + 1


X, W = torch.ones(4, 6), torch.full((6,), 2.0)


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


def test_an_output_that_is_an_input_is_that_object() -> None:
    # (AOTAutograd would make an alias of it; the graph itself passes it through)
    call = explained(lambda x, w: (x * w).sum(), X.requires_grad_(False), W).stages.call
    assert call([X, W])[0].item() == 48
    e = explained(lambda x: (x.view(-1), x + 1), X)
    out = e.stages.call([X])
    assert any(t.data_ptr() == X.data_ptr() for t in out) or len(out) == 1


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
def test_eight_threads_at_once() -> None:
    op = python_op(lambda x: x * 2)
    fn = lambda x: torch.softmax(op(x).sort(-1).values, -1) @ x.t()  # noqa: E731
    xs = [torch.randn(16, 16) * i for i in range(1, 9)]
    f = reflib.compile(fn, wrapper="cpp")
    f(xs[0])
    bad: list[Any] = []

    def work(x: Tensor) -> None:
        want = fn(x)
        try:
            for _ in range(50):
                torch.testing.assert_close(f(x), want)
        except BaseException as e:
            bad.append(e)

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad, bad[0]


def test_the_first_calls_come_at_once() -> None:
    """Loading happens once, whoever is first."""
    call = explained(affine, X, W).stages.call
    results: list[Any] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        results.append(call([X, W])[0])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 8 and all(torch.equal(r, affine(X, W)) for r in results)


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
    pid = os.fork()
    if pid == 0:
        threading.Timer(60, lambda: os._exit(9)).start()
        try:
            good = torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
            torch._dynamo.reset()
            g = reflib.compile(lambda x: x.exp() + 1, wrapper="cpp")
            good = good and torch.equal(g(torch.zeros(3)), torch.full((3,), 2.0))
            os._exit(0 if good else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    torch.set_num_threads(2)


# -- seen from outside ------------------------------------------------------------------------------
def test_the_profiler_shows_kernels() -> None:
    from torch.profiler import ProfilerActivity, profile

    e = explained(affine, X, W)
    e.stages.call([X, W])
    with profile(activities=[ProfilerActivity.CPU]) as p:
        e.stages.call([X, W])
    assert {k.name for k in e.kernels} <= {event.name for event in p.events()}


def test_the_text_has_each_kernel_below_its_ir() -> None:
    fn, args, _ = build("transformer", "cpu")
    e = explained(fn, *args)
    lines = [line.strip() for line in e.wrapper.splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("run_kernel(run, ")]
    assert len(starts) == len(e.kernels)
    for i, k in zip(starts, e.kernels):
        assert re.match(rf"run_kernel\(run, {k.name}\b", lines[i]), lines[i]
        assert re.match(r"// (loops|template|\.\.\. and)", lines[i - 1]), lines[i - 1]
    for x in (n for n in e.scheduled.nodes if type(n).__name__ == "Extern"):
        assert any(line.startswith(f"// extern {x.name}: ") for line in lines), x.name
    assert e.wrapper.count("input(run, ") == sum(isinstance(i, str) for i in e.scheduled.inputs)
    assert max(map(len, e.wrapper.splitlines())) < 2000


SMALL = """\
extern "C" int32_t reflib_call(Host* host, Frame* frame, const Value* in, Value* out) try {
  Run run(host, frame);
  Tensor X, W, add;
  input(run, X, 0, in[0], X_is);
  input(run, W, 1, in[1], W_is);
  empty<2>(run, add, {4, 6}, {6, 1}, float32, cpu);
  // loops ...
  run_kernel(run, KERNEL, X, W, add);
  drop(run, X, 0);
  drop(run, W, 1);
  out[0] = give(run, add);
  return 0;
} catch (const Failed&) {
  return -1;
} catch (...) {
  return escaped(frame);
}
"""


def test_a_small_text_in_full() -> None:
    e = explained(affine, X, W)
    text = e.wrapper[e.wrapper.index('extern "C"') :].partition("\n/*")[0]
    x, w = e.scheduled.inputs
    (kernel,) = e.kernels
    text = re.sub(rf"\b{x}(?=_is\b|\b)", "X", re.sub(rf"\b{w}(?=_is\b|\b)", "W", text)).replace(kernel.name, "KERNEL")
    text = re.sub(r"// loops .*", "// loops ...", text)
    text = re.sub(r' *run\.step\(".*"\);\n', "", re.sub(r'run\.at\(".*?"\)', "run", text))  # what is said of it
    assert text == SMALL


def test_numbers_of_dtypes_are_torchs() -> None:
    for dtype, number in cpp.DTYPES.items():
        name = f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}"
        assert ctypes.CFUNCTYPE(ctypes.c_int32)(host.address(name))() == number, name


def test_everything_of_torchs_that_is_named_is_there() -> None:
    assert [n for n, where in host.FUNCTIONS if where == "cpu" and not host.address(n)] == []
    assert host.address(host.WRAP)
    table = (Path(host.__file__).parent / "host.h").read_text().partition("typedef struct {\n    int32_t (*empty")[2]
    assert table.partition("} Torch;")[0].count("(*") + 1 == len(host.FUNCTIONS)


# -- building ---------------------------------------------------------------------------------------
def test_a_transformer_block_builds_quickly(fresh_cache: Path) -> None:
    fn, args, _ = build("transformer", "cpu")
    e = explained(fn, *args)
    e.stages.call.wait()
    toolchain.compiler()
    source = e.wrapper + "\n// again\n"
    folder = fresh_cache / "wrapper"
    assert len(list(folder.rglob("*.so"))) == 1
    for p in folder.rglob("*.so"):
        p.unlink()
    start = time.perf_counter()
    host.compile_wrapper(source)
    seconds = time.perf_counter() - start
    print(f"{seconds:.2f} s")
    assert seconds < 6


CHILD = """
import sys, torch, reflib
from reflib import toolchain
compiled = []
real = toolchain.must_run
def spy(command, *a, **k):
    compiled.append(command)
    return real(command, *a, **k)
toolchain.must_run = spy
from reflib.wrap import host, native
f = reflib.compile(lambda x: torch.relu(x).sort().values + 1, wrapper="cpp")
assert torch.equal(f(torch.ones(5)), torch.full((5,), 2.0))
print(len([c for c in compiled if any("wrapper.cpp" in str(x) for x in c)]), len(compiled))
"""


def child(script: str, root: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_another_process_finds_it_in_the_cache(fresh_cache: Path, root: Path) -> None:
    assert child(CHILD, root).split()[0] == "1"
    assert child(CHILD, root).split() == ["0", "0"], "no compiler runs"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from reflib.options import Options
    from reflib.wrap.build import in_cpp

    assert in_cpp(Options(wrapper="auto")) and in_cpp(Options(wrapper="cpp"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert not in_cpp(Options(wrapper="auto"))
    with pytest.raises(ToolchainError, match=r"wrapper=\"cpp\" needs a C\+\+ compiler.*no C\+\+ compiler found") as e:
        in_cpp(Options(wrapper="cpp"))
    assert "\n" not in str(e.value)


def test_without_a_compiler_auto_is_python() -> None:
    # an op without kernels, which would need the compiler themselves
    env = os.environ.get("PATH"), os.environ.get("CXX")
    try:
        os.environ["PATH"], os.environ["CXX"] = "/nowhere", "no-such-compiler"
        e = reflib.explain(lambda x: x.sort().values, torch.ones(3), wrapper="auto")
        assert "def call(args)" in e.wrapper
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no-such-compiler"):
            reflib.compile(lambda x: x.sort().values, wrapper="cpp")(torch.ones(3))
    finally:
        for name, value in zip(("PATH", "CXX"), env):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- without the fast ways --------------------------------------------------------------------------
OTHER_WAYS = (
    FALLBACKS
    + """
from tests.cpu.test_cpp_wrapper import explained, affine, X, W
for name in {names!r}:
    with pytest.MonkeyPatch.context() as m:
        run(name, "cpu", "cpp", m, Path(tempfile.mkdtemp()))
assert (host.extension().__name__ == "reflib.wrap.host_ctypes") == {ctypes!r}
call = explained(affine, X, W).stages.call
for args in ([X.double(), W], [X], [X, 2.0]):
    with pytest.raises(Exception, match="argument"):
        call(list(args))
from tests.cpu import test_cpp_wrapper as tests
for f in (tests.test_inputs_are_dropped_as_soon_as_nobody_needs_them, tests.test_an_exception_of_a_custom_op_is_itself,
          tests.test_reference_counts_are_as_before, tests.test_eight_threads_at_once):
    torch._dynamo.reset()
    f()
torch._dynamo.reset()
x = torch.ones(64, 64)
call = explained(lambda x: (x.t(), x.sort().values * 2, x[1]), x).stages.call
assert tests.grows(lambda: call([x]), 3000) < 350
print(type(call.load()).__name__)
"""
)
ROWS = (
    "data_dependent_sizes", "outputs_that_are_no_tensors", "several_outputs_of_a_call", "constants",
    "custom_ops_in_python", "an_index_out_of_range", "misaligned_views", "no_more_memory_than_eager",
)  # fmt: skip


@pytest.mark.parametrize("way", ["layout unknown", "no Python.h"])
def test_other_ways(way: str, root: Path) -> None:
    """Handles made by torch; and no extension at all."""
    out = child(OTHER_WAYS.format(ctypes=way == "no Python.h", names=ROWS), root, PYTHONPATH=str(root))
    assert out.split()[-1] == ("graph" if way == "no Python.h" else "Graph")


def for_a_gpu(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(s, dtype=dtype) for s in shapes]


@pytest.mark.parametrize(
    "fn, args, holds",
    [
        (lambda x: torch.softmax(x, -1) + 1, for_a_gpu((64, 96)), "launch("),
        (lambda a, b: torch.relu(a @ b), for_a_gpu((48, 12288), (12288, 40), dtype=torch.float16), "zeros("),
        (lambda x: torch.sort(x * 2).values, for_a_gpu((64, 8)), "Guard"),
    ],
    ids=["loops", "split-K", "a call"],
)
def test_what_is_printed_for_a_gpu_compiles(fn: Any, args: list[torch.Tensor], holds: str) -> None:
    text = reflib.explain(fn, *args, target="sm_90", wrapper="cpp").wrapper
    assert holds in text
    host.compile_wrapper(text)
