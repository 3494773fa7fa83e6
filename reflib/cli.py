"""The `reflib` command. Each of its commands parses its words and calls one function."""

from __future__ import annotations

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
    """What `run` and `record` share."""
    options = [
        click.option("--device", default="auto", show_default=True, envvar="DEVICE",
                     help="auto, cpu or cuda; only auto falls back."),
        click.option("--only", default="", envvar="ONLY", help="Slugs of notebooks, with commas between."),
        click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE",
                     help="A parameter of the notebooks; may be repeated."),
        click.option("--root", type=FOLDER, default=None, help="The checkout.  [default: reflib's own]"),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def pairs(parameters: tuple[str, ...]) -> dict[str, str]:
    """{'rows': '4096'} of ('rows=4096',)."""
    for text in parameters:
        if "=" not in text:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="-p")
    return {name.strip(): value.strip() for name, value in (text.split("=", 1) for text in parameters)}


def slugs(only: str) -> list[str]:
    return [Path(s.strip()).stem for s in only.split(",") if s.strip()]


def checkout(root: Path | None) -> Path:
    """The checkout with the notebooks; they are not part of an installed package."""
    from reflib.lab import runner

    root = root or runner.ROOT
    if not (root / "notebooks").is_dir():
        raise click.ClickException(f"no notebooks/ in {root}: name a checkout with --root")
    return root


def need(*modules: str) -> None:
    """What an installation without the extra may lack."""
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise click.ClickException(f"{', '.join(lacking)}: not installed; pip install 'reflib[batch]', or make run")


@cli.command()
def doctor() -> None:
    """What this machine can and cannot do, and what would help."""
    from reflib.observe.doctor import doctor as examine
    from reflib.observe.doctor import report

    findings = examine()
    click.echo(report(findings))
    sys.exit(0 if all(f.ok for f in findings if f.needed) else 1)


@cli.command()
@notebook_options
@click.option("--sweep", "sweep_file", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="YAML: notebooks, and lists of values of parameters; their product is executed.")
@click.option("--out", type=FOLDER, default=None, help="Where results go.  [default: runs/<id>]")
@click.option("--resume", default="", metavar="RUN",
              help='Go on with a run (its folder, its name under runs/, or "last"): what is finished is not repeated.')
@click.option("--retries", type=click.IntRange(0), default=0, show_default=True, help="Attempts more where one fails.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=None, metavar="MIN",
              help="Minutes of one notebook; then its kernel is killed.")
@click.option("--workers", type=click.IntRange(1), default=None, metavar="N",
              help="Notebooks at once on this machine.  [default: one a GPU; one on a CPU]")
@click.option("--scheduler", default="", metavar="ADDRESS", help="A Dask cluster to run on, such as tcp://10.0.0.1:8786.")
@click.option("--book/--no-book", default=True, help="Build a book of this run, where each notebook is in it once.")
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
    """Execute notebooks on this machine, or on a cluster, and sum up what they measured.

    --only takes paths of notebooks too. Parameters are checked before anything runs. Each job leaves its notebook,
    its rows and its log in runs/<id>/jobs, and runs/<id>/summary.html compares them.
    """
    need("papermill", "ipykernel", "nbformat", "yaml", "distributed")
    from reflib.batch import run as batch

    if resume and out:
        raise click.BadParameter("a run that is resumed stays where it is", param_hint="--out")
    given, limit = pairs(parameters), 60 * timeout if timeout else None
    only_these = [name.strip() for name in only.split(",") if name.strip()]
    root = checkout(root)
    sys.exit(batch.run(root, device, only_these, given, out, say=click.echo, resume=resume, limit=limit, **how))


@cli.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--fail-over", default=None, metavar="PERCENT", help="Exit with 1 when B is slower by more, such as 5%.")
def compare(a: Path, b: Path, fail_over: str | None) -> None:
    """Compare what two runs measured: folders of `reflib run`, or of recordings.

    Rows are the same when chapter, case, metric, sizes and parameters are. One is slower when it is by more than the
    limit, and by more than the spreads. Exit status: 0, 1 with --fail-over when B is slower, 2 for bad input.
    """
    from reflib.batch import compare as comparing

    limit = comparing.percent(fail_over) if fail_over is not None else 0.05
    found = comparing.compare(a, b)
    click.echo(found.report(limit))
    sys.exit(1 if fail_over is not None and found.fails(limit) else 0)


