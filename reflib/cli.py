"""The `reflib` command. Each subcommand parses its arguments and calls one function."""

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import click

from reflib.errors import ReflibError

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, allow_dash=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reflib")
def cli() -> None:
    """The Readable Inductor: a small deep-learning compiler, and the notebooks that teach it."""


def notebook_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options shared by `run` and `record`."""
    options = [
        click.option("--device", default="auto", show_default=True, envvar="DEVICE",
                     help="auto, cpu or cuda; only auto falls back."),
        click.option("--only", default="", envvar="ONLY", help="Slugs of notebooks, separated by commas."),
        click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE",
                     help="A parameter of the notebooks; may be repeated."),
        click.option("--root", type=FOLDER, default=None, help="The checkout.  [default: reflib's own]"),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def pairs(parameters: tuple[str, ...]) -> dict[str, str]:
    """{'rows': '4096'} for ('rows=4096',)."""
    for text in parameters:
        if "=" not in text:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-p")
    return {name.strip(): value.strip() for name, value in (text.split("=", 1) for text in parameters)}


def slugs(only: str) -> list[str]:
    return [Path(s.strip()).stem for s in only.split(",") if s.strip()]


def checkout(root: Path | None) -> Path:
    """The checkout with the notebooks, which an installed package lacks. Raises ClickException."""
    from reflib.lab import runner

    root = root or runner.ROOT
    if not (root / "notebooks").is_dir():
        raise click.ClickException(f"no notebooks/ in {root}: name a checkout with --root")
    return root


def need(*modules: str) -> None:
    """Raise ClickException if modules of the extra `batch` are missing."""
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise click.ClickException(f"{', '.join(lacking)}: not installed; pip install 'reflib[batch]', or make run")


@cli.command()
def doctor() -> None:
    """Check what this machine supports, with remedies for what is missing."""
    from reflib.observe.doctor import doctor as examine
    from reflib.observe.doctor import report

    findings = examine()
    click.echo(report(findings))
    sys.exit(0 if all(f.ok for f in findings if f.needed) else 1)


@cli.command()
@notebook_options
@click.option("--sweep", "sweep_file", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="YAML file: notebooks and lists of parameter values; runs all combinations.")
@click.option("--out", type=FOLDER, default=None, help="Where results go.  [default: runs/<id>]")
@click.option("--resume", default="", metavar="RUN",
              help='Continue a run (its folder, its name under runs/, or "last"); finished jobs are skipped.')
@click.option("--retries", type=click.IntRange(0), default=0, show_default=True, help="Attempts after a failure.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=None, metavar="MIN",
              help="Time limit per notebook, in minutes.")
@click.option("--workers", type=click.IntRange(1), default=None, metavar="N",
              help="Notebooks at the same time on this machine.  [default: one per GPU; one on a CPU]")
@click.option("--scheduler", default="", metavar="ADDRESS", help="A Dask cluster to run on, such as tcp://10.0.0.1:8786.")
@click.option("--book/--no-book", default=True, help="Build a book of this run, if it has each notebook once.")
def run(
    device: str,
    only: str,
    parameters: tuple[str, ...],
    root: Path | None,
    out: Path | None,
    resume: str,
    timeout: float | None,
    **how: Any,
) -> None:
    """Execute notebooks on this machine or on a cluster, and summarize their measurements.

    --only also accepts paths of notebooks. Parameters are checked before the first job. The notebook, rows and log of
    each job are in runs/<id>/jobs; runs/<id>/summary.html compares the jobs.
    """
    need("papermill", "ipykernel", "nbformat", "yaml", "distributed")
    from reflib.batch import run as batch

    if resume and out:
        raise click.BadParameter("a resumed run keeps its folder", param_hint="--out")
    given, limit = pairs(parameters), 60 * timeout if timeout else None
    only_these = [name.strip() for name in only.split(",") if name.strip()]
    root = checkout(root)
    sys.exit(batch.run(root, device, only_these, given, out, say=click.echo, resume=resume, limit=limit, **how))


@cli.command()
@click.option("--device", default="auto", show_default=True, envvar="DEVICE",
              help="auto, cpu or cuda; only auto falls back.")
@click.option("--only", default="", envvar="ONLY", metavar="MODEL,...", help="These models.  [default: all]")
@click.option("--mode", default="inference,training", show_default=True, help="Separated by commas.")
@click.option("--dtype", default="bfloat16,float32", show_default=True, help="In this order.")
@click.option("--backend", default="TorchInductor,reflib,eager", show_default=True,
              help="What is measured; also max-autotune, TorchInductor's, and numerics=eager, batch_invariant and "
              "autotune=blocking, reflib with that option.")
@click.option("--size", type=click.Choice(["auto", "small", "real"]), default="auto", show_default=True,
              help="auto: real on a GPU, small on a CPU.")
@click.option("--models", type=click.Path(exists=True, dir_okay=False), default=None, metavar="FILE.py",
              help="A file with MODELS = [reflib.sweep.Model(...), ...], instead of the registry. It is executed.")
@click.option("--workers", type=click.IntRange(1), default=None, metavar="N",
              help="Processes at the same time; one of them is timed.  [default: 8 at most on a GPU; 1 on a CPU]")
@click.option("--limit", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, metavar="S",
              help="Seconds per measurement, compiling included.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=float("inf"), metavar="S",
              help="Stop after so many seconds.  [default: when all is measured]")
@click.option("--out", type=FOLDER, default=None, help="Where results are, and go.  [default: runs/sweep-<device>]")
@click.option("--list", "listed", is_flag=True, help="List the models, and measure nothing.")
def sweep(
    only: str, mode: str, dtype: str, backend: str, models: str | None, out: Path | None, listed: bool, **more: Any
) -> None:
    """Measure many models, in inference and training, beside eager and TorchInductor.

    Each measurement has a process of its own; one that crashes, hangs or lacks a library is a row with the reason. What
    was measured before with the same versions and commit is skipped: the same command goes on where it stopped. Exit
    status: 0; 1 if something is left, or if reflib crashed or was wrong; 2 for bad input.
    """
    from reflib.sweep import model as registry
    from reflib.sweep import run as sweeping

    if listed:
        for m in registry.models(models or ""):
            click.echo(f"{m.name:18} {m.needs or 'own':14} {', '.join(m.modes)}")
        return
    texts = {"only": only, "modes": mode, "dtypes": dtype, "backends": backend}
    how: dict[str, Any] = {name: tuple(w.strip() for w in text.split(",") if w.strip()) for name, text in texts.items()}
    sys.exit(sweeping.sweep(sweeping.Request(models=models or "", **more, **how), out and out.resolve(), click.echo))


@cli.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--fail-over", default=None, metavar="PERCENT",
              help="Exit with 1 if B is slower by more, such as 5%.  [default for sweeps: 10%]")
def compare(a: Path, b: Path, fail_over: str | None) -> None:
    """Compare the measurements of two runs: folders of `reflib run`, of `reflib sweep`, or of recordings.

    Rows are matched by chapter, case, metric, sizes and parameters. A row is slower if the difference exceeds the limit
    and the spreads; a case that only A could run is broken. Exit status: 0; 1 with --fail-over, or for sweeps, if B is
    slower or broken; 2 for bad input. With REFLIB_ARTIFACTS=1 what is slower or broken runs again, with traces and
    repros.
    """
    from reflib.batch import compare as comparing

    limit = comparing.percent(fail_over) if fail_over is not None else None
    found = comparing.compare(a, b)
    gate = limit is not None or found.of_sweeps
    limit = limit if limit is not None else 0.10 if found.of_sweeps else 0.05
    click.echo(found.report(limit))
    whole = comparing.left(found, limit, a, b, click.echo)
    sys.exit(1 if not whole or gate and found.fails(limit) else 0)


@cli.command()
@notebook_options
@click.option("--out", type=FOLDER, default=None, help="Write there instead of notebooks/.")
@click.option("--commit", default="", help="The commit for the stamp, if there is no git.")
def record(
    device: str,
    only: str,
    parameters: tuple[str, ...],
    root: Path | None,
    out: Path | None,
    commit: str,
) -> None:
    """Execute the notebooks and write their outputs back, stamped with device, versions and commit."""
    from reflib.batch import record as recording

    given = pairs(parameters)
    sys.exit(recording.record(checkout(root), device, slugs(only), given, out, commit, click.echo))


@cli.command()
@click.option("--root", type=FOLDER, default=None, help="The checkout to use.  [default: reflib's own]")
@click.option("--out", type=FOLDER, default=None, help="Where _build/html goes.  [default: the checkout]")
@click.option("--strict/--lenient", default=True, help="Whether warnings are errors.")
@click.option("--repository", default="", envvar="REFLIB_REPOSITORY", metavar="https://github.com/OWNER/NAME",
              help="Repository for the links to Colab.  [default: git's origin]")
def book(root: Path | None, out: Path | None, strict: bool, repository: str) -> None:
    """Build the published book from the committed notebooks, without executing them."""
    from reflib.lab import book as books
    from reflib.lab import runner

    page = books.build(checkout(root).resolve(), out.resolve() if out else None, strict, repository)
    click.echo(f"book: {runner.shown(page)}")


@cli.command()
@click.argument("spec", metavar="FILE.py:NAME")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"), show_default=True,
              help="The page.")
@click.option("--json", "data", type=click.Path(dir_okay=False, path_type=Path), help="Write the data as JSON too.")
@click.option("--inputs", default="", metavar="NAME", help="The arguments: a value or function in the same file.")
@click.option("--input", "shapes", multiple=True, metavar="128x256:float32",
              help="A random argument; may be repeated. Integers: 8x64:int64:0..31999.")
@click.option("--device", default="", help="Move the model to this device.  [default: that of the file]")
@click.option("--target", default=None, metavar="ARCH", help="Generate (not run) code for cpu, sm_90, gfx942 ...")
@click.option("--wrapper", default=None, help="python, cpp or auto.")
@click.option("--autotune", is_flag=True, help="Measure candidates before generating the final code.")
@click.option("--backward", is_flag=True, help="Gradients too.")
@click.option("--dynamic/--static", default=None, help="Symbolic or fixed sizes.")
@click.option("--compare", multiple=True, type=click.Choice(["inductor", "max-autotune"]),
              help="Also time TorchInductor.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OLD.json",
              help="Show what changed since that report (its --json).")
@click.option("--no-measure", is_flag=True, help="Time nothing.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "settings", multiple=True, metavar="NAME=VALUE", help="A field of reflib.Options; may be repeated.")
def report(
    spec: str, out: Path, data: Path | None, inputs: str, shapes: tuple[str, ...], device: str, target: str | None,
    wrapper: str | None, autotune: bool, backward: bool, dynamic: bool | None, compare: tuple[str, ...],
    against: Path | None, no_measure: bool, seed: int, settings: tuple[str, ...],
) -> None:
    """Write a report on the compilation of your model as one HTML page.

    NAME is a function without arguments that returns (model, args) or (model, args, kwargs). With --input or --inputs
    it is the model itself: a module, a module class without required arguments, or a function. Of a repro FILE.py
    (`reflib repro`) no NAME is needed. The file is executed.
    """
    from reflib.lab.report import ReportRequest, parse_options, write
    from reflib.options import Options

    given = {"target": target, "wrapper": wrapper, "autotune": "blocking" if autotune else None}
    options = Options.make({**parse_options(settings), **{k: v for k, v in given.items() if v is not None}})
    command = "reflib " + shlex.join(sys.argv[1:])
    request = ReportRequest(
        spec, inputs, shapes, device, seed, backward, dynamic, not no_measure, compare, command, against
    )
    write(request, options, out, data, lambda line: click.echo(line, err=True))
    click.echo(f"report: {out}")


@cli.command()
@click.argument("spec", metavar="FILE.py:NAME")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("repro.py"), show_default=True,
              help="The file; of more graphs, files with a number.")
@click.option("--inputs", default="", metavar="NAME", help="The arguments, as in `reflib report`.")
@click.option("--input", "shapes", multiple=True, metavar="128x256:float32", help="A random argument, as there.")
@click.option("--device", default="", help="Move the model to this device.  [default: that of the file]")
@click.option("--dynamic/--static", default=None, help="Symbolic or fixed sizes.")
@click.option("--values", is_flag=True, help="Keep all values of the inputs, not only between what they are.")
@click.option("--minify", "smaller", is_flag=True, help="Minify each file as well.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "settings", multiple=True, metavar="NAME=VALUE", help="A field of reflib.Options; may be repeated.")
def repro(
    spec: str, out: Path, inputs: str, shapes: tuple[str, ...], device: str, dynamic: bool | None, values: bool,
    smaller: bool, seed: int, settings: tuple[str, ...],
) -> None:
    """Write each graph of your model as one Python file, which compiles it again and compares it with eager.

    NAME, --input and --inputs are as in `reflib report`. Where compiling fails, the file is written, then the error is
    shown. `python repro.py` exits with 1 if results are wrong or kernels are not those that were made here.
    """
    from reflib.lab.report import parse_options, subject
    from reflib.observe.repro import write

    given = subject.load(spec, inputs, shapes, device, seed)
    options = parse_options(settings)
    for path in write(given.model, given.args, given.kwargs, out, values, dynamic, **options):
        click.echo(path)
        if smaller:
            _minify(path, path.with_stem(f"{path.stem}_min"), None, 60.0)


@cli.command()
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="[default: FILE_min.py]")
@click.option("--slower", type=click.FloatRange(0, min_open=True), default=None, metavar="N",
              help="Look for a part that takes more than N times as long as eager.")
@click.option("--limit", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, metavar="S",
              help="Seconds for one trial; more: it hangs.")
def minify(path: Path, out: Path | None, slower: float | None, limit: float) -> None:
    """Find the smallest part of a repro FILE that still fails: wrong, slower, an error, a crash or a hang."""
    _minify(path, out or path.with_stem(f"{path.stem}_min"), slower, limit)


def _minify(path: Path, out: Path, slower: float | None, limit: float) -> None:
    from reflib.observe.minify import minify_file

    minify_file(path, out, slower, limit, lambda line: click.echo(line, err=True))


@cli.group()
def tune() -> None:
    """Show autotuning decisions of this machine, and transfer them between machines as JSON.

    Decisions are stored in the cache (REFLIB_CACHE_DIR). An exported table has the name of the winning candidate per
    device model, op and sizes; it contains no code.
    """


@tune.command("export")
@click.argument("file", type=FILE, default="-")
@click.option("--device", default=None, metavar="NAME", help="Only decisions for this device model.")
def tune_export(file: str, device: str | None) -> None:
    """Write this machine's decisions to FILE as a portable table.  [default: -, standard output]"""
    from reflib.autotune.known import decided
    from reflib.autotune.store import store
    from reflib.tables import merge, write_table

    found = decided(store())
    table, conflicts = merge([found.on(device) if device else found])
    if device and not table.entries:
        there = ", ".join(found.devices()) or "none"
        raise click.ClickException(f"no decisions on {device!r}; the devices with decisions are: {there}")
    write_table(table, file)
    more = f"; {counted(conflicts, 'older decision')} with other winners omitted" if conflicts else ""
    click.echo(f"{counted(table.entries, 'decision')} to {named(file, 'standard output')}{more}", err=True)


