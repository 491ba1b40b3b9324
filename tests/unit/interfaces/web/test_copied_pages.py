"""Pages of a fleet: what its copy does not hold is said with the command that shows it, and is no problem."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest
from starlette.testclient import TestClient

from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.outlook import PolicyHead
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import NO_COPY, NOT_COPIED, Answer, Credentials, Person, SourceSettings
from gpukeeper.interfaces.web.application import make_app
from gpukeeper.interfaces.web.source import Source
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import Mode
from gpukeeper.views.live import MachineView

NOW = datetime.now(UTC)
PLACE = PlaceState(platform="docker", place="gpu1", at=NOW, seen=3, running=1, unseen=(), breaker=None)
HEALTHY = MachineView(
    machine="gpu1",
    at=NOW,
    version="1",
    policy=PolicyHead("/etc/gpukeeper/policy.yaml", "abc123", "shared-host", Mode.ENFORCE),
    paused=None,
    places=(PLACE,),
    gpus=(),
    workloads=(),
)


class Copy(Source):
    """As the web server of a fleet answers."""

    revocations = 0

    def __init__(self) -> None:
        settings = SourceSettings(key=b"k" * 32, anonymous=True, session_seconds=60, version="1", fleet=True)
        super().__init__(settings)
        self.machines = {"gpu1": HEALTHY}
        self.exit_code = NOT_COPIED

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        words = f"{request.verb}: the words of the copy"
        return Answer(id=1, person=Person(), done=False, words=words, exit_code=self.exit_code)


@pytest.fixture
def copy() -> Copy:
    return Copy()


@pytest.fixture
def client(copy: Copy) -> Iterator[TestClient]:
    with TestClient(make_app(cast(Any, copy)), base_url="http://127.0.0.1") as made:
        yield made


def changed(**values: Any) -> MachineView:
    return msgspec.structs.replace(HEALTHY, **values)


def test_the_policy_page_shows_which_policy_is_in_effect_where(copy: Copy, client: TestClient) -> None:
    other = changed(machine="gpu2", policy=PolicyHead("/etc/other.yaml", "def456", "ci", Mode.PLAN))
    copy.machines = {"gpu1": HEALTHY, "gpu2": other}
    page = client.get("/policy")
    assert page.status_code == 200
    for words in (
        "gpu1",
        "abc123",
        "enforce",
        "gpu2",
        "/etc/other.yaml",
        "plan",
        "2 different policies",
        "policy show",
    ):
        assert words in page.text, words
    copy.machines = {}
    assert client.get("/policy").status_code == 200


def test_a_healthy_machine_is_shown_as_healthy(client: TestClient) -> None:
    page = client.get("/health").text
    assert "Nothing to check: all 1 places were read." in page
    assert "health: the words of the copy" in page
    assert "could not be read" not in page.replace("Could not be read", "")
    assert "banner warn" not in page


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (changed(paused="by root"), "all actions are paused"),
        (changed(not_seen_since=NOW - timedelta(hours=1)), "it was not seen since"),
        (
            changed(places=(msgspec.structs.replace(PLACE, unseen=(Unseen("docker/gpu1", "refused"),)),)),
            "1 place could not be read completely",
        ),
        (changed(places=(msgspec.structs.replace(PLACE, breaker="open"),)), "The breaker is open at 1 place"),
    ],
)
def test_what_is_to_be_checked_is_said(copy: Copy, client: TestClient, view: MachineView, said: str) -> None:
    copy.machines = {"gpu1": view}
    page = client.get("/health").text
    assert "To check:" in page
    assert said in page


def test_a_database_that_cannot_be_read_is_a_problem(copy: Copy, client: TestClient) -> None:
    copy.exit_code = NO_COPY
    assert "Its health could not be read: health: the words of the copy" in client.get("/health").text
