"""What every platform adapter must keep, run against each one. A new platform adds itself to ADAPTERS and is done.
One that needs an engine adds itself in `tests/real/contract`, which runs the same tests.

An adapter is built with a few things in it; `Made` says how to change one behind the adapter's back.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.engine.keeper import IRREVERSIBLE, check_guards
from gpukeeper.engine.ports import Platform
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Decision,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
)
from gpukeeper.model.policy import PlaceScope, Policy, Reports, Temporary
from gpukeeper.model.subject import Gone, Outcome, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.adapter import HostAccess, HostPlatform
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.settings import RaySettings
from gpukeeper.platforms.ray.survey import NodesAccess
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.folder import FolderPlatform, Workload
from gpukeeper.platforms.simulated.world import (
    BEGIN,
    SimulatedPlace,
    Thing,
    VirtualClock,
    VirtualLoop,
    World,
    run_virtually,
)
from tests.own_processes import everything_seen


@dataclass
class Made:
    platform: Platform
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    replace: Callable[[str], None]  # the same name, another thing
    change: Callable[[str], None]  # the same thing, changed
    names: tuple[str, ...]
    close: Callable[[], None] = lambda: None


class Now:
    def now(self) -> datetime:
        return datetime.now(UTC)


def simulated(tmp_path: Path) -> Made:
    loop = VirtualLoop()
    place = SimulatedPlace("docker", "node-1", ("GPU-0",), ("ann",))
    world = World(1, VirtualClock(loop), (place,))

    def add(name: str) -> Thing:
        thing = Thing(Ref("docker", "node-1", "container", name, world.new_uid()), BEGIN, owner="ann")
        thing.start(BEGIN, timedelta())
        thing.end(BEGIN, Outcome.SUCCEEDED)
        return world.add(thing)

    def named(name: str) -> Thing:
        return next(t for t in world.things[place.key].values() if t.ref.name == name)

    def replace(name: str) -> None:
        world.remove(named(name))
        add(name)

    add("one"), add("two")
    return Made(
        SimulatedPlatform(world, place),
        lambda work: run_virtually(work, loop),
        replace,
        lambda name: named(name).touch(),
        ("one", "two"),
        loop.close,
    )


def folder(tmp_path: Path) -> Made:
    fleet = tmp_path / "node-1"
    fleet.mkdir()

    def write(name: str, outcome: Outcome = Outcome.SUCCEEDED) -> None:
        ended = Workload(state=State.ENDED, created=BEGIN, started=BEGIN, ended=BEGIN, outcome=outcome, owner="ann")
        fresh = fleet / f"{name}.new"
        fresh.write_bytes(msgspec.json.encode(ended))
        fresh.rename(fleet / f"{name}.json")

    def change(name: str) -> None:
        path = fleet / f"{name}.json"
        path.write_bytes(path.read_bytes().replace(b"succeeded", b"failed"))

    write("one"), write("two")
    return Made(FolderPlatform(fleet), asyncio.run, write, change, ("one", "two"))


def host_trees(tmp_path: Path) -> Made:
    root = tmp_path / "scratch"
    temporary = (Temporary(root=str(root), names=("tmp-*",)),)
    platform = HostPlatform("here", Policy(temporary=temporary), Now(), access=machine_access())
    return _on_host(platform, root, ("tmp-one", "tmp-two"))


def host_reports(tmp_path: Path) -> Made:
    root = tmp_path / "reports"
    kept = Reports(roots=(str(root),), keep_last=0)
    platform = HostPlatform("here", Policy(reports=kept), Now(), access=machine_access())
    return _on_host(platform, root, ("one", "two"))


def ray_trees(tmp_path: Path) -> Made:
    """This machine as a node: a Ray root that is left behind makes it one."""
    root = tmp_path / "scratch"
    (root / "ray").mkdir(parents=True)
    temporary = (Temporary(root=str(root), names=("tmp-*",), platform="ray"),)
    settings = RaySettings(roots=(str(root),), cpu=1e9, window=timedelta(milliseconds=1))
    policy = Policy(scope={"ray": PlaceScope()}, platforms={"ray": settings}, temporary=temporary)
    access = NodesAccess(scan=everything_seen, everyone=lambda: ())
    platform = RayPlatform("here", policy, Now(), access=access, environ={})
    return _on_host(platform, root, ("tmp-one", "tmp-two"))


def machine_access() -> HostAccess:
    return HostAccess(inventory=no_driver, scan=everything_seen)


def no_driver(deadline: timedelta) -> tuple[GpuFacts, ...]:
    return ()


def _on_host(platform: HostPlatform | RayPlatform, root: Path, names: tuple[str, ...]) -> Made:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("x" * 10_000)

    def replace(name: str) -> None:
        path = Path("/") / name
        fresh = root.parent / "fresh"  # made while the old one lives, so that it has another inode
        fresh.mkdir()
        shutil.rmtree(path)
        fresh.rename(path)

    def change(name: str) -> None:
        (Path("/") / name / "more").write_text("y")

    return Made(platform, asyncio.run, replace, change, tuple(str(root / name) for name in names))


ADAPTERS = {
    "simulated": simulated,
    "folder": folder,
    "host": host_trees,
    "host-reports": host_reports,
    "ray": ray_trees,
}


@pytest.fixture(params=sorted(ADAPTERS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    made = ADAPTERS[request.param](tmp_path)
    yield made
    made.close()


async def observed(platform: Platform) -> list[Snapshot]:
    return [page async for page in platform.observe(PlaceScope())]


async def subject_of(made: Made, name: str) -> Subject:
    for page in await observed(made.platform):
        for subject in page.subjects:
            if subject.ref.name == name:
                return subject
    raise AssertionError(f"{name} was not observed")


async def removed(made: Made, subject: Subject) -> Any:
    """What a look says once its removal had the time it needs."""
    for _ in range(100):
        found = await made.platform.read(subject.ref)
        if not (isinstance(found, Subject) and found.state is State.REMOVING):
            break
        await asyncio.sleep(0.1)
    return found


def step(subject: Subject, action: Action) -> Step:
    return Step("1.1", Decision(seen=subject.seen, action=action, rule="retention", reason="because"))


def offers(made: Made, action: Action) -> None:
    if action not in made.platform.guards:
        pytest.skip(f"{made.platform.name} offers no {action}")


def test_everything_there_is_observed_under_its_own_platform_and_place(made: Made) -> None:
    pages = made.run(observed(made.platform))
    subjects = [s for page in pages for s in page.subjects]
    assert set(made.names) <= {s.ref.name for s in subjects}
    for s in subjects:
        assert (s.ref.platform, s.ref.place) == (made.platform.name, made.platform.place)
        assert s.ref.uid
        assert s.seen.at.tzinfo is not None


def test_uids_are_unique_and_stable(made: Made) -> None:
    async def twice() -> tuple[set[str], set[str]]:
        def uids(pages: list[Snapshot]) -> set[str]:
            return {s.ref.uid for page in pages for s in page.subjects if s.ref.name in made.names}

        return uids(await observed(made.platform)), uids(await observed(made.platform))

    first, second = made.run(twice())
    assert first == second
    assert len(first) == len(made.names)


def test_a_read_finds_the_same_thing_in_the_same_incarnation(made: Made) -> None:
    async def read() -> tuple[Subject, Any]:
        subject = await subject_of(made, made.names[0])
        return subject, await made.platform.read(subject.ref)

    subject, found = made.run(read())
    assert isinstance(found, Subject)
    assert found.ref == subject.ref
    assert found.seen.incarnation == subject.seen.incarnation


def test_what_has_the_name_but_not_the_uid_is_gone(made: Made) -> None:
    async def read() -> Any:
        subject = await subject_of(made, made.names[0])
        made.replace(made.names[0])
        return await made.platform.read(subject.ref)

    assert isinstance(made.run(read()), Gone)


def test_what_never_was_is_gone_or_unknown_never_something_else(made: Made) -> None:
    async def read() -> Any:
        subject = await subject_of(made, made.names[0])
        return await made.platform.read(msgspec.structs.replace(subject.ref, name="no-such-thing", uid="0:0"))

    assert isinstance(made.run(read()), Gone | Unknown)


def test_an_id_finds_its_workload_or_nothing_at_all(made: Made) -> None:
    """Gone or Unknown where processes carry no id of a workload."""

    async def read() -> tuple[Subject, Any, Any]:
        subject = await subject_of(made, made.names[0])
        return subject, await made.platform.read_by_id(subject.ref.uid), await made.platform.read_by_id("f" * 64)

    subject, found, other = made.run(read())
    assert isinstance(other, Gone | Unknown)
    if made.platform.name == "docker":
        assert isinstance(found, Subject)
        assert found.ref == subject.ref
    else:
        assert isinstance(found, Unknown)


def test_a_policy_that_changed_is_followed(made: Made) -> None:
    async def read() -> Any:
        subject = await subject_of(made, made.names[0])
        made.platform.follow(Policy(scope={made.platform.name: PlaceScope()}))
        return await made.platform.read(subject.ref)

    assert isinstance(made.run(read()), Subject | Gone | Unknown)


def test_irreversible_verbs_are_atomic(made: Made) -> None:
    check_guards(made.platform)
    weaker = {a for a in IRREVERSIBLE & made.platform.guards.keys() if made.platform.guards[a] is not Guard.ATOMIC}
    # An engine of containers refuses to remove what runs, and has no other condition.
    assert weaker <= ({Action.REMOVE} if made.platform.name == "docker" else set())
    assert all(made.platform.guards[a] is Guard.NOT_RUNNING for a in weaker)


def test_a_removal_removes_exactly_what_was_read(made: Made) -> None:
    offers(made, Action.REMOVE)

    async def remove() -> tuple[Any, Any, Any]:
        one, two = [await subject_of(made, name) for name in made.names]
        answer = await made.platform.act(step(one, Action.REMOVE), one)
        return answer, await removed(made, one), await made.platform.read(two.ref)

    answer, gone, other = made.run(remove())
    assert isinstance(answer, Accepted)
    assert isinstance(gone, Gone)
    assert isinstance(other, Subject)


@pytest.mark.parametrize("how", ["replace", "change"])
def test_a_removal_refuses_what_changed_since_it_was_read(made: Made, how: str) -> None:
    offers(made, Action.REMOVE)

    async def remove() -> tuple[Any, Subject]:
        subject = await subject_of(made, made.names[0])
        getattr(made, how)(made.names[0])
        answer = await made.platform.act(step(subject, Action.REMOVE), subject)
        return answer, await subject_of(made, made.names[0])

    answer, still = made.run(remove())
    assert isinstance(answer, Changed)
    assert still.ref.name == made.names[0]


def test_a_verb_that_is_not_offered_is_refused_and_does_nothing(made: Made) -> None:
    if Action.REMOVE in made.platform.guards:
        pytest.skip(f"{made.platform.name} offers remove")

    async def remove() -> tuple[Any, Any]:
        subject = await subject_of(made, made.names[0])
        return await made.platform.act(step(subject, Action.REMOVE), subject), await made.platform.read(subject.ref)

    answer, found = made.run(remove())
    assert isinstance(answer, Refused)
    assert isinstance(found, Subject)


def test_evidence_is_captured_or_it_is_reported_why_not(made: Made) -> None:
    async def capture() -> Any:
        subject = await subject_of(made, made.names[0])
        return await made.platform.capture(subject, ("manifest", "logs"))

    taken = made.run(capture())
    if isinstance(taken, Evidence):
        assert any(taken.files.values())
    else:
        assert isinstance(taken, NothingToCapture | Unknown)
        assert taken.why


def test_what_was_removed_comes_back_from_its_evidence(made: Made) -> None:
    offers(made, Action.REMOVE)

    async def there_and_back() -> tuple[Any, Subject, Subject]:
        subject = await subject_of(made, made.names[0])
        evidence = await made.platform.capture(subject, ("manifest",))
        if isinstance(evidence, NothingToCapture):
            pytest.skip(f"{made.platform.name}: {evidence.why}")
        assert isinstance(evidence, Evidence)
        await made.platform.act(step(subject, Action.REMOVE), subject)
        await removed(made, subject)
        answer = await made.platform.restore(subject.ref, evidence)
        return answer, subject, await subject_of(made, made.names[0])

    answer, before, again = made.run(there_and_back())
    assert isinstance(answer, Accepted)
    assert isinstance(before.owner, str)
    assert again.owner == before.owner


def test_subjects_survive_a_round_trip_through_json(made: Made) -> None:
    """Evidence, --json and the ledger rely on it."""
    for page in made.run(observed(made.platform)):
        for subject in page.subjects:
            assert msgspec.json.decode(msgspec.json.encode(subject), type=Subject) == subject