@tune.command("import")
@click.argument("files", type=FILE, nargs=-1, required=True)
def tune_import(files: tuple[str, ...]) -> None:
    """Read portable tables (-: standard input) into this machine's cache.

    Their entries are used where nothing was measured here, if device model, op and sizes are equal and this version of
    reflib has a candidate with that name. All files are checked before any is imported. Of two entries for the same
    key, the newer one is kept.
    """
    from reflib.autotune.store import store
    from reflib.tables import load_table, merge

    tables = [load_table(file) for file in files]
    merged, conflicts = merge(tables)
    store().import_table(merged)
    for file, table in zip(files, tables):
        for name, number in table.devices().items() or {"no device": 0}.items():
            noun = "decision" if number == 1 else "decisions"
            click.echo(f"{number} {noun} for {name} from {named(file, 'standard input')}")
    for line in conflicts:
        click.echo(f"conflict: {line}", err=True)


@tune.command("merge")
@click.argument("out", type=FILE)
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--how", type=click.Choice(["newest", "fastest"]), default="newest", show_default=True,
              help="Which of two entries for the same key is kept.")  # fmt: skip
def tune_merge(out: str, files: tuple[str, ...], how: str) -> None:
    """Write the tables FILES as one, to OUT (-: standard output). Conflicts are listed."""
    from reflib.tables import load_table, merge, write_table

    table, conflicts = merge([load_table(file) for file in files], how)
    write_table(table, out)
    for line in conflicts:
        click.echo(f"conflict: {line}", err=True)
    written = f"{counted(table.entries, 'decision')}, {counted(conflicts, 'conflict')}"
    click.echo(f"{written}, to {named(out, 'standard output')}", err=True)


