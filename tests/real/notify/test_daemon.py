"""Messages of a running daemon over a real mail server and a webhook: before a stop, after it, and to admins."""

from __future__ import annotations

import email
import os
import pwd
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.policy import default
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet, ago
from tests.real.notify.receiver import Receiver
from tests.real.web.serving import Serving, until

ME = pwd.getpwuid(os.getuid()).pw_name
URL = "https://gpu.example"
POLICY = """
mode: enforce
scope: {docker: {}}
admins: [ADMIN]
schedule: {every: 2s}
breaker: {running: 100%, floor: 100}
warnings: {runtime: [50%], lead: 4s, undelivered: 5m}
classes:
  docker: {idle: none, max_runtime: 3h, on_max_runtime: stop, grace: 1s}
  patient: {idle: none, max_runtime: 100d}
notify:
  owners: [{apprise: OWNERS}]
  admins: [{apprise: ADMINS}]
  address: "{owner}@uni.example"
web: {url: "https://gpu.example"}
"""


@dataclass
class Place:
    fleet: Fleet
    serving: Serving
    mailbox: Receiver
    hook: Receiver

    def mail(self) -> tuple[str, str, str]:
        """The next one: to whom, its subject, its text on one line."""
        got: dict[str, Any] = self.mailbox.next()
        read = email.message_from_string(got["text"], policy=default)
        body = read.get_body()
        assert body is not None
        (to,) = got["to"]
        return to, str(read["Subject"]), re.sub(r"\s+", " ", body.get_content())

    def page(self, text: str) -> str:
        """Of the workload that a message links to, on this dashboard."""
        (link,) = re.findall(rf"{URL}(/\S+)", text)
        with urllib.request.urlopen(f"{self.serving.url}{link}", timeout=60) as reply:
            return str(reply.read().decode())


@pytest.fixture
def place(tmp_path: Path, start: Callable[[str], Receiver]) -> Iterator[Place]:
    mailbox, hook = start("smtp"), start("web")
    services = {
        "OWNERS": f"mailto://127.0.0.1:{mailbox.port}?from=gpukeeper@uni.example&to={{address}}",
        "ADMINS": f"json://127.0.0.1:{hook.port}/admins",
    }
    text = POLICY
    for name, url in services.items():
        path = tmp_path / f"{name.lower()}.url"
        path.write_text(url)
        path.chmod(0o600)
        text = text.replace(name, str(path))
    fleet = Fleet(tmp_path, text)
    fleet.add("other", state=State.RUNNING, started=ago(hours=1), owner="ann", class_="patient")
    fleet.add("mine", state=State.RUNNING, started=ago(hours=1), owner=ME, class_="patient")
    serving = Serving(fleet.start("serve", "--web", "0"))
    yield Place(fleet, serving, mailbox, hook)
    serving.end()


def test_an_owner_gets_a_mail_before_the_stop_and_one_after_it_with_the_way_back(place: Place) -> None:
    place.fleet.add("train", state=State.RUNNING, started=ago(hours=4), owner="ann", class_="docker")
    to, subject, text = place.mail()
    assert (to, subject) == ("ann@uni.example", "[gpukeeper] WARNING: docker/node-1/train")
    assert "will be stopped at 20" in text
    assert "Save your work; an admin can grant more time" in text
    assert "docker/node-1/train" in place.page(text)
    to, subject, text = place.mail()
    assert (to, subject) == ("ann@uni.example", "[gpukeeper] STOPPED: docker/node-1/train")
    assert "was stopped: ran for 4h" in text
    assert "To bring it back: gpukeeper restore docker/node-1/train" in text
    assert "docker/node-1/train" in place.page(text)
    (warning,), (outcome,) = place.fleet.lines("warning"), place.fleet.lines("outcome")
    assert warning["delivered"]
    assert warning["until"] <= outcome["at"]
    (sent,) = until(lambda: place.fleet.lines("notification"), "the delivery is recorded")
    assert (sent["kind"], sent["owner"], sent["delivered"], sent["key"]) == ("stopped", "ann", True, outcome["step"])
    assert place.mailbox.close() == ""  # nothing else


def test_an_owner_is_notified_of_a_stop_by_an_admin_and_not_of_their_own(place: Place) -> None:
    until(lambda: len(place.fleet.lines("noticed")) >= 2, "a pass saw both")
    for name in ("mine", "other"):
        stopped = place.fleet.run("workload", "stop", name, "--yes")
        assert stopped.code == 0, stopped
    to, subject, text = place.mail()
    assert (to, subject) == ("ann@uni.example", "[gpukeeper] STOPPED: docker/node-1/other")
    assert f"was stopped: requested by {ME}" in text
    assert "gpukeeper restore docker/node-1/other" in text
    assert place.mailbox.close() == ""


def test_admins_get_an_alert_over_the_webhook(place: Place) -> None:
    assert place.fleet.run("node", "quarantine", "GPU-1", "--reason", "too many errors").code == 0
    got = place.hook.next()
    assert got["path"] == "/admins"
    assert got["body"]["title"].startswith("[gpukeeper] ALERT")
    assert "is quarantined: too many errors" in got["body"]["message"]
    assert place.hook.close() == ""
