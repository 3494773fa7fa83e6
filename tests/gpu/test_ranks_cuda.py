"""Two ranks on two GPUs, with NCCL: each part of ``tests.bench.collectives`` that checks results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("part", ["storage", "collectives", "train", "tune", "late", "other_size"])
def test_ranks(part: str, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.bench.collectives", "--out", str(out), "--only", part]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0 and not any(r.get("wrong") for r in rows), done.stdout + done.stderr
