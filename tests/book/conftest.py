"""One browser for all tests here."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browsing import CHROMIUM, DESKTOP, PHONE, Watched


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    found = Watched(browser, DESKTOP)
    yield found
    found.context.close()


@pytest.fixture
def phone(browser: Any) -> Iterator[Watched]:
    found = Watched(browser, PHONE)
    yield found
    found.context.close()
