"""`reflib report FILE.py:NAME`: the compilation of a user's model, or of a repro file, as one HTML page.

The page has the views of the chapters: results per stage, fused groups and the reasons against other fusions, decisions
with their candidates, memory over time, each kernel beside its IR, the wrapper, a timeline; and a comparison of results
and times with eager.

    subject   FILE.py:NAME and the input options -> a model and its arguments; reports the user's mistakes
    changes   the data of two reports -> what is new, gone and different
    trial     runs eager, compiles, runs, compares, times; peers in separate processes
    gather    Explanations -> plain data, also the output of `--json`
    drawing   numbers -> figures: shapes with alt text
    page      data -> HTML: page.html (Jinja, a dependency of PyTorch, escapes all text), page.css, page.js

It is part of `lab` because it measures and draws like notebooks; the compiler does not depend on it. The figures are
SVG without matplotlib, which is not a dependency of reflib: the page supports dark mode, links each box to its kernel
and has searchable text. The layout of nodes, colours and texts are those of the lab.

It is a single file without external fonts, scripts or images, enforced by a Content-Security-Policy, and is written
atomically at the end. If a part is missing (a GPU named by `--target` that is not here, a peer that crashed), the page
has a note in its place.
"""

import ast
import datetime
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.errors import LabError
from reflib.options import Options


@dataclass(frozen=True)
class ReportRequest:
    """The options of a report. `spec`: FILE.py:NAME, or a repro file. `inputs`: a name in the file; `shapes`:
    `128x256:float32` each. `device`: "" keeps that of the file's tensors. `compare`: "inductor", "max-autotune".
    `command`: shown on the page. `against`: the data of an earlier report, to show what changed."""

    spec: str
    inputs: str = ""
    shapes: tuple[str, ...] = ()
    device: str = ""
    seed: int = 0
    backward: bool = False
    dynamic: bool | None = None
    measure: bool = True
    compare: tuple[str, ...] = ()
    command: str = ""
    against: Path | None = None


def write(
    request: ReportRequest,
    options: Options,
    out: Path,
    data_file: Path | None = None,
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Make the report, write it to `out` (and its data to `data_file`), and return the data.

    Raises a ReflibError, and writes nothing, if the file, the name, the inputs or the model is wrong.
    """
    from reflib.lab.report import changes, gather, page, subject, trial
    from reflib.observe.rebuild import as_captured
    from reflib.observe.repro import _plain_options

    if options.autotune == "background":
        raise LabError('autotune="background" decides while a program runs; a report needs "blocking" (--autotune)')
    for path in filter(None, (out, data_file)):
        _check_writable(path)
    old = changes.read(request.against) if request.against else None
    options = _with_imports(options, request)
    found = subject.load(request.spec, request.inputs, request.shapes, request.device, request.seed)
    if found.repro is not None:  # options given here go before its own
        found.repro.options |= _plain_options(options)[0]
        options = Options.make(found.repro.options)
        request = replace(request, backward="backward" in found.repro.kernels)
    with as_captured(found.repro.state) if found.repro is not None else nullcontext():
        result = trial.run(found, request, options, say)
    data = gather.gather(found, request, options, result)
    data["date"] = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    data["changes"] = changes.changes(old, data) if old else None
    text = page.render(data)
    if data_file is not None:
        _write(data_file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    _write(out, text)
    return data


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """{"fuse": False, "max_fused_ops": 8} for ("fuse=false", "max-fused-ops=8").

    Values that are not Python literals stay text.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise LabError(f"-o {pair!r} is not NAME=VALUE")
        text = text.strip()
        text = text.capitalize() if text.lower() in ("true", "false", "none") else text
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        found[name.strip().replace("-", "_")] = value
    return found


def _with_imports(options: Options, request: ReportRequest) -> Options:
    """Options with which measuring processes import the user's file, if it registers ops."""
    path = Path(request.spec.rpartition(":")[0])
    if options.autotune != "blocking" or options.tuning_imports or not path.is_file():
        return options
    registers = b"register_custom_op_autotuning" in path.read_bytes()
    return options.but(tuning_imports=(str(path.resolve()),)) if registers else options


def _check_writable(path: Path) -> None:
    """LabError if the file cannot be written, before minutes of work."""
    if path.is_dir() or not path.parent.is_dir():
        raise LabError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))


def _write(path: Path, text: str) -> None:
    """Write atomically. Raises LabError."""
    try:
        atomic.write(path, text)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}") from error
