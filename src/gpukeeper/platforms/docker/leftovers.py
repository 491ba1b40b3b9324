"""Images and the build cache. Each is removed by its id and only while unused; never all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk.usage import usage
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, Changed, Refused, Unseen
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Policy
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Disk, Gone, Subject
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
STATVFS = timedelta(seconds=5)
AN_HOUR, A_MINUTE, A_SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
FILTERED = (1, 39)  # before this version the engine ignores the filters and removes its whole cache


class Leftovers:
    """If the policy does not remove entries of the build cache, it is reported as one subject. That is listed, and the
    bytes that images share are measured, at most once an hour: older engines walk their whole disk for that.
    """

    def __init__(
        self, records: Records, engine: Engine, clock: Clock, at: Callable[[], PlaceAndTime], policy: Policy
    ) -> None:
        self._records, self._engine, self._clock, self._at, self._policy = records, engine, clock, at, policy
        self._layers: int | None = None
        self._listed: tuple[datetime, list[CacheEntry] | Unknown] | None = None
        self._measured: tuple[datetime, dict[str, int]] | None = None

    def follow(self, policy: Policy) -> None:
        self._policy = policy

    async def observe(self, used: Counter[str] | Unknown) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
        subjects: list[Subject] = []
        unseen: list[Unseen] = []
        try:
            images, unread = await self._engine.listed("/images/json", ImageSummary, "image", deadline=SLOW)
            unseen += unread
            if isinstance(used, Unknown):
                unseen.append(Unseen("images", used.why))
            else:
                children, disk, shared = _children(images), await self._disk(), await self._shared()
                for one in images:
                    size = shared.get(one.id, one.shared_size)
                    listed = msgspec.structs.replace(one, shared_size=size)
                    subjects.append(self._image(listed, used[one.id], None, children.get(one.id, ""), disk))
        except (EngineError, EngineSilent) as problem:
            unseen.append(Unseen("images", str(problem)))
        if self._policy.build_cache.unused is not None:
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
            sizes = await self._usage()
        except EngineError as error:
            return Gone(ref, self._clock.now()) if error.is_gone else Unknown(str(error))
        except EngineSilent as silent:
            return Unknown(str(silent))
        if image.id != ref.uid:
            return Gone(ref, self._clock.now())
        self._layers = sizes.layers_size
        measured = next((one for one in sizes.images or () if one.id == image.id), None)
        listed = measured or ImageSummary(image.id, image.repo_tags, image.repo_digests, size=image.size)
        used_by = sum(one.image_id == image.id for one in containers)
        child = _children(sizes.images or ()).get(image.id, "")
        return self._image(listed, used_by, when(image.metadata.last_tag_time), child, await self._disk())

    def _image(
        self, image: ImageSummary, used_by: int, tagged: datetime | Unknown | None, child: str, disk: Disk | None
    ) -> Subject:
        used_at = self._records.image_used_at(image.id, image.repo_tags or ())
        subject = image_subject(image, used_by, tagged, used_at, self._at(), child)
        # With layers of others, the bytes of all images would be more than what they take.
        unmeasured = self._policy.images.above is not None and image.shared_size < 0
        size = Unknown("what it shares with other images is not measured yet") if unmeasured else subject.size
        return msgspec.structs.replace(subject, disk=disk, size=size)

    async def _disk(self) -> Disk | None:
        """Of the engine's data, if the policy has an age for a full one."""
        root = self._records.info.docker_root_dir
        if self._policy.images.under_pressure is None or not (self._engine.local and root):
            return None
        try:
            found = await in_thread(lambda: usage(root), STATVFS)
        except (OSError, TimeoutError):
            return None
        return Disk(found.mount_point, found.used, found.inodes_used)

    async def _shared(self) -> dict[str, int]:
        """By image, bytes of layers that others have, too; only if the policy limits the bytes of all."""
        now = self._clock.now()
        if self._policy.images.above is None:
            return {}
        if self._measured is None or not now - AN_HOUR < self._measured[0] <= now:
            try:
                images = (await self._usage()).images or ()
            except (EngineError, EngineSilent):
                images = ()
            self._measured = now, {one.id: one.shared_size for one in images}
        return self._measured[1]

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
        if again.labels["child"]:
            return Changed(f"{again.labels['child']} is built on it")
        try:
            await self._engine.delete(f"/images/{part(fresh.ref.uid)}", force=False, noprune=True)
        except EngineError as error:
            if error.status == CONFLICT and "multiple repositories" in error.words:
                return Refused(f"it has several names ({again.labels['names']}); remove the unneeded ones by hand")
            if error.status == CONFLICT and "dependent child images" in error.words:
                return Refused("intermediate images of a build, which are not listed, are built on it")
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


def _children(images: Sequence[ImageSummary]) -> dict[str, str]:
    """By the id of an image: one that is built on it."""
    return {one.parent_id: (one.repo_tags or [one.id])[0] for one in images if one.parent_id}
