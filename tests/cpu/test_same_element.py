"""An input that is updated in several ways, elementwise and in slices, is stored over without a copy."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from tests.checking import check

Tensor = torch.Tensor
torch.manual_seed(1)
C, V = torch.randn(16, 65), torch.randn(16, 65)


def a_column(c: Tensor, v: Tensor) -> None:
    c[:, 3] += 1
    c *= 2


def a_list(c: Tensor, v: Tensor) -> None:
    torch._foreach_add_([c[0], c[1], v], 1.0)
    torch._foreach_mul_([c, v], [v, v])


def every_second(c: Tensor, v: Tensor) -> None:
    c[:, 1::2] += v[:, ::2][:, :32]
    c[4:8] *= 3


def every_third_and_others(c: Tensor, v: Tensor) -> None:
    c[2::3, 5:] += 1
    c[:, ::2] *= 2
    c[:, 1::2] -= 3


def an_element(c: Tensor, v: Tensor) -> Tensor:
    c[3, 5] += 1
    c.mul_(v)
    return c[0]


CASES = [a_column, a_list, every_second, every_third_and_others, an_element]


@pytest.mark.parametrize("fn, wrapper", [(f, ("python", "cpp")[n % 2]) for n, f in enumerate(CASES)])
def test_without_a_copy(fn: Callable[..., Any], wrapper: str) -> None:
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), C, V)
    for target in ("cpu", "sm_90"):
        torch._dynamo.reset()
        with torch.no_grad():
            e = reflib.explain(fn, C, V, target=target)
        assert len(e.kernels) <= 1 + (fn is every_third_and_others) and e.memory.peak_bytes == 0, e.fused
        assert not [u for u in e.updates if u.why]


def test_a_copy_that_is_left_is_told() -> None:
    """Not one that was refused, and then came to nothing."""

    def other_elements(c: Tensor, v: Tensor) -> None:
        c.lerp_(v, 0.5)
        c[1:] -= c[:-1].clone()

    def each_once(c: Tensor, v: Tensor) -> None:
        c[:, ::2] += 1
        c[:, 1::2] *= 3

    c, v = torch.randn(512, 512), torch.randn(512, 512)
    with torch.no_grad():
        e = reflib.explain(other_elements, c, v, target="sm_90")
        (u,) = e.updates
        assert u.copied == c.nbytes == e.memory.peak_bytes and "other elements" in u.why
        assert "c[1:] -= c[:-1]" in str(u)
        e = reflib.explain(each_once, c, v, target="sm_90")
        assert e.updates and not [u for u in e.updates if u.why] and e.memory.peak_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_updates_in_a_row(seed: int) -> None:
    """Of rows, columns, elements and slices with steps, which read the same or other elements."""
    for seed in range(seed, 12, 4):  # noqa: B020
        rng = random.Random(seed)

        def some(rng: random.Random = rng) -> Any:
            n, low = rng.choice((1, 2, 3)), rng.randrange(4)
            return rng.choice((slice(low, None, n), slice(low, low + 7), rng.randrange(-3, 8)))

        steps = [((some(), some()), rng.randrange(4), rng.randrange(3)) for _ in range(rng.randrange(2, 5))]

        def fn(c: Tensor, v: Tensor, steps: Any = steps) -> None:
            for at, kind, by in steps:
                if kind == 0:
                    c *= v + by
                elif kind == 1:
                    c[at] += by + 1
                elif kind == 2:
                    c[at] = c.flip(0)[at] + v[at]
                else:
                    c[at] *= c[at] + v[at]

        torch._dynamo.reset()
        mine, theirs = [C.clone(), V.clone()], [C.clone(), V.clone()]
        with torch.no_grad():
            reflib.compile(fn, verify=True, dynamic=seed % 3 == 0)(*mine)
            fn(*theirs)
        torch.testing.assert_close(mine, theirs, msg=lambda m, seed=seed: f"seed {seed}: {m}")
