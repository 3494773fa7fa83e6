"""Branches and bodies of loops update in place what they are given, or ``explain`` says why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop

import reflib
from reflib.fuse.in_place import Updated
from reflib.ir.program import walk

torch.manual_seed(5)
X, V, YES = torch.randn(24, 8), torch.randn(8), torch.tensor(True)


def row(x: Tensor, v: Tensor) -> Tensor:
    y = x.clone()
    y[3] = v
    return y


def rows(x: Tensor, v: Tensor) -> Tensor:
    return x.index_copy(0, torch.tensor([5, 1]), torch.stack([v, x[3]]))


def same(x: Tensor, v: Tensor) -> Tensor:
    return x.clone()


def cache(x: Tensor, v: Tensor, p: Tensor) -> Tensor:
    x.copy_(torch.cond(p, row, rows, (x, v)))
    return x.sum(0)


def perhaps(x: Tensor, v: Tensor, p: Tensor) -> Tensor:
    x.copy_(torch.cond(p, row, same, (x, v)))
    return x.sum(0)


def temporary(x: Tensor, v: Tensor, p: Tensor) -> Tensor:
    return torch.cond(p, rows, same, (x * 2, v))


def two(x: Tensor, v: Tensor, p: Tensor) -> Any:
    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return row(a, b[0]), row(b, a[0])

    def one(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.clone(), row(b, a[0] + 1)

    return torch.cond(p, both, one, (x.exp(), x + v))


def looped(x: Tensor, v: Tensor, p: Tensor) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y.clone()
        z[2] = z[1] + i
        return i + 1, z

    _, y = while_loop(lambda i, y: i < 5, body, (torch.tensor(0), x))
    x.copy_(y)
    return x.sum(0)


def scanned(x: Tensor, v: Tensor, p: Tensor) -> Any:
    def step(y: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = y.sum()
        return y.slice_scatter(y[1:2] + r, 0, 4, 5), total

    return scan(step, x * 2, x[:6])


def nested(x: Tensor, v: Tensor, p: Tensor) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(i > 2, row, same, (y, v + i))

    return while_loop(lambda i, y: i < 5, body, (torch.tensor(0), x + 1))[1]


IN_PLACE = {f.__name__: f for f in (cache, perhaps, temporary, two, looped, scanned, nested)}


def as_eager(fn: Callable[..., Any], **options: Any) -> None:
    compiled = reflib.compile(fn, **options)
    for p in (True, False):
        mine, theirs = ([X.clone(), V.clone(), torch.tensor(p)] for _ in range(2))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*mine), fn(*theirs))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    with torch.no_grad():
        e = reflib.explain(IN_PLACE[name], X, V, YES, target="cpu")
    updates = [u for u in e.updates if isinstance(u, Updated)]
    assert updates and not [str(u) for u in updates if u.why]
    large = {b for n in walk(e.scheduled.nodes) for b in n.writes() if e.scheduled.buffers[b].nbytes.hint() >= 768}
    assert len(large) == (2 if name == "two" else 1), "one tensor, and no copy of it"
    as_eager(IN_PLACE[name], verify=True)


def test_in_cpp() -> None:
    def fn(x: Tensor, v: Tensor, p: Tensor) -> Any:
        return [f(x, v, p) for f in (perhaps, two, looped, scanned, nested)]

    as_eager(fn, wrapper="cpp")
    as_eager(fn, dynamic=True)


def needed(x: Tensor, v: Tensor, p: Tensor) -> Any:
    return torch.cond(p, row, same, (x, v)), x + 1


def needed_later(x: Tensor, v: Tensor, p: Tensor) -> Any:
    y = x * 2
    z = torch.cond(p, row, same, (y, v))
    return z @ z.t(), y


def reads_older(x: Tensor, v: Tensor, p: Tensor) -> Any:
    def older(x: Tensor, v: Tensor) -> Tensor:
        y = row(x, v)
        y[4] = x[3] + y.sum(0)
        return y

    x.copy_(torch.cond(p, older, same, (x, v)))
    return x.sum(0)


def elementwise(x: Tensor, v: Tensor, p: Tensor) -> Any:
    x.copy_(torch.cond(p, lambda x, v: x + v, same, (x, v)))
    return x.sum(0)


@pytest.mark.parametrize(
    "fn, told", [(needed, ""), (needed_later, "needed_later"), (reads_older, "test_branch_updates.py")]
)
def test_copied(fn: Callable[..., Any], told: str) -> None:
    """With the user's line, where it is an update."""
    with torch.no_grad():
        e = reflib.explain(fn, X, V, YES, target="cpu")
    refused = [u for u in e.updates if isinstance(u, Updated) and u.why]
    assert not told or any(told in u.source and u.copied == 768 for u in refused), [str(u) for u in e.updates]
    as_eager(fn, verify=True)


def test_elementwise_branches() -> None:
    as_eager(elementwise, verify=True)


@pytest.mark.parametrize("turn", [lambda x: x.mT, lambda x: x[:, ::2, ::2]], ids=["transposed", "strided"])
def test_slices_that_lie_elsewise(turn: Callable[[Tensor], Tensor]) -> None:
    """``scan`` captures its body for contiguous slices."""

    def fn(x: Tensor) -> Any:
        return scan(lambda s, row: (s + row[None].select(1, 0), row.t().reshape(-1)), x.new_zeros(1, x.shape[2]), x)

    x = turn(torch.randn(3, 4, 6))
    for got, want in zip(reflib.compile(fn, verify=True)(x), fn(x), strict=True):
        torch.testing.assert_close(got, want)


def test_a_branch_of_half_precision_is_updated_in_place() -> None:
    x = torch.randn(24, 8).bfloat16()

    def fn(x: Tensor, v: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, row, same, (x, v))[:1].add_(1)

    v = V.bfloat16()
    torch.testing.assert_close(reflib.compile(fn, verify=True)(x, v), fn(x, v))


def test_a_branch_that_eager_refuses_is_compiled_if_it_is_not_taken() -> None:
    def fn(x: Tensor, v: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, v: x.slice_scatter(v[:1], 0, 0, 1), lambda x, v: x.clone(), (x, v))

    x, v = -torch.ones(8), torch.ones(2, 2, 2)
    compiled = reflib.compile(fn, verify=True)
    torch.testing.assert_close(compiled(x, v), x)
    with pytest.raises(RuntimeError, match="expected src to have a size equal"):
        compiled(-x, v)
