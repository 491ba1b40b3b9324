"""The dashboard of a real daemon in a real browser: log in by link, hold, release; and what others cannot do."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from gpukeeper.ledger.logins import LINK_LASTS, LoginKind, open_logins
from gpukeeper.model.subject import State
from tests import engines
from tests.cli.fleet import Fleet, ago

SOON = 15_000  # milliseconds, on a crowded machine


@dataclass
class Served:
    fleet: Fleet
    url: str

    def link(self, person: str) -> str:
        """As `gpukeeper login` makes it for that person; here the kernel knows only the user that runs the tests."""
        logins = open_logins(self.fleet.state / "ledger.db")
        try:
            made = asyncio.run(logins.create(LoginKind.LINK, person, 1000, datetime.now(UTC), LINK_LASTS))
        finally:
            logins.close()
        return f"{self.url}/login/{made.secret}"

    def revoke(self, person: str) -> None:
        logins = open_logins(self.fleet.state / "ledger.db")
        try:
            asyncio.run(logins.revoke(None, person))
        finally:
            logins.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    engines.require("chromium", engines.has_chromium())
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=engines.chromium(), args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def served(tmp_path: Path, browser: Browser) -> Iterator[Served]:
    fleet = Fleet(tmp_path)
    fleet.add("train", state=State.RUNNING, started=ago(hours=3), owner="ann", devices=("GPU-1",))
    daemon = fleet.start("serve", "--web", "0")
    try:
        yield Served(fleet, _url(daemon))
    finally:
        daemon.terminate()
        daemon.communicate(timeout=60)


def _url(daemon: subprocess.Popen[str]) -> str:
    assert daemon.stderr is not None
    for line in daemon.stderr:
        if found := re.search(r"dashboard on (http://[^/\s]+)", line):
            return found[1]
    raise AssertionError("the daemon ended")


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context()
    made.set_default_timeout(SOON)
    yield made
    made.close()


def log_in(page: Page, link: str) -> None:
    page.goto(link, wait_until="domcontentloaded")
    page.get_by_role("button", name="Log in here").click()
    expect(page.get_by_role("button", name="Log out")).to_be_visible(timeout=SOON)


def open_workload(page: Page, url: str) -> None:
    page.goto(f"{url}/workloads", wait_until="domcontentloaded")
    page.get_by_role("link", name="train").click()
    expect(page.get_by_role("heading", name="What comes next")).to_be_visible(timeout=SOON)


def test_an_owner_logs_in_by_link_holds_and_releases(served: Served, context: BrowserContext) -> None:
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    log_in(page, served.link("ann"))
    open_workload(page, served.url)
    page.get_by_label("Reason").fill("paper")
    page.get_by_role("button", name="Hold").click()
    expect(page.get_by_role("status").last).to_contain_text("is held until", timeout=SOON)
    page.get_by_role("link", name="Back to train").click()
    for _ in range(50):  # it is shown within two seconds, without another pass
        if page.get_by_text("Held by ann until").count():
            break
        page.reload(wait_until="domcontentloaded")
    expect(page.get_by_text("Held by ann until")).to_be_visible(timeout=SOON)
    page.get_by_role("button", name="Release").click()
    expect(page.get_by_role("status").last).to_contain_text("no longer held", timeout=SOON)
    page.goto(f"{served.url}/history?type=hold", wait_until="domcontentloaded")
    expect(page.locator("tbody")).to_contain_text("web, session", timeout=SOON)
    assert problems == []


def test_another_user_sees_and_cannot_press(served: Served, context: BrowserContext) -> None:
    page = context.new_page()
    log_in(page, served.link("bob"))
    open_workload(page, served.url)
    expect(page.get_by_role("button", name="Hold")).to_have_count(0)
    csrf = page.locator("input[name=csrf]").first.input_value()
    workload = page.url.rpartition("/")[2]
    refused = context.request.post(f"{served.url}/workload/{workload}/hold", form={"csrf": csrf})
    assert refused.status == 409
    assert served.fleet.lines("hold") == []


def test_a_forged_header_a_missing_token_a_replayed_link_and_a_stolen_cookie_get_nothing(
    served: Served, browser: Browser, context: BrowserContext
) -> None:
    page, link = context.new_page(), served.link("ann")
    log_in(page, link)
    open_workload(page, served.url)
    hold = f"{page.url}/hold"
    assert context.request.post(hold, form={}).status == 403, "without the CSRF token"

    other = browser.new_context(extra_http_headers={"X-Forwarded-User": "ann", "Remote-User": "ann"})
    assert other.request.post(hold, form={}).status == 401, "a forged header"
    assert other.request.post(link).status == 403, "a replayed link"
    other.close()

    csrf = page.locator("input[name=csrf]").first.input_value()
    thief = browser.new_context(storage_state=context.storage_state())
    served.revoke("ann")
    assert thief.request.post(hold, form={"csrf": csrf}).status == 401, "the cookie of a revoked session"
    thief.close()
    assert served.fleet.lines("hold") == []
