"""What a call costs on the host: ``python -m tests.bench cpu --only host``. Each contender in a process of its own.

Kernels are so small that the host's work is the time: microseconds per call by the wall clock, calls in a row,
waiting for the device at the end. ``launch`` and ``ATen call``: what each of 15 more adds to a program with one.
``a user's launch more``: one that a program makes of a Triton kernel of its own. With ``--match WORD,...``: programs
with one of these in their name, by the contenders of the promises on users' kernels and recorded calls alone.
All compile a program side by side; then they measure it in turns, one at a time, a few turns each, so that a slow
moment of the machine does not fall on one alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reflib.lab.rows import text_table as table
from reflib.timing import synchronize
from tests.models import Block

from . import children
from .report import Promise, errors, ratio, shown

if TYPE_CHECKING:
    from .__main__ import Bench

EAGER, PYTHON, CPP, DYNAMO, EXPORTED = "eager", "python", "cpp", "cpp, torch.compile", "cpp, exported"
PEER, PEER_CPP, PEER_GRAPHS, GRAPHS = "Inductor", "Inductor cpp", "Inductor graphs", "graphs"
PYTHON_DYNAMO, GRAPHS_DYNAMO = "python, torch.compile", "graphs, torch.compile"
ONE, SIXTEEN, SINGLE = "relu(x + w)", "16 x relu(x @ w)", "1 x relu(x @ w)"
SORT, SORTS = "1 x sort", "16 x sort"
USER, USERS = "1 x a user's kernel", "16 x a user's kernel"  # on a GPU, where relu(x @ w) is one kernel as well
PROGRAMS = (ONE, SIXTEEN, SINGLE, SORT, SORTS)
ALONE = f"{SIXTEEN}, the host alone"  # until the call returns, with nothing in the device's queue before it
EXTRA = 15
TURNS, ROUNDS = 3, 7  # each contender's turns at a program; samples a turn


def section(bench: Bench) -> None:
    contenders = [CPP, PEER_CPP, EXPORTED, EAGER, DYNAMO, PYTHON, PEER]
    contenders += [GRAPHS, GRAPHS_DYNAMO, PYTHON_DYNAMO, PEER_GRAPHS] if bench.device == "cuda" else []
    among = [*PROGRAMS, *([USER, USERS] if bench.device == "cuda" else [])]
    if bench.match:
        among = [p for p in among if any(w in p for w in bench.match)]
        contenders = [c for c in contenders if c not in (EXPORTED, DYNAMO, PEER, PEER_CPP)]
    found = all_calls(bench, contenders, among)
    us = {who: f.get("us", {}) for who, f in found.items()}
    names = list(dict.fromkeys(c for by in us.values() for c in by))
    body = [[c, *(f"{us[w][c]:.1f}" if us[w].get(c) else "-" for w in contenders)] for c in names]
    more = (
        ("a launch more", SINGLE, SIXTEEN),
        ("an ATen call more", SORT, SORTS),
        ("a user's launch more", USER, USERS),
    )
    for what, one, many in more:
        body.append([what, *(f"{x:.2f}" if (x := extra(us[w], one, many)) is not None else "-" for w in contenders)])
    lines = [table(["host, µs per call", *contenders], body), *errors(found)]
    lines += [f"  {w}, {c}: {note}" for w, f in found.items() for c, note in f.get("notes", {}).items()]
    builds, text = build_times(bench)
    bench.keep("host", {"calls": found, "builds": builds}, promises(bench, us, builds), "\n".join([*lines, text]))


def all_calls(bench: Bench, contenders: Sequence[str], among: Sequence[str]) -> dict[str, Any]:
    """What each found of the programs ``among``. A process that ends early, or never gets ready, holds up none beyond
    its time limit."""

    def one(who: str) -> dict[str, Any]:
        with children.fresh_caches() as caches:
            return bench.one("host.calls", 400, caches, who=who, turns=folder, among=among)

    with tempfile.TemporaryDirectory(prefix="reflib-turns-") as folder, ThreadPoolExecutor(len(contenders)) as pool:
        running = {who: pool.submit(one, who) for who in contenders}
        for at, case in enumerate(among):
            for who, child in running.items():
                wait_for(_flag(folder, who, at, "ready"), child)
            for turn in range(TURNS):
                for who, child in running.items():
                    _flag(folder, who, at, turn).touch()
                    wait_for(_flag(folder, who, at, f"{turn} done"), child)
            print(f"host: {case} is measured", flush=True)
        return {who: child.result() for who, child in running.items()}


def wait_for(flag: Path, child: Future[Any] | None = None) -> None:
    while not flag.exists() and not (child and child.done()):
        time.sleep(0.01)


def _flag(folder: str, who: str, program: int, what: int | str) -> Path:
    return Path(folder, f"{who}, {program}, {what}")


def extra(us: dict[str, float | None], one: str, many: str) -> float | None:
    """Microseconds that each of the 15 more steps adds."""
    a, b = us.get(one), us.get(many)
    return (b - a) / EXTRA if a and b else None


def build_times(bench: Bench) -> tuple[dict[str, Any], str]:
    """A transformer block's first forward and backward from nothing, in both wrappers, ours and theirs."""
    found: dict[str, Any] = {who: {} for who in (PYTHON, CPP, PEER, PEER_CPP)}
    for who in [] if bench.quick else found:
        with children.fresh_caches() as caches:
            found[who] = bench.one("host.wrapper_build", 240, caches, who=who)
    rows = [[who, *shown(f, "first", "wrapper")] for who, f in found.items()]
    text = table(["a transformer block, cold", "first step, s", "of it building the wrapper, s"], rows)
    return found, "\n".join([text, *errors(found)])


