"""A Docker or Podman engine: its messages, only the parts that are read, and the connection to it, over its unix socket
or DOCKER_HOST. Every call has a timeout; errors are sentences.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from gpukeeper.http_client import CannotConnect, Client, HttpError
from gpukeeper.model import reading
from gpukeeper.model.decision import Unseen
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words


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


NOT_FOUND, FORBIDDEN, CONFLICT, NOT_MODIFIED = 404, 403, 409, 304


class EngineError(PlatformError):
    """The engine responded with an error status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"the engine responded with status {status}: {words}")
        self.status, self.words = status, words

    @property
    def is_gone(self) -> bool:
        """The engine's own message for it. Any other 404 (an unknown path, a proxy) proves nothing."""
        message = self.words.lower()
        return self.status == NOT_FOUND and ("no such" in message or "not known" in message)


class EngineSilent(PlatformError):
    """The engine did not answer, or not in time. The request may have been executed."""


def cannot_connect(address: str, why: str) -> EngineSilent:
    hint = ""
    if "Permission denied" in why or "Errno 13" in why:
        hint = "; run as root, or as a member of the socket's group"
    elif "No such file" in why or "Connection refused" in why:
        hint = "; is it running? If it is on another address, set DOCKER_HOST"
    return EngineSilent(f"the engine at {address} cannot be reached: {why}{hint}")


T = TypeVar("T")
SOCKET = "/var/run/docker.sock"
NEWEST = (1, 48)  # the newest version of the engine's API that we know; an older engine is used in its own version
SHARES_SUMS = (1, 42)
QUICK, SLOW = timedelta(seconds=10), timedelta(seconds=60)
AT_ONCE = 16  # concurrent requests; more does not make an engine faster
MOST = 64 * 1024 * 1024  # bytes of one response
LONGEST_EVENT = 4 * 1024 * 1024  # bytes
REFUSAL = 64 * 1024  # bytes of an error response


def find(environ: Mapping[str, str]) -> str | None:
    """The address of an engine, or None. Checks the usual socket, sends no request.

    DOCKER_HOST always counts: if that engine does not answer, what runs on it is unknown, not absent.
    """
    if address := environ.get("DOCKER_HOST"):
        return address
    address = f"unix://{SOCKET}"
    try:
        return address if Path(SOCKET).is_socket() else None
    except OSError:
        return address  # it may exist and be hidden from us; a request will show it


