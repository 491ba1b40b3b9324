"""Removing a tree: exactly the one that was read, by descriptor, through the trash. Nothing else is touched."""

from __future__ import annotations

import time

from gpukeeper.blocking import in_thread
from gpukeeper.disk import trash
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval, finish, remove
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.subject import Category, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, mentions, roots, translate
from gpukeeper.platforms.host.connect import A_MOMENT, Scan, Timeouts
from gpukeeper.platforms.host.directories import TreeScope, spellings
from gpukeeper.platforms.host.mentions import Mentioned
from gpukeeper.platforms.host.resolve import opened
from gpukeeper.platforms.host.roots import TreeEntry

UNFINISHED = Refused(
    "an interrupted removal has moved it to the trash; the next pass finishes that, and nothing was done"
)
UNDER_WAY = Refused("an earlier removal of it hangs, perhaps because the disk does not answer; nothing more was done")


class TreeRemover:
    def __init__(self, scan: Scan, timeouts: Timeouts, mentioned: Mentioned = mentions.below) -> None:
        self._scan, self._timeouts, self._mentioned = scan, timeouts, mentioned
        self._under_way: set[str] = set()  # uids; a thread that hangs may still continue later

    async def remove(
        self, fresh: Subject, named: TreeScope, uid: int | None = None
    ) -> Accepted | Changed | Refused | Unknown:
        """`uid`: of the user who requests it, if not an admin."""
        identity, change = translate.two_numbers(fresh.ref.uid, ":"), translate.change_of(fresh)
        if identity is None or change is None:
            return errors.NOT_MEASURED
        if isinstance(fresh.in_use, Unknown) and fresh.category is not Category.UNFINISHED:
            return Refused(f"it was not removed: {fresh.in_use.why}")
        if fresh.ref.uid in self._under_way:
            return UNDER_WAY
        self._under_way.add(fresh.ref.uid)
        deadline = self._timeouts.removal

        def work() -> Accepted | Changed | Refused:
            try:
                return self._remove(
                    ExpectedTree(identity, change, uid), named, time.monotonic() + deadline.total_seconds()
                )
            finally:
                self._under_way.discard(fresh.ref.uid)

        try:
            return await in_thread(work, deadline + 2 * A_MOMENT)
        except TimeoutError:
            return Unknown(errors.too_slow("its disk", deadline).why)
        except OSError as error:
            return Unknown(f"its root {errors.unreadable(fresh.ref.name, error).why}")

    def _remove(self, expected: ExpectedTree, named: TreeScope, until: float) -> Accepted | Changed | Refused:
        entry = roots.find(named.roots, *expected.identity)
        if entry is None:
            return Changed("it is gone already")
        if expected.uid is not None and not isinstance(entry, Unknown) and entry.taken is not None:
            return UNFINISHED
        if isinstance(entry, Unknown):
            return Changed(entry.why)
        kept = roots.why_kept(entry, named.roots, named.untouched(), roots.links_in(entry.folder))
        if kept is not None:
            return Changed(f"it is kept: {kept}")
        named_by = self._mentioned(spellings(named, entry.inside)).who(entry.name)
        if named_by is not None:
            return Changed(f"it is in use: {named_by}")
        with opened(entry.folder) as directory:
            trash.sweep(directory)
            answer = self._through_trash(directory, entry, expected, until)
        if isinstance(answer, TreeRemoval):
            left = f"{entry.folder}/{trash.TRASH}*" if entry.taken is None else entry.inside
            return errors.not_all(answer, left) if answer.left else Accepted(answer.bytes_back)
        # Nothing was done, and the reason is known: another read would not add anything.
        return Refused(f"it was not removed: {answer.why}") if isinstance(answer, Unknown) else answer

    def _through_trash(
        self, directory: int, entry: TreeEntry, expected: ExpectedTree, until: float
    ) -> TreeRemoval | Changed | Refused | Unknown:
        if entry.taken is not None:
            return finish(directory, entry.taken, scan=self._scan, until=until)
        return remove(directory, entry.name, expected, scan=self._scan, until=until)
