"""Packages with ``autotune="background"``: a file at once, and a tuned one in its place when all is measured."""

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

import reflib
from reflib import tuning
from reflib.background import files
from reflib.package import archive, inspect

ARGS = torch.randn(16, 2048), torch.randn(2048, 16) / 32


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b)


def options_of(path: Path) -> dict[str, object]:
    return dict(reflib.load(path).manifest.options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> threading.Event:
    """Measuring waits for it, and nothing is measured: the first program is taken. Nothing is known from before."""
    opened = threading.Event()

    def tuned(s: object, again: object, until: str) -> object:
        assert until == "generate" and opened.wait(100)
        return s

    monkeypatch.setattr(tuning, "tuned", tuned)
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("REFLIB_CACHE_DECISIONS", raising=False)
    return opened


def packaged(path: Path, **options: object) -> Path:
    return reflib.aot_compile(product, ARGS, path, ["cpu"], autotune="background", **options)


def test_the_file_is_replaced_and_what_was_loaded_goes_on(gate: threading.Event, tmp_path: Path) -> None:
    path = packaged(tmp_path / "p.reflib")
    loaded = reflib.load(path)
    assert "autotune" not in loaded.manifest.options and not reflib.tuning_progress(path).finished
    gate.set()
    progress = reflib.wait_for_tuning(path, timeout=100)
    assert progress.finished and not progress.failed
    assert options_of(path)["autotune"] == "blocking"
    torch.testing.assert_close(loaded(*ARGS), product(*ARGS))
    assert reflib.wait_for_tuning(tmp_path / "another.reflib").finished


@pytest.mark.parametrize("when", ["before it is built", "after"])
@pytest.mark.parametrize("who", ["this process", "another"])
def test_a_later_file_of_the_same_name_stays(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, when: str
) -> None:
    path = packaged(tmp_path / "p.reflib")
    first = files[str(path.resolve())]
    other = reflib.aot_compile(torch.sin, (torch.ones(3),), tmp_path / "other.reflib", ["cpu"])
    fill = archive._fill

    def later(f: object, *args: object) -> None:  # while the tuned one is written
        monkeypatch.setattr(archive, "_fill", fill)
        fill(f, *args)
        write()

    def write() -> None:
        if who == "another":
            os.replace(other, path)
        else:
            reflib.aot_compile(torch.sin, (torch.ones(3),), path, ["cpu"])

    if when == "after":
        monkeypatch.setattr(archive, "_fill", later)
    else:
        write()
    gate.set()
    assert first.ended.wait(100) and not first.error
    assert reflib.load(path)(torch.ones(3)).tolist() == torch.ones(3).sin().tolist()
    assert not list(tmp_path.glob(".new-*"))


def test_another_folder_meanwhile_and_what_is_kept(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 16), torch.nn.ReLU()).eval()
    weight = weakref.ref(model[0].weight)
    path = reflib.aot_compile(model, ARGS[:1], "p.reflib", ["cpu"], autotune="background")
    del model
    tuning = files[str(path.resolve())]
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    assert tuning.ended.wait(100) and not tuning.error
    assert options_of(tmp_path / "p.reflib")["autotune"] == "blocking" and not list(Path.cwd().iterdir())
    del gate
    tuning._thread.join(100)
    gc.collect()
    assert weight() is None


def test_a_folder_that_is_gone(gate: threading.Event, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = packaged(folder / "p.reflib")
    path.unlink()
    folder.rmdir()
    gate.set()
    (why,) = reflib.wait_for_tuning(path, timeout=100).failed
    assert "p.reflib" in why


def test_what_is_not_recorded_is_said(tmp_path: Path) -> None:
    """A program for a CPU has nothing to record; for a GPU, one that waits for it cannot be, as a whole."""
    find = lambda x: torch.nonzero(torch.softmax(x, 0) > 0.1).sum() + torch.softmax(x, 0).sum()  # noqa: E731
    for fn, arch, said in ((product, "cpu", "on a CPU"), (find, "sm_90", "nonzero"), (product, "sm_90", "")):
        args = ARGS if fn is product else (torch.randn(64),)
        path = reflib.aot_compile(fn, args, tmp_path / "p.reflib", [arch], ptx=False, cuda_graphs=True)
        (variant,) = inspect.inspect(path).manifest.variants
        assert said in variant.unrecorded and bool(said) == bool(variant.unrecorded)
        assert (f"{arch}: calls are not recorded: " in str(inspect.inspect(path))) == bool(said)
