"""The wrapper in C++ from outside: its text, and how it is built, found, and done without."""

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib import toolchain
from reflib.wrap import cpp, host
from tests.composition import FALLBACKS
from tests.cpp_wrapping import W, X, affine, explained
from tests.models import build
from tests.processes import python

Tensor = torch.Tensor


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
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    host.compile_wrapper(source)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 6  # of processor


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


@pytest.mark.slow
def test_another_process_finds_it_in_the_cache(fresh_cache: Path) -> None:
    assert python(CHILD).split()[0] == "1"
    assert python(CHILD).split() == ["0", "0"], "no compiler runs"


def test_without_a_compiler_auto_is_python() -> None:
    # an op without kernels, which would need the compiler themselves
    env = os.environ.get("PATH"), os.environ.get("CXX")
    try:
        os.environ["PATH"], os.environ["CXX"] = "/nowhere", "no-such-compiler"
        e = reflib.explain(lambda x: x.sort().values, torch.ones(3), wrapper="auto")
        assert "def call(args)" in e.wrapper
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"wrapper=\"cpp\" needs a C\+\+ compiler.*no-such-compiler"):
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
from tests.cpp_wrapping import explained, affine, X, W
for name in {names!r}:
    with pytest.MonkeyPatch.context() as m:
        run(name, "cpu", "cpp", m, Path(tempfile.mkdtemp()))
assert host.extension().__name__ == "reflib.wrap.host_ctypes"
call = explained(affine, X, W).stages.call
for args in ([X.double(), W], [X], [X, 2.0]):
    with pytest.raises(Exception, match="argument"):
        call(list(args))
from tests.cpu import test_cpp_wrapper as tests
for f in (tests.test_inputs_are_dropped_as_soon_as_nobody_needs_them, tests.test_an_exception_of_a_custom_op_is_itself,
          tests.test_reference_counts_are_as_before, tests.test_the_first_calls_come_at_once):
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
@pytest.mark.slow
def test_other_ways(way: str) -> None:
    """Without what the extension needs."""
    out = python(OTHER_WAYS.format(ctypes=way == "no Python.h", names=ROWS))
    assert out.split()[-1] == "graph"


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
