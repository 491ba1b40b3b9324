"""From the engine's records to subjects, and which GPUs a container requests, in every form that exists. Pure: no
reads, no clock. A request is a claim on a device; the devices that its processes have open are decisive where it is
silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.clients.docker import (
    CacheEntry,
    ContainerState,
    ContainerSummary,
    DeviceRequest,
    ImageSummary,
    Inspected,
    Network,
    Volume,
    when,
)
from gpukeeper.devices.driver.facts import GpuFacts, resolve_names
from gpukeeper.devices.holders import Holder
from gpukeeper.model import reading
from gpukeeper.model.policy import WITHOUT_GPU
from gpukeeper.model.subject import Crashes, Marks, Outcome, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.model.words import plain
from gpukeeper.platforms.docker.owners import NAMED, Ownership

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICE = frozenset({"", "none", "void"})
MOST_GPUS = 256  # of one request; users may write any number, and no machine has more
LONGEST_REQUEST = 200  # characters of a name
_DEVICE_NODE = re.compile(r"/dev/nvidia([0-9]{1,6})")
_CDI = re.compile(r"(?:runtime\.)?nvidia\.com/(?:gpu|mig)=.+")


class GpuRequest(msgspec.Struct, frozen=True):
    """`names` as the user wrote them; `minors` of device nodes; `how`: the requests, as text."""

    names: tuple[str, ...] = ()
    minors: tuple[int, ...] = ()
    how: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.minors)


def requested_gpus(container: Inspected, default_runtime: str = "") -> GpuRequest:
    host = container.host_config
    names: list[str] = []
    how: list[str] = []
    for request in host.device_requests or ():
        if wanted := _requested(request):
            names += wanted
            how.append(f"{'--device' if request.driver == 'cdi' else '--gpus'} {','.join(wanted)}")
    paths = [device.path_on_host for device in host.devices or ()]
    for path in paths:
        if _CDI.fullmatch(path):
            names.append(path)
            how.append(f"--device {path}")
    minors = tuple(int(found.group(1)) for path in paths if (found := _DEVICE_NODE.fullmatch(path)))
    how += (f"--device /dev/nvidia{minor}" for minor in minors)
    runtime = host.runtime or default_runtime
    if not names and "nvidia" in runtime:
        names += _visible(container.config.env or ())
        how += [f"{VISIBLE}={','.join(names)}"] if names else []
    return GpuRequest(tuple(names), minors, tuple(how))


def devices_of(
    container: Inspected, asks: GpuRequest, held: Iterable[str], inventory: Sequence[GpuFacts] | Unknown
) -> tuple[str, ...] | Unknown:
    """Uuids of what it requested and what it has open. () only if it certainly uses no GPU."""
    open_ = tuple(held)
    if not asks:
        return _sorted(open_)
    if isinstance(inventory, Unknown):
        return Unknown(f"it requests GPUs ({', '.join(asks.how)}), but they could not be resolved: {inventory.why}")
    if not inventory:
        return Unknown(f"it requests GPUs ({', '.join(asks.how)}), but this machine has none")
    found = list(open_)
    for name in dict.fromkeys(asks.names):
        if len(name) > LONGEST_REQUEST:
            return Unknown(f"{name[:40]!r}... is not the name of a GPU")
        uuids = resolve_names(name, inventory)
        if isinstance(uuids, Unknown):
            return uuids
        found += uuids
    by_minor = {gpu.minor: gpu for gpu in inventory if is_known(gpu.minor)}
    for minor in asks.minors:
        gpu = by_minor.get(minor)
        if gpu is None or isinstance(gpu.uuid, Unknown):
            return Unknown(f"it was given /dev/nvidia{minor}, but the driver reports no GPU with that number")
        if isinstance(gpu.slices, Unknown):
            return Unknown(f"it was given /dev/nvidia{minor}, but its slices could not be read: {gpu.slices.why}")
        found += [part.uuid for part in gpu.slices] or [gpu.uuid]
    return _sorted(found)


def _requested(request: DeviceRequest) -> list[str]:
    """A count means the first n GPUs, not any n; -1 means all."""
    if request.driver == "cdi":
        return [one for one in request.device_ids or () if _CDI.fullmatch(one)]
    wants_gpu = any("gpu" in group for group in request.capabilities or ()) or request.driver == "nvidia"
    if not wants_gpu:
        return []
    if request.device_ids:
        return list(request.device_ids)
    return ["all"] if request.count < 0 else [str(index) for index in range(min(request.count, MOST_GPUS))]


def _visible(env: Iterable[str]) -> list[str]:
    """The last value counts, as in any environment; "void" anywhere in it means none. An old CUDA image sets no
    variable and gets all.
    """
    given = dict(one.partition("=")[::2] for one in env)
    if VISIBLE not in given:
        return ["all"] if "CUDA_VERSION" in given and "NVIDIA_REQUIRE_CUDA" not in given else []
    names = [name.strip() for name in given[VISIBLE].split(",")]
    return [] if "void" in names else [name for name in names if name.lower() not in NO_DEVICE]


def _sorted(uuids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(uuids)))


PLATFORM = "docker"
WHOLE_CACHE = "build-cache"  # its uid, too: no entry of the cache has this name
CONTAINER, PROCESS, IMAGE, CACHE = "container", "process", "image", "build cache"
VOLUME, NETWORK = "volume", "network"
BUILT_IN = ("bridge", "host", "none", "podman", "docker_gwbridge")  # networks that an engine makes for itself
NOT_MEASURED = Unknown("not measured")
NEVER = "never started"
KUBELET = "io.kubernetes."
DEV_LABELS = ("devcontainer.", "vsch.", "com.visualstudio.code.devcontainers.")
DEV_IMAGE = "devcontainer.metadata"  # comes with an image, so it proves nothing about a container
COMPOSE_LABEL = "com.docker.compose.project"
ASKS = (("ds01.monitoring", "true"), ("ds01.protected", "true"), ("gpukeeper.io/infrastructure", "true"))
TTL, HOLD_UNTIL = "gpukeeper.io/ttl", "gpukeeper.io/hold-until"
GPU_LABELS = ("ds01.gpu.uuid", "ds01.gpu.uuids")
_CLASS_OF_TYPE = {
    **{one: one for one in ("devcontainer", "compose", "docker", "unknown")},
    **dict.fromkeys(("orchestration", "atomic"), "managed"),
}
KILLED_SOON = timedelta(seconds=90)  # a stop may take a minute between its signal and the end
ANONYMOUS = re.compile(r"[0-9a-f]{64}")


class PlaceAndTime(msgspec.Struct, frozen=True):
    """Where and when it was read."""

    place: str
    now: datetime

    def ref(self, kind: str, name: str, uid: str) -> Ref:
        return Ref(PLATFORM, self.place, kind, name, uid)


class ContainerFacts(msgspec.Struct, frozen=True):
    """What is known about a container besides its own description."""

    asks: GpuRequest
    devices: tuple[str, ...] | Unknown
    slices: tuple[str, ...]
    owned: Ownership
    image_labels: Mapping[str, str] | Unknown
    stopped_at: datetime | None  # time of a request to stop or kill it
    keep_alive: bool | Unknown | None
    keep_alive_shared: tuple[str, ...] = ()  # names of other containers that see the same file
    loses: tuple[str, ...] | Unknown = ()
    crashes: Crashes | None = None


def container_subject(
    container: Inspected, facts: ContainerFacts, at: PlaceAndTime, findings: tuple[str, ...] = ()
) -> Subject:
    state, started, ended = state_of(container), when(container.state.started_at), when(container.state.finished_at)
    over = state is State.ENDED
    outcome = outcome_of(container, facts.stopped_at) if over else None
    created = when(container.created)
    return Subject(
        seen=Seen(
            at.ref(CONTAINER, container.plain_name, container.id), incarnation(container), version(container), at.now
        ),
        state=state,
        owner=facts.owned.owner,
        owner_verified=facts.owned.verified,
        class_=class_of(container, facts),
        created=created if created is not None else Unknown("the engine reports no creation time"),
        started=started,
        ended=ended if over else None,
        previous_end=None if over else ended,
        crashes=facts.crashes if state is State.RUNNING else None,
        outcome=outcome,
        ended_with=_ended_with(container.state) if outcome is Outcome.FAILED else "",
        devices=facts.devices,
        slices=facts.slices,
        size=container.size_rw if container.size_rw is not None else NOT_MEASURED,
        marks=marks_of(container, facts.image_labels, facts.keep_alive),
        evidence=facts.owned.evidence,
        findings=(*facts.owned.findings, *_findings(container, facts), *findings),
        loses=facts.loses,
        goes_when_stopped=container.host_config.auto_remove,
        image=at.ref(IMAGE, container.config.image, container.image) if container.image else None,
        attached=_attached(container, at),
        # Ours come last: a label of the same name cannot make it pass for another image.
        labels={**container.labels, "image": container.config.image, "image_id": container.image},
    )


def is_called(line: ContainerSummary, patterns: Iterable[str]) -> bool:
    """By name, or by label if the pattern is key=value."""
    names = [name.removeprefix("/") for name in line.names or ()]
    labels = [f"{key}={value}" for key, value in (line.labels or {}).items()]
    return any(fnmatchcase(one, pattern) for pattern in patterns for one in (labels if "=" in pattern else names))


def state_of(container: Inspected) -> State | Unknown:
    state = container.state
    if state.status == "removing":
        return State.REMOVING
    if state.paused:
        return State.PAUSED
    if state.running or state.restarting:
        return State.RUNNING
    if state.status in {"created", "configured", "initialized"}:  # the latter two are Podman's
        return State.CREATED
    if state.status in {"exited", "dead", "stopped"}:
        return State.CREATED if when(state.started_at) is None else State.ENDED
    return Unknown(f"the engine reports the unknown state {state.status!r}")


def incarnation(container: Inspected) -> str:
    """The engine updates the start time at every start; as text, since nanoseconds distinguish two starts."""
    return container.state.started_at if when(container.state.started_at) is not None else NEVER


def version(container: Inspected) -> str:
    state = container.state
    return f"{state.status} {state.started_at} {state.finished_at} {container.name}"


def outcome_of(container: Inspected, stopped_at: datetime | None) -> Outcome:
    """An exit code alone does not distinguish a stop from a failure; without an event of a stop it counts as the
    outcome that is kept longer.
    """
    started, ended = when(container.state.started_at), when(container.state.finished_at)
    if isinstance(ended, datetime) and isinstance(started, datetime) and not container.state.oom_killed:
        asked_to = stopped_at is not None and started <= stopped_at and ended - stopped_at <= KILLED_SOON
        if asked_to:
            return Outcome.STOPPED
    return Outcome.SUCCEEDED if container.state.exit_code == 0 and not container.state.error else Outcome.FAILED


def _ended_with(state: ContainerState) -> str:
    return f"exit code {state.exit_code}{', out of memory' if state.oom_killed else ''}"


def class_of(container: Inspected, facts: ContainerFacts) -> str | Unknown:
    """By facts that users cannot choose freely; a policy's match list comes before this."""
    if facts.devices == () and not facts.asks:
        return WITHOUT_GPU
    if isinstance(facts.owned.owner, Unknown):
        return Unknown(f"its owner is unknown ({facts.owned.owner.why})")
    if facts.owned.owner is None or facts.owned.only_claimed:
        return "unknown"  # before all others: a label that any user can set must not keep ownerless work longer
    host = container.host_config
    own = own_labels(container.labels, facts.image_labels)
    published = bool(host.port_bindings or host.publish_all_ports)
    return class_by_labels(own, name=container.plain_name, published=published)