@cli.command()
@notebook_options
@click.option("--out", type=FOLDER, default=None, help="Write there instead of notebooks/.")
@click.option("--commit", default="", help="The commit to stamp, where there is no git.")
@click.option("--devices", default="", help="GPUs, such as 0,1: a notebook at once on each, longest first.")
def record(
    device: str,
    only: str,
    parameters: tuple[str, ...],
    root: Path | None,
    out: Path | None,
    commit: str,
    devices: str,
) -> None:
    """Execute the notebooks and write their outputs back, stamped with device, versions and commit."""
    from reflib.lab import runner

    gpus = [d.strip() for d in devices.split(",") if d.strip()]
    given = pairs(parameters)
    sys.exit(runner.record(checkout(root), device, slugs(only), given, out, commit, click.echo, gpus))


@cli.command()
@click.option("--root", type=FOLDER, default=None, help="The checkout to use.  [default: reflib's own]")
@click.option("--out", type=FOLDER, default=None, help="Where _build/html goes.  [default: the checkout]")
@click.option("--strict/--lenient", default=True, help="Whether warnings are errors.")
@click.option("--repository", default="", envvar="REFLIB_REPOSITORY", metavar="https://github.com/OWNER/NAME",
              help="Where chapters are opened in Colab from.  [default: git's origin]")
def book(root: Path | None, out: Path | None, strict: bool, repository: str) -> None:
    """Build the published book from the committed notebooks, executing nothing."""
    from reflib.lab import book as books
    from reflib.lab import runner

    page = books.build(checkout(root).resolve(), out.resolve() if out else None, strict, repository)
    click.echo(f"book: {runner.shown(page)}")


@cli.command()
@click.argument("spec", metavar="FILE.py:NAME")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"), show_default=True,
              help="The page.")
@click.option("--json", "data", type=click.Path(dir_okay=False, path_type=Path), help="What is on the page, as JSON.")
@click.option("--inputs", default="", metavar="NAME", help="The arguments: a value or function of the same file.")
@click.option("--input", "shapes", multiple=True, metavar="128x256:float32",
              help="An argument that is made here; may be repeated. Integers: 8x64:int64:0..31999.")
@click.option("--device", default="", help="Move the model there.  [default: where the file puts it]")
@click.option("--target", default=None, metavar="ARCH", help="Code for cpu, sm_90, gfx942 ...; it is not run.")
@click.option("--wrapper", default=None, help="python, cpp or auto.")
@click.option("--autotune", is_flag=True, help="Measure the candidates first.")
@click.option("--backward", is_flag=True, help="Gradients too.")
@click.option("--dynamic/--static", default=None, help="Sizes as symbols, or fixed.")
@click.option("--compare", multiple=True, type=click.Choice(["inductor", "max-autotune"]),
              help="Time TorchInductor too.")
