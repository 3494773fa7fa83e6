"""Finds notebooks and their parameters; `record` (`make record`) writes the committed outputs.

`record` calls `execute_all`: each notebook runs in a separate process (executing.py) and a scratch folder, with rows
and claims collected through REFLIB_LAB_ROWS. There is one result per notebook, and a failure does not stop the others.
Nothing else writes under notebooks/. Parallel recordings share only the file `recorded/seconds.tsv`. `reflib.batch`
executes notebooks for readers and writes elsewhere.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab import durations, machine
from reflib.lab import notebook as nb
from reflib.lab import recording as recordings
from reflib.lab.executing import NotebookResult, ended_by_sigterm, execute, last_line
from reflib.lab.params import Parameter, check_value, parse_parameters

ROOT = machine.ROOT

Jobs = dict[Path, dict[str, Any]]  # each notebook to execute, with its parameters


# ---- which notebooks, with which parameters


def notebooks(root: Path = ROOT, only: Sequence[str] = ()) -> list[Path]:
    """The chapters in the book's order, then notebooks that are not in the book; `only` selects by slug."""
    import yaml

    listed: list[str] = []
    toc = root / "book" / "_toc.yml"
    if toc.exists():
        listed = re.findall(r"notebooks/([\w-]+)", json.dumps(yaml.safe_load(toc.read_text())))
    there = {p.stem: p for p in sorted((root / "notebooks").glob("*.ipynb"))}
    ordered = [there[s] for s in listed if s in there] + [p for s, p in there.items() if s not in listed]
    unknown = [s for s in only if s not in there]
    if unknown:
        there_are = ", ".join(p.stem for p in ordered)
        raise LabError(f"no notebook named {', '.join(unknown)}; there are: {there_are}")
    return [p for p in ordered if not only or p.stem in only]


def declared_parameters(path: Path) -> dict[str, dict[str, Any]]:
    """The names in a notebook's `parameters` cell, with type, default and help as papermill infers them."""
    import papermill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(papermill.inspect_notebook(str(path)))


def parameters_of(notebook: nb.Notebook) -> dict[str, Parameter]:
    """The parameters of a notebook: those of the cell tagged `parameters`, by the grammar of params.py.

    From a cell that does not follow it (`n = 4` in a user's notebook), names of type "any". LabError on bad syntax.
    """
    for cell in notebook.cells:
        if cell.cell_type != "code" or "parameters" not in cell.metadata.get("tags", []):
            continue
        try:
            lines = ast.parse(cell.source).body
        except SyntaxError as error:
            raise LabError(f"its parameters cell is no Python: line {error.lineno}: {error.msg}") from None
        try:
            return {p.name: p for p in parse_parameters(cell.source)}
        except (LabError, ValueError):
            targets = [target for line in lines for target in getattr(line, "targets", [getattr(line, "target", None)])]
            return {t.id: Parameter(t.id, "any", None, "") for t in targets if isinstance(t, ast.Name)}
    return {}


