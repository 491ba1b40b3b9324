"""Stopping, removing and restoring containers. Each action is tied to the container that was read, by id and start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.devices.holders import Holder
from gpukeeper.devices.signals import Target, terminate
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Evidence, Refused
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker import archive
from gpukeeper.platforms.docker.connect import QUICK, Engine, part
from gpukeeper.platforms.docker.errors import CONFLICT, NOT_FOUND, NOT_MODIFIED, EngineError, EngineSilent
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import incarnation, state_of, version
from gpukeeper.platforms.docker.wire import CreateResponse, ImageInspected, Inspected

ActionResult = Accepted | Changed | Refused | Unknown
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

    async def stop(self, fresh: Subject, grace: timedelta) -> ActionResult:
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
        answer: ActionResult = Accepted()
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

    async def remove(self, fresh: Subject) -> ActionResult:
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
        recipe = archive.recipe(evidence)
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

    async def _image_for(self, recipe: archive.CreateRequest) -> str:
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
        policy = archive.restart_policy(evidence)
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

    async def _stop(self, id_: str, wait: timedelta) -> ActionResult:
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

    async def _undo_if_it_runs(self, before: Inspected, answer: ActionResult) -> None:
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
        policy = archive.restart_policy(evidence) if evidence is not None else None
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