def promises(bench: Bench, us: dict[str, dict[str, Any]], builds: dict[str, Any]) -> list[Promise]:
    def time(who: str, case: str) -> float | None:
        return us.get(who, {}).get(case)

    def against(case: str, who: str = CPP) -> float | None:
        return ratio(time(who, case), time(PEER_CPP, case))

    call, eagers = extra(us[CPP], SORT, SORTS), extra(us[EAGER], SORT, SORTS)
    build = builds[CPP].get("wrapper")
    return [
        Promise(f"{ONE}: reflib cpp over Inductor cpp", against(ONE), "<=", 0.6),
        Promise(f"{ONE}: the same through torch.compile", against(ONE, DYNAMO), "<=", 0.6),
        Promise(f"{SIXTEEN}: reflib cpp over Inductor cpp", against(SIXTEEN), "<=", 0.5),
        Promise(f"{ONE} without Dynamo, µs", time(EXPORTED, ONE), "<=", 6),
        Promise("a launch more, µs", extra(us[CPP], SINGLE, SIXTEEN), "<=", 2.5),
        Promise("an ATen call more, over eager's own", ratio(call, eagers), "<=", 1.3),
        Promise("the wrapper of a transformer block, s", build, "<=", 2),
        Promise("the same over Inductor's cold build", ratio(build, builds[PEER_CPP].get("first")), "<=", 0.1),
        *(on_gpu(us) if GRAPHS in us else []),
    ]


def on_gpu(us: dict[str, dict[str, Any]]) -> list[Promise]:
    """Users' kernels, each beside one of ours; recorded calls. There the plain wrapper is in Python, and is called as
    the recorded one is: by ``reflib.compile``, or through Dynamo's own wrapper, which TorchInductor's needs too."""

    def over(ours: str, theirs: str) -> float | None:
        return ratio(us[ours].get(ALONE), us[theirs].get(ALONE))

    launch = {who: (extra(us[who], USER, USERS), extra(us[who], SINGLE, SIXTEEN)) for who in (PYTHON, CPP)}
    return [
        *(Promise(f"{who}: a user's launch more, over one of ours", ratio(*l), "<=", 1.0) for who, l in launch.items()),
        Promise(f"{ALONE}: graphs over the plain wrapper", over(GRAPHS, PYTHON), "<=", 0.25),
        Promise("the same through torch.compile", over(GRAPHS_DYNAMO, PYTHON_DYNAMO), "<=", 0.25),
        Promise("graphs over Inductor graphs, through torch.compile", over(GRAPHS_DYNAMO, PEER_GRAPHS), "<=", 1.0),
    ]


# -- in the child --------------------------------------------------------------------------------------
def programs(device: torch.device) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    small = [torch.randn(64, 64, device=device) / 8 for _ in range(16)]

    def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.relu(x @ w)
        return x

    def sorts(n: int) -> Callable[..., Any]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(n):
                x = torch.sort(x, dim=0, stable=True).values
            return x

        return fn

    x, y = torch.zeros(8, 8, device=device), torch.randn(8, 64, device=device)
    users = {}
    if device.type == "cuda":
        from tests import user_kernels

        users = {USER: (user_kernels.layers, [y, small[0]]), USERS: (user_kernels.layers, [y, *small])}
    return users | {
        ONE: (lambda x, w: torch.relu(x + w), [torch.randn(64, 64, device=device), small[0]]),
        SIXTEEN: (layers, [y, *small]), SINGLE: (layers, [y, small[0]]), SORT: (sorts(1), [x]), SORTS: (sorts(16), [x]),
    }  # fmt: skip