def fit(parameter: Parameter, value: Any) -> Any:
    """A value from a command line or a sweep file, converted to the declared type. LabError outside the domain."""
    name, declared = parameter.name, parameter.type
    given = value
    if isinstance(value, str) and declared != "str":
        with contextlib.suppress(ValueError):
            value = float(value) if declared == "float" else yaml_scalar(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {"int": isinstance(value, int) and number, "float": number, "bool": isinstance(value, bool)}
    if not fits.get(declared, True):
        raise LabError(f"parameter {name}={given}: the notebook declares it {declared}")
    if declared == "any":
        return value
    return check_value(parameter, float(value) if declared == "float" else value)


def yaml_scalar(text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float) else text


def parameters_for(paths: Iterable[Path], given: Mapping[str, str], device: str) -> Jobs:
    """The parameters of each notebook. LabError for a name that no notebook declares."""
    declared = {path: parameters_of(nb.read(path)) for path in paths}
    every = sorted({name for names in declared.values() for name in names})
    for name in given:
        if name not in every:
            raise LabError(f"no notebook of this run has a parameter {name!r}; they have: {', '.join(every)}")
    chosen: Jobs = {}
    for path, names in declared.items():
        chosen[path] = {name: fit(names[name], text) for name, text in given.items() if name in names}
        if "device" in names:
            chosen[path].setdefault("device", device)
    return chosen


def jobs_of(root: Path, only: Sequence[str], given: Mapping[str, str] | None, device: str) -> Jobs:
    """The notebooks and parameters for `record`. LabError if there are none."""
    jobs = parameters_for(notebooks(root, only), given or {}, device)
    if not jobs:
        raise LabError(f"no notebooks in {shown(root / 'notebooks')}")
    return jobs


def slug_of(device: str) -> str:
    """The device's name in recordings: 'h200' for an 'NVIDIA H200', 'cpu' for any CPU."""
    return "cpu" if device == "cpu" else machine.gpu_slug(name_of(device))


def name_of(device: str) -> str:
    """The device's full name: 'NVIDIA H200'."""
    return machine.describe(machine.pick_device(device)).name


# ---- executing


def new_folder(parent: Path, name: str) -> Path:
    """Create parent/name, or name-2, name-3 etc. if it exists; safe against concurrent runs."""
    parent.mkdir(parents=True, exist_ok=True)
    for again in itertools.count(1):
        folder = parent / (name if again == 1 else f"{name}-{again}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder.resolve()
    raise AssertionError


def longest_first(jobs: Jobs, known: Mapping[str, float]) -> Jobs:
    """Sorted by known seconds, longest first; notebooks without a known time come before all others."""
    return dict(sorted(jobs.items(), key=lambda job: -known.get(job[0].stem, float("inf"))))


def visible(devices: Sequence[str], device: str) -> list[dict[str, str]]:
    """One environment per GPU; notebooks with the same environment run sequentially."""
    if not devices:
        return [{}]
    if device != "cuda":
        raise LabError(f"devices {','.join(devices)}: they are GPUs, but the notebooks are to run on {device}")
    seen = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    for d in devices:
        if not d.isdigit():
            raise LabError(f"device {d!r}: --devices takes numbers of GPUs with commas between, such as 0,1")
        machine.pick_device(f"cuda:{d}")
    return [{"CUDA_VISIBLE_DEVICES": seen[int(d)] if seen else d} for d in devices]


def execute_all(
    jobs: Jobs, out: Path, device: str, say: Any = print, slots: Sequence[Mapping[str, str]] = ({},)
) -> Iterator[tuple[Path, NotebookResult]]:
    """Execute all notebooks, one at a time per slot (environment), continuing after failures; yields (path, result).

    Shows progress bars on a terminal, lines elsewhere. Ctrl-C ends the running notebooks, which are then the last.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    waiting = collections.deque(enumerate(jobs.items(), 1))
    news: queue.SimpleQueue[tuple[int, Path, NotebookResult | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def work(place: int, environment: Mapping[str, str]) -> None:
        while not stop.is_set():
            try:
                number, (path, parameters) = waiting.popleft()
            except IndexError:
                return
            news.put((number, path, None))
            bar = {"desc": path.stem, "position": place, "leave": False} if terminal else False
            try:
                result = execute(path, out, parameters, device, bar, environment, stop)
            except Exception as error:
                result = NotebookResult(path.stem, device, 0.0, "failed", last_line(error))
            if result.status == "interrupted":
                stop.set()
            news.put((number, path, result))

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(slots)]
    bars = tqdm(total=len(jobs), desc="all notebooks", unit="notebook", position=len(slots), disable=not terminal)
    try:
        with bars:
            for thread in threads:
                thread.start()
            for number, path, result in received(news, threads, stop):
                if result is None:
                    if not terminal:
                        say(f"[{number}/{len(jobs)}] {path.stem} ...")
                    continue
                bars.update()
                line = f"[{number}/{len(jobs)}] {path.stem}: {result.status}, {result.seconds:.1f} s"
                bars.write(line) if terminal else say(line)
                if result.error:
                    say(f"    {result.error}")
                yield path, result
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def received(news: queue.SimpleQueue[Any], threads: Sequence[threading.Thread], stop: threading.Event) -> Iterator[Any]:
    """Items of the queue until all threads have ended; Ctrl-C sets `stop`."""
    while True:
        try:
            alive = any(thread.is_alive() for thread in threads)  # before reading the queue
            while True:
                try:
                    item = news.get(timeout=0.1 if alive else 0)
                except queue.Empty:
                    break
                yield item
            if not alive:
                return
        except KeyboardInterrupt:
            stop.set()


def table(results: Sequence[NotebookResult]) -> str:
    """The closing table: notebook, device, seconds, status."""
    lines = [("notebook", "device", "seconds", "status")]
    lines += [(r.notebook, r.device, f"{r.seconds:.1f}", r.status) for r in results]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    form = f"{{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:>{widths[2]}}}  {{:<{widths[3]}}}"
    rows = [form.format(*line).rstrip() for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


# ---- recording


def record(
    root: Path = ROOT,
    device: str = "auto",
    only: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    out: Path | None = None,
    commit: str = "",
    say: Any = print,
    devices: Sequence[str] = (),
) -> int:
    """Execute the notebooks and write outputs, stamp and rows to `out` (or notebooks/). Returns 0 if all succeeded.

    Each is written when it is done. With `devices`, numbers of GPUs, one notebook at a time runs on each.
    A notebook that fails is not changed. Failed claims are listed, because their prose must be changed.
    """
    device = machine.pick_device(device).type
    slots = visible(devices, device)
    jobs = jobs_of(root, only, given, device)
    target = (out or root / "notebooks").resolve()
    slug = slug_of(device)
    if len(slots) > 1:
        jobs = longest_first(jobs, durations.read(root / "notebooks" / "recorded", slug))
    work = new_folder(root / "runs", f"record-{time.strftime('%Y%m%d-%H%M%S')}")
    stamp = (name_of(device), machine.versions(), commit or machine.commit() or "unknown")
    results = []
    with ended_by_sigterm():
        for path, result in execute_all(jobs, work, device, say, slots):
            results.append(result)
            if result.status != "ok":
                continue
            try:
                keep_recording(path, result, work, target, slug, stamp)
            except Exception as error:  # such as too many rows; the others are still recorded
                result.status, result.error = "failed", last_line(error)
                say(f"    {path.stem} is not written: {result.error}")
    say("\n" + table(results))
    for result in results:
        for claim in result.claims:
            if claim.get("holds") is False:
                say(f"claim failed in {result.notebook}: {claim['claim']} ({claim['otherwise']})")
    return 0 if len(results) == len(jobs) and all(r.status == "ok" for r in results) else 1


def keep_recording(
    path: Path, result: NotebookResult, work: Path, target: Path, slug: str, stamp: tuple[str, dict[str, str], str]
) -> None:
    """Write one executed notebook, with the stamp (device, versions, commit), and its rows under `target`."""
    executed = nb.read(work / "notebooks" / path.name)
    nb.stamp(executed, *stamp)
    nb.write(executed, target / path.name, replace={str(work / "work" / path.stem): "."})
    if result.rows or result.claims:
        recordings.dump(target / "recorded" / f"{path.stem}.{slug}.json", result.rows, result.claims)
    durations.note(target / "recorded", path.stem, slug, result.seconds)


def shown(path: Path) -> str:
    """A path for messages: relative to the working folder if possible."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
