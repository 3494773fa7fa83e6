"""Checkouts of small notebooks for the tests of `reflib run`, and a stand-in for executing them in a kernel."""

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbformat.v4 import new_code_cell, new_notebook

from reflib.lab import executing
from reflib.lab import notebook as nb
from reflib.lab.executing import NotebookResult

PARAMETERS = '''device: str = "auto"  # where to run
size: int = 3  # how many (1 .. 1000)
flavour: str = "a"  # which (a | b)
'''
REPORT = """import json, os
with open(os.environ["REFLIB_LAB_ROWS"], "a") as f:
    row = {"kind": "row", "name": "sizes", "case": "one", "metric": "time", "unit": "µs", "value": 2.0 * size}
    print(json.dumps({**row, "spread": 0.1, "device": "a test"}), file=f)
print("measured", size)
"""


def checkout(root: Path, **more: str) -> Path:
    """Notebooks by name: each reports a row, then runs its own code."""
    (root / "book").mkdir(parents=True, exist_ok=True)
    for name, code in more.items():
        cells = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(REPORT)]
        nb.write(new_notebook(cells=[*cells, *([new_code_cell(code)] if code else [])]), notebook(root, name))
    return root


def notebook(root: Path, name: str) -> Path:
    return root / "notebooks" / f"{name}.ipynb"


@dataclass
class Stand:
    """Takes the place of `executing.execute`: waits `seconds`, writes what a notebook would have written.

    `fails` of a slug: how many times it fails first. `calls`: (slug, parameters, GPU, begin, end) of each. `stopped`:
    a file that is made when it is stopped.
    """

    seconds: float = 0.02
    fails: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any], str, float, float]] = field(default_factory=list)
    stopped: Path | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self,
        path: Path,
        out: Path,
        parameters: Mapping[str, Any],
        device: str,
        progress: Any,
        environment: Mapping[str, str] | None = None,
        stop: executing.Stop | None = None,
        limit: float | None = None,
    ) -> NotebookResult:
        began = time.monotonic()
        stopped = False
        while stop is not None and not stopped and time.monotonic() < began + self.seconds:
            stopped = stop.wait(min(0.05, self.seconds))
        if stopped and self.stopped:
            self.stopped.touch()
        slug, ended = path.stem, time.monotonic()
        with self.lock:
            gpu = (environment or {}).get("CUDA_VISIBLE_DEVICES", "")
            self.calls.append((slug, dict(parameters), gpu, began, ended))
            failing = self.fails.get(slug, 0) > 0
            self.fails[slug] = self.fails.get(slug, 0) - 1
        for folder in ("notebooks", "logs", "rows"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        (out / "notebooks" / path.name).write_bytes(path.read_bytes())
        (out / "logs" / f"{slug}.log").write_text(f"pid {os.getpid()}\n")
        row = {"kind": "row", "name": "sizes", "case": "one", "metric": "time", "unit": "µs", "device": "a test"}
        value = 2.0 * float(parameters.get("size", 3)) * (2 if parameters.get("flavour") == "b" else 1)
        (out / "rows" / f"{slug}.jsonl").write_text(json.dumps({**row, "value": value, "spread": 0.1}) + "\n")
        if stopped:
            return NotebookResult(slug, device, 0.0, "interrupted", "stopped")
        return NotebookResult(slug, device, ended - began, *(("failed", "it was told to") if failing else ("ok", "")))
