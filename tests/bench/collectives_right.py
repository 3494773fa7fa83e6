"""What ranks compute, beside what it must be: parts of ``collectives``, which says how they run.

A part is given ``say``, which reports a row, this rank, how many there are, and its device.
"""

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

KB, MB = 1 << 10, 1 << 20
GROUP = "0"  # of all ranks
c = torch.ops._c10d_functional
Say = Callable[..., None]


def part_of(rank: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What ``rank`` has: any rank can make it."""
    g = torch.Generator(device).manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=g, dtype=torch.float64, device=device) * 10).to(dtype)


def storage(say: Say, rank: int, size: int, device: torch.device) -> None:
    from reflib.ranks.reduce import EMPTY, REDUCE
    from reflib.ranks.symmetric import DTYPES, HOW

    rng, wrong, count = random.Random(0), [], 0
    large = 5_000_001 if device.type == "cuda" else 50_001
    for n in (0, 1, 2, 3, 7, 255, 256, 257, 1000, 4095, 4097, 30_001, large // 5, large):
        for dtype in DTYPES:
            parts = [part_of(r, n, dtype, device) for r in range(size)]
            exact = torch.stack([p.double() for p in parts]).sum(0)
            allowed = 2 * float((sum(parts[1:], parts[0]).double() - exact).abs().max()) + 1e-5 if n else 0.0
            for how in HOW:
                x, there = parts[rank], rng.random() < 0.5 and n * 8 < 16 * MB
                if there:
                    x = EMPTY([n], dtype, device, 256 * rng.randrange(1000) + 4096 * rank, GROUP).copy_(x)
                found = REDUCE(x, how, GROUP)
                error = float((found.double() - exact).abs().max()) if n else 0.0
                first = found.clone()
                dist.broadcast(first, 0)
                count += 1
                if not error <= allowed or not torch.equal(first, found):
                    wrong.append(f"{how} {n} {dtype} {'in place' if there else 'copied'}: {error}, allowed {allowed}")
    say("random sizes", wrong=wrong, count=count)
    attempt(say, "shares and products", partial(through_storage, rank, size, device))
    for how in HOW:
        say("in a row", how=how, **in_a_row(how, rank, size, device))
    if device.type == "cuda":
        say("in CUDA graphs", wrong=in_graphs(rank, size, device))
        attempt(say, "products in CUDA graphs", partial(products_in_graphs, rank, size, device))
    for options in ({}, {"wrapper": "cpp"}, *([{"cuda_graphs": True}] if device.type == "cuda" else [])):
        attempt(say, "compiled", partial(in_programs, rank, size, device, options), **options)


def through_storage(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Sums of shares, and products with a gather or a scatter, one after the other as fast as the host can."""
    from reflib.ranks.products import GATHER_PRODUCT, PRODUCT_SCATTER
    from reflib.ranks.reduce import REDUCE, SCATTER

    wrong, rng, found, shapes = [], random.Random(3), [], []
    for i in range(60):
        m, k, n = (rng.choice((1, 8, rng.randrange(1, 300))) for _ in range(3))
        m, dtype = m * (9 if i % 20 == 7 else 1), rng.choice((torch.float32, torch.bfloat16))
        n *= 500 if i % 20 == 7 and device.type == "cuda" else 1
        xs = [part_of(r, size * m * k, dtype, device).view(size * m, k) / 10 for r in range(size)]
        ws = [part_of(r + 50, k * n, dtype, device).view(k, n) / 10 for r in range(size)]
        x, w = xs[rank], ws[rank]
        if device.type == "cuda" and rng.random() < 0.3:
            torch.cuda._sleep(random.Random(rank + i).randrange(300_000))
        total = REDUCE(x, rng.choice(("one_shot", "two_shot")), GROUP)
        found.append((GATHER_PRODUCT(x[:m], w, GROUP), PRODUCT_SCATTER(x, w, GROUP), SCATTER(x @ w, GROUP), total))
        parts = sum(a.double() @ b.double() for a, b in zip(xs, ws, strict=True))[rank * m : rank * m + m]  # type: ignore
        gathered = torch.cat([a[:m] for a in xs]).double() @ w.double()
        shapes.append((f"{m} {k} {n} {dtype}", (gathered, parts, parts, torch.stack(xs).double().sum(0))))
    for (shape, wants), gots in zip(shapes, found, strict=True):
        for what, got, want in zip(("gather", "scatter", "shares", "sum"), gots, wants, strict=True):
            allowed = (0.04 if got.dtype == torch.bfloat16 else 1e-4) * float(want.abs().max() + 1)
            error = float((got.double() - want).abs().max())
            wrong += [] if error <= allowed else [f"{what} {shape}: {error}, allowed {allowed}"]
    return {"wrong": wrong, "count": 4 * len(found)}


def attempt(say: Say, what: str, call: Callable[[], dict[str, Any]], **facts: Any) -> None:
    """An error is a row. (If only one rank has it, the others wait until the part's time is over.)"""
    try:
        say(what, **facts, **call())
    except Exception as e:
        say(what, **facts, wrong=[f"{type(e).__name__}: {e}"[:1500]], trace=traceback.format_exc()[-1500:])


def in_a_row(how: str, rank: int, size: int, device: torch.device, count: int = 400) -> dict[str, Any]:
    """Calls in the same memory that the host does not wait for, ranks out of step."""
    from reflib.ranks.reduce import EMPTY, REDUCE

    rng, wrong = random.Random(rank), torch.zeros(2, device=device)
    for n in (50, 70_000):
        there, other = EMPTY([n], torch.float32, device, 0, GROUP), torch.empty(n, device=device)
        for i in range(count):
            x = (there, other)[i % 3 % 2]
            x.fill_(i + rank)
            if rng.random() < 0.2 and device.type == "cuda":
                torch.cuda._sleep(rng.randrange(200_000))  # cycles
            wrong[i % 3 % 2] += (REDUCE(x, how, GROUP) != size * i + size * (size - 1) / 2).any()
    return {"wrong": [f"{int(w)} {what}" for w, what in zip(wrong, ("in place", "copied"), strict=True) if w]}


def in_graphs(rank: int, size: int, device: torch.device) -> list[str]:
    """Two graphs whose arguments lie at different places, replayed with other calls between."""
    from reflib.ranks.reduce import EMPTY, REDUCE

    wrong: dict[str, torch.Tensor] = {}
    rng, total = random.Random(rank), size * (size - 1) / 2
    x = EMPTY([3000], torch.float32, device, 1 << 16, GROUP)
    y, step = torch.empty(70_000, device=device), torch.zeros((), device=device)

    def first() -> torch.Tensor:
        x.fill_(rank).add_(step)
        return REDUCE(x, "one_shot", GROUP)

    def second() -> torch.Tensor:
        y.fill_(rank).sub_(step)
        return REDUCE(REDUCE(y, "two_shot", GROUP), "one_shot", GROUP)

    replay = {f.__name__: graph_of(f) for f in (first, second)}
    for i in range(200):
        step.fill_(i)
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(200_000))
        ways = random.Random(i).sample(["first", "second", "eager"], 3)
        for way in ways:
            if way == "eager":
                found, want = REDUCE(torch.full([77], float(i), device=device), "one_shot", GROUP), size * i
            else:
                found, want = replay[way](), size * i + total if way == "first" else size * (total - size * i)
            wrong[way] = wrong.get(way, 0) + (found != want).any()
    return [f"{way}: {int(w)} of 200" for way, w in wrong.items() if int(w)]


