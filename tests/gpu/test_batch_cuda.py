"""A batch on real GPUs: each job sees one, no two share it, and all are used."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch

from reflib.batch import run as batch
from tests.batching import checkout

needed = [name for name in ("papermill", "ipykernel", "distributed") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(needed), reason=f"not installed here: {', '.join(needed)}")

USE_A_GPU = """import time, torch
assert torch.cuda.device_count() == 1, torch.cuda.device_count()
x = torch.randn(1024, 1024, device="cuda")
torch.cuda.synchronize()
began, until = time.time(), time.monotonic() + 1
while time.monotonic() < until:
    x = torch.tanh(x @ x)
torch.cuda.synchronize()
gpu = str(torch.cuda.get_device_properties(0).uuid)
with open(f"{FOLDER}/{size}.json", "w") as f:
    json.dump({"gpu": gpu, "began": began, "ended": time.time()}, f)
"""


def test_no_two_jobs_share_a_gpu_and_all_are_used(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    root = checkout(tmp_path, work=USE_A_GPU.replace("{FOLDER}", str(tmp_path)))
    sizes = list(range(1, 2 * gpus + 1))
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"notebooks: [work]\nsize: {sizes}\n")
    said: list[str] = []
    assert batch.run(root, "cuda", out=tmp_path / "out", book=False, say=said.append, sweep_file=sweep) == 0, said
    ran = [json.loads((tmp_path / f"{size}.json").read_text()) for size in sizes]
    by_gpu: dict[str, list[tuple[float, float]]] = {}
    for job in ran:
        by_gpu.setdefault(job["gpu"], []).append((job["began"], job["ended"]))
    assert len(by_gpu) == gpus
    for times in by_gpu.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(times)))
