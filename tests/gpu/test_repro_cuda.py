"""Repros and the minifier on a GPU: the same kernels in a fresh process, trials that are not forked, bad values."""

from pathlib import Path

import pytest
import torch

import reflib
from reflib.observe.differences import compare_with_eager
from reflib.observe.minify import Trials, minify
from reflib.observe.rebuild import load, run_file
from tests.cpu.test_repro import run_repro
from tests.models import Block


def test_a_repro_of_a_gpu(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 32, device="cuda", requires_grad=True)
    reflib.compile(Block().cuda(), repro=str(tmp_path / "block"), dynamic=True)(x).sum().backward()
    [path] = (tmp_path / "block").glob("repro_*.py")
    said = run_repro(path)
    assert "status 0" in said and "nothing is wrong" in said, said
    subject = load(run_file(str(path)))
    assert Trials(forks=False).of(subject) == ""
    with pytest.raises(reflib.ReflibError, match="does not fail"):
        minify(subject)


def test_bad_values_and_differences_on_a_gpu() -> None:
    f = reflib.compile(lambda x: x.log() + 1, check_nan=True)
    with pytest.raises(reflib.ReflibError, match=r"wrote NaN into add \(4,\), first at \[2\]"):
        f(torch.tensor([1.0, 2.0, -1.0, 3.0], device="cuda"))
    found = compare_with_eager(Block().cuda(), torch.randn(2, 5, 32, device="cuda", requires_grad=True))
    assert found.first is None and len(found) > 10, found
