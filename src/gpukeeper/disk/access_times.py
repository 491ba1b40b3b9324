"""When a tree was last used, as far as that can be known. Pure.

Changes are always recorded. Reads are not: most mounts write an access time once a day (relatime), or never (noatime,
read-only). A recorded read proves a use, but no record does not prove the opposite. So what counts is until when the
tree may have been read without a record, unless it was watched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path

import msgspec

from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below, source_of
from gpukeeper.disk.walk import printable
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

DAY = timedelta(hours=24)  # relatime: a read within a day of the recorded one is not recorded, unless a change came


class ReadRecording(IntEnum):
    """How often a read is recorded; the higher, the less often."""

    ALWAYS = 0
    DAILY = 1
    NEVER = 2


class Reads(msgspec.Struct, frozen=True):
    """How reads are recorded on the weakest of the mounts through which a tree can be reached."""

    recorded: ReadRecording
    mount: str = ""  # as text


class WatchRecord(msgspec.Struct, frozen=True):
    """Every use since then was seen, and the last one was then."""

    since: datetime
    last: datetime | None = None


class LastUse(msgspec.Struct, frozen=True):
    """`at`: not used after that; it is in the future where a read may still go unrecorded. `how`: what that follows
    from.
    """

    at: datetime | Unknown
    how: str = ""


def reads_of(directory: str, mounts: Sequence[MountEntry], tables: Iterable[Sequence[MountEntry]]) -> Reads:
    """Of the entries of a directory, by its path without links. `mounts`: of the namespace of the path; `tables`: of
    every namespace. A process that has only something inside an entry mounted uses that entry anyway.
    """
    here = source_of(directory, mounts)
    if here is None:
        return Reads(ReadRecording.NEVER, "a mount that is not listed")
    ways = [(_recorded(one), _in_words(one)) for one in _ways_to(*here, mounts)]
    for table in tables:
        # A service in a sandbox of the machine's own directories (ProtectSystem=) sees them read-only; see limits.md.
        sandbox = _root(table) == _root(mounts)
        ways += [(_recorded(one, sandbox=sandbox), _in_words(one)) for one in _ways_to(*here, table)]
    return Reads(*max(ways, key=lambda way: way[0]))


def last_use(found: TreeMeasurement, reads: Reads, watched: WatchRecord | Unknown | None, now: datetime) -> LastUse:
    """When it was certainly not used any more, by what was recorded and watched. Unknown: the watch failed."""
    newest = found.newest
    if isinstance(newest, Unknown):
        return LastUse(newest)
    what = "recorded read" if newest == found.read else "change"
    known = f"last {what} {_ago(newest, now)}"
    hidden = hidden_until(newest, found.read, reads)
    if isinstance(watched, WatchRecord):
        seen = newest if watched.last is None else max(newest, watched.last)
        hidden = watched.since if hidden is None else min(hidden, watched.since)
        last = "" if watched.last is None else f", last use {_ago(watched.last, now)}"
        return LastUse(max(seen, hidden), f"{known}; watched for {in_words(now - watched.since)}{last}")
    if hidden is None:
        trace = f"{known}, but reads are not recorded on {reads.mount}"
        if isinstance(watched, Unknown):
            return LastUse(Unknown(f"{trace}, and it could not be watched: {watched.why}"))
        return LastUse(Unknown(f"{trace}; run `gpukeeper serve` to watch it, or mount it with relatime or strictatime"))
    if hidden > newest:
        return LastUse(hidden, f"{known}; reads in the 24h after that are not recorded on {reads.mount}")
    return LastUse(newest, known)


def recorded(found: TreeMeasurement, now: datetime) -> LastUse:
    """By what was recorded alone: for trees that no process can read, and for trees that are kept for another
    reason.
    """
    return last_use(found, Reads(ReadRecording.ALWAYS), None, now)


def hidden_until(newest: datetime, read: datetime | None, reads: Reads) -> datetime | None:
    """Until when reads may be unrecorded. None: forever. With relatime a read is recorded if the file changed since the
    recorded one, or if that is older than a day. So only reads after a recorded one can be missing, and only for a
    day.
    """
    if reads.recorded is ReadRecording.NEVER:
        return None
    if reads.recorded is ReadRecording.ALWAYS or read is None:
        return newest
    return max(newest, read + DAY)


def _ways_to(device: str, inside: str, table: Sequence[MountEntry]) -> Iterator[MountEntry]:
    """The mounts of one namespace through which that directory is visible: not where another is mounted above it."""
    for mount in table:
        if mount.device == device and is_at_or_below(inside, mount.source):
            seen_at = os.path.normpath(Path(mount.point, os.path.relpath(inside, mount.source)))
            if covering(seen_at, table) == mount:
                yield mount


def _recorded(mount: MountEntry, *, sandbox: bool = False) -> ReadRecording:
    if "noatime" in mount.options or ("ro" in mount.options and not sandbox) or not mount.options:
        return ReadRecording.NEVER
    return ReadRecording.DAILY if "relatime" in mount.options else ReadRecording.ALWAYS


def _root(table: Sequence[MountEntry]) -> tuple[str, str] | None:
    return source_of("/", table)


def _in_words(mount: MountEntry) -> str:
    how = next((one for one in ("noatime", "ro", "relatime") if one in mount.options), "strictatime")
    return f"{printable(mount.point)} ({'read-only' if how == 'ro' else how})"


def _ago(at: datetime, now: datetime) -> str:
    return f"{in_words(now - at)} ago" if at <= now else f"{in_words(at - now)} ahead"
