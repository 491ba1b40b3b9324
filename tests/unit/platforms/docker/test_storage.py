"""Bytes of images, containers and logs: a shared layer counts once, and what was not measured is unknown, never 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.docker import Engine, Inspected
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.policy import Policy
from gpukeeper.model.ports import StorageBytes
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.leftovers import Leftovers, LogWatch, log_size, read_storage
from gpukeeper.platforms.docker.records import Records
from tests.unit.platforms.docker.examples import decoded, ended, told
from tests.unit.platforms.docker.fake_engine import FakeEngine, served

NOW = datetime(2026, 11, 16, 9, tzinfo=UTC)
IMAGES = [
    {"Id": "sha256:aaa", "RepoTags": ["lab/torch:2"], "Size": 900, "SharedSize": 600},
    {"Id": "sha256:bbb", "RepoTags": ["lab/jax:1", "lab/jax:latest"], "Size": 800, "SharedSize": 600},
    {"Id": f"sha256:{'c' * 64}", "RepoTags": ["<none>:<none>"], "Size": 50, "SharedSize": 0},
]


def container(log: str | None = None, **parts: Any) -> dict[str, Any]:
    return {**told(**parts), "LogPath": log}


def usage(**more: Any) -> dict[str, Any]:
    return {"LayersSize": 1150, "Images": IMAGES, "Containers": [], "BuildCache": [], **more}


def listed(one: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"Id": one["Id"], "Names": [one["Name"]], **more}


async def with_engine(fake: FakeEngine, work: Callable[[Engine, Records], Awaitable[Any]]) -> Any:
    async with served(fake) as engine, engine.opened():
        records = Records(engine)
        await records.refresh()
        return await work(engine, records)


def read(fake: FakeEngine) -> StorageBytes:
    found = asyncio.run(with_engine(fake, lambda engine, records: read_storage(engine, records, NOW)))
    assert isinstance(found, StorageBytes)
    return found


def test_an_image_has_its_own_bytes_and_layers_count_once() -> None:
    fake = FakeEngine()
    fake.usage = usage()
    found = read(fake)
    assert found.layers == 1150
    assert [(one.name, one.own) for one in found.images] == [
        ("lab/torch:2", 300),
        ("lab/jax:1", 200),
        ("c" * 12, 50),
    ]
    assert found.at == NOW


def test_volumes_are_not_walked() -> None:
    fake = FakeEngine()
    fake.usage = usage()
    read(fake)
    assert "GET /system/df?type=image&type=container&type=build-cache" in fake.asked


@pytest.mark.parametrize("image", [{"SharedSize": -1}, {"SharedSize": 901}])
def test_shared_layers_that_were_not_measured_are_unknown(image: dict[str, Any]) -> None:
    fake = FakeEngine()
    fake.usage = usage(Images=[IMAGES[0] | image])
    assert isinstance(read(fake).images[0].own, Unknown)


def test_an_engine_that_does_not_sum_up_its_layers() -> None:
    """Podman returns 0."""
    fake = FakeEngine()
    fake.usage = usage(LayersSize=0)
    assert isinstance(read(fake).layers, Unknown)
    fake.usage = usage(LayersSize=0, Images=[])
    assert read(fake).layers == 0


def test_the_build_cache_without_what_images_have() -> None:
    fake = FakeEngine()
    pieces = [{"ID": "a", "Size": 7}, {"ID": "b", "Size": 5, "Shared": True}, {"ID": "c", "Size": 2}]
    fake.usage = usage(BuildCache=pieces)
    assert read(fake).cache == 9
    fake.usage = usage(BuildCache=None)
    assert read(fake).cache is None


def test_what_containers_wrote(tmp_path: Path) -> None:
    wrote, nothing, broken = (container(id=letter * 64, name=f"/{letter}") for letter in "abc")
    fake = FakeEngine(wrote, nothing, broken)
    fake.usage = usage(Containers=[listed(wrote, SizeRw=42), listed(nothing), listed(broken, SizeRw=-1)])
    one, two, three = read(fake).workloads
    assert [(one.name, one.written), (two.name, two.written)] == [("a", 42), ("b", 0)]
    assert isinstance(three.written, Unknown)


def logs_of(*containers: dict[str, Any]) -> list[int | Unknown | None]:
    fake = FakeEngine(*containers)
    fake.usage = usage(Containers=[listed(one) for one in containers])
    return [one.log for one in read(fake).workloads]


def test_a_log_counts_with_its_rotated_files_and_without_others(tmp_path: Path) -> None:
    log = tmp_path / "a-json.log"
    for name, size in (("", 10), (".1", 5), (".2.gz", 2)):
        Path(f"{log}{name}").write_bytes(b"x" * size)
    (tmp_path / "a-json.logger").write_bytes(b"x" * 100)
    (tmp_path / "other").write_bytes(b"x" * 1000)
    (tmp_path / "a-json.log.3").symlink_to(tmp_path / "other")
    assert logs_of(container(str(log))) == [17]


def test_a_log_that_is_no_readable_file_is_unknown(tmp_path: Path) -> None:
    missing, journald = str(tmp_path / "none"), {"LogConfig": {"Type": "journald"}}
    found = logs_of(
        container(id="a" * 64, log=missing),
        container(id="b" * 64, log="/nowhere/at/all"),
        container(id="c" * 64, log="", host=journald),
        container(id="d" * 64, log=""),
    )
    assert [type(one) for one in found] == [Unknown] * 4


def test_without_a_log_there_is_none() -> None:
    never = {"Status": "created", "Running": False, "Pid": 0}
    none = {"LogConfig": {"Type": "none"}}
    found = logs_of(container(id="a" * 64, log="", state=never), container(id="b" * 64, log="", host=none))
    assert found == [None, None]


def test_a_container_that_no_pass_has_inspected_has_an_unknown_log() -> None:
    fake = FakeEngine()
    fake.usage = usage(Containers=[{"Id": "f" * 64, "Names": ["/new"]}])
    assert isinstance(read(fake).workloads[0].log, Unknown)


def test_a_directory_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    assert isinstance(log_size(f"{tmp_path}/x\0y"), Unknown)
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "log").write_text("x")
    assert log_size(str(closed / "log")) == 1
    if os.getuid():
        closed.chmod(0)
        assert isinstance(log_size(str(closed / "log")), Unknown)
        closed.chmod(0o700)


def test_an_engine_that_refuses_is_an_error() -> None:
    fake = FakeEngine()
    fake.answers["GET /system/df"] = (500, '{"message": "a disk usage operation is already running"}')
    with pytest.raises(PlatformError, match="already running"):
        read(fake)


@pytest.mark.parametrize(("version", "expected"), [("1.41", 1), ("1.42", 3)])
def test_one_sum_at_a_time_unless_the_engine_shares_them(version: str, expected: int) -> None:
    """An engine before 23.0 refuses a second one, and then a pass could not read its build cache."""
    fake = FakeEngine(version=version)
    fake.usage = usage()
    at_once, most, begun = 0, 0, asyncio.Event()

    async def slow(call: str) -> None:
        nonlocal at_once, most
        if call == "GET /system/df":
            at_once += 1
            most = max(most, at_once)
            if most == expected:
                begun.set()
            await begun.wait()
            at_once -= 1

    fake.before = slow

    async def both(engine: Engine, records: Records) -> None:
        leftovers = Leftovers(records, engine, None, None, Policy())  # type: ignore[arg-type]
        await asyncio.gather(read_storage(engine, records, NOW), leftovers._entries(), leftovers._usage())

    asyncio.run(with_engine(fake, both))
    assert most == expected
    assert len([call for call in fake.asked if call.startswith("GET /system/df")]) == 3


GIB = 1024**3
UNLIMITED: dict[str, Any] = {"LogConfig": {"Type": "json-file", "Config": {}}}


def logging(path: Path, *, host: dict[str, Any] = UNLIMITED, hours: float = 2, **state: Any) -> Inspected:
    """Created so long ago. Its log is a sparse file."""
    created = (NOW - timedelta(hours=hours)).isoformat()
    return decoded({**told(host=host, state=state), "LogPath": str(path), "Created": created})


def log_of(path: Path, size: float) -> None:
    with path.open("ab") as file:
        file.truncate(int(size))


def looks(one: Inspected, *sizes: float, minutes: float = 12) -> list[tuple[str, ...]]:
    watch, found = LogWatch(), []

    async def run() -> None:
        for n, size in enumerate(sizes):
            log_of(Path(one.log_path or ""), size)
            await watch.look([one], NOW + n * timedelta(minutes=minutes))
            found.append(watch.finding(one))

    asyncio.run(run())
    return found


def test_a_log_that_floods_the_disk_is_reported_with_what_limits_it(tmp_path: Path) -> None:
    first, second, third = looks(logging(tmp_path / "log"), 2 * GIB, 2.5 * GIB, 2.5 * GIB)
    assert "2.0 GiB and grew by 1.0 GiB per hour since it was created" in first[0]
    assert "2.5 GiB and grew by 2.5 GiB per hour in the last 12m" in second[0]
    assert "max-size" in second[0]
    assert third == (), "it writes no more"


def test_a_small_log_and_one_that_grows_slowly_are_not_reported(tmp_path: Path) -> None:
    assert looks(logging(tmp_path / "a"), 0.1 * GIB, 0.9 * GIB) == [(), ()]
    assert looks(logging(tmp_path / "b", hours=900), 2 * GIB, 2.01 * GIB) == [(), ()]


def test_a_flood_begins_late_and_is_reported_from_what_is_measured(tmp_path: Path) -> None:
    assert [len(one) for one in looks(logging(tmp_path / "a", hours=900), 2 * GIB, 3 * GIB)] == [0, 1]


def test_two_looks_soon_after_each_other_are_not_compared(tmp_path: Path) -> None:
    assert looks(logging(tmp_path / "a", hours=900), 2 * GIB, 2.02 * GIB, minutes=1) == [(), ()]


@pytest.mark.parametrize(
    "host",
    [
        {"LogConfig": {"Type": "json-file", "Config": {"max-size": "1g"}}},
        {"LogConfig": {"Type": "local", "Config": {}}},
        {},
    ],
)
def test_a_log_that_is_rotated_is_not_reported(tmp_path: Path, host: dict[str, Any]) -> None:
    assert looks(logging(tmp_path / "log", host=host), 2 * GIB) == [()]


def test_a_log_that_cannot_be_read_or_has_no_writer_gives_no_finding(tmp_path: Path) -> None:
    gone, over = logging(tmp_path / "none"), logging(tmp_path / "log", **ended())
    log_of(tmp_path / "log", 2 * GIB)

    async def run() -> None:
        watch = LogWatch()
        await watch.look([gone, over], NOW)
        assert (watch.finding(gone), watch.finding(over)) == ((), ())

    asyncio.run(run())
