"""The backtest page of a real daemon in a real browser: a recorded backtest, and a slider over its idle limits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from gpukeeper.ledger.logins import LINK_LASTS, LoginKind, open_logins
from tests.cli.fleet import Fleet
from tests.real.web.serving import SOON, Serving, apart, log_in
from tests.real.web.test_demo import violations

T0 = datetime(2026, 1, 5, tzinfo=UTC)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
POLICY = "preset: shared-host\nscope: {docker: {}}\nadmins: [root]\nbacktest: {regret_max: 10%}\n"
MAPPING = """\
time: {column: time, format: "%Y-%m-%dT%H:%M", zone: UTC}
workload: workload
class: class
device: gpu
values: {gpu: {column: use, unit: percent}}
"""


def minutes(name: str, *, busy: tuple[range, ...], hours: int) -> Iterator[str]:
    for minute in range(hours * 60):
        use = 90 if any(minute // 60 in one for one in busy) else 0
        yield f"{T0 + timedelta(minutes=minute):%Y-%m-%dT%H:%M},{name},managed,{name},{use}"


def write_trace(folder: Path) -> tuple[Path, Path]:
    """Of 12 hours: `leaves` is used in the first only, `returns` also in the ninth, `works` always."""
    table, mapping = folder / "trace.csv", folder / "trace.yaml"
    lines = [
        *minutes("leaves", busy=(range(1),), hours=12),
        *minutes("returns", busy=(range(1), range(8, 9)), hours=12),
        *minutes("works", busy=(range(12),), hours=12),
    ]
    table.write_text("\n".join(["time,workload,class,gpu,use", *sorted(lines)]) + "\n")
    mapping.write_text(MAPPING)
    return table, mapping


@pytest.fixture
def url_and_link(tmp_path: Path, browser: Browser) -> Iterator[tuple[str, str]]:
    """`browser`: it is skipped where there is none."""
    fleet = Fleet(tmp_path, POLICY)
    table, mapping = write_trace(tmp_path)
    words = ("--mapping", str(mapping), "--sweep", "window=1h/4h/9h", "--horizon", "6h", "--workers", "1", "--record")
    done = fleet.run("backtest", str(table), *words)
    assert done.code == 0, done
    serving = Serving(fleet.start("serve", "--web", "0"))
    logins = open_logins(fleet.state / "ledger.db")
    try:
        made = apart(logins.create(LoginKind.LINK, "root", 0, datetime.now(UTC), LINK_LASTS))
        yield serving.url, f"{serving.url}/login/{made.secret}"
    finally:
        logins.close()
        serving.end()


def test_the_slider_shows_what_a_limit_would_have_done(url_and_link: tuple[str, str], context: BrowserContext) -> None:
    _, link = url_and_link
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    log_in(page, link)
    page.get_by_role("link", name="Backtest").click()
    slider, answer = page.get_by_role("slider", name="Idle limit"), page.locator("#limit-answer")
    for key, limit, words in (
        ("Home", "1h", "1h would have stopped 2 of 3 workloads here and won 16 GPU-hours; 1 of the 2 (50%) would"),
        (
            "ArrowRight",
            "4h",
            "4h would have stopped 2 of 3 workloads here and won 10 GPU-hours; 1 of the 2 (50%) would",
        ),
        ("End", "9h", "9h would have stopped 1 of 3 workloads here and won 2 GPU-hours; whether it would have used"),
    ):
        slider.press(key)
        expect(answer).to_contain_text(f"An idle limit of {words}")
        expect(slider).to_have_attribute("aria-valuetext", limit)
        expect(page.locator("tr.chosen")).to_contain_text(f"idle {limit}")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == [], scheme
    assert problems == []


def test_without_scripts_the_table_has_every_limit(url_and_link: tuple[str, str], browser: Browser) -> None:
    url, link = url_and_link
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(SOON)
    page = context.new_page()
    log_in(page, link)
    page.goto(f"{url}/backtest", wait_until="domcontentloaded")
    expect(page.get_by_role("row")).to_have_count(5)  # with the head, and the policy itself
    expect(page.get_by_role("row").last).to_contain_text("idle 9h")
    expect(page.locator("#limit-window")).to_be_hidden()
    expect(page.locator("#limit-answer")).to_contain_text("An idle limit of")
    context.close()