def class_by_labels(own: Mapping[str, str], *, name: str, published: bool) -> str:
    """Of containers with an owner and a GPU. `own`: without the labels of its image. `published`: it serves a port."""
    if any(key.startswith(DEV_LABELS) and key != DEV_IMAGE for key in own):
        return "devcontainer"
    if own.get("ds01.interface") == "api" or own.get("ds01.container_type") == "api":
        return "api"
    # A wrapper for every `docker` command calls all of them managed, so the type comes first.
    by_type = _CLASS_OF_TYPE.get(own.get("ds01.container_type") or own.get("ds01.interface", ""))
    if by_type is None and (own.get("ds01.managed") == "true" or "aime.mlc" in own or NAMED.fullmatch(name)):
        by_type = "managed"
    if by_type is None and COMPOSE_LABEL in own:
        by_type = "compose"
    return "serving" if published and by_type in (None, "docker") else by_type or "docker"


def own_labels(labels: Mapping[str, str], inherited: Mapping[str, str] | Unknown) -> dict[str, str]:
    """Without those that came with the image. An image that cannot be inspected any more may have had none."""
    given = {} if isinstance(inherited, Unknown) else inherited
    return {key: value for key, value in labels.items() if given.get(key) != value}


def marks_of(container: Inspected, inherited: Mapping[str, str] | Unknown, keep_alive: bool | Unknown | None) -> Marks:
    """A TTL shortens the time, so it counts only if the owner set it, not the author of the image."""
    labels = container.labels
    ttl: timedelta | Unknown | None = None
    if TTL in own_labels(labels, inherited):
        ttl = inherited if isinstance(inherited, Unknown) else _span(labels[TTL])
    asks = next((f"{key}={value}" for key, value in ASKS if labels.get(key, "").lower() == value), None)
    # Users can set the label; the cgroup below the kubelet's is made by the kubelet.
    says_pod = any(key.startswith(KUBELET) for key in labels)
    kubelet = says_pod and "kubepods" in container.host_config.cgroup_parent
    if says_pod and not kubelet and asks is None:
        asks = "labels of a pod, without the cgroup of a pod"
    return Marks(
        ttl=ttl,
        hold_until=_moment(labels[HOLD_UNTIL]) if HOLD_UNTIL in labels else None,
        unhold=("create the container again without that label; labels cannot be changed")
        if HOLD_UNTIL in labels
        else "",
        asks_exemption=asks,
        managed_elsewhere="a kubelet, which removes its containers itself" if kubelet else None,
        keep_alive=keep_alive,
    )


