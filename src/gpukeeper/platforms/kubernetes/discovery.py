"""What a cluster has: which of our kinds, in which version, whether that has a TTL field, and its clock.

That a kind is not installed must be proven, not guessed: a 404 alone may be a proxy's, so the list of all groups
has to lack it, too. An OpenAPI description that does not describe the kind proves nothing: Unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TypeVar, cast

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import NOT_FOUND, ApiError
from gpukeeper.clients.kubernetes.wire import Pod, Root, Wire
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.ports import Clock
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes import translate
from gpukeeper.platforms.kubernetes.kinds.kind import FIELD_TTL, NOT_CHECKED, TTL_NAME, Kind


class _Field(Wire, frozen=True):
    """Its name is enough."""


class _Part(Wire, frozen=True):
    properties: Mapping[str, _Field] = {}


class _Named(Wire, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class _Schema(Wire, frozen=True):
    properties: Mapping[str, _Part] = {}
    named: tuple[_Named, ...] = msgspec.field(default=(), name="x-kubernetes-group-version-kind")


class _Components(Wire, frozen=True):
    schemas: Mapping[str, _Schema] = {}


class _OpenApi(Wire, frozen=True):
    components: _Components = _Components()


async def has_ttl(cluster: Cluster, kind: Kind, version: str) -> bool | Unknown:
    """Whether objects of this kind have `spec.ttlSecondsAfterFinished`."""
    what = f"whether a {kind.kind} of this cluster has {FIELD_TTL} is unknown"
    try:
        found = await cluster.get(f"/openapi/v3/apis/{kind.group}/{version}", _OpenApi)
    except PlatformError as error:
        return Unknown(f"{what}: {error}")
    wanted = _Named(group=kind.group, version=version, kind=kind.kind)
    schema = next((one for one in found.components.schemas.values() if wanted in one.named), _Schema())
    fields = schema.properties.get("spec", _Part()).properties
    if not fields:
        return Unknown(f"{what}: its OpenAPI schema lists no fields of the spec")
    return TTL_NAME in fields


T = TypeVar("T")
CACHE_TIME = timedelta(minutes=10)
SURE = timedelta(minutes=1)  # a kind that was served must be missing this long to count as uninstalled


class _Version(Wire, frozen=True):
    version: str


class _Group(Wire, frozen=True, gc=True):
    kind: str = ""
    name: str = ""
    versions: tuple[_Version, ...] = ()


class _Groups(Wire, frozen=True, gc=True):
    kind: str
    groups: tuple[_Group, ...]


class _Listed(Wire, frozen=True):
    name: str
    kind: str = ""
    namespaced: bool = True


class _Resources(Wire, frozen=True, gc=True):
    kind: str
    group_version: str
    resources: tuple[_Listed, ...] | None


class Resource(Wire, frozen=True):
    """Where any kind is served, whether or not gpukeeper knows it."""

    root: str  # /api/v1 or /apis/GROUP/VERSION
    plural: str
    namespaced: bool

    @property
    def words(self) -> str:
        """As a role names it."""
        group = self.root.removeprefix("/apis/").partition("/")[0] if self.root.startswith("/apis/") else ""
        return f"{self.plural}.{group}" if group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        where = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{self.root}{where}/{self.plural}" + (f"/{name}" if name else "")


class ApiDiscovery:
    """Responses are cached; errors are not."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self._known: dict[str, tuple[float, object]] = {}
        self._seen: set[str] = set()  # kinds that were there
        self._missing: dict[str, float] = {}  # of those: not listed any more since then
        self._with_ttl: dict[str, float] = {}  # kinds whose served version has a TTL field: when that was read

    async def served(self, kind: Kind) -> str | Unknown | None:
        """The version to read it in. None: it is not installed. Unknown: it could not be read."""
        try:
            versions = await self._versions(kind.group)
            if versions is None:
                return self._absent(kind)
            found = [one for one in versions if await self._lists(kind.group, one, kind.plural, kind.kind)]
        except PlatformError as error:
            self._known.clear()  # a contradiction: read everything again
            return Unknown(f"whether the cluster has {kind.plural} is unknown: {error}")
        if best := next((one for one in kind.versions if one in found), None):
            self._seen.add(kind.name)
            self._missing.pop(kind.name, None)
            return best
        if found:
            known = ", ".join(kind.versions)
            return Unknown(f"the cluster serves {kind.plural} in {', '.join(found)}; gpukeeper supports {known}")
        return self._absent(kind)

    async def serves(self, group: str, version: str, plural: str, kind: str) -> bool:
        """Whether a kind, of ours or not, is installed in this version. PlatformError: it could not be read."""
        versions = await self._versions(group)
        return versions is not None and version in versions and await self._lists(group, version, plural, kind)

    async def resource(self, api_version: str, kind: str) -> Resource | Unknown:
        """Of any kind, as an object names it. A version that is not served proves nothing about the object."""
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            page = await self._read(root, _Resources)
        except PlatformError as error:
            return Unknown(f"whether the cluster has {kind} ({api_version}) is unknown: {error}")
        found = next((one for one in page.resources or () if one.kind == kind and "/" not in one.name), None)
        if page.kind != "APIResourceList" or page.group_version != api_version or found is None:
            return Unknown(f"the cluster does not serve {kind} ({api_version})")
        return Resource(root=root, plural=found.name, namespaced=found.namespaced)

    async def ttl_field(self, kind: Kind, items: Iterable[Root | Pod]) -> bool | Unknown:
        """Whether the served version has a TTL field, of a kind whose releases differ in that. Checked where one of
        these names a TTL: a server drops what its CRD does not have, so that the others need no answer. Only a yes is
        remembered; a no contradicts the object."""
        named = (one for one in items if isinstance(one, Root) and kind.ttl_seconds(one.spec) is not None)
        if not kind.ttl_in_crd or next(named, None) is None:
            return NOT_CHECKED
        read = self._with_ttl.get(kind.name)
        if read is not None and self._clock() - read < CACHE_TIME.total_seconds():
            return True
        version = await self.served(kind)
        if not isinstance(version, str):
            return version or NOT_CHECKED
        found = await has_ttl(self._cluster, kind, version)
        if found is True:
            self._with_ttl[kind.name] = self._clock()
        return found

    def _absent(self, kind: Kind) -> Unknown | None:
        """A server that just began does not list everything yet, and one answer must not make a whole kind gone."""
        if kind.name not in self._seen:
            return None
        now = self._clock()
        if now - self._missing.setdefault(kind.name, now) < SURE.total_seconds():
            self._known.clear()
            return Unknown(f"the cluster no longer lists {kind.plural}, which it had; a later pass checks again")
        self._seen.discard(kind.name)
        self._missing.pop(kind.name, None)
        return None

    async def _versions(self, group: str) -> tuple[str, ...] | None:
        """None: there is no such group."""
        if not group:
            return ("v1",)
        try:
            page = await self._read(f"/apis/{group}", _Group)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            everything = await self._read("/apis", _Groups)
            names = {one.name for one in everything.groups}
            if everything.kind != "APIGroupList" or "apps" not in names or group in names:
                raise
            page = _Group(kind="absent", name=group)
            self._known[f"/apis/{group}"] = (self._clock(), page)
        if page.kind == "absent":
            return None
        if page.kind != "APIGroup" or page.name != group or not page.versions:
            raise PlatformError(f"the cluster's response to /apis/{group} does not describe that group")
        return tuple(one.version for one in page.versions)

    async def _lists(self, group: str, version: str, plural: str, kind: str) -> bool:
        place = f"{group}/{version}" if group else version
        path = f"/apis/{place}" if group else f"/api/{version}"
        page = await self._read(path, _Resources)
        if page.kind != "APIResourceList" or page.group_version != place:
            raise PlatformError(f"the cluster's response to {path} does not list what is served there")
        return any(one.name == plural and one.kind == kind for one in page.resources or ())

    async def _read(self, path: str, type_: type[T]) -> T:
        known = self._known.get(path)
        if known is None or self._clock() - known[0] >= CACHE_TIME.total_seconds():
            known = self._known[path] = (self._clock(), await self._cluster.get(path, type_))
        return cast(T, known[1])


