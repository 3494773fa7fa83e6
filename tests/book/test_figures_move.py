"""Every kind of figure that is moved, drawn by the book's scripts: by keyboard, by mouse, in the dark, on a phone."""

import functools
import html
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reflib
from reflib import lab
from reflib.ir.decision import Candidate, Decision, Key
from reflib.lab.ceilings import Roofline
from reflib.lab.moving import Numbers
from reflib.plan.memory import Change, Memory
from tests.browsing import PHONE, Watched, changes, drawn, idle_controls, picture, violations

pytest.importorskip("axe_playwright_python")

WORDS = ".reflib-told"
STILL = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "description": "Two bars, the second taller </script>",
    "usermeta": {"caption": "Two bars."},
    "data": {"values": [{"name": "a", "value": 1}, {"name": "b", "value": 2}]},
    "mark": "bar",
    "encoding": {"x": {"field": "name", "type": "nominal"}, "y": {"field": "value", "type": "quantitative"}},
}


def many_ranks() -> list[dict[str, Any]]:
    return [
        {"way": way, "ranks": n, "seconds": None if slow == "10%" and way == "met" else more + n / 100, "note": "",
         "slow": slow}
        for slow, more in (("0%", 4.0), ("10%", 9.0)) for way in ("alone", "met") for n in (1, 8, 1000)
    ]  # fmt: skip


def figures() -> dict[str, dict[str, Any]]:
    """One of each, of made-up numbers: {its name: its specification}."""
    lab.setup(device="cpu", quiet=True)
    roof = Roofline("a device", 1000.0, 100.0, 5.0, "float32")
    times = lab.Rows(lab.Row("n", case, "time", value, "µs") for case, value in {"fast": 2.0, "slow": 7.0}.items())
    lanes = {"a": [lab.Segment("works", 0, 2), lab.Segment("rests", 2, 5, "rest")], "b": [lab.Segment("waits", 1, 4)]}
    changes = [Change(f"k{i}", {"x": 10**6, "y": i * 10**6}, {}) for i in range(1, 4)]
    variants = [SimpleNamespace(arch=a, made_for="sm_80") for a in ("cpu", "sm_80", "sm_90", "ptx")]
    package = SimpleNamespace(manifest=SimpleNamespace(variants=variants), machine_code=lambda variant: 1000)
    sizes = lab.Rows(lab.Row("s", c, "time", float(n), "µs", at={"n": n}) for c in ("p", "q") for n in (1, 4, 16))
    tried: list[Any] = []
    for k in (64, 4096):
        names = ("aten", "decompose_k(k_splits=2)", "x")[: 3 if k > 64 else 2]
        found = tuple(Candidate(Key(n), "ok", 2.0 + i, spread=0.1) for i, n in enumerate(names))
        tried += lab.candidate_rows(Decision("op0", (Key("aten"),), found, "because"), {"M": 32, "N": 32, "K": k})

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.relu(x)
        return y + torch.sort(y, 0).values * w, x.sum(0)

    e = reflib.explain(program, torch.randn(1000, 8), torch.randn(1000, 8), target="sm_90", dynamic=False)
    versions = [(f"{n} columns", 2e9 * n, 1e9, 1000.0 + 20 * n) for n in (1, 10, 100, 1000)]
    made: dict[str, Any] = {
        "roofline": lab.roofline_slider(roof, versions, what="columns", caption="c"),
        "lanes": lab.over_time(lanes, caption="c"),
        "race": lab.race(times, "fast", "slow", caption="c"),
        "memory": lab.memory_scrubber({"plan": Memory((), tuple(changes))}, caption="c"),
        "blocks": lab.block_slider(caption="c"),
        "architectures": lab.arch_explorer(package, caption="c"),  # type: ignore[arg-type]
        "fusion": lab.fusion_graph(e, caption="c"),
        "ranges": lab.range_picture(sizes, [(1, 8, "p"), (9, 16, "q")], x="n", caption="c"),
        "explorer": lab.explore(lab.Rows(tried), caption="c"),
        "ranks": lab.ranks_explorer(many_ranks(), caption="c"),
    }
    return {"still": STILL, **{name: figure.spec for name, figure in made.items()}}


