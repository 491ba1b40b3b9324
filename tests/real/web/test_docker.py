"""The dashboard over a private Docker engine: its owner keeps an idle container by a button, and lets it go again;
others see it and cannot act. The kernel says who asks for a link."""

from __future__ import annotations

import json
import pwd
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import APIResponse, Browser, BrowserContext, Page, expect

from tests.real.docker.harness import SOMEBODY, SOMEBODY_ELSE, policy
from tests.real.docker.private_engine import DockerEngine
from tests.real.web.serving import SOON, Serving, log_in, open_workload, reload_until, until

SLEEPER = ("sh", "-c", "trap 'exit 0' 15; sleep 1000000 & wait $!")
SECRETS = {"labels": {"owner": SOMEBODY, "project": "hush-label"}, "env": {"API_KEY": "hush-variable"}}
LEAD = 25  # seconds between the warning and the stop: enough to press a button on a crowded machine


@dataclass
class Place:
    engine: DockerEngine
    serving: Serving
    socket: Path
    token: str = ""

    @property
    def url(self) -> str:
        return self.serving.url

    def gpukeeper(self, *words: str, person: str = "root") -> str:
        """What the command prints when that person runs it."""
        command = [*as_person(person), sys.executable, "-P", "-m", "gpukeeper", *words]
        env = self.engine.environ() | {"GPUKEEPER_SOCKET": str(self.socket)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done
        return done.stdout

    def link(self, person: str) -> str:
        return self.gpukeeper("login", person=person).strip()

    def lines(self, *types: str) -> list[dict[str, Any]]:
        """Of the ledger, as a program of an admin reads them."""
        if not self.token:
            self.token = self.gpukeeper("login", "--token", "tests").strip()
        bearer = {"Authorization": f"Bearer {self.token}"}
        found = []
        for kind in types:
            request = urllib.request.Request(f"{self.url}/api/v1/ledger?type={kind}&limit=500", headers=bearer)
            with urllib.request.urlopen(request, timeout=60) as reply:
                found += json.load(reply)["lines"]
        return sorted(found, key=lambda line: str(line["at"]))


def as_person(name: str) -> list[str]:
    """With one right of root's: to read, because the interpreter may be where only root can read."""
    user, right = pwd.getpwnam(name), "+dac_read_search"
    if user.pw_uid == 0:
        return []
    who = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    return ["setpriv", *who, f"--inh-caps={right}", f"--ambient-caps={right}"]


def text(lead: int = LEAD) -> str:
    return policy(
        limits={"idle": f"{lead + 3}s", "grace": "2s"},
        activity={"tick": "1s", "signals": ["cpu"]},
        schedule={"every": "2s"},
        warnings={"idle": ["10%"], "lead": f"{lead}s", "undelivered": f"{lead}s"},
    )


def start_work(engine: DockerEngine, *, busy: float = 0.0) -> None:
    """A container of a person whom the kernel knows."""
    engine.set_gpu(0, busy=busy)
    engine.run("train", gpus=[0], cmd=SLEEPER, **SECRETS)


@pytest.fixture
def place(docker: DockerEngine, browser: Browser) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="gkweb-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        socket = Path(folder, "socket")
        env = {"GPUKEEPER_SOCKET": str(socket)}
        serving = Serving(docker.popen("serve", "--web", "0", policy=text(), env=env))
        yield Place(docker, serving, socket)
        serving.end()


def press(page: Page, name: str, words: str) -> None:
    page.get_by_role("button", name=name).click()
    expect(page.get_by_role("status").last).to_contain_text(words, timeout=SOON)
    page.get_by_role("link", name="Back to train").click()


def test_an_owner_holds_an_idle_container_by_a_button_and_releases_it(place: Place, context: BrowserContext) -> None:
    docker, page = place.engine, context.new_page()
    log_in(page, place.link(SOMEBODY))
    start_work(docker)
    tile = page.get_by_role("article").filter(has_text="train")
    expect(tile).to_contain_text("idle", timeout=SOON)  # live, without another look
    expect(tile).to_contain_text("stop", timeout=SOON)
    open_workload(page, place.url, "train")
    workload = page.url
    reload_until(page, "The owner was warned")
    expect(page.get_by_text("Nothing happens before")).to_be_visible()
    page.get_by_label("Reason").fill("hush-reason")
    press(page, "Hold", "is held until")

    (warning,) = place.lines("warning")
    announced = warning["until"]
    reload_until(page, f"Held by {SOMEBODY} until")
    passes = lambda: [line["at"] for line in place.lines("pass") if line["at"] > announced]  # noqa: E731
    until(lambda: len(passes()) >= 3, "three passes after the announced time")
    assert docker.state("train") == "running"
    assert place.lines("outcome") == []

    (docker.folder / "policy.yaml").write_text(text(lead=2))
    page.goto(workload, wait_until="domcontentloaded")
    press(page, "Release", "no longer held")
    docker.until(lambda: docker.state("train") in ("exited", None), "it is stopped", deadline=90)
    docker.until(lambda: docker.state("train") is None, "it is removed", deadline=90)
    page.goto(f"{place.url}/history?type=outcome", wait_until="domcontentloaded")
    reload_until(page, re.compile("idle for"))
    table = page.get_by_role("table")
    expect(table).to_contain_text("train")
    page.goto(f"{place.url}/history?type=hold", wait_until="domcontentloaded")
    expect(table).to_contain_text("web, session")
    hold, release = [line for line in place.lines("hold", "release") if line["by"] == SOMEBODY]
    assert (hold["type"], release["type"]) == ("hold", "release")
    assert re.fullmatch(r"web, session [0-9a-f]{8}, from 127\.0\.0\.1", hold["via"])


def test_another_user_sees_the_container_without_what_is_private_and_cannot_act(
    place: Place, browser: Browser, context: BrowserContext
) -> None:
    start_work(place.engine, busy=90.0)
    owner, page = browser.new_context(), context.new_page()
    log_in(owner.new_page(), place.link(SOMEBODY))
    log_in(page, place.link(SOMEBODY_ELSE))
    open_workload(page, place.url, "train")
    workload = page.url.rpartition("/")[2]
    for verb in ("Hold", "Release", "Stop", "Remove", "Restore"):
        expect(page.get_by_role("button", name=verb)).to_have_count(0)
    csrf = page.locator("input[name=csrf]").first.input_value()
    for verb in ("hold", "release", "stop", "remove"):
        refused = context.request.post(f"{place.url}/workload/{workload}/{verb}", form={"csrf": csrf})
        assert refused.status == 409, verb
        assert f"belongs to {SOMEBODY}; {SOMEBODY_ELSE} may not change it" in refused.text()
    assert context.request.post(f"{place.url}/workload/{workload}/pause", form={"csrf": csrf}).status == 404
    assert place.lines("hold", "release", "intent", "outcome") == []

    own = owner.pages[0]
    own.goto(page.url, wait_until="domcontentloaded")
    own.get_by_label("Reason").fill("hush-reason")
    press(own, "Hold", "is held until")
    reload_until(own, "hush-reason")
    for path in ("", "workloads", f"workload/{workload}", "plan", "history", "api/v1/workloads", "api/v1/ledger"):
        for reader, name in ((context, SOMEBODY_ELSE), (owner, SOMEBODY)):
            shown = reader.request.get(f"{place.url}/{path}")
            assert shown.ok, (path, name)
            assert "hush-variable" not in shown.text(), (path, name)
            assert reader is owner or "hush" not in shown.text(), path
    owner.close()


def test_what_is_forged_stolen_missing_or_replayed_gets_nothing(
    place: Place, browser: Browser, context: BrowserContext
) -> None:
    start_work(place.engine, busy=90.0)
    page, link = context.new_page(), place.link(SOMEBODY)
    log_in(page, link)
    open_workload(page, place.url, "train")
    hold, csrf = f"{page.url}/hold", page.locator("input[name=csrf]").first.input_value()
    before = place.lines("hold", "release", "intent", "outcome", "pause")
    assert before == []

    for form in ({}, {"csrf": ""}, {"csrf": csrf[:-1]}, {"csrf": csrf.swapcase() + "0"}):
        assert context.request.post(hold, form=form).status == 403, form

    forged = {"X-Forwarded-User": SOMEBODY, "X-Remote-User": SOMEBODY, "Remote-User": SOMEBODY, "Forwarded": "for=::1"}
    stranger = browser.new_context(extra_http_headers=forged)
    assert stranger.request.post(hold, form={"csrf": csrf}).status == 401
    assert stranger.request.post(link).status == 403, "the link was used"
    assert "Log out" not in stranger.request.get(place.url).text()

    (cookie,) = [one for one in context.cookies() if one["name"] == "gk_session"]
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    secret, _, signature = cookie["value"].rpartition(".")
    altered = (
        f"{secret}.{'0' * len(signature)}",
        f"{secret}.",
        f"{secret[:-2]}xx.{signature}",
        secret,
        link.rpartition("/")[2],
    )
    for value in altered:
        assert _with_cookie(stranger, place.url, hold, value, csrf).status == 401, value
    bearer = stranger.request.post(hold, headers={"authorization": f"Bearer {csrf}"}, form={})
    assert bearer.status == 401

    thief = browser.new_context(storage_state=context.storage_state())
    assert "Log out" in thief.request.get(place.url).text(), "while the session lasts"
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible(timeout=SOON)
    assert "Log out" not in thief.request.get(place.url).text(), "after its owner logged out"
    assert thief.request.post(hold, form={"csrf": csrf}).status == 401
    for made in (stranger, thief):
        made.close()
    assert place.lines("hold", "release", "intent", "outcome", "pause") == []
    assert place.engine.state("train") == "running"


def _with_cookie(context: BrowserContext, url: str, path: str, value: str, csrf: str) -> APIResponse:
    context.clear_cookies()
    context.add_cookies([{"name": "gk_session", "value": value, "url": url}])
    return context.request.post(path, form={"csrf": csrf})
