"""A chapter somewhere else, as in Colab: the notebook's file and nothing else. Its first cell installs reflib."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from reflib.lab import notebook as nb

lacking = [name for name in ("papermill", "ipykernel", "pip", "setuptools") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(lacking), reason=f"not installed here: {', '.join(lacking)}")


@pytest.fixture
def wheels(root: Path, tmp_path: Path) -> Path:
    """What would be on the package index: a wheel of this checkout."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    shutil.copytree(root / "reflib", source / "reflib", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(tmp_path / "wheels"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp_path / "wheels"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has all that this one has, but reflib."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")], check=True)
    others = tmp_path / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "reflib" not in entry.name:
            (others / entry.name).symlink_to(entry)
    [site] = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n")
    return tmp_path / "fresh" / "bin" / "python"


@pytest.mark.slow
def test_a_chapter_alone_installs_what_it_needs(root: Path, tmp_path: Path, wheels: Path, python: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    notebook = nb.read(root / "notebooks" / "start-here.ipynb")
    end = next(i for i, cell in enumerate(notebook.cells) if "lab.setup(" in cell.source)
    notebook.cells = notebook.cells[: end + 1]  # the others are run elsewhere
    nb.write(notebook, alone / "start-here.ipynb")
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # no kernel of the user's, which might be another Python
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(python), *words], cwd=alone, env=environ, capture_output=True, text=True)

    run("-m", "ipykernel", "install", "--sys-prefix").check_returncode()
    where = ("-c", "import reflib; print(reflib.__file__)")
    assert "No module named 'reflib'" in run(*where).stderr
    on_a_cpu = ("-p", "device", "cpu")
    done = run("-m", "papermill", "start-here.ipynb", "out.ipynb", *on_a_cpu)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path(run(*where).stdout.strip()).is_relative_to(tmp_path / "fresh")