class Engine:
    """One engine. Connections are open while a caller is inside `opened()`; all calls must come from one event loop."""

    def __init__(self, address: str, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self._environ = environ
        scheme, _, where = address.partition("://")
        if scheme not in {"unix", "tcp", "http", "https"} or not where:
            raise UsageError(f'DOCKER_HOST="{address}" is not unix://PATH or tcp://HOST:PORT')
        self.local = scheme == "unix"
        self.is_podman = False
        self._where = where
        self._client: Client | None = None
        self._users = 0
        self._version = ""
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._measuring = asyncio.Lock()

    @property
    def version(self) -> tuple[int, int]:
        """Version of the API, negotiated with the engine."""
        major, _, minor = self._version.removeprefix("v").partition(".")
        return (int(major), int(minor)) if minor else (0, 0)

    @property
    def host(self) -> str:
        """The machine it runs on, if that is another one."""
        return self._where.partition("/")[0].rpartition(":")[0] or self._where

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The first caller opens the connection, the last one closes it: a one-shot command leaves nothing open."""
        if self._users == 0:
            self._client, self._limit = self._connect(), asyncio.Semaphore(AT_ONCE)
            self._measuring = asyncio.Lock()
        self._users += 1
        try:
            if not self._version:
                self._version = await self._negotiate()
            yield
        finally:
            self._users -= 1
            if self._users == 0 and self._client is not None:
                client, self._client, self._version = self._client, None, ""
                await client.close()

    def measuring(self) -> AbstractAsyncContextManager[object]:
        """While it sums up its disk: an older engine refuses a second such request meanwhile; a newer one answers both
        by one sum (moby #42715)."""
        return self._measuring if self.version < SHARES_SUMS else nullcontext()

    async def get(self, path: str, type_: type[T], *, deadline: timedelta = QUICK, **query: object) -> T:
        return _decode(await self._call("GET", path, deadline, query), type_, path)

    async def listed(
        self, path: str, type_: type[T], what: str, *, deadline: timedelta = QUICK, **query: object
    ) -> tuple[list[T], list[Unseen]]:
        """A list. An entry that cannot be read is reported as unseen; the others are returned."""
        return read_list(await self._call("GET", path, deadline, query), type_, what, path)

    async def raw(self, path: str, *, deadline: timedelta = QUICK, most: int = MOST, **query: object) -> bytes:
        return await self._call("GET", path, deadline, query, most=most)

    async def post(self, path: str, body: object = None, *, deadline: timedelta = QUICK, **query: object) -> bytes:
        return await self._call("POST", path, deadline, query, body)

    async def delete(self, path: str, *, deadline: timedelta = SLOW, **query: object) -> bytes:
        return await self._call("DELETE", path, deadline, query)

    async def events(self, filters: Mapping[str, list[str]], **query: object) -> AsyncGenerator[EngineEvent, None]:
        """Until the engine ends the stream. Without `until` it is endless."""
        parameters = {**query, "filters": msgspec.json.encode(filters).decode()}
        decoder = reading.Decoder(EngineEvent)
        try:
            async with self._opened_client.stream("GET", self._target("/events", parameters)) as answer:
                if answer.status >= 300:
                    raise EngineError(answer.status, _refusal(await answer.read(REFUSAL, cut=True)))
                # An event carries all labels in one line, and users may write long ones.
                async with aclosing(answer.lines(LONGEST_EVENT)) as lines:
                    async for line in lines:
                        if line.strip():
                            yield decoder.decode(line)
        except (HttpError, ValueError) as error:
            raise EngineSilent(f"the engine's events ended: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        deadline: timedelta,
        query: Mapping[str, object],
        body: object = None,
        most: int = MOST,
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        target = self._target(path, query)
        try:
            async with self._limit, asyncio.timeout(deadline.total_seconds()):
                answer = await self._opened_client.request(
                    method, target, headers=headers, body=data, size_max=most, cut=True
                )
        except TimeoutError as error:
            raise EngineSilent(f"the engine did not answer {method} {path} within {in_words(deadline)}") from error
        except CannotConnect as error:
            raise cannot_connect(self.address, str(error)) from error
        except HttpError as error:
            raise EngineSilent(f"the connection to the engine broke during {method} {path}: {error}") from error
        if answer.status >= 300:
            raise EngineError(answer.status, _refusal(answer.body))
        return answer.body

    async def _negotiate(self) -> str:
        """The newest version that both sides support."""
        try:
            async with asyncio.timeout(QUICK.total_seconds()):
                answer = await self._opened_client.request("GET", "/_ping", size_max=REFUSAL, cut=True)
        except TimeoutError as error:
            raise EngineSilent(f"the engine at {self.address} did not answer within {in_words(QUICK)}") from error
        except CannotConnect as error:
            raise cannot_connect(self.address, str(error)) from error
        except HttpError as error:  # another protocol
            raise EngineSilent(f"the server at {self.address} is not a container engine") from error
        major, _, minor = answer.headers.get("api-version", "").partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            raise EngineSilent(f"the server at {self.address} is not a container engine")
        self.is_podman = "libpod-api-version" in answer.headers
        return "v{}.{}".format(*min(NEWEST, (int(major), int(minor))))

    @property
    def _opened_client(self) -> Client:
        assert self._client is not None, "This is a bug in gpukeeper: the engine was not opened."
        return self._client

    def _connect(self) -> Client:
        if self.local:
            return Client("http://engine", unix_socket=self._where)
        try:
            return Client(f"{'https' if self._encrypted else 'http'}://{self._where}", tls=self._tls())
        except ValueError as error:
            raise UsageError(f'DOCKER_HOST="{self.address}" is not unix://PATH or tcp://HOST:PORT') from error

    def _tls(self) -> ssl.SSLContext | None:
        """Like the docker command: DOCKER_TLS_VERIFY and DOCKER_CERT_PATH."""
        directory = self._environ.get("DOCKER_CERT_PATH")
        if not directory or not self._environ.get("DOCKER_TLS_VERIFY"):
            return None  # for https:// the system's certificate authorities decide
        try:
            context = ssl.create_default_context(cafile=str(Path(directory, "ca.pem")))
            context.load_cert_chain(str(Path(directory, "cert.pem")), str(Path(directory, "key.pem")))
        except OSError as error:
            raise UsageError(f"the certificates in DOCKER_CERT_PATH={directory} cannot be read: {error}") from error
        return context

    @property
    def _encrypted(self) -> bool:
        own = self._environ.get("DOCKER_TLS_VERIFY") and self._environ.get("DOCKER_CERT_PATH")
        return bool(own) or self.address.startswith("https://")

    def _target(self, path: str, query: Mapping[str, object]) -> str:
        parameters = urlencode(_query(query))
        return f"/{self._version}{path}" + (f"?{parameters}" if parameters else "")


def part(name: str) -> str:
    """A name or id as one segment of a path, whatever characters it contains."""
    return quote(name, safe="")


def _query(query: Mapping[str, object]) -> dict[str, str]:
    return {
        name: (str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in query.items()
        if value is not None
    }


def _decode(read: bytes, type_: type[T], path: str) -> T:
    try:
        return reading.decode(read, type=type_)
    except msgspec.DecodeError as error:
        raise EngineSilent(f"the engine's response to {path} cannot be read: {error}") from error


def read_list(read: bytes | msgspec.Raw, type_: type[T], what: str, path: str) -> tuple[list[T], list[Unseen]]:
    """All at once; one by one only if one of them cannot be read."""
    try:
        return reading.decode(read, type=list[type_]), []  # type: ignore[valid-type]
    except msgspec.DecodeError:
        entries: list[msgspec.Raw] = _decode(bytes(read), list[msgspec.Raw], path)
    found: list[T] = []
    unseen: list[Unseen] = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(reading.decode(entry, type=type_))
        except msgspec.DecodeError as error:
            name = _name_of(entry) or f"number {number} of {len(entries)}"
            unseen.append(Unseen(f"{what} {name}", f"the engine's description of it cannot be read: {error}"))
    return found, unseen


def _name_of(entry: msgspec.Raw) -> str:
    for key in ("Id", "ID"):
        try:
            return str(reading.decode(entry, type=dict[str, Any])[key])[:80]
        except (KeyError, msgspec.DecodeError):
            continue
    return ""


def _refusal(read: bytes) -> str:
    try:
        return reading.decode(read, type=ErrorResponse).message
    except msgspec.DecodeError:
        return read[:200].decode("utf-8", "replace").strip()