@tune.command("show")
@click.option("--op", default="", metavar="TEXT", help="Ops whose name contains TEXT.")
def tune_show(op: str) -> None:
    """List decisions made here and imported ones."""
    from reflib.autotune.known import decided
    from reflib.autotune.store import store
    from reflib.tables import Table

    here, imported = decided(store()).entries, store().imports().entries
    text = Table((*here, *imported)).shown(lambda e: "here" if any(e is own for own in here) else "import", op)
    click.echo(text or (f"no decisions for an op with {op!r} in its name" if op else "no decisions"))


@tune.command("clear")
def tune_clear() -> None:
    """Delete all decisions, including imported ones."""
    from reflib.autotune.store import store

    decisions, imported = store().clear()
    click.echo(f"removed {counted(range(decisions), 'decision')} and {imported} imported")


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest, as it is in the file.")
@click.option("--model", default=None, metavar="NAME", help="Of a file with several models: this one.")
def inspect(path: Path, as_json: bool, model: str | None) -> None:
    """Show what is in the package PATH: variants, kernels, sizes, what runs on which GPU. Loads no code."""
    from reflib.package.inspect import inspect as look

    found = look(path, model=model)
    click.echo(json.dumps(found.data, indent=1) if as_json else str(found))


@cli.command("export-cpp")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--arch", default=None, metavar="ARCH", help="One variant only, such as sm_90.  [default: all for GPUs]")
@click.option("--model", default=None, metavar="NAME", help="Of a file with several models: this one.")
def export_cpp(path: Path, folder: Path, arch: str | None, model: str | None) -> None:
    """Write the package PATH as a CMake project into DIR, which is new, empty, or an earlier export.

    The project needs neither Python nor reflib; PyTorch's libraries only if the model calls ATen.
    """
    from reflib.package.export_cpp import export_cpp as export

    export(path, folder, arch, model)
    click.echo(f"cmake -G Ninja -S {folder} -B {folder}/build && cmake --build {folder}/build\nsee {folder}/README.md")


@cli.command()
@click.option("--copy", "folder", type=FOLDER, default=None, metavar="DIR",
              help="Copy only the core into DIR, as a package to read, run and change.")
def weekend(folder: Path | None) -> None:
    """List the weekend core: its files in reading order, with lines, minutes and what to look for."""
    from reflib import weekend as core

    if folder is None:
        click.echo(core.table())
    else:
        click.echo(f"{core.copy(folder)}: {core.lines():,} lines")


def counted(things: Sized, noun: str) -> str:
    """``1 decision``, ``2 decisions``."""
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def named(file: str, dash: str) -> str:
    return dash if file == "-" else file


def main() -> None:
    """The console script: a ReflibError is printed in one line, with exit status 2."""
    try:
        cli()
    except ReflibError as error:
        click.echo(f"reflib: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
