"""What ranks (``lab.ranks``) do with symmetric storage in tests. Each function runs on every rank."""

import os
import random
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from reflib.ranks import symmetric
from reflib.ranks.products import PRODUCT_SCATTER
from reflib.ranks.reduce import EMPTY, REDUCE
from tests.rank_tasks import failing, rank

CPU = torch.device("cpu")


def last() -> bool:
    return rank() == dist.get_world_size() - 1


def values(of: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * of + n)
    return (torch.randn(n, generator=g, dtype=torch.float64) * 10).to(dtype)


def reduce_many(seed: int, count: int = 24) -> list[str]:
    """Sums at random sizes, dtypes, layouts, from storage and from other memory: what is wrong with them."""
    rng, wrong, size = random.Random(seed), [], dist.get_world_size()
    for _ in range(count):
        how, dtype = rng.choice(symmetric.HOW), rng.choice(symmetric.DTYPES)
        n: int = rng.choice([0, 1, rng.randrange(2, 300), rng.randrange(300, 30_000), 1_300_000])
        there, strided, at = rng.random(), rng.random() < 0.3, 256 * rng.randrange(1000)
        parts = [values(r, n, dtype) for r in range(size)]
        x = parts[rank()]
        if there < (0.6, 0.3)[rank() % 2] and 0 < n < 30_000:  # elsewhere on each rank, or not there
            x = EMPTY([n], dtype, CPU, at + 4096 * rank(), "0").copy_(x)
        x = torch.stack([x, x], 1)[:, 0] if strided else x
        found = REDUCE(x, how, "0")
        exact = torch.stack([p.double() for p in parts]).sum(0)
        rounded = sum(parts[1:], parts[0])
        own = (rounded.double() - exact).abs().max().item() if n else 0.0
        error = (found.double() - exact).abs().max().item() if n else 0.0
        same = found.clone()
        dist.broadcast(same, 0)
        if found.dtype != dtype or found.shape != x.shape or error > 2 * own + 1e-5 or not torch.equal(same, found):
            wrong.append(f"{how} {dtype} {n}: {error} where eager has {own}")
    return wrong


def in_place(how: str) -> tuple[bool, int, bool]:
    """(is what lies in storage read there, not copied? meetings held; is its argument left as it was?)"""
    from reflib.ranks import meeting

    x = EMPTY([64], torch.float32, CPU, 512, "0").fill_(rank() + 1.0)
    s = symmetric.storage("0", CPU)
    s.part(s.rank, s.copied, [64], torch.float32).fill_(-1.0)
    got = [REDUCE(x, how, "0") for _ in range(3)]
    n = dist.get_world_size()
    right = all(torch.equal(g, torch.full((64,), n * (n + 1) / 2)) for g in got)
    copied = s.part(s.rank, s.copied, [64], torch.float32)
    held = meeting._held[dist.group.WORLD].total()
    return right and bool((copied == -1).all()), held, bool((x == rank() + 1.0).all())


def often(how: str, count: int) -> int:
    """Calls one after the other, in the same memory, ranks out of step: how many are wrong."""
    x = EMPTY([5000], torch.float32, CPU, 0, "0")
    rng, n, wrong = random.Random(rank()), dist.get_world_size(), 0
    for i in range(count):
        x.fill_(i + rank())
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.002)
        wrong += not bool((REDUCE(x, how, "0") == n * i + n * (n - 1) / 2).all())
    return wrong


def faulty(how: str) -> Any:
    """The last rank does something else: what all ranks get, and once more."""
    x = torch.ones(64)
    REDUCE(x, "one_shot", "0")

    def go() -> Any:
        if last():
            if how == "late":
                time.sleep(4)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "ctrl-c":  # while it waits for the others
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            if how == "other op":
                return REDUCE(x, "two_shot", "0")
            if how == "other size":
                return REDUCE(torch.ones(65), "one_shot", "0")
            if how == "other product":
                return PRODUCT_SCATTER(torch.ones(2 * dist.get_world_size(), 4), torch.ones(4, 4), "0")
            if how == "other dtype":
                return REDUCE(x.to(torch.bfloat16), "one_shot", "0")
            if how == "nothing":
                return "nothing"
        elif how == "ctrl-c":
            time.sleep(1)
        if how == "raises" and last():
            s = symmetric.storage("0", CPU)
            with s.exchange(x, "one_shot"):
                raise MemoryError("no room")
        return REDUCE(x, "one_shot", "0")

    first = failing(go)
    if isinstance(first, str) and first == "nothing":
        return first, first
    return first, failing(lambda: REDUCE(x, "one_shot", "0"))


