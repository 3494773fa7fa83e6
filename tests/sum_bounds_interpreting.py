"""Sums on a GPU under ``numerics="eager"``, in Triton's interpreter: those out of bounds (``tests/sum_bounds.py``).

    TRITON_INTERPRET=1 python tests/sum_bounds_interpreting.py SEED ...
"""

import random
import sys

import torch
from interpreter import answer, told
from triton_programs import Interpreted

from tests.sum_bounds import broken, numbers, program


def problem(seed: str) -> str:
    rng = random.Random(seed)
    dtype = (torch.float32, torch.float16)[int(seed) % 2]  # (it rounds to bfloat16 in another way)
    x = numbers(rng, 1 << 15, dtype, "cpu")
    backend = Interpreted(False, numerics="eager")
    torch._dynamo.reset()
    found = broken(torch.compile(program, backend=backend, dynamic=False), x)
    found = [f for f in found if "cumsum" not in f]  # (it scans element by element)
    return "; ".join(found) if backend.launched else "no kernel was launched"


def main() -> dict[str, str]:
    return {seed: told(problem, seed) for seed in sys.argv[1:]}


if __name__ == "__main__":
    answer(main)
