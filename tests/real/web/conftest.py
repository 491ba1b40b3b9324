"""A browser, and a private Docker engine: one of each for a file, on each worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests import engines
from tests.real.docker.private_engine import DockerEngine, docker_engine
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


@pytest.fixture(scope="module")
def the_docker() -> Iterator[DockerEngine]:
    engines.require("docker", engines.has_docker())
    with docker_engine() as engine:
        yield engine


@pytest.fixture
def docker(the_docker: DockerEngine) -> Iterator[DockerEngine]:
    yield the_docker
    the_docker.clear()
