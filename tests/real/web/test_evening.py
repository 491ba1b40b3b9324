"""One container from its start to its removal, as its owner and an admin follow it: in a browser, by mail, by command
and over the API. Every time that one of them names is written down, and compared with what happened then."""

from __future__ import annotations

import email
import json
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from email.policy import default
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from gpukeeper.lifecycle.forecast import NOT_IDLE_BEFORE
from tests.real.docker.harness import SOMEBODY, policy
from tests.real.docker.private_engine import DockerEngine
from tests.real.notify.receiver import Receiver
from tests.real.web.serving import Serving, log_in, open_workload, until
from tests.real.web.test_docker import Place, start_work

IDLE, LEAD = 45, 15  # seconds
DONE = {"warned": "warn", "stopped": "stop", "deleted": "remove"}
LATE = 2  # passes after the one in which it was to happen: what is measured begins with a tick


class Promise(NamedTuple):
    """`due`: None: at the next pass."""

    seen: str
    by: str
    action: str
    due: str | None
    rule: str
    provided: str


class Evening(NamedTuple):
    place: Place
    student: Page
    admin: Page
    mailbox: Receiver


@pytest.fixture
def evening(docker: DockerEngine, browser: Browser) -> Iterator[Evening]:
    mailbox = Receiver("smtp")
    with tempfile.TemporaryDirectory(prefix="gkweb-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        service = Path(folder, "service.url")
        service.write_text(f"mailto://127.0.0.1:{mailbox.port}?from=gpukeeper@uni.example&to={{address}}")
        service.chmod(0o600)
        text = policy(
            limits={"idle": f"{IDLE}s", "grace": "2s", "after_idle": "remove"},
            activity={"tick": "1s", "signals": ["cpu"]},
            schedule={"every": "2s"},
            warnings={"idle": ["10%"], "lead": f"{LEAD}s", "undelivered": f"{LEAD}s"},
            notify={"owners": [{"apprise": str(service)}], "address": "{owner}@uni.example"},
        )
        socket = Path(folder, "socket")
        serving = Serving(docker.popen("serve", "--web", "0", policy=text, env={"GPUKEEPER_SOCKET": str(socket)}))
        place = Place(docker, serving, socket)
        pages = [browser.new_context().new_page() for _ in range(2)]
        for page, person in zip(pages, (SOMEBODY, "root"), strict=True):
            log_in(page, place.link(person))
        yield Evening(place, *pages, mailbox)
        for page in pages:
            page.context.close()
        serving.end()
        mailbox.close()


def test_every_time_that_was_named_is_the_time_at_which_it_happened(evening: Evening) -> None:
    place, docker = evening.place, evening.place.engine
    place.lines("pass")
    start_work(docker)
    for page in (evening.student, evening.admin):
        open_workload(page, place.url, "train")
    promises: list[Promise] = []
    until(lambda: promises.extend(named(evening)) or docker.state("train") is None, "it is stopped and deleted")
    acts = {line["action"]: line["at"] for line in place.lines("intent")}
    warnings, passes = (
        place.lines("warning"),
        [line["at"] for line in place.lines("pass") if line["platform"] == "docker"],
    )
    acts["warn"] = warnings[0]["at"]
    assert set(acts) == {"warn", "stop", "remove"}
    assert {one.by for one in promises} == {"owner's page", "admin's page", "API", "explain"}

    for one in promises:
        if one.rule == "max_runtime":
            assert one.provided == NOT_IDLE_BEFORE, one
        elif one.seen < acts[one.action]:
            due = one.due or one.seen
            late = [at for at in passes if due < at < acts[one.action]]
            assert due[:19] <= acts[one.action][:19], one
            assert len(late) <= LATE + (one.action == "remove"), (one, acts, late)  # it is stopped first
    assert {"warn", "stop", "remove"} <= {one.action for one in promises if one.rule == "idle"}
    assert all(one["until"][:19] <= acts["stop"][:19] for one in warnings), (
        "nothing happens before the time of a warning"
    )

    mails = [read_mail(evening.mailbox) for _ in range(2)]
    assert [subject.split(":")[0] for subject, _ in mails] == ["[gpukeeper] WARNING", "[gpukeeper] STOPPED"]
    announced = re.search(r"will be stopped at (\d{4}-\d\d-\d\d \d\d:\d\d) UTC \(in \w+\), then deleted", mails[0][1])
    assert announced, mails[0]
    assert announced[1] == warnings[0]["until"][:16].replace("T", " ")
    assert "was stopped: idle for" in mails[1][1]


def named(evening: Evening) -> list[Promise]:
    """What each of them says now, as long as it is there."""
    place, found = evening.place, list[Promise]()
    for page, by in ((evening.student, "owner's page"), (evening.admin, "admin's page")):
        page.reload(wait_until="domcontentloaded")
        steps = page.locator("ol.steps li").evaluate_all("all => all.map(one => one.innerHTML)")
        found += [on_page(step, by) for step in steps if "<b>checked again</b>" not in step]
    for one in api(place, "workloads")["workloads"]:
        found += [promise("API", step) for step in one["steps"] if step["action"]]
    try:
        said = json.loads(place.gpukeeper("explain", "train", "--json", person=SOMEBODY))
        found += [promise("explain", step) for step in said["ahead"]]
    except AssertionError:
        assert place.engine.state("train") != "running", "it is only unknown when it is gone"
    return found


def promise(by: str, step: dict[str, Any]) -> Promise:
    return Promise(now(), by, step["action"], step["at"], step["rule"], step["provided"])


def on_page(html: str, by: str) -> Promise:
    (done,), rule = re.findall(r"<b>(\w+)</b>", html), re.findall(r"by rule (\w+)", html)[0]
    due, provided = re.findall(r'datetime="([^"]+)"', html), html.partition(", if ")[2]
    return Promise(now(), by, DONE[done], due[0] if due else None, rule, provided)


def api(place: Place, path: str) -> Any:
    request = urllib.request.Request(f"{place.url}/api/v1/{path}", headers={"Authorization": f"Bearer {place.token}"})
    with closing(urllib.request.urlopen(request, timeout=60)) as reply:
        return json.load(reply)


def now() -> str:
    return datetime.now(UTC).isoformat()


def read_mail(mailbox: Receiver) -> tuple[str, str]:
    read = email.message_from_string(mailbox.next()["text"], policy=default)
    body = read.get_body()
    assert body is not None
    return str(read["Subject"]), re.sub(r"\s+", " ", body.get_content())
