"""Executes notebooks one after another: `make run` for a reader's machine, `make record` for the committed
outputs.

Both go through `execute`: papermill in a scratch folder, rows and claims collected through REFLIB_LAB_ROWS,
one `Result` a notebook, failures kept and passed over. Only `record` writes under notebooks/.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab import machine
from reflib.lab import notebook as nb
from reflib.lab import recording as recordings

ROOT = machine.ROOT
CELL_TIMEOUT = 1800

Jobs = dict[Path, dict[str, Any]]  # each notebook to execute, with its parameters


@dataclass
class Result:
    """What came of one notebook."""

    notebook: str
    device: str
    seconds: float
    status: str  # "ok" | "failed" | "interrupted"
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)


# ---- which notebooks, with which parameters


def notebooks(root: Path = ROOT, only: Sequence[str] = ()) -> list[Path]:
    """The chapters in the book's order, then any the book does not list; `only` picks by slug."""
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
    """The names a notebook's `parameters` cell declares, with papermill's notes on type, default and help."""
    import papermill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(papermill.inspect_notebook(str(path)))


def convert(name: str, text: str, declared: str) -> Any:
    """A `-p name=value` from the command line, as the type that the notebook declares."""
    import yaml

    if declared == "str":
        return text
    value = yaml.safe_load(text)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {"int": isinstance(value, int) and number, "float": number, "bool": isinstance(value, bool)}
    if not fits.get(declared, True):
        raise LabError(f"parameter {name}={text}: the notebook declares it {declared}")
    return float(value) if declared == "float" else value


def parameters_for(paths: Iterable[Path], given: Mapping[str, str], device: str) -> Jobs:
    """Each notebook's parameters. Before anything runs, a name that no notebook declares is refused."""
    declared = {path: declared_parameters(path) for path in paths}
    every = sorted({name for names in declared.values() for name in names})
    for name in given:
        if name not in every:
            raise LabError(f"no notebook of this run has a parameter {name!r}; they have: {', '.join(every)}")
    chosen: Jobs = {}
    for path, names in declared.items():
        chosen[path] = {
            name: convert(name, text, names[name]["inferred_type_name"])
            for name, text in given.items()
            if name in names
        }
        if "device" in names:
            chosen[path].setdefault("device", device)
    return chosen


def jobs_of(root: Path, only: Sequence[str], given: Mapping[str, str] | None, device: str) -> Jobs:
    """What `run` and `record` are to execute; having nothing to do is an error."""
    jobs = parameters_for(notebooks(root, only), given or {}, device)
    if not jobs:
        raise LabError(f"no notebooks in {shown(root / 'notebooks')}")
    return jobs


def slug_of(device: str) -> str:
    """The name of a device's recordings: 'h200' of an 'NVIDIA H200', 'cpu' of any CPU."""
    return "cpu" if device == "cpu" else gpu_slug(name_of(device))


def name_of(device: str) -> str:
    """What the device calls itself: 'NVIDIA H200'."""
    return machine.describe(machine.pick_device(device)).name


# ---- executing


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the kernels started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def last_line(error: BaseException) -> str:
    """The line of a notebook's failure that a table has room for."""
    name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
    text = f"{name}: {value}" if name else f"{type(error).__name__}: {error}"
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    return (lines or ["?"])[0][:200]


def kernel_config() -> Any:
    """Kernels talk over files in a private folder, not over TCP ports open to the host's other users."""
    from traitlets.config import Config

    return Config({"KernelManager": {"transport": "ipc"}})


