"""Build and open packages, each in a separate process: `build_packages`, `open_packages`.

A build starts with empty caches (unless REFLIB_LAB_BUDGET is below 1), so that its time includes all compiling. A
package is opened in a fresh process, as when a service starts; a crash becomes a labelled row. This module is the child
process too.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reflib.lab.children import Failure, Job, run_all, serve
from reflib.lab.measuring import failed_rows, share
from reflib.lab.rows import Row, Rows, record, stamp
from reflib.lab.way_sweep import start_rows, start_up

CHILD, SOURCE = "reflib.lab.package_ways", "package_model.py"


def build_packages(
    name: str, source: str, ways: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 120.0
) -> Rows:
    """Two rows per file of each way: "build" (seconds from the model in memory to the file, without imports) and "size"
    (bytes); `at` is its number of architectures.

    `source` is Python text which defines `make(device, dtype)`, returning a module and its arguments. A way is a dict:
    `compiler`: "reflib" or "AOTInductor"; `files`: {path: architectures}, built in this order in one process, so later
    ones reuse cached kernels; `device`: that of the model (default "cpu"); `environment`: set before torch is imported;
    `config`: options of TorchInductor.
    `timeout_s` applies per way; files not reached in time are rows with that status. Where there are four cores or more
    per way, ways are built side by side.
    """
    rows: list[Row] = []
    jobs = [{**_job(w, w.get("device", "cpu")), "files": list(w["files"].items())} for w in ways.values()]
    outcomes = run_all(CHILD, jobs, {SOURCE: source}, timeout_s, cold=share() >= 1, in_turn=False)
    for (label, way), (found, why) in zip(ways.items(), outcomes, strict=True):
        places: list[tuple[str, Sequence[str]]] = list(way["files"].items())
        for (_, archs), one in zip(places, found + [why] * (len(places) - len(found)), strict=True):
            gpus = sum(a != "cpu" for a in archs)  # architectures with machine code for a GPU
            rows += _built_rows(one, {"name": name, "case": label, "at": {"architectures": gpus}, **stamp()})
    return record(rows)


def open_packages(
    name: str, source: str, ways: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 60.0, budget_s: float = 0.2
) -> Rows:
    """Three rows per way, on the notebook's device: "load" (seconds), "first call" (seconds from the file to the first
    result, loading included) and "time" (µs per later call, wall clock around a loop of calls).

    A way is a dict: `compiler`, as above; `path`: the package; `environment`; `loader`: for AOTInductor, "package" (the
    usual way), "one thread" (without locks between threads) or "C++" (without what Python adds). The device is
    initialized and eager has run before the timing. A package that cannot be opened or crashes is a row with that
    status.
    """
    from reflib.lab.session import current

    rows: list[Row] = []
    device = str(current().device)
    jobs = [{**_job(way, device), "path": str(way["path"]), "budget_s": budget_s} for way in ways.values()]
    for label, (found, why) in zip(ways, run_all(CHILD, jobs, {SOURCE: source}, timeout_s), strict=True):
        one, shared = (*found, why)[0], {"name": name, "case": label, **stamp()}
        first, *others = start_rows(one, shared)
        rows += [] if isinstance(one, Failure) else [replace(first, metric="load", value=one["made"])]
        rows += [first, *others]
    return record(rows)


def _job(way: Mapping[str, Any], device: str) -> Job:
    from reflib.lab.session import current

    return {
        "compiler": way["compiler"], "environment": dict(way.get("environment", {})),
        "config": dict(way.get("config", {})), "loader": way.get("loader", "package"),
        "here": {**current().arguments(), "device": device},
    }  # fmt: skip


def _built_rows(found: Job | Failure, shared: Mapping[str, Any]) -> list[Row]:
    if isinstance(found, Failure):
        return failed_rows(found, shared)
    return [
        Row(metric="build", value=found["seconds"], unit="s", clock="wall", **shared),
        Row(metric="size", value=float(found["bytes"]), unit="bytes", **shared),
    ]


# -- the child process ------------------------------------------------------------------------------
def tasks(job: Job) -> Iterator[Any]:
    if "path" in job:
        return iter([partial(opened, job)])
    return (partial(built, job, path, archs) for path, archs in job["files"])


def model_of(job: Job) -> tuple[Any, tuple[Any, ...], Any]:
    from reflib.lab import session

    here = session.setup(**job["here"], quiet=True)
    model, args = importlib.import_module("package_model").make(device=here.device, dtype=here.dtype)
    return model, tuple(args), here.device


def built(job: Job, path: str, archs: Sequence[str]) -> Job:
    import torch

    make = MAKERS[job["compiler"]](job)
    model, args, _ = model_of(job)
    with torch.no_grad():
        begin = time.perf_counter()
        make(model, args, path, archs)
        return {"seconds": time.perf_counter() - begin, "bytes": os.path.getsize(path)}


def opened(job: Job) -> Job:
    import torch

    load = LOADERS[job["compiler"]](job)
    model, args, device = model_of(job)
    with torch.no_grad():
        return start_up(lambda: load(job["path"]), args, model(*args), job["budget_s"], device)


def reflib_maker(job: Job) -> Callable[..., None]:
    import reflib.aot

    def make(model: Any, args: Any, path: str, archs: Sequence[str]) -> None:
        reflib.aot.aot_compile(model, args, path, archs)

    return make


def inductor_maker(job: Job) -> Callable[..., None]:
    import torch
    import torch._inductor.compile_fx

    def make(model: Any, args: Any, path: str, archs: Sequence[str]) -> None:
        exported, config = torch.export.export(model, args), dict(job["config"])
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=config)

    return make


def reflib_loader(job: Job) -> Callable[[str], Any]:
    import reflib.package.load
    import reflib.wrap.host

    reflib.wrap.host.extension()  # compiled once per machine
    return lambda path: reflib.package.load.load(path)


def inductor_loader(job: Job) -> Callable[[str], Any]:
    import torch
    import torch._inductor.package

    if job["loader"] == "C++":
        return cpp_loaded
    one_thread = job["loader"] == "one thread"
    return lambda path: torch._inductor.aoti_load_package(path, run_single_threaded=one_thread)


def cpp_loaded(path: str) -> Any:
    """The package through AOTInductor's loader in C++: flat lists of tensors in and out, no pytrees."""
    import torch

    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)

    def call(*args: Any) -> Any:
        (result,) = loader.boxed_run(list(args))
        return result

    return call


MAKERS = {"reflib": reflib_maker, "AOTInductor": inductor_maker}
LOADERS = {"reflib": reflib_loader, "AOTInductor": inductor_loader}

if __name__ == "__main__":
    serve(tasks)
