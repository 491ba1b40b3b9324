"""The directories that the policy names, with the facts that all entries of one have in common, and what need not be
walked again. Reads only. Times only move forward, so a tree that was used recently stays young for as long as the
policy's age; and if all trees of a directory are far below the threshold, none of them is due. Never a reason to
act: the re-check before a step measures again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk import measure, mounts
from gpukeeper.disk.access_times import LastUse
from gpukeeper.disk.measure import TreeMeasurement, instant, tree_uid
from gpukeeper.disk.mounts import Responsiveness, real_path_of
from gpukeeper.disk.open_files import DirectoryUse
from gpukeeper.model.decision import Unseen, too_slow
from gpukeeper.model.policy import DiskMarks
from gpukeeper.model.subject import Disk
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.platforms.host import roots
from gpukeeper.platforms.host.connect import unreadable
from gpukeeper.platforms.host.roots import TreeEntry, TreeRoot, disk_of


class TreeScope(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy names, and what must not be removed with any of it."""

    roots: tuple[TreeRoot, ...] = ()
    silent: tuple[str, ...] = ()  # roots of the policy whose filesystem does not answer; they are skipped for now
    folders: tuple[str, ...] = ()  # of gpukeeper itself
    marks: DiskMarks = DiskMarks()
    keep_last: int = 0  # reports of each root
    archive: bool = True  # reports are saved before they are removed

    def untouched(self) -> tuple[str, ...]:
        """Links resolved. A root may be inside an entry of another root, and so may our own ledger."""
        paths = (*(root.path for root in self.roots), *self.silent, *self.folders)
        known = mounts.own_mounts()
        return tuple(real_path_of(path, known) for path in paths)


class RootDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """One directory with its entries."""

    path: str  # links resolved
    entries: tuple[TreeEntry, ...]
    roots: tuple[TreeRoot, ...]
    disk: Disk | None  # None: unknown
    kept: dict[str, str]  # by name: why it is kept
    marks: DiskMarks

    @property
    def above(self) -> int:
        return min((root.above for root in self.roots), default=0)

    @property
    def may_be_too_full(self) -> bool:
        """Whether the shorter ages may apply."""
        return self.disk is None or self.disk.full >= self.marks.low

    @property
    def least_age(self) -> timedelta | None:
        """The age at which any of its entries could be due. None: never."""
        ages = [root.older_than for root in self.roots]
        ages += [root.under_pressure for root in self.roots] if self.may_be_too_full else []
        return min((age for age in ages if age is not None), default=None)


def spellings(named: TreeScope, directory: str) -> tuple[str, ...]:
    """The paths by which users may write that directory."""
    return (directory, *(os.path.normpath(root.path) for root in named.roots if root.is_at(directory)))


async def answering(named: TreeScope, ask: Responsiveness, deadline: timedelta) -> tuple[TreeScope, tuple[Unseen, ...]]:
    """Without the roots whose filesystem does not answer."""
    whys: dict[str, str] = {}

    def work() -> None:
        known = mounts.own_mounts()
        for root in named.roots:
            why = ask.why_not(root.path, known)
            if why is not None:
                whys[root.path] = why

    try:
        await in_thread(work, deadline)
    except (OSError, TimeoutError):
        return named, ()  # each of them reports it
    answer = tuple(root for root in named.roots if root.path not in whys)
    unseen = tuple(Unseen(path, why) for path, why in whys.items())
    return msgspec.structs.replace(named, roots=answer, silent=tuple(whys)), unseen


async def list_all(named: TreeScope, deadline: timedelta) -> tuple[dict[str, list[TreeEntry]], tuple[Unseen, ...]]:
    """By directory. An entry that two roots or patterns name is listed once."""
    directories: dict[str, dict[str, TreeEntry]] = {}
    unseen = []
    for root in named.roots:
        entries = await list_one(root, deadline)
        if isinstance(entries, Unseen):
            unseen.append(entries)
            continue
        for entry in entries:
            directories.setdefault(entry.folder, {}).setdefault(entry.real_path, entry)
    return {directory: list(entries.values()) for directory, entries in directories.items()}, tuple(unseen)


