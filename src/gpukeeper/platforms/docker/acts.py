"""Stopping, removing, bringing back. Each on exactly the container that was looked at, by id and start."""

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
from gpukeeper.platforms.docker.wire import ImageInspected, Inspected, Made

Answer = Accepted | Changed | Refused | Unknown
FIRST_PROCESS = timedelta(seconds=10)  # between the stop signal and the end at least, as the engine itself gives
ENGINE_SLACK = timedelta(seconds=30)  # the engine tries several ways to end it before it gives up
RESTARTED_WITHIN = (0.0, 0.5, 1.0)  # seconds between looks: a restart is a stop first, and a start a moment later
LOST_RUN = "somebody started it at that very moment, and that run ended before the engine could refuse"
NO_RESTART = {"RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}}


class Acts:
    def __init__(
        self, engine: Engine, records: Records, holders: Callable[[Inspected], Awaitable[Sequence[Holder]]]
    ) -> None:
        self._engine, self._records, self._holders = engine, records, holders

    async def stop(self, fresh: Subject, grace: timedelta) -> Answer:
        """Restart policy off; SIGTERM to the GPU's own processes and time to save; then the engine's stop."""
        container = await self._same(fresh)
        if not isinstance(container, Inspected):
            return container
        if state_of(container) not in (State.RUNNING, State.PAUSED):
            return Changed("it does not run any more")
        policy = container.host_config.restart_policy
        revives = policy is not None and policy.name not in {"", "no"}
        if revives and (problem := await self._switch_off(container.id)) is not None:
            return problem
        self._records.asked_to_stop(container.id, datetime.now(UTC))
        began = asyncio.get_running_loop().time()
        try:
            await self._end_gpu_processes(container, grace)
        except (asyncio.CancelledError, PlatformError):  # we are told to end, or cannot look: it goes on as it was
            if revives:
                await self._give_back_policy(container)
            raise
        waited = timedelta(seconds=asyncio.get_running_loop().time() - began)
        now = await self._same(fresh)
        if not isinstance(now, Inspected):
            if revives:
                await self._give_back_policy(container)
            return now
        answer: Answer = Accepted()
        if state_of(now) in (State.RUNNING, State.PAUSED):
            answer = await self._stop(container.id, max(FIRST_PROCESS, grace - waited))
            if isinstance(answer, Accepted) and await self._hit_another_run(container):
                again = await self._engine_start(container.id)
                done = (
                    "it was started again" if isinstance(again, Accepted) else f"starting it again failed: {again.why}"
                )
                answer = Changed(f"somebody started it anew at that very moment and our stop hit that run; {done}")
        # Otherwise it ended meanwhile, and a stop could only hit whoever is just starting it again.
        if revives:
            await self._undo_if_it_runs(container, answer)
        return answer

    async def _hit_another_run(self, before: Inspected) -> bool:
        """The engine has no stop for one run only: between our look and its act somebody may have restarted it."""
        now = await self._records.inspect(before.id)
        return isinstance(now, Inspected) and state_of(now) is State.ENDED and incarnation(now) != incarnation(before)

    async def remove(self, fresh: Subject) -> Answer:
        """Unforced, so that whoever started it meanwhile wins; unnamed volumes stay.

        The engine has no removal of one state only: a run that begins and ends after our look goes with it. That window
        is as short as we can make it, and what was lost in it is said.
        """
        looked = datetime.now(UTC)
        container = await self._same(fresh)
        if not isinstance(container, Inspected):
            return container
        if version(container) != fresh.seen.version:
            return Changed("it changed since it was looked at")
        try:
            await self._engine.delete(f"/containers/{part(container.id)}", force=False, v=False)
        except EngineError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                runs = error.status == CONFLICT and state_of(container) in (State.RUNNING, State.PAUSED)
                return Changed("it runs, and what runs is not removed; stop it first" if runs else error.words)
            return Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted(bytes_back=fresh.size, missed=await self._missed_run(container.id, looked))

    async def _missed_run(self, id_: str, looked: datetime) -> str:
        """Whether it was started after we looked, as far as the engine's events tell; they outlive the container."""
        filters = {"type": ["container"], "container": [id_], "event": ["start"]}
        since, until = looked.timestamp(), datetime.now(UTC).timestamp()
        with suppress(EngineError, EngineSilent, TimeoutError):
            async with asyncio.timeout(QUICK.total_seconds()):
                async for event in self._engine.events(filters, since=f"{since:.9f}", until=f"{until:.9f}"):
                    at = datetime.fromtimestamp(event.time_nano / 1e9, UTC)
                    if event.actor.id == id_ and at > looked:
                        return f"{LOST_RUN} ({at:%H:%M:%S} UTC); its log and files went with it"
        return ""

    async def bring_back(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        """What was stopped is started; what was removed is made again from its capture, and not started."""
        found = await self._records.inspect(ref.uid)
        if isinstance(found, Unknown):
            return found
        if found is not None:
            return await self._start(found, evidence)
        if evidence is None:
            return Refused("it is gone and nothing was captured of it")
        recipe = archive.recipe(evidence)
        if isinstance(recipe, Unknown):
            return Refused(recipe.why)
        try:
            body = {**recipe.body, "Image": await self._image_for(recipe)}
            answer = await self._engine.post("/containers/create", body, name=recipe.name)
            made = reading.decode(answer, type=Made)
            for network, settings in recipe.networks.items():
                joined = {"Container": made.id, "EndpointConfig": settings}
                await self._engine.post(f"/networks/{part(network)}/connect", joined)
        except EngineError as error:
            return Refused(_not_made(error, recipe.body))
        except (EngineSilent, msgspec.DecodeError) as problem:
            return Unknown(str(problem))
        return Accepted()

    async def _image_for(self, recipe: archive.Recipe) -> str:
        """The image it was made from: by its name where that still means it, else by its id."""
        name = str(recipe.body.get("Image") or recipe.image)
        try:
            found = await self._engine.get(f"/images/{part(name)}/json", ImageInspected)
        except EngineError:
            return recipe.image
        return name if found.id == recipe.image else recipe.image

    async def take_back(self, ref: Ref, evidence: Evidence) -> None:
        """An interruption came between switching the restart policy off and the stop: its owner gets it back."""
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
            return Changed("it was started anew")
        return found

    async def _switch_off(self, id_: str) -> Refused | Unknown | None:
        """First, or the engine starts it again as soon as its processes end."""
        try:
            await self._engine.post(f"/containers/{part(id_)}/update", NO_RESTART)
        except EngineError as error:
            return Refused(f"its restart policy could not be switched off, so a stop would not last: {error.words}")
        except EngineSilent as silent:
            return Unknown(str(silent))
        return None

    async def _end_gpu_processes(self, container: Inspected, grace: timedelta) -> None:
        """The engine signals only the first process; what was started by `exec` would die without a word."""
        targets = [
            Target(holder.pid, holder.starttime, container.id)
            for holder in await self._holders(container)
            if holder.pid != container.state.pid
        ]
        if targets:
            await terminate(targets, grace)

    async def _stop(self, id_: str, wait: timedelta) -> Answer:
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

    async def _undo_if_it_runs(self, before: Inspected, answer: Answer) -> None:
        """A user who restarted it during our stop wins, and keeps the restart policy. So does whoever could not be
        stopped. One that the engine is still stopping does not come back by its policy."""
        for pause in RESTARTED_WITHIN:
            await asyncio.sleep(pause)
            now = await self._records.inspect(before.id)
            if not isinstance(now, Inspected):
                return
            failed = not isinstance(answer, Accepted) and state_of(now) in (State.RUNNING, State.PAUSED)
            if failed or incarnation(now) != incarnation(before):
                await self._give_back_policy(before)
                return

    async def _give_back_policy(self, before: Inspected) -> None:
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
            return Unknown(f"its restart policy could not be given back: {problem}")
        return await self._engine_start(found.id)

    async def _engine_start(self, id_: str) -> Accepted | Refused | Unknown:
        try:
            await self._engine.post(f"/containers/{part(id_)}/start", deadline=QUICK * 3)
        except EngineError as error:
            return Accepted() if error.status == NOT_MODIFIED else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted()


def _not_made(error: EngineError, body: Mapping[str, Any]) -> str:
    if error.status == CONFLICT:
        return f"something of that name exists ({error.words})"
    if error.status == NOT_FOUND and "image" in error.words.lower():
        return f"its image {body.get('Image')} is not here any more; pull or load it, then try again"
    return error.words
