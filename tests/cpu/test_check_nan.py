"""check_nan: what wrote the first NaN or infinity, where, and whether it was there before."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import reflib
from reflib.lower.rules import RULES
from reflib.observe.differences import compare_with_eager
from tests.models import Block


class Inner(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.log() + 1).sin() @ w


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.inner(x, w) * 2


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_the_first_bad_step_is_named(wrapper: str) -> None:
    f = reflib.compile(Outer(), wrapper=wrapper, check_nan=True)
    x, w = torch.rand(3, 4) + 0.5, torch.rand(4, 4)
    torch.testing.assert_close(f(x, w), Outer()(x, w))
    x[1, 2] = -1
    with pytest.raises(reflib.ReflibError) as e:
        f(x, w)
    said = str(e.value)
    assert "check_nan: kernel k0_log_add_sin wrote NaN into sin (3, 4), first at [1, 2]" in said, said
    assert "what it only reads has no NaN" in said and "sin: computed in L['self'].inner" in said, said
    assert "aten.log.default, aten.add.Tensor, aten.sin.default at test_check_nan.py:16 in forward: return (x" in said
    x[1, 2], x[0, 1] = 1, float("nan")
    with pytest.raises(
        reflib.ReflibError, match=r"it was there before: arg0_1, which this reads, has NaN first at \[0, 1\]"
    ):
        f(x, w)
    with pytest.raises(
        reflib.ReflibError, match=r"call aten.mm.default wrote infinity into mm \(3, 4\), first at \[0, 0\]"
    ):
        f(torch.rand(3, 4) + 0.5, torch.full((4, 4), 3e38))
    x[0, 1] = 0  # sin(-inf)
    with pytest.raises(reflib.ReflibError, match=r"wrote NaN into sin \(3, 4\), first at \[0, 1\]"):
        f(x, w)


def test_complex_values_and_floats_of_8_bits_are_looked_at_too() -> None:
    eighth = reflib.compile(lambda x: x.to(torch.float8_e4m3fn), check_nan=True)
    eighth(torch.ones(2, 3))
    with pytest.raises(reflib.ReflibError, match=r"wrote NaN into .*, first at \[1, 0\]\n  it was there before"):
        eighth(torch.tensor([[1.0, 2, 3], [float("nan"), 1, 1]]))
    torch._dynamo.reset()
    turned = reflib.compile(lambda x: torch.fft.fft(x) / 2, check_nan=True)
    turned(torch.randn(4))
    with pytest.raises(reflib.ReflibError, match=r"check_nan: call aten\._fft.* wrote (NaN|infinity) into"):
        turned(torch.tensor([1e38, 3e38, 3e38, 3e38]))


def test_infinities_that_are_meant_are_let_pass() -> None:
    masked = reflib.compile(
        lambda x: torch.softmax(x.tril() + torch.full((4, 4), float("-inf")).triu(1), -1), check_nan=True
    )
    masked(torch.randn(4, 4))
    torch._dynamo.reset()
    passed = reflib.compile(lambda x: x * 2, check_nan=True)
    passed(torch.tensor([1.0, float("inf")]))
    with pytest.raises(reflib.ReflibError, match=r"wrote infinity into mul \(2,\), first at \[1\]"):
        passed(torch.tensor([1.0, 3e38]))
    torch._dynamo.reset()
    x = torch.tensor([0.0, 2.0], requires_grad=True)
    y = reflib.compile(lambda x: x.sqrt(), check_nan=True)(x).sum()
    with pytest.raises(reflib.ReflibError, match=r"(?s)wrote infinity into .*first at \[0\].*sqrt"):
        y.backward()


def test_what_was_read_is_not_written_over() -> None:
    """Neither what dies in a kernel, nor what a loop carries."""

    def loop(x: torch.Tensor) -> torch.Tensor:
        return scan(lambda c, v: (c / (v - v), c + 1), x[0].clone(), x)[0]

    for f, says in (
        (lambda x: ((x @ x) - 5).log() @ x, "wrote NaN into log .*\n  what it only reads has no NaN"),
        (lambda x: ((x @ x) / (x * 0)).relu() @ x, "wrote infinity into relu"),
        (loop, "wrote infinity into scan_0_next"),
    ):
        torch._dynamo.reset()
        with pytest.raises(reflib.ReflibError, match=says):
            reflib.compile(f, check_nan=True)(torch.rand(4, 4) + 0.1)


# -- beside eager ------------------------------------------------------------------------------------
def test_the_first_kernel_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(8, 2)
    found = compare_with_eager(block, torch.randn(2, 5, 8, requires_grad=True))
    assert found.first is None and {d.graph for d in found} == {"forward", "backward"}
    assert len(found) > 10 and all(d.error < 1e-4 for d in found)
    monkeypatch.setitem(RULES, torch.ops.aten.tanh.default, RULES[torch.ops.aten.sin.default])
    f = lambda x, w: torch.softmax((x @ w).tanh() @ w, -1)  # noqa: E731
    found = compare_with_eager(f, torch.randn(4, 4), torch.randn(4, 4))
    first = found.first
    assert first is not None and first.buffer == "tanh" and first.error > 0.1 and "f = lambda x, w" in first.origin
    assert [d.buffer for d in found if not d.wrong] == ["mm"] and "first: k0_tanh, aten.tanh.default at" in repr(found)


def test_eager_gets_arguments_laid_out_as_given() -> None:
    with torch.library._scoped_library("tests_laid_out", "DEF") as lib:
        lib.define("inner(Tensor x) -> Tensor")

        def inner(x: torch.Tensor) -> torch.Tensor:
            assert x.is_meta or x.stride() == (8, 1), "refused, as attention refuses a bias without its padding"
            return x * 2

        lib.impl("inner", inner, "CompositeExplicitAutograd")
        lib.impl("inner", torch.empty_like, "Meta")
        found = compare_with_eager(lambda x: torch.ops.tests_laid_out.inner(x) + 1, torch.randn(4, 8)[:, :7])
    assert found.first is None and len(found) == 2
