"""`reflib record` (`make record`) writes the committed outputs of notebooks.

Each notebook runs in a separate process (lab/executing.py) and a scratch folder, with rows and claims collected through
REFLIB_LAB_ROWS. There is one result per notebook, and a failure does not stop the others. Nothing else writes under
notebooks/. Parallel recordings share only the file `recorded/seconds.tsv`.

NB: without Dask, which a GPU host without a network may lack; `reflib run` executes notebooks on a cluster.
"""

import datetime
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reflib.batch.jobs import RunRequest, plan
from reflib.errors import LabError
from reflib.lab import durations, machine
from reflib.lab import notebook as nb
from reflib.lab import recording as recordings
from reflib.lab.executing import NotebookResult, ended_by_sigterm, execute, last_line
from reflib.lab.prose_numbers import unseen
from reflib.lab.runner import ROOT, new_folder, table

Jobs = dict[Path, dict[str, Any]]  # each notebook to execute, with its parameters


def jobs_of(root: Path, only: Sequence[str], given: Mapping[str, str] | None, device: str) -> Jobs:
    """The notebooks and their parameters. LabError if one of them cannot be executed."""
    request = RunRequest(tuple(only), given or {}, device)
    planned = plan(root, request, lambda name: machine.pick_device(name).type)
    for job in planned:
        if job.problem:
            raise LabError(f"{job.notebook}: {job.problem}")
    return {root / "notebooks" / f"{job.notebook}.ipynb": dict(job.parameters) for job in planned}


def slug_of(device: str) -> str:
    """The device's name in recordings: 'h200' for an 'NVIDIA H200', 'cpu' for any CPU."""
    return "cpu" if device == "cpu" else machine.gpu_slug(name_of(device))


def name_of(device: str) -> str:
    """The device's full name: 'NVIDIA H200'."""
    return machine.describe(machine.pick_device(device)).name


# ---- executing


def execute_all(jobs: Jobs, out: Path, device: str, say: Any = print) -> Iterator[tuple[Path, NotebookResult]]:
    """Execute all notebooks, one after the other, continuing after failures; yields (path, result).

    Shows progress bars on a terminal, lines elsewhere. Ctrl-C ends the running notebook, which is then the last.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    with tqdm(total=len(jobs), desc="all notebooks", unit="notebook", position=1, disable=not terminal) as bars:
        for number, (path, parameters) in enumerate(jobs.items(), 1):
            place = f"[{number}/{len(jobs)}] {path.stem}"
            if not terminal:
                say(f"{place} ...")
            bar = {"desc": path.stem, "position": 0, "leave": False} if terminal else False
            try:
                result = execute(path, out, parameters, device, bar)
            except Exception as error:
                result = NotebookResult(path.stem, device, 0.0, "failed", last_line(error))
            bars.update()
            line = f"{place}: {result.status}, {result.seconds:.1f} s"
            bars.write(line) if terminal else say(line)
            if result.error:
                say(f"    {result.error}")
            yield path, result
            if result.status == "interrupted":
                return


# ---- recording


def record(
    root: Path = ROOT,
    device: str = "auto",
    only: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    out: Path | None = None,
    commit: str = "",
    say: Any = print,
) -> int:
    """Execute the notebooks and write outputs, stamp and rows to `out` (or notebooks/). Returns 0 if all succeeded.

    Each is written when it is done. A notebook that fails is not changed. Failed claims are listed, because their prose
    must be changed, and the numbers in prose that are not in what was recorded.
    """
    device = machine.pick_device(device).type
    jobs = jobs_of(root, only, given, device)
    target = (out or root / "notebooks").resolve()
    slug = slug_of(device)
    work = new_folder(root / "runs", f"record-{time.strftime('%Y%m%d-%H%M%S')}")
    stamp = (name_of(device), machine.versions(), commit or machine.commit() or "unknown")
    results = []
    with ended_by_sigterm():
        for path, result in execute_all(jobs, work, device, say):
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
        if result.status == "ok":
            for words in unseen(nb.read(target / f"{result.notebook}.ipynb"), result.rows):
                say(f"number in the prose of {result.notebook} that it does not print: ... {words} ...")
    return 0 if len(results) == len(jobs) and all(r.status == "ok" for r in results) else 1


def keep_recording(
    path: Path, result: NotebookResult, work: Path, target: Path, slug: str, stamp: tuple[str, dict[str, str], str]
) -> None:
    """Write one executed notebook, with the stamp (device, versions, commit), and its rows under `target`."""
    executed = nb.read(work / "notebooks" / path.name)
    nb.stamp(executed, *stamp)
    nb.write(executed, target / path.name, replace={str(work / "work" / path.stem): "."})
    if result.rows or result.claims:
        made = dict(zip(("device", "versions", "commit"), stamp)) | {"date": f"{datetime.date.today()}"}
        recordings.dump(target / "recorded" / f"{path.stem}.{slug}.json", result.rows, result.claims, made)
    durations.note(target / "recorded", path.stem, slug, result.seconds)
