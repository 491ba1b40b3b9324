"""Bytes of images, of what containers wrote, and of their logs. The engine walks its disk for them, so this is read
rarely, and never by a pass; only the logs of running containers are, for a finding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.model.durations import in_words, size_in_words
from gpukeeper.model.storage import ImageBytes, StorageBytes, WorkloadBytes
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.connect import Engine
from gpukeeper.platforms.docker.leftovers import MEASURING
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.wire import CacheEntry, ImageSummary, Inspected, StorageUsage, when

# An engine before version 1.42 ignores the types. Volumes are not named: a newer one does not walk them then.
WHERE = "/system/df?type=image&type=container&type=build-cache"
LOGS = timedelta(seconds=30)  # to read the sizes of all log files
GLANCE = timedelta(seconds=5)  # the same for a pass, which waits
AN_HOUR, PACE = timedelta(hours=1), timedelta(minutes=10)  # between two sizes that are compared
LARGE_LOG, FLOOD = 1024**3, 256 * 1024**2  # bytes; bytes per hour
_NOT_LOCAL = Unknown("the engine runs on another machine", by_design=True)
_NOT_READ = Unknown("the container was not inspected yet")
_NO_LOG = "none"  # the log driver that keeps none


async def read_storage(engine: Engine, records: Records, now: datetime) -> StorageBytes:
    """PlatformError: the engine does not return the sizes, or not in time."""
    async with engine.measuring():
        usage = await engine.get(WHERE, StorageUsage, deadline=MEASURING)
    containers = usage.containers or ()
    logs = await _logs({one.id: records.known(one.id) for one in containers}, local=engine.local)
    return StorageBytes(
        at=now,
        layers=_layers(usage),
        images=tuple(_image(one) for one in usage.images or ()),
        workloads=tuple(
            WorkloadBytes(
                next(iter(one.names or ()), one.id[:12]).removeprefix("/"),
                _written(one.size_rw),
                logs[one.id],
            )
            for one in containers
        ),
        cache=None if usage.build_cache is None else _cache(usage.build_cache),
    )


def _written(size: int | None) -> int | Unknown:
    """The engine leaves out a size of 0, and writes -1 if it could not measure it."""
    return (size or 0) if size is None or size >= 0 else Unknown("the engine could not measure it")


def _layers(usage: StorageUsage) -> int | Unknown:
    if usage.images and usage.layers_size <= 0:
        return Unknown("this engine does not sum up its layers")  # Podman
    return usage.layers_size


def _image(one: ImageSummary) -> ImageBytes:
    name = next((tag for tag in one.repo_tags or () if tag != "<none>:<none>"), one.id.removeprefix("sha256:")[:12])
    measured = 0 <= one.shared_size <= one.size
    return ImageBytes(name, one.size - one.shared_size if measured else Unknown("shared layers were not measured"))


def _cache(entries: Iterable[CacheEntry]) -> int:
    """Without what is a layer of an image at the same time."""
    return sum(one.size for one in entries if not one.shared)


async def _logs(containers: Mapping[str, Inspected | None], *, local: bool) -> dict[str, int | Unknown | None]:
    """All files in one thread: a disk that hangs blocks one."""
    found: dict[str, int | Unknown | None] = {}
    paths: dict[str, str] = {}
    for id_, container in containers.items():
        if container is None:
            found[id_] = _NOT_READ
        elif _has_none(container):
            found[id_] = None
        elif not local:
            found[id_] = _NOT_LOCAL
        elif not container.log_path:
            found[id_] = Unknown(f"the log driver {_driver(container)} has no file", by_design=True)
        else:
            paths[id_] = container.log_path
    try:
        return found | await in_thread(lambda: {id_: log_size(path) for id_, path in paths.items()}, LOGS)
    except TimeoutError:
        return found | dict.fromkeys(paths, Unknown("the sizes of log files could not be read in time"))


class _Log(msgspec.Struct, frozen=True):
    at: datetime
    size: int
    per_hour: float  # bytes, up to `at`
    since: str  # over which time; in words


class LogWatch:
    """Running containers that flood a log which the engine never rotates. For a finding only. Bounded: one entry for
    each container of the last list.
    """

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    async def look(self, containers: Iterable[Inspected], now: datetime) -> None:
        """Once in each list. A disk that hangs gives no finding, and delays nothing for long."""
        growing = {one.id: one for one in containers if one.state.running and one.log_path and _never_rotates(one)}
        paths = {id_: one.log_path or "" for id_, one in growing.items()}
        try:
            sizes = await in_thread(lambda: {id_: log_size(path) for id_, path in paths.items()}, GLANCE)
        except TimeoutError:
            sizes = {}
        known = {id_: size for id_, size in sizes.items() if isinstance(size, int)}
        self._logs = {id_: self._measured(growing[id_], size, now) for id_, size in known.items()}

    def finding(self, container: Inspected) -> tuple[str, ...]:
        log = self._logs.get(container.id)
        if log is None or log.size < LARGE_LOG or log.per_hour < FLOOD:
            return ()
        grew = f"its log has {size_in_words(log.size)} and grew by {size_in_words(log.per_hour)} per hour {log.since}"
        advice = "create it with --log-opt max-size=100m --log-opt max-file=3, or set log-opts in daemon.json"
        return (f"{grew}, and the engine never rotates it; {advice}",)

    def _measured(self, container: Inspected, size: int, now: datetime) -> _Log:
        before, created = self._logs.get(container.id), when(container.created)
        if before is not None and now - before.at < PACE:
            return before
        if before is not None:
            span = now - before.at
            return _Log(now, size, (size - before.size) / (span / AN_HOUR), f"in the last {in_words(span)}")
        age = max(now - created, PACE) if isinstance(created, datetime) else None
        return _Log(now, size, 0 if age is None else size / (age / AN_HOUR), "since it was created")


def _never_rotates(container: Inspected) -> bool:
    log = container.host_config.log_config
    return log is not None and log.type == "json-file" and "max-size" not in (log.config or {})


def _has_none(container: Inspected) -> bool:
    never_started = not container.log_path and container.state.status == "created"
    return never_started or _driver(container) == _NO_LOG


def _driver(container: Inspected) -> str:
    config = container.host_config.log_config
    return "unknown" if config is None else config.type


def log_size(path: str) -> int | Unknown:
    """With rotated files, which are beside it. Links are not followed."""
    directory, name = os.path.split(path)
    try:
        with os.scandir(directory) as entries:
            mine = [one for one in entries if one.name == name or one.name.startswith(f"{name}.")]
        found = [one.stat(follow_symlinks=False).st_size for one in mine if one.is_file(follow_symlinks=False)]
    except (OSError, ValueError) as error:
        return Unknown(f"its log {path} could not be read: {error}")
    return sum(found) if found else Unknown(f"its log {path} does not exist")
