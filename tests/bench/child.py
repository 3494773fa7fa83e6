"""What runs in a process of its own: ``python -m tests.bench.child MODULE.FUNCTION JOB.json ROWS.jsonl``.

The function takes the job and yields rows. Each is written at once, and so is the name of what is about to run (a row
of kind "trying"): when the process dies, its parent knows what killed it, and starts again without that. Nothing but
the standard library is imported before the function's module is: some of them time imports.
"""

import importlib
import json
import sys
from pathlib import Path


def main(function: str, job: str, rows: str) -> None:
    module, name = function.split(".")
    produce = getattr(importlib.import_module(f"tests.bench.{module}"), name)
    with open(rows, "a", encoding="utf-8") as file:
        for row in produce(json.loads(Path(job).read_text())):
            file.write(json.dumps({"kind": "row", **row}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
