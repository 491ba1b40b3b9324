"""The adapter where it must not be misled: by events that never come, by one container inside another's group."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.docker import Engine
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import adapter, capture
from gpukeeper.platforms.docker.adapter import DockerPlatform
from tests.patience import PATIENCE
from tests.unit.platforms.docker.examples import ID, NOW, OTHER_ID, WHOLE, StillClock, container, ended, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, served


class MovingClock:
    at = NOW

    def now(self) -> datetime:
        return self.at


async def gpus() -> tuple[GpuFacts, ...]:
    return (WHOLE,)


def platform(engine: Engine, proc: Path) -> DockerPlatform:
    return DockerPlatform(engine, "node-3", StillClock(), gpus, proc=str(proc))


def add(proc: Path, pid: int, cgroup: str) -> None:
    """A process that started at the boot of 2020 and has the GPU open."""
    home = proc / str(pid)
    (home / "fd").mkdir(parents=True)
    (home / "fd/3").symlink_to("/dev/nvidia0")
    (home / "stat").write_text(f"{pid} (python) S 1 1 1 0 -1 0 {'0 ' * 12}4200 0\n")
    (home / "status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\n")
    (home / "cgroup").write_text(cgroup)
    (proc / "stat").write_text("btime 1577836800\n")


def left_behind(fake: FakeEngine, proc: Path) -> Subject:
    async def run() -> Subject:
        async with served(fake) as engine:
            docker = platform(engine, proc)
            await docker.records.refresh()
            ref = adapter.translate.PlaceAndTime("node-3", StillClock().now()).ref("process", "python-20", "20@4200")
            found = await docker.read(ref)
            assert isinstance(found, Subject)
            return found

    return asyncio.run(run())


def test_a_process_of_an_ended_container_is_proven_to_be_left_behind(tmp_path: Path) -> None:
    add(tmp_path, 20, f"0::/docker/{ID}\n")
    assert isinstance(left_behind(FakeEngine(told(state=ended())), tmp_path).proof, str)


@pytest.mark.parametrize("uid", ["20@4199", "20@4201", "21@4200"])
def test_a_process_that_got_the_number_of_another_is_not_that_one(tmp_path: Path, uid: str) -> None:
    add(tmp_path, 20, f"0::/docker/{ID}\n")

    async def run() -> object:
        async with served(FakeEngine(told(state=ended()))) as engine:
            docker = platform(engine, tmp_path)
            await docker.records.refresh()
            return await docker.read(adapter.translate.PlaceAndTime("node-3", NOW).ref("process", "python-20", uid))

    assert isinstance(asyncio.run(run()), Gone)


def test_the_machine_is_read_before_the_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process of a container that starts in between would look orphaned."""
    order: list[str] = []

    async def run() -> None:
        async with served(FakeEngine(told(state=ended()))) as engine:
            docker = platform(engine, tmp_path)
            machine, containers = docker._around.snapshot, docker.records.refresh

            async def snapshot() -> Any:
                order.append("machine")
                return await machine()

            async def refresh() -> Any:
                order.append("containers")
                return await containers()

            monkeypatch.setattr(docker._around, "snapshot", snapshot)
            monkeypatch.setattr(docker.records, "refresh", refresh)
            assert [page async for page in docker.observe(PlaceScope())]

    (tmp_path / "stat").write_text("btime 1577836800\n")
    asyncio.run(run())
    assert order == ["machine", "containers"]


def test_what_a_removed_container_left_is_counted_from_when_it_was_first_seen(tmp_path: Path) -> None:
    """Its end is not known any more. What lets its GPU go and takes it again begins anew."""
    add(tmp_path, 20, f"0::/docker/{ID}\n")
    clock = MovingClock()

    async def run() -> list[list[datetime]]:
        found = []
        async with served(FakeEngine()) as engine:
            docker = DockerPlatform(engine, "node-3", clock, gpus, proc=str(tmp_path))
            docker.records.once_had[ID] = container(state=ended())
            for held in (True, True, False, True):
                (tmp_path / "20/fd/3").unlink(missing_ok=True)
                (tmp_path / "20/fd/3").symlink_to("/dev/nvidia0" if held else "/dev/null")
                pages = [page async for page in docker.observe(PlaceScope())]
                left = [one for page in pages for one in page.subjects if one.shape is Shape.ORPHAN]
                found.append([one.created for one in left if isinstance(one.created, datetime)])
                clock.at += timedelta(minutes=5)
        return found

    began = clock.at
    assert asyncio.run(run()) == [[began], [began], [], [began + timedelta(minutes=15)]]


def test_a_container_that_runs_in_the_group_of_an_ended_one_is_never_left_behind(tmp_path: Path) -> None:
    """`--cgroup-parent` may name any group."""
    add(tmp_path, 20, f"0::/docker/{ID}/{OTHER_ID}\n")
    inner = told(id=OTHER_ID, name="/inner")
    assert left_behind(FakeEngine(told(state=ended()), inner), tmp_path).proof is None


