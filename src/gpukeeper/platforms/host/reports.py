"""Which reports are the newest of their folder. Those stay, however old they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import roots, translate


class Ranked(msgspec.Struct, frozen=True):
    """The reports of one folder whose times are known, newest first, as an observe found them."""

    uids: tuple[str, ...]

    def why_kept(self, uid: str, there: frozenset[str], keep_last: int) -> str | None:
        """`there`: what is in the folder now. Reports only grow newer, so of those that were newer than this one and
        are still there every one still is. One that came since is left out, and so keeps more."""
        newer = self.uids[: self.uids.index(uid)] if uid in self.uids else ()
        if keep_last == 0 or len(there.intersection(newer)) >= keep_last:
            return None
        return "it is the newest of its root" if keep_last == 1 else f"it is among the {keep_last} newest of its root"


def rank(reports: Sequence[Subject], contents: Mapping[str, datetime | Unknown]) -> Ranked:
    """By what is in them, not by when somebody read or moved one. One that could not be measured takes nobody's place;
    it stays by itself."""
    uids = [one.ref.uid for one in reports]
    timed = [(at, uid) for uid in uids if isinstance(at := contents.get(uid), datetime)]
    return Ranked(tuple(uid for _, uid in sorted(timed, reverse=True)))


def uids_in(root: roots.Root) -> frozenset[str]:
    found = (roots.top_of(entry) for entry in roots.entries_of(root))
    return frozenset(translate.tree_uid(one.st_dev, one.st_ino) for one in found if one is not None)
