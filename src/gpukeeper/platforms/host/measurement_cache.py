"""What need not be walked again.

Times only move forward, so a tree that was used recently stays young for as long as the policy's age; and if all trees
of a directory are far below the threshold, none of them is due. Pure except for the stat of one entry. Never a reason
to act: the re-check before a step measures again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from datetime import datetime, timedelta

import msgspec

from gpukeeper.disk.access_times import LastUse
from gpukeeper.disk.measure import TreeMeasurement, instant
from gpukeeper.disk.open_files import DirectoryUse
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.platforms.host.directories import RootDirectory
from gpukeeper.platforms.host.roots import TreeEntry
from gpukeeper.platforms.host.translate import tree_uid

LASTS = timedelta(minutes=30)
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
            self._trees[tree_uid(measured.device, measured.inode)] = CachedMeasurement(measured, now)

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
        fresh = at is not None and timedelta() <= now - at < LASTS
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
        if known is None or entry.taken is not None or not timedelta() <= now - known.at < LASTS:
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
