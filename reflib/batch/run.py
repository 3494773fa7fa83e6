"""`reflib run`: plans, executes, stores and summarizes. Finished jobs are stored at once; `--resume` runs the rest."""

import contextlib
import importlib.metadata
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reflib.batch import artifacts, store, summary, sweep, work
from reflib.batch import cluster as clusters
from reflib.batch.jobs import NotebookJob, RunRequest, plan
from reflib.batch.store import RunStore
from reflib.batch.work import JobOutcome
from reflib.errors import LabError
from reflib.lab import executing, machine, runner
from reflib.lab.executing import NotebookResult
from reflib.lab.rows import count


@dataclass
class RunProgress:
    """The state of a run. `seconds`: time spent executing jobs in this session."""

    jobs: Sequence[NotebookJob]
    outcomes: dict[str, JobOutcome] = field(default_factory=dict)
    resumed: int = 0  # jobs finished in earlier sessions
    slots: int = 1
    seconds: float = 0.0
    worked: float = 0.0  # busy seconds of all workers
    interrupted: bool = False
    trouble: str = ""  # the error that ended the session early

    def outcome(self, job: NotebookJob) -> JobOutcome:
        return self.outcomes.get(job.id) or JobOutcome("waiting")

    def busy(self) -> float | None:
        """Fraction of the workers' time spent on jobs; None if nothing was executed."""
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
    """Execute notebooks into `runs/<name>/`. Returns 0 if all succeeded, 1 if a job failed or was interrupted.

    limit: seconds per job.   resume: a run's folder or name, or "last"; its arguments are the defaults.
    Raises LabError, before anything is written, for invalid arguments.
    """
    sweeps = tuple(sweep.read(sweep_file)) if sweep_file else ()
    request = RunRequest(tuple(only), dict(given or {}), device, sweeps)
    folder = None
    if resume:
        folder = store.find(root, resume)
        request = resumed(request, RunRequest.from_data(store.load(folder)["request"]))
    with where(request, root, workers, scheduler) as (jobs, start):
        folder = folder or (out.resolve() if out else runner.new_folder(root / "runs", time.strftime("%Y%m%d-%H%M%S")))
        kept = RunStore(folder)
        with kept.locked():
            begin(kept, request, jobs)
            progress = RunProgress(jobs)
            with executing.ended_by_sigterm():
                carry_out(progress, kept, start, retries, limit, say)
            return close(progress, kept, root, book, say)


def resumed(given: RunRequest, before: RunRequest) -> RunRequest:
    """The request of the resumed run, updated by the arguments given now."""
    return RunRequest(
        given.only or before.only,
        {**before.given, **given.given},
        given.device if given.device != "auto" else before.device,
        given.sweeps or before.sweeps,
    )


def begin(kept: RunStore, request: RunRequest, jobs: Sequence[NotebookJob]) -> None:
    try:
        kept.write("run.json", {"request": request.to_data(), "jobs": [j.id for j in jobs], **this()})
    except OSError as error:
        raise LabError(f"this run cannot begin: {work.because(error, kept.folder)}") from None


def this() -> dict[str, Any]:
    """What executes."""
    return {"reflib": importlib.metadata.version("reflib"), "commit": machine.commit(), "versions": machine.versions()}


@contextlib.contextmanager
def where(
    request: RunRequest, root: Path, workers: int | None, scheduler: str
) -> Iterator[tuple[list[NotebookJob], Any]]:
    """Context of (jobs, function that returns the cluster). A scheduler is contacted at once, to find its devices; the
    cluster in this process is started when needed."""
    started: list[clusters.JobCluster] = []
    if scheduler:
        if workers is not None:
            raise LabError("--workers is for this machine; on a cluster all workers of the scheduler are used")
        started.append(clusters.remote(scheduler))

    def start() -> clusters.JobCluster:
        if not started:
            number, gpus, on_cpu = clusters.workers_for({job.device for job in jobs}, workers)
            started.append(clusters.local(number, gpus, on_cpu, bars=sys.stderr.isatty()))
        return started[0]

    try:
        jobs = plan(root, request, started[0].resolve if started else lambda name: machine.pick_device(name).type)
        yield jobs, start
    finally:
        for cluster in started:
            cluster.close()


