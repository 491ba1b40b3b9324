"""Which reports are the newest of their directory. Those are kept, however old they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import roots, translate


class ReportRanking(msgspec.Struct, frozen=True):
    """The reports of one directory whose times are known, newest first, as of the last observe."""

    uids: tuple[str, ...]

    def why_kept(self, uid: str, there: frozenset[str], keep_last: int) -> str | None:
        """`there`: what is in the directory now. Reports only get newer, so those that were newer than this one and
        still exist still are. A report created since then is not counted, so more is kept.
        """
        newer = self.uids[: self.uids.index(uid)] if uid in self.uids else ()
        if keep_last == 0 or len(there.intersection(newer)) >= keep_last:
            return None
        return "it is the newest of its root" if keep_last == 1 else f"it is among the {keep_last} newest of its root"


def rank(reports: Sequence[Subject], contents: Mapping[str, datetime | Unknown]) -> ReportRanking:
    """By content, not by the time of a read or a move. A report that could not be measured is not ranked; it is kept
    anyway.
    """
    uids = [one.ref.uid for one in reports]
    timed = [(at, uid) for uid in uids if isinstance(at := contents.get(uid), datetime)]
    return ReportRanking(tuple(uid for _, uid in sorted(timed, reverse=True)))


def uids_in(root: roots.TreeRoot) -> frozenset[str]:
    found = (roots.top_of(entry) for entry in roots.entries_of(root))
    return frozenset(translate.tree_uid(one.st_dev, one.st_ino) for one in found if one is not None)
