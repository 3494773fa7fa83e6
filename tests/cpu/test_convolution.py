"""Convolutions on a GPU: the bias and its gradient are loop nests, the rest is the library's call."""

import random
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.patches import patches
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
    assert biased(x, ints(rng, 8, 1, 3, 3), ints(rng, 8), groups=4)
    assert not biased(x.contiguous(memory_format=torch.channels_last), single, b, groups=4)  # (3 x 3)
    wide = ints(rng, 4, 1, 6, 6).float()
    assert not biased(x.float(), wide, b.float(), groups=4)
    program = program_of(lambda x, w: torch.nn.functional.conv2d(x, w), x, full)
    assert len(program.nodes) == 1


@pytest.mark.parametrize("seed", range(8))
def test_depthwise_windows_are_loops(seed: int) -> None:
    """Of all but channels-last images under squares: a loop nest with eager's results; it fuses with what follows."""
    rng = random.Random(seed)
    dims, c, dtype = rng.choice([1, 2]), rng.randrange(2, 7), rng.choice([HALF, torch.float16, torch.float32])
    x = ints(rng, rng.choice([1, 2]), c, *(rng.randint(7, 12) for _ in range(dims)), dtype=dtype)
    w = ints(rng, c, 1, *(rng.randrange(1, 5) for _ in range(dims)), dtype=dtype)
    how = [[rng.randrange(least, 3) for _ in range(dims)] for least in (1, 0, 1)]
    b = rng.choice([None, ints(rng, c, dtype=dtype)])
    if dims == 2 and seed % 2 and w.shape[2:] != (3, 3) and w[0].numel() * w.element_size() <= 32:
        x = x.contiguous(memory_format=torch.channels_last)
    given = (x, w) if b is None else (x, w, b)

    def fn(*given):
        return aten.convolution(*given[:2], given[2] if b is not None else None, *how, False, [0] * dims, c).relu()

    program = program_of(fn, *given)
    assert not calls(program)
    same(interpret(program, list(given))[0], fn(*given))
    assert not calls(program_of(fn, *given, options=Options(target="sm_90", numerics="eager")))


@pytest.mark.parametrize("seed", range(12))
def test_depthwise_gradients_are_loops(seed: int) -> None:
    """Of sequences in any order, of images but for cuDNN's windows of channels-last ones: all three, of few taps."""
    rng = random.Random(seed)
    dims, c, dtype = rng.choice([1, 1, 2]), rng.randrange(2, 7), rng.choice([HALF, torch.float16, torch.float32])
    sizes = [rng.randint(7, 12) for _ in range(dims)]
    x = ints(rng, 2, c, *sizes, dtype=dtype)
    w = ints(rng, c, 1, *(rng.randrange(1, 5) for _ in range(dims)), dtype=dtype)
    if dims == 1 and rng.random() < 0.7:
        x = x.mT.contiguous().mT
    if dims == 2 and rng.random() < 0.5 and w.shape[2:] != (3, 3) and w[0].numel() * w.element_size() <= 32:
        x = x.contiguous(memory_format=torch.channels_last)
    how = [[1] * dims, *([rng.randrange(least, 3) for _ in range(dims)] for least in (0, 1)), False, [0] * dims, c]
    if seed % 4 == 3:
        how[0] = [2] * dims
    g = ints(rng, *aten.convolution(x, w, None, *how).shape, dtype=dtype)
    mask = [rng.random() < 0.8, True, rng.random() < 0.5]

    def fn(g, x, w):
        return [t.relu() for t in aten.convolution_backward(g, x, w, [c], *how, mask) if t is not None]

    program = program_of(fn, g, x, w)
    assert not calls(program)
    for got, want in zip(interpret(program, [g, x, w]), fn(g.double(), x.double(), w.double())):
        torch.testing.assert_close(got, want.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)


def test_sequences_are_given_as_aten_wants_them() -> None:
    """Contiguous, stored so by the kernel that computes them: ATen would copy them an element at a time."""
    rng = random.Random(3)
    x, w = ints(rng, 2, 9, 6), ints(rng, 4, 6, 3)
    program = program_of(lambda x, w: torch.nn.functional.conv1d((x * 2).mT, w), x, w)
    (call,) = calls(program)
    assert [s.constant for s in call.args[0].strides] == [6 * 9, 9, 1]
    same(interpret(program, [x, w])[0], torch.nn.functional.conv1d((x * 2).mT, w))


def test_a_bias_fuses_with_what_follows() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.GELU(), torch.nn.Conv2d(8, 8, 1)).to(HALF)
    x = torch.ones(2, 4, 8, 8, dtype=HALF).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        e = reflib.explain(net.to(memory_format=torch.channels_last), x, target="sm_90")
    assert len({k.name.removesuffix("_fallback") for k in e.kernels}) == 2


@pytest.mark.parametrize("seed", range(8))
def test_patches_are_products(seed: int) -> None:
    """Windows side by side, of few channels: forward and all three gradients, with eager's strides."""
    rng = random.Random(seed)
    kernel = [rng.choice([1, 2, 4]) for _ in range(rng.choice([1, 2, 2, 3]))]
    kernel[0] = max(2, kernel[0])
    c, o, dtype = rng.choice([1, 3, 5]), rng.choice([2, 4, 7]), rng.choice([HALF, torch.float16])
    x = ints(rng, rng.choice([1, 2]), c, *(k * rng.randint(1, 3) for k in kernel), dtype=dtype)
    if len(kernel) == 2 and rng.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    w, bias = ints(rng, o, c, *kernel, dtype=dtype), ints(rng, o, dtype=dtype)
    how = kernel, [0] * len(kernel), [1] * len(kernel), False, [0] * len(kernel), 1
    out = aten.convolution(x, w, bias, *how)

    def both(grad: torch.Tensor, *t: torch.Tensor) -> tuple:
        mask = [rng.random() < 0.7, True, True]
        return aten.convolution(*t, *how), *aten.convolution_backward(grad, *t[:2], [o], *how, mask)

    args = ints(rng, *out.shape, dtype=dtype), x, w, bias
    module = make_fx(both, tracing_mode="fake")(*args)
    made = patches(module, Options(), True)
    assert not [n for n in made.graph.nodes if "convolution" in str(n.target)]
    for got, want in zip(made(*args), module(*args), strict=True):
        same(got, want)


def test_other_convolutions_stay() -> None:
    """Many channels (cuDNN's own), windows that overlap or leave something out, and float32."""
    x, w = torch.zeros(2, 3, 8, 8, dtype=HALF), torch.zeros(4, 3, 4, 4, dtype=HALF)

    def left(x: torch.Tensor, w: torch.Tensor, stride: int = 4, padding: int = 0, **options: Any) -> bool:
        conv = lambda x, w: aten.convolution(x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)  # noqa: E731
        module = make_fx(conv, tracing_mode="fake")(x, w)
        return patches(module, Options(**options), True) is module

    assert not left(x, w) and left(x, w, 2) and left(x, w, 4, 2) and left(x[..., :7], w)
    assert left(x.float(), w.float()) and not left(x, w, numerics="eager")
    assert left(x[:, :1].expand(-1, 8, -1, -1), w[:, :1].expand(-1, 8, -1, -1))
