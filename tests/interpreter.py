"""Starts programs that run Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@functools.cache
def results(program: str, *cases: str) -> dict[str, Any]:
    """What a program of this folder prints last, which is JSON. All its ``cases`` (none: all it has) run in one
    child."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, str(TESTS / program), *cases], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
