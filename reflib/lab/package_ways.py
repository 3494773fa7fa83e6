"""Build and open packages, each in a separate process: `build_packages`, `open_packages`.

A build starts with empty caches, so that its time includes all compiling. A package is opened in a fresh process, as
when a service starts; a crash becomes a labelled row. ``python -m reflib.lab.package_ways FOLDER`` is the child.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reflib.lab.cold_child import own_caches
from reflib.lab.peers import Failure
from reflib.lab.rows import Row, Rows, append, stamp
from reflib.lab.way_sweep import failed_rows, outcomes_of, start_rows, start_up

CHILD = "reflib.lab.package_ways"


def build_packages(
    name: str, source: str, ways: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 120.0
) -> Rows:
    """Two rows per file of each way: "build" (seconds from the model in memory to the file, without imports) and "size"
    (bytes); `at` is its number of architectures.

    `source` is Python text which defines `make(device, dtype)`, returning a module and its arguments. A way is a dict:
    `compiler`: "reflib" or "AOTInductor"; `files`: {path: architectures}, built in this order in one process, so later
    ones reuse cached kernels; `device`: that of the model (default "cpu"); `environment`: set before torch is imported;
    `config`: options of TorchInductor.
    `timeout_s` applies per way; files not reached in time are rows with that status.
    """
    rows: list[Row] = []
    for label, way in ways.items():
        places: list[tuple[str, Sequence[str]]] = list(way["files"].items())
        found = _outcomes({**_job(way, way.get("device", "cpu")), "files": places}, source, len(places), timeout_s)
        for (_, archs), one in zip(places, found, strict=True):
            shared = {"name": name, "case": label, "at": {"architectures": _gpus(archs)}, **stamp()}
            rows += _built_rows(one, shared)
    append({"kind": "row", **row.to_data()} for row in rows)
    return Rows(rows)


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
    for label, way in ways.items():
        job = {**_job(way, str(current().device)), "path": str(way["path"]), "budget_s": budget_s}
        (one,) = _outcomes(job, source, 1, timeout_s)
        rows += _opened_rows(one, {"name": name, "case": label, **stamp()})
    append({"kind": "row", **row.to_data()} for row in rows)
    return Rows(rows)


def _job(way: Mapping[str, Any], device: str) -> dict[str, Any]:
    from reflib.lab.session import current

    here = current()
    return {
        "compiler": way["compiler"], "environment": dict(way.get("environment", {})), "device": device,
        "dtype": str(here.dtype).removeprefix("torch."), "seed": here.seed,
        "config": dict(way.get("config", {})), "loader": way.get("loader", "package"),
    }  # fmt: skip


def _gpus(archs: Sequence[str]) -> int:
    """Number of GPU architectures with machine code."""
    return sum(a != "cpu" for a in archs)


def _outcomes(job: dict[str, Any], source: str, count: int, timeout_s: float) -> list[dict[str, Any] | Failure]:
    return outcomes_of(CHILD, job, {"package_model.py": source}, count, timeout_s)


def _built_rows(found: dict[str, Any] | Failure, shared: Mapping[str, Any]) -> list[Row]:
    if isinstance(found, Failure):
        return failed_rows(found, shared)
    return [
        Row(metric="build", value=found["seconds"], unit="s", clock="wall", **shared),
        Row(metric="size", value=float(found["bytes"]), unit="bytes", **shared),
    ]


def _opened_rows(found: dict[str, Any] | Failure, shared: Mapping[str, Any]) -> list[Row]:
    if isinstance(found, Failure):
        return failed_rows(found, shared)
    first, warm = start_rows(found, shared)
    return [replace(first, metric="load", value=found["made"]), first, warm]


# -- the child process ------------------------------------------------------------------------------
def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if "files" in job:
        own_caches(Path(job["caches"]))
    os.environ.update(job["environment"])
    sys.path.insert(0, str(folder))
    from reflib.lab.peer_child import refusal

    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:

        def tried(work: Callable[[], dict[str, Any]]) -> None:
            try:
                result = work()
            except Exception as error:
                result = refusal(error)
            file.write(json.dumps(result) + "\n")
            file.flush()

        if "files" not in job:
            tried(lambda: opened(job))
        for path, archs in job.get("files", ()):
            tried(lambda path=path, archs=archs: built(job, path, archs))  # type: ignore[misc]


def model_of(job: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    import importlib

    import torch

    from reflib.lab import session

    here = session.setup(device=job["device"].split(":")[0], dtype=job["dtype"], seed=job["seed"], quiet=True)
    device = torch.device(job["device"])
    model, args = importlib.import_module("package_model").make(device=device, dtype=here.dtype)
    return model, tuple(args), device


def built(job: Mapping[str, Any], path: str, archs: Sequence[str]) -> dict[str, Any]:
    import torch

    make = MAKERS[job["compiler"]](job)
    model, args, _ = model_of(job)
    with torch.no_grad():
        begin = time.perf_counter()
        make(model, args, path, archs)
        return {"seconds": time.perf_counter() - begin, "bytes": os.path.getsize(path)}


def opened(job: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    load = LOADERS[job["compiler"]](job)
    model, args, device = model_of(job)
    with torch.no_grad():
        return start_up(lambda: load(job["path"]), args, model(*args), job["budget_s"], device)


def reflib_maker(job: Mapping[str, Any]) -> Callable[..., None]:
    import reflib.aot

    def make(model: Any, args: Any, path: str, archs: Sequence[str]) -> None:
        reflib.aot.aot_compile(model, args, path, archs)

    return make


def inductor_maker(job: Mapping[str, Any]) -> Callable[..., None]:
    import torch
    import torch._inductor.compile_fx

    def make(model: Any, args: Any, path: str, archs: Sequence[str]) -> None:
        exported, config = torch.export.export(model, args), dict(job["config"])
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=config)

    return make


def reflib_loader(job: Mapping[str, Any]) -> Callable[[str], Any]:
    import reflib.package.load
    import reflib.wrap.host

    reflib.wrap.host.extension()  # compiled once per machine
    return lambda path: reflib.package.load.load(path)


def inductor_loader(job: Mapping[str, Any]) -> Callable[[str], Any]:
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
    main(Path(sys.argv[1]))
