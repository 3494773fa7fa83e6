"""JupyterLab as a reader has it: open a chapter, run all its cells, move a slider, see the output change."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from reflib.lab import notebook as nb
from reflib.lab import runner
from tests.browsing import Watched, changes, picture

pytest.importorskip("jupyterlab")
pytest.importorskip("ipywidgets")
pytest.importorskip("axe_playwright_python")

CHAPTER = [
    new_markdown_cell("# A chapter\n\nIt has a figure, and a slider to measure again."),
    new_code_cell('device: str = "cpu"  # where to run (auto | cpu | cuda)'),
    new_code_cell("from reflib import lab\n\nhere = lab.setup(globals(), quiet=True)\nasked = []"),
    new_code_cell(
        "lanes = {'a': [lab.Segment('works', 0, 2), lab.Segment('rests', 2, 4)]}\n"
        "lab.over_time(lanes, caption='Two things, one after the other.');"
    ),
    new_code_cell(
        "def measure(n):\n    asked.append(n)\n    return f'{n} asked, in all {len(asked)} times'\n\n\n"
        "lab.live(measure, n=[10, 20, 30]);"
    ),
]
SETTINGS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}  # cells out of sight are drawn too


def put_a_real_one(folder: Path) -> None:
    """The chapter on measuring up to its slider (nbval runs all of it), as small as it gets, with no outputs yet."""
    real = nb.read(runner.ROOT / "notebooks" / "measuring.ipynb")
    end = next(i for i, cell in enumerate(real.cells) if cell.cell_type == "code" and "lab.live(" in cell.source)
    real.cells = real.cells[: end + 1]
    for cell in (c for c in real.cells if c.cell_type == "code"):
        cell.outputs, cell.execution_count = [], None
        if "parameters" in cell.metadata.get("tags", []):
            cell.source, changed = re.subn('megabytes: str = "auto"', 'megabytes: str = "1"', cell.source)
            assert changed
    nb.write(real, folder / "measuring.ipynb")


@pytest.fixture(scope="module")
def lab_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of JupyterLab on two chapters, with settings and a runtime folder of its own."""
    folder = tmp_path_factory.mktemp("lab")
    nb.write(new_notebook(cells=CHAPTER), folder / "chapter.ipynb")
    put_a_real_one(folder)
    (folder / "overrides").mkdir()
    (folder / "overrides" / "overrides.json").write_text(json.dumps(SETTINGS))
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--ServerApp.disable_check_xsrf=True"]
    command += [f"--LabApp.app_settings_dir={folder / 'overrides'}", "--LabApp.news_url="]
    environ = {**os.environ, **own, "JUPYTER_PLATFORM_DIRS": "1"}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, start_new_session=True)
    try:
        yield address(server, folder / "log") + "/lab/tree/"
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # its kernels with it
        server.wait(30)


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens: it says so when it does."""
    for _ in range(600):
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def run_all(browser: Any, url: str) -> Iterator[Watched]:
    """A notebook that is opened, and all its cells run until there is a slider to move."""
    watched = Watched(browser, {"width": 1280, "height": 1000})
    page = watched.page
    try:
        page.set_default_timeout(60_000)
        page.goto(f"{url}?reset")  # nothing that was open before
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.locator("#jp-main-statusbar").get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        if (which := page.locator(".jp-Dialog .jp-mod-accept")).count():  # a slow kernel is asked about
            which.click()
        page.locator("#jp-MainMenu").get_by_text("Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_selector(".jp-OutputArea-output .noUi-handle", timeout=240_000)
        yield watched
    finally:
        watched.context.close()


@pytest.fixture(scope="module")
def chapter(browser: Any, lab_url: str) -> Iterator[Watched]:
    with run_all(browser, lab_url + "chapter.ipynb") as watched:
        yield watched


def test_all_cells_run_without_an_error(chapter: Watched) -> None:
    page = chapter.page
    assert page.locator(".jp-CodeCell").count() == 4
    assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.get_by_text("10 asked, in all 1 times").is_visible()


def test_a_slider_measures_again(chapter: Watched) -> None:
    page = chapter.page
    page.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("20 asked, in all 2 times").wait_for()
    assert page.get_by_text("10 asked").count() == 0, "the earlier result is gone"


def test_the_figure_is_moved_in_lab_as_in_the_book(chapter: Watched) -> None:
    page = chapter.page
    figure = page.locator(".jp-OutputArea-output:has(.vega-embed)")
    clock = figure.locator("input[type=range]")
    clock.focus()
    assert changes(figure, lambda: page.keyboard.press("End"))
    assert "a: done at 4.00" in picture(figure)
    assert page.locator("details summary", has_text="The numbers behind the figure").is_visible()


@pytest.mark.slow
def test_a_chapter_of_the_book(browser: Any, lab_url: str) -> None:
    """Its cells run, and its slider measures again."""
    with run_all(browser, lab_url + "measuring.ipynb") as watched:
        page = watched.page
        live = page.locator(".jp-OutputArea-output:has(.noUi-handle)")
        cells = live.locator("td, th")
        assert [t.strip() for t in cells.all_inner_texts() if t.strip()][-3:-1] == ["torch.matmul", "1"]
        live.locator(".noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        cells.get_by_text("4", exact=True).wait_for()
        page.locator("#jp-main-statusbar").get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=240_000)
        assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
        assert page.locator(".jp-Notebook .vega-embed").count() == 1  # the roofline to move along
