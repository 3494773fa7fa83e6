"""`lab.run_triton`: runs Triton source on tensors, on a GPU or in Triton's interpreter.

The interpreter must be selected before Triton is imported, so it runs in a separate process, which several launches
share because it takes longer to start than they take.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reflib.errors import LabError
from reflib.lab.machine import ROOT

if TYPE_CHECKING:
    import torch


class Launch(NamedTuple):
    """`programs` programs of the `@triton.jit` function `name` in `source`, its pointers in order."""

    name: str
    source: str
    programs: int
    tensors: Sequence[torch.Tensor]
    num_warps: int = 4


def run_triton(launches: Sequence[Launch], timeout_s: float = 300.0) -> None:
    """Run the launches in order; they modify their tensors in place.

    All tensors are on one device. On a CPU, bfloat16 raises LabError (the interpreter has no such type), and each
    program takes at least about a millisecond, so few programs are advisable.
    """
    import torch

    tensors = [t for one in launches for t in one.tensors]
    if not tensors:
        return
    if tensors[0].device.type != "cpu":
        for one in launches:
            load(one.source, one.name)[(one.programs,)](*one.tensors, num_warps=one.num_warps)
        torch.cuda.synchronize()
        return
    if any(t.dtype == torch.bfloat16 for t in tensors):
        raise LabError("Triton's interpreter has no bfloat16; use float16 or float32")
    _interpret(launches, timeout_s)


def load(source: str, name: str) -> Any:
    """The function, imported from a file because Triton reads its source."""
    from reflib import cache

    path = cache.put("kernels", cache.key("lab", source), source.encode(), ".py")
    names: dict[str, Any] = {"__name__": f"reflib_lab_{name}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return names[name]


def _interpret(launches: Sequence[Launch], timeout_s: float) -> None:
    import torch

    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for one in launches for t in one.tensors}
    flat = {p: torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,)) for p, s in storages.items()}  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="reflib-triton-") as folder:
        job = Path(folder) / "job.pt"
        plain = [(one.name, one.source, one.programs, [_place(t) for t in one.tensors]) for one in launches]
        torch.save((flat, plain), job)  # keeps shared storages shared
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        done = subprocess.run(
            [sys.executable, "-m", "reflib.lab.triton_child", str(job)],
            env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
            capture_output=True, text=True, timeout=timeout_s, cwd=folder,
        )  # fmt: skip
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise LabError(f"Triton's interpreter stopped:\n{last}")
        for pointer, after in torch.load(job).items():
            flat[pointer].copy_(after)


def _place(t: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int]:
    dtype = str(t.dtype).removeprefix("torch.")
    return t.untyped_storage().data_ptr(), dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset()
