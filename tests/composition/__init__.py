"""The composition table: every feature under every wrapper. Shared by tests/cpu and tests/gpu.

``FEATURES`` maps a feature's name to ``feature(device, wrapper)``, which compiles, calls and compares with eager. A
column is one more ``wrapper``, a row one more function. ``CUDA_FEATURES`` are those that only a GPU has. The column
"package" is no wrapper of its own: the function goes through a file (``packaged.py``); in the column "exported" through
the C++ project that is made of the file (``in_cpp.py``). What is not applicable there is in ``NOT_IN_PACKAGES`` and
``NOT_EXPORTED``, with the reason, and what happens instead: two rows.
"""

from pathlib import Path

import pytest
import torch

from reflib.lower import custom_ops
from tests.composition import choices, features, on_gpus, packaged
from tests.composition.not_in_packages import NOT_EXPORTED, NOT_IN_PACKAGES
from tests.composition.table import CUDA_FEATURES, FEATURES, IN_A_FILE, WRAPPERS

__all__ = [
    "CUDA_FEATURES", "FEATURES", "NOT_EXPORTED", "NOT_IN_PACKAGES", "FALLBACKS", "WRAPPERS", "choices", "features",
    "on_gpus", "run",
]  # fmt: skip


def run(name: str, device: str, wrapper: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """One cell, in a cache and a registry of its own."""
    monkeypatch.setattr(custom_ops, "_REGISTERED", {})
    if name in ("tuning_in_the_background", "tuning_in_workers"):  # what is known from elsewhere is not measured
        monkeypatch.setenv("REFLIB_CACHE_DIR", str(folder))
        monkeypatch.delenv("REFLIB_CACHE_DECISIONS", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    left_out = {"package": NOT_IN_PACKAGES, "exported": NOT_EXPORTED}.get(wrapper, {})
    if name in left_out:
        _, instead = left_out[name]
        return instead(device)
    packaged.called.clear()
    {**FEATURES, **CUDA_FEATURES}[name](device, wrapper)
    assert bool(packaged.called) == (wrapper in IN_A_FILE), "a row of this column calls what it packaged"


# the start of a child without Python.h (``ctypes``: kernels are called so), or which does not know how tensors lie
FALLBACKS = """
import tempfile
from pathlib import Path
import pytest, torch
from reflib.errors import ToolchainError
from reflib.wrap import host, native

def no():
    raise ToolchainError("no Python.h here")

if {ctypes!r}:
    native.build_host = no
else:
    host._layout_is_known = lambda: False
from tests.composition import run
"""