def carry_out(progress: RunProgress, kept: RunStore, start: Any, retries: int, limit: float | None, say: Any) -> None:
    """Execute the unfinished jobs and store each outcome. An error that ends this early is put in `progress`."""
    for job in progress.jobs:
        found = JobOutcome("failed", job.problem) if job.problem else kept.outcome(job.id)
        if found and (job.problem or found.status == "ok"):
            progress.outcomes[job.id] = found
            progress.resumed += not job.problem
            if job.problem:
                say(f"{job.notebook} is skipped: {job.problem}")
    todo = [job for job in progress.jobs if job.id not in progress.outcomes]
    done = f", {progress.resumed} of them finished before" if progress.resumed else ""
    say(f"{count(len(progress.jobs), 'notebook')}{done}, into {runner.shown(kept.folder)}")
    if not todo:
        return
    session = RunSession(progress, kept, todo, say)
    try:
        cluster = start()
        progress.slots = max(1, *(cluster.slots(device) for device in {job.device for job in todo}))
        if progress.slots > 1:
            say(f"{progress.slots} at the same time")
        session.begin(progress.slots)
        for job, outcome in cluster.execute(todo, retries, limit, session.started):
            session.ended(job, outcome)
    except KeyboardInterrupt:
        progress.interrupted = True
    except LabError as error:
        progress.trouble = str(error)
    except OSError as error:  # such as no disk space for Dask's files
        progress.trouble = work.because(error)
    finally:
        session.over()


class RunSession:
    """Prints progress and stores finished jobs."""

    def __init__(self, progress: RunProgress, kept: RunStore, todo: Sequence[NotebookJob], say: Any):
        self.progress, self.kept, self.say = progress, kept, say
        self.numbers = {job.id: number for number, job in enumerate(todo, 1)}
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

    def place(self, job: NotebookJob) -> str:
        return f"[{self.numbers[job.id]}/{len(self.numbers)}]"

    def line(self, text: str) -> None:
        self.say(text) if self.bars is None or self.bars.disable else self.bars.write(text)

    def started(self, job: NotebookJob, attempt: int) -> None:
        if self.bars.disable:
            again = f", attempt {attempt}" if attempt > 1 else ""
            self.say(f"{self.place(job)} {job.label} ...{again}")

    def ended(self, job: NotebookJob, outcome: JobOutcome) -> None:
        outcome = replace(outcome, beside=self.beside)
        try:
            self.kept.keep(job, outcome)
        except OSError as error:  # no room on the disk: a resumed run executes it again
            why = f"not written: {work.because(error, self.kept.folder)}"
            outcome = replace(outcome, status="failed", error=why)
        self.progress.outcomes[job.id] = replace(outcome, notebook=b"", log=b"")  # they are on disk
        self.progress.worked += outcome.seconds
        self.bars.update()
        self.line(f"{self.place(job)} {job.label}: {outcome.status}, {outcome.seconds:.1f} s")
        if outcome.error:
            self.line(f"    {outcome.error}")

    def over(self) -> None:
        self.progress.seconds = time.monotonic() - self.since
        if self.bars is not None:
            self.bars.close()


def close(progress: RunProgress, kept: RunStore, root: Path, book: bool, say: Any) -> int:
    """Write results, summary and book, and print the last lines; returns the exit status."""
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
    # a book has one page per chapter, and no other notebooks
    wanted = book and not (progress.interrupted or progress.trouble)
    ran = [job for job in progress.jobs if not job.problem]
    wanted = wanted and all(job.chapter for job in ran) and len({job.notebook for job in ran}) == len(ran)
    if wanted:
        page = make_book(root, kept, outcomes, say)
    lines = [NotebookResult(job.label, job.device, o.seconds, o.status) for job, o in outcomes]
    say("\n" + runner.table(lines))
    if progress.trouble:
        say(f"\n{progress.trouble}")
    if bad:
        say(f"\n{count(len(bad), 'notebook')} of {len(outcomes)} not finished; finished ones are kept.")
        say(f"to continue: reflib run --resume {runner.shown(kept.folder)}")
    if written:
        say(f"\nsummary: {runner.shown(kept.folder / 'summary.html')}")
        say(f"results: {runner.shown(kept.folder / 'results.json')}")
    if page:
        say(f"book:    {runner.shown(page)}")
    if bad and artifacts.wanted():
        where, command = kept.folder / "artifacts", [sys.executable, "-m", "reflib.cli"]
        report = {"the whole run": kept.folder / "summary.html"}
        problems = artifacts.gather(where, artifacts.of_run(outcomes, command), report)
        for line in (*problems, f"artifacts: {runner.shown(where / 'index.html')}"):
            say(line)
    return 1 if bad or not written or (wanted and page is None) else 0


def results(outcomes: Sequence[tuple[NotebookJob, JobOutcome]]) -> dict[str, Any]:
    """The data of results.json."""
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


def make_book(root: Path, kept: RunStore, outcomes: Sequence[tuple[NotebookJob, JobOutcome]], say: Any) -> Path | None:
    """Build the book with the executed notebooks; prints a line and returns None if that fails."""
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
