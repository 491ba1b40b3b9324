"""What a cluster has: which of our kinds, in which version, whether that has a TTL field, and its clock.

An OpenAPI description that does not describe the kind proves nothing: Unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

import msgspec

from gpukeeper.clients.kubernetes.api import CACHE_TIME, ServedKinds
from gpukeeper.clients.kubernetes.connect import Cluster
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


SURE = timedelta(minutes=1)  # a kind that was served must be missing this long to count as uninstalled


class ApiDiscovery(ServedKinds):
    """And which version of our kinds is read."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cluster, clock)
        self._seen: set[str] = set()  # kinds that were there
        self._missing: dict[str, float] = {}  # of those: not listed any more since then
        self._with_ttl: dict[str, float] = {}  # kinds whose served version has a TTL field: when that was read

    async def served(self, kind: Kind) -> str | Unknown | None:
        """The version to read it in. None: it is not installed. Unknown: it could not be read."""
        try:
            versions = await self.versions(kind.group)
            if versions is None:
                return self._absent(kind)
            found = [one for one in versions if await self.lists(kind.group, one, kind.plural, kind.kind)]
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
