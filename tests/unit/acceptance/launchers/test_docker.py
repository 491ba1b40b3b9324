"""Runs on a Docker engine, against an engine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from gpukeeper.acceptance.fleet.launcher import Phase, RunSpec
from gpukeeper.acceptance.launchers.docker import DockerLauncher, parts_of
from gpukeeper.clients.docker import Config, ContainerState, Inspected
from gpukeeper.interfaces.cli.accept_remote import open_launcher
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown


def created(uid: str, name: str, labels: dict[str, str]) -> Inspected:
    return Inspected(id=uid, name=f"/{name}", state=ContainerState(status="created"), config=Config(labels=labels))


def lasted(seconds: float) -> dict[str, str]:
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    return {"started_at": begun.isoformat(), "finished_at": (begun + timedelta(seconds=seconds)).isoformat()}


class FakeEngine:
    def __init__(self, *, images: tuple[str, ...] = ("accept:1",), keeps: bool = False) -> None:
        self.images, self.keeps, self.found, self.started = images, keeps, dict[str, Inspected](), list[str]()

    async def node(self) -> str:
        return "gpu1"

    async def has_image(self, image: str) -> bool:
        return image in self.images

    async def containers(self, label: str) -> tuple[Inspected, ...]:
        name, _, value = label.partition("=")
        return tuple(one for one in self.found.values() if one.labels.get(name) == value)

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        if name not in {one.plain_name for one in self.found.values()}:
            labels = cast("dict[str, str]", body["Labels"])
            self.add(created(f"{len(self.found):064x}", name, labels))

    def add(self, one: Inspected, **changes: Any) -> None:
        self.found[one.id] = msgspec.structs.replace(one, state=msgspec.structs.replace(one.state, **changes))

    async def start(self, uid: str) -> None:
        self.started.append(uid)
        self.add(self.found[uid], status="running")

    async def log(self, uid: str) -> bytes | None:
        return b"\1\0\0\0\0\0\0\3a\n\n\2\0\0\0\0\0\0\2b\n" if uid in self.found else None

    async def remove(self, uid: str) -> None:
        if not self.keeps:
            self.found.pop(uid, None)

    async def close(self) -> None: ...


def a_spec(**changes: Any) -> RunSpec:
    made = {"run": "r1", "owner": "ann", "created": datetime(2026, 1, 1, tzinfo=UTC), "engine": "docker"}
    return RunSpec(**{**made, "image": "accept:1", **changes})


async def started(engine: FakeEngine, **changes: Any) -> DockerLauncher:
    launcher, spec = DockerLauncher(engine), a_spec(**changes)
    await launcher.start(spec, await launcher.targets(spec))
    return launcher


def test_a_run_is_one_container_that_any_machine_finds_again() -> None:
    async def story() -> None:
        engine = FakeEngine()
        await started(engine)
        other = DockerLauncher(engine)
        (found,) = cast("tuple[Any, ...]", await other.runs())
        assert (found.spec, found.objects) == (a_spec(), ("container/gpukeeper-r1",))
        assert found.nodes[0].phase is Phase.RUNNING
        assert await other.output(found.spec, "gpu1") == b"a\n\nb\n"
        removal = await other.remove("r1")
        assert (removal.removed, removal.left) == (("container/gpukeeper-r1",), ())
        assert await other.run("r1") is None
        assert isinstance(await other.output(found.spec, "gpu1"), Unknown)

    asyncio.run(story())


def test_a_second_start_creates_nothing_and_never_runs_again_what_has_run() -> None:
    async def story() -> None:
        engine = FakeEngine()
        await started(engine)
        (one,) = engine.found.values()
        engine.add(one, status="exited", exit_code=0)
        await started(engine)
        assert len(engine.found) == len(engine.started) == 1

    asyncio.run(story())


def test_a_start_that_was_interrupted_is_completed() -> None:
    async def story() -> None:
        engine, launcher = FakeEngine(), None
        await started(engine)
        (one,) = engine.found.values()
        engine.add(one, status="created")
        found = await DockerLauncher(engine).run("r1")
        assert found is not None
        assert (found.nodes[0].phase, found.nodes[0].code) == (Phase.GONE, "vanished")
        launcher = await started(engine)
        again = await launcher.run("r1")
        assert again is not None
        assert again.nodes[0].phase is Phase.RUNNING

    asyncio.run(story())


def test_a_foreign_container_with_that_name_or_label_is_never_touched() -> None:
    async def story() -> None:
        engine = FakeEngine()
        engine.add(created("f" * 64, "gpukeeper-r1", {"gpukeeper.io/run": "r1"}))
        with pytest.raises(UsageError, match="another container has the name gpukeeper-r1"):
            await started(engine)
        removal = await DockerLauncher(engine).remove("r1")
        assert (removal.removed, engine.started, len(engine.found)) == ((), [], 1)

    asyncio.run(story())


def test_a_container_of_an_image_that_was_made_from_a_run_is_no_part_of_it() -> None:
    """`docker commit` copies the labels into the image, and so into all its containers."""

    async def story() -> None:
        engine = FakeEngine()
        launcher = await started(engine)
        (ours,) = engine.found.values()
        other = msgspec.structs.replace(
            ours, id="e" * 64, name="/training", state=ContainerState(status="exited", exit_code=4)
        )
        engine.found = {other.id: other, **engine.found}  # the other one is listed first
        runs = await launcher.runs()
        assert isinstance(runs, tuple)
        assert [one.objects for one in runs] == [("container/gpukeeper-r1",)]
        found = await launcher.run("r1")
        assert found is not None
        assert found.nodes[0].phase is Phase.RUNNING
        removal = await launcher.remove("r1")
        assert removal.removed == ("container/gpukeeper-r1",)
        assert [name for name, why in removal.left if why.endswith("it was kept")] == ["container/training"]
        assert [one.plain_name for one in engine.found.values()] == ["training"]
        assert isinstance(await launcher.output(a_spec(), "gpu1"), Unknown)

    asyncio.run(story())


def test_what_is_still_there_after_a_removal_is_reported() -> None:
    async def story() -> None:
        launcher = await started(FakeEngine(keeps=True))
        removal = await launcher.remove("r1")
        assert removal.removed == ()
        assert removal.left[0][1] == "still there after it was removed"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changes", "phase", "code"),
    [
        ({"status": "exited", "exit_code": 1}, Phase.ENDED, ""),
        ({"status": "exited", "exit_code": 124, **lasted(3600.0)}, Phase.ENDED, "deadline"),
        ({"status": "exited", "exit_code": 143, **lasted(3600.5)}, Phase.ENDED, "deadline"),
        ({"status": "exited", "exit_code": 137, **lasted(5.0)}, Phase.ENDED, ""),
        ({"status": "exited", "exit_code": 137, "oom_killed": True}, Phase.ENDED, "memory"),
        ({"status": "created", "error": "no GPU driver"}, Phase.GONE, "refused"),
        ({"status": "paused"}, Phase.RUNNING, ""),
    ],
)
def test_the_state_of_the_container_is_the_state_of_the_node(changes: Any, phase: Phase, code: str) -> None:
    async def story() -> None:
        engine = FakeEngine()
        launcher = await started(engine)
        engine.add(next(iter(engine.found.values())), **changes)
        found = await launcher.run("r1")
        assert found is not None
        assert (found.nodes[0].phase, found.nodes[0].code) == (phase, code)
        assert found.nodes[0].exit_code == (changes.get("exit_code") if phase is Phase.ENDED else None)

    asyncio.run(story())


def test_what_is_created_has_a_deadline_a_log_of_its_own_and_all_gpus() -> None:
    launcher, spec = DockerLauncher(FakeEngine(), shm=123), a_spec(deadline_s=90.0)
    head, _, body = launcher.render(spec, asyncio.run(launcher.targets(spec))).partition("\n")
    assert head == "# POST /containers/create?name=gpukeeper-r1"
    made = msgspec.json.decode(body)
    assert made["Entrypoint"] == ["sh", "-c", 'timeout -k 10 "$0" "$@"; exit $?', "90"]
    assert made["Cmd"] == ["gpukeeper", "accept", "--report-to-log", "r1"]
    assert made["HostConfig"]["LogConfig"]["Type"] == "json-file"
    assert made["HostConfig"]["DeviceRequests"] == [{"Count": -1, "Capabilities": [["gpu"]]}]
    assert (made["HostConfig"]["ShmSize"], made["HostConfig"]["RestartPolicy"]["Name"]) == (123, "no")


def test_a_trial_without_gpus_requests_none() -> None:
    launcher, spec = DockerLauncher(FakeEngine(), gpus=False), a_spec()
    _, _, body = launcher.render(spec, asyncio.run(launcher.targets(spec))).partition("\n")
    assert msgspec.json.decode(body)["HostConfig"]["DeviceRequests"] == []
    with pytest.raises(UsageError, match='can only be "none"'):
        open_launcher("docker", {"engine": "unix:///run/x.sock", "gpus": "2"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": ""}, "add --image"),
        ({"selector": "a=b"}, "leave out the selector"),
        ({"nodes": ("gpu2",)}, "this engine is gpu1, not gpu2"),
    ],
)
def test_what_one_engine_cannot_do_is_refused_before_anything_is_created(changes: Any, words: str) -> None:
    engine = FakeEngine()
    with pytest.raises(UsageError, match=words):
        asyncio.run(started(engine, **changes))
    assert not engine.found


def test_an_image_that_is_missing_excludes_the_node() -> None:
    engine = FakeEngine(images=())
    asyncio.run(started(engine))
    assert not engine.found
    (target,) = asyncio.run(DockerLauncher(engine).targets(a_spec()))
    assert "docker pull accept:1" in target.excluded


def test_a_log_that_was_cut_off_is_kept_as_far_as_it_came() -> None:
    assert parts_of(b"\1\0\0\0\0\0\0\5abc") == b"abc"
    assert parts_of(b"\1\0\0") == b""


def test_unknown_options_and_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean engine"):
        open_launcher("docker", {"engin": "x"})
    with pytest.raises(UsageError, match="is not a size"):
        open_launcher("docker", {"engine": "unix:///run/x.sock", "shm": "much"})
