"""This machine as a platform: its GPUs, processes outside containers that hold them, directory trees, disks.

Trees are removed; everything else is only reported. Relies on /proc and, for GPUs, on the NVIDIA driver. Without
root it sees less, and reports that. Whether a GPU is idle is known by the meter; containers have their own
platform.
"""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import msgspec

from gpukeeper.blocking import A_MOMENT, in_thread
from gpukeeper.devices import holders
from gpukeeper.devices.counters import Counters, read_process
from gpukeeper.devices.driver.client import inventory as read_inventory
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.gpus import Occupied, occupied
from gpukeeper.devices.holders import user_name
from gpukeeper.disk import open_files
from gpukeeper.disk.measure import MeasureLimits
from gpukeeper.disk.mounts import identified
from gpukeeper.disk.tree import TREE, PlaceAndTime, two_numbers
from gpukeeper.engine.ports import Platform, Shared, SharedQuestion
from gpukeeper.model.decision import (
    Accepted,
    Action,
    ActResult,
    Evidence,
    Guard,
    NothingToCapture,
    Refused,
    Snapshot,
    Step,
    Unseen,
    too_slow,
)
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Category, Gone, Ref, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import translate
from gpukeeper.platforms.host.acts import REPORT_FILE, TreeRemover, restore_report, save_report
from gpukeeper.platforms.host.connect import (
    NO_COPY,
    PAGE,
    READ_ONLY,
    Needed,
    Page,
    Scan,
    Timeouts,
    in_time,
    nothing_needed,
)
from gpukeeper.platforms.host.roots import Disks, TreeScope, roots_of
from gpukeeper.platforms.host.trees import Trees, mentioned_below

Facts: TypeAlias = tuple[GpuFacts, ...] | Unknown
Inventory: TypeAlias = Callable[[timedelta], Facts]
# Processes to show, what has each device open, and what could not be read.
Scanned: TypeAlias = tuple[tuple[Subject, ...], Occupied | Unknown, tuple[Unseen, ...]]
BETWEEN_SCANS = 0.5  # seconds
HOLDERS = "processes that hold GPUs"
HIDEPID = "this machine hides the processes of other users (hidepid); run as root to see them"


class HostGpus:
    def __init__(self, at: Callable[[], PlaceAndTime], inventory: Inventory, proc: str, timeouts: Timeouts) -> None:
        self._at, self._inventory, self._proc, self._timeouts = at, inventory, proc, timeouts

    async def observe(self) -> AsyncIterator[Page]:
        gpus = await self._query()
        devices, unseen = translate.gpu_subjects(() if isinstance(gpus, Unknown) else gpus, self._at())
        if isinstance(gpus, Unknown):
            unseen = (Unseen("GPUs", gpus.why),)
        # Without a driver no process can hold a GPU, and what we may not read does not matter.
        if gpus != ():
            processes, opened, unread = await self._holders(gpus)
            devices = tuple(_with_holders(one, opened) for one in devices)
        else:
            processes, unread = (), ()
        subjects = (*devices, *processes)
        yield subjects[:PAGE], (*unseen, *unread)
        for start in range(PAGE, len(subjects), PAGE):
            yield subjects[start : start + PAGE], ()

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        gpus = await self._query()
        if isinstance(gpus, Unknown):
            return gpus
        subjects, unseen = translate.gpu_subjects(gpus, self._at())
        for subject in subjects:
            if subject.ref.uid == ref.uid:
                return subject
        return Unknown(f"{unseen[0].what}: {unseen[0].why}") if unseen else Gone(ref, self._at().now)

    async def read_holder(self, ref: Ref) -> Subject | Gone | Unknown:
        gpus = await self._query()
        found = await in_time(lambda: self._find(ref, gpus), ref.name, self._timeouts.processes)
        return Unknown(found.why) if isinstance(found, Unseen) else found

    async def _query(self) -> Facts:
        deadline = self._timeouts.gpus
        try:
            return await in_thread(lambda: self._inventory(deadline), deadline + A_MOMENT)
        except TimeoutError:
            return Unknown(too_slow("GPUs", deadline).why)

    async def _holders(self, gpus: Facts) -> Scanned:
        found = await in_time(lambda: self._scan(gpus), HOLDERS, self._timeouts.processes)
        return ((), Unknown(found.why), (found,)) if isinstance(found, Unseen) else found

    def _scan(self, gpus: Facts) -> Scanned:
        """Every process counts as a holder; only a user's process that lasts is shown as a workload."""
        found = holders.scan(self._proc)
        boot, now = holders.boot_time(self._proc), self._at().now
        bare = [one for one in found.found if translate.is_bare(one, holders.started(one.starttime, boot), now)]
        if bare:
            time.sleep(BETWEEN_SCANS)
        lasting = [again for one in bare if (again := self._still(one)) is not None]
        known = () if isinstance(gpus, Unknown) else gpus
        opened = occupied(known, found, user_name, self._proc)
        return tuple(self._subject(holder, gpus) for holder in lasting), opened, self._unread(found.hidden)

    def _still(self, holder: holders.Holder) -> holders.Holder | None:
        """Seen twice: a process that was only ending, or closing the device, is no claim on a GPU."""
        try:
            again = holders.look_up(holder.pid, self._proc)
        except PermissionError:
            return holder
        return again if again is not None and again.starttime == holder.starttime and again.minors else None

    def _unread(self, hidden: tuple[int, ...]) -> tuple[Unseen, ...]:
        if hidden:
            why = f"the open files of {len(hidden)} other processes could not be read, for example of pid {hidden[0]}"
            return (Unseen(HOLDERS, f"{why}; that needs root (CAP_SYS_PTRACE)"),)
        return () if holders.shows_everyone(self._proc) else (Unseen(HOLDERS, HIDEPID),)

    def _find(self, ref: Ref, gpus: Facts) -> Subject | Gone | Unknown:
        wanted = two_numbers(ref.uid, "@")
        if wanted is None:
            return Unknown(f"{ref.uid!r} does not identify a process")
        holder = holders.look_up(wanted[0], self._proc)
        if holder is not None and holder.starttime == wanted[1]:
            return self._subject(holder, gpus)
        if holder is None and not holders.shows_everyone(self._proc):
            return Unknown(HIDEPID)
        return Gone(ref, self._at().now)

    def _subject(self, holder: holders.Holder, gpus: Facts) -> Subject:
        devices = translate.devices_of(holder, gpus, holders.mig_minors(self._proc))
        started = holders.started(holder.starttime, holders.boot_time(self._proc))
        boot = holders.boot_id(self._proc)
        return translate.process_subject(holder, devices, user_name(holder.uid), started, boot, self._at())


