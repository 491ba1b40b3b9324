"""The web process and the daemon are killed at random moments while people act: what was answered as done is done,
once, and everybody stays logged in. A seed repeats the delays, not the moments: those depend on the machine."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import POLICY, Fleet, ago
from tests.real.docker import kernel
from tests.real.web.serving import DEADLINE, Serving, until

SEED = 11
KILLS, AT_ONCE = 3, 4
EACH = 4  # requests of one person for one kill, as many as a burst allows
LATEST = (0.1, 0.4)  # seconds after the first request, by chance
WORKLOADS = 5
KEPT = "w4"
Act = Callable[[], None]


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Browser:
    """What one sends: a cookie, forms with their CSRF token, and no request twice."""

    def __init__(self, url: str, link: str) -> None:
        self.url, self.cookie = url, ""
        self._opener = urllib.request.build_opener(NoRedirect)
        status, text = self.send(urllib.parse.urlsplit(link).path, {})
        assert status == 303, text
        self.csrf = re.findall(r'name="csrf" value="([0-9a-f]+)"', self.send("/")[1])[0]

    def send(self, path: str, form: dict[str, str] | None = None) -> tuple[int, str]:
        """Status 0: no answer."""
        data = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Cookie": self.cookie})
        try:
            with self._open(request) as reply:
                self.cookie = (reply.headers.get("set-cookie") or self.cookie).partition(";")[0]
                return int(reply.status or 0), reply.read().decode()
        except (OSError, HTTPException):
            return 0, ""

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=DEADLINE)
        except urllib.error.HTTPError as reply:
            return reply

    def act(self, path: str, **form: str) -> tuple[int, str]:
        return self.send(path, {"csrf": self.csrf, **form})

    @property
    def logged_in(self) -> bool:
        return "Log out" in self.send("/")[1]


class Site:
    """A daemon that is started again after each crash, on the same port."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Fleet(folder, f"{POLICY}schedule: {{every: 2s}}\n")
        for number in range(WORKLOADS):
            self.fleet.add(f"w{number}", state=State.RUNNING, started=ago(hours=3), devices=(f"GPU-{number}",))
        self.serving = Serving(self.fleet.start("serve", "--web", "0"))
        self.browser = Browser(self.serving.url, self.fleet.run("login").out.strip())
        self.workloads = until(self._workloads, "a pass saw every workload")

    def start_again(self) -> None:
        port = self.serving.url.rpartition(":")[2]
        self.serving = Serving(self.fleet.start("serve", "--web", port))

    def is_back(self) -> None:
        until(lambda: self.browser.logged_in, "the session is still valid")
        until(self._workloads, "the workloads are shown again")

    def passes(self) -> int:
        return len(self.fleet.lines("pass"))

    def hold(self, reason: str, name: str) -> tuple[str, int]:
        status, _ = self.browser.act(f"/workload/{self.workloads[name]}/hold", hours="1", reason=reason)
        return reason, status

    def hold_often(self, who: str, name: str) -> list[tuple[str, int]]:
        """One after the other, while there are answers."""
        answers = [self.hold(f"{who}.0", name)]
        while answers[-1][1] and len(answers) < EACH:
            answers.append(self.hold(f"{who}.{len(answers)}", name))
        return answers

    def stop(self, name: str) -> tuple[str, int]:
        path = f"/workload/{self.workloads[name]}/stop"
        status, page = self.browser.act(path)
        token = re.search(r'name="token" value="([^"]+)"', page)
        return name, self.browser.act(path, token=token[1])[0] if token else status

    def _workloads(self) -> dict[str, str]:
        found = re.findall(r'href="/workload/(\w+)">[^<]*/(w\d+)<', self.browser.send("/workloads")[1])
        return {name: id_ for id_, name in found} if len(found) == WORKLOADS else {}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.serving.end()


@pytest.fixture
def dice() -> random.Random:
    return random.Random(SEED)


@contextmanager
def killed_meanwhile(dice: random.Random, kill: Act) -> Iterator[None]:
    """At a random moment of the block."""
    delay = dice.uniform(0, dice.choice(LATEST))

    def later() -> None:
        time.sleep(delay)  # the moment itself, not a wait for something
        kill()

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(later)
        yield
        done.result()


def held_once(site: Site, answers: list[tuple[str, int]]) -> None:
    """What was answered as done is in the ledger, and nothing is there twice."""
    found = Counter(line["hold"]["reason"] for line in site.fleet.lines("hold"))
    assert set(found.values()) <= {1}, found
    assert {reason for reason, status in answers if status == 200} <= found.keys(), (answers, found)
    assert found.keys() <= {reason for reason, _ in answers}
    assert not [status for _, status in answers if status not in (0, 200, 429, 503)], answers
    refused = {reason for reason, status in answers if status == 429}  # too many at once, where a burst went on
    assert not refused & found.keys()


def test_the_web_process_comes_back_with_its_sessions_and_does_nothing_twice(site: Site, dice: random.Random) -> None:
    answers: list[tuple[str, int]] = []
    for kill in range(KILLS):
        pid, passes = until(site.serving.web_pids, "a web process")[0], site.passes()
        with (
            killed_meanwhile(dice, lambda pid=pid: os.kill(pid, signal.SIGKILL)),
            ThreadPoolExecutor(AT_ONCE) as people,
        ):
            asked = [people.submit(site.hold_often, f"{kill}.{number}", f"w{number}") for number in range(AT_ONCE)]
            answers += [one for person in asked for one in person.result()]
        until(lambda pid=pid: [one for one in site.serving.web_pids() if one != pid], "it was started again")
        site.is_back()
        until(lambda passes=passes: site.passes() > passes, "passes go on")
    until(lambda: answers.append(site.hold(f"last {len(answers)}", "w0")) or answers[-1][1] == 200, "a hold after all")
    held_once(site, answers)
    assert site.serving.daemon.poll() is None


def test_the_daemon_takes_its_web_process_along_and_keeps_what_it_answered(site: Site, dice: random.Random) -> None:
    answers: list[tuple[str, int]] = []
    stops: list[tuple[str, int]] = []
    for kill in range(KILLS):
        (web,) = until(site.serving.web_pids, "a web process")
        with killed_meanwhile(dice, site.serving.kill9), ThreadPoolExecutor(AT_ONCE) as people:
            stopping = people.submit(site.stop, f"w{kill}")
            asked = [people.submit(site.hold_often, f"{kill}.{number}", KEPT) for number in range(AT_ONCE - 1)]
            answers += [one for person in asked for one in person.result()]
            stops.append(stopping.result())
        until(lambda web=web: kernel.state(web) in ("", "Z"), "its web process ended, too")
        site.start_again()
        site.is_back()
    held_once(site, answers)
    steps_closed_once(site, stops)


def steps_closed_once(site: Site, stops: list[tuple[str, int]]) -> None:
    """The ledger has one outcome for each intent, and it is what happened."""
    until(lambda: len(site.fleet.lines("intent")) == len(site.fleet.lines("outcome")), "every step has an outcome")
    intents, outcomes = site.fleet.lines("intent"), site.fleet.lines("outcome")
    assert {line["step"] for line in intents} == {line["step"] for line in outcomes}
    assert max(Counter(line["ref"]["name"] for line in intents).values(), default=0) <= 1, "no stop is repeated"
    reclaimed = {line["ref"]["name"] for line in outcomes if line["result"] == "reclaimed"}
    ended = {f"w{number}" for number in range(WORKLOADS) if site.fleet.state_of(f"w{number}") != "running"}
    assert reclaimed == ended
    assert {name for name, status in stops if status == 200} - {""} <= ended
