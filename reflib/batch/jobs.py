"""`plan` turns a request into jobs, which are checked before the first one runs.

    request = sweeps + notebooks + parameters + device, as given: JSON, stored in run.json
    job     = notebook's text + parameters

A parameter of no notebook, or an invalid value, is an error. A missing or broken notebook is a job with a `problem`, so
that the others still run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat

from reflib.batch.sweep import Sweep
from reflib.errors import LabError, did_you_mean
from reflib.lab import notebook as nb
from reflib.lab import runner
from reflib.lab.params import Parameter

MOST_JOBS = 10_000


@dataclass(frozen=True)
class RunRequest:
    """The arguments of a run. `only`: slugs and paths of notebooks; `given`: parameters (text) that override sweeps."""

    only: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    sweeps: tuple[Sweep, ...] = ()

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "sweeps": [asdict(s) for s in self.sweeps]}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> RunRequest:
        sweeps = tuple(map(Sweep.from_data, data["sweeps"]))
        return RunRequest(tuple(data["only"]), dict(data["given"]), data["device"], sweeps)


@dataclass(frozen=True)
class NotebookJob:
    """One execution. `device` is "cpu" or "cuda"; `text` the notebook without outputs, as JSON."""

    id: str
    notebook: str  # the slug
    parameters: Mapping[str, Any]
    device: str
    text: str = field(repr=False, default="")
    problem: str = ""  # the reason if it cannot be executed
    label: str = ""  # the slug, and parameters that differ between the notebook's jobs
    chapter: bool = True  # a chapter of this checkout, with a page in the book


def plan(root: Path, request: RunRequest, resolve: Callable[[str], str]) -> list[NotebookJob]:
    """The jobs, in the book's order, and per notebook in the order of the sweep file. Raises LabError.

    `resolve` returns the concrete device for "auto" and raises LabError if a device is missing.
    """
    sweeps = request.sweeps or (Sweep(),)
    found: dict[str, NotebookJob] = {}
    for sweep in sweeps:
        for job in jobs_of(root, sweep, request, resolve):
            found.setdefault(job.id, job)
            if len(found) > MOST_JOBS:
                raise LabError(f"{sweep.file or 'this'} makes over {MOST_JOBS:,} jobs: sweep over less at once")
    jobs = list(found.values())
    if not jobs:
        raise LabError(f"no notebooks in {runner.shown(root / 'notebooks')}")
    if all(job.problem for job in jobs):
        raise LabError("\n".join(f"{job.notebook}: {job.problem}" for job in jobs))
    return labelled(jobs)


def jobs_of(root: Path, sweep: Sweep, request: RunRequest, resolve: Callable[[str], str]) -> Iterable[NotebookJob]:
    """The jobs of one sweep; a generator that checks everything before the first."""
    named = request.only or sweep.notebooks
    sources = [read(path, root) for path in find(root, named)]
    values: dict[str, Sequence[Any]] = {**sweep.values, **{name: (text,) for name, text in request.given.items()}}
    if any(source.parameters is not None for source in sources):
        refuse_unknown(values, sources, sweep, request)
    if request.device != "auto" or "device" not in values:
        values["device"] = (request.device,)
    checked = [
        (source, {name: fitting(source, name, values[name], sweep, resolve) for name in source.taken(values)})
        for source in sources
    ]
    default = resolve(str(values["device"][0]))
    for source, combined in checked:
        for chosen in itertools.product(*combined.values()):
            parameters = dict(zip(combined, chosen, strict=True))
            yield source.job(parameters, parameters.get("device", default))


@dataclass(frozen=True)
class NotebookSource:
    """A loaded notebook; without `parameters` if there is a `problem`."""

    slug: str
    text: str = ""
    code: str = ""  # hash of the code cells
    parameters: Mapping[str, Parameter] | None = None
    problem: str = ""
    chapter: bool = True

    def taken(self, values: Mapping[str, Any]) -> list[str]:
        return [name for name in values if name in (self.parameters or {})]

    def job(self, parameters: Mapping[str, Any], device: str) -> NotebookJob:
        content = json.dumps([self.slug, self.code, dict(parameters)], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return NotebookJob(
            f"{self.slug}-{digest}", self.slug, parameters, device, self.text, self.problem, chapter=self.chapter
        )


def find(root: Path, named: Sequence[str]) -> list[Path]:
    """Paths of chapters by slug, and of other notebooks by path; all chapters if none is named.

    Missing ones are included; `read` reports them.
    """
    chapters = {path.stem: path for path in runner.notebooks(root)}
    paths = []
    for name in named:
        path = Path(name)
        own = path.suffix == ".ipynb" and (path.exists() or path.stem not in chapters)
        paths.append(path.resolve() if own else chapters.get(path.stem, path))
    order = list(chapters.values())
    listed = dict.fromkeys(paths or order)
    return [p for p in order if p in listed] + [p for p in listed if p not in order]


def read(path: Path, root: Path) -> NotebookSource:
    """The notebook, or a NotebookSource with the problem."""
    slug = path.stem
    chapter = path.resolve().parent == (root / "notebooks").resolve()
    try:
        notebook = nb.read(path)
        nbformat.validate(notebook)
        parameters = runner.parameters_of(notebook)
    except FileNotFoundError:
        return NotebookSource(slug, problem=missing(path, root), chapter=chapter)
    except OSError as error:
        return NotebookSource(slug, problem=f"it cannot be read: {error.strerror}", chapter=chapter)
    except LabError as error:
        return NotebookSource(slug, problem=str(error), chapter=chapter)
    except Exception as error:  # nbformat raises many kinds: invalid JSON, no cells, an unknown version
        first = (str(error).splitlines() or [""])[0][:160]
        return NotebookSource(slug, problem=f"it is not a notebook: {type(error).__name__}: {first}", chapter=chapter)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return NotebookSource(slug, nbformat.writes(notebook), nb.code_hash(notebook), parameters, chapter=chapter)


def missing(path: Path, root: Path) -> str:
    if path.suffix == ".ipynb":
        return f"there is no file {runner.shown(path)}"
    slugs = [p.stem for p in runner.notebooks(root)]
    return f"no notebook has this name; {did_you_mean(path.stem, slugs) or 'there are: ' + ', '.join(slugs)}"


def refuse_unknown(
    names: Mapping[str, Any], sources: Sequence[NotebookSource], sweep: Sweep, request: RunRequest
) -> None:
    """LabError for a parameter that none of the notebooks has."""
    every = sorted({name for source in sources for name in source.parameters or {}})
    for name in names:
        if name not in every:
            where = "" if name in request.given else sweep.where(name)
            hint, have = did_you_mean(name, every), ", ".join(every) or "none"
            raise LabError(
                f"{where}no notebook of this run has a parameter {name!r}; they have: {have}{hint and f'; {hint}'}"
            )


def fitting(
    source: NotebookSource, name: str, values: Sequence[Any], sweep: Sweep, resolve: Callable[[str], str]
) -> list[Any]:
    """The distinct values of a parameter, converted to the declared type."""
    parameter = (source.parameters or {})[name]
    found = []
    for value in values:
        try:
            fitted = runner.fit(parameter, value)
            found.append(resolve(str(fitted)) if name == "device" else fitted)
        except LabError as error:
            where = sweep.where(name) if values is sweep.values.get(name) else ""
            raise LabError(f"{where}{source.slug}: {error}") from None
    return list(dict.fromkeys(found))


def labelled(jobs: Sequence[NotebookJob]) -> list[NotebookJob]:
    """The jobs with labels."""
    values: dict[tuple[str, str], set[Any]] = {}
    for job in jobs:
        for name, value in job.parameters.items():
            values.setdefault((job.notebook, name), set()).add(value)

    def label(job: NotebookJob) -> str:
        varied = [f"{n}={v}" for n, v in job.parameters.items() if len(values[job.notebook, n]) > 1]
        return " ".join([job.notebook, *varied])

    return [replace(job, label=label(job)) for job in jobs]