def anonymous_volumes(container: Inspected) -> tuple[str, ...]:
    mounts = container.mounts or ()
    return tuple(one.destination for one in mounts if one.type == "volume" and ANONYMOUS.fullmatch(one.name))


def slices_among(devices: tuple[str, ...] | Unknown, inventory: Sequence[GpuFacts] | Unknown) -> tuple[str, ...]:
    if isinstance(devices, Unknown) or isinstance(inventory, Unknown):
        return ()
    parts = {part.uuid for gpu in inventory if is_known(gpu.slices) for part in gpu.slices}
    return tuple(uuid for uuid in devices if uuid in parts)


def _findings(container: Inspected, facts: ContainerFacts) -> Iterable[str]:
    if facts.keep_alive_shared:
        others = ", ".join(facts.keep_alive_shared[:8])
        yield f"its keep-alive file is also that of {others}, and keeps each; to keep one, write its name into the file"
    if isinstance(facts.devices, Unknown):
        yield facts.devices.why
        return
    for key in GPU_LABELS:
        claimed = {one.strip() for one in container.labels.get(key, "").split(",")} - {""}
        if claimed and not claimed <= set(facts.devices):
            wrong = ", ".join(repr(one[:60]) for one in sorted(claimed - set(facts.devices))[:8])
            yield f"label {key} names {wrong}, which it neither requested nor holds"


