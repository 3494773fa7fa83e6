"""A training program as users write it: `torchrun --nproc-per-node 2 torchrun_train.py OPTIONS`, options as JSON.
Each rank says in a file `rankN` of its own whether all ranks have the same weights: lines of two processes mix."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    parallel = DistributedDataParallel(model)
    call = torch.compile(parallel, backend="reflib", options=json.loads(sys.argv[1]))
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(8, 16)
        loss = call(x).square().mean()
        expected = model(x).square().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    says = "same weights" if all(w.equal(weights) for w in everyone) else "other weights"
    Path(f"rank{dist.get_rank()}").write_text(says)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