@pytest.fixture(scope="module")
def page_file(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(root / "book" / "_ext"))
    try:
        vega_html = importlib.import_module("reflib_book").vega_html
    finally:
        sys.path.remove(str(root / "book" / "_ext"))
    script = '<script src="{}"></script>'.format
    local = (root / "book").as_uri()
    scripts = "".join(script(f"{local}/vendor/vega/{n}.min.js") for n in ("vega", "vega-lite", "vega-embed"))
    body = "".join(
        f'<section id="{name}"><h2>{html.escape(name)}</h2>{vega_html(spec)}{Numbers(spec)._repr_html_()}</section>'
        for name, spec in figures().items()
    )
    style = ":root { --pst-color-text-base: #222 } [data-theme=dark] { --pst-color-text-base: #ddd }"
    file = tmp_path_factory.mktemp("figures") / "page.html"
    file.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Figures</title><style>{style}</style>'
        f'<link rel="stylesheet" href="{local}/assets/reflib.css">{scripts}'
        f'{script(f"{local}/assets/reflib-vega.js")}</head><body><main><h1>Figures</h1>{body}</main></body></html>'
    )
    return file


@pytest.fixture
def page(page_file: Path, watched: Watched) -> Any:
    opened = watched.open(page_file)
    drawn(opened)
    yield opened
    assert watched.problems == []


def test_every_control_works_by_keyboard(page: Any) -> None:
    assert page.locator(".reflib-vega").count() == 11
    assert idle_controls(page) == []


def test_a_figure_has_words_for_it_and_numbers_that_unfold(page: Any) -> None:
    figure = page.locator("#still .reflib-vega")
    assert figure.locator("[aria-roledescription=bar]").count() == 2
    assert figure.get_attribute("aria-label") == STILL["description"]
    assert json.loads(figure.locator("script[type='application/json']").first.text_content()) == STILL
    page.locator("#memory summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#memory details table").first.is_visible()


def test_another_shape_has_its_own_candidates(page: Any) -> None:
    """Picked from a list, or by a click on its mark."""
    figure = page.locator("#explorer .reflib-vega")
    bars = figure.locator("[aria-roledescription=bar]")
    before = bars.count()
    assert changes(figure, lambda: figure.locator("select").first.select_option("32 x 32 x 4096"))
    assert (before, bars.count()) == (2, 3)
    marks = figure.locator("path[aria-roledescription=point]")
    assert any(changes(figure, lambda i=i: marks.nth(i).click(force=True)) for i in range(2))


def test_a_slider_is_dragged_by_the_mouse(page: Any) -> None:
    for name in ("roofline", "lanes", "race", "memory", "blocks"):
        figure = page.locator(f"#{name} .reflib-vega")
        slider = figure.locator("input[type=range]")
        box, before = slider.bounding_box(), slider.input_value()
        place = {"x": 0.7 * box["width"], "y": 0.5 * box["height"]}
        assert changes(figure, functools.partial(slider.click, position=place)), name
        assert slider.input_value() != before


def test_resting_on_a_refused_edge_says_why_not(page: Any) -> None:
    page.locator("#fusion svg text", has_text=re.compile("^order$")).hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "needs the one and is needed by the other" in page.locator("#vg-tooltip-element").inner_text()


def test_what_changed_is_said_to_who_cannot_see_it(page: Any) -> None:
    said = {}
    for name, key in {"roofline": "End", "memory": "End", "fusion": "ArrowDown"}.items():
        page.locator(f"#{name} .vega-bind input, #{name} .vega-bind select").first.focus()
        page.keyboard.press(key)
        page.wait_for_function(f"() => document.querySelector('#{name} {WORDS}').textContent")
        said[name] = page.locator(f"#{name} {WORDS}").text_content()
    assert said["roofline"].startswith("1000 columns: 1,000 MB moved. 2,000 FLOPs per byte, under the arithmetic")
    assert said["memory"] == "plan: k3, 4.00 MB in 2 buffers"
    assert "k3, 4.00 MB" in picture(page.locator("#memory .reflib-vega")), "its title says the same"
    assert ": " in said["fusion"] and "⇢" in said["fusion"]
    assert page.locator(WORDS).first.get_attribute("aria-live") == "polite"


def test_words_are_light_in_the_dark(page: Any) -> None:
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#memory svg text')].some(t => t.getAttribute('fill') === '#ddd')"
    )


def test_axe_finds_nothing_serious(page: Any) -> None:
    assert violations(page, contrast=True) == []


def test_nothing_is_wider_than_a_phone(page_file: Path, phone: Watched) -> None:
    page = phone.open(page_file)
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert violations(page, contrast=False) == [] and phone.problems == []
