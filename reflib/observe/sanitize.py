"""Accesses out of bounds and races in generated kernels, by NVIDIA's compute-sanitizer, where that is installed.

``python repro.py --sanitize`` runs the repro once more under each of TOOLS: ``memcheck`` (addresses outside of all
allocations, misaligned ones) and ``racecheck`` (threads of a block that access shared memory with no barrier between).
PyTorch's caching allocator is off there: in its blocks of megabytes a neighbour's memory would count as in bounds.
Findings name the kernel with its ops and the user's lines.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..errors import ReflibError
from ..pipeline import Stages
from .trace import links

TOOLS = ("memcheck", "racecheck")
MOST = 20  # findings that are said per tool
_INSTALLED = "/usr/local/cuda/bin/compute-sanitizer"
_BEGINS = re.compile(r"Invalid |Misaligned |Uninitialized |Error: |Warning: |Program hit ")


def sanitized(path: str, stages: Sequence[Stages]) -> list[str]:
    """What the tools find in the kernels that the program at ``path`` runs, a line each: nothing if all is well.
    ``stages``: of its graphs. ReflibError where there is no compute-sanitizer, or it cannot run here."""
    tool = shutil.which("compute-sanitizer") or (_INSTALLED if os.access(_INSTALLED, os.X_OK) else None)
    if tool is None:
        raise ReflibError("compute-sanitizer is not installed: it comes with the CUDA toolkit; put it on the PATH")
    if not any(k.language == "triton" for g in stages for k in (g.kernels or {}).values()):
        raise ReflibError("compute-sanitizer looks at kernels of a GPU, and these graphs have none")
    origins = {name: found for g in stages for name, found in links(g).items()}
    kernels = {name: "; ".join([", ".join(of["ops"]), *of["lines"]]) for name, of in origins.items()}
    bad: list[str] = []
    for name in TOOLS:
        command = [tool, "--tool", name, sys.executable, path]
        print("running " + " ".join(command), flush=True)
        done = subprocess.run(
            command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if not re.search(r"^=+ .*SUMMARY", done.stdout, re.M):
            last = done.stdout.strip().splitlines()[-1:] or ["no output"]
            raise ReflibError(f"{name} did not finish (exit code {done.returncode}): {last[0]}")
        found = list(dict.fromkeys(findings(done.stdout, kernels)))
        bad += [f"{name}: {line}" for line in found[:MOST]]
        bad += [f"{name}: {len(found) - MOST} more"] if len(found) > MOST else []
    return bad


def findings(output: str, kernels: Mapping[str, str]) -> Iterator[str]:
    """What is wrong, and where, from the tool's lines (``=========``). kernels: their origins, by name."""
    said = [line.lstrip("=").strip() for line in output.splitlines() if line.startswith("=====")]
    begins = [i for i, line in enumerate(said) if _BEGINS.match(line)]
    for start, stop in zip(begins, [*begins[1:], len(said)]):
        block = " ".join(said[start:stop])
        name = next((k for k in kernels if re.search(rf"\b{re.escape(k)}\b", block)), None)
        where = re.search(r"\bat (?:void )?([\w:]+)", block)
        what = re.sub(r" at .*", "", said[start])
        yield f"{what} in {name} ({kernels[name]})" if name else f"{what} in {where[1] if where else 'no kernel'}"
