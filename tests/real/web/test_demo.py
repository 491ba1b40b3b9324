"""Every page of the dashboard of the demo, as a browser shows it: light, dark, as wide as a phone, without scripts, by
keyboard, and for those who do not see it (axe-core)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect

from gpukeeper.interfaces.demo_web import HOURS
from gpukeeper.interfaces.web.application import ROUTES
from tests.cli.fleet import Fleet
from tests.real.web.serving import SOON, Serving, log_in, reload_until, until

DESK, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=390, height=844)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": DESK},
    "dark": {"color_scheme": "dark", "viewport": DESK},
    "phone": {"color_scheme": "light", "viewport": PHONE},
}
NO_PAGES = {"/fleet", "/find", "/usage.csv", "/healthz", "/readyz", "/metrics", "/bulk/{token}", "/login/{token}"}
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
CONTROLS = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"


class ShownDemo(Serving):
    def links(self) -> dict[str, str]:
        """By person: the address that logs in."""
        found = [re.search(r"log in as (\w+).*: (http\S+)", line) for line in self.log]
        return {one[1]: one[2] for one in found if one is not None}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[ShownDemo]:
    """`browser`: it is skipped where there is none."""
    fleet = Fleet(tmp_path_factory.mktemp("demo"))
    served = ShownDemo(fleet.start("demo", "--web", "0"))
    try:
        until(lambda: len(served.links()) == 2, "two people can log in")
        yield served
    finally:
        served.end()


@pytest.fixture(params=LOOKS)
def look(request: pytest.FixtureRequest, browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(**LOOKS[request.param])
    made.set_default_timeout(SOON)
    yield made
    made.close()


def open_page(page: Page, address: str) -> None:
    page.goto(address, wait_until="domcontentloaded")
    expect(page.locator("h1")).to_be_visible(timeout=SOON)


def first_link(page: Page, address: str) -> str:
    """The first row of a table that leads to another page."""
    open_page(page, address)
    return str(page.locator("tbody th a").first.get_attribute("href"))


def pages(page: Page, url: str) -> list[str]:
    """One address for each page in the table of routes."""
    named = {
        "/workload/{id}": first_link(page, f"{url}/workloads?owner=ann"),
        "/acceptance/gpu/{serial}": first_link(page, f"{url}/acceptance"),
    }
    found = [path for method, path, _ in ROUTES if method == "GET" and not path.startswith("/api/")]
    return [named.get(path, path) for path in found if path not in NO_PAGES]


def violations(page: Page) -> list[str]:
    """What axe-core finds that keeps somebody from using the page."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")
    ]


def test_every_page_opens_fits_and_can_be_used_by_everybody(demo: ShownDemo, look: BrowserContext) -> None:
    page, messages = look.new_page(), list[str]()
    page.on("console", lambda message: messages.append(message.text))  # also what the policy of the page forbids
    page.on("pageerror", lambda error: messages.append(str(error)))
    open_page(page, f"{demo.url}/")
    assert violations(page) == [], "without a login"
    log_in(page, demo.links()["eve"])
    for path in pages(page, demo.url):
        open_page(page, f"{demo.url}{path}")
        expect(page.locator(".banner.demo")).to_contain_text("Demo of a simulated fleet")
        assert violations(page) == [], path
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} is {wide} pixels wider than the screen"
    assert messages == []


def test_time_passes_as_fast_as_the_page_says(demo: ShownDemo, context: BrowserContext) -> None:
    page = context.new_page()
    open_page(page, f"{demo.url}/")
    began = page.evaluate("[Date.now() / 1000, now()]")
    page.wait_for_function("began => now() - began[1] > 90", arg=began)
    real, simulated = page.evaluate("began => [Date.now() / 1000 - began[0], now() - began[1]]", began)
    assert simulated == pytest.approx(60 * real, rel=0.05)
    shown = page.locator(".banner.demo time")
    before = shown.inner_text()
    until(lambda: shown.inner_text() != before, "the clock of the demo goes on")


def test_a_comparison_of_idle_limits_is_on_record(demo: ShownDemo, context: BrowserContext) -> None:
    page = context.new_page()
    log_in(page, demo.links()["eve"])
    page.goto(f"{demo.url}/backtest", wait_until="domcontentloaded")
    reload_until(page, "What would this limit have done here?")
    assert "of another policy" not in page.content()
    assert page.locator("circle.dot").count() == len(HOURS)


def test_the_owner_holds_and_releases_in_the_simulation(demo: ShownDemo, context: BrowserContext) -> None:
    page = context.new_page()
    log_in(page, demo.links()["ann"])
    page.goto(demo.url + first_link(page, f"{demo.url}/workloads?owner=ann"), wait_until="domcontentloaded")
    address = page.url
    page.get_by_label("Hold for").fill("2")
    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("is held until", timeout=SOON)
    page.goto(address, wait_until="domcontentloaded")
    page.get_by_role("button", name="Release").click()
    expect(page.get_by_role("status").last).to_contain_text("no longer held", timeout=SOON)


def test_pages_can_be_read_and_forms_work_without_scripts(demo: ShownDemo, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(SOON)
    page = context.new_page()
    log_in(page, demo.links()["ann"])
    for path in pages(page, demo.url):
        open_page(page, f"{demo.url}{path}")
    expect(page.locator(".banner.demo time")).to_contain_text("UTC")
    open_page(page, f"{demo.url}/workloads")
    page.locator("select[name=owner]").select_option("ann")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("tbody tr").first).to_contain_text("ann")
    page.locator("tbody th a").first.click()
    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_role("status").last).to_contain_text("is held until")
    context.close()


@pytest.mark.parametrize("path", ["/?place=node-1", "/workloads?owner=ann", "/plan", "/usage", "/policy/try", "/login"])
def test_every_control_is_reached_by_keyboard_and_shows_its_focus(
    demo: ShownDemo, context: BrowserContext, path: str
) -> None:
    context.route("**/events*", lambda route: route.abort())  # a tile that is replaced meanwhile is another control
    page = context.new_page()
    log_in(page, demo.links()["ann"])
    open_page(page, f"{demo.url}{path}")
    number = page.evaluate(
        """controls => [...document.querySelectorAll(controls)].filter(one => one.checkVisibility()).map(
            (one, index) => one.dataset.control = index).length""",
        CONTROLS,
    )
    reached = set()
    for _ in range(number + 1):
        page.keyboard.press("Tab")
        control, outline = page.evaluate(
            """() => {
                const style = getComputedStyle(document.activeElement);
                return [document.activeElement.dataset.control, style.outlineStyle + style.outlineWidth];
            }"""
        )
        if control is not None:
            reached.add(int(control))
            assert not outline.startswith("none"), f"control {control} shows no focus"
    assert reached == set(range(number))
