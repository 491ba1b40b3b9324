"""This machine as a platform: its GPUs, processes outside containers that hold them, directory trees, disks.

Trees are removed; everything else is only reported. Relies on /proc and, for GPUs, on the NVIDIA driver. Without root
it sees less, and reports that.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices.inventory import inventory as read_inventory
from gpukeeper.disk import filesystems, open_files
from gpukeeper.disk.measure import MeasureLimits
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.sharing import Shared, SharedQuestion
from gpukeeper.model.decision import (
    Accepted,
    Action,
    Changed,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
)
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import DiskMarks, PlaceScope, Policy, Reports, Temporary
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Category, Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import archive, capture, errors, mentions, translate
from gpukeeper.platforms.host.acts import TreeRemover
from gpukeeper.platforms.host.connect import Needed, Scan, Timeouts, nothing_needed
from gpukeeper.platforms.host.directories import TreeScope
from gpukeeper.platforms.host.disks import Disks
from gpukeeper.platforms.host.gpus import HostGpus, Inventory
from gpukeeper.platforms.host.roots import roots_of
from gpukeeper.platforms.host.trees import Trees

AT_ONCE = 100  # concurrent removals for which open files and processes are read together
TREES = (translate.TREE, translate.REPORT)
Busy: TypeAlias = Callable[[str], Awaitable[str | Unknown | None]]


async def nothing_known(root: str) -> None:
    """Used if no cluster of this machine can be queried."""


class HostPlatform(Platform):
    name, local = translate.PLATFORM, True
    # A tree that changed since it was read, or is opened in the meantime, is put back.
    guards: Mapping[Action, Guard] = {Action.REMOVE: Guard.ATOMIC}

    def __init__(
        self,
        place: str,
        temporary: Sequence[Temporary],
        clock: Clock,
        *,
        reports: Reports | None = None,
        marks: DiskMarks | None = None,
        directories: Sequence[str] = (),
        busy: Busy = nothing_known,
        needed: Needed = nothing_needed,
        inventory: Inventory = read_inventory,
        proc: str = "/proc",
        scan: Scan | None = None,
        limits: MeasureLimits | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`directories`: those of gpukeeper itself; their disks are shown, and no tree that contains one is removed.
        `busy`: what work of a cluster runs on this machine and may need the files below that root, in a few words.
        `needed`: directories that stopped containers have mounted.
        """
        self._place, self._clock, self._folders, self._busy = place, clock, tuple(directories), busy
        self._timeouts = timeouts or Timeouts()
        self._unreadable = (marks or DiskMarks()).unreadable
        # Many steps may be in progress at once, and each of them reads several times.
        scan = Shared(scan or (lambda: open_files.scan(proc, unreadable=self._unreadable)))
        named = self._named(temporary, reports or Reports(), marks or DiskMarks())
        mentioned = Shared(partial(mentions.below, proc=proc))
        self._gpus = HostGpus(self._at, inventory, proc, self._timeouts)
        self._trees = Trees(
            self._at, named, scan, limits or MeasureLimits(), self._timeouts, mentioned, SharedQuestion(needed)
        )
        self._disks = Disks(self._at, self._on_disk, scan, proc, self._timeouts)
        self._removals = TreeRemover(scan, self._timeouts, mentioned)

    def follow(self, policy: Policy) -> None:
        """A changed policy applies from the next read on."""
        self._unreadable = policy.disk.unreadable
        self._trees.follow(self._named(policy.temporary, policy.reports, policy.disk))

    @property
    def place(self) -> str:
        return self._place

    def at_once(self, kind: str) -> int:
        """A report is saved as a whole first, so one at a time."""
        return AT_ONCE if kind == translate.TREE else 1

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        if not any(fnmatch.fnmatchcase(self._place, pattern) for pattern in scope.places):
            return
        async for subjects, unseen in self._gpus.observe():
            yield Snapshot(self.name, self._place, self._clock.now(), subjects, unseen)
        silent = await self._trees.unresponsive_roots()
        disks, unseen = await self._disks.observe()
        unseen = (*silent, *unseen)
        if disks or unseen:
            yield Snapshot(self.name, self._place, self._clock.now(), disks, unseen)
        async for subjects, unseen in self._trees.observe():
            trees = await self._identified(subjects)
            if isinstance(trees, Unknown):
                missed = (*unseen, Unseen(f"trees of {self._place}", trees.why))
                yield Snapshot(self.name, self._place, self._clock.now(), (), missed)
                continue
            yield Snapshot(self.name, self._place, self._clock.now(), await self._beside(trees), unseen)

    async def wake(self) -> AsyncIterator[Ref | None]:
        """The machine gives no hints; the next pass reads it. While a caller waits for hints, the use of trees is
        watched.
        """
        watch = self._trees.watch
        hints: tuple[Ref | None, ...] = ()
        try:
            if await in_thread(watch.start, self._timeouts.processes) is None:
                await asyncio.Event().wait()
            for hint in hints:
                yield hint
        finally:
            watch.close()

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.kind in {translate.GPU, translate.SLICE}:
            return await self._gpus.read(ref)
        if ref.kind == translate.PROCESS:
            return await self._gpus.read_holder(ref)
        if ref.kind in TREES:
            found = await self._trees.read(ref)
            trees = await self._identified((found,)) if isinstance(found, Subject) else found
            return (await self._beside(trees))[0] if isinstance(trees, tuple) else trees
        if ref.kind == translate.DISK:
            return await self._disks.read(ref)
        return Unknown(f"this machine has no kind {ref.kind!r}")

    async def read_by_id(self, uid: str) -> Subject | Gone | Unknown:
        return Unknown("no process outside containers carries the id of a workload")

    async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
        if subject.shape is not Shape.TREE:
            return Unknown(f"evidence of a {subject.ref.kind} on the machine itself is not supported")
        if subject.category is not Category.REPORT:
            return NothingToCapture("temporary files have no logs, manifest or events of their own")
        if not self._trees.named.archive:
            return NothingToCapture("reports are not saved: the policy disables reports.archive")
        return await capture.report(subject, self._trees.named, self._timeouts)

    async def act(self, step: Step, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        if step.decision.action not in self.guards or fresh.shape is not Shape.TREE:
            return errors.READ_ONLY
        return await self._removals.remove(fresh, self._trees.named, step.uid)

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """A report that was saved. Other trees cannot be restored."""
        saved = None if evidence is None else evidence.files.get(capture.FILE)
        if ref.kind != translate.REPORT or saved is None:
            return errors.NO_COPY
        return await archive.restore(ref, saved, self._trees.named, self._timeouts)

    async def _identified(self, trees: tuple[Subject, ...]) -> tuple[Subject, ...] | Unknown:
        """Without its filesystem, holds on a tree are unknown."""
        try:
            return await in_thread(lambda: filesystems.identified(trees), self._timeouts.tree) if trees else ()
        except TimeoutError:
            return Unknown(f"a filesystem {errors.too_slow(self._place, self._timeouts.tree).why}")
        except OSError as error:
            return Unknown(f"the filesystems could not be identified: {error.strerror or error}")

    async def _beside(self, trees: tuple[Subject, ...]) -> tuple[Subject, ...]:
        """A temporary tree may be needed by work that runs here, however old it is."""
        roots = {one.labels["root"] for one in trees if one.category is Category.TEMPORARY}
        busy = {root: await self._busy(root) for root in roots}
        return tuple(
            msgspec.structs.replace(one, busy=busy[one.labels["root"]]) if one.category is Category.TEMPORARY else one
            for one in trees
        )

    def _named(self, temporary: Sequence[Temporary], reports: Reports, marks: DiskMarks) -> TreeScope:
        ours = [one for one in temporary if one.platform == self.name]
        return TreeScope(
            roots=roots_of(ours, reports),
            folders=self._folders,
            marks=marks,
            keep_last=reports.keep_last,
            archive=reports.archive,
        )

    def _on_disk(self) -> tuple[str, ...]:
        return (*(root.path for root in self._trees.named.roots), *self._folders)

    def _at(self) -> translate.PlaceAndTime:
        return translate.PlaceAndTime(self._place, self._clock.now())
