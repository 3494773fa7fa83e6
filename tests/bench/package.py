"""Packages: ``python -m tests.bench cpu --only package``. Building, loading, calling, size; on a CPU or a GPU.

Building is timed in fresh processes from the call of ``aot_compile`` on; another model was packaged before it, so that
imports and what a process does once are in no number. Cold: nothing about the block is in a cache. TorchInductor
beside it: ``torch.export`` and ``aoti_compile_and_package``, for the CPU.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reflib.lab.rows import text_table as table
from reflib.timing import synchronize

from . import children
from .host import transformer_block
from .report import Promise, errors, ratio, shown

if TYPE_CHECKING:
    from .__main__ import Bench

SIX = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
US, US_CPU, PEER_CPU = "reflib, six GPUs and PTX", "reflib, cpu", "Inductor AOT, cpu"


def section(bench: Bench) -> None:
    found: dict[str, Any] = {}
    for who in (US, US_CPU, PEER_CPU):
        with children.fresh_caches() as caches:
            caches["CUDA_VISIBLE_DEVICES"] = ""  # as on a machine without a GPU
            for temperature in ("cold", "warm") if who != PEER_CPU else ("cold",):
                found[f"{who}, {temperature}"] = bench.one("package.build", 300, caches, who=who)
        print(f"{who}: {found}", flush=True)
    with children.fresh_caches() as caches:
        calls = bench.one("package.calls", 200, caches)
    rows = [[who, *shown(f, "seconds", "ratio")] for who, f in found.items()]
    text = table(["a transformer block", "seconds", "file, without weights, over the machine code"], rows)
    lines = [text, *errors({**found, "calls": calls})]
    lines += [f"  {k}: {v:.3f}" for k, v in calls.items() if isinstance(v, float)]
    bench.keep("package", {"builds": found, "calls": calls}, promises(found, calls), "\n".join(lines))


def promises(found: dict[str, Any], calls: dict[str, Any]) -> list[Promise]:
    cold, warm = found[f"{US}, cold"], found[f"{US}, warm"]
    build = ratio(found[f"{US_CPU}, cold"].get("seconds"), found[f"{PEER_CPU}, cold"].get("seconds"))
    return [
        Promise("six architectures and PTX, cold, s", cold.get("seconds"), "<=", 60),
        Promise("the same, warm, s", warm.get("seconds"), "<=", 3),
        Promise("for a CPU, cold, over Inductor's AOT", build, "<=", 0.5),
        Promise("the file, without weights, over the machine code", warm.get("ratio"), "<=", 1.3),
        Promise("loading, weights aside, ms", calls.get("load, ms"), "<=", 50),
        Promise("a first call over a later one, ms", calls.get("first call, ms"), "<=", 20),
        Promise("a call over that of the C++ wrapper without Dynamo",
                ratio(calls.get("package"), calls.get("exported")), "<=", 1.05),
    ]  # fmt: skip


# -- in the child --------------------------------------------------------------------------------------
def build(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import reflib
    from reflib.package import archive, manifest

    torch.set_num_threads(job["threads"])
    cpu = torch.device("cpu")
    net, x = transformer_block(cpu)
    net.eval()
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Softmax(-1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.reflib")
        if job["who"] == PEER_CPU:
            _theirs(other, torch.randn(2, 3), Path(folder, "other.pt2"))
            start = time.perf_counter()
            _theirs(net, x, Path(folder, "model.pt2"))
            yield {"seconds": time.perf_counter() - start}
            return
        archs = SIX if job["who"] == US else ["cpu"]
        reflib.aot_compile(other, (torch.randn(2, 3),), path, archs)
        start = time.perf_counter()
        reflib.aot_compile(net, (x,), path, archs)
        seconds = time.perf_counter() - start
        file = archive.open(path)
        m = manifest.read(file.manifest)
        code = sum(k.bytes for a in m.variants if a.arch != "ptx" for k in a.kernels)
        weights = sum(e.size for e in m.entries if e.name.startswith("weights"))
        size = os.path.getsize(path) - weights
        yield {"seconds": seconds, "ratio": size / code if code else None, "bytes": size, "machine code": code}


def _theirs(net: Any, x: torch.Tensor, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        aoti_compile_and_package(torch.export.export(net, (x,)), package_path=str(path))


def calls(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a loaded package, and of the same program compiled here. ms to load and to call first; µs per call."""
    import reflib

    device = torch.device(job["device"])
    torch.set_num_threads(job["threads"])

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + w)

    args = tuple(torch.randn(64, 64, device=device) for _ in range(2))
    net, x = transformer_block(device)
    net.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        small = reflib.aot_compile(Small(), args, Path(folder, "small.reflib"), "native")
        block = reflib.aot_compile(net, (x,), Path(folder, "block.reflib"), "native")
        first = reflib.load(small)
        first(*args)
        net(x)
        synchronize(device)
        loads = [_milliseconds(lambda: reflib.load(block, verify="code"), device) for _ in range(7)]
        f = reflib.load(block)
        early = _milliseconds(lambda: f(x), device)
        later = statistics.median(_milliseconds(lambda: f(x), device) for _ in range(20))
        here = reflib.compile(torch.export.export(Small(), args), wrapper="cpp")
        us: dict[str, list[float]] = {"package": [], "exported": []}
        for _ in range(60):
            for name, g in (("package", first), ("exported", here)):
                us[name].append(_milliseconds(lambda g=g: [g(*args) for _ in range(200)], device) * 1e3 / 200)
    medians = {k: statistics.median(v) for k, v in us.items()}
    yield {"load, ms": statistics.median(loads), "first call, ms": early - later, "a later call, ms": later, **medians}


def _milliseconds(f: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    f()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3
