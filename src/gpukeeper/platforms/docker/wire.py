"""The engine's messages, only the parts we decide on. Podman uses the same ones."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown


class WireStruct(msgspec.Struct, frozen=True, rename="pascal"):
    """Null and absent are the same for the engine, and so for us: every field has a default."""


class ContainerSummary(WireStruct, frozen=True):
    """One entry of the list: enough to notice a change, not enough to decide."""

    id: str
    names: list[str] | None = None
    image: str = ""
    image_id: str = msgspec.field(name="ImageID", default="")
    state: str = ""
    created: int = 0
    labels: dict[str, str] | None = None
    size_rw: int | None = None


class ContainerState(WireStruct, frozen=True):
    status: str = ""
    running: bool = False
    paused: bool = False
    restarting: bool = False
    oom_killed: bool = msgspec.field(name="OOMKilled", default=False)
    dead: bool = False
    pid: int = 0
    exit_code: int = 0
    error: str = ""
    started_at: str = ""
    finished_at: str = ""


class DeviceRequest(WireStruct, frozen=True):
    driver: str = ""
    count: int = 0
    device_ids: list[str] | None = msgspec.field(name="DeviceIDs", default=None)
    capabilities: list[list[str]] | None = None


class DeviceMapping(WireStruct, frozen=True):
    path_on_host: str = ""


class RestartPolicy(WireStruct, frozen=True):
    name: str = ""
    maximum_retry_count: int = 0


class LogConfig(WireStruct, frozen=True):
    type: str = ""
    config: dict[str, str] | None = None


class HostConfig(WireStruct, frozen=True):
    log_config: LogConfig | None = None
    network_mode: str = ""
    port_bindings: dict[str, Any] | None = None
    publish_all_ports: bool = False
    restart_policy: RestartPolicy | None = None
    auto_remove: bool = False
    cgroup_parent: str = ""
    runtime: str = ""
    devices: list[DeviceMapping] | None = None
    device_requests: list[DeviceRequest] | None = None


class Mount(WireStruct, frozen=True):
    type: str = ""
    name: str = ""
    source: str = ""
    destination: str = ""
    writable: bool = msgspec.field(default=True, name="RW")


class Config(WireStruct, frozen=True):
    user: str = ""
    env: list[str] | None = None
    image: str = ""
    labels: dict[str, str] | None = None
    volumes: dict[str, Any] | None = None
    tty: bool = False


class Endpoint(WireStruct, frozen=True):
    network_id: str = msgspec.field(name="NetworkID", default="")


class NetworkSettings(WireStruct, frozen=True):
    networks: dict[str, Endpoint | None] | None = None  # by name


class Inspected(WireStruct, frozen=True):
    id: str
    name: str = ""
    created: str = ""
    image: str = ""  # the id of the image, not its name
    state: ContainerState = ContainerState()
    restart_count: int = 0
    host_config: HostConfig = HostConfig()
    config: Config = Config()
    mounts: list[Mount] | None = None
    network_settings: NetworkSettings = NetworkSettings()
    size_rw: int | None = None
    log_path: str | None = None

    @property
    def plain_name(self) -> str:
        return self.name.removeprefix("/")

    @property
    def labels(self) -> dict[str, str]:
        return self.config.labels or {}


class ImageSummary(WireStruct, frozen=True):
    id: str
    repo_tags: list[str] | None = None
    repo_digests: list[str] | None = None
    labels: dict[str, str] | None = None
    created: int = 0
    size: int = 0
    shared_size: int = -1
    parent_id: str = ""


class ImageMetadata(WireStruct, frozen=True):
    last_tag_time: str = ""


class ImageInspected(WireStruct, frozen=True):
    id: str
    repo_tags: list[str] | None = None
    repo_digests: list[str] | None = None
    size: int = 0
    metadata: ImageMetadata = ImageMetadata()
    config: Config | None = None


class CacheEntry(WireStruct, frozen=True):
    id: str = msgspec.field(name="ID")
    type: str = ""
    description: str = ""
    in_use: bool = False
    shared: bool = False
    size: int = 0
    created_at: str = ""
    last_used_at: str | None = None
    usage_count: int = 0


class DiskUsage(WireStruct, frozen=True):
    layers_size: int = 0
    images: list[ImageSummary] | None = None
    build_cache: list[CacheEntry] | None = None


class StorageUsage(DiskUsage, frozen=True):
    containers: list[ContainerSummary] | None = None


class EventActor(WireStruct, frozen=True):
    id: str = msgspec.field(name="ID", default="")
    attributes: dict[str, str] = {}


class EngineEvent(WireStruct, frozen=True):
    type: str = ""
    action: str = ""
    actor: EventActor = EventActor()
    time_nano: int = msgspec.field(name="timeNano", default=0)


class Network(WireStruct, frozen=True):
    id: str = ""
    name: str = ""
    created: str = ""
    scope: str = ""
    driver: str = ""
    ingress: bool = False
    config_only: bool = False
    labels: dict[str, str] | None = None


class Volume(WireStruct, frozen=True):
    name: str
    driver: str = ""
    scope: str = ""
    created_at: str = ""
    options: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class VolumeList(WireStruct, frozen=True):
    volumes: list[Volume] | None = None


class Info(WireStruct, frozen=True):
    name: str = ""
    default_runtime: str = ""
    docker_root_dir: str = ""


class PathChange(WireStruct, frozen=True):
    """0 changed, 1 added, 2 deleted."""

    path: str = ""
    kind: int = 0


class CreateResponse(WireStruct, frozen=True):
    """The response to a creation."""

    id: str


class PruneResponse(WireStruct, frozen=True):
    caches_deleted: list[str] | None = None
    space_reclaimed: int = 0


class ErrorResponse(msgspec.Struct, frozen=True):
    """The message of an error response."""

    message: str = ""


def when(text: str) -> datetime | Unknown | None:
    """The engine's times are UTC with trimmed nanoseconds; its zero is the year 1 and means "never"."""
    if not text or text.startswith("0001-"):
        return None
    try:
        return reading.moment(text)
    except ValueError as problem:
        return Unknown(f"the engine returned a time that {problem} ({text[:40]!r})")
