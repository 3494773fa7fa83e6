"""What is to be executed: `plan` makes jobs of a request, each checked, before anything runs.

    request = sweeps + notebooks + parameters + device, as it was asked: JSON, kept in run.json
    job     = notebook's text + parameters

A parameter that no notebook has, or a value that one refuses, is an error. A notebook that is missing or broken is
a job with a `problem`: the others are still worth their run.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat

from reflib.batch.sweep import Sweep
from reflib.errors import LabError
from reflib.lab import notebook as nb
from reflib.lab import runner
from reflib.lab.params import Parameter

MOST_JOBS = 10_000


@dataclass(frozen=True)
class Request:
    """What was asked. `only`: slugs and paths of notebooks; `given`: parameters as text, before those of sweeps."""

    only: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    sweeps: tuple[Sweep, ...] = ()

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "sweeps": [asdict(s) for s in self.sweeps]}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Request:
        sweeps = tuple(map(Sweep.from_data, data["sweeps"]))
        return Request(tuple(data["only"]), dict(data["given"]), data["device"], sweeps)


@dataclass(frozen=True)
class Job:
    """One execution. `device` is "cpu" or "cuda"; `text` the notebook without outputs, as JSON."""

    id: str
    notebook: str  # its slug
    parameters: Mapping[str, Any]
    device: str
    text: str = field(repr=False, default="")
    problem: str = ""  # why it cannot be executed
    label: str = ""  # the slug, and the parameters in which it differs from the notebook's other jobs
    chapter: bool = True  # of this checkout: the book has a page for it


def plan(root: Path, request: Request, resolve: Callable[[str], str]) -> list[Job]:
    """The jobs, in the book's order; a notebook's one after another in the order of the sweep file.

    `resolve` says which device "auto" is, and refuses one that is not there.
    """
    sweeps = request.sweeps or (Sweep(),)
    found: dict[str, Job] = {}
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


def jobs_of(root: Path, sweep: Sweep, request: Request, resolve: Callable[[str], str]) -> Iterable[Job]:
    """One sweep's jobs; a generator, but all is checked before the first."""
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
class Source:
    """A notebook as it was read; no `parameters` where there is a `problem`."""

    slug: str
    text: str = ""
    code: str = ""  # digest of its code cells
    parameters: Mapping[str, Parameter] | None = None
    problem: str = ""
    chapter: bool = True

    def taken(self, values: Mapping[str, Any]) -> list[str]:
        return [name for name in values if name in (self.parameters or {})]

    def job(self, parameters: Mapping[str, Any], device: str) -> Job:
        content = json.dumps([self.slug, self.code, dict(parameters)], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return Job(
            f"{self.slug}-{digest}", self.slug, parameters, device, self.text, self.problem, chapter=self.chapter
        )


def find(root: Path, named: Sequence[str]) -> list[Path]:
    """Chapters by slug, and other notebooks by path; all chapters where none is named.

    What is not there is among them too, for `read` to say so.
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


def read(path: Path, root: Path) -> Source:
    """A notebook, or why it is none."""
    slug = path.stem
    chapter = path.resolve().parent == (root / "notebooks").resolve()
    try:
        notebook = nb.read(path)
        nbformat.validate(notebook)
        parameters = runner.parameters_of(notebook)
    except FileNotFoundError:
        return Source(slug, problem=missing(path, root), chapter=chapter)
    except OSError as error:
        return Source(slug, problem=f"it cannot be read: {error.strerror}", chapter=chapter)
    except LabError as error:
        return Source(slug, problem=str(error), chapter=chapter)
    except Exception as error:  # nbformat's are of many kinds: no JSON, no cells, a version it does not know
        first = (str(error).splitlines() or [""])[0][:160]
        return Source(slug, problem=f"it is no notebook: {type(error).__name__}: {first}", chapter=chapter)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return Source(slug, nbformat.writes(notebook), nb.code_hash(notebook), parameters, chapter=chapter)


def missing(path: Path, root: Path) -> str:
    if path.suffix == ".ipynb":
        return f"there is no file {runner.shown(path)}"
    slugs = [p.stem for p in runner.notebooks(root)]
    near = difflib.get_close_matches(path.stem, slugs, n=1)
    return f"no notebook has this name; {f'did you mean {near[0]!r}?' if near else 'there are: ' + ', '.join(slugs)}"


def refuse_unknown(asked: Mapping[str, Any], sources: Sequence[Source], sweep: Sweep, request: Request) -> None:
    """A name that none of the notebooks has."""
    every = sorted({name for source in sources for name in source.parameters or {}})
    for name in asked:
        if name not in every:
            where = "" if name in request.given else sweep.where(name)
            near = difflib.get_close_matches(name, every, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            have = ", ".join(every) or "none"
            raise LabError(f"{where}no notebook of this run has a parameter {name!r}; they have: {have}{hint}")


def fitting(
    source: Source, name: str, values: Sequence[Any], sweep: Sweep, resolve: Callable[[str], str]
) -> list[Any]:
    """A parameter's values, each once, as the notebook declares them."""
    parameter = (source.parameters or {})[name]
    found = []
    for index, value in enumerate(values):
        try:
            fitted = runner.fit(parameter, value)
            found.append(resolve(str(fitted)) if name == "device" else fitted)
        except LabError as error:
            where = sweep.where(name, index) if values is sweep.values.get(name) else ""
            raise LabError(f"{where}{source.slug}: {error}") from None
    return list(dict.fromkeys(found))


def labelled(jobs: Sequence[Job]) -> list[Job]:
    """The same with labels."""
    values: dict[tuple[str, str], set[Any]] = {}
    for job in jobs:
        for name, value in job.parameters.items():
            values.setdefault((job.notebook, name), set()).add(value)

    def label(job: Job) -> str:
        varied = [f"{n}={v}" for n, v in job.parameters.items() if len(values[job.notebook, n]) > 1]
        return " ".join([job.notebook, *varied])

    return [replace(job, label=label(job)) for job in jobs]
