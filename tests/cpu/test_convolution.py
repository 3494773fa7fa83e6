"""Convolutions on a GPU: the bias and its gradient are loop nests, the rest is the library's call."""

import random

import pytest
import torch

import reflib
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.ir.program import Extern, Program
from reflib.options import Options
from tests.choices import GPU, program_of

aten = torch.ops.aten
HALF = torch.bfloat16


def calls(program: Program) -> list[Extern]:
    return [n for n in program.nodes if isinstance(n, Extern)]


def ints(rng: random.Random, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Small integers, so that no order of summation rounds."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).to(dtype)


def drawn(rng: random.Random, dtype: torch.dtype) -> tuple:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups), any but depthwise."""
    dims, groups, transposed = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.random() < 0.3
    c, o = groups * rng.choice([2, 3]), groups * rng.choice([1, 2, 3])
    kernel = [rng.choice([1, 2, 3]) for _ in range(dims)]
    x = ints(rng, rng.choice([1, 2]), c, *(rng.randint(4, 7) for _ in range(dims)), dtype=dtype)
    w = ints(rng, *((c, o // groups) if transposed else (o, c // groups)), *kernel, dtype=dtype)
    if dims == 2 and rng.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    stride, padding = [rng.choice([1, 2])] * dims, [rng.choice([0, 1])] * dims
    return x, w, ints(rng, o, dtype=dtype), stride, padding, [1] * dims, transposed, [0] * dims, groups


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if got is not None or want is not None:
        assert got is not None and want is not None
        assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_forward(seed: int) -> None:
    rng = random.Random(seed)
    args = drawn(rng, rng.choice([HALF, torch.float16, torch.float32]))
    program = program_of(lambda *t: aten.convolution(*t, *args[3:]), *args[:3])
    (call,) = calls(program)
    assert call.args[2] is None
    (got,) = interpret(program, list(args[:3]))
    same(got, aten.convolution(*args))


@pytest.mark.parametrize("seed", range(8))
def test_backward(seed: int) -> None:
    rng = random.Random(seed)
    x, w, b, *how = drawn(rng, rng.choice([HALF, torch.float32]))
    grad = ints(rng, *aten.convolution(x, w, b, *how).shape, dtype=x.dtype)
    mask = rng.choice([[True] * 3, [False, True, True], [True, False, True], [False, False, True]])

    def fn(grad, x, w):
        return aten.convolution_backward(grad, x, w, list(b.shape), *how, mask)

    program = program_of(fn, grad, x, w)
    assert [list(c.args[-1]) for c in calls(program)] == ([[*mask[:2], False]] if any(mask[:2]) else [])
    for got, want, wanted in zip(interpret(program, [grad, x, w]), fn(grad, x, w), mask, strict=True):
        same(got, want if wanted else None)


def test_calls_that_stay() -> None:
    """Without a bias, on a CPU (whose libraries add it as they store), or where a kernel adds it before it rounds."""
    rng = random.Random(1)
    x, b = ints(rng, 2, 4, 6, 6), ints(rng, 4)
    full, single = ints(rng, 4, 4, 3, 3), ints(rng, 4, 1, 3, 3)

    def biased(x, w, b, options=GPU, groups=1):
        fn = lambda x, w, b: torch.nn.functional.conv2d(x, w, b, groups=groups)  # noqa: E731
        program = program_of(fn, x, w, b, options=options)
        (call,) = calls(program)
        assert (call.args[2] is None) == any(isinstance(n, LoopNest) for n in program.nodes)
        return call.args[2] is not None

    assert not biased(x, full, b)
    assert biased(x, full, b, options=Options(target="cpu"))
    assert biased(x, single, b, groups=4)
    assert not biased(x.contiguous(memory_format=torch.channels_last), single, b, groups=4)
    assert not biased(x.float(), single.float(), b.float(), groups=4)
    program = program_of(lambda x, w: torch.nn.functional.conv2d(x, w), x, full)
    assert len(program.nodes) == 1


def test_a_bias_fuses_with_what_follows() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.GELU(), torch.nn.Conv2d(8, 8, 1)).to(HALF)
    x = torch.ones(2, 4, 8, 8, dtype=HALF).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        e = reflib.explain(net.to(memory_format=torch.channels_last), x, target="sm_90")
    assert len({k.name.removesuffix("_fallback") for k in e.kernels}) == 2
