"""The ten lines on the book's first page, executed: `python -m reflib.lab.landing` writes their output.

book/landing.json = {"output": text, "versions", "ops": [[ATen op, group]], "kernels": [of each group {"name", "lines"};
null: a call], "moved": [bytes with one kernel per op, bytes fused], "variants": [{"name", "generation", "bytes"}],
"weights", "size"}. The page shows the text and draws the rest; a test executes the lines again and compares.
"""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reflib.lab.machine import ROOT, versions

EXAMPLE = ROOT / "book" / "landing.py"
RESULT = ROOT / "book" / "landing.json"


def execute(example: Path = EXAMPLE) -> dict[str, Any]:
    """Run the example in an empty folder; its output, and the numbers for the figure."""
    names: dict[str, Any] = {"__name__": "landing"}
    here, printed = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="reflib-landing-") as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(example.read_text(encoding="utf-8"), str(example), "exec"), names)
            return {"output": printed.getvalue(), "versions": versions(), **facts(**names)}
        finally:
            os.chdir(here)


def facts(e: Any, path: Path, **_: Any) -> dict[str, Any]:
    """The numbers for the figure, from the variables of the example."""
    from reflib.lab.pictures import moved_bytes
    from reflib.models import generation
    from reflib.package.inspect import inspect

    home = {member: i for i, group in enumerate(e.groups) for member in group.members}
    printed = iter(e.kernels)
    kernels = [None if group.kind == "extern" else next(printed) for group in e.groups]
    package = inspect(path)
    variants = [
        {"name": a.arch, "generation": generation(a.made_for), "bytes": package.machine_code(a)}
        for a in package.manifest.variants
    ]
    return {
        "ops": [[o.op.removeprefix("aten.").split(".")[0], home[n.name]] for n in e.program.nodes for o in n.origins],
        "kernels": [k and {"name": k.name, "lines": len(k.source.splitlines())} for k in kernels],
        "moved": [moved_bytes(e.program), moved_bytes(e.fused)],
        "variants": variants,
        "weights": package.sizes["weights"],
        "size": package.size,
    }


def main() -> None:
    RESULT.write_text(json.dumps(execute(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
