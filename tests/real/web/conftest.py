"""A browser for each file: its driver keeps an event loop in the main thread, so it must end with the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests import engines
from tests.real.web.serving import SOON


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    engines.require("chromium", engines.has_chromium())
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=engines.chromium(), args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context()
    made.set_default_timeout(SOON)
    yield made
    made.close()
