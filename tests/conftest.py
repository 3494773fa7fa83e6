"""What all tests share: a cache of their own, fixed random examples, the GPU marker."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Examples are derived from the test alone: a failure on CI is the same failure here.
settings.register_profile(
    "reflib",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `make fuzz` looks further afield
settings.register_profile("fuzz", parent=settings.get_profile("reflib"), derandomize=False)
settings.load_profile("fuzz" if os.environ.get("REFLIB_FUZZ") else "reflib")

CACHE = "REFLIB_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the whole run: xdist's workers inherit the folder that their controller makes. Decisions are not
    kept in it: tests measure."""
    os.environ.setdefault("REFLIB_CACHE_DECISIONS", "0")
    if CACHE not in os.environ:
        config.stash[made] = tempfile.TemporaryDirectory(prefix="reflib-tests-")
        os.environ[CACHE] = config.stash[made].name


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(made, None)
    if folder is not None:
        os.environ.pop(CACHE, None)
        folder.cleanup()


made = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests under tests/gpu, and those marked so, are skipped where there is no CUDA device."""
    gpu_folder = Path(__file__).parent / "gpu"
    wanting = [i for i in items if "gpu" in i.keywords or gpu_folder in Path(str(i.path)).parents]
    if not wanting:
        return
    import torch

    for item in wanting:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE, str(folder))
    yield folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def host_folders(root: Path) -> list[bytes]:
    """This machine's folders: none of them may be in a file that is for other machines."""
    ours = {tempfile.gettempdir(), str(Path.home()), str(root), str(Path.cwd()), sysconfig.get_path("purelib")}
    return [f"{name.rstrip('/')}/".encode() for name in sorted(ours - {"/"})]
