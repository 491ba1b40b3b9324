"""Volumes and networks, where the engine is not to be misunderstood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import pytest

from gpukeeper.clients.docker import EngineEvent, Volume
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.policy import Networks, Policy, Volumes
from gpukeeper.model.subject import Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.leftovers import Attachments
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import container_subject, volume_ref, volume_subject
from tests.unit.platforms.docker.examples import AT, ID, decoded, facts, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, event, served

T = TypeVar("T")
NAME, NETWORK = "b2" * 32, "c3" * 32
REMOVED = Policy(volumes=Volumes(anonymous_unused=timedelta(days=7)), networks=Networks(unused=timedelta(days=7)))
LOCAL = {"Driver": "local", "Scope": "local", "CreatedAt": "2026-11-01T00:00:00Z"}


def engine(*containers: dict[str, Any]) -> FakeEngine:
    """With a volume without a name, a network, and what every engine has."""
    fake = FakeEngine(*containers)
    fake.volumes = [{"Name": NAME, **LOCAL}]
    made = {"Created": "2026-11-01T00:00:00Z", "Scope": "local"}
    fake.networks = [{"Id": str(n) * 64, "Name": name, **made} for n, name in enumerate(("bridge", "host", "none"))]
    fake.networks += [
        {"Id": NETWORK, "Name": "lab", **made},
        {"Id": "d" * 64, "Name": "everywhere", **made, "Scope": "swarm"},
        {"Id": "e" * 64, "Name": "ingress", **made, "Ingress": True},
        {"Id": "f" * 64, "Name": "template", **made, "ConfigOnly": True},
    ]
    return fake


def having(**settings: Any) -> dict[str, Any]:
    return {**told(), **settings}


def attachments(
    fake: FakeEngine, what: Callable[[Attachments], Awaitable[T]], policy: Policy = REMOVED, *events: dict[str, Any]
) -> T:
    async def run() -> T:
        async with served(fake) as engine:
            records = Records(engine)
            await records.refresh()
            for one in events:
                records.record_event(msgspec.convert(one, EngineEvent))
            return await what(Attachments(records, engine, lambda: AT, policy))

    return asyncio.run(run())


def found(fake: FakeEngine, policy: Policy = REMOVED) -> dict[str, Subject]:
    subjects, unseen = attachments(fake, lambda one: one.observe(), policy)
    assert unseen == ()
    return {one.ref.name: one for one in subjects}


def test_what_the_engine_made_for_itself_and_what_a_swarm_has_is_not_listed() -> None:
    assert set(found(engine())) == {"volume-b2b2b2b2b2b2", "lab"}


@pytest.mark.parametrize(
    "networks",
    [
        {"NetworkSettings": {"Networks": {"lab": {"NetworkID": ""}}}},  # created, never started
        {"NetworkSettings": {"Networks": {"other": {"NetworkID": NETWORK}}}},  # renamed
        {"NetworkSettings": {"Networks": {NETWORK[:12]: None}}},
    ],
)
def test_what_a_container_refers_to_in_any_way_is_in_use(networks: dict[str, Any]) -> None:
    mounts = {"Mounts": [{"Type": "volume", "Name": NAME, "Destination": "/data"}]}
    subjects = found(engine(having(**networks, **mounts)))
    assert {name: (one.state, one.in_use) for name, one in subjects.items()} == dict.fromkeys(
        ("volume-b2b2b2b2b2b2", "lab"), (State.RUNNING, True)
    )


def test_while_a_container_cannot_be_read_nothing_is_unused() -> None:
    fake = engine(told())
    fake.answers[f"GET /containers/{ID}/json"] = (500, "busy")
    assert found(fake) == {}


@pytest.mark.parametrize(("policy", "reported"), [(Policy(), []), (REMOVED, ["volumes", "networks"])])
def test_a_proxy_that_does_not_show_them_makes_no_list_incomplete_unless_they_are_removed(
    policy: Policy, reported: list[str]
) -> None:
    fake = engine()
    fake.answers = {"GET /volumes": (403, "no"), "GET /networks": (403, "no")}
    subjects, unseen = attachments(fake, lambda one: one.observe(), policy)
    assert (subjects, [one.what for one in unseen]) == ((), reported)


def test_an_event_of_a_use_begins_a_new_incarnation() -> None:
    mounted = {**event(NAME, "mount"), "Type": "volume"}
    joined = {**event(NETWORK, "connect"), "Type": "network"}
    before = found(engine())
    subjects, _ = attachments(engine(), lambda one: one.observe(), REMOVED, mounted, joined)
    for one in subjects:
        assert one.last_used is not None
        assert one.seen.incarnation != before[one.ref.name].seen.incarnation


def test_what_is_in_use_gets_no_line_for_each_event() -> None:
    volume = msgspec.convert({"Name": NAME, **LOCAL}, Volume)
    before, after = (volume_subject(volume, True, at, AT) for at in (None, AT.now))
    assert before.seen.incarnation == after.seen.incarnation


def test_a_volume_with_the_id_of_a_container_as_its_name_is_remembered_apart() -> None:
    assert volume_ref(ID, AT).key != AT.ref("container", "eval", ID).key


@pytest.mark.parametrize(
    ("volume", "stays"),
    [
        ({"Name": NAME}, False),
        ({"Name": "cache", "Labels": {"com.docker.volume.anonymous": ""}}, True),
        ({"Name": "results"}, True),
        ({"Name": NAME[:-1]}, True),
        ({"Name": NAME, "Driver": "nfs"}, True),
        ({"Name": NAME, "Scope": "global"}, True),
        ({"Name": NAME, "Options": {"type": "none", "o": "bind", "device": "/home/ann"}}, True),
    ],
)
def test_only_a_local_volume_without_a_name_may_go(volume: dict[str, Any], stays: bool) -> None:
    subject = volume_subject(msgspec.convert({**LOCAL, **volume}, Volume), used=False, used_at=None, at=AT)
    assert (subject.kept is not None) is stays


def test_what_is_not_in_the_list_any_more_is_gone() -> None:
    """The engine's 404 for a network does not prove it: a proxy has the same words."""
    fake = engine()
    gone = attachments(fake, lambda one: one.read(AT.ref("network", "lab", "0" * 64)))
    assert isinstance(gone, Gone)
    fake.answers["GET /networks"] = (404, "page not found")
    assert isinstance(attachments(fake, lambda one: one.read(AT.ref("network", "lab", NETWORK))), Unknown)


