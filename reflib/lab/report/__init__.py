"""`reflib report FILE.py:NAME`: what the compiler made of one model of the user's own, as one HTML page.

The page has the views that the chapters have, for the user's code: what each stage made, what was fused and what was
not and why, decisions with their candidates, memory over time, every kernel beside the IR that it came from, the
wrapper, when what ran; and whether the results are eager's, and how long a call takes beside eager's.

    subject   FILE.py:NAME and what was said about inputs -> a model, its arguments      the user's mistakes end here
    trial     run eager, compile, run, compare, time; peers in a process of their own
    gather    Explanations -> plain data, which `--json` writes as it is
    drawing   numbers -> figures: shapes with words for who does not see them
    page      data -> HTML: page.html (Jinja, which PyTorch brings along, escapes all text), page.css, page.js

It lives in `lab` because it measures and draws as notebooks do; the compiler knows nothing of it. The figures are SVG
of our own, not matplotlib's, because `pip install reflib` brings none and because the page follows the reader's dark
mode, links each box to its kernel and lets text be searched; how nodes are laid out, colours and words are the lab's.

The file is one: no fonts, scripts or pictures from elsewhere, and a Content-Security-Policy that says so. Nothing is
written before everything is known, and then atomically: a report is whole or not there. What cannot be had here (a
GPU that is named by `--target`, a peer that crashed) is said on the page in the place where it would be.
"""

from __future__ import annotations

import ast
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.errors import LabError
from reflib.options import Options


@dataclass(frozen=True)
class Request:
    """What `write` is to do. `spec`: FILE.py:NAME. `inputs`: a name in the file; `shapes`: `128x256:float32` each.
    `device`: "" leaves tensors where the file made them. `compare`: "inductor", "max-autotune". `command`: the words,
    for the page."""

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


def write(
    request: Request, options: Options, out: Path, data_file: Path | None = None, say: Callable[[str], Any] = print
) -> dict[str, Any]:
    """Make the report, write it to `out` (and its data to `data_file`), and return the data.

    Raises a ReflibError where the file, the name, the inputs or the model is at fault; nothing is written then.
    """
    from reflib.lab.report import gather, page, subject, trial

    if options.autotune == "background":
        raise LabError('autotune="background" decides while a program runs; a report needs "blocking" (--autotune)')
    for path in filter(None, (out, data_file)):
        _check_writable(path)
    options = _with_imports(options, request)
    found = subject.load(request.spec, request.inputs, request.shapes, request.device, request.seed)
    said = trial.run(found, request, options, say)
    data = gather.gather(found, request, options, said)
    data["date"] = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    text = page.render(data)
    if data_file is not None:
        _write(data_file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    _write(out, text)
    return data


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """{"fuse": False, "max_fused_ops": 8} of ("fuse=false", "max-fused-ops=8"). What is no Python literal is text."""
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


def _with_imports(options: Options, request: Request) -> Options:
    """Processes that measure import the user's file where it registers ops: only from there do they know them."""
    path = Path(request.spec.rpartition(":")[0])
    if options.autotune != "blocking" or options.tuning_imports or not path.is_file():
        return options
    registers = b"register_custom_op_autotuning" in path.read_bytes()
    return options.but(tuning_imports=(str(path.resolve()),)) if registers else options


def _check_writable(path: Path) -> None:
    """Before minutes of work: the folder must be there."""
    if path.is_dir() or not path.parent.is_dir():
        raise LabError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"no folder {path.parent}"))


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    try:
        atomic.write(path, text)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}") from error
