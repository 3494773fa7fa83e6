"""The benchmark of weight-only, scaled and grouped products: its cases and its file, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from tests.bench import products


@pytest.mark.parametrize("section", ["int8", "int4", "fp8", "grouped"])
def test_cases_agree_with_their_reference(section: str) -> None:
    c = next(c for c in products.cases(small=True) if c.section == section)
    args = c.make("cpu")
    want = products.reference(c, args)
    error = (c.fn(*args).float() - want).abs().max() / want.abs().max()
    assert float(error) < 2e-2 and c.flops > 0 and c.moved >= c.weights


def test_a_run_ends_and_is_continued(tmp_path: Path) -> None:
    found = [c for c in products.cases(small=True) if c.section in ("int8", "int4")][:3]
    out = tmp_path / "p.json"
    left = products.run(found, ["eager", "reflib"], out, -1, "cpu")
    assert left == [f"{c.section} {c.name}" for c in found] and not out.exists()
    assert products.run(found[:1], ["eager"], out, 60, "cpu") == []
    assert products.run(found[:2], ["eager", "reflib"], out, 60, "cpu") == []
    rows = json.loads(out.read_text())["rows"]
    assert [(r["case"], r["who"]) for r in rows] == [
        (c.name, w) for c, w in ((found[0], "eager"), (found[0], "reflib"), (found[1], "eager"), (found[1], "reflib"))
    ]
    assert all(r["us"] > 0 and not r["note"] and r["error"] < 2e-2 for r in rows)


def test_all_sections_come_early() -> None:
    assert {c.section for c in products.cases()[:4]} == {"int8", "int4", "fp8", "grouped"}
    names = [(c.section, c.name) for c in products.cases()]
    assert len(names) == len(set(names)) and torch.float8_e4m3fn == products.FP8
