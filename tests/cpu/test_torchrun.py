"""`torchrun`, as users start programs on several devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SLOW = [pytest.param({"autotune": how}, marks=pytest.mark.slow) for how in ("blocking", "background")]


@pytest.mark.parametrize("options", [{}, *SLOW], ids=str)
def test_a_training_program_runs_under_torchrun(root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(root / "tests" / "torchrun_train.py"), json.dumps(options)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {p.name: p.read_text() for p in tmp_path.glob("rank*")} == dict.fromkeys(["rank0", "rank1"], "same weights")
