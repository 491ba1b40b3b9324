"""Images and the build cache. Each is removed by its id and only while unused; never all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Refused, Unseen
from gpukeeper.model.identity import Ref
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.connect import SLOW, Engine, part
from gpukeeper.platforms.docker.errors import CONFLICT, NOT_FOUND, EngineError, EngineSilent
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import (
    WHOLE_CACHE,
    PlaceAndTime,
    cache_subject,
    image_subject,
    whole_cache_subject,
)
from gpukeeper.platforms.docker.wire import (
    CacheEntry,
    ContainerSummary,
    DiskUsage,
    ImageInspected,
    ImageSummary,
    PruneResponse,
    when,
)

MEASURING = timedelta(minutes=3)  # the engine sums up its layers again for each request
AN_HOUR, A_MINUTE, A_SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
FILTERED = (1, 39)  # before this version the engine ignores the filters and removes its whole cache


class Leftovers:
    """`cache`: whether the policy removes entries of the build cache. If not, it is reported as one subject, and listed
    at most once an hour: older engines walk their whole disk for that.
    """

    def __init__(
        self, records: Records, engine: Engine, clock: Clock, at: Callable[[], PlaceAndTime], *, cache: bool
    ) -> None:
        self._records, self._engine, self._clock, self._at, self.cache = records, engine, clock, at, cache
        self._layers: int | None = None
        self._listed: tuple[datetime, list[CacheEntry] | Unknown] | None = None

    async def observe(self, used: Counter[str] | Unknown) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
        subjects: list[Subject] = []
        unseen: list[Unseen] = []
        try:
            images, unread = await self._engine.listed("/images/json", ImageSummary, "image", deadline=SLOW)
            unseen += unread
            if isinstance(used, Unknown):
                unseen.append(Unseen("images", used.why))
            else:
                subjects += [self._image(image, used[image.id], None) for image in images]
        except (EngineError, EngineSilent) as problem:
            unseen.append(Unseen("images", str(problem)))
        if self.cache:
            try:
                subjects += [cache_subject(entry, self._at()) for entry in await self._entries()]
            except (EngineError, EngineSilent) as problem:
                unseen.append(Unseen("the build cache", str(problem)))
        else:
            subjects += await self._whole_cache()
        return tuple(subjects), tuple(unseen)

    async def _whole_cache(self) -> tuple[Subject, ...]:
        """One subject, or none if there is no cache. A subject that is only reported must not make the listing
        incomplete, so a failure makes its size unknown.
        """
        now = self._clock.now()
        if self._listed is None or not now - AN_HOUR < self._listed[0] <= now:
            try:
                self._listed = now, await self._entries()
            except (EngineError, EngineSilent) as problem:
                self._listed = now, Unknown(str(problem))
        return whole_cache_subject(self._listed[1], self._at())

    async def read_image(self, ref: Ref) -> Subject | Gone | Unknown:
        try:
            image = await self._engine.get(f"/images/{part(ref.uid)}/json", ImageInspected)
            containers = await self._engine.get("/containers/json", list[ContainerSummary], all=1, deadline=SLOW)
            usage = await self._usage()
        except EngineError as error:
            return Gone(ref, self._clock.now()) if error.is_gone else Unknown(str(error))
        except EngineSilent as silent:
            return Unknown(str(silent))
        if image.id != ref.uid:
            return Gone(ref, self._clock.now())
        self._layers = usage.layers_size
        measured = next((one for one in usage.images or () if one.id == image.id), None)
        listed = measured or ImageSummary(image.id, image.repo_tags, image.repo_digests, size=image.size)
        used_by = sum(one.image_id == image.id for one in containers)
        return self._image(listed, used_by, when(image.metadata.last_tag_time))

    def _image(self, image: ImageSummary, used_by: int, tagged: datetime | Unknown | None) -> Subject:
        used_at = self._records.image_used_at(image.id, image.repo_tags or ())
        return image_subject(image, used_by, tagged, used_at, self._at())

    async def read_cache(self, ref: Ref) -> Subject | Gone | Unknown:
        if ref.uid == WHOLE_CACHE:
            return next(iter(await self._whole_cache()), Gone(ref, self._clock.now()))
        try:
            entries = await self._entries()
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))
        found = next((entry for entry in entries if entry.id == ref.uid), None)
        return cache_subject(found, self._at()) if found is not None else Gone(ref, self._clock.now())

    async def remove_image(self, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        """By its id, which is its content. The engine refuses if a container uses it or it has a second name."""
        again = await self.read_image(fresh.ref)
        if isinstance(again, Gone):
            return Changed("it is gone")
        if isinstance(again, Unknown):
            return again
        seen = (again.seen.incarnation, again.seen.version)
        if again.in_use or seen != (fresh.seen.incarnation, fresh.seen.version):
            return Changed("it is in use or was used in the meantime, or its names changed")
        try:
            await self._engine.delete(f"/images/{part(fresh.ref.uid)}", force=False, noprune=True)
        except EngineError as error:
            if error.status == CONFLICT and "multiple repositories" in error.words:
                return Refused(f"it has several names ({again.labels['names']}); remove the unneeded ones by hand")
            return Changed(error.words) if error.status in (CONFLICT, NOT_FOUND) else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted(bytes_back=await self._bytes_returned())

    async def remove_cache(self, fresh: Subject) -> Accepted | Changed | Refused | Unknown:
        """One entry, and only if the engine itself confirms that it was not used since our read."""
        if fresh.ref.uid == WHOLE_CACHE:
            return Refused("the build cache is removed entry by entry, as configured by build_cache.unused")
        if not isinstance(fresh.last_used, datetime):
            return Refused("when it was last used is unknown")
        if self._engine.version < FILTERED:
            return Refused("this engine is too old to remove a single cache entry")
        unused = self._clock.now() - fresh.last_used - A_MINUTE
        if unused < A_SECOND:
            return Changed("it was used just now")  # an age of zero would mean no age filter
        filters = {"id": [fresh.ref.uid], "until": [f"{int(unused.total_seconds())}s"]}
        try:
            answer = await self._engine.post(
                "/build/prune", all=True, filters=msgspec.json.encode(filters).decode(), deadline=MEASURING
            )
            pruned = reading.decode(answer, type=PruneResponse)
        except EngineError as error:
            return Refused(error.words)
        except (EngineSilent, msgspec.DecodeError) as problem:
            return Unknown(str(problem))
        if fresh.ref.uid not in (pruned.caches_deleted or ()):
            return Changed("it is in use, or was used in the meantime")
        return Accepted(bytes_back=pruned.space_reclaimed)

    async def _bytes_returned(self) -> int | Unknown:
        """All layers before and after: a layer that other images share is counted once, and stays."""
        before = self._layers
        try:
            after = (await self._usage()).layers_size
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))
        return max(0, before - after) if before is not None else Unknown("not measured before")

    async def _entries(self) -> list[CacheEntry]:
        """An engine of version 1.42 reads nothing else then; an older one ignores the parameter."""
        async with self._engine.measuring():
            found = await self._engine.get("/system/df", DiskUsage, deadline=MEASURING, type="build-cache")
        return found.build_cache or []

    async def _usage(self) -> DiskUsage:
        async with self._engine.measuring():
            return await self._engine.get("/system/df", DiskUsage, deadline=MEASURING)