def execute(
    path: Path, out: Path, parameters: Mapping[str, Any], device: str, progress: Mapping[str, Any] | bool
) -> Result:
    """Run one notebook into `out` (notebooks/, logs/, rows/ under it); its failure is not raised."""
    import papermill

    folders = {name: out / name for name in ("notebooks", "logs", "rows", "work")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    copy, log = folders["notebooks"] / path.name, folders["logs"] / f"{path.stem}.log"
    rows_file = folders["rows"] / f"{path.stem}.jsonl"
    rows_file.unlink(missing_ok=True)
    status, problem, start = "ok", "", time.perf_counter()
    with (
        open(log, "w") as log_file,
        environment(REFLIB_LAB_ROWS=str(rows_file), PYDEVD_DISABLE_FILE_VALIDATION="1"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            papermill.execute_notebook(
                str(path),
                str(copy),
                parameters=dict(parameters),
                kernel_name="python3",
                progress_bar=progress,
                stdout_file=log_file,
                stderr_file=log_file,
                start_timeout=120,
                execution_timeout=CELL_TIMEOUT,
                cwd=str(folders["work"]),
                config=kernel_config(),
            )
        except KeyboardInterrupt:
            status, problem = "interrupted", "stopped by Ctrl-C"
        except Exception as error:
            status, problem = "failed", last_line(error)
            log_file.write(f"\n{error}\n")
    seconds = time.perf_counter() - start
    lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    rows, claims = recordings.split_records(lines)
    return Result(path.stem, device, round(seconds, 1), status, problem, rows, claims)


def execute_all(jobs: Jobs, out: Path, device: str, say: Any = print) -> Iterator[tuple[Path, Result]]:
    """Execute every notebook, going on after a failure; bars on a terminal, lines elsewhere."""
    import sys

    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    overall = tqdm(total=len(jobs), desc="all notebooks", unit="notebook", position=1, disable=not terminal)
    with overall:
        for number, (path, parameters) in enumerate(jobs.items(), 1):
            bar = {"desc": path.stem, "position": 0, "leave": False} if terminal else False
            if not terminal:
                say(f"[{number}/{len(jobs)}] {path.stem} ...")
            result = execute(path, out, parameters, device, bar)
            overall.update()
            line = f"[{number}/{len(jobs)}] {path.stem}: {result.status}, {result.seconds:.1f} s"
            overall.write(line) if terminal else say(line)
            if result.error:
                say(f"    {result.error}")
            yield path, result
            if result.status == "interrupted":
                return


def table(results: Sequence[Result]) -> str:
    """The closing table: notebook, device, seconds, status."""
    lines = [("notebook", "device", "seconds", "status")]
    lines += [(r.notebook, r.device, f"{r.seconds:.1f}", r.status) for r in results]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    form = f"{{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:>{widths[2]}}}  {{:<{widths[3]}}}"
    rows = [form.format(*line).rstrip() for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


# ---- the two jobs


def run(
    root: Path = ROOT,
    device: str = "auto",
    only: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    out: Path | None = None,
    book: bool = True,
    say: Any = print,
) -> int:
    """Execute the notebooks into `runs/<id>/` and build a book of them. 0 when all went well."""
    from reflib.lab import book as books

    device = machine.pick_device(device).type
    jobs = jobs_of(root, only, given, device)
    run_id = time.strftime("%Y%m%d-%H%M%S")
    out = (out or root / "runs" / run_id).resolve()
    out.mkdir(parents=True, exist_ok=True)
    say(f"{len(jobs)} notebooks on {name_of(device)}, into {shown(out)}")
    results = [result for _, result in execute_all(jobs, out, device, say)]
    shutil.rmtree(out / "work", ignore_errors=True)
    summary = {
        "device": name_of(device),
        "versions": machine.versions(),
        "results": [asdict(r) for r in results],
    }
    (out / "results.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    failed = len(results) < len(jobs) or any(r.status != "ok" for r in results)
    page = None
    interrupted = bool(results) and results[-1].status == "interrupted"
    if book and not interrupted:
        say("building the book of this run ...")
        try:
            page = books.build_run(root, out, f"Your machine: {name_of(device)}")
        except LabError as error:
            say(f"no book: {error}")
    say("\n" + table(results))
    say(f"\nresults: {shown(out / 'results.json')}")
    if page:
        say(f"book:    {shown(page)}")
    return 1 if failed or (book and page is None) else 0


def record(
    root: Path = ROOT,
    device: str = "auto",
    only: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    out: Path | None = None,
    commit: str = "",
    say: Any = print,
) -> int:
    """Execute the notebooks and write outputs, stamp and rows to `out` (or notebooks/). 0 if all went well.

    A notebook that fails is left as it was. Claims that failed are listed: their prose is to be changed.
    """
    device = machine.pick_device(device).type
    jobs = jobs_of(root, only, given, device)
    target = (out or root / "notebooks").resolve()
    work = root / "runs" / f"record-{time.strftime('%Y%m%d-%H%M%S')}"
    commit = commit or machine.commit() or "unknown"
    name = name_of(device)
    results = []
    for path, result in execute_all(jobs, work.resolve(), device, say):
        results.append(result)
        if result.status != "ok":
            continue
        executed = nb.read(work / "notebooks" / path.name)
        nb.stamp(executed, name, machine.versions(), commit)
        nb.write(executed, target / path.name, replace={str(work.resolve() / "work"): "."})
        if result.rows or result.claims:
            recording = target / "recorded" / f"{path.stem}.{slug_of(device)}.json"
            recordings.dump(recording, result.rows, result.claims)
    say("\n" + table(results))
    for result in results:
        for claim in result.claims:
            if claim.get("holds") is False:
                say(f"claim failed in {result.notebook}: {claim['claim']} ({claim['otherwise']})")
    return 0 if len(results) == len(jobs) and all(r.status == "ok" for r in results) else 1


def gpu_slug(name: str) -> str:
    """'h200' of 'NVIDIA H200'; a file name's worth of any device name."""
    short = re.sub(r"(?i)nvidia|amd|geforce|instinct|tesla", "", name)
    return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-") or "unknown"


def shown(path: Path) -> str:
    """A path as a reader would type it: relative where it can be."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
