"""The weekend core alone on a GPU: Triton compiles and launches its kernels."""

import os
import subprocess
import sys
from pathlib import Path

from reflib import weekend
from tests import weekend_alone
from tests.cpu.test_weekend import there


def test_the_core_alone_runs_on_a_gpu(tmp_path: Path) -> None:
    weekend.copy(tmp_path)
    command = [sys.executable, "-W", "ignore", weekend_alone.__file__, str(tmp_path), "cuda"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = {name: text for name, text in there(done.stdout).items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
