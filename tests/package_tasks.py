"""What ranks (``lab.ranks``) do with packages in tests. Each function runs on every rank."""

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


class Attention(nn.Module):
    """Tokens, an attention layer whose heads are as many as the projections have rows, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.logits = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, i: Any) -> Any:
        x = self.tokens(i)
        q, k, v = (f(self.norm(x)).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.logits(x + self.o(y.transpose(1, 2).flatten(2)))


def parallelized(path: str) -> list[Any]:
    return [with_dtensors(path, how) for how in ("columns", "sequence", "rows", "size", "sequence size")]


def with_dtensors(path: str, how: str) -> Any:
    """(was it loaded right? has it the model's names?) of a model with DTensors: "columns" and rows; with the rows of a
    "sequence" on each rank between them; an embedding by "rows"; with an open "size"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as p

    torch.manual_seed(0)
    m, i, more = Attention().eval(), torch.arange(24).view(4, 6), [torch.arange(24).view(4, 6)]
    if "size" in how:
        more += [torch.randint(32, (n, 6 if "sequence" in how else n + 2)) for n in (3, 2, 17)]
    expected = [m(i).detach() for i in more]
    whole, between = Replicate(), Shard(1) if "sequence" in how else Replicate()
    tokens = p.RowwiseParallel if how == "rows" else p.ColwiseParallel
    plan: dict[str, Any] = {
        "tokens": tokens(input_layouts=whole, output_layouts=between),
        **{name: p.ColwiseParallel(input_layouts=between) for name in ("q", "k", "v")},
        "o": p.RowwiseParallel(output_layouts=between),
        "logits": p.ColwiseParallel(input_layouts=between, output_layouts=whole),
    }
    if "sequence" in how:
        plan["norm"] = p.SequenceParallel()
    p.parallelize_module(m, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    sizes = [torch.export.Dim(name, min=2, max=64) for name in ("batch", "length")]
    shapes = ({"size": dict(enumerate(sizes)), "sequence size": {0: sizes[0]}}[how],) if "size" in how else None

    def packaged() -> Any:
        f = reflib.load(reflib.aot_compile(m, (i,), path, ["cpu"], dynamic_shapes=shapes))
        right = all(torch.allclose(f(i), e, atol=1e-5) for i, e in zip(more, expected, strict=True))
        return right, {*f.get_constant_fqns()} == {n for n, _ in m.named_parameters()}

    return failing(packaged)


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
