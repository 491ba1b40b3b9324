"""The dashboard of a real daemon in a real browser: log in by link, hold, release; and what others cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from gpukeeper.ledger.logins import LINK_LASTS, LoginKind, open_logins
from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet, ago
from tests.real.web.serving import SOON, Serving, apart, log_in, open_workload, reload_until


@dataclass
class Served:
    fleet: Fleet
    url: str

    def link(self, person: str) -> str:
        """As `gpukeeper login` makes it for that person; here the kernel knows only the user that runs the tests."""
        logins = open_logins(self.fleet.state / "ledger.db")
        try:
            made = apart(logins.create(LoginKind.LINK, person, 1000, datetime.now(UTC), LINK_LASTS))
        finally:
            logins.close()
        return f"{self.url}/login/{made.secret}"


@pytest.fixture
def served(tmp_path: Path, browser: Browser) -> Iterator[Served]:
    fleet = Fleet(tmp_path)
    fleet.add("train", state=State.RUNNING, started=ago(hours=3), owner="ann", devices=("GPU-1",))
    serving = Serving(fleet.start("serve", "--web", "0"))
    yield Served(fleet, serving.url)
    serving.end()


@pytest.mark.smoke
def test_an_owner_logs_in_by_link_holds_and_releases(served: Served, context: BrowserContext) -> None:
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    log_in(page, served.link("ann"))
    open_workload(page, served.url, "train")
    page.get_by_label("Reason").fill("paper")
    page.get_by_role("button", name="Hold").click()
    expect(page.get_by_role("status").last).to_contain_text("is held until", timeout=SOON)
    page.get_by_role("link", name="Back to train").click()
    reload_until(page, "Held by ann until")  # without another pass
    page.get_by_role("button", name="Release").click()
    expect(page.get_by_role("status").last).to_contain_text("no longer held", timeout=SOON)
    page.goto(f"{served.url}/history?type=hold", wait_until="domcontentloaded")
    expect(page.get_by_role("table")).to_contain_text("web, session", timeout=SOON)
    assert problems == []


def test_another_user_sees_and_cannot_press(served: Served, context: BrowserContext) -> None:
    page = context.new_page()
    log_in(page, served.link("bob"))
    open_workload(page, served.url, "train")
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
    open_workload(page, served.url, "train")
    hold = f"{page.url}/hold"
    assert context.request.post(hold, form={}).status == 403, "without the CSRF token"

    other = browser.new_context(extra_http_headers={"X-Forwarded-User": "ann", "Remote-User": "ann"})
    assert other.request.post(hold, form={}).status == 401, "a forged header"
    assert other.request.post(link).status == 403, "a replayed link"
    other.close()

    csrf = page.locator("input[name=csrf]").first.input_value()
    thief = browser.new_context(storage_state=context.storage_state())
    assert "Log out" in thief.request.get(served.url).text(), "while the session lasts"
    revoked = served.fleet.run("login", "--revoke", "all")
    assert revoked.code == 0, revoked
    assert "Log out" not in thief.request.get(served.url).text(), "the cookie of a revoked session, at once"
    assert thief.request.post(hold, form={"csrf": csrf}).status == 401
    thief.close()
    assert served.fleet.lines("hold") == []
