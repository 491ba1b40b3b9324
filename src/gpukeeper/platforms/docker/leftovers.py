"""Images, the build cache, volumes and networks: each removed by its id or name, only while unused, never all at once;
and the bytes of images, of what containers wrote, and of their logs. The engine walks its disk for those, so they
are read rarely, and never by a pass; only the logs of running containers are, for a finding.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.docker import (
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    SLOW,
    CacheEntry,
    ContainerSummary,
    DiskUsage,
    Engine,
    EngineError,
    EngineSilent,
    ImageInspected,
    ImageSummary,
    Inspected,
    Network,
    PruneResponse,
    StorageUsage,
    VolumeList,
    part,
    when,
)
from gpukeeper.disk.mounts import usage
from gpukeeper.model import reading
from gpukeeper.model.decision import Accepted, ActResult, Changed, Evidence, NothingToCapture, Refused, Unseen
from gpukeeper.model.policy import Policy
from gpukeeper.model.ports import Clock, ImageBytes, StorageBytes, WorkloadBytes
from gpukeeper.model.subject import Disk, Gone, Ref, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words
from gpukeeper.platforms.docker.capture import MANIFEST
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import (
    BUILT_IN,
    NETWORK,
    VOLUME,
    WHOLE_CACHE,
    PlaceAndTime,
    cache_subject,
    image_subject,
    network_subject,
    volume_subject,
    whole_cache_subject,
)

SHORT_ID = 12
# It does not refuse to remove a network that a container uses, either.
NO_EVENTS = "Podman does not report when containers use it, so it is only reported"


class Attachments:
    def __init__(self, records: Records, engine: Engine, at: Callable[[], PlaceAndTime], policy: Policy) -> None:
        self._records, self._engine, self._at, self._policy = records, engine, at, policy

    def follow(self, policy: Policy) -> None:
        self._policy = policy

    async def observe(self) -> tuple[tuple[Subject, ...], tuple[Unseen, ...]]:
        """Nothing while a container could not be read: the list is incomplete then, and says so. What is only reported
        must not make a list incomplete: a proxy may allow neither.
        """
        used = self._records.attached()
        if isinstance(used, Unknown):
            return (), ()
        subjects: list[Subject] = []
        unseen: list[Unseen] = []
        policy = self._policy
        for kind, limit in ((VOLUME, policy.volumes.anonymous_unused), (NETWORK, policy.networks.unused)):
            try:
                subjects += await self._list(kind, used)
            except (EngineError, EngineSilent) as problem:
                unseen += [] if limit is None else [Unseen(f"{kind}s", str(problem))]
        return tuple(subjects), tuple(unseen)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        try:
            found = await self._list(ref.kind, set())
            subject = next((one for one in found if one.ref.uid == ref.uid), None)
            if subject is None:
                return Gone(ref, self._at().now)
            asked = [subject.labels["name"], *([ref.uid, ref.uid[:SHORT_ID]] if ref.kind == NETWORK else [])]
            filters = msgspec.json.encode({ref.kind: asked}).decode()
            using = await self._engine.get(
                "/containers/json", list[ContainerSummary], all=1, filters=filters, deadline=SLOW
            )
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))
        return msgspec.structs.replace(subject, state=State.RUNNING, in_use=True) if using else subject

    async def capture(self, subject: Subject) -> Evidence | NothingToCapture | Unknown:
        try:
            return Evidence({MANIFEST: await self._engine.raw(_path(subject.ref))})
        except (EngineError, EngineSilent) as problem:
            return Unknown(str(problem))

    async def remove(self, fresh: Subject) -> ActResult:
        """Unforced: the engine refuses a volume that any container refers to, and a network that a running one uses. A
        stopped container with that network was searched for by the read immediately before.
        """
        policy = self._policy
        limit = policy.volumes.anonymous_unused if fresh.shape is Shape.VOLUME else policy.networks.unused
        if limit is None or fresh.kept is not None:
            return Refused(fresh.kept or f"the policy only reports unused {fresh.shape}s")
        if fresh.in_use is not False:
            return Changed("a workload refers to it")
        try:
            await self._engine.delete(_path(fresh.ref), force=False)
        except EngineError as error:
            changed = error.status in (CONFLICT, FORBIDDEN, NOT_FOUND)
            return Changed(error.words) if changed else Refused(error.words)
        except EngineSilent as silent:
            return Unknown(str(silent))
        return Accepted(bytes_back=0 if fresh.shape is Shape.NETWORK else Unknown("volumes are not measured"))

    async def _list(self, kind: str, used: set[str]) -> list[Subject]:
        at, used_at, kept = self._at(), self._records.used_at, NO_EVENTS if self._engine.is_podman else None
        if kind == VOLUME:
            volumes = (await self._engine.get("/volumes", VolumeList, deadline=SLOW)).volumes or ()
            uids = [f"{VOLUME} {one.name}" for one in volumes]
            return [
                volume_subject(one, uid in used, used_at(uid), at, kept) for one, uid in zip(volumes, uids, strict=True)
            ]
        networks = await self._engine.get("/networks", list[Network], deadline=SLOW)
        return [
            network_subject(one, bool(used & {one.id, one.name, one.id[:SHORT_ID]}), used_at(one.id), at, kept)
            for one in networks
            if one.name not in BUILT_IN and one.scope in ("", "local") and not (one.ingress or one.config_only)
        ]


def _path(ref: Ref) -> str:
    return f"/{ref.kind}s/{part(ref.uid.removeprefix(f'{VOLUME} '))}"


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

    async def remove_image(self, fresh: Subject) -> ActResult:
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

    async def remove_cache(self, fresh: Subject) -> ActResult:
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


# An engine before version 1.42 ignores the types. Volumes are not named: a newer one does not walk them then.
STORAGE_PATH = "/system/df?type=image&type=container&type=build-cache"
ALL_LOGS = timedelta(seconds=30)  # to read the sizes of all log files
ONE_LOG = timedelta(seconds=5)  # the same for a pass, which waits
FLOOD_PERIOD, PACE = timedelta(hours=1), timedelta(minutes=10)  # between two sizes that are compared
LARGE_LOG, FLOOD = 1024**3, 256 * 1024**2  # bytes; bytes per hour
_NOT_LOCAL = Unknown("the engine runs on another machine", by_design=True)
_NOT_READ = Unknown("the container was not inspected yet")
_NO_LOG = "none"  # the log driver that keeps none


async def read_storage(engine: Engine, records: Records, now: datetime) -> StorageBytes:
    """PlatformError: the engine does not return the sizes, or not in time."""
    async with engine.measuring():
        usage = await engine.get(STORAGE_PATH, StorageUsage, deadline=MEASURING)
    containers = usage.containers or ()
    logs = await _log_sizes({one.id: records.known(one.id) for one in containers}, local=engine.local)
    return StorageBytes(
        at=now,
        layers=_layers(usage),
        images=tuple(_image_bytes(one) for one in usage.images or ()),
        workloads=tuple(
            WorkloadBytes(
                next(iter(one.names or ()), one.id[:12]).removeprefix("/"),
                _written(one.size_rw),
                logs[one.id],
            )
            for one in containers
        ),
        cache=None if usage.build_cache is None else _cache_bytes(usage.build_cache),
    )


def _written(size: int | None) -> int | Unknown:
    """The engine leaves out a size of 0, and writes -1 if it could not measure it."""
    return (size or 0) if size is None or size >= 0 else Unknown("the engine could not measure it")


def _layers(usage: StorageUsage) -> int | Unknown:
    if usage.images and usage.layers_size <= 0:
        return Unknown("this engine does not sum up its layers")  # Podman
    return usage.layers_size


def _image_bytes(one: ImageSummary) -> ImageBytes:
    name = next((tag for tag in one.repo_tags or () if tag != "<none>:<none>"), one.id.removeprefix("sha256:")[:12])
    measured = 0 <= one.shared_size <= one.size
    return ImageBytes(name, one.size - one.shared_size if measured else Unknown("shared layers were not measured"))


def _cache_bytes(entries: Iterable[CacheEntry]) -> int:
    """Without what is a layer of an image at the same time."""
    return sum(one.size for one in entries if not one.shared)


async def _log_sizes(containers: Mapping[str, Inspected | None], *, local: bool) -> dict[str, int | Unknown | None]:
    """All files in one thread: a disk that hangs blocks one."""
    found: dict[str, int | Unknown | None] = {}
    paths: dict[str, str] = {}
    for id_, container in containers.items():
        if container is None:
            found[id_] = _NOT_READ
        elif _has_none(container):
            found[id_] = None
        elif not local:
            found[id_] = _NOT_LOCAL
        elif not container.log_path:
            found[id_] = Unknown(f"the log driver {_driver(container)} has no file", by_design=True)
        else:
            paths[id_] = container.log_path
    try:
        return found | await in_thread(lambda: {id_: log_size(path) for id_, path in paths.items()}, ALL_LOGS)
    except TimeoutError:
        return found | dict.fromkeys(paths, Unknown("the sizes of log files could not be read in time"))


class _Log(msgspec.Struct, frozen=True):
    at: datetime
    size: int
    per_hour: float  # bytes, up to `at`
    since: str  # over which time; in words


class LogWatch:
    """Running containers that flood a log which the engine never rotates. For a finding only. Bounded: one entry for
    each container of the last list.
    """

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    async def look(self, containers: Iterable[Inspected], now: datetime) -> None:
        """Once in each list. A disk that hangs gives no finding, and delays nothing for long."""
        growing = {one.id: one for one in containers if one.state.running and one.log_path and _never_rotates(one)}
        paths = {id_: one.log_path or "" for id_, one in growing.items()}
        try:
            sizes = await in_thread(lambda: {id_: log_size(path) for id_, path in paths.items()}, ONE_LOG)
        except TimeoutError:
            sizes = {}
        known = {id_: size for id_, size in sizes.items() if isinstance(size, int)}
        self._logs = {id_: self._measured(growing[id_], size, now) for id_, size in known.items()}

    def finding(self, container: Inspected) -> tuple[str, ...]:
        log = self._logs.get(container.id)
        if log is None or log.size < LARGE_LOG or log.per_hour < FLOOD:
            return ()
        grew = f"its log has {size_in_words(log.size)} and grew by {size_in_words(log.per_hour)} per hour {log.since}"
        advice = "create it with --log-opt max-size=100m --log-opt max-file=3, or set log-opts in daemon.json"
        return (f"{grew}, and the engine never rotates it; {advice}",)

    def _measured(self, container: Inspected, size: int, now: datetime) -> _Log:
        before, created = self._logs.get(container.id), when(container.created)
        if before is not None and now - before.at < PACE:
            return before
        if before is not None:
            span = now - before.at
            return _Log(now, size, (size - before.size) / (span / FLOOD_PERIOD), f"in the last {in_words(span)}")
        age = max(now - created, PACE) if isinstance(created, datetime) else None
        return _Log(now, size, 0 if age is None else size / (age / FLOOD_PERIOD), "since it was created")


def _never_rotates(container: Inspected) -> bool:
    log = container.host_config.log_config
    return log is not None and log.type == "json-file" and "max-size" not in (log.config or {})


def _has_none(container: Inspected) -> bool:
    never_started = not container.log_path and container.state.status == "created"
    return never_started or _driver(container) == _NO_LOG


def _driver(container: Inspected) -> str:
    config = container.host_config.log_config
    return "unknown" if config is None else config.type


def log_size(path: str) -> int | Unknown:
    """With rotated files, which are beside it. Links are not followed."""
    directory, name = os.path.split(path)
    try:
        with os.scandir(directory) as entries:
            mine = [one for one in entries if one.name == name or one.name.startswith(f"{name}.")]
        found = [one.stat(follow_symlinks=False).st_size for one in mine if one.is_file(follow_symlinks=False)]
    except (OSError, ValueError) as error:
        return Unknown(f"its log {path} could not be read: {error}")
    return sum(found) if found else Unknown(f"its log {path} does not exist")
