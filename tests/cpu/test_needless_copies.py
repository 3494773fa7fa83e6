"""What a call can read where it is, is not copied for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from reflib.ir.loops import LoopNest

torch.manual_seed(3)
X, W = torch.randn(8, 24), torch.randn(24, 8)


def copied_twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(torch.cat([x[:, :5], x[:, 5:]], 1).chunk(4), 0) @ w


def computed(x: Tensor, w: Tensor) -> Any:
    y = x.cumsum(1)
    return torch.cat(y.split(7, 1), 1) @ w, torch.cat(y.split(4, 1)[1:], 1) @ w[4:], y


# what is computed, and how many copies (kernels) there are
NONE: dict[str, Callable[..., Any]] = {
    "two slices": lambda x, w: torch.cat([x[:, :5], x[:, 5:]], 1) @ w,
    "chunks": lambda x, w: torch.cat(x.chunk(5, 1), 1) @ w,
    "rows": lambda x, w: torch.cat(x.split([1, 4, 3], 0), 0) @ w,
    "some slices": lambda x, w: torch.cat(x.split([4, 4, 8, 8], 1)[1:], 1) @ w[4:],
    "unbound": lambda x, w: torch.stack(x.unbind(0), 0) @ w,
    "unbound columns": lambda x, w: torch.stack(x.unbind(1), 1) @ w,
    "one by one": lambda x, w: torch.cat([x[i : i + 1] for i in range(8)], 0) @ w,
    "twice": copied_twice,
    "padded by nothing": lambda x, w: F.pad(x, (0, 0, 0, 0)) @ w,
    "cloned": lambda x, w: x.clone() @ w.clone(),
    "turned": lambda x, w: x.t().contiguous() @ w.t().contiguous(),
    "for a call": lambda x, w: torch.special.i0(x.clone()),
    "computed": computed,
}


@pytest.mark.each
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("case", NONE)
def test_no_copy(case: str, target: str) -> None:
    with torch.no_grad():
        nodes = reflib.explain(NONE[case], X, W, target=target).fused.nodes
        assert not [n for n in nodes if isinstance(n, LoopNest) and "cumsum" not in str(n.origins)], nodes
        if target == "cpu":
            torch.testing.assert_close(reflib.compile(NONE[case], verify=True)(X, W), NONE[case](X, W))


@torch.library.custom_op("needless_test::as_it_lies", mutates_args=())
def as_it_lies(x: Tensor) -> Tensor:
    return torch.tensor(x.stride())


as_it_lies.register_fake(lambda x: x.new_empty(x.dim(), dtype=torch.int64))


@torch.library.custom_op("needless_test::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


def updated_after(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    x.add_(1)
    return y @ w + (x @ w)


def updated_between(x: Tensor, w: Tensor) -> Any:
    y = torch.cat([x[:, :5], x[:, 5:]], 1)
    x[:, 3].zero_()
    return y.topk(3, 1), x.topk(2, 1)


def written_to(x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    bump(y)
    return y @ w, x


def returned(x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    return y, y @ w


NEEDED: dict[str, Callable[..., Any]] = {
    "updated after": updated_after,
    "updated between": updated_between,
    "written to": written_to,
    "returned": returned,
    "other strides": lambda x, w: as_it_lies(x.t().contiguous()),
    "every other": lambda x, w: x[:, ::2].contiguous() @ w[::2],
    "out of order": lambda x, w: torch.cat([x[:, 5:], x[:, :5]], 1) @ w,
    "a gap": lambda x, w: torch.cat([x[:, :5], x[:, 6:]], 1) @ w[1:],
    "twice the same": lambda x, w: torch.cat([x[:, :12], x[:, :12]], 1) @ w,
    "of two": lambda x, w: torch.cat([x[:, :5], (x + 1)[:, 5:]], 1) @ w,
    "rows out of order": lambda x, w: torch.stack([x[0], x[2], x[1]], 0) @ w,
    "expanded": lambda x, w: x[:1].expand(8, 24).contiguous() @ w,
}


@pytest.mark.sample(3)  # (of static sizes are those of test_no_copy)
@pytest.mark.parametrize(
    "case, dynamic", [*((c, True) for c in NONE), *((c, d) for c in NEEDED for d in (False, True))]
)
def test_as_eager(case: str, dynamic: bool) -> None:
    fn = (NONE | NEEDED)[case]
    mine, theirs = [X.clone(), W.clone()], [X.clone(), W.clone()]
    with torch.no_grad():
        torch.testing.assert_close(reflib.compile(fn, verify=True, dynamic=dynamic)(*mine), fn(*theirs))
    torch.testing.assert_close(mine, theirs)


def test_on_a_gpu_what_is_read_is_aligned() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(x.split([3, 5, 16], 1)[1:], 1) @ w[3:]

    def copies(target: str) -> int:
        return sum(isinstance(n, LoopNest) for n in reflib.explain(fn, X, W, target=target).fused.nodes)

    with torch.no_grad():
        assert (copies("cpu"), copies("sm_90")) == (0, 1)


def test_a_bias_that_is_copied() -> None:
    b, x, w = torch.randn(12), torch.randn(5, 4), torch.randn(4, 6)
    fn = lambda b, x, w: torch.addmm(b[::2].clone(), x, w)  # noqa: E731
    torch.testing.assert_close(reflib.compile(fn)(b, x, w), fn(b, x, w))