def meets_alone() -> Any:
    """The last rank never asks for storage."""
    return "nothing" if last() else failing(lambda: REDUCE(torch.ones(4), "one_shot", "0"))


def no_room(how: str) -> Any:
    """Nothing can be stored; or the last rank cannot open what the first has made."""

    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    kept = symmetric._reserve, os.open
    if how == "full":
        symmetric._reserve = fails
    elif last():
        os.open = fails
    try:
        return failing(lambda: REDUCE(torch.ones(4), "one_shot", "0"))
    finally:
        symmetric._reserve, os.open = kept


def left_over() -> list[str]:
    """Files that storage was made in."""
    made, kept = [], symmetric._created
    symmetric._created = lambda *args: (made.append(kept(*args)), made[-1])[1]  # type: ignore[func-returns-value]
    try:
        REDUCE(torch.ones(4), "one_shot", "0")
    finally:
        symmetric._created = kept
    assert len(made) == (rank() == 0)
    return [path for path in made if os.path.exists(path)]


def through_storage(seed: int, count: int = 12) -> list[str]:
    """Sums of shares and products through storage, at random sizes, dtypes and layouts, in several goes if they are
    large: what is wrong."""
    from reflib.ranks.products import GATHER_PRODUCT, PRODUCT_SCATTER
    from reflib.ranks.reduce import SCATTER

    rng, size, wrong, me = random.Random(seed), dist.get_world_size(), [], rank()
    g = torch.Generator().manual_seed(seed)
    for i in range(count):
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
        m, b, k = rng.choice((1, 3, rng.randrange(1, 40))), rng.randrange(1, 4), rng.choice((0, 1, 8, 40))
        n = rng.choice((1, 5, 40_000 if i % 4 == 3 else 200))
        xs, ys = (torch.randn(size, r, b, k, generator=g).to(dtype) for r in (m, size * m))
        ws = torch.randn(size, k, n, generator=g).to(dtype)
        if i % 2:
            xs, ys = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (xs, ys))
        parts = ys.double() @ ws.double()[:, None]
        mine = parts.sum(0)[m * me : m * me + m]
        made = parts[me].to(dtype)
        if rng.random() < 0.5 and made.nbytes < 1 << 20 and made.numel():
            made = EMPTY([*made.shape], dtype, CPU, 0, "0").copy_(made)
        for what, got, want in (
            ("gather", GATHER_PRODUCT(xs[me], ws[me], "0"), xs.double().flatten(0, 1) @ ws[me].double()),
            ("scatter", PRODUCT_SCATTER(ys[me], ws[me], "0"), mine), ("sums", SCATTER(made, "0"), mine),
        ):  # fmt: skip
            close = torch.allclose(got.double(), want, rtol=0.02, atol=0.5 if dtype == torch.bfloat16 else 1e-3)
            if got.shape != want.shape or got.dtype != dtype or not got.is_contiguous() or not close:
                wrong.append(f"{what} {m} {b} {k} {n} {dtype}")
    return wrong


def in_a_group_of_one() -> list[str]:
    """Which of them are not what this rank has alone."""
    from reflib.ranks.products import GATHER_PRODUCT, PRODUCT_SCATTER
    from reflib.ranks.reduce import SCATTER

    name = [dist.new_group([r]) for r in range(dist.get_world_size())][rank()].group_name
    x, w = torch.randn(4, 3, 5), torch.randn(5, 6)
    found = {
        "gather": (GATHER_PRODUCT(x, w, name), x @ w), "scatter": (PRODUCT_SCATTER(x, w, name), x @ w),
        "sums of shares": (SCATTER(x, name), x), **{h: (REDUCE(x, h, name), x) for h in symmetric.HOW},
    }  # fmt: skip
    return [what for what, (got, want) in found.items() if got.shape != want.shape or not torch.allclose(got, want)]


# -- candidates ---------------------------------------------------------------------------------------------
def calls() -> dict[str, tuple[Any, ...]]:
    """(op, its candidates, arguments) by name. 12 rows on each rank; x is no contiguous tensor."""
    from reflib.ranks import candidates as c

    torch.manual_seed(rank())
    n = dist.get_world_size()
    x, y, w = torch.randn(20, 12).t(), torch.randn(20, 12 * n).t(), torch.randn(20, 7)
    return {
        "all_reduce": (c.all_reduce, [(c.in_storage, {"how": h}) for h in symmetric.HOW], (x, "0")),
        "all_gather_matmul": (c.all_gather_matmul, [(c.gather_in_chunks, {"chunks": k}) for k in (2, 5)]
            + [(c.gather_through_storage, {})], (x, w, "0")),
        "matmul_reduce_scatter": (
            c.matmul_reduce_scatter, [(c.scatter_in_chunks, {"chunks": k}) for k in (2, 5)]
            + [(c.scatter_in_storage, {}), (c.scatter_through_storage, {})], (y, w, "0")
        ),
    }  # fmt: skip


