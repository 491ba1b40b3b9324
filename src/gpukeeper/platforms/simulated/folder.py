"""A fleet in a directory: every file is a workload. It outlives the process, so it shows the state after a crash.

One JSON file per workload (owner, class_, state, ended, outcome, …); a stop rewrites it, a removal deletes it. The
file's inode is the uid and its modification time the version. A removal first renames the file, checks that it is the
inode and version it expected, and otherwise renames it back: so the guard is real.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BufferedRandom
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.engine.ports import Platform
from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
)
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Gone, Marks, Outcome, Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown

SUFFIX, TAKEN = ".json", ".taken"


class Workload(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of such a file."""

    state: State
    created: datetime
    owner: str | None = None
    class_: str = "docker"
    started: datetime | None = None
    ended: datetime | None = None
    outcome: Outcome | None = None
    ended_with: str = ""
    devices: tuple[str, ...] = ()
    size: int = 0
    labels: dict[str, str] = {}


class FolderPlatform(Platform):
    name = "docker"
    local = True
    guards: Mapping[Action, Guard] = {Action.STOP: Guard.LOOKED, Action.REMOVE: Guard.ATOMIC}

    def __init__(self, directory: Path) -> None:
        self._folder = directory

    @property
    def place(self) -> str:
        return self._folder.name

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        now = datetime.now(UTC)
        subjects, unseen = [], []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            found = self._read(path, now)
            if isinstance(found, Subject):
                subjects.append(found)
            elif isinstance(found, Unknown):
                unseen.append(Unseen(path.name, found.why))
        yield Snapshot(self.name, self.place, now, tuple(subjects), tuple(unseen))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        """By inode, whatever its name is now: a renamed file is not gone."""
        now = datetime.now(UTC)
        for path in sorted(self._folder.iterdir()):
            if path.suffix in (SUFFIX, TAKEN) and _inode(path) == ref.uid:
                found = self._read(path, now)
                return Gone(ref, now) if found is None else found
        return Gone(ref, now)

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return await self.read(Ref(self.name, self.place, "container", uid, uid))

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        try:
            return Evidence({"workload.json": self._path(subject.ref).read_bytes()})
        except FileNotFoundError:
            return NothingToCapture("it no longer exists")
        except OSError as error:
            return Unknown(str(error))

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        path = self._path(fresh.ref)
        try:
            return self._remove(path, fresh) if step.decision.action is Action.REMOVE else self._stop(path, fresh)
        except FileNotFoundError:
            return Changed("its file is gone")
        except OSError as error:
            return Refused(str(error))

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        if evidence is None:
            return Refused("no evidence of it was captured")
        if _inode(self._path(ref)) == ref.uid:
            return self._start(self._path(ref))
        try:
            with self._path(ref).open("xb") as file:
                file.write(evidence.files["workload.json"])
        except FileExistsError:
            return Refused("that name is already in use")
        return Accepted()

    def _remove(self, path: Path, fresh: Subject) -> Accepted | Changed:
        taken = path.with_suffix(TAKEN)
        path.rename(taken)
        facts = taken.stat()
        if (_uid(facts), _version(facts)) != (fresh.ref.uid, fresh.seen.version):
            path.hardlink_to(taken)  # back, but never over an entry that was created in the meantime
            taken.unlink()
            return Changed("its file is not the one that was read")
        taken.unlink()
        return Accepted(bytes_back=facts.st_blocks * 512)

    def _stop(self, path: Path, fresh: Subject) -> Accepted | Changed:
        with path.open("r+b") as file:
            if _uid(os.fstat(file.fileno())) != fresh.ref.uid:
                return Changed("its file is not the one that was read")
            workload = msgspec.json.decode(file.read(), type=Workload)
            workload.state, workload.ended, workload.outcome = State.ENDED, datetime.now(UTC), Outcome.STOPPED
            _write(file, workload)
        return Accepted()

    def _start(self, path: Path) -> Accepted | Refused:
        """A stopped workload runs again: a new run of the same workload."""
        with path.open("r+b") as file:
            workload = msgspec.json.decode(file.read(), type=Workload)
            if workload.state is not State.ENDED:
                return Refused(f"it is {workload.state} already")
            workload.state, workload.started = State.RUNNING, datetime.now(UTC)
            workload.ended = workload.outcome = None
            _write(file, workload)
        return Accepted()

    def _read(self, path: Path, now: datetime) -> Subject | Unknown | None:
        try:
            facts = path.stat()
            workload = msgspec.json.decode(path.read_bytes(), type=Workload)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            return Unknown(str(error))
        return _subject(self._ref(path, facts), workload, facts, now)

    def _ref(self, path: Path, facts: os.stat_result) -> Ref:
        return Ref(self.name, self.place, "container", _name(path), _uid(facts))

    def _path(self, ref: Ref) -> Path:
        return self._folder / (ref.name + SUFFIX)


def _write(file: BufferedRandom, workload: Workload) -> None:
    """In place: the inode is the uid."""
    file.seek(0)
    file.truncate()
    file.write(msgspec.json.encode(workload))


def _name(path: Path) -> str:
    """File names may contain any bytes; names are text."""
    return os.fsencode(path.stem).decode("utf-8", "backslashreplace")


def _inode(path: Path) -> str | None:
    try:
        return _uid(path.stat())
    except FileNotFoundError:
        return None


def _uid(facts: os.stat_result) -> str:
    return f"{facts.st_dev}:{facts.st_ino}"


def _version(facts: os.stat_result) -> str:
    return str(facts.st_mtime_ns)


def _subject(ref: Ref, workload: Workload, facts: os.stat_result, now: datetime) -> Subject:
    fields: dict[str, Any] = {name: getattr(workload, name) for name in Workload.__struct_fields__}
    started = workload.started.isoformat() if workload.started else ""
    return Subject(seen=Seen(ref, f"start {started}", _version(facts), now), marks=Marks(), **fields)
