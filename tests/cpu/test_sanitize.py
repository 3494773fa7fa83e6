"""compute-sanitizer's findings, by a stand-in that prints what the tool prints."""

import os
from pathlib import Path

import pytest
import torch

import reflib
from reflib.errors import ReflibError
from reflib.observe.sanitize import sanitized

TOOL = """#!/bin/sh
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3
test "$4" = broken.py && exit 1
echo "========= COMPUTE-SANITIZER"
if [ "$2" = memcheck ]; then
    for thread in 0 1; do
        echo "========= Invalid __global__ write of size 4 bytes"
        echo "=========     at {kernel}+0x150 in m.py:12"
        echo "=========     by thread ($thread,0,0) in block (3,0,0)"
        echo "=========     Access at 0x7f is out of bounds"
        echo "========="
    done
    echo "a line of the program's"
    echo "========= Invalid __shared__ read of size 16 bytes"
    echo "=========     at void at::native::other<float>(int)+0x10"
    echo "========= ERROR SUMMARY: 3 errors"
else
    echo "========= Error: Race reported between Write access at {kernel}+0x1f0 in m.py:10"
    echo "=========     and Read access at {kernel}+0x2a0 in m.py:11 [64 hazards]"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
fi
"""


def test_findings_name_kernels_ops_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).sum(-1)

    e = reflib.explain(f, torch.randn(8, 8), target="sm_90")
    (tool := tmp_path / "compute-sanitizer").write_text(TOOL.replace("{kernel}", e.kernels[0].name))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write, other, race = sanitized("m.py", [e.stages])
    assert write.startswith(f"memcheck: Invalid __global__ write of size 4 bytes in {e.kernels[0].name} (")
    assert "aten.add.Tensor" in write and "test_sanitize.py" in write
    assert other == "memcheck: Invalid __shared__ read of size 16 bytes in at::native::other"
    assert race.startswith(f"racecheck: Error: Race reported between Write access in {e.kernels[0].name} (")
    with pytest.raises(ReflibError, match=r"memcheck did not finish \(exit code 1\): no output"):
        sanitized("broken.py", [e.stages])
    with pytest.raises(ReflibError, match="kernels of a GPU"):
        sanitized("m.py", [reflib.explain(f, torch.randn(8, 8)).stages])


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ReflibError, match="comes with the CUDA toolkit"):
        sanitized("m.py", [])
