"""A Keeper over what is here: measured however narrow the look, and following a policy that changes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gpukeeper.model.event import Complaint, Passed
from gpukeeper.model.policy import PlaceScope
from gpukeeper.platforms.ray.settings import settings_of
from gpukeeper.wiring.places import discover
from gpukeeper.wiring.session import follow_policy, open_session, read_policy

NOW = datetime(2026, 5, 1, tzinfo=UTC)
POLICY = "scope: {docker: {}}\nowner_labels: [%s]\n"


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a machine with an engine's socket, which nobody listens to."""
    engine = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(tmp_path)
    engine.bind("engine.sock")  # a relative name: the path of a socket must be short
    os.chdir(here)
    with engine:
        yield {"DOCKER_HOST": f"unix://{tmp_path}/engine.sock", "GPUKEEPER_STATE": str(tmp_path / "state")}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY % "ds01.user")
    return path


def test_a_read_of_one_platform_only_still_measures_before_it_acts(environ: dict[str, str], policy: Path) -> None:
    session = open_session(policy, write=True, environ=environ, only="docker")
    try:
        assert [one.name for one in session.keeper.platforms] == ["docker"]
        assert session.keeper.meter is not None
        assert session.keeper.gpus is not None
    finally:
        session.close()


def test_a_label_that_a_changed_policy_trusts_no_longer_is_accepted_no_longer(
    environ: dict[str, str], policy: Path
) -> None:
    session = open_session(policy, write=True, environ=environ)
    (docker,) = [one for one in session.keeper.platforms if one.name == "docker"]
    try:
        assert docker._around._trusted == ("ds01.user",)  # type: ignore[attr-defined]
        policy.write_text(POLICY % "")
        follow_policy(session, read_policy(policy).loaded)
        assert docker._around._trusted == ()  # type: ignore[attr-defined]
    finally:
        session.close()


def test_ray_is_there_if_configured_and_follows_it(environ: dict[str, str], policy: Path) -> None:
    """A node may come later, and containers that are nodes are known to their engine only."""
    policy.write_text("scope: {ray: {}}\nray: {roots: [/nowhere]}\n")
    session = open_session(policy, write=True, environ=environ)
    (ray,) = [one for one in session.keeper.platforms if one.name == "ray"]
    (reach,) = [one for one in session.reaches if one.platform == "ray"]
    try:
        assert reach.reachable
        assert ray.place == reach.place
        assert settings_of(ray._policy).roots == ("/nowhere",)  # type: ignore[attr-defined]
        policy.write_text("scope: {ray: {}}\nray: {roots: [/elsewhere]}\n")
        follow_policy(session, read_policy(policy).loaded)
        assert settings_of(ray._policy).roots == ("/elsewhere",)  # type: ignore[attr-defined]
    finally:
        session.close()


def test_an_engine_that_is_silent_hides_nodes_and_does_not_end_the_read(environ: dict[str, str], policy: Path) -> None:
    policy.write_text("scope: {ray: {}}\nray: {roots: [/nowhere], window: 1s}\n")
    session = open_session(policy, write=True, environ=environ)
    (ray,) = [one for one in session.keeper.platforms if one.name == "ray"]

    async def unseen() -> list[str]:
        return [one.what async for page in ray.observe(PlaceScope()) for one in page.unseen]

    try:
        assert "containers that are nodes" in asyncio.run(unseen())
    finally:
        session.close()


def test_a_ray_address_alone_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpukeeper.wiring.places.names_here", lambda place, environ: ())
    (reach,) = [one for one in discover({"RAY_ADDRESS": "head:6379"}) if one.platform == "ray"]
    assert (reach.reachable, "head:6379" in reach.why) == (False, True)
    monkeypatch.setattr("gpukeeper.wiring.places.names_here", lambda place, environ: (place, "abc"))
    (reach,) = [one for one in discover({}) if one.platform == "ray"]
    assert (reach.reachable, reach.why) == (True, "2 nodes: this machine, abc")


def test_admins_are_notified_of_what_is_recorded_while_a_program_stays(
    environ: dict[str, str], policy: Path, tmp_path: Path
) -> None:
    log: list[str] = []
    session = open_session(policy, write=True, environ=environ)
    place = {"platform": "docker", "place": "x", "seen": 9, "due": 9, "reclaimed": 0, "deferred": 0, "failed": 0}
    tripped = Passed(at=NOW, pass_id=1, breaker="9 of 9 are due", **place)  # type: ignore[arg-type]

    async def story() -> None:
        await session.ledger.append([tripped])  # before it: nothing is sent
        async with session.admins_notified(log.append):
            for line in (tripped, tripped, msgspec.structs.replace(tripped, breaker=None), tripped):
                await session.ledger.append([line])
            await session.ledger.append([Complaint(at=NOW, what="a pass failed")])

    try:
        asyncio.run(story())
    finally:
        session.close()
    opened = "breaker: docker/x: the breaker is open and nothing is touched there. 9 of 9 are due"
    assert log == [opened, opened]  # once each time it opens; what fails is logged where it happens


def test_channels_follow_the_policy_of_a_program_that_stays(environ: dict[str, str], policy: Path) -> None:
    session = open_session(policy, write=True, environ=environ)

    policy.write_text(POLICY % "x" + "notify: {admins: [{command: /usr/bin/page}]}\n")
    changed = read_policy(policy).loaded

    def names() -> list[str]:
        return [one.name for one in session.messages.admins]

    async def story() -> list[list[str]]:
        async with session.admins_notified(lambda words: None):
            before = names()
            follow_policy(session, changed)
            return [before, names()]

    try:
        assert asyncio.run(story()) == [["log"], ["log", "command /usr/bin/page"]]
    finally:
        session.close()


def test_a_file_of_gpu_hours_that_cannot_be_used_stops_nothing(environ: dict[str, str], policy: Path) -> None:
    session = open_session(policy, write=True, environ=environ)
    logged: list[str] = []
    try:
        (Path(environ["GPUKEEPER_STATE"]) / "usage.db").write_text("not a database, and long enough to be read as one")
        session.record_hours(logged.append)
        assert (session.hours, session.keeper.usage) == (None, None)
        assert "is not recorded" in logged[0]
        (Path(environ["GPUKEEPER_STATE"]) / "usage.db").unlink()
        session.record_hours(logged.append)
        assert session.keeper.usage is session.hours is not None
        assert len(logged) == 1
    finally:
        session.close()
