"""What is known about the engine's containers from one read to the next, so that the cost follows the changes.

While the event stream is read, a container is inspected again only if an event or the listing shows that it changed.
Without the stream everything is inspected again. Nothing here is acted on: before a step the engine is queried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.model import reading
from gpukeeper.model.decision import Unseen
from gpukeeper.model.subject import State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.connect import AT_ONCE, SLOW, Engine, part
from gpukeeper.platforms.docker.errors import EngineError, EngineSilent
from gpukeeper.platforms.docker.translate import state_of
from gpukeeper.platforms.docker.wire import ContainerSummary, EngineEvent, ImageInspected, Info, Inspected

ENDING_SIGNALS = frozenset({"2", "3", "6", "9", "15"})
PAST = timedelta(hours=24)  # the engine remembers about 256 events; requested once
PATIENCE = timedelta(seconds=5)
REMEMBERED = 10_000
GIVE_UP = 2 * AT_ONCE  # unanswered requests in one listing
EVENTS = (
    *("create", "start", "die", "stop", "kill", "pause", "unpause", "destroy", "rename", "update", "oom", "restart"),
    *("tag", "untag", "pull", "delete", "import", "load"),
)
USES = frozenset({"create", "start", "die", "destroy", "tag", "pull", "import", "load"})  # of an image
FILTERS: Mapping[str, list[str]] = {"type": ["container", "image"], "event": list(EVENTS)}


class Records:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listed: dict[str, ContainerSummary] = {}
        self._known: dict[str, Inspected] = {}
        self._changed: set[str] = set()
        self._stops: dict[str, datetime] = {}
        self._labels: dict[str, Mapping[str, str] | Unknown] = {}
        self._primed = False
        self._unread = False  # an entry of the listing
        self._destroyed: dict[str, None] = {}
        self._images_used: dict[str, datetime] = {}  # by the name that an event used
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
        self._listed = listed
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

    def images_in_use(self) -> Counter[str] | Unknown:
        """How many containers were created from each image: by the listing, so that a stuck container counts, too."""
        if self._unread:
            return Unknown("an entry of the container list could not be read, so the images in use are unknown")
        return Counter(line.image_id for line in self._listed.values())

    def record_event(self, event: EngineEvent) -> None:
        id_, action = event.actor.id, event.action.partition(":")[0]
        try:
            at = reading.instant(event.time_nano // 1000 / 1e6)
        except (ValueError, OverflowError):
            at = datetime.now(UTC)  # received now; an impossible time must not make it older
        used = event.actor.attributes.get("image", "") if event.type == "container" else id_
        if used and action in USES:
            self._images_used[used] = max(at, self._images_used.get(used, at))
            _at_most(self._images_used, REMEMBERED)
        if event.type != "container":
            return
        self._changed.add(id_)
        if action == "stop" or (action == "kill" and event.actor.attributes.get("signal") in ENDING_SIGNALS):
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
        return max((at for name in called if (at := self._images_used.get(name)) is not None), default=None)

    def stopped_at(self, id_: str) -> datetime | None:
        """When the engine was last requested to end it."""
        return self._stops.get(id_)

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
        for id_ in [one for one in self._stops if one not in self._listed][:-REMEMBERED]:
            del self._stops[id_]

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
        self._primed = True


def _at_most(kept: dict[str, Any], most: int) -> None:
    """Drops the oldest."""
    if len(kept) > most:
        kept.pop(next(iter(kept)))


def _name(line: ContainerSummary) -> str:
    return (line.names or [line.id[:12]])[0].removeprefix("/")
