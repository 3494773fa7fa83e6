"""Runs the matrix products of ``matmul_cases`` in Triton's interpreter: a program of its own, because the interpreter
must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/matmul_interpreting.py [name ...]

Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback

import torch
from matmul_cases import matmul_cases, problem
from triton_interpreting import run

from reflib.lab.triton_child import complete_the_interpreter


def main(wanted: list[str]) -> dict[str, str]:
    complete_the_interpreter()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, make) in enumerate(matmul_cases().items()):
            if wanted and name not in wanted:
                continue
            try:
                case = make()
                results[name] = problem(case, run(f"case{number}", case, folder))  # type: ignore[arg-type]
            except Exception as e:
                results[name] = f"{type(e).__name__}: {e}\n" + "".join(traceback.format_exc().splitlines(True)[-6:])
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1:])))