def ready(who: str, fn: Callable[..., Any], args: list[torch.Tensor]) -> Callable[..., Any]:
    import reflib

    if who == EAGER:
        return fn
    if who == EXPORTED:
        from tests.exporting import Alone

        return reflib.compile(torch.export.export(Alone(fn), tuple(args)), wrapper="cpp")
    if who == DYNAMO:
        return torch.compile(fn, backend="reflib", options={"wrapper": "cpp"}, dynamic=False)
    if who in (PYTHON, CPP):
        return reflib.compile(fn, wrapper=who, dynamic=False)
    if who == GRAPHS:
        return reflib.compile(fn, mode="reduce-overhead", dynamic=False)
    if who in (GRAPHS_DYNAMO, PYTHON_DYNAMO):
        mode = "reduce-overhead" if who == GRAPHS_DYNAMO else None
        return torch.compile(fn, backend="reflib", mode=mode, dynamic=False)
    theirs(who)
    return torch.compile(fn, dynamic=False, mode="reduce-overhead" if who == PEER_GRAPHS else None)


def theirs(who: str) -> None:
    import torch._inductor.config as config

    config.cpp_wrapper = who == PEER_CPP


def transformer_block(device: torch.device) -> tuple[torch.nn.Module, torch.Tensor]:
    """A transformer block and its input; sizes by device."""
    torch.manual_seed(0)
    width, heads, batch, length = (768, 12, 8, 512) if device.type == "cuda" else (256, 8, 4, 128)
    return Block(width, heads).to(device), torch.randn(batch, length, width, device=device)


def calls(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    device, who = torch.device(job["device"]), job["who"]
    torch.set_num_threads(1)
    us: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    known = programs(device)
    with torch.no_grad():
        for at, name in enumerate(job["among"]):
            fn, args = known[name]
            torch._dynamo.reset()
            samples: list[float] = []
            alone: list[float] = []
            f = None
            try:
                f = ready(who, fn, args)
                torch.testing.assert_close(f(*args), fn(*args), rtol=1e-3, atol=1e-3)
            except Exception as error:
                notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
            _flag(job["turns"], who, at, "ready").touch()
            for turn in range(TURNS):
                wait_for(_flag(job["turns"], who, at, turn))
                if name not in notes:
                    samples += microseconds(f, args, device)
                    alone += host_alone(f, args, device) if name == SIXTEEN else []
                _flag(job["turns"], who, at, f"{turn} done").touch()
            us[name] = statistics.median(samples) if samples else None
            us |= {ALONE: statistics.median(alone)} if alone else {}
    yield {"us": us, "notes": notes}


def microseconds(f: Callable[..., Any], args: list[torch.Tensor], device: torch.device) -> list[float]:
    """A call's: rounds of a hundred or more in a row."""

    def sample(n: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(n):
            f(*args)
        synchronize(device)
        return (time.perf_counter() - start) / n * 1e6

    sample(30)
    n = max(100, int(0.02e6 / sample(50)))
    return [sample(n) for _ in range(ROUNDS)]


def host_alone(f: Callable[..., Any], args: list[torch.Tensor], device: torch.device) -> list[float]:
    out = []
    for _ in range(100):
        synchronize(device)
        start = time.perf_counter()
        f(*args)
        out.append((time.perf_counter() - start) * 1e6)
    return out


def wrapper_build(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds to the first step; for reflib also what its C++ alone takes, with nothing in the caches."""
    from reflib import cache
    from reflib.options import Options
    from reflib.pipeline import Backend

    device, who = torch.device(job["device"]), job["who"]
    torch.set_num_threads(job["threads"])
    net, x = transformer_block(device)
    net(x).sum().backward()
    synchronize(device)
    stages: list[Any] = []
    start = time.perf_counter()
    if who in (PYTHON, CPP):
        compiled = torch.compile(net, backend=Backend(Options(wrapper=who), stages.append), dynamic=False)
    else:
        theirs(who)
        compiled = torch.compile(net, dynamic=False)
    compiled(x).sum().backward()
    synchronize(device)
    found = {"first": time.perf_counter() - start}
    if who == CPP:
        from reflib.wrap import host, native

        with tempfile.TemporaryDirectory() as folder:
            before, cache.root = cache.root, lambda: Path(folder)
            try:
                start = time.perf_counter()
                native.build_host()
                for s in stages:
                    host.compile_wrapper(s.wrapper)
                found["wrapper"] = time.perf_counter() - start
            finally:
                cache.root = before
    yield found
