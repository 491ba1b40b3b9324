"""Evidence of a container before its removal: manifest, log, events, what was installed and changed inside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence, NothingToCapture
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import archive
from gpukeeper.platforms.docker.connect import MOST, SLOW, Engine, part
from gpukeeper.platforms.docker.errors import CONFLICT, NOT_FOUND, EngineError, EngineSilent
from gpukeeper.platforms.docker.losses import losses, packages
from gpukeeper.platforms.docker.wire import Inspected, PathChange

LOG_LINES, LOG_BYTES = (100_000, 10_000, 1_000, 100), 16 * 1024 * 1024
REMEMBERED = timedelta(minutes=10)
CHANGES_SHOWN = 20_000
GLANCE = timedelta(seconds=15)
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

    async def take(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        id_ = part(subject.ref.uid)
        files: dict[str, bytes] = {}
        try:
            # Always: without it the container cannot be restored.
            files[archive.MANIFEST] = await self._engine.raw(f"/containers/{id_}/json")
            container = reading.decode(files[archive.MANIFEST], type=Inspected)
            if "logs" in what:
                files[archive.LOG] = await self._log(container)
            if "events" in what:
                files[archive.EVENTS] = await self._events(container, subject)
            if set(what) - {"manifest"}:
                files |= await self._written(container)
        except EngineError as error:
            # A log or list that is not offered proves nothing about the container itself.
            gone = error.is_gone and archive.MANIFEST not in files
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
        return stream if container.config.tty else archive.demultiplexed(stream)

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
            return {archive.CHANGES: f"The engine does not list them: {error.words}\n".encode()}
        signs = {0: "changed", 1: "added", 2: "deleted"}
        lines = [f"{signs.get(one.kind, '?')} {one.path}" for one in inside.changes[:CHANGES_SHOWN]]
        if len(inside.changes) > CHANGES_SHOWN:
            lines.append(f"... and {len(inside.changes) - CHANGES_SHOWN} more")
        installed = packages(inside.changes)
        return {
            archive.PACKAGES: "".join(f"{one}\n" for one in installed).encode("utf-8", "replace"),
            archive.CHANGES: "\n".join(lines).encode("utf-8", "replace") + b"\n",
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
