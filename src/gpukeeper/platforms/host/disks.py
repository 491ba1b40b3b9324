"""The filesystems of the policy's roots and of gpukeeper's own directories: how full they are. Reads only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gpukeeper.blocking import in_thread
from gpukeeper.disk.measure import printable
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.usage import Usage, usage
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Disk, Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, translate
from gpukeeper.platforms.host.connect import Page, Scan, Timeouts
from gpukeeper.platforms.host.roots import nearest

NOTABLE = 1_000_000_000  # bytes of deleted files that one process holds open
UNREADABLE = OpenFiles({}, {}, (), frozenset(), "the list of open files could not be read")


class Disks:
    def __init__(
        self,
        at: Callable[[], translate.PlaceAndTime],
        directories: Callable[[], Sequence[str]],
        scan: Scan,
        proc: str,
        timeouts: Timeouts,
    ) -> None:
        self._at, self._folders, self._scan, self._proc, self._timeouts = at, directories, scan, proc, timeouts

    async def observe(self) -> Page:
        deadline = self._timeouts.disk
        facts: dict[int, Usage] = {}
        unseen = []
        for directory in self._folders():  # one by one: a hanging network disk must not hide the others
            try:
                one = await in_thread(lambda: usage_of(directory), deadline)  # noqa: B023
                facts.setdefault(one.device, one)
            except TimeoutError:
                unseen.append(errors.too_slow(f"the disk of {directory}", deadline))
            except OSError as error:
                unseen.append(errors.unreadable(f"the disk of {directory}", error))
        used = await self._open_files() if facts else UNREADABLE
        return tuple(self._subject(one, used) for one in facts.values()), tuple(unseen)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found, unseen = await self.observe()
        for one in found:
            if one.ref.uid == ref.uid:
                return one
        return Unknown(f"{unseen[0].what} {unseen[0].why}") if unseen else Gone(ref, self._at().now)

    async def _open_files(self) -> OpenFiles:
        try:
            return await in_thread(self._scan, self._timeouts.processes)
        except (OSError, TimeoutError):
            return UNREADABLE

    def _subject(self, facts: Usage, used: OpenFiles) -> Subject:
        held: Counter[int] = Counter()
        for one in used.held:
            if one.identity[0] == facts.device:
                held[one.pid] += one.size
        total: int | Unknown = held.total()
        if not held and used.hidden:
            total = Unknown(used.hidden)
        return translate.disk_subject(facts, total, tuple(self._findings(held)), self._at())

    def _findings(self, held: Counter[int]) -> Iterable[str]:
        for pid, size in held.most_common():
            if size >= NOTABLE:
                who = f"pid {pid} ({printable(self._comm(pid))})"
                yield f"{size_in_words(size)} are used by deleted files that {who} still has open"

    def _comm(self, pid: int) -> str:
        with suppress(OSError):
            return Path(self._proc, str(pid), "comm").read_text("utf-8", "replace").rstrip("\n")
        return "ended"


def usage_of(directory: str) -> Usage:
    """Of the filesystem that contains the directory, or would contain it."""
    return usage(nearest(os.path.realpath(directory)))


def disk_of(directory: str) -> Disk | None:
    """None: unknown, so it never counts as too full."""
    try:
        return translate.disk(usage_of(directory))
    except OSError:
        return None
