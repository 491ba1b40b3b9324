"""Whether the served version of a kind has a TTL field, by the OpenAPI description that the server makes of its CRD.

Every login may read that (`system:discovery`). An answer that does not describe the kind proves nothing: Unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.connect import Cluster
from gpukeeper.platforms.kubernetes.kinds.kind import Kind
from gpukeeper.platforms.kubernetes.kinds.ttl import FIELD_TTL, TTL_NAME
from gpukeeper.platforms.kubernetes.wire import Wire


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