def test_a_container_that_the_engine_finds_for_it_keeps_it() -> None:
    fake = engine()
    fresh = attachments(fake, lambda one: one.read(volume_ref(NAME, AT)))
    assert isinstance(fresh, Subject)
    assert fresh.in_use is False
    fake = engine(told())
    fresh = attachments(fake, lambda one: one.read(volume_ref(NAME, AT)))
    assert isinstance(fresh, Subject)
    assert (fresh.in_use, fresh.state) == (True, State.RUNNING)
    assert isinstance(attachments(fake, lambda one: one.remove(fresh)), Changed)
    assert fake.acts() == []


@pytest.mark.parametrize("status", [404, 403, 409])
@pytest.mark.parametrize("name", ["volume-b2b2b2b2b2b2", "lab"])
def test_a_user_who_was_faster_wins(name: str, status: int) -> None:
    fake = engine()
    fresh = found(fake)[name]
    paths = (f"DELETE /volumes/{NAME}", f"DELETE /networks/{NETWORK}")
    fake.answers = dict.fromkeys(paths, (status, '{"message": "volume is in use"}'))
    assert attachments(fake, lambda one: one.remove(fresh)) == Changed("volume is in use")


def test_each_goes_unforced_and_a_failure_is_reported() -> None:
    fake = engine()
    for name, path in (("volume-b2b2b2b2b2b2", f"/volumes/{NAME}"), ("lab", f"/networks/{NETWORK}")):
        fresh = found(fake)[name]
        assert isinstance(attachments(fake, lambda one, fresh=fresh: one.remove(fresh)), Accepted)  # type: ignore[misc]
        assert fake.acts()[-1] == f"DELETE {path}?force=false"
        fake.answers[f"DELETE {path}"] = (500, '{"message": "no"}')
        assert attachments(fake, lambda one, fresh=fresh: one.remove(fresh)) == Refused("no")  # type: ignore[misc]


def test_a_request_of_an_admin_removes_neither_a_named_volume_nor_what_the_policy_only_reports() -> None:
    fake = engine()
    fake.volumes[0]["Name"] = "results"
    for policy, name in ((REMOVED, "results"), (Policy(), "lab")):
        fresh = found(fake)[name]
        assert isinstance(attachments(fake, lambda one, fresh=fresh: one.remove(fresh), policy), Refused)  # type: ignore[misc]
    assert fake.acts() == []


def test_a_container_needs_its_volumes_and_networks_to_be_restored() -> None:
    settings = {"NetworkSettings": {"Networks": {"bridge": {"NetworkID": "0" * 64}, "lab": {"NetworkID": NETWORK}}}}
    mounts = {"Mounts": [{"Type": "volume", "Name": NAME}, {"Type": "bind", "Source": "/home/ann"}]}
    subject = container_subject(decoded(having(**settings, **mounts)), facts(), AT)
    assert subject.attached == (volume_ref(NAME, AT), Ref("docker", "node-3", "network", "lab", NETWORK))