@click.option("--no-measure", is_flag=True, help="Time nothing.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "settings", multiple=True, metavar="NAME=VALUE", help="A field of reflib.Options; may be repeated.")
def report(
    spec: str, out: Path, data: Path | None, inputs: str, shapes: tuple[str, ...], device: str, target: str | None,
    wrapper: str | None, autotune: bool, backward: bool, dynamic: bool | None, compare: tuple[str, ...],
    no_measure: bool, seed: int, settings: tuple[str, ...],
) -> None:
    """Write what the compiler makes of your own model as one HTML page.

    NAME is a function of no arguments that returns (model, args) or (model, args, kwargs). With --input or --inputs it
    is the model itself: a module, a class of module that needs no arguments, or a function. The file is executed.
    """
    from reflib.lab.report import Request, parse_options, write
    from reflib.options import Options

    given = {"target": target, "wrapper": wrapper, "autotune": "blocking" if autotune else None}
    options = Options.make({**parse_options(settings), **{k: v for k, v in given.items() if v is not None}})
    command = "reflib " + shlex.join(sys.argv[1:])
    request = Request(spec, inputs, shapes, device, seed, backward, dynamic, not no_measure, compare, command)
    write(request, options, out, data, lambda line: click.echo(line, err=True))
    click.echo(f"report: {out}")


@cli.group()
def tune() -> None:
    """What autotuning decided on this machine: show it, and move it between machines as JSON.

    Decisions are kept in the cache (REFLIB_CACHE_DIR). A table that is exported holds, for a device model, an op and
    its sizes, the name of the candidate that won; no code.
    """


@tune.command("export")
@click.argument("file", type=FILE, default="-")
@click.option("--device", default=None, metavar="NAME", help="Decisions on this device model alone.")
def tune_export(file: str, device: str | None) -> None:
    """Write this machine's decisions to FILE as a portable table.  [default: -, standard output]"""
    from reflib.choose.portable import decided, merge, write_table
    from reflib.choose.store import store

    found = decided(store())
    table, conflicts = merge([found.on(device) if device else found])
    if device and not table.entries:
        there = ", ".join(found.devices()) or "none"
        raise click.ClickException(f"no decisions on {device!r}; the devices with decisions are: {there}")
    write_table(table, file)
    more = f"; {counted(conflicts, 'older decision')} with other winners left out" if conflicts else ""
    click.echo(f"{counted(table.entries, 'decision')} to {named(file, 'standard output')}{more}", err=True)


@tune.command("import")
@click.argument("files", type=FILE, nargs=-1, required=True)
def tune_import(files: tuple[str, ...]) -> None:
    """Read portable tables (-: standard input) into this machine's cache.

    They are used for what was not measured here: where device model, op and sizes are the same and this version of
    reflib has a candidate of the name. All files are checked before any is imported; of two entries about the same the
    newer one stays.
    """
    from reflib.choose.portable import merge, read_table
    from reflib.choose.store import store

    tables = [read_table(file) for file in files]
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
              help="Which of two entries about the same stays.")  # fmt: skip
def tune_merge(out: str, files: tuple[str, ...], how: str) -> None:
    """Write the tables FILES as one, to OUT (-: standard output). Conflicts are listed."""
    from reflib.choose.portable import merge, read_table, write_table

    table, conflicts = merge([read_table(file) for file in files], how)
    write_table(table, out)
    for line in conflicts:
        click.echo(f"conflict: {line}", err=True)
    said = f"{counted(table.entries, 'decision')}, {counted(conflicts, 'conflict')}"
    click.echo(f"{said}, to {named(out, 'standard output')}", err=True)


@tune.command("show")
@click.option("--op", default="", metavar="TEXT", help="Ops whose name contains TEXT.")
def tune_show(op: str) -> None:
    """List decisions made here and imported ones."""
    from reflib.choose.portable import shown
    from reflib.choose.store import store

    text = shown(store(), op)
    click.echo(text or (f"no decisions for an op with {op!r} in its name" if op else "no decisions"))


@tune.command("clear")
def tune_clear() -> None:
    """Forget all decisions, imported ones too."""
    from reflib.choose.store import store

    decisions, imported = store().clear()
    click.echo(f"removed {counted(range(decisions), 'decision')} and {imported} imported")


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest, as it is in the file.")
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in the package PATH: arms, kernels, sizes, what runs on which GPU. Loads no code."""
    from reflib.package.inspect import inspect as look

    found = look(path)
    click.echo(json.dumps(found.data, indent=1) if as_json else str(found))


@cli.command("export-cpp")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--arch", default=None, metavar="ARCH", help="One arm only, such as sm_90.  [default: all for GPUs]")
def export_cpp(path: Path, folder: Path, arch: str | None) -> None:
    """Write the package PATH as a CMake project into DIR, which is new, empty, or of an export before.

    The project needs neither Python nor reflib; PyTorch's libraries only if the model calls ATen.
    """
    from reflib.package.export_cpp import export_cpp as export

    export(path, folder, arch)
    click.echo(f"cmake -G Ninja -S {folder} -B {folder}/build && cmake --build {folder}/build\nsee {folder}/README.md")


def counted(things: Sized, noun: str) -> str:
    """``1 decision``, ``2 decisions``."""
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def named(file: str, dash: str) -> str:
    return dash if file == "-" else file


def main() -> None:
    """The console script: reflib's own errors are one line and exit status 2."""
    try:
        cli()
    except ReflibError as error:
        click.echo(f"reflib: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
