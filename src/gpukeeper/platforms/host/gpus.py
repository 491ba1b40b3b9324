"""The GPUs of this machine, and the processes outside containers that hold them. Reads only.

Not here: whether a GPU is idle (see the meter), and containers (their own platform reports them).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders, occupancy
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.model.decision import Unseen
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, translate
from gpukeeper.platforms.host.connect import A_MOMENT, PAGE, Page, Timeouts, user_name

Facts: TypeAlias = tuple[GpuFacts, ...] | Unknown
Inventory: TypeAlias = Callable[[timedelta], Facts]
# Processes to show, what has each device open, and what could not be read.
Scanned: TypeAlias = tuple[tuple[Subject, ...], occupancy.Occupied | Unknown, tuple[Unseen, ...]]
BETWEEN_SCANS = 0.5  # seconds
HOLDERS = "processes that hold GPUs"
HIDEPID = "this machine hides the processes of other users (hidepid); run as root to see them"


class HostGpus:
    def __init__(
        self, at: Callable[[], translate.PlaceAndTime], inventory: Inventory, proc: str, timeouts: Timeouts
    ) -> None:
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
        deadline = self._timeouts.processes
        try:
            return await in_thread(lambda: self._find(ref, gpus), deadline)
        except TimeoutError:
            return Unknown(errors.too_slow(ref.name, deadline).why)
        except OSError as error:
            return Unknown(errors.unreadable(ref.name, error).why)

    async def _query(self) -> Facts:
        deadline = self._timeouts.gpus
        try:
            return await in_thread(lambda: self._inventory(deadline), deadline + A_MOMENT)
        except TimeoutError:
            return Unknown(errors.too_slow("GPUs", deadline).why)

    async def _holders(self, gpus: Facts) -> Scanned:
        deadline = self._timeouts.processes
        try:
            return await in_thread(lambda: self._scan(gpus), deadline)
        except TimeoutError:
            unseen = errors.too_slow(HOLDERS, deadline)
        except OSError as error:
            unseen = errors.unreadable(HOLDERS, error)
        return (), Unknown(unseen.why), (unseen,)

    def _scan(self, gpus: Facts) -> Scanned:
        """Every process counts as a holder; only a user's process that lasts is shown as a workload."""
        found = holders.scan(self._proc)
        boot, now = holders.boot_time(self._proc), self._at().now
        bare = [one for one in found.found if translate.is_bare(one, holders.started(one.starttime, boot), now)]
        if bare:
            time.sleep(BETWEEN_SCANS)
        lasting = [again for one in bare if (again := self._still(one)) is not None]
        known = () if isinstance(gpus, Unknown) else gpus
        opened = occupancy.occupied(known, found, user_name, self._proc)
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
        wanted = translate.two_numbers(ref.uid, "@")
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


def _with_holders(device: Subject, opened: occupancy.Occupied | Unknown) -> Subject:
    busy = opened if isinstance(opened, Unknown) else opened.get(device.ref.uid, Unknown("it was not read"))
    return msgspec.structs.replace(device, busy=busy)