WRONG_CLOCK = timedelta(minutes=5)  # beyond this, times cannot be trusted
SLIGHT = timedelta(seconds=2)  # the server's clock is known to the second


class ServerClock:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock

    def now(self) -> datetime:
        """By our clock."""
        return self._clock.now()

    def at(self) -> translate.Observation:
        """By the server's clock, which wrote the times that are compared with it."""
        return translate.Observation(self._cluster.place, self._clock.now() + (self._cluster.skew or timedelta()))

    def check(self) -> None:
        skew = self._cluster.skew
        if skew is not None and abs(skew) > WRONG_CLOCK:
            ahead = "ahead of" if skew > timedelta() else "behind"
            raise PlatformError(
                f"the cluster's clock is {in_words(abs(skew))} {ahead} that of this machine, so its times cannot be"
                " trusted. Nothing was changed. Fix the wrong clock"
            )

    def by_ours(self, subject: Subject) -> Subject:
        """The rules compare with our clock. Where the two differ, whatever keeps longer."""
        skew = self._cluster.skew or timedelta()
        seen = msgspec.structs.replace(subject.seen, at=self._clock.now())
        late = max(-skew, timedelta()) if abs(skew) > SLIGHT else timedelta()
        ended, created = subject.ended, subject.created
        if late and isinstance(ended, datetime):
            ended += late
        if late and isinstance(created, datetime):
            created += late
        return msgspec.structs.replace(subject, seen=seen, ended=ended, created=created)