def _span(text: str) -> timedelta | Unknown:
    try:
        return reading.span(text.strip())
    except ValueError as problem:
        return Unknown(f"{TTL}={text[:40]!r} {problem}; write it like 2h or 1d")


def _moment(text: str) -> datetime | Unknown:
    try:
        return reading.moment(text.strip(), naive_is_utc=True)
    except ValueError as problem:
        return Unknown(f"{HOLD_UNTIL}={text[:40]!r} {problem}; write it like 2026-12-01T18:00:00Z")


# Orphaned processes


def orphan_subject(
    holder: Holder,
    started: datetime,
    left_since: datetime,
    boot: str,
    proof: str | Unknown | None,
    devices: tuple[str, ...] | Unknown,
    at: PlaceAndTime,
) -> Subject:
    comm = "".join(c if c.isprintable() and c != "/" else "?" for c in holder.comm)
    return Subject(
        seen=Seen(at.ref(PROCESS, f"{comm}-{holder.pid}", holder.identity), f"{boot}:{holder.starttime}", "", at.now),
        shape=Shape.ORPHAN,
        state=State.RUNNING,
        owner=None,
        class_="unknown",
        created=left_since,  # as a leftover: processes that run while the container ends are not orphans yet
        started=started,
        devices=devices,
        size=Unknown("it is not on a disk", by_design=True),
        proof=proof,
        labels={"pid": str(holder.pid), "container": str(holder.container)},
    )


