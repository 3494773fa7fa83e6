"""Variances and softmax sums take one pass over a row. (On hostile rows, in Triton's interpreter:
test_triton_interpreter and test_triton_programs.)"""

import importlib.util
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_pass_cases import sum_cases, variance_cases
from triton_cases import compile_all

import reflib
from reflib.generate.compile_triton import compile_kernel, sass
from reflib.generate.kernel import Kernel
from reflib.generate.triton_one_pass import online_sums
from reflib.ir.loops import LoopNest, Reduce, Store
from reflib.ir.program import KernelNode, kernel_nodes
from reflib.ir.transforms import phases, varying
from reflib.pipeline import Stages
from reflib.target import parse_target
from tests.checking import check
from tests.semantics import Compiled

R = torch.randn
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@triton
def test_ahead_of_time() -> None:
    random.seed(0)
    cases = {k: v for k, v in {**variance_cases(), **sum_cases()}.items() if "persistent" not in k}
    chosen = random.sample(sorted(cases), 14)
    kernels = [cases[name]().kernel(re.sub(r"\W+", "_", name)) for name in chosen]
    compiled = compile_all(kernels, parse_target("sm_90"))
    assert len(compiled) == len(chosen) and all(b.scratch == 0 for b in compiled.values())


# -- passes -----------------------------------------------------------------------------------------
def stages(fn: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> Stages:
    torch._dynamo.reset()
    compiled = Compiled(fn, dynamic, target="sm_90", **options)
    compiled(*args)
    return compiled.stages[0]


def passes(s: Stages) -> list[tuple[int, int]]:
    """For each loop nest that reduces, in order: how many passes over its rows a looped kernel takes, and how many it
    would take if no sum shared the pass of a maximum."""
    assert s.scheduled is not None
    out = []
    for kernel in kernel_nodes(s.scheduled.nodes):
        for part in kernel.parts if isinstance(kernel, KernelNode) else ():
            if isinstance(part, LoopNest) and part.reduced and not kernel.name.endswith("fallback"):
                body = part.body
                inside, phase = varying(body, part.reduced_vars), phases(body)
                shared = online_sums(body, inside, phase)
                needs = [i for i, b in enumerate(body) if isinstance(b, Reduce) or isinstance(b, Store) and inside[i]]
                out.append((len({phase[i] for i in needs if i not in shared}), len({phase[i] for i in needs})))
    return out


def loads(s: Stages, pointer: str) -> list[int]:
    """How often each kernel's text reads ``pointer``."""
    assert s.kernels is not None
    kernels = [k.source for k in s.kernels.values() if not k.name.endswith("fallback")]
    return [n for text in kernels if (n := len(re.findall(rf"tl\.load\({pointer}\b", text)))]


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    logits = torch.log_softmax(x, -1)
    return -logits.gather(1, torch.zeros(len(x), 1, dtype=torch.int64)).mean()


def _batch_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, torch.zeros(len(w)), torch.ones(len(w)), w, training=True)


ROWS, LENGTH = random.Random(2).randint(300, 400), random.Random(3).randint(300, 600)
# name: (function, arguments, (passes over the rows, the same without a shared pass))
LONG: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], tuple[int, int]]] = {
    "var_mean": (lambda x: torch.var_mean(x, -1), lambda: (R(ROWS, LENGTH),), (1, 1)),
    "layer norm": (lambda x: F.layer_norm(x, (LENGTH,)), lambda: (R(ROWS, LENGTH),), (2, 2)),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (R(ROWS, LENGTH),), (2, 3)),
    "log softmax": (lambda x: torch.log_softmax(x * 2, -1), lambda: (R(ROWS, LENGTH),), (2, 3)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda: (R(ROWS, LENGTH),), (1, 2)),
    "cross entropy": (_cross_entropy, lambda: (R(ROWS, LENGTH),), (1, 2)),
    "entropy": (
        lambda x: ((e := torch.exp(x - x.amax(-1, True))) * x).sum(-1) / e.sum(-1), lambda: (R(ROWS, LENGTH),), (1, 2),
    ),
    "a sum after the maximum": (lambda x: (x - x.amax(-1, True)).abs().sum(-1), lambda: (R(ROWS, LENGTH),), (2, 2)),
}  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_passes(name: str, dynamic: bool) -> None:
    fn, make, want = LONG[name]
    s = stages(fn, *make(), dynamic=dynamic, persistent_limit=16)
    assert passes(s)[0] == want
    most = max(loads(s, r"arg\d_1_ptr"))
    assert most == want[0]


FEW = 1 << 17, 64 * random.Random(6).randint(1, 4)  # columns, whose rows are cut
MANY = 2 * random.Random(7).randint(200, 500) + 1, 64 * random.Random(8).randint(270, 300)


def columns(shape: tuple[int, int], how: str = "var_mean") -> Kernel:
    """The kernel that reads the rows."""
    s = stages(lambda x: getattr(torch, how)(x.float(), 0), torch.empty(shape, dtype=torch.bfloat16))
    assert s.kernels is not None
    return next(k for k in s.kernels.values() if "arg0_1_ptr" in k.source)


def exchanges(source: str) -> int:
    """How often threads exchange what they have."""
    return len(re.findall(r"tl\.(?:sum|reduce)\(", source))