async def list_one(root: TreeRoot, deadline: timedelta) -> tuple[TreeEntry, ...] | Unseen:
    try:
        return await in_thread(lambda: roots.entries_of(root), deadline)
    except TimeoutError:
        return too_slow(root.path, deadline)
    except FileNotFoundError:
        return ()  # a root that does not exist has no trees
    except OSError as error:
        return unreadable(root.path, error)


async def learn(
    named: TreeScope, path: str, entries: Sequence[TreeEntry], deadline: timedelta
) -> RootDirectory | Unseen:
    try:
        return await in_thread(lambda: _learn(named, path, entries), deadline)
    except TimeoutError:
        return too_slow(measure.printable(path), deadline)
    except OSError as error:
        return unreadable(measure.printable(path), error)


def _learn(named: TreeScope, path: str, entries: Sequence[TreeEntry]) -> RootDirectory:
    here = tuple(root for root in named.roots if root.is_at(path))
    untouched, links = named.untouched(), roots.links_in(path)
    whys = {entry.name: roots.why_kept(entry, here, untouched, links) for entry in entries if entry.taken is None}
    kept = {name: why for name, why in whys.items() if why is not None}
    disk = disk_of(path)
    return RootDirectory(path=path, entries=tuple(entries), roots=here, disk=disk, kept=kept, marks=named.marks)


CACHE_LASTS = timedelta(minutes=30)
FAR_BELOW = 0.5  # of the threshold


class CachedMeasurement(msgspec.Struct, frozen=True):
    measured: TreeMeasurement
    at: datetime


class MeasurementCache:
    def __init__(self) -> None:
        self._trees: dict[str, CachedMeasurement] = {}  # by uid
        self._totals: dict[str, tuple[int, datetime]] = {}  # by directory: bytes of all trees together

    def learn(self, measured: TreeMeasurement, now: datetime) -> None:
        if is_known(measured.size):
            self._trees[measured.tree_uid] = CachedMeasurement(measured, now)

    def learn_total(self, directory: RootDirectory, total: int, now: datetime) -> None:
        self._totals[directory.path] = (total, now)

    def total(self, directory: RootDirectory) -> int:
        return self._totals.get(directory.path, (0, None))[0]

    def forget_all_but(self, uids: set[str], directories: Collection[str]) -> None:
        self._trees = {uid: known for uid, known in self._trees.items() if uid in uids}
        self._totals = {path: total for path, total in self._totals.items() if path in directories}

    def is_far_below(self, directory: RootDirectory, now: datetime) -> bool:
        """All of its trees together, according to a recent observe, and its disk is not too full."""
        total, at = self._totals.get(directory.path, (0, None))
        fresh = at is not None and timedelta() <= now - at < CACHE_LASTS
        return fresh and not directory.may_be_too_full and total < directory.above * FAR_BELOW

    def recall(
        self,
        entry: TreeEntry,
        top: os.stat_result,
        directory: RootDirectory,
        in_use: DirectoryUse | Unknown,
        now: datetime,
        last_use: Callable[[TreeMeasurement], LastUse],
    ) -> TreeMeasurement | None:
        """The last measurement if it is still valid. None: measure it again. `last_use`: what follows from a
        measurement.
        """
        known = self._trees.get(tree_uid(top.st_dev, top.st_ino))
        if known is None or entry.taken is not None or not timedelta() <= now - known.at < CACHE_LASTS:
            return None
        used_since = instant(max(_times(top)))
        newest = max(known.measured.newest, used_since) if is_known(known.measured.newest) else used_since
        held = not isinstance(in_use, Unknown) and entry.name in in_use.users
        again = msgspec.structs.replace(known.measured, newest=newest)
        least, used = directory.least_age, last_use(again).at
        young = least is None or isinstance(used, Unknown) or used + least > now
        return again if held or young or self.is_far_below(directory, now) else None


def _times(top: os.stat_result) -> tuple[int, ...]:
    """As a walk counts them: listing a directory is no use of it."""
    changed = (top.st_mtime_ns, top.st_ctime_ns)
    return changed if stat.S_ISDIR(top.st_mode) else (*changed, top.st_atime_ns)