# Images and the build cache


def image_subject(
    image: ImageSummary,
    used_by: int,
    last_tagged: datetime | Unknown | None,
    used_at: datetime | None,
    at: PlaceAndTime,
    child: str = "",
) -> Subject:
    """Its build date proves nothing about its use, so it is only shown. `last_used`: when it was last tagged, or when
    an event mentioned it. Such a use begins a new incarnation, so that the ledger counts from it, too. `child`: an
    image that is built on it; then the engine does not remove it.
    """
    last_used: datetime | Unknown | None = last_tagged
    if used_at is not None and not isinstance(last_tagged, Unknown):
        last_used = max(used_at, last_tagged or used_at)
    incarnation_ = image.id if used_at is None else f"{image.id} {used_at.isoformat()}"
    names = sorted(tag for tag in image.repo_tags or () if tag != "<none>:<none>")
    digests = sorted(one for one in image.repo_digests or () if not one.startswith("<none>"))
    short = image.id.removeprefix("sha256:")[:12]
    own = image.size - image.shared_size if image.shared_size >= 0 else image.size
    return Subject(
        seen=Seen(
            at.ref(IMAGE, names[0] if names else f"untagged-{short}", image.id), incarnation_, " ".join(names), at.now
        ),
        shape=Shape.IMAGE,
        state=State.RUNNING if used_by else State.ENDED,
        class_="image",
        created=_built(image.created),
        in_use=used_by > 0,
        last_used=last_used,
        size=own,
        labels={"names": " ".join(names), "digests": " ".join(digests), "used_by": str(used_by), "child": child},
    )


def _built(seconds: int) -> datetime | Unknown:
    """The builder of an image can set any date, even one before the year 1."""
    try:
        return reading.instant(seconds)
    except ValueError:
        return Unknown(f"the image has an invalid creation date ({seconds})")


def cache_subject(entry: CacheEntry, at: PlaceAndTime) -> Subject:
    created = when(entry.created_at)
    used = when(entry.last_used_at or "") or created
    return Subject(
        seen=Seen(at.ref(CACHE, f"cache-{entry.id[:12]}", entry.id), str(entry.usage_count), str(used), at.now),
        shape=Shape.CACHE,
        state=State.RUNNING if entry.in_use else State.ENDED,
        class_="cache",
        created=created if created is not None else Unknown("the engine reports no creation time"),
        in_use=entry.in_use,
        last_used=used if used is not None else Unknown("the engine reports no time of its last use"),
        size=entry.size,
        labels={"type": entry.type, "description": entry.description[:200]},
    )