def _with_holders(device: Subject, opened: Occupied | Unknown) -> Subject:
    busy = opened if isinstance(opened, Unknown) else opened.get(device.ref.uid, Unknown("it was not read"))
    return msgspec.structs.replace(device, busy=busy)


def count_process(subject: Subject, proc: str = "/proc") -> Counters | None:
    wanted = two_numbers(subject.ref.uid, "@") if subject.ref.kind == translate.PROCESS else None
    found = read_process(wanted[0], proc) if wanted is not None else None
    return found if wanted is not None and found is not None and found.starttime == wanted[1] else None


AT_ONCE = 100  # concurrent removals for which open files and processes are read together
TREES = (TREE, translate.REPORT)
Busy: TypeAlias = Callable[[str], Awaitable[str | Unknown | None]]


class HostAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the machine is read. `scan`: which files are open; None: all of `proc`."""

    inventory: Inventory = read_inventory
    proc: str = "/proc"
    scan: Scan | None = None
    limits: MeasureLimits = MeasureLimits()
    timeouts: Timeouts = Timeouts()


DEFAULT_ACCESS = HostAccess()


async def nothing_known(root: str) -> None:
    """Used if no cluster of this machine can be queried."""


class HostPlatform(Platform):
    name, local = translate.PLATFORM, True
    # A tree that changed since it was read, or is opened in the meantime, is put back.
    guards: Mapping[Action, Guard] = {Action.REMOVE: Guard.ATOMIC}

    def __init__(
        self,
        place: str,
        policy: Policy,
        clock: Clock,
        *,
        directories: Sequence[str] = (),
        busy: Busy = nothing_known,
        needed: Needed = nothing_needed,
        access: HostAccess = DEFAULT_ACCESS,
    ) -> None:
        """`directories`: those of gpukeeper itself; their disks are shown, and no tree that contains one is removed.
        `busy`: what work of a cluster runs on this machine and may need the files below that root, in a few words.
        `needed`: directories that stopped containers have mounted.
        """
        self._place, self._clock, self._folders, self._busy = place, clock, tuple(directories), busy
        self._timeouts, proc = access.timeouts, access.proc
        self._unreadable = policy.disk.unreadable
        # Many steps may be in progress at once, and each of them reads several times.
        scan = Shared(access.scan or (lambda: open_files.scan(proc, unreadable=self._unreadable)))
        mentioned = Shared(partial(mentioned_below, proc=proc))
        self._gpus = HostGpus(self._at, access.inventory, proc, self._timeouts)
        self._trees = Trees(
            self._at, self._named(policy), scan, access.limits, self._timeouts, mentioned, SharedQuestion(needed)
        )
        self._disks = Disks(self._at, self._on_disk, scan, proc, self._timeouts)
        self._removals = TreeRemover(scan, self._timeouts, mentioned)

    def follow(self, policy: Policy) -> None:
        """A changed policy applies from the next read on."""
        self._unreadable = policy.disk.unreadable
        self._trees.follow(self._named(policy))

    @property
    def place(self) -> str:
        return self._place

    def at_once(self, kind: str) -> int:
        """A report is saved as a whole first, so one at a time."""
        return AT_ONCE if kind == TREE else 1

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
        return await save_report(subject, self._trees.named, self._timeouts)

    async def act(self, step: Step, fresh: Subject) -> ActResult:
        if step.decision.action not in self.guards or fresh.shape is not Shape.TREE:
            return READ_ONLY
        return await self._removals.remove(fresh, self._trees.named, step.uid)

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """A report that was saved. Other trees cannot be restored."""
        saved = None if evidence is None else evidence.files.get(REPORT_FILE)
        if ref.kind != translate.REPORT or saved is None:
            return NO_COPY
        return await restore_report(ref, saved, self._trees.named, self._timeouts)

    async def _identified(self, trees: tuple[Subject, ...]) -> tuple[Subject, ...] | Unknown:
        """Without its filesystem, holds on a tree are unknown."""
        try:
            return await in_thread(lambda: identified(trees), self._timeouts.tree) if trees else ()
        except TimeoutError:
            return Unknown(f"a filesystem {too_slow(self._place, self._timeouts.tree).why}")
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

    def _named(self, policy: Policy) -> TreeScope:
        ours = [one for one in policy.temporary if one.platform == self.name]
        return TreeScope(
            roots=roots_of(ours, policy.reports),
            folders=self._folders,
            marks=policy.disk,
            keep_last=policy.reports.keep_last,
            archive=policy.reports.archive,
        )

    def _on_disk(self) -> tuple[str, ...]:
        return (*(root.path for root in self._trees.named.roots), *self._folders)

    def _at(self) -> PlaceAndTime:
        return PlaceAndTime(self.name, self._place, self._clock.now())
