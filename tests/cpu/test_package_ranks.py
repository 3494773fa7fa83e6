"""Packages of models that communicate: a file per rank, one text that names them."""

from pathlib import Path

import pytest

import reflib
from reflib.lab.rank_group import Ranks
from tests import package_tasks as tasks

FILES = ["model.rank0.reflib", "model.rank1.reflib", "model.reflib"]


@pytest.fixture(scope="module")
def path(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("ranks") / "model.reflib")
    assert two.run(tasks.build, path) == [(True, FILES)] * 2
    return path


def test_each_rank_loads_its_own(two: Ranks, path: str) -> None:
    assert two.run(tasks.load, path) == [True, True]  # by other processes' groups, in another run


def test_sums_over_storage(two: Ranks, tmp_path: Path) -> None:
    assert two.run(tasks.build, str(tmp_path / "model.reflib"), "two_shot") == [(True, FILES)] * 2


def test_models_with_dtensors(two: Ranks, tmp_path: Path) -> None:
    """(All in one process group: DTensor keeps what it has found out for equal meshes, with their groups.)"""
    found = two.run(tasks.parallelized, str(tmp_path / "model.reflib"), limit=300.0)
    for columns, sequence, rows, *sizes in found:
        assert [columns, sequence, *sizes] == [(True, True)] * 4, found
        assert "CaptureError" in rows and "fake tensor" in rows and "is a DTensor, and through DTensors" in rows, rows


def test_without_the_ranks_it_is_an_error(path: str) -> None:
    with pytest.raises(
        reflib.PackageError, match=r"it is for 2 ranks, and here is no process group; start 2 processes"
    ):
        reflib.load(path)
    with pytest.raises(reflib.PackageError, match=r"communicates in process group '0', which is not here"):
        reflib.load(path.replace("model.", "model.rank1."))


def test_another_number_of_ranks(path: str, four: Ranks) -> None:
    for text in four.run(tasks.fault, path, "world"):
        assert "PackageError" in text and "it is for 2 ranks, and here are 4" in text


def test_faults(two: Ranks, path: str, tmp_path: Path) -> None:
    for text in two.run(tasks.fault, str(tmp_path / "model.reflib"), "other model"):
        assert "RanksError" in text and "would start different collectives" in text, text
    for rank, text in enumerate(two.run(tasks.fault, path, "another rank's")):
        assert f"it is for rank {1 - rank} of 2" in text and f"this is rank {rank} of 2" in text, text
    first, last = two.run(tasks.fault, path, "damaged", timeout=5.0)
    assert "PackageError" in last and "not the requested file" in last and "rank 1" in first, (first, last)


@pytest.mark.slow
def test_one_rank_that_cannot_write(two: Ranks, tmp_path: Path) -> None:
    first, last = two.run(tasks.fault, str(tmp_path / "model.reflib"), "not written", timeout=5.0)
    assert "PackageError" in last and "no folder" in last and "RanksError" in first and "rank 1" in first, (first, last)
