"""`reflib run`: plan, execute, keep, and sum up. What is finished is on disk at once; `--resume` does the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reflib.batch import cluster as clusters
from reflib.batch import store, summary, sweep, work
from reflib.batch.jobs import Job, Request, plan
from reflib.batch.store import Store
from reflib.batch.work import Outcome
from reflib.errors import LabError
from reflib.lab import machine, runner
from reflib.lab.executing import Result


@dataclass
class Progress:
    """What came of a run until now. `seconds`: that jobs were executed, in this session."""

    jobs: Sequence[Job]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    resumed: int = 0  # jobs that an earlier session had finished
    slots: int = 1
    seconds: float = 0.0
    worked: float = 0.0  # of these, all workers' together
    interrupted: bool = False
    trouble: str = ""  # what ended the session early

    def outcome(self, job: Job) -> Outcome:
        return self.outcomes.get(job.id) or Outcome("waiting")

    def busy(self) -> float | None:
        """Which part of the time workers spent on jobs; None where nothing was executed."""
        return self.worked / (self.slots * self.seconds) if self.seconds else None


def run(
    root: Path = runner.ROOT,
    device: str = "auto",
    only: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    out: Path | None = None,
    book: bool = True,
    say: Any = print,
    *,
    sweep_file: Path | None = None,
    resume: str = "",
    retries: int = 0,
    limit: float | None = None,
    workers: int | None = None,
    scheduler: str = "",
) -> int:
    """Execute notebooks into `runs/<name>/`. 0 when all went well, 1 when a job failed or was interrupted.

    limit: seconds of a job.   resume: a run's folder or name, or "last"; what is not said here is as it was asked then.
    LabError, before anything is written, for what cannot be run at all.
    """
    sweeps = tuple(sweep.read(sweep_file)) if sweep_file else ()
    request = Request(tuple(only), dict(given or {}), device, sweeps)
    folder = None
    if resume:
        folder = store.find(root, resume)
        request = resumed(request, Request.from_data(store.load(folder)["request"]))
    with where(request, root, workers, scheduler) as (jobs, start):
        folder = folder or (out.resolve() if out else runner.new_folder(root / "runs", time.strftime("%Y%m%d-%H%M%S")))
        kept = Store(folder)
        with kept.locked():
            begin(kept, request, jobs)
            progress = Progress(jobs)
            with runner.ended_by_sigterm():
                carry_out(progress, kept, start, retries, limit, say)
            return close(progress, kept, root, book, say)


def resumed(asked: Request, before: Request) -> Request:
    """The request of the run that is resumed, and what is asked differently now."""
    return Request(
        asked.only or before.only,
        {**before.given, **asked.given},
        asked.device if asked.device != "auto" else before.device,
        asked.sweeps or before.sweeps,
    )


def begin(kept: Store, request: Request, jobs: Sequence[Job]) -> None:
    try:
        kept.write("run.json", {"request": request.to_data(), "jobs": [j.id for j in jobs], **this()})
    except OSError as error:
        raise LabError(f"this run cannot begin: {work.because(error, kept.folder)}") from None


def this() -> dict[str, Any]:
    """What executes."""
    return {"reflib": importlib.metadata.version("reflib"), "commit": machine.commit(), "versions": machine.versions()}


@contextlib.contextmanager
def where(request: Request, root: Path, workers: int | None, scheduler: str) -> Iterator[tuple[list[Job], Any]]:
    """(the jobs, a function that gives the cluster to execute them on). A scheduler is asked at once: it knows which
    devices there are; the cluster in this process is started when it is needed."""
    started: list[clusters.Cluster] = []
    if scheduler:
        if workers is not None:
            raise LabError("--workers is for this machine; on a cluster all workers of the scheduler are used")
        started.append(clusters.remote(scheduler))

    def start() -> clusters.Cluster:
        if not started:
            count, gpus, on_cpu = clusters.workers_for({job.device for job in jobs}, workers)
            started.append(clusters.local(count, gpus, on_cpu, bars=sys.stderr.isatty()))
        return started[0]

    try:
        jobs = plan(root, request, started[0].resolve if started else lambda name: machine.pick_device(name).type)
        yield jobs, start
    finally:
        for cluster in started:
            cluster.close()


def carry_out(progress: Progress, kept: Store, start: Any, retries: int, limit: float | None, say: Any) -> None:
    """Execute what is not done, keeping each outcome as it comes. Whatever ends this early is in `progress`."""
    for job in progress.jobs:
        found = Outcome("failed", job.problem) if job.problem else kept.outcome(job.id)
        if found and (job.problem or found.status == "ok"):
            progress.outcomes[job.id] = found
            progress.resumed += not job.problem
            if job.problem:
                say(f"{job.notebook} is left out: {job.problem}")
    todo = [job for job in progress.jobs if job.id not in progress.outcomes]
    done = f", {progress.resumed} of them finished before" if progress.resumed else ""
    say(f"{counted(len(progress.jobs), 'notebook')}{done}, into {runner.shown(kept.folder)}")
    if not todo:
        return
    session = Session(progress, kept, todo, say)
    try:
        cluster = start()
        progress.slots = max(1, *(cluster.slots(device) for device in {job.device for job in todo}))
        if progress.slots > 1:
            say(f"{progress.slots} side by side")
        session.begin(progress.slots)
        for job, outcome in cluster.execute(todo, retries, limit, session.started):
            session.ended(job, outcome)
    except KeyboardInterrupt:
        progress.interrupted = True
    except LabError as error:
        progress.trouble = str(error)
    except OSError as error:  # such as no room for Dask's own files
        progress.trouble = work.because(error)
    finally:
        session.over()


class Session:
    """Says what happens, and keeps what is finished; where the disk is full, later again."""

    def __init__(self, progress: Progress, kept: Store, todo: Sequence[Job], say: Any):
        self.progress, self.kept, self.say = progress, kept, say
        self.numbers = {job.id: number for number, job in enumerate(todo, 1)}
        self.unkept: dict[str, tuple[Job, Outcome]] = {}
        self.beside = 1
        self.since = time.monotonic()
        self.bars: Any = None

    def begin(self, slots: int) -> None:
        from tqdm import tqdm

        self.beside = min(slots, len(self.numbers))
        self.since = time.monotonic()
        terminal = sys.stderr.isatty()
        total, place = len(self.numbers), slots
        self.bars = tqdm(total=total, desc="all notebooks", unit="notebook", position=place, disable=not terminal)

    def place(self, job: Job) -> str:
        return f"[{self.numbers[job.id]}/{len(self.numbers)}]"

    def line(self, text: str) -> None:
        self.say(text) if self.bars is None or self.bars.disable else self.bars.write(text)

    def started(self, job: Job, attempt: int) -> None:
        if self.bars.disable:
            again = f", attempt {attempt}" if attempt > 1 else ""
            self.say(f"{self.place(job)} {job.label} ...{again}")

    def ended(self, job: Job, outcome: Outcome) -> None:
        outcome = replace(outcome, beside=self.beside)
        self.progress.outcomes[job.id] = outcome
        self.progress.worked += outcome.seconds
        self.unkept[job.id] = (job, outcome)
        trouble = self.keep()
        self.bars.update()
        self.line(f"{self.place(job)} {job.label}: {outcome.status}, {outcome.seconds:.1f} s")
        for error in (outcome.error, trouble):
            if error:
                self.line(f"    {error}")

    def keep(self) -> str:
        """Write what is not on disk yet; why that did not work."""
        for identity, (job, outcome) in list(self.unkept.items()):
            try:
                self.kept.keep(job, outcome)
            except OSError as error:
                return f"not written: {work.because(error, self.kept.folder)}"
            del self.unkept[identity]
            self.progress.outcomes[identity] = replace(outcome, notebook=b"", log=b"")  # they are on disk
        return ""

    def over(self) -> None:
        """A job that could still not be written has failed: a run that is resumed executes it again."""
        self.progress.seconds = time.monotonic() - self.since
        if self.bars is not None:
            self.bars.close()
        trouble = self.keep()
        for identity, (_, outcome) in self.unkept.items():
            self.progress.outcomes[identity] = replace(outcome, status="failed", error=trouble)


def close(progress: Progress, kept: Store, root: Path, book: bool, say: Any) -> int:
    """Results, summary and book, and the last lines; the exit status."""
    outcomes = [(job, progress.outcome(job)) for job in progress.jobs]
    bad = [o for _, o in outcomes if o.status != "ok"]
    page = None
    written = True
    try:
        kept.write("results.json", results(outcomes))
        summary.write(kept.folder, progress, this())
    except OSError as error:
        written = False
        say(f"no results.json and summary.html: {work.because(error, kept.folder)}")
    # a book has one page of a chapter, and no others
    wanted = book and not (progress.interrupted or progress.trouble)
    ran = [job for job in progress.jobs if not job.problem]
    wanted = wanted and all(job.chapter for job in ran) and len({job.notebook for job in ran}) == len(ran)
    if wanted:
        page = make_book(root, kept, outcomes, say)
    lines = [Result(job.label, job.device, o.seconds, o.status) for job, o in outcomes]
    say("\n" + runner.table(lines))
    if progress.trouble:
        say(f"\n{progress.trouble}")
    if bad:
        say(f"\n{counted(len(bad), 'notebook')} of {len(outcomes)} not finished; what is finished is kept.")
        say(f"to go on: reflib run --resume {runner.shown(kept.folder)}")
    if written:
        say(f"\nsummary: {runner.shown(kept.folder / 'summary.html')}")
        say(f"results: {runner.shown(kept.folder / 'results.json')}")
    if page:
        say(f"book:    {runner.shown(page)}")
    return 1 if bad or not written or (wanted and page is None) else 0


def results(outcomes: Sequence[tuple[Job, Outcome]]) -> dict[str, Any]:
    """All of a run in one file, for programs."""
    listed = []
    for job, outcome in outcomes:
        rows, claims = outcome.records()
        listed.append(
            {
                "notebook": job.notebook,
                "job": job.id,
                "parameters": dict(job.parameters),
                "device": job.device,
                **outcome.to_data(),
                "rows": rows,
                "claims": claims,
            }
        )
    return {"device": summary.devices(outcomes), "results": listed, **this()}


def make_book(root: Path, kept: Store, outcomes: Sequence[tuple[Job, Outcome]], say: Any) -> Path | None:
    """The book, with what was executed in place of the committed notebooks; None, and a line, where it fails."""
    from reflib.lab import book as books

    say("building the book of this run ...")
    pages = kept.folder / "notebooks"
    try:
        pages.mkdir(exist_ok=True)
        for job, _ in outcomes:
            executed = kept.jobs / job.id / work.FILES["notebook"]
            if executed.exists() and executed.stat().st_size:
                shutil.copyfile(executed, pages / f"{job.notebook}.ipynb")
        return books.build_run(root, kept.folder, f"Your machine: {summary.devices(outcomes)}")
    except (LabError, OSError) as error:
        say(f"no book: {error}")
        return None
    finally:
        shutil.rmtree(pages, ignore_errors=True)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
