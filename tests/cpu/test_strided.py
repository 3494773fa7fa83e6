"""``as_strided`` counts from the begin of a storage: of inputs that begin later in theirs, updated before and after."""

import random
from typing import Any

import pytest
import torch

from tests.cpu.test_fuzz import judge

BEFORE = (
    "x.copy_(x.cumsum(0))", "x[1:].copy_(x[:-1].clone())", "x.select(0, 1).mul_(2)", "x.diagonal().add_(1)",
    "x.T.copy_(x.T.flip(0))", "x[:, ::2].neg_()", "torch.as_strided(x, (3,), (2,), {k}).add_(5)",
    "x[1:-1, 1:].zero_()", "x.mul_(2)",
)  # fmt: skip
SEEN = ("x", "x[1:]", "x.T", "x[:, 1:]", "x.select(1, 1)", "x.chunk(2)[-1]", "x.unsqueeze(0)", "x.diagonal()")
AFTER = ("{y}.relu_()", "{y}.copy_({y}.flip(0))", "{y}.mul_(-1)", "{y} * 3", "{y}.sort()[0]")


def program(rng: random.Random) -> str:
    k, lines = rng.randrange(3, 16), []
    for _ in range(rng.randrange(1, 4)):
        lines.append(rng.choice(BEFORE).format(k=k))
    size, stride = rng.randrange(1, 5), rng.randrange(1, 4)
    y = f"torch.as_strided({rng.choice(SEEN)}, ({size},), ({stride},){f', {k}' if rng.random() < 0.8 else ''})"
    return "; ".join([*lines, f"z = {rng.choice(AFTER).format(y=y)}"])


def argument(rng: random.Random) -> torch.Tensor:
    n, m = rng.randrange(4, 9), rng.randrange(4, 9)
    storage = torch.randn(4 * n * m + 9, dtype=torch.float64)[rng.randrange(9) :]
    strides = rng.choice([(m, 1), (1, n), (2 * m, 2), (m + 1, 1)])
    return storage.as_strided((n, m), strides, storage.storage_offset())


@pytest.mark.parametrize("seed", (*range(16), 36, 1134, 1217))
def test_counted_from_the_begin(seed: int) -> None:
    rng = random.Random(seed)
    text, x = program(rng), argument(rng)
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def f(x):\n    {text}\n    return z, x.clone()", scope)
    torch.manual_seed(seed)
    how = rng.choice([{}, {"arena": True}, {"wrapper": "cpp"}, {"wrapper": "cpp", "arena": True}])
    assert not judge(scope["f"], [x], dynamic=rng.random() < 0.5, **how), text