def whole_cache_subject(entries: Sequence[CacheEntry] | Unknown, at: PlaceAndTime) -> tuple[Subject, ...]:
    """All entries that no build uses now, as one subject to report; none if there are none. It cannot be removed."""
    if isinstance(entries, Unknown):
        return (_whole_cache(entries, entries, {}, at),)
    idle = [cache_subject(entry, at) for entry in entries if not entry.in_use]
    if not idle:
        return ()
    used = [one.last_used for one in idle if isinstance(one.last_used, datetime)]
    last: datetime | Unknown = max(used) if used else Unknown("the engine reports no time of its last use")
    size = sum(entry.size for entry in entries if not entry.in_use)
    return (_whole_cache(size, last, {"pieces": str(len(idle))}, at),)


def _whole_cache(size: int | Unknown, used: datetime | Unknown, labels: Mapping[str, str], at: PlaceAndTime) -> Subject:
    return Subject(
        seen=Seen(at.ref(CACHE, WHOLE_CACHE, WHOLE_CACHE), "", "", at.now),
        shape=Shape.CACHE,
        state=State.ENDED,
        class_="cache",
        created=Unknown("it consists of many entries", by_design=True),
        last_used=used,
        size=size,
        labels=labels,
    )


# Volumes and networks


def volume_ref(name: str, at: PlaceAndTime) -> Ref:
    """The word before the name keeps a volume apart from a container whose id somebody gave it as its name."""
    return at.ref(VOLUME, f"volume-{name[:12]}" if ANONYMOUS.fullmatch(name) else name, f"{VOLUME} {name}")


def volume_subject(
    volume: Volume, used: bool, used_at: datetime | None, at: PlaceAndTime, kept: str | None = None
) -> Subject:
    labels = volume.labels or {}
    if ANONYMOUS.fullmatch(volume.name) is None:  # whatever its labels say
        kept = "it has a name, so it is only reported"
    elif volume.driver != "local" or volume.options or volume.scope not in ("", "local"):
        kept = "its files are not on this host alone, so it is only reported"
    labels = {**labels, "name": volume.name, "driver": volume.driver}
    return _attachable(volume_ref(volume.name, at), volume.created_at, used, used_at, labels, at, kept)


def network_subject(
    network: Network, used: bool, used_at: datetime | None, at: PlaceAndTime, kept: str | None = None
) -> Subject:
    ref, labels = at.ref(NETWORK, plain(network.name), network.id), dict(network.labels or {})
    labels |= {"name": network.name, "driver": network.driver}
    return _attachable(ref, network.created, used, used_at, labels, at, kept)


def _attachable(
    ref: Ref,
    created: str,
    used: bool,
    used_at: datetime | None,
    labels: Mapping[str, str],
    at: PlaceAndTime,
    kept: str | None,
) -> Subject:
    """`used_at`: when an event mentioned it. Unless it is in use now, that begins a new incarnation, as of an image."""
    shape, made, used_at = Shape(ref.kind), when(created), None if used else used_at
    return Subject(
        seen=Seen(ref, created if used_at is None else f"{created} {used_at.isoformat()}", "", at.now),
        shape=shape,
        state=State.RUNNING if used else State.ENDED,
        class_=shape.value,
        created=made if made is not None else Unknown("the engine reports no creation time"),
        in_use=used,
        last_used=used_at,
        size=NOT_MEASURED if shape is Shape.VOLUME else 0,
        kept=kept,
        labels=labels,
    )


def volumes_of(container: Inspected) -> set[str]:
    return {mount.name for mount in container.mounts or () if mount.type == "volume"}


def networks_of(container: Inspected) -> set[str]:
    """Names and ids; one that never started may have only what its user wrote."""
    joined = container.network_settings.networks or {}
    ids = {endpoint.network_id for endpoint in joined.values() if endpoint is not None}
    return {*joined, *ids, container.host_config.network_mode} - {""}


def _attached(container: Inspected, at: PlaceAndTime) -> tuple[Ref, ...]:
    volumes = [volume_ref(name, at) for name in sorted(volumes_of(container))]
    joined = sorted((container.network_settings.networks or {}).items())
    networks = [at.ref(NETWORK, plain(name), one.network_id) for name, one in joined if one and one.network_id]
    return (*volumes, *(ref for ref in networks if ref.name not in BUILT_IN))