def compiled_candidates() -> list[str]:
    """Each candidate compiled, beside the op in eager; what is wrong."""
    wrong = []
    for name, (op, ways, args) in calls().items():
        expected = op(*args) * 2 + 1
        for way, more in [(op, {}), *ways]:
            torch._dynamo.reset()
            fn = torch.compile(lambda *a, way=way, more=more: way(*a, **more) * 2 + 1, backend="reflib")
            got = fn(*args)
            if got.stride() != expected.stride() or not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
                wrong.append(f"{name} {way} {more}")
    return wrong


def gradients(compiled: bool) -> list[str]:
    """Of the sum of all ranks' losses, which one process can compute: what differs."""
    from reflib.ranks import candidates as c

    n, wrong = dist.get_world_size(), []
    g = torch.Generator().manual_seed(0)
    xs, ys, ws, ks = (torch.randn(n, *s, generator=g) for s in ((4, 3, 6), (2 * n, 6), (6, 5), (4 * n, 3, 5)))
    fns: dict[str, tuple[Any, Any, Any]] = {
        "all_reduce": (xs, lambda x, w: c.all_reduce(x * 2, "0"), lambda r: xs.sum(0) * 2),
        "symmetric": (xs, lambda x, w: REDUCE(x * 2, "two_shot", "0"), lambda r: xs.sum(0) * 2),
    }  # fmt: skip
    for gather in (c.all_gather_matmul, c.gather_through_storage):
        call = lambda x, w, gather=gather: gather(x * 2, w, "0")  # noqa: E731
        fns[f"{gather}"] = xs, call, lambda r: xs.flatten(0, 1) * 2 @ ws[r]
    for scatter in (c.matmul_reduce_scatter, c.scatter_through_storage, c.scatter_in_storage):
        call = lambda x, w, scatter=scatter: scatter(x * 2, w, "0")  # noqa: E731
        whole = lambda r: sum(y * 2 @ w for y, w in zip(ys, ws, strict=True))[2 * r : 2 * r + 2]  # type: ignore  # noqa: E731
        fns[f"{scatter}"] = ys, call, whole
    for name, (of, fn, whole) in fns.items():
        torch._dynamo.reset()
        for t in (of.requires_grad_(), ws.requires_grad_()):
            t.grad = None
        losses = [(whole(r).sin() * ks[r].flatten()[: whole(r).numel()].view_as(whole(r))).sum() for r in range(n)]
        sum(losses).backward()  # type: ignore[union-attr]
        x, w = (t[rank()].detach().clone().requires_grad_() for t in (of, ws))
        out = (torch.compile(fn, backend="reflib") if compiled else fn)(x, w)
        (out.sin() * ks[rank()].flatten()[: out.numel()].view_as(out)).sum().backward()
        for what, mine, all_of in (("x", x.grad, of.grad), ("w", w.grad, ws.grad)):
            want = None if all_of is None else all_of[rank()]
            if not (mine is want is None or mine is not None and torch.allclose(mine, want, rtol=1e-4, atol=1e-4)):
                wrong.append(f"{name}, of {what}: {mine} where {want} is right")
        of.requires_grad_(False), ws.requires_grad_(False)
    return wrong


def tuned_candidates() -> dict[str, tuple[str, dict[str, str]]]:
    """(winner, status by candidate) of each op, tuned."""
    import reflib

    out = {}
    for name, (op, _, args) in calls().items():
        fn = lambda *a, op=op: op(*a[:-1], "0") + 1  # noqa: E731
        e = reflib.explain(fn, *args, autotune="blocking", cache_decisions=False, dynamic=False)
        (d,) = [d for d in e.decisions if name in d.op]
        out[name] = str(d.winner), {r.name: f"{r.status} {r.why if r.status != 'ok' else ''}" for r in d.candidates}
    return out


