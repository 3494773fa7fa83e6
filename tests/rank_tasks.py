"""What ranks (``lab.ranks``) do in tests. Each function runs on every rank, in a process group of its own."""

import os
import tempfile
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

c = torch.ops._c10d_functional


def rank() -> int:
    return dist.get_rank()


class Block(nn.Module):
    def __init__(self, n: int = 8):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(n, 2 * n), nn.Linear(2 * n, n), nn.LayerNorm(n)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def trained(m: Any, steps: int = 3) -> list[torch.Tensor]:
    """Losses and parameters after a few steps, each rank on data of its own."""
    device = next(m.parameters()).device
    optimizer = torch.optim.SGD(m.parameters(), 0.1, foreach=False)  # (which takes no DTensors beside tensors)
    torch.manual_seed(rank())
    out = []
    for _ in range(steps):
        loss = m(torch.randn(4, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach())
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in m.parameters()]
    return [*out, *(p.detach().clone() for p in full)]


def data_parallel(m: nn.Module) -> Any:
    return nn.parallel.DistributedDataParallel(m)


def sharded(m: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in m:  # type: ignore[attr-defined]
        fully_shard(block)
    return fully_shard(m)


def tensor_parallel(m: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel as p

    mesh = init_device_mesh(next(m.parameters()).device.type, (dist.get_world_size(),))
    for block in m:  # type: ignore[attr-defined]
        p.parallelize_module(block, mesh, {"up": p.ColwiseParallel(), "down": p.RowwiseParallel()})
    return m


def train(parallel: Any, wrapper: str, device: Any = "cpu") -> int:
    """Compiled as in eager; how many collectives were in compiled graphs."""
    from reflib.ranks import agree

    seen: list[Any] = []
    kept, agree.check = agree.check, lambda lists: (seen.extend(lists.values()), kept(lists))[1]
    try:
        expected = trained(parallel(model().to(device)))
        m = parallel(model().to(device))
        m.compile(backend="reflib", options={"wrapper": wrapper})
        got = trained(m)
    finally:
        agree.check = kept
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return sum(map(len, seen))


# -- agreeing ---------------------------------------------------------------------------------------------
def reduced(x: Any) -> Any:
    return c.wait_tensor(c.all_reduce(x * 2, "sum", "0")) + 1


def other_order(x: Any) -> Any:
    a, b = (c.wait_tensor(f) for f in (c.all_reduce(x, "sum", "0"), c.broadcast(x * 2, 0, "0")))
    return a + b


def same_then_other(different: bool) -> Any:
    """All agree on one graph; then the last rank compiles another."""
    x = torch.ones(4)
    torch.compile(reduced, backend="reflib")(x)
    last = rank() == dist.get_world_size() - 1

    def fn(x: Any) -> Any:
        a = c.wait_tensor(c.all_reduce(x, "max", "0"))
        if different and last:
            return a + c.wait_tensor(c.broadcast(x * 2, 0, "0"))
        return a + c.wait_tensor(c.all_reduce(x * 2, "sum", "0"))

    return failing(lambda: torch.compile(fn, backend="reflib")(x))


def other_lines() -> Any:
    """The same collectives, from another line on each rank."""
    fn = (lambda x: c.wait_tensor(c.all_reduce(x * 2, "sum", "0")) + 1) if rank() else reduced
    return torch.compile(fn, backend="reflib")(torch.ones(4))


def another_world() -> list[bool]:
    """A compiled program, with an all-reduce over symmetric storage, in one process group after another of one name: of
    four ranks, two, and four; is it right?"""
    from reflib.ranks.reduce import REDUCE

    def fn(x: Any) -> Any:
        return REDUCE(x.sin(), "one_shot", "0") + c.wait_tensor(c.all_reduce(x * 2, "sum", "0"))

    compiled, store, out = torch.compile(fn, backend="reflib"), store_of_all(), []
    me, all_ranks = rank(), dist.get_world_size()
    for i, size in enumerate((all_ranks, 2, all_ranks)):
        dist.barrier()
        dist.destroy_process_group()
        parts = dist.PrefixStore(f"world {i} {me // size}", store)
        dist.init_process_group("gloo", store=parts, rank=me % size, world_size=size)
        x = torch.full((8,), me % size + 1.0)
        whole = torch.arange(1.0, size + 1)
        expected = (whole.sin() + 2 * whole).sum().expand(8)
        out.append(torch.allclose(compiled(x), expected, atol=1e-5))
        if i == 1:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=me, world_size=all_ranks)
    return out


def store_of_all() -> Any:
    from reflib.ranks.meeting import store_of

    return store_of(dist.group.WORLD)


def full_store() -> Any:
    """The store is a file, and there is no room for what the last rank would write."""
    import resource
    import signal

    path: list[Any] = [None]
    if rank() == 0:
        path = [tempfile.mktemp()]
    dist.broadcast_object_list(path)
    me, size, limit = rank(), dist.get_world_size(), store_of_all().timeout
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path[0], size), rank=me, world_size=size)
    dist.barrier()
    store_of_all().set_timeout(limit)
    kept = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if me == size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path[0]), kept[0][1]))
        return failing(lambda: torch.compile(reduced, backend="reflib")(torch.ones(4)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept[0])
        signal.signal(signal.SIGXFSZ, kept[1])


def anew_for_another_size() -> Any:
    """The last rank compiles again, alone, when sizes have changed."""

    def fn(x: Any, first: bool) -> Any:
        y = c.wait_tensor(c.all_reduce(x * 2, "sum", "0"))
        return y + 1 if first else y + 2

    compiled = torch.compile(fn, backend="reflib", dynamic=True)
    last = rank() == dist.get_world_size() - 1
    return failing(lambda: [compiled(torch.ones(5), True), compiled(torch.ones(7), not last)])


def late(seconds: float, how: str = "sleep") -> Any:
    """The last rank comes late, or ends."""
    start = time.monotonic()
    if rank() == dist.get_world_size() - 1:
        if how == "exit":
            os._exit(1)
        time.sleep(seconds)
    return failing(lambda: torch.compile(reduced, backend="reflib")(torch.ones(4)), start)


# -- tuning an op that communicates -----------------------------------------------------------------------
def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of all ranks' shares, added up; slowly."""
    time.sleep(0.04)
    return c.wait_tensor(c.all_reduce(x @ w, "sum", "0"))


def by_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    both = c.wait_tensor(c.all_gather_into_tensor(x @ w, dist.get_world_size(), "0"))
    return both.view(dist.get_world_size(), -1, w.shape[1]).sum(0)


def by_reduce(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return c.wait_tensor(c.all_reduce(x @ w, "sum", "0"))


def alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Right where there is one rank only: wrong here."""
    return x @ w * dist.get_world_size()


def misbehaving(how: str) -> Any:
    @torch.library.custom_op(f"rank_tasks::{how}", mutates_args=())
    def fault(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            if how == "crashes":
                os.kill(os.getpid(), 11)
            if how == "hangs":
                time.sleep(1000)
            if how == "fills_memory":
                torch.empty(1 << 50)
        elif how == "crashes" and not x.is_cuda:
            time.sleep(1000)  # as NCCL would wait
        return x.clone()

    fault.register_fake(torch.empty_like)

    def candidate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return c.wait_tensor(c.all_reduce(fault(x) @ w, "sum", "0"))

    candidate.__name__ = how
    return candidate


FAULTS = [misbehaving(how) for how in ("crashes", "hangs", "fills_memory")]
sum_product = torch.library.custom_op("rank_tasks::sum_product", mutates_args=())(summed)
sum_product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))


def tune(*names: str, device: Any = "cpu") -> Any:
    """Rows (name, status, why) and the winner; then the group is used again. What hangs has little time, what does not
    has a lot."""
    import reflib
    from reflib.ranks.tune import _Team

    known = {f.__name__: f for f in (by_gather, by_reduce, alone, *FAULTS)}
    reflib.register_custom_op_autotuning(sum_product, [known[n] for n in names])
    torch.manual_seed(rank())
    x, w = torch.randn(16, 8).to(device), torch.randn(8, 4).to(device)
    options = {"autotune": "blocking", "candidate_seconds": 120.0, "cache_decisions": True}

    def fn(x: Any, w: Any) -> Any:
        return sum_product(x, w) + 1

    job = _Team._job

    def limited(team: Any, what: str, data: Any, limit: float) -> Any:
        return job(team, what, data, 1.0 if (what, data["name"]) == ("try_one", "hangs") else limit)

    with mock.patch.object(_Team, "_job", limited):
        found = reflib.explain(fn, x, w, **options).decisions
        (d,) = [d for d in found if "sum_product" in d.op]
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(fn, backend="reflib", options=options)(x, w), fn(x, w))
    t = torch.ones(1, device=device)
    dist.all_reduce(t)
    return d.winner, {r.name: (r.status, r.time_us, r.why) for r in d.candidates}, t.item(), d.reason


def tune_twice(*names: str) -> Any:
    """What was found, and once more, where only the first rank knows it."""
    os.environ["REFLIB_CACHE_DIR"] = tempfile.mkdtemp()
    found = tune(*names)
    if rank() > 0:
        os.environ["REFLIB_CACHE_DIR"] = tempfile.mkdtemp()
    torch._dynamo.reset()
    return found, tune(*names)


def tune_after_some() -> Any:
    """The first rank has tuned in a group of its own before."""
    import reflib

    own = dist.new_group([0])
    if rank() == 0:
        name = own.group_name

        @torch.library.custom_op("rank_tasks::own_sum", mutates_args=())
        def own_sum(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.005)
            return c.wait_tensor(c.all_reduce(x, "sum", name))

        own_sum.register_fake(torch.empty_like)
        reflib.register_custom_op_autotuning(own_sum, [lambda x: c.wait_tensor(c.all_reduce(x * 1, "sum", name))])
        reflib.explain(lambda x: own_sum(x) + 1, torch.ones(4), autotune="blocking")
    return tune("by_reduce")


def other_options(code: bool) -> Any:
    """The last rank does not tune; or (``code``) it has other code."""
    import reflib

    reflib.register_custom_op_autotuning(sum_product, [by_reduce])
    last = rank() == dist.get_world_size() - 1
    call = by_reduce if last and code else sum_product
    options = {"autotune": "off" if last and not code else "blocking", "cache_decisions": False}
    fn = torch.compile(lambda x, w: call(x, w) + 1, backend="reflib", options=options)
    return failing(lambda: fn(torch.randn(16, 8), torch.randn(8, 4)))


def failing(call: Any, start: float | None = None) -> Any:
    """What the call raises, and after how many seconds."""
    start = start or time.monotonic()
    try:
        return call()
    except BaseException as e:
        return f"{type(e).__name__} after {time.monotonic() - start:.0f} s: {e}"


def interrupted(how: str) -> Any:
    """The last rank gets Ctrl-C, or is killed, while the first waits for it in a meeting."""
    import signal
    import threading

    def wait() -> None:
        if rank() == dist.get_world_size() - 1:
            number = signal.SIGINT if how == "ctrl-c" else signal.SIGKILL
            threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
            time.sleep(30)
        torch.compile(reduced, backend="reflib")(torch.ones(4))

    return failing(wait)


# -- in the background ------------------------------------------------------------------------------------
def in_background(op: str, last_rank: str = "") -> Any:
    """(state, number of the call that swapped, winner, error) of a graph that is tuned while it runs. ``last_rank``:
    there tuning "fails", is "late", or is "never" ready."""
    import reflib
    from reflib import background
    from reflib.background import tunings

    candidates = {sum_product: [by_gather, by_reduce], doubled: [by_product]}
    fn, args = (
        (lambda x, w: sum_product(x, w) + 1, (torch.randn(16, 8), torch.randn(8, 4)))
        if op == "communicates"
        else (lambda x: doubled(x).sum(0), (torch.randn(8, 4),))
    )
    for known, configs in candidates.items():
        reflib.register_custom_op_autotuning(known, configs)
    work = background.Background._work
    if last_rank and rank() == dist.get_world_size() - 1:

        def other(self: Any) -> None:
            if last_rank == "fails":
                self._tune = lambda b: 1 / 0
            time.sleep({"late": 2.0, "never": 1e6}.get(last_rank, 0.0))
            work(self)

        background.Background._work = other  # type: ignore[method-assign]
    try:
        f = reflib.compile(fn, autotune="background", cache_decisions=False, tuning_seconds=60.0)
        swapped, ended = 0, torch.zeros(1)
        begun = time.monotonic()
        expected = fn(*args)
        for number in range(1, 100_000):
            torch.testing.assert_close(f(*args), expected)
            (b,) = tunings[f]
            if b.turn is not None and not b.turn.together:
                b.turn.seconds = 1.0
            swapped = swapped or number * (b.state == "swapped")
            waits = last_rank == "never" and (b.state == "ready" or rank()) and time.monotonic() > begun + 15
            ended[0] = float(b.state in ("swapped", "failed") or waits)
            dist.all_reduce(ended, dist.ReduceOp.MIN)
            if ended:
                break
        found = reflib.tuning_progress(f)
        return b.state, swapped, [d.winner for d in found.decisions], b.error
    finally:
        background.Background._work = work  # type: ignore[method-assign]


# -- sharing ----------------------------------------------------------------------------------------------
@torch.library.custom_op("rank_tasks::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return x + x


doubled.register_fake(torch.empty_like)


def by_product(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def way(i: int) -> Any:
    """A candidate that takes longer than ``by_product``."""

    def candidate(x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + i * torch.zeros_like(x)

    candidate.__name__ = f"way{i}"
    return candidate


def share(other: bool = False) -> Any:
    """(winner, reason) of two choices, twice. ``other``: the last rank has another device."""
    import reflib
    from reflib.autotune import circumstances

    own, last = circumstances.device_model, rank() == dist.get_world_size() - 1
    os.environ["REFLIB_CACHE_DIR"] = tempfile.mkdtemp()  # ranks of two hosts
    reflib.register_custom_op_autotuning(doubled, [by_product])

    def fn(x: Any, y: Any) -> Any:
        return doubled(x).sum(0), doubled(y).sum(0)

    options = {"autotune": "blocking", "cache_decisions": True}
    with mock.patch.object(circumstances, "device_model", (lambda device: "another") if other and last else own):
        found = reflib.explain(fn, torch.ones(8, 4), torch.ones(16, 4), **options).decisions
        again = reflib.explain(fn, torch.ones(8, 4), torch.ones(16, 4), **options).decisions
    return [[(d.winner, d.reason) for d in ds if "doubled" in d.op] for ds in (found, again)]


WAYS = [by_product, *(way(i) for i in range(1, 9))]  # ``doubled``'s other candidates


def share_parts(late: float) -> Any:
    """(winner, reason, rows) of a choice between many. The last rank comes so many seconds late."""
    import reflib

    os.environ["REFLIB_CACHE_DIR"] = tempfile.mkdtemp()
    reflib.register_custom_op_autotuning(doubled, WAYS)
    if rank() == dist.get_world_size() - 1:
        time.sleep(late)
    options = {"autotune": "blocking", "cache_decisions": True}
    found = reflib.explain(lambda x: doubled(x).sum(0), torch.ones(8, 6), **options).decisions
    (d,) = [d for d in found if "doubled" in d.op]
    return d.winner, d.reason, [(str(r.key), r.status, r.time_us) for r in d.candidates]


def rules(seconds: list[float], fails: int = -1, size: int = 0) -> Any:
    """The rules of sharing on the real store, where measuring is waiting: (seconds, how often this rank measured).
    ``fails``: a rank that ends when it has claimed. ``size``: only so many ranks take part."""
    from reflib.ranks import share, simulate

    share.STALE, share.BEAT = 1.0, 0.2

    class Slow(share.Sharing):
        free, count = 0.0, 0

        def do(self, what: str, *args: Any) -> Any:
            if what == "start":
                self.measuring(str(args[0]))
                self.count += 1
                self.free = self.ends[args[0]] = max(time.monotonic(), self.free) + seconds[args[0]]
            elif what == "finish":
                if self.rank == fails:
                    os._exit(1)
                time.sleep(max(0.0, self.ends[args[0]] - time.monotonic()))
            else:
                return super().do(what, *args)

    s = Slow(dist.group.WORLD)
    s.ends: dict[int, float] = {}  # type: ignore[misc]
    size = size or s.size
    if fails < 0:
        dist.barrier()
    start = time.monotonic()
    if s.rank < size:
        s.run(simulate.tuned(s.rank, size, len(seconds), 60.0))
    took = time.monotonic() - start
    s.mine.clear()
    if fails < 0:
        dist.barrier()
    return took, s.count
