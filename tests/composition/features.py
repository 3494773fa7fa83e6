"""Rows of the composition table: sizes, results, calls, errors, memory, modes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import map as each
from torch._higher_order_ops import scan, while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import reflib
from reflib.errors import CaptureError
from tests.checking import check
from tests.composition.ops import SHIMS, calls_of_c, op_in_c
from tests.composition.table import IN_A_FILE, Tensor, compiled, compiled_program, count, feature, is_in, same, texts
from tests.cpp_wrapping import python_op
from tests.models import peak
from tests.semantics import randn


# -- sizes ------------------------------------------------------------------------------------------
@feature
def dynamic_shapes(device: str, wrapper: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        return F.gelu(x @ w).sum(-1), torch.softmax(x, 0), torch.cat([x, x[:, :3]], 1).view(-1), x.shape[0] // 3

    c = compiled(f, wrapper, dynamic=True)
    for n in (5, 6, 31, 64):
        check(f, c, randn(n, 8, device=device), randn(8, 10, device=device))
    assert len(c.stages) == 1 and is_in(wrapper, texts(c)[0])
    for n in (0, 1):  # Dynamo makes graphs of their own; torch.export has one (and see below)
        args = randn(n, 8, device=device), randn(8, 10, device=device)
        if wrapper in IN_A_FILE:
            with pytest.raises(reflib.ReflibError, match=f"size {n} in dimension .*for 2 or more|exported where 2 <= "):
                c(*args)
        else:
            check(f, c, *args)


@feature
def sizes_of_zero_and_one_in_one_graph(device: str, wrapper: str) -> None:
    program = torch.export.export(
        Affine().to(device), (randn(5, 6, device=device),), dynamic_shapes=({0: torch.export.Dim("n", min=0)},)
    )
    f, model = compiled_program(program, wrapper), program.module()
    for n in (5, 0, 1, 33):
        x = randn(n, 6, device=device)
        torch.testing.assert_close(f(x), model(x))


@feature
def floors_and_remainders_of_sizes(device: str, wrapper: str) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        n, m = x.shape[0], y.shape[0]
        k = (m - n) // 3  # below zero
        return x.new_full((n // 2 + 1, n % 3 + 1), k), k, (n - m) % 4, max(n, m), min(n, m)

    c = compiled(f, wrapper, dynamic=True)
    # (3: torch.export takes no size for granted that it did not see, and a row of results is one there)
    for n, m in ((7, 3), (4 if wrapper in IN_A_FILE else 3, 7), (11, 3), (5, 12)):
        check(f, c, randn(n, device=device), randn(m, device=device))


@feature
def data_dependent_sizes(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Any:
        i = x.nonzero()
        return x[x > 0] * 2 + 1, i + 1, i.shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        c = compiled(f, wrapper, dynamic=wrapper in IN_A_FILE or None)
        for n in (10, 20):
            check(f, c, randn(n, device=device).relu())
        check(f, c, -randn(20, device=device).abs())


@feature
def an_item_is_a_size(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Tensor:
        n = x.max().int().item()
        torch._check(n >= 0)
        torch._check(n < 100)
        return torch.zeros(n, device=x.device) + x.sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        c = compiled(f, wrapper)
        for m in (3, 5):
            check(f, c, torch.tensor([1.0, float(m)], device=device))


# -- what is returned, what is written --------------------------------------------------------------
@feature
def training(device: str, wrapper: str) -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x @ w + b), (24,)).mean(0)

    args = [randn(*s, device=device, grad=True) for s in ((9, 16), (16, 24), (24,))]
    if wrapper in IN_A_FILE:  # torch.export captures a forward alone, so gradients are results of what is exported

        def step(*args: Tensor) -> Any:
            grads, loss = torch.func.grad_and_value(lambda *a: f(*a).square().sum(), (0, 1, 2))(*args)
            return loss, *grads

        with pytest.raises(CaptureError, match="make_fx"):
            compiled(step, wrapper)(*args)
        plain = [a.detach() for a in args]
        for mode in ("real", "symbolic"):
            c = compiled(make_fx(step, tracing_mode=mode)(*plain), wrapper, dynamic=mode == "symbolic")
            check(step, c, *plain, times=2)
            assert all(is_in(wrapper, text) for text in texts(c))
        check(step, c, randn(5, 16, device=device), *plain[1:])
        _without_gradients(device, wrapper)
        return
    for dynamic in (False, True):
        torch._dynamo.reset()
        assert len(same(f, wrapper, *args, backward=True, dynamic=dynamic).stages) == 2


def _without_gradients(device: str, wrapper: str) -> None:
    """Of a file, weights and arguments that require grad: the results do not."""
    model = Affine().to(device)
    f, x = compiled(model, wrapper), randn(5, 6, device=device, grad=True)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            got = f(x)
        assert not got.requires_grad
        torch.testing.assert_close(got, model(x).detach())
    assert torch.is_grad_enabled()


@feature
def a_mutated_input(device: str, wrapper: str) -> None:
    x, y = randn(5, 7, device=device), randn(7, device=device)
    same(lambda x: x.add_(1), wrapper, x)
    same(lambda x, y: (x.add_(1), None)[1], wrapper, x, y)
    same(lambda x, y: (x.mul_(2).add_(y), x.sum(0))[1], wrapper, x, y)
    same(lambda x: (x[1:, ::2].add_(10), x.t()[0].zero_(), x * 1)[2], wrapper, x)


@feature
def aliased_outputs(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        return x, x.t(), x[1:], y, y, y.view(-1), y[0], x.unfold(0, 2, 1)

    same(f, wrapper, randn(4, 6, device=device))
    same(f, wrapper, randn(4, 6, device=device), dynamic=True)
    same(f, wrapper, randn(4, 6, device=device, grad=True), backward=True)


@feature
def outputs_that_are_no_tensors(device: str, wrapper: str) -> None:
    def f(x: Tensor, k: int) -> Any:
        return {"n": x.shape[0], "none": None, "y": x + k, "k": k, "true": True, "text": "t", "f": 0.5, "m": x.dim()}

    c = compiled(f, wrapper, dynamic=True)
    for n, k in ((4, 3), (9, 5)):
        check(f, c, randn(n, 3, device=device), k)
    g = lambda x, k: (x + k, 0.5, x.shape[0] ** 2 - k // 2, min(x.shape[0], k) % 5, 'é"\\?')  # noqa: E731
    c = compiled(g, wrapper, dynamic=True)
    for n, k in ((7, 4), (9, 50), (2, 2**30)):
        check(g, c, randn(n, 3, device=device), k)
    # and from the graph itself, as torch.export leaves them
    program = torch.export.export(Numbers(), (randn(3, device=device),))
    got = compiled_program(program, wrapper)(randn(3, device=device))
    assert got[1:] == (None, 3, 7)


@feature
def several_outputs_of_a_call(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Any:
        values, indices = x.sort(1)
        top = (x * 2).topk(3, 1)
        return values + 1, indices, top.values * 2, top.indices, x.cummax(0).values

    for dynamic in (False, True):
        same(f, wrapper, randn(6, 9, device=device), dynamic=dynamic)


@feature
def constants(device: str, wrapper: str) -> None:
    table = torch.arange(5.0, device=device)
    f = lambda x: x * table + torch.tensor([1.0, 2, 3, 4, 5], device=x.device)  # noqa: E731
    c = same(f, wrapper, randn(3, 5, device=device))
    c(torch.zeros(3, 5, device=device)).fill_(-1)
    assert table.tolist() == [0, 1, 2, 3, 4]


@feature
def half_and_complex(device: str, wrapper: str) -> None:
    x = randn(6, 16, device=device)
    same(lambda x: ((x.bfloat16() * 3).float().exp().half() * 2).softmax(0), wrapper, x)
    same(lambda x: (torch.fft.rfft(x), torch.view_as_real(torch.fft.rfft(x)).sum(-1)), wrapper, x)
    same(lambda z: (z, (z * z.conj()).real + 1, z.abs()), wrapper, torch.fft.rfft(x))
    same(lambda x: (x.int() + 1, x > 0, x.double(), (x * 9).to(torch.uint8)), wrapper, x.abs())


# -- calls ------------------------------------------------------------------------------------------
@feature
def custom_ops_in_python(device: str, wrapper: str) -> None:
    @torch.library.custom_op(f"composition::scale{next(count)}", mutates_args=())
    def scale(x: Tensor, by: float, names: list[int] | None = None) -> Tensor:
        return x * by

    @torch.library.custom_op(f"composition::bump{next(count)}", mutates_args={"x"})
    def bump(x: Tensor, by: float) -> None:
        x.add_(by)

    scale.register_fake(lambda x, by, names=None: torch.empty_like(x))

    def f(x: Tensor) -> Tensor:
        y = scale(x + 1, float("inf"), [1, 2]).clamp(max=7)
        bump(y, 1.0)
        bump(x, 5.0)
        return y + x

    for dynamic in (False, True):
        same(f, wrapper, randn(5, device=device), dynamic=dynamic)


@feature
def custom_ops_in_c(device: str, wrapper: str) -> None:
    """An op with a function in C that is declared: C++ calls it past the dispatcher, Python calls the op."""
    op = op_in_c()
    for dynamic in (False, True):
        before = calls_of_c()
        same(lambda x: op(x + 1) * 2, wrapper, randn(4, 5, device=device), dynamic=dynamic, c_shims=SHIMS)
        assert calls_of_c() == before + (0 if wrapper == "python" else 2)


@feature
def higher_order_ops(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.cond(x.sum() > i, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))

        y = while_loop(lambda i, x: i < 3, body, (x.new_zeros((), dtype=torch.int64), x))[1]
        z = each(lambda a, b: (a * b).relu(), y, x.sum(0))
        return scan(lambda c, v: (c + v, c * v), torch.zeros_like(x[0]), z)[1]

    c = compiled(f, wrapper, dynamic=True)
    for sign in (1, -1):
        check(f, c, randn(5, 3, device=device).abs() * sign)
    assert is_in(wrapper, texts(c)[0]) and not [e for e in c.externs if "higher_order" in str(e.target)]


@feature
def branches_of_other_sizes(device: str, wrapper: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        more = lambda x: (torch.cat([x, x]) + 1, x.sum(0)[:1])  # noqa: E731
        y, z = torch.cond(x.sum() > 0, lambda x: (x[1:, :2].sin(), x.sum(0)), more, (x,))
        return torch.relu(y @ w[: y.shape[1]]), y.sum(0) + 1, z * 2, y.shape[0]

    def plainly(x: Tensor, w: Tensor) -> Any:
        y, z = (x[1:, :2].sin(), x.sum(0)) if x.sum() > 0 else (torch.cat([x, x]) + 1, x.sum(0)[:1])
        return torch.relu(y @ w[: y.shape[1]]), y.sum(0) + 1, z * 2, y.shape[0]

    c, w = compiled(f, wrapper), randn(3, 4, device=device)
    for sign in (1, -1, 1):
        check(plainly, c, randn(5, 3, device=device).abs() * sign, w)
    assert is_in(wrapper, texts(c)[0]) and not [e for e in c.externs if "higher_order" in str(e.target)]


@feature
def random_numbers(device: str, wrapper: str) -> None:
    f = lambda x: F.dropout(x, 0.4) + torch.rand_like(x)  # noqa: E731
    check(f, compiled(f, wrapper, fallback_random=True), randn(6, 7, device=device), reference=False, times=2)
    own = compiled(f, wrapper, fallback_random=False)
    x = randn(6, 7, device=device)
    torch.manual_seed(3)
    first, second = own(x), own(x)
    torch.manual_seed(3)
    assert torch.equal(own(x), first) and not torch.equal(second, first)


@feature
def attention(device: str, wrapper: str) -> None:
    q, k, v = (randn(2, 3, 16, 8, device=device, grad=True) for _ in range(3))
    c = same(lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=True).relu(), wrapper, q, k, v,
             backward=True)  # fmt: skip
    calls = [str(e.target) for e in c.externs]
    assert len(calls) == len(c.stages) and all("attention" in name for name in calls), "one call in each direction"


# -- errors -----------------------------------------------------------------------------------------
@feature
def scores_and_masks_of_the_user(device: str, wrapper: str) -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, device=device)

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        score = lambda s, b, h, i, j: torch.tanh(s / 20) * 20 + bias[i - j + 70]  # noqa: E731
        return torch.relu(flex_attention(q, k, v, score, mask))

    q, k, v = (randn(2, 3, 70, 16, device=device) for _ in range(3))
    check(f, compiled(f, wrapper), q, k, v, randn(141, device=device), times=2)


@feature
def an_index_out_of_range(device: str, wrapper: str) -> None:
    f = lambda x, i: x[i] * 2  # noqa: E731
    c = compiled(f, wrapper)
    x = randn(4, 3, device=device)
    check(f, c, x, torch.tensor([0, 3, 1], device=device))
    if device == "cpu":  # on a GPU the assertion ends the context
        for bad in (4, -5, 10**9):
            with pytest.raises(IndexError, match=r"in kernel \w+, aten\.index\S* at .*: an index is outside"):
                c(x, torch.tensor([0, bad, 1]))
    check(f, c, x, torch.tensor([0, 3, -1], device=device))


@feature
def check_nan(device: str, wrapper: str) -> None:
    c = compiled(lambda x: x.log() + 1, wrapper, check_nan=True)
    c(torch.ones(4, device=device))
    with pytest.raises(reflib.ReflibError, match=r"check_nan: kernel \w*log\w* wrote NaN into \w+ \(4,\)"):
        c(-torch.ones(4, device=device))


# -- memory -----------------------------------------------------------------------------------------
@feature
def misaligned_views(device: str, wrapper: str) -> None:
    f = lambda x: (x * 2, x.sum(-1))  # noqa: E731
    c = compiled(f, wrapper)
    x = randn(64, 64, device=device)
    check(f, c, x)
    shifted = torch.empty(64 * 64 + 1, device=device)[1:].view(64, 64).copy_(x)
    check(f, c, shifted)
    check(f, c, x)
    assert len(c.stages) == 1


@feature
def reuse_of_buffers(device: str, wrapper: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(x @ w).sort(1).values.t().contiguous() * 0.1
        return x

    for options in ({}, {"inplace_buffers": False}, {"reuse_buffers": False, "inplace_buffers": False}):
        torch._dynamo.reset()
        same(f, wrapper, randn(16, 16, device=device), randn(16, 16, device=device), **options)


@feature
def no_more_memory_than_eager(device: str, wrapper: str) -> None:
    """Of temporaries, at once: those that died are given back."""

    def f(x: Tensor) -> Tensor:
        y = x.requires_grad_(False)
        for _ in range(6):
            y = torch.sort(y.sin(), 0).values
        return y

    c = compiled(f, wrapper)
    x = randn(256, 256, device=device)
    c(x)

    def g(x: Tensor, fn: Callable[..., Any]) -> Tensor:
        with torch.no_grad():
            y = fn(x.detach())
        return y.sum() * x.sum()  # something to differentiate, as what measures wants it

    x.requires_grad_()
    ours, theirs = (peak(device, lambda x, fn=fn: g(x, fn), (x,)) for fn in (c, f))
    assert ours <= theirs * 1.02 + 8192, f"{ours} bytes, eager {theirs}"


@feature
def combined_kernels(device: str, wrapper: str) -> None:
    f = lambda *xs: [x * 2 + 1 for x in xs]  # noqa: E731
    xs = [randn(n, device=device) for n in (3, 50, 700, 8)]
    for combine in (True, False):
        torch._dynamo.reset()
        same(f, wrapper, *xs, combine_kernels=combine)


@feature
def more_inputs_and_outputs_than_fit_on_the_stack(device: str, wrapper: str) -> None:
    xs = [randn(3, device=device) + i for i in range(150)]
    same(lambda *xs: [x + 1 for x in xs] + [sum(xs)], wrapper, *xs)
    same(lambda *xs: sum(xs), wrapper, *xs[:70])
    same(lambda x: [x + i for i in range(70)], wrapper, xs[0])


@feature
def threads(device: str, wrapper: str) -> None:
    op = python_op(lambda x: x * 2) if wrapper != "exported" else lambda x: x * 2

    def f(x: Tensor) -> Tensor:
        return torch.softmax(op(x), -1).sort(1).values @ x.t()

    c = compiled(f, wrapper)
    xs = [randn(16, 16, device=device) * i for i in range(1, 7)]
    c(xs[0])

    def work(x: Tensor) -> None:
        for _ in range(20):
            torch.testing.assert_close(c(x), f(x))

    with ThreadPoolExecutor(len(xs)) as pool:
        list(pool.map(work, xs))


# -- entry points, modes ----------------------------------------------------------------------------
class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) + self.shift


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, None, x.shape[0], 7


@feature
def exported_programs(device: str, wrapper: str) -> None:
    model = Affine().to(device)
    program = torch.export.export(
        model, (randn(5, 6, device=device),), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},)
    )
    f = compiled_program(program, wrapper)
    for n in (5, 9, 2):
        x = randn(n, 6, device=device)
        torch.testing.assert_close(f(x), model(x).detach())
    with pytest.raises(reflib.ReflibError):
        f(randn(65, 6, device=device))


@feature
def grad_modes(device: str, wrapper: str) -> None:
    model = Affine().to(device)
    c = compiled(model, wrapper)
    x = randn(5, 6, device=device)
    trains = wrapper not in IN_A_FILE
    for mode, grad in ((torch.no_grad(), False), (torch.inference_mode(), False), (nullcontext(), trains)):
        with mode:
            got = c(x)
            torch.testing.assert_close(got, model(x) if grad else model(x).detach())
        assert got.requires_grad == grad and got.is_inference() == isinstance(mode, torch.inference_mode)


@feature
def autocast(device: str, wrapper: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return F.relu(x @ w).softmax(-1)

    same(f, wrapper, randn(8, 16, device=device, grad=True), randn(16, 4, device=device, grad=True), backward=True)


@feature
def graph_breaks(device: str, wrapper: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.relu() + 1
        torch._dynamo.graph_break()
        return y.cos() if y.sum() > 0 else y.sin()

    assert len(same(f, wrapper, randn(5, device=device)).stages) == 3