@pytest.mark.parametrize("how", ["var_mean", "var", "std"])
def test_lanes_of_a_variance_exchange_numbers_twice(how: str) -> None:
    for source in (columns(FEW, how).source, columns(MANY, how).source):
        assert "welford" in source and exchanges(source) == 2


def test_the_last_step_of_columns_stands_behind_the_loop() -> None:
    """The loop's loads have no mask."""
    source = columns(MANY).source
    loop, behind = source[source.index("    for r0 in") :].split("\n    r = ")
    assert "tl.load(" in loop and "mask" not in loop
    assert "mask=rmask" in behind.splitlines()[2]


@triton
def test_a_short_loop_over_columns_is_unrolled() -> None:
    """Its loads do not wait for each other, and 1/n are constants. A thread has few columns, and few barriers."""
    text = sass(compile_kernel(columns(FEW), parse_target("sm_90")))
    assert len(re.findall(r"\bLDG\.", text)) >= 8 and "MUFU.RCP" not in text
    assert len(re.findall(r"\bBAR\.", text)) <= 9 and len(re.findall(r"\bSHFL\.", text)) <= 30


@pytest.mark.parametrize("dtype,streams", [(torch.int64, 5), (torch.float32, 6), (torch.bfloat16, 5)])
def test_a_step_over_columns_holds_few_bytes_per_thread(dtype: torch.dtype, streams: int) -> None:
    """Its loads are in registers together. (More elements where the streams are narrow.)"""
    args = [torch.empty(1 << 20, FEW[1], dtype=dtype) for _ in range(streams)]
    s = stages(lambda *xs: sum(xs[1:], xs[0]).sum(0), *args)
    assert s.kernels is not None
    first = next(iter(s.kernels.values()))
    x, r = (int(n) for n in re.findall(r"BLOCK: tl.constexpr = (\d+)", first.source))
    each = x * r // (32 * first.num_warps)
    assert "for r0" in first.source and each * streams * dtype.itemsize <= 256 and each >= 4
    assert each > 4 or dtype != torch.bfloat16


def pixel_norm(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.where(x > 0, x, 0.2 * x) + b[:, None, None]
    return y * (y.square().mean(1, keepdim=True) + 1e-8).rsqrt()


@pytest.mark.parametrize("seed", range(3))
def test_columns_that_no_cache_holds_until_they_are_read_again_stay_in_registers(seed: int) -> None:
    rng = random.Random(seed)
    channels = rng.randint(257, 380)
    for images in (9, 5):
        s = stages(pixel_norm, torch.empty(images, channels, 64, 64), torch.empty(channels))
        assert s.kernels is not None
        looped = "for r0" in next(iter(s.kernels.values())).source
        assert looped == (images * channels * 64 * 64 * 4 < 32 << 20)


@triton
@pytest.mark.parametrize("channels", [128, 256, 512])
def test_a_vector_does_not_lay_columns_out_along_itself(channels: int) -> None:
    s = stages(pixel_norm, torch.empty(16, channels, 64, 64), torch.empty(channels))
    assert s.kernels is not None
    text = sass(compile_kernel(next(iter(s.kernels.values())), parse_target("sm_90")))
    assert len(re.findall(r"\bSHFL\.", text)) <= 30 and "for r0" not in next(iter(s.kernels.values())).source


def test_columns_are_cut_into_equal_pieces() -> None:
    """Where a number of pieces near the wanted one divides the rows: there are no masks, and no weights of elements."""
    rng = random.Random(9)
    for _ in range(3):
        shape = rng.randint(30, 60) * 28 * 28, 64 * rng.randint(1, 4)
        kernel = columns(shape)
        assert "other=" not in kernel.source and "weight3" not in kernel.source, shape
        assert int(kernel.grid.evaluate({})) >= 264, shape


def test_batch_norm_reads_its_input_twice() -> None:
    """Once for the statistics, cut into enough pieces to fill the machine; once to normalise."""
    rng = random.Random(4)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = R(rng.randint(10, 20), 16, rng.randint(90, 99), rng.randint(90, 99)).to(memory_format=layout)
        s = stages(_batch_norm, x, R(16))
        assert s.scheduled is not None and s.kernels is not None
        assert loads(s, "arg1_1_ptr") == [1, 1]
        first = next(iter(s.kernels.values()))
        assert int(first.grid.evaluate({})) >= 264, layout  # two programs for each of 132 multiprocessors


# -- on a CPU ---------------------------------------------------------------------------------------
SHAPES = [(s, d) for r in [random.Random(5)] for s, d in (
    ((r.randint(2, 9), r.randint(100, 2000)), (1,)), ((r.randint(100, 2000), r.randint(2, 40)), (0,)),
    ((r.randint(2, 9), r.randint(2, 9), r.randint(100, 999)), (0, 2)), ((3, 1), (1,)), ((1, 1), (0, 1)), ((3, 0), (1,)),
    ((2, r.randint(33000, 40000)), (1,)),
)]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_variance_on_a_cpu(number: int) -> None:
    shape, dims = SHAPES[number]
    dtype = (torch.float32, torch.float64, torch.float16, torch.bfloat16)[number % 4]

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        kinds = [torch.std(y, dims, correction=c) for c in (0, 1, 2.5)]
        return *torch.var_mean(x, dims), *kinds

    check(fn, reflib.compile(fn, dynamic=False), (R(shape) + 100).to(dtype), 1000 + R(shape))
