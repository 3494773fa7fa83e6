"""Traces on a GPU: kernels on the device, each with its launch and what it came from."""

import gzip
import json

import pytest
import torch

import reflib
from reflib import tracing


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_each_kernel_has_its_launch_and_its_lines(wrapper, tmp_path):
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    f = reflib.compile(lambda x: torch.softmax(torch.relu(x), -1), trace=str(tmp_path), wrapper=wrapper)
    for _ in range(3):
        f(x).square().sum().backward()
    (path,) = tracing.flush()
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    arrows = {phase: {e["id"] for e in found if e["ph"] == phase} for phase in "sf"}
    calls = [e for e in found if e.get("cat") == "call" and not e["name"].startswith("load")]
    device = [e for e in found if e.get("cat") == "device" and e["args"].get("ops")]
    assert len(device) >= 6, "forward and backward of three calls"
    assert arrows["f"] and arrows["f"] <= arrows["s"]
    for e in device:
        assert "loops " in e["args"]["nest"] and any("test_trace_cuda.py" in line for line in e["args"]["lines"])
        inside = [c for c in calls if c["ts"] - 200 <= e["ts"] and e["ts"] + e["dur"] <= c["ts"] + c["dur"] + 200]
        assert e["args"]["graph"] in {c["name"] for c in inside}, "on the clock of the host"
