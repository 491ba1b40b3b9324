"""What is known about the engine's containers from one read to the next, so that the cost follows the changes.

While the event stream is read, a container is inspected again only if an event or the listing shows that it changed.
Without the stream everything is inspected again. Nothing here is acted on: before a step the engine is queried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.clients.docker import (
    AT_ONCE,
    SLOW,
    ContainerSummary,
    Engine,
    EngineError,
    EngineEvent,
    EngineSilent,
    ImageInspected,
    Info,
    Inspected,
    Network,
    part,
    when,
)
from gpukeeper.model import reading
from gpukeeper.model.decision import Unseen
from gpukeeper.model.subject import Crashes, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.translate import NETWORK, VOLUME, networks_of, state_of, volumes_of

ENDING_SIGNALS = frozenset({"2", "3", "6", "9", "15"})
PAST = timedelta(hours=24)  # the engine remembers about 256 events; requested once
PATIENCE = timedelta(seconds=5)
LONGER_RUN = timedelta(minutes=10)  # what ran so long between two failures is in no row of them
SHUTDOWN = timedelta(minutes=15)  # between the end of containers and the next start of the engine: a reboot, an upgrade
BRIDGE = "/networks/bridge"  # made anew whenever the engine starts and no container runs
REMEMBERED = 10_000
GIVE_UP = 2 * AT_ONCE  # unanswered requests in one listing
EVENTS = (
    "died",  # what Podman's filter calls "die"
    *("create", "start", "die", "stop", "kill", "pause", "unpause", "destroy", "rename", "update", "oom", "restart"),
    *("tag", "untag", "pull", "delete", "import", "load"),
    *("mount", "unmount", "connect", "disconnect"),
)
# Of an image, a volume or a network.
USES = frozenset({"create", "start", "die", "destroy", "tag", "pull", "import", "load", *EVENTS[-4:]})
FILTERS: Mapping[str, list[str]] = {"type": ["container", "image", VOLUME, NETWORK], "event": list(EVENTS)}


class Records:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listed: dict[str, ContainerSummary] = {}
        self._known: dict[str, Inspected] = {}
        self._changed: set[str] = set()
        self._stops: dict[str, datetime] = {}
        self._died: dict[str, datetime] = {}
        self._crashes: dict[str, Crashes] = {}
        self._engine_started: datetime | None = None
        self._labels: dict[str, Mapping[str, str] | Unknown] = {}
        self._primed = False
        self._unread = False  # an entry of the listing
        self._not_inspected = True  # a container of it, or such an entry
        self._destroyed: dict[str, None] = {}
        self._used: dict[str, datetime] = {}  # by the name that an event used; volumes and networks, too
        self._missing: dict[str, Inspected] = {}  # not listed any more, without an event
        self.hearing = False  # events are read, without a gap since everything was last inspected
        self.once_had: dict[str, Inspected] = {}  # containers that existed and are gone: their leftovers belong to them
        self.info = Info()

    async def refresh(self) -> tuple[list[Inspected], list[Unseen]]:
        """Every container, and those that could not be inspected. PlatformError if there is not even a listing."""
        if not self._primed:
            await self._prime()
        found, unseen = await self._engine.listed(
            "/containers/json", ContainerSummary, "container", all=1, deadline=SLOW
        )
        listed, self._unread = {one.id: one for one in found}, bool(unseen)
        stale = [id_ for id_, line in listed.items() if not self._fresh(id_, line)]
        answers = await self._inspect_all(stale)
        self._changed &= listed.keys()
        await self._drop([id_ for id_ in self._known if id_ not in listed])
        for id_, answer in zip(stale, answers, strict=True):
            if isinstance(answer, Unknown):
                self._known.pop(id_, None)
                unseen.append(Unseen(_name(listed[id_]), answer.why))
        self._listed, self._not_inspected = listed, bool(unseen)
        self._forget_images()
        return [self._known[id_] for id_ in listed if id_ in self._known], unseen

    async def inspect(self, id_: str) -> Inspected | Unknown | None:
        """One container as it is now. None: it is gone. Unknown: it could not be inspected; others can."""
        self._changed.discard(id_)  # before the request: what changes in the meantime is inspected again
        try:
            found = await self._engine.get(f"/containers/{part(id_)}/json", Inspected)
        except EngineError as error:
            if error.is_gone:
                return None
            self._changed.add(id_)
            return Unknown(str(error))
        except EngineSilent as silent:
            self._changed.add(id_)
            return Unknown(str(silent))
        if found.id != id_:
            return None  # another container has a name that looks like this id
        self._known[id_] = found
        return found

    def known(self, id_: str) -> Inspected | None:
        """As last inspected."""
        return self._known.get(id_)

    def all_known(self) -> Iterable[Inspected]:
        return self._known.values()

    def images_in_use(self) -> Counter[str] | Unknown:
        """How many containers were created from each image: by the listing, so that a stuck container counts, too."""
        if self._unread:
            return Unknown("an entry of the container list could not be read, so the images in use are unknown")
        return Counter(line.image_id for line in self._listed.values())

    def attached(self) -> set[str] | Unknown:
        """Volumes (`volume NAME`) and networks (names and ids) that containers refer to, whatever their state."""
        if self._not_inspected:
            return Unknown("a container could not be read, so the volumes and networks in use are unknown")
        return {
            found
            for one in (self._known[id_] for id_ in self._listed if id_ in self._known)
            for found in (*(f"{VOLUME} {name}" for name in volumes_of(one)), *networks_of(one))
        }

    def record_event(self, event: EngineEvent) -> None:
        id_, action = event.actor.id, event.action.partition(":")[0]
        try:
            at = reading.instant(event.time_nano // 1000 / 1e6)
        except (ValueError, OverflowError):
            at = datetime.now(UTC)  # received now; an impossible time must not make it older
        used = event.actor.attributes.get("image", "") if event.type == "container" else id_
        if event.type == VOLUME:
            used = f"{VOLUME} {id_}"
        if used and action in USES:
            self._used[used] = max(at, self._used.get(used, at))
            _at_most(self._used, REMEMBERED)
        if event.type != "container":
            return
        self._changed.add(id_)
        if action == "die":
            self._record_end(id_, at, event.actor.attributes.get("exitCode", ""))
        elif action == "stop" or (action == "kill" and event.actor.attributes.get("signal") in ENDING_SIGNALS):
            self._end_row(id_, at)
            # The signal, if one was reported: the event "stop" comes after the end.
            if action == "kill" or id_ not in self._stops:
                self._stops[id_] = at
        elif action in {"start", "destroy"}:
            self._stops.pop(id_, None)
        if action == "destroy":
            self._destroyed[id_] = None
            _at_most(self._destroyed, REMEMBERED)
            if id_ in self._missing:
                self._remember_gone(id_, self._missing.pop(id_))

    def record_stop(self, id_: str, at: datetime) -> None:
        """By us: its first process may end by itself once the others got SIGTERM, and no event gives the reason."""
        self._stops[id_] = at

    def image_used_at(self, id_: str, names: Sequence[str]) -> datetime | None:
        """When the last event mentioned it: of a container of it that may have existed between two listings, or of the
        image being pulled or tagged.
        """
        bare = id_.removeprefix("sha256:")
        called = {id_, bare, bare[:12], *names, *(name.removesuffix(":latest") for name in names)}
        return max((at for name in called if (at := self._used.get(name)) is not None), default=None)

    def used_at(self, uid: str) -> datetime | None:
        """When the last event mentioned this volume or network."""
        return self._used.get(uid)

    def stopped_at(self, container: Inspected) -> datetime | None:
        """When the engine was last requested to end it. An engine that shuts down ends its containers, and what it
        reported of that is lost: what succeeded just before a start of the engine, without a report, was stopped by it.
        """
        known, engine = self._stops.get(container.id), self._engine_started
        ended, started = when(container.state.finished_at), when(container.state.started_at)
        if known is not None or engine is None or container.state.exit_code or state_of(container) is not State.ENDED:
            return known
        if not isinstance(ended, datetime) or not isinstance(started, datetime):
            return known
        died = self._died.get(container.id)
        reported = died is not None and died >= started
        return ended if not reported and engine - SHUTDOWN <= ended <= engine else known

    def crashes(self, container: Inspected) -> Crashes | None:
        """Failures in a row after which the engine started it again, by its restart policy."""
        row, policy = self._crashes.get(container.id), container.host_config.restart_policy
        if row is None or policy is None or policy.name in {"", "no"} or container.restart_count == 0:
            return None
        return Crashes(min(row.count, container.restart_count), row.first, row.last)

    def _record_end(self, id_: str, at: datetime, exit_code: str) -> None:
        self._died[id_] = max(at, self._died.get(id_, at))
        if exit_code in {"", "0"} or id_ in self._stops:
            self._end_row(id_, at)
            return
        row = self._crashes.get(id_)
        if row is None or at - row.last > LONGER_RUN:
            self._crashes[id_] = Crashes(1, at, at)
        elif at > row.last:  # the engine repeats events
            self._crashes[id_] = Crashes(row.count + 1, row.first, at)

    def _end_row(self, id_: str, at: datetime) -> None:
        if id_ in self._crashes and at > self._crashes[id_].last:
            del self._crashes[id_]

    async def image_labels(self, image: str) -> Mapping[str, str] | Unknown:
        """What a container inherited. An image never changes, so it is inspected once."""
        if image not in self._labels:
            try:
                found = await self._engine.get(f"/images/{part(image)}/json", ImageInspected)
            except (EngineError, EngineSilent) as problem:
                return Unknown(f"its image cannot be inspected: {problem}")
            labels = found.config.labels if found.config is not None else None
            self._labels[image] = labels or {}
        return self._labels[image]

    def forget(self) -> None:
        """After a gap in the events: everything is inspected again."""
        self.hearing, self._primed = False, False
        self._changed |= self._known.keys()

    def _fresh(self, id_: str, line: ContainerSummary) -> bool:
        return self.hearing and id_ in self._known and id_ not in self._changed and self._listed.get(id_) == line

    async def _inspect_all(self, ids: Sequence[str]) -> list[Inspected | Unknown | None]:
        """All at once, so that a stuck one blocks no other; if most are stuck, the engine is the problem, and the rest
        is skipped.
        """
        limit, silent = asyncio.Semaphore(AT_ONCE), 0

        async def inspect_one(id_: str) -> Inspected | Unknown | None:
            nonlocal silent
            async with limit:
                if silent >= GIVE_UP:
                    return Unknown(f"not inspected: the engine did not answer {silent} other requests")
                answer = await self.inspect(id_)
                silent += isinstance(answer, Unknown)
                return answer

        return await asyncio.gather(*(inspect_one(id_) for id_ in ids))

    async def _drop(self, ids: Sequence[str]) -> None:
        """That the engine does not list it does not prove that it was removed: an engine that was given another data
        directory, or lost a description, does not know what still runs. It ended, or its removal was reported.
        """
        if ids and not self.hearing:
            await self._prime()
        for id_ in ids:
            gone = self._known.pop(id_, None)
            if gone is None:
                continue  # another read was faster
            if id_ in self._destroyed or state_of(gone) is State.ENDED:
                self._remember_gone(id_, gone)
            else:
                self._missing[id_] = gone
                _at_most(self._missing, REMEMBERED)

    def _forget_images(self) -> None:
        """Records of images that no container uses any more. And of stops: the removal of a container may not have been
        reported.
        """
        used = {one.image for one in self._known.values()}
        self._labels = {image: labels for image, labels in self._labels.items() if image in used}
        for remembered in (self._stops, self._died, self._crashes):
            for id_ in [one for one in remembered if one not in self._listed][:-REMEMBERED]:
                del remembered[id_]

    def _remember_gone(self, id_: str, gone: Inspected) -> None:
        self.once_had[id_] = gone
        _at_most(self.once_had, REMEMBERED)

    async def _prime(self) -> None:
        """The stops that the engine still remembers, and its settings. Without them objects are only kept longer."""
        now = datetime.now(UTC)
        with suppress(EngineError, EngineSilent, TimeoutError):
            async with asyncio.timeout(PATIENCE.total_seconds()):
                self.info = await self._engine.get("/info", Info)
                since, until = (now - PAST).timestamp(), now.timestamp()
                async for event in self._engine.events(FILTERS, since=f"{since:.9f}", until=f"{until:.9f}"):
                    self.record_event(event)
        with suppress(EngineError, EngineSilent):
            started = when((await self._engine.get(BRIDGE, Network)).created)
            self._engine_started = started if isinstance(started, datetime) else None
        self._primed = True


def _at_most(kept: dict[str, Any], most: int) -> None:
    """Drops the oldest."""
    if len(kept) > most:
        kept.pop(next(iter(kept)))


def _name(line: ContainerSummary) -> str:
    return (line.names or [line.id[:12]])[0].removeprefix("/")
