"""A process group of one process that pretends to be ``size`` equal ones, and does everything as late as it may: until
``wait`` a result is NaN, and what a collective reads is read by ``wait``. So memory that is used too early, or again
too soon, gives wrong numbers each time. With ``late = False`` all is done at once: the reference."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup


class LateWork(dist._Work):
    def __init__(self, do: Callable[[], object], late: list[torch.Tensor]):
        super().__init__()
        self.do = do
        for t in late:
            t.fill_(float("nan"))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.do()  # (again for each result of a call, as gloo does)
        return True


class LateGroup(ProcessGroup):
    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.log: list[str] = []
        self.late = True

    def getBackendName(self) -> str:
        return "late"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return dist.distributed_c10d._world.pg_names[self]

    def _late(self, name: str, out: list[torch.Tensor], do: Callable[[], object]) -> Any:
        self.log.append(name)
        if not self.late:
            do()
        return LateWork(do if self.late else lambda: None, out if self.late else [])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        was = [t.clone() for t in tensors]  # (in place: what it reads is what it writes)
        return self._late("all_reduce", tensors, lambda: [t.copy_(w * 2) for t, w in zip(tensors, was)])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        was = [t.clone() for t in tensors]
        return self._late("broadcast", tensors, lambda: [t.copy_(w) for t, w in zip(tensors, was)])

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        return self._late("all_gather", [out], lambda: out.copy_(torch.cat([x, x]).view_as(out)))

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        return self._late("reduce_scatter", [out], lambda: out.copy_(2 * x[: out.shape[0]]))

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, o: list[int], i: list[int], opts: Any = None) -> Any:
        half = x[: x.shape[0] // 2]
        return self._late("all_to_all", [out], lambda: out.copy_(torch.cat([half, half])))

    def allgather_into_tensor_coalesced(self, outs: list[Any], xs: list[Any], opts: Any = None) -> Any:
        return self._late("all_gather", outs, lambda: [o.copy_(torch.cat([x, x])) for o, x in zip(outs, xs)])

    def reduce_scatter_tensor_coalesced(self, outs: list[Any], xs: list[Any], opts: Any = None) -> Any:
        return self._late("reduce_scatter", outs, lambda: [o.copy_(2 * x[: o.shape[0]]) for o, x in zip(outs, xs)])


def join() -> LateGroup:
    """The default process group of this process: rank 0 of 2."""
    dist.Backend.register_backend("late", lambda store, rank, size, timeout: LateGroup(rank, size), devices=["cpu"])
    dist.init_process_group("late", store=dist.HashStore(), rank=0, world_size=2)
    return dist.group.WORLD  # type: ignore[return-value]