# -- the plan -----------------------------------------------------------------------------------------------
def planned(wrapper: str, options: dict[str, Any]) -> dict[str, Any]:
    """A program with sums over storage: what it copies in, where its buffers are, whether it is right."""
    from reflib.ranks import reduce
    from reflib.ranks.candidates import by_the_group

    def fn(x: Any, w: Any, add: Any = None) -> Any:
        add = add or (lambda t, how: REDUCE(t, how, "0"))
        a = add(x * 2 + 1, "one_shot")  # of a kernel
        b = add(a @ w, "two_shot")  # of a call
        c = add((b - a).relu(), "one_shot")
        d = c.sin()
        return add(d, "one_shot") + d, d  # (d is a result: it stays outside)

    copied, places = [], []
    kept = symmetric.Storage.exchange, reduce.storage

    def exchange(self: Any, x: torch.Tensor, how: str) -> Any:
        copied.append(self.offset(x) is None)
        places.append(self.offset(x))
        return kept[0](self, x, how)

    symmetric.Storage.exchange = exchange  # type: ignore[method-assign]
    try:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="reflib", options={"wrapper": wrapper, **options}, dynamic=True)
        right = []
        for n in (40, 33, 57, 1100):
            torch.manual_seed(n + rank())
            x, w = torch.randn(n, 24), torch.randn(24, 24) / 5
            got, want = compiled(x, w), fn(x, w, lambda t, how: by_the_group(t, "0"))
            right += [torch.allclose(g, e, rtol=1e-4, atol=1e-4) for g, e in zip(got, want, strict=True)]
    finally:
        symmetric.Storage.exchange = kept[0]  # type: ignore[method-assign]
    return {"right": all(right), "copied": copied, "places": places[:4]}


def random_programs(seed: int, count: int, dynamic: bool = False) -> list[str]:
    """Sums over storage amid other work, views, and writes in place; results that are kept. What differs."""
    import reflib
    from reflib.ranks.candidates import by_the_group

    torch.manual_seed(rank() + 1)
    wrong = []
    for number in range(seed, seed + count):
        rng = random.Random(number)
        count_of = rng.randrange(4, 14)
        steps = [
            (rng.choice("rrrrapmtsixeo"), rng.randrange(i + 1), rng.choice(symmetric.HOW)) for i in range(count_of)
        ]

        def fn(x: Any, w: Any, add: Any, steps: Any = steps) -> Any:
            have, out = [x * 1.5], []
            for what, of, how in steps:
                t, u = have[of], have[-1]
                have.append({
                    "r": lambda: add(t, how) / dist.get_world_size(),  # noqa: B023
                    "a": lambda: t + u.sin(), "p": lambda: (t @ w).relu(), "m": lambda: t * 0.5 - u,  # noqa: B023
                    "t": lambda: t.t().contiguous().t(), "s": lambda: torch.softmax(u, -1),  # noqa: B023
                    "i": lambda: t.clone().add_(u), "x": lambda: t.flip(0), "e": lambda: t[:, :1].expand_as(t),  # noqa: B023
                    "o": lambda: u,  # noqa: B023
                }[what]())  # fmt: skip
                out += [have[-1]] if what == "o" else []
            return [*out, have[-1]]

        torch._dynamo.reset()
        options = rng.choice([{}, {"wrapper": "cpp"}, {"arena": True}, {"wrapper": "cpp", "arena": True}])
        options = {k: v for k, v in options.items() if k in reflib.Options.__dataclass_fields__}
        compiled = torch.compile(fn, backend="reflib", options=options, dynamic=dynamic)
        for n in (rng.randrange(2, 50), rng.randrange(2, 600)) if dynamic else (rng.randrange(2, 200),):
            x, w = torch.randn(n, 24), torch.randn(24, 24) / 5
            for _ in range(2):
                got = compiled(x, w, lambda t, how: REDUCE(t, how, "0"))
                want = fn(x, w, lambda t, how: by_the_group(t, "0"))
                if not all(torch.allclose(g, e, rtol=1e-3, atol=1e-3) for g, e in zip(got, want, strict=True)):
                    wrong.append(f"{number}, {n} rows, {options}: {''.join(s[0] for s in steps)}")
    return wrong


def planned_apart() -> list[bool]:
    """The last rank plans nothing into storage."""
    from reflib.ranks import place

    if last():
        place.BYTES = {}
    torch._dynamo.reset()

    def fn(x: Any) -> Any:
        return REDUCE(REDUCE(x + 1, "one_shot", "0") * 2, "two_shot", "0")

    compiled = torch.compile(fn, backend="reflib", dynamic=True)
    n, out = dist.get_world_size(), []
    for size in (70, 71, 1_000_001):  # (the last: in pieces, where it is copied)
        got = compiled(torch.full([size], float(rank())))
        out.append(torch.equal(got, torch.full([size], float(n * n * (n + 1)))))
    return out
