"""Every stage computes the same. Shared by tests/cpu and tests/gpu, which give the fixture ``device``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.checking import call, wrong
from tests.semantics import randn
from tests.stopping import Until

PROGRAMS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, w: (x * 2 + w).sin() * torch.where(x > 0, x, w),
    "softmax": lambda x, w: torch.softmax(x + w, -1),
    "layer_norm": lambda x, w: F.layer_norm(x, (24,), w, w),
    "reductions": lambda x, w: (x.sum(0), x.amax(1), x.argmax(0), x.var(1), x.mean(), (x > 0).any(0)),
    "views": lambda x, w: (x.t().reshape(-1)[3:] * 2, x.view(4, 4, 24).permute(1, 2, 0) + 1, x.flip(0) + x[:, :1]),
    "cat and pad": lambda x, w: (torch.cat([x, x * 2, w.expand(2, 24)], 0) + 1, F.pad(x, (1, 2, 3, 0), value=0.5)),
    "index": lambda x, w: (x[torch.tensor([1, 0, -1], device=x.device)] + w, x.gather(1, (x > 0).long()), x.roll(3, 1)),
    "matmul": lambda x, w: F.gelu((x * 2) @ x.t() + w[:16]).sum(-1),
    "int": lambda x, w: ((x * 10).int() // 3 + 1).sum(1),
    "half": lambda x, w: ((x.bfloat16() + w.bfloat16()).float().exp().half() * 2).softmax(0),
    "mutation": lambda x, w: x.add_(1).mul_(w).sum(0),
    "scan": lambda x, w: (x.cumsum(0) + 1, x.sort(1).values * 2),
    "scatter": lambda x, w: torch.zeros(4, 24, device=x.device).index_add(0, torch.arange(16, device=x.device) % 4, x),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sample(6)
def test_every_stage_computes_the_same(device: str, name: str, dynamic: bool) -> None:
    fn = PROGRAMS[name]
    args = (randn(16, 24, device=device), randn(24, device=device))
    eager, wide = call(fn, args), call(fn, args, wide=True)
    for until in ("lower", "fuse", "schedule", "wrap"):
        torch._dynamo.reset()
        problems = wrong(call(torch.compile(fn, backend=Until(until), dynamic=dynamic), args), eager, wide)
        assert not problems, (until, problems)
