"""The `reflib` command. Each of its commands parses its words and calls one function."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import click

from reflib.errors import PackageError, ReflibError

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
@click.option("--out", type=FOLDER, default=None, help="Where results go.  [default: runs/<id>]")
@click.option("--book/--no-book", default=True, help="Build a book of this run.")
def run(
    device: str, only: str, parameters: tuple[str, ...], root: Path | None, out: Path | None, book: bool
) -> None:
    """Execute the notebooks on this machine and build a book of the results."""
    from reflib.lab import runner

    sys.exit(runner.run(checkout(root), device, slugs(only), pairs(parameters), out, book, click.echo))


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
def book(root: Path | None, out: Path | None, strict: bool) -> None:
    """Build the published book from the committed notebooks, executing nothing."""
    from reflib.lab import book as books
    from reflib.lab import runner

    page = books.build(checkout(root).resolve(), out.resolve() if out else None, strict)
    click.echo(f"book: {runner.shown(page)}")


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

    try:
        found = look(path)
    except PackageError as e:
        raise click.ClickException(str(e)) from e
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
