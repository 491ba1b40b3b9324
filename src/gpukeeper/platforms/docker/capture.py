"""Evidence of a container before its removal: manifest, log, events, what was installed and changed inside, what is
lost with it; and how it is created again from that. Nothing is run inside: the engine's list of changes is read.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.clients.docker import (
    CONFLICT,
    MOST,
    NOT_FOUND,
    SLOW,
    Engine,
    EngineError,
    EngineSilent,
    Inspected,
    PathChange,
    part,
)
from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence, NothingToCapture
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.docker.translate import ANONYMOUS, anonymous_volumes, incarnation, state_of

MANIFEST, LOG, EVENTS, PACKAGES, CHANGES = "manifest.json", "log.txt", "events.jsonl", "packages.txt", "changes.txt"
BEFORE_STOP = "stop/"  # captured when gpukeeper stopped it, before the restart policy was disabled
_FRAME = struct.Struct(">BxxxL")


class CreateRequest(msgspec.Struct, frozen=True):
    """How to create it again."""

    name: str
    image: str  # the id it was created from; its name may refer to another image now
    body: Mapping[str, Any]
    networks: Mapping[str, Any]  # networks to connect after creation


def demultiplexed(stream: bytes) -> bytes:
    """The log of a container without a terminal is a sequence of frames, each with its length."""
    parts, at = [], 0
    while at + _FRAME.size <= len(stream):
        kind, length = _FRAME.unpack_from(stream, at)
        if kind > 2 or stream[at + 1 : at + 4] != b"\0\0\0":
            return stream  # not framed
        parts.append(stream[at + _FRAME.size : at + _FRAME.size + length])
        at += _FRAME.size + length
    return b"".join(parts)


def recipe_of(evidence: Evidence) -> CreateRequest | Unknown:
    try:
        return _recipe_in(evidence)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Unknown(f"its captured manifest cannot be read: {error}")


def _recipe_in(evidence: Evidence) -> CreateRequest:
    manifest = reading.decode(evidence.files[MANIFEST], type=dict[str, Any])
    config, host = dict(manifest["Config"]), dict(manifest["HostConfig"])
    name, old_id = str(manifest["Name"]).removeprefix("/"), str(manifest["Id"])
    image = str(manifest["Image"])
    host["RestartPolicy"] = restart_policy(evidence) or host.get("RestartPolicy")
    if config.get("Hostname") == old_id[:12]:
        del config["Hostname"]  # assigned by the engine, which assigns a new one
    _keep_volumes(manifest, config, host)
    _in_request_format(host)
    joined = dict((manifest.get("NetworkSettings") or {}).get("Networks") or {})
    mode = str(host.get("NetworkMode") or "default")
    others = {
        network: {"Aliases": (facts or {}).get("Aliases"), "IPAMConfig": (facts or {}).get("IPAMConfig")}
        for network, facts in joined.items()
        if network not in {mode, "bridge" if mode == "default" else mode, "host", "none"}
    }
    return CreateRequest(name, image, {**config, "HostConfig": host}, others)


def restart_policy(evidence: Evidence) -> Mapping[str, Any] | None:
    """The policy that its owner set: the one from before our stop, if gpukeeper stopped it first."""
    for name in (BEFORE_STOP + MANIFEST, MANIFEST):
        if name in evidence.files:
            try:
                manifest = reading.decode(evidence.files[name], type=dict[str, Any])
                policy = manifest["HostConfig"]["RestartPolicy"]
            except (KeyError, TypeError, msgspec.DecodeError):
                continue
            if isinstance(policy, dict) and policy.get("Name"):
                return policy
    return None


def _keep_volumes(manifest: Mapping[str, Any], config: dict[str, Any], host: dict[str, Any]) -> None:
    """Anonymous volumes were not removed with it, so it gets the same ones again."""
    binds, volumes = list(host.get("Binds") or ()), dict(config.get("Volumes") or {})
    for mount in manifest.get("Mounts") or ():
        name, where = str(mount.get("Name", "")), str(mount.get("Destination", ""))
        if mount.get("Type") == "volume" and ANONYMOUS.fullmatch(name) and not _bound(binds, where):
            binds.append(f"{name}:{where}")
            volumes.pop(where, None)
            # Requested by --mount: the engine refuses two entries for one target.
            host["Mounts"] = [one for one in host.get("Mounts") or () if one.get("Target") != where] or None
    host["Binds"] = binds or None
    config["Volumes"] = volumes or None


def _in_request_format(host: dict[str, Any]) -> None:
    """Podman reports limits under other names (RLIMIT_NOFILE) than it accepts (nofile), and devices without the access
    that it demands: the one of both engines that is meant if none is written."""
    if host.get("Devices"):
        host["Devices"] = [
            {**one, "CgroupPermissions": one.get("CgroupPermissions") or "rwm"} for one in host["Devices"]
        ]
    if host.get("Ulimits"):
        host["Ulimits"] = [
            {**limit, "Name": str(limit.get("Name", "")).removeprefix("RLIMIT_").lower()} for limit in host["Ulimits"]
        ]


def _bound(binds: list[Any], where: str) -> bool:
    return any(str(bind).split(":")[1:2] == [where] for bind in binds)


ADDED = 1
SHOWN = 8
_PYTHON = re.compile(r".*/(?:site|dist)-packages/(?P<name>[^/]+?)-(?P<version>[^/-]+)\.(?:dist|egg)-info")
_CONDA = re.compile(r".*/conda-meta/(?P<name>[^/]+?)-(?P<version>[^/-]+)-[^/-]+\.json")
_DEBIAN = re.compile(r"/var/lib/dpkg/info/(?P<name>[^/:]+)(?::[^/]+)?\.list")


def packages(changes: Iterable[PathChange]) -> tuple[str, ...]:
    """Installed since the start, with versions where the path contains them."""
    found: dict[str, None] = {}
    for change in changes:
        if change.kind != ADDED:
            continue
        for pattern in (_PYTHON, _CONDA, _DEBIAN):
            if match := pattern.fullmatch(change.path):
                version = match.groupdict().get("version")
                found[f"{match['name']} {version}" if version else match["name"]] = None
    return tuple(sorted(found))


def losses(container: Inspected, changes: Sequence[PathChange]) -> tuple[str, ...]:
    """Sentences for a warning."""
    lost = []
    if container.size_rw:
        lost.append(f"{size_in_words(container.size_rw)} written inside it (files in mounted directories stay)")
    installed = packages(changes)
    if installed:
        more = f" and {len(installed) - SHOWN} more" if len(installed) > SHOWN else ""
        lost.append(f"{len(installed)} packages installed since its start: {', '.join(installed[:SHOWN])}{more}")
    volumes = anonymous_volumes(container)
    if volumes and container.host_config.auto_remove:
        # The engine itself removes them with a container that was started with --rm.
        lost.append(f"the anonymous volume{'s' if len(volumes) > 1 else ''} at {', '.join(volumes)}")
    return tuple(lost)


LOG_LINES, LOG_BYTES = (100_000, 10_000, 1_000, 100), 16 * 1024 * 1024
REMEMBERED = timedelta(minutes=10)
CHANGES_SHOWN = 20_000
GLANCE = timedelta(seconds=15)
SIZES = timedelta(seconds=5)  # for the sizes of ended containers that a listing does not know yet
TOO_MANY = PathChange("(more files changed than can be listed)")


class ContainerChanges(msgspec.Struct, frozen=True):
    """What was written inside a container since its creation."""

    size: int | None
    changes: tuple[PathChange, ...]


class ContainerCapture:
    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._inside: dict[str, tuple[datetime, ContainerChanges]] = {}
        self._unwilling: dict[str, tuple[datetime, Unknown]] = {}  # timed out; not retried at each read
        self._sizes: dict[str, tuple[str, int | None]] = {}  # of ended containers, by id: which run, and its bytes

    async def losses(self, container: Inspected) -> tuple[int | None, tuple[str, ...] | Unknown]:
        """Its writable size, and what would be lost. Listing the changes of a container is expensive, so it is
        cached.
        """
        if container.id in self._unwilling and self._clock.now() - self._unwilling[container.id][0] < REMEMBERED:
            return None, self._unwilling[container.id][1]
        try:
            inside = await self._read_changes(container.id)
        except (EngineError, EngineSilent, msgspec.DecodeError) as problem:
            now = self._clock.now()
            recent = {id_: one for id_, one in self._unwilling.items() if now - one[0] < REMEMBERED}
            self._unwilling = recent | {container.id: (now, Unknown(str(problem)))}
            return None, Unknown(str(problem))
        sized = msgspec.structs.replace(container, size_rw=inside.size)
        return inside.size, losses(sized, inside.changes)

    async def sized(self, containers: Sequence[Inspected]) -> list[Inspected]:
        """With what ended containers wrote. That changes no more, so each is measured once, all of a listing within
        SIZES; those that are left are measured with the next one. A container that alone takes longer has no size here.
        """
        ended = {one.id: incarnation(one) for one in containers if state_of(one) is State.ENDED}
        self._sizes = {id_: known for id_, known in self._sizes.items() if ended.get(id_) == known[0]}
        with suppress(TimeoutError):
            async with asyncio.timeout(SIZES.total_seconds()):
                for id_, run in ended.items():
                    if id_ not in self._sizes:
                        self._sizes[id_] = run, None
                        self._sizes[id_] = run, await self._read_size(id_)
        return [
            msgspec.structs.replace(one, size_rw=self._sizes[one.id][1]) if one.id in self._sizes else one
            for one in containers
        ]

    async def _read_size(self, id_: str) -> int | None:
        try:
            found = await self._engine.get(f"/containers/{part(id_)}/json", Inspected, size=True, deadline=SIZES)
        except (EngineError, EngineSilent, msgspec.DecodeError):
            return None
        return found.size_rw if found.size_rw is not None and found.size_rw >= 0 else None

    async def take(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        id_ = part(subject.ref.uid)
        files: dict[str, bytes] = {}
        try:
            # Always: without it the container cannot be restored.
            files[MANIFEST] = await self._engine.raw(f"/containers/{id_}/json")
            container = reading.decode(files[MANIFEST], type=Inspected)
            if "logs" in what:
                files[LOG] = await self._log(container)
            if "events" in what:
                files[EVENTS] = await self._events(container, subject)
            if set(what) - {"manifest"}:
                files |= await self._written(container)
        except EngineError as error:
            # A log or list that is not offered proves nothing about the container itself.
            gone = error.is_gone and MANIFEST not in files
            return NothingToCapture("it no longer exists") if gone else Unknown(str(error))
        except (EngineSilent, msgspec.DecodeError) as problem:
            return Unknown(str(problem))
        return Evidence(files)

    async def _log(self, container: Inspected) -> bytes:
        try:
            stream = await self._end_of_log(container.id)
        except EngineError as error:
            refused = _is_dead(container) and error.status == CONFLICT
            if not refused and (error.status == NOT_FOUND or "logging driver" not in error.words):
                raise
            return f"The engine has no log of it: {error.words}\n".encode()  # none exists, so none can be lost
        return stream if container.config.tty else demultiplexed(stream)

    async def _end_of_log(self, id_: str) -> bytes:
        """Fewer lines until they fit: of a log that is too long the end is kept."""
        stream = b""
        for lines in LOG_LINES:
            stream = await self._engine.raw(
                f"/containers/{part(id_)}/logs",
                deadline=SLOW,
                most=LOG_BYTES,
                stdout=True,
                stderr=True,
                timestamps=True,
                tail=lines,
            )
            if len(stream) < LOG_BYTES:
                break
        return stream

    async def _events(self, container: Inspected, subject: Subject) -> bytes:
        """What the engine still remembers. It forgets soon, so few events are not a failure."""
        lines: list[bytes] = []
        begin = subject.created.timestamp() if isinstance(subject.created, datetime) else 0.0
        until = self._clock.now().timestamp()
        with suppress(EngineError, EngineSilent, TimeoutError):
            async with asyncio.timeout(5):
                events = self._engine.events({"container": [container.id]}, since=f"{begin:.9f}", until=f"{until:.9f}")
                async for event in events:
                    lines.append(msgspec.json.encode(event))  # noqa: PERF401 - what came before a break counts
        return b"\n".join(lines) + b"\n"

    async def _written(self, container: Inspected) -> dict[str, bytes]:
        try:
            inside = await self._read_changes(container.id, anew=True)
        except EngineError as error:
            if not _is_dead(container) or error.status == NOT_FOUND:
                raise
            return {CHANGES: f"The engine does not list them: {error.words}\n".encode()}
        signs = {0: "changed", 1: "added", 2: "deleted"}
        lines = [f"{signs.get(one.kind, '?')} {one.path}" for one in inside.changes[:CHANGES_SHOWN]]
        if len(inside.changes) > CHANGES_SHOWN:
            lines.append(f"... and {len(inside.changes) - CHANGES_SHOWN} more")
        installed = packages(inside.changes)
        return {
            PACKAGES: "".join(f"{one}\n" for one in installed).encode("utf-8", "replace"),
            CHANGES: "\n".join(lines).encode("utf-8", "replace") + b"\n",
        }

    async def _read_changes(self, id_: str, *, anew: bool = False) -> ContainerChanges:
        now = self._clock.now()
        self._inside = {key: one for key, one in self._inside.items() if now - one[0] < REMEMBERED}
        if id_ in self._inside and not anew:
            return self._inside[id_][1]
        # Other reads wait behind a read; a capture comes before a removal and may take longer.
        deadline = SLOW if anew else GLANCE
        sized = await self._engine.get(f"/containers/{part(id_)}/json", Inspected, size=True, deadline=deadline)
        raw = await self._engine.raw(f"/containers/{part(id_)}/changes", deadline=deadline)
        # Millions of changed files must not block the removal forever: the log and the manifest are what is needed.
        changes = reading.decode(raw, type=list[PathChange] | None) if len(raw) < MOST else [TOO_MANY]
        inside = ContainerChanges(sized.size_rw, tuple(changes or ()))
        self._inside[id_] = (now, inside)
        return inside


def _is_dead(container: Inspected) -> bool:
    """Its removal began and failed. It never starts again, and the engine refuses its log (409) forever: waiting for
    the log would keep the container forever.
    """
    return container.state.status == "dead"
