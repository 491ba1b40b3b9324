"""Stopping, removing and restoring containers, each tied to the container that was read, by id and start; and ending a
process that holds a GPU although its container ended.

Only a container that this engine was seen to have proves such a process to be ours to judge: other engines write
the same kind of id into the same kind of cgroup, and their containers run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.docker import (
    CONFLICT,
    NOT_FOUND,
    NOT_MODIFIED,
    QUICK,
    CreateResponse,
    Engine,
    EngineError,
    EngineSilent,
    ImageInspected,
    Inspected,
    part,
    when,
)
from gpukeeper.devices import holders, signals
from gpukeeper.devices.holders import Holder, text_of
from gpukeeper.devices.signals import Target, terminate
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, ActResult, Changed, Evidence, Refused
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import translate
from gpukeeper.platforms.docker.capture import CreateRequest, recipe_of, restart_policy
from gpukeeper.platforms.docker.host_facts import SCAN, HostInspector, HostSnapshot, container_ids
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import incarnation, state_of, version

FIRST_PROCESS = timedelta(seconds=10)  # minimum time between the stop signal and the kill, as the engine itself allows
ENGINE_SLACK = timedelta(seconds=30)  # the engine tries several ways to end it before it fails
RESTARTED_WITHIN = (0.0, 0.5, 1.0)  # seconds between reads: a restart is a stop, followed by a start a moment later
LOST_RUN = "it was started at the same time, and that run ended before the engine could refuse the removal"
NO_RESTART = {"RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}}


class ContainerActions:
    def __init__(
        self, engine: Engine, records: Records, holders: Callable[[Inspected], Awaitable[Sequence[Holder]]]
    ) -> None:
        self._engine, self._records, self._holders = engine, records, holders

    async def stop(self, fresh: Subject, grace: timedelta) -> ActResult:
        """Disables the restart policy, sends SIGTERM to the processes that use a GPU and waits, then stops it through
        the engine.
        """
        container = await self._same(fresh)
        if not isinstance(container, Inspected):
            return container
        if state_of(container) not in (State.RUNNING, State.PAUSED):
            return Changed("it is not running any more")
        policy = container.host_config.restart_policy
        revives = policy is not None and policy.name not in {"", "no"}
        if revives and (problem := await self._disable_restart(container.id)) is not None:
            return problem
        self._records.record_stop(container.id, datetime.now(UTC))
        began = asyncio.get_running_loop().time()
        try:
            await self._end_gpu_processes(container, grace)
        except (asyncio.CancelledError, PlatformError):  # interrupted, or a read failed: it continues as before
            if revives:
                await self._restore_policy(container)
            raise
        waited = timedelta(seconds=asyncio.get_running_loop().time() - began)
        now = await self._same(fresh)
        if not isinstance(now, Inspected):
            if revives:
                await self._restore_policy(container)
            return now
        answer: ActResult = Accepted()
        if state_of(now) in (State.RUNNING, State.PAUSED):
            answer = await self._stop(container.id, max(FIRST_PROCESS, grace - waited))
            if isinstance(answer, Accepted) and await self._hit_another_run(container):
                again = await self._engine_start(container.id)
                done = (
                    "it was started again" if isinstance(again, Accepted) else f"starting it again failed: {again.why}"
                )
                answer = Changed(f"it was restarted at the same time and the stop hit the new run; {done}")
        # Otherwise it has ended, and a stop could only hit a run that is just starting.
        if revives:
            await self._undo_if_it_runs(container, answer)
        return answer

    async def _hit_another_run(self, before: Inspected) -> bool:
        """The engine cannot stop one specific run: between our read and the stop a user may have restarted it."""
        now = await self._records.inspect(before.id)
        return isinstance(now, Inspected) and state_of(now) is State.ENDED and incarnation(now) != incarnation(before)

    async def remove(self, fresh: Subject) -> ActResult:
        """Not forced, so that the engine refuses if it was started in the meantime; anonymous volumes stay.

        The engine cannot remove a container conditionally: a run that begins and ends after our read is removed with
        it. That window is as short as possible, and a run that was lost in it is reported.
        """
        read_at = datetime.now(UTC)
        container = await self._same(fresh)
        if not isinstance(container, Inspected):
            return container
        if version(container) != fresh.seen.version:
            return Changed("it changed since it was read")
        try:
            await self._engine.delete(f"/containers/{part(container.id)}", force=False, v=False)
        except EngineError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                runs = error.status == CONFLICT and state_of(container) in (State.RUNNING, State.PAUSED)
                return Changed(
                    "it is running, and running containers are not removed; stop it first" if runs else error.words
                )
            return Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted(bytes_back=fresh.size, missed=await self._missed_run(container.id, read_at))

    async def _missed_run(self, id_: str, read_at: datetime) -> str:
        """Whether it was started after our read, according to the engine's events; these outlive the container."""
        filters = {"type": ["container"], "container": [id_], "event": ["start"]}
        since, until = read_at.timestamp(), datetime.now(UTC).timestamp()
        with suppress(EngineError, EngineSilent, TimeoutError):
            async with asyncio.timeout(QUICK.total_seconds()):
                async for event in self._engine.events(filters, since=f"{since:.9f}", until=f"{until:.9f}"):
                    at = datetime.fromtimestamp(event.time_nano / 1e9, UTC)
                    if event.actor.id == id_ and at > read_at:
                        return f"{LOST_RUN} ({at:%H:%M:%S} UTC); its log and files were removed with it"
        return ""

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """A stopped container is started; a removed one is created again from its evidence, and not started."""
        found = await self._records.inspect(ref.uid)
        if isinstance(found, Unknown):
            return found
        if found is not None:
            return await self._start(found, evidence)
        if evidence is None:
            return Refused("it is gone and no evidence of it was captured")
        recipe = recipe_of(evidence)
        if isinstance(recipe, Unknown):
            return Refused(recipe.why)
        try:
            body = {**recipe.body, "Image": await self._image_for(recipe)}
            answer = await self._engine.post("/containers/create", body, name=recipe.name)
            made = reading.decode(answer, type=CreateResponse)
            for network, settings in recipe.networks.items():
                joined = {"Container": made.id, "EndpointConfig": settings}
                await self._engine.post(f"/networks/{part(network)}/connect", joined)
        except EngineError as error:
            return Refused(_why_not_created(error, recipe.body))
        except (EngineSilent, msgspec.DecodeError) as problem:
            return Unknown(str(problem))
        return Accepted()

    async def _image_for(self, recipe: CreateRequest) -> str:
        """The image it was created from: by name if the name still refers to it, otherwise by id."""
        name = str(recipe.body.get("Image") or recipe.image)
        try:
            found = await self._engine.get(f"/images/{part(name)}/json", ImageInspected)
        except EngineError:
            return recipe.image
        return name if found.id == recipe.image else recipe.image

    async def revert_stop(self, ref: Ref, evidence: Evidence) -> None:
        """After an interruption between disabling the restart policy and the stop: restores the policy."""
        found = await self._records.inspect(ref.uid)
        policy = restart_policy(evidence)
        if isinstance(found, Inspected) and state_of(found) in (State.RUNNING, State.PAUSED) and policy is not None:
            now = found.host_config.restart_policy
            if now is None or now.name != policy.get("Name"):
                await self._set_policy(found.id, policy)

    async def _same(self, fresh: Subject) -> Inspected | Changed | Unknown:
        found = await self._records.inspect(fresh.ref.uid)
        if found is None:
            return Changed("it is gone")
        if isinstance(found, Unknown):
            return found
        if incarnation(found) != fresh.seen.incarnation:
            return Changed("it was restarted")
        return found

    async def _disable_restart(self, id_: str) -> Refused | Unknown | None:
        """First, otherwise the engine restarts it as soon as its processes end."""
        try:
            await self._engine.post(f"/containers/{part(id_)}/update", NO_RESTART)
        except EngineError as error:
            return Refused(
                f"its restart policy could not be disabled, so it would be restarted after a stop: {error.words}"
            )
        except EngineSilent as silent:
            return Unknown(str(silent))
        return None

    async def _end_gpu_processes(self, container: Inspected, grace: timedelta) -> None:
        """The engine signals only the first process; processes started by `exec` would be killed without SIGTERM."""
        targets = [
            Target(holder.pid, holder.starttime, container.id)
            for holder in await self._holders(container)
            if holder.pid != container.state.pid
        ]
        if targets:
            await terminate(targets, grace)

    async def _stop(self, id_: str, wait: timedelta) -> ActResult:
        try:
            await self._engine.post(
                f"/containers/{part(id_)}/stop", t=round(wait.total_seconds()), deadline=wait + ENGINE_SLACK
            )
        except EngineError as error:
            if error.status == NOT_MODIFIED:
                return Accepted()
            return Changed("it is gone") if error.status == NOT_FOUND else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted()

    async def _undo_if_it_runs(self, before: Inspected, answer: ActResult) -> None:
        """If a user restarted it during our stop, it keeps running and keeps its restart policy. So does a container
        that could not be stopped. While the engine is still stopping it, the policy does not restart it.
        """
        for pause in RESTARTED_WITHIN:
            await asyncio.sleep(pause)
            now = await self._records.inspect(before.id)
            if not isinstance(now, Inspected):
                return
            failed = not isinstance(answer, Accepted) and state_of(now) in (State.RUNNING, State.PAUSED)
            if failed or incarnation(now) != incarnation(before):
                await self._restore_policy(before)
                return

    async def _restore_policy(self, before: Inspected) -> None:
        policy = before.host_config.restart_policy
        assert policy is not None
        await self._set_policy(before.id, {"Name": policy.name, "MaximumRetryCount": policy.maximum_retry_count})

    async def _set_policy(self, id_: str, policy: Mapping[str, Any]) -> str | None:
        try:
            await self._engine.post(f"/containers/{part(id_)}/update", {"RestartPolicy": policy})
        except (EngineError, EngineSilent) as problem:
            return str(problem)
        return None

    async def _start(self, found: Inspected, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        policy = restart_policy(evidence) if evidence is not None else None
        if policy is not None and (problem := await self._set_policy(found.id, policy)) is not None:
            return Unknown(f"its restart policy could not be restored: {problem}")
        return await self._engine_start(found.id)

    async def _engine_start(self, id_: str) -> Accepted | Refused | Unknown:
        try:
            await self._engine.post(f"/containers/{part(id_)}/start", deadline=QUICK * 3)
        except EngineError as error:
            return Accepted() if error.status == NOT_MODIFIED else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted()


def _why_not_created(error: EngineError, body: Mapping[str, Any]) -> str:
    if error.status == CONFLICT:
        return f"that name is already in use ({error.words})"
    if error.status == NOT_FOUND and "image" in error.words.lower():
        return f"its image {body.get('Image')} does not exist any more; pull or load it, then try again"
    return error.words


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
            if any(_is_running(by_id.get(id_)) for id_ in ids):
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
            if isinstance(other, Unknown) or _is_running(other):
                found = other
        return self._subject(holder, found, around)

    async def end(self, fresh: Subject) -> ActResult:
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
        proof = proof_of_orphan(holder, started, container, self._records.once_had)
        id_ = str(holder.container)
        ended = when(container.state.finished_at) if isinstance(container, Inspected) else None
        first_seen = self._left_since.setdefault(id_, self._clock.now())
        since = ended if isinstance(ended, datetime) else first_seen
        devices = HostSnapshot(around.gpus, {id_: (holder,)}, around.mig_minors).held(id_)
        return translate.orphan_subject(holder, started, since, holders.boot_id(self._proc), proof, devices, self._at())


def proof_of_orphan(
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


def _is_running(container: Inspected | None) -> bool:
    return container is not None and (container.state.running or container.state.restarting)
