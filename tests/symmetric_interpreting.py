"""Runs the kernels over symmetric storage in Triton's interpreter, each rank a process, all ranks' memory a file: a
program of its own, because the interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/symmetric_interpreting.py SEED RANKS

Prints what is wrong, a line each.
"""

import contextlib
import os
import random
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from reflib.lab.triton_child import complete_the_interpreter
from reflib.ranks import kernels, products, reduce
from reflib.ranks.symmetric import ALIGN, DTYPES, HOW, _Device

BYTES, GUARD, CALLS = 1 << 16, 64, 20
kernels.MOST, kernels.BYTES, kernels.PULLED = 2, 512, 1024  # several steps of few values
kernels.WORDS, kernels.AREA = 32, 1 << 14


def storage_of(path: str, rank: int, size: int, limit: float) -> Any:
    """What a rank has of ``symmetric._Device``: of streams, one for all, in which all is done at once."""
    first = kernels.front(size)
    each = first + BYTES
    whole = torch.from_file(path, shared=True, size=each * size, dtype=torch.uint8).view(size, each)
    s = object.__new__(_Device)
    s.rank, s.size, s.front, s.limit, s.bytes, s.device = rank, size, first, limit, BYTES, DEVICE
    s.memory, s.peers, s.table = whole[rank], [w[first:] for w in whole], torch.tensor([w.data_ptr() for w in whole])
    s.planned, s.copied, s.sums = (BYTES // 4 * i for i in (0, 2, 3))
    s.side = s.ahead = s.stream = STREAM
    return s


@triton.jit
def send(address, word, flag):
    """What its PTX does."""
    both = (flag.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    tl.store(address.to(tl.pointer_type(tl.int64)), both)


@triton.jit
def took(address, flag, TAKE: tl.constexpr, POLLS: tl.constexpr, WORLD: tl.constexpr):
    found, came = (), address == address
    for rank in tl.static_range(WORLD):
        at = (address + rank * TAKE).to(tl.pointer_type(tl.int64))
        polls, word = 0, tl.load(at)
        while (tl.min(((word >> 32) == flag).to(tl.int32)) == 0) & (polls < POLLS):
            word = tl.load(at)
            polls += 1
        came = came & ((word >> 32) == flag)
        found += (word.to(tl.int32),)
    return (*found, came.to(tl.int32))


@triton.jit
def say(address, said, WORLD: tl.constexpr):
    tl.store(address.to(tl.pointer_type(tl.int64)), said, tl.arange(0, 32) < WORLD)


@triton.jit
def hear(address, POLLS: tl.constexpr):
    at, polls = address.to(tl.pointer_type(tl.int64)), 0
    heard = tl.load(at)
    while (tl.min((heard != 0).to(tl.int32)) == 0) & (polls < POLLS):
        heard = tl.load(at)
        polls += 1
    return heard


kernels.send, kernels.took, kernels.take = send, took, lambda size, slot: slot
kernels.say, kernels.hear = say, hear
DEVICE: Any = SimpleNamespace(type="cuda")
STREAM = SimpleNamespace(wait_stream=id, wait_event=id, record_event=lambda: None)
torch.cuda.current_stream = lambda *_: STREAM  # type: ignore[assignment]
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.stream = torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore


def product_problems(s: Any, rng: random.Random) -> list[str]:
    """Rows in one go, and in several, of random sizes."""
    m, k, n = (rng.randrange(1, 30) for _ in range(3))
    dtype, wrong = rng.choice((torch.float32, torch.float64)), []
    xs, ws = torch.randn(s.size, s.size * m, k, dtype=dtype), torch.randn(s.size, k, n, dtype=dtype)
    if rng.randrange(s.size) == s.rank:
        time.sleep(0.02)
    out = torch.full([s.size, m, n], 77, dtype=dtype)
    for at in (slice(0, m // 2), slice(m // 2, m)):
        products.gather_product(s, xs[s.rank, at].contiguous(), ws[s.rank], out[:, at])
    if not torch.allclose(out, xs[:, :m] @ ws[s.rank], rtol=1e-4, atol=1e-4):
        wrong.append(f"gather and product: rank {s.rank} of {s.size}, {m} {k} {n} {dtype}")
    sums, parts = torch.full([m, n], 77, dtype=dtype), xs[s.rank].unflatten(0, (s.size, m))
    for at in (slice(0, m // 2), slice(m // 2, m)):
        products.product_scatter(s, parts[:, at], ws[s.rank], sums[at])
    if not torch.allclose(sums, (xs @ ws).sum(0).unflatten(0, (s.size, m))[s.rank], rtol=1e-4, atol=1e-4):
        wrong.append(f"product and scatter: rank {s.rank} of {s.size}, {m} {k} {n} {dtype}")
    return wrong


def scatter_problems(s: Any, rng: random.Random) -> list[str]:
    """Shares of rows in pieces."""
    dtype, n, most = rng.choice(DTYPES), rng.randrange(1, 700), rng.randrange(100, 256)
    xs = (torch.randn(s.size, s.size, n, dtype=torch.float64) * 10).to(dtype)
    out = torch.full([n], 77, dtype=dtype)
    mine, places = xs[s.rank], [rng.choice((None, ALIGN * rng.randrange(8))) for _ in range(s.size)]
    if (at := places[s.rank]) is not None:
        mine = s.part(s.rank, at, mine.shape, dtype).copy_(mine)
    for i in range(0, n, most):
        reduce.scatter(s, mine[:, i : i + most], out[i : i + most])
    mine = xs[:, s.rank]
    exact, eager = mine.double().sum(0), sum(mine[1:], mine[0]).double()
    right = (out.double() - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-5
    return [] if right else [f"reduce-scatter: rank {s.rank} of {s.size}, {n} {dtype}"]


def problems(s: Any, rng: random.Random) -> list[str]:
    """One call, the same on all ranks; each has its argument somewhere else."""
    kind = rng.choice((None, None, None, product_problems, scatter_problems))
    if kind is not None:
        return kind(s, rng)
    how, dtype, n = rng.choice(HOW), rng.choice(DTYPES), rng.choice((1, 7, rng.randrange(8, 1500)))
    parts = [(torch.randn(n, dtype=torch.float64) * 10).to(dtype) for _ in range(s.size)]
    places = [ALIGN * rng.randrange(32) if rng.random() < 0.5 else None for _ in parts]
    x, at = parts[s.rank].clone(), places[s.rank]
    if at is not None:
        x = s.part(s.rank, at, [n], dtype).copy_(x)
    out = torch.full([n + 2 * GUARD], 77, dtype=dtype)
    if rng.randrange(s.size) == s.rank and n < 100:
        time.sleep(0.05)
    most = s.most(x)
    for i in range(0, n, most):
        kernels.all_reduce(how, s, x[i : i + most], out[GUARD:-GUARD][i : i + most])
    exact = torch.stack([p.double() for p in parts]).sum(0)
    eager = (sum(parts[1:], parts[0]).double() - exact).abs().max()
    what, wrong = f"rank {s.rank} of {s.size}, {how}, {n} {dtype}, in place {at is not None}", []
    if (out[GUARD:-GUARD].double() - exact).abs().max() > 2 * eager + 1e-5:
        wrong.append(f"the sum: {what}")
    if not bool((torch.cat([out[:GUARD], out[-GUARD:]]) == 77).all()):
        wrong.append(f"a write outside: {what}")
    if not torch.equal(x, parts[s.rank]):
        wrong.append(f"an argument is written to: {what}")
    return wrong


def fault(s: Any) -> list[str]:
    """The last rank sums another number of values: the others' kernels say so."""
    n = 65 if s.rank == s.size - 1 else 64
    try:
        kernels.all_reduce("one_shot", s, torch.ones(n), torch.ones(n))
    except Exception as e:
        return [] if "ranks exchange different things" in f"{e} {e.__cause__}" else [f"another error: {e!r}"]
    return ["different sizes are no error"]


def late(s: Any) -> list[str]:
    """The last rank does not come."""
    if s.rank == s.size - 1:
        return []
    try:
        kernels.all_reduce("two_shot", s, torch.ones(9), torch.ones(9))
    except Exception as e:
        return [] if "did not come" in f"{e} {e.__cause__}" else [f"another error: {e!r}"]
    return ["no rank is missed"]


def one_rank(path: str, rank: int, size: int, seed: int) -> None:
    rng, s = random.Random(seed), storage_of(path, rank, size, 100.0)
    torch.manual_seed(seed)
    found = [text for _ in range(CALLS) for text in problems(s, rng)]
    found += fault(storage_of(f"{path}.fault", rank, size, 100.0))
    kernels.POLLS_PER_SECOND = 100
    print(*found, *late(storage_of(f"{path}.late", rank, size, 1.0)), sep="\n", flush=True)


if __name__ == "__main__":
    from triton.runtime import interpreter

    complete_the_interpreter()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    seed, size = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "memory")
        for name in (path, f"{path}.fault", f"{path}.late"):
            storage_of(name, 0, size, 1.0)  # zeros
        children = []
        for r in range(size):
            children.append(os.fork())
            if children[-1] == 0:
                one_rank(path, r, size, seed)
                os._exit(0)
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) != 0 for c in children))
