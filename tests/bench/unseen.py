"""What models contain beside their matrix products, as their authors write it: functions that reflib was not tuned for.

    reflib sweep --models tests/bench/unseen.py --dtype bfloat16 --out runs/unseen
    python -m tests.bench.functions runs/unseen/results.jsonl         TorchInductor's time over ours; share of a copy

Like ``functions.py``: one table, one line per function where it fits in one, in the files ``unseen_*.py`` by subject. A
function that keeps statistics in float32 says so itself, as models do.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import unseen_data, unseen_layers, unseen_training  # noqa: F401 - they fill TABLE
from tests.bench.functions import model
from tests.bench.unseen_shapes import TABLE

MODELS = [model(name, 0, entry) for name, entry in TABLE.items()]
