"""What ranks (``lab.ranks``) do with packages in tests. Each function runs on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import reflib
from reflib.ranks.reduce import REDUCE
from tests.rank_tasks import failing, rank

c = torch.ops._c10d_functional


class Layer(nn.Module):
    """A feed-forward layer, of which each rank has a part of the hidden features."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(rank())
        self.up, self.down, self.how = nn.Linear(8, 6), nn.Linear(6, 8, bias=False), how

    def forward(self, x: Any) -> Any:
        part = self.down(torch.nn.functional.gelu(self.up(x)))
        whole = REDUCE(part, self.how, "0") if self.how else c.wait_tensor(c.all_reduce(part, "sum", "0"))
        return x + whole


def build(path: str, how: str = "") -> tuple[bool, list[str]]:
    """(is what was loaded right? the files there are)"""
    m, x = Layer(how), torch.randn(5, 8, generator=torch.Generator().manual_seed(7))
    batch = torch.export.Dim("batch", min=2, max=64)
    made = reflib.aot_compile(m, (x,), path, ["cpu"], dynamic_shapes=({0: batch},))
    return load(path, how), sorted(p.name for p in made.parent.iterdir())


def load(path: str, how: str = "") -> bool:
    m, f, right = Layer(how), reflib.load(path), True
    for n in (5, 2, 17):
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(n))
        with torch.no_grad():
            right &= torch.allclose(f(x), m(x), atol=1e-5)
    return right


def fault(path: str, what: str) -> Any:
    """The last rank does something else."""
    last = rank() == dist.get_world_size() - 1
    if what == "other model":
        x = torch.randn(5, 8)
        call = (lambda x: c.wait_tensor(c.all_reduce(x, "max", "0"))) if last else Layer()
        return failing(lambda: reflib.aot_compile(call, (x,), path, ["cpu"]))
    if what == "not written":
        where = str(Path(path).parent / "nowhere" / "model.reflib") if last else path
        return failing(lambda: reflib.aot_compile(Layer(), (torch.randn(5, 8),), where, ["cpu"]))
    if what == "another rank's":
        return failing(lambda: reflib.load(str(path).replace("model.", f"model.rank{1 - rank()}.")))
    if what == "damaged" and last:
        own = Path(path.replace("model.", f"model.rank{rank()}."))
        data = own.read_bytes()
        own.unlink()  # (it may be mapped)
        own.write_bytes(data[:-3] + b"abc")
    return failing(lambda: load(path))