def test_while_the_inner_container_does_not_answer_nothing_is_proven(tmp_path: Path) -> None:
    add(tmp_path, 20, f"0::/docker/{ID}/{OTHER_ID}\n")
    fake = FakeEngine(told(state=ended()), told(id=OTHER_ID, name="/inner"))
    fake.answers[f"GET /containers/{OTHER_ID}/json"] = (500, '{"message": "busy"}')
    proof = left_behind(fake, tmp_path).proof
    assert proof is not None
    assert not isinstance(proof, str)


def test_events_that_are_refused_are_requested_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter before the engine may forbid them; each try makes everything be asked about anew."""
    fake, pauses = FakeEngine(), []
    fake.answers["GET /events"] = (403, '{"message": "forbidden"}')

    class Enough(Exception):
        pass

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise Enough

    async def run() -> None:
        async with served(fake) as engine:
            with monkeypatch.context() as patched:
                patched.setattr(adapter.asyncio, "sleep", noted)
                async for _ in platform(engine, tmp_path).wake():
                    pass

    with pytest.raises(Enough):
        asyncio.run(run())
    assert pauses == [1.0, 5.0, 15.0, 60.0, 60.0]


def test_the_engine_is_read_every_minute_though_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13.1: who has which GPU is reconciled every 60s. Here a hundredth of a second stands for the minute."""
    assert timedelta(seconds=60) == adapter.RECONCILE
    monkeypatch.setattr(adapter, "RECONCILE", timedelta(milliseconds=10))
    hints: list[object] = []

    async def run() -> None:
        async with served(FakeEngine()) as engine:
            wake = platform(engine, tmp_path).wake()
            async with asyncio.timeout(PATIENCE):
                async for hint in wake:
                    hints.append(hint)
                    if len(hints) == 4:
                        break
            await wake.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert hints == [None] * 4, "a look at everything, each time"


BOUND = [{"Type": "bind", "Source": "/tmp/data", "Destination": "/d"}, {"Type": "volume", "Source": "/var/lib/v"}]


def test_the_directories_that_stopped_containers_have_mounted_are_reported(tmp_path: Path) -> None:
    stopped, running = told(state=ended()), told(id=OTHER_ID, name="/running")
    for one in (stopped, running):
        one["Mounts"] = BOUND if one is stopped else [{**BOUND[0], "Source": "/tmp/other"}]
    fake = FakeEngine(stopped, running)

    async def ask() -> object:
        async with served(fake) as engine:
            return await platform(engine, tmp_path).bound()

    found = asyncio.run(ask())
    assert isinstance(found, dict)
    assert list(found) == ["/tmp/data"]
    assert "stopped container" in found["/tmp/data"]
    fake.answers["GET /containers/json"] = (500, '{"message": "busy"}')
    assert isinstance(asyncio.run(ask()), Unknown)


SIZE = f"GET /containers/{ID}/json?size=true"


def test_the_size_of_an_ended_container_is_listed_and_measured_once(tmp_path: Path) -> None:
    """C15.1: what it wrote changes no more until it starts again. What runs is not measured in a listing."""
    fake = FakeEngine({**told(state=ended()), "SizeRw": 4096}, {**told(id=OTHER_ID, name="/runs"), "SizeRw": 1})

    async def run() -> tuple[list[dict[str, Any]], list[int]]:
        async with served(fake) as engine:
            docker = platform(engine, tmp_path)
            sizes, requests = [await sizes_in(docker)], [fake.asked.count(SIZE)]
            sizes.append(await sizes_in(docker))
            requests.append(fake.asked.count(SIZE))
            fake.restart(ID)
            sizes.append(await sizes_in(docker))
            fake.end(ID)
            sizes.append(await sizes_in(docker))
            requests.append(fake.asked.count(SIZE))
            return sizes, requests

    (first, again, running, ended_again), requests = asyncio.run(run())
    assert first == again == ended_again == {"eval": 4096}
    assert running == {}
    assert requests == [1, 1, 2]


def test_a_size_that_is_not_read_in_time_or_negative_is_unknown_and_holds_up_no_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "SIZES", timedelta(milliseconds=200))
    fake = FakeEngine(
        {**told(state=ended()), "SizeRw": 7},
        {**told(id=OTHER_ID, name="/failed", state=ended()), "SizeRw": -1},
    )
    slow = asyncio.Event()
    fake.before = lambda _call: slow.wait() if fake.asked[-1] == SIZE else None

    async def run() -> list[dict[str, Any]]:
        async with served(fake) as engine:
            docker = platform(engine, tmp_path)
            return [await sizes_in(docker), await sizes_in(docker)]

    assert asyncio.run(run()) == [{}, {}]
    assert fake.asked.count(SIZE) == 1, "it is not waited for in every listing"
    assert [call for call in fake.asked if call == f"GET /containers/{OTHER_ID}/json?size=true"], "the next one is"


async def sizes_in(docker: DockerPlatform) -> dict[str, Any]:
    """Of the containers of a listing that have one."""
    found = [one async for page in docker.observe(PlaceScope(places=("*",))) for one in page.subjects]
    return {one.ref.name: one.size for one in found if one.ref.kind == "container" and isinstance(one.size, int)}
