"""Processes that hold a GPU although their container ended: finding them, reading one again, ending it.

Only a container that this engine was seen to have is a proof: other engines write the same kind of id into the same
kind of cgroup, and their containers run and are not ours to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders, signals
from gpukeeper.devices.holders import Holder, text_of
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import translate
from gpukeeper.platforms.docker.host_facts import SCAN, HostInspector, HostSnapshot, container_ids
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import state_of
from gpukeeper.platforms.docker.wire import Inspected, when

CLOCKS = timedelta(seconds=2)  # start times count in hundredths of a second since boot; the boot time is a whole second


class Orphans:
    def __init__(
        self,
        records: Records,
        around: HostInspector,
        clock: Clock,
        at: Callable[[], translate.PlaceAndTime],
        proc: str,
    ) -> None:
        self._records, self._around, self._clock, self._at, self._proc = records, around, clock, at, proc
        self._left_since: dict[str, datetime] = {}  # by container: when a leftover of it was first seen

    def find(self, around: HostSnapshot, containers: Sequence[Inspected]) -> list[Subject]:
        by_id = {one.id: one for one in containers}
        left = []
        for holder in around.everyone():
            ids = container_ids(holder, self._proc)
            if any(_runs(by_id.get(id_)) for id_ in ids):
                continue
            known = next((id_ for id_ in ids if id_ in by_id or id_ in self._records.once_had), None)
            if known is not None or not is_another_engines(holder, self._proc):
                named = msgspec.structs.replace(holder, container=known or holder.container)
                left.append(self._subject(named, by_id.get(str(known)), around))
        whose = {one.labels["container"] for one in left}
        self._left_since = {id_: at for id_, at in self._left_since.items() if id_ in whose}
        return left

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        holder = await self._holder(ref)
        if not isinstance(holder, Holder):
            return holder
        around = await self._around.snapshot()
        found = await self._records.inspect(str(holder.container))
        for id_ in container_ids(holder, self._proc):
            # A container may be started inside the control group of another: running containers are checked first.
            other = await self._records.inspect(id_) if id_ != holder.container else None
            if isinstance(other, Unknown) or _runs(other):
                found = other
        return self._subject(holder, found, around)

    async def end(self, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        holder = await self._holder(fresh.ref)
        if isinstance(holder, Gone):
            return Changed("it has ended")
        if isinstance(holder, Unknown):
            return holder
        return await signals.end(signals.Target(holder.pid, holder.starttime, str(holder.container)), proc=self._proc)

    async def _holder(self, ref: Ref) -> Holder | Gone | Unknown:
        pid, _, starttime = ref.uid.partition("@")
        if not (pid.isdecimal() and starttime.isdecimal()):
            return Unknown(f"{ref.uid!r} does not identify a process")
        try:
            holder = await in_thread(lambda: holders.look_up(int(pid), self._proc), SCAN)
        except TimeoutError:
            return Unknown(f"pid {pid} could not be read: timeout")
        except OSError as error:
            return Unknown(f"pid {pid} could not be read: {error.strerror}")
        if holder is None or holder.starttime != int(starttime):
            return Gone(ref, self._clock.now())
        if not isinstance(holder.container, str):
            return Unknown(f"pid {pid} is not in a container")
        ids = container_ids(holder, self._proc)
        known = next((id_ for id_ in ids if self._records.known(id_) or id_ in self._records.once_had), None)
        return msgspec.structs.replace(holder, container=known or holder.container)

    def _subject(self, holder: Holder, container: Inspected | Unknown | None, around: HostSnapshot) -> Subject:
        started = holders.started(holder.starttime, holders.boot_time(self._proc))
        proof = proof_of(holder, started, container, self._records.once_had)
        id_ = str(holder.container)
        ended = when(container.state.finished_at) if isinstance(container, Inspected) else None
        first_seen = self._left_since.setdefault(id_, self._clock.now())
        since = ended if isinstance(ended, datetime) else first_seen
        devices = HostSnapshot(around.gpus, {id_: (holder,)}, around.mig_minors).held(id_)
        return translate.orphan_subject(holder, started, since, holders.boot_id(self._proc), proof, devices, self._at())


def proof_of(
    holder: Holder, started: datetime, container: Inspected | Unknown | None, once_had: Mapping[str, Inspected]
) -> str | Unknown | None:
    """What connects it to a container that ended. None: nothing."""
    id_ = str(holder.container)
    if isinstance(container, Unknown):
        return Unknown(f"whether its container is still running is unknown ({container.why})")
    if container is None:
        before = once_had.get(id_)
        return f"its cgroup names {before.plain_name} ({id_[:12]}), which was removed" if before is not None else None
    if state_of(container) is not State.ENDED:
        return None
    ended = when(container.state.finished_at)
    if not isinstance(ended, datetime) or started > ended + CLOCKS:
        return None
    return f"its cgroup names {container.plain_name} ({id_[:12]}), which ended at {ended:%Y-%m-%d %H:%M:%S} UTC"


def is_another_engines(holder: Holder, proc: str = "/proc") -> bool:
    """A pod's, or Podman's: reported by the platform that manages those."""
    try:
        cgroup = text_of(Path(proc, str(holder.pid), "cgroup"))
    except OSError:
        return True
    return "kubepods" in cgroup or "libpod" in cgroup


def _runs(container: Inspected | None) -> bool:
    return container is not None and (container.state.running or container.state.restarting)
