"""Repros of the sweep's models, small: does a fresh process make bit-equal kernels, and is it right?

    python -m tests.sweep_repros [--target sm_90] [NAME ...]      all models, a line each; exits with 1 if one is not
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.forking import forked

WRITE = """
import sys, torch, reflib
from reflib.sweep.child import build, stepper
from reflib.sweep.model import models
name, mode, target, folder = sys.argv[1:]
job = {"real": False, "dtype": "float32", "device": "cpu", "mode": mode}
module, inputs = build({m.name: m for m in models()}[name], job)
options = {"repro": folder, **({"target": target} if target else {})}
with torch.set_grad_enabled(mode == "training"):
    if target:
        reflib.explain(module, *inputs, **options)
    else:
        stepper(reflib.compile(module, **options), module, inputs, mode == "training")()
"""


def written(name: str, mode: str, target: str, folder: Path) -> list[Path]:
    """Repros of its graphs (none of a model that Dynamo leaves to eager); ImportError where its library is missing."""
    code, out, errors = forked("-c", WRITE, name, mode, target, str(folder))
    if "ModuleNotFoundError" in errors:
        raise ImportError(errors.splitlines()[-1])
    assert code == 0 or "no tensor operation was captured" in errors, f"{name}, {mode}: {out}{errors[-3000:]}"
    return sorted(folder.glob("repro_*.py"))


def verdict(path: Path) -> str:
    """"" if it is bit-equal in a process that has compiled nothing; else what that said. (Results that are wrong by a
    hair, beside eager's worst element, are left to the sweep: batch norms of a few rows are ill-conditioned.)"""
    code, out, errors = forked(str(path))
    whole = re.search(r"kernels: (\d+) of \1 are bit-equal", out) and "a new kernel" not in out
    return "" if whole else f"{path}: exit {code}\n{out}{errors[-3000:]}"


def main() -> Iterator[bool]:
    from reflib.sweep.model import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    for m in models():
        for mode in m.modes if not asked.names or m.name in asked.names else ():
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    paths = written(m.name, mode, asked.target, Path(folder))
                except (ImportError, AssertionError) as e:
                    said = f"NOT WRITTEN: {e}"
                else:
                    number = len(paths) or "no graph: nothing is"
                    said = "\n".join(filter(None, map(verdict, paths))) or f"{number} bit-equal"
            print(f"{m.name}, {mode} ({time.perf_counter() - start:.0f} s): {said}", flush=True)
            yield said.endswith("bit-equal")


if __name__ == "__main__":
    sys.exit(0 if all([*main()]) else 1)
