"""For tests in a browser: Debian's Chromium, driven by Playwright. No browser is downloaded."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next((p for c in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(c))), None)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
OWN = ("file:", "data:", "blob:", "http://127.0.0.1:", "ws://127.0.0.1:")
# The book's first page only leads to another, whose own scripts have to have run.
ARRIVED = "() => document.readyState === 'complete' && !document.querySelector('meta[http-equiv=Refresh]')"
OPERABLE = ".reflib-vega .vega-bind input, .reflib-vega .vega-bind select"


class Watched:
    """A page of a browser. ``problems``: what its console said in anger, what it asked of the network."""

    def __init__(self, browser: Any, viewport: dict[str, int]) -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme="light", reduced_motion="reduce")
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", lambda r: None if r.url.startswith(OWN) else self.problems.append(f"asks for {r.url}"))

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def open(self, file: Path) -> Any:
        self.page.goto(file.as_uri(), wait_until="load")
        self.page.wait_for_function(ARRIVED)
        return self.page


def html_pages(site: Path) -> list[Path]:
    """Every page of the book, whatever it is called; the theme's unused examples are none."""
    return [p for p in sorted(site.rglob("*.html")) if "_static" not in p.relative_to(site).parts]


def violations(page: Any, *, contrast: bool) -> list[str]:
    """What axe calls serious or critical: the rule, the element, how to mend it."""
    from axe_playwright_python.sync_playwright import Axe

    rules = {} if contrast else {"rules": {"color-contrast": {"enabled": False}}}
    options = {"preload": False, "resultTypes": ["violations"], **rules}
    found = Axe().run(page, options=options).response["violations"]
    bad = [v for v in found if v["impact"] in ("serious", "critical")]
    return [f"{v['id']}: {n['target']} {n['html'][:160]}: {n['failureSummary']}" for v in bad for n in v["nodes"]]


def drawn(page: Any) -> None:
    """Wait until the figures of the page are there."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('.reflib-vega')].every(f => f.querySelector('.reflib-vega-canvas svg'))"
    )


def dark(page: Any) -> None:
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            return
        page.locator("button.theme-switch-button").locator("visible=true").first.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def picture(figure: Any) -> str:
    return figure.locator("svg.marks").first.inner_html()


def changes(figure: Any, act: Callable[[], Any]) -> bool:
    """Whether the picture is another one after `act`, within ten seconds."""
    before = picture(figure)
    act()
    for _ in range(100):
        if picture(figure) != before:
            return True
        figure.page.wait_for_timeout(100)
    return False


def idle_controls(page: Any) -> list[str]:
    """Work every control of every figure on the page by keyboard; the names of those that changed no picture."""
    idle = []
    for control in page.locator(OPERABLE).all():
        if control.evaluate("c => c.tagName === 'SELECT' && c.options.length < 2"):
            continue
        control.focus()
        key = "Space" if control.get_attribute("type") == "checkbox" else "ArrowDown"
        if control.get_attribute("type") == "range":
            key = "ArrowLeft" if control.evaluate("c => c.value === c.max") else "ArrowRight"
        figure = page.locator(".reflib-vega:has(:focus)")
        if not changes(figure, functools.partial(page.keyboard.press, key)):
            idle.append(str(control.get_attribute("name")))
    return idle
