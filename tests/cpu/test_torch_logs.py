"""TORCH_LOGS and TORCH_TRACE show what reflib made of each graph."""

import json
import os
import subprocess
import sys

import torch

import reflib
from reflib.observe import torch_logs

PROGRAM = """
import torch

f = torch.compile(lambda x, n: torch.softmax(torch.relu(x) * n, -1), backend="reflib")
f(torch.randn(4, 8, requires_grad=True), 2.5).sum().backward()
f(torch.randn(4, 9), 2.5)
"""
NAMES = "output_code,fusion,autotuning,ir_pre_fusion,ir_post_fusion,recompiles"


def test_torchs_names_print_and_its_structured_logs_hold_what_reflib_made(tmp_path):
    env = {**os.environ, "TORCH_LOGS": NAMES, "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for graph in ("forward", "backward", "inference"):
        for name in NAMES.split(",")[:-1]:
            assert f"{name}, by reflib, of the {graph} graph" in done.stderr, (name, graph)
    assert "kernel_code, by reflib" not in done.stderr
    assert "def call(args)" in done.stderr and 'extern "C" int k0_relu' in done.stderr and "loops " in done.stderr
    assert "[__recompiles] Recompiling function" in done.stderr, "with torch's own reasons"
    (log,) = tmp_path.glob("*.log")
    heads = [line for line in log.read_text().splitlines() if line.startswith("V") and "{" in line]
    records = [json.loads(line[line.index("{") :]) for line in heads]
    ours = [r for r in records if "inductor_output_code" in r or "reflib" in str(r.get("artifact"))]
    assert len(ours) == 3 * 6 and all(r["frame_id"] == 0 and r["has_payload"] for r in ours), ours[:2]
    assert {r["frame_compile_id"] for r in ours} == {0, 1}
    assert sum("inductor_post_grad_graph" in r for r in records) == 3
    assert any("recompile_reasons" in str(r.get("artifact")) for r in records)


def test_a_graph_that_cannot_be_printed_is_one_warning(monkeypatch, caplog):
    stages = reflib.explain(lambda x: torch.relu(x) + 1, torch.ones(3), target="cpu").stages
    monkeypatch.setattr(stages.graph.module, "print_readable", lambda **_: 1 / 0)
    monkeypatch.setattr(torch_logs, "trace_structured", lambda *_, payload_fn, **__: payload_fn())
    torch_logs.log(stages)
    said = [r.getMessage() for r in caplog.records if r.name == "reflib.trace"]
    assert len(said) == 1 and "ZeroDivisionError" in said[0]