def products_in_graphs(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Replays of two products, with sums over storage between them."""
    from reflib.ranks.products import GATHER_PRODUCT, PRODUCT_SCATTER
    from reflib.ranks.reduce import REDUCE, SCATTER

    x, w = torch.ones(64 * size, 96, device=device), torch.ones(96, 128, device=device)
    small, wrong, rng = torch.ones(16, device=device), torch.zeros(4, device=device), random.Random(rank)

    def both() -> Any:
        return PRODUCT_SCATTER(x, w, GROUP), GATHER_PRODUCT(x[:64], w, GROUP), SCATTER(x, GROUP)

    replay = graph_of(both)
    for i in range(100):
        x.fill_(i + rank)
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(200_000))
        product, gathered, shares = replay()
        values = torch.arange(size, device=device, dtype=torch.float32) + i
        wrong[0] += (product != 96 * values.sum()).any()
        wrong[1] += (gathered.view(size, -1) != 96 * values[:, None]).any()
        wrong[2] += (shares != values.sum()).any()
        wrong[3] += (REDUCE(small * i, "one_shot", GROUP) != size * i).any()
    return {"wrong": [f"{int(n)} of 100 of kind {kind}" for kind, n in enumerate(wrong.tolist()) if n]}


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def in_programs(rank: int, size: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    from reflib.ranks.candidates import by_the_group
    from reflib.ranks.reduce import REDUCE

    def fn(x: Any, w: Any, add: Any = None) -> Any:
        add = add or (lambda t, how: REDUCE(t, how, GROUP))
        a, b = add(x * 2 + 1, "one_shot"), add(x @ w, "two_shot")
        d = add((b - a).relu(), "one_shot").sin()
        return add(d, "one_shot") + d, d

    torch._dynamo.reset()
    compiled, wrong = torch.compile(fn, backend="reflib", options=options, dynamic=not options.get("cuda_graphs")), []
    for n in (40, 33, 1100, 40):
        for again in range(4):
            torch.manual_seed(n + again + 99 * rank)
            x, w = torch.randn(n, 24, device=device), torch.randn(24, 24, device=device) / 5
            for got, want in zip(compiled(x, w), fn(x, w, lambda t, how: by_the_group(t, GROUP)), strict=True):
                if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
                    wrong.append(f"{n}: {float((got - want).abs().max())}")
    return {"wrong": wrong}


def collectives(say: Say, rank: int, size: int, device: torch.device) -> None:
    def many(x: Any) -> Any:
        y = x * 2 + 1
        waited = c.wait_tensor
        a = waited(c.all_reduce(y, "sum", GROUP)) + 1
        b = waited(c.all_gather_into_tensor(y, size, GROUP)).relu()
        d = waited(c.reduce_scatter_tensor(y, "sum", size, GROUP)) * 3
        e = waited(c.broadcast(y, size - 1, GROUP)).sin()
        part = x.shape[0] // size
        f = waited(c.all_to_all_single(y, [part] * size, [part] * size, GROUP)) - 1
        g = waited(c.all_reduce(y, "max", GROUP))
        return a, b, d, e, f, g

    for wrapper in ("python", "cpp"):
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()
            fn = torch.compile(many, backend="reflib", options={"wrapper": wrapper})

            def run(fn: Any = fn, dtype: torch.dtype = dtype) -> dict[str, Any]:
                wrong = []
                for n in (4, 64, 4, 1024):
                    x = part_of(rank, n * size * 32, dtype, device).view(n * size, 32)
                    for i, (got, want) in enumerate(zip(fn(x), many(x), strict=True)):
                        if got.stride() != want.stride() or not torch.allclose(got, want, rtol=2e-2, atol=2e-2):
                            wrong.append(f"result {i} of {n} rows")
                return {"wrong": wrong}

            attempt(say, "functional collectives", run, wrapper=wrapper, dtype=str(dtype))


def train(say: Say, rank: int, size: int, device: torch.device) -> None:
    from tests import rank_tasks

    for parallel in (rank_tasks.data_parallel, rank_tasks.sharded, rank_tasks.tensor_parallel):
        for wrapper in ("python", "cpp"):
            torch._dynamo.reset()

            def run(parallel: Any = parallel, wrapper: str = wrapper) -> dict[str, Any]:
                return {"collectives": rank_tasks.train(parallel, wrapper, device), "wrong": []}

            attempt(say, parallel.__name__, run, wrapper=wrapper)


def tune(say: Say, rank: int, size: int, device: torch.device) -> None:
    import reflib
    from reflib.ranks import candidates
    from tests import rank_tasks

    def faults() -> dict[str, Any]:
        winner, rows, total, reason = rank_tasks.tune("by_gather", "crashes", "by_reduce", device=device)
        statuses = {k: v[0] for k, v in rows.items()}
        wrong = [] if total == size else ["the process group does not add up any more"]
        slow = device.type == "cpu"  # (what eager does there is to sleep, which a CUDA graph does not)
        wrong += [] if winner in ("by_gather", "by_reduce") or not slow else [f"{winner} won"]
        wrong += [f"crashes: {statuses['crashes']}"] if statuses["crashes"] not in ("crashed", "error", "hung") else []
        return {"wrong": wrong, "winner": winner, "rows": rows, "reason": reason}

    attempt(say, "a candidate crashes", faults)
    for nbytes in (16 * KB, 4 * MB):

        def own(nbytes: int = nbytes) -> dict[str, Any]:
            x = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
            e = reflib.explain(
                lambda x: candidates.all_reduce(x * 2, GROUP) + 1, x,
                autotune="blocking", cache_decisions=False, dynamic=False,
            )  # fmt: skip
            (d,) = [d for d in e.decisions if "all_reduce" in d.op]
            rows = {r.name: (r.status, r.time_us, r.why) for r in d.candidates}
            return {"winner": str(d.winner), "rows": rows, "wrong": [k for k, r in rows.items() if r[0] != "ok"]}

        attempt(say, "all_reduce tuned", own, bytes=nbytes)


def fault(how: str, say: Say, rank: int, size: int, device: torch.device) -> None:
    """The last rank sums another number of values, or does not come in time: an error on all, after which a process
    can do no more on a GPU."""
    from reflib.errors import ReflibError
    from reflib.ranks.reduce import REDUCE
    from reflib.ranks.symmetric import storage as storage_of

    storage_of(GROUP, device).limit = 2.0
    last, start, found = rank == size - 1, time.perf_counter(), "no error"
    REDUCE(torch.ones(64, device=device), "one_shot", GROUP).cpu()
    if last and how == "late":
        time.sleep(8)
    try:
        REDUCE(torch.ones(65 if last and how == "other_size" else 64, device=device), "one_shot", GROUP).cpu()
    except (RuntimeError, ReflibError) as e:
        found = f"{type(e).__name__}: {e}"[:200]
    say(how, wrong=[] if found != "no error" else [found], found=found, seconds=round(time.perf_counter() - start, 1))
    sys.stdout.flush()
    os._exit(0)
