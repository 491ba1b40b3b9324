"""Why does it still exist? Reads everything about one object; causes.py turns that into sentences.

Reads only: up to its root and down to its pods, the controllers of these kinds, their logs, and its Events.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from gpukeeper.model.diagnosis import Cause, Diagnosis
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.causes import causes
from gpukeeper.platforms.kubernetes.controllers import Controllers
from gpukeeper.platforms.kubernetes.diagnosis_facts import DiagnosisFacts
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.finalizers import controllers_of
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, NoRuntime, RuntimeTtl, TreeNode
from gpukeeper.platforms.kubernetes.kinds.ttl import NOT_CHECKED
from gpukeeper.platforms.kubernetes.outline import outline
from gpukeeper.platforms.kubernetes.owners import Served, climb, descendants
from gpukeeper.platforms.kubernetes.phrases import ago, cut
from gpukeeper.platforms.kubernetes.schema import has_ttl
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Root, Spec, Wire, when

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

EVENTS = 5
NAMES = 30  # searched in logs


class _JobSetTemplate(Wire, frozen=True):
    spec: Spec = Spec()


class _RuntimeSpec(Wire, frozen=True):
    template: _JobSetTemplate = _JobSetTemplate()


class _Runtime(Wire, frozen=True):
    spec: _RuntimeSpec = _RuntimeSpec()


class _Event(Wire, frozen=True):
    metadata: Meta = Meta()
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def at(self) -> datetime | None:
        times = (when(self.last_timestamp), when(self.event_time), when(self.metadata.creation_timestamp))
        return next((one for one in times if isinstance(one, datetime)), None)


async def diagnose(
    cluster: Cluster, served: Served, ref: Ref, now: datetime, controllers: Controllers | None = None
) -> Diagnosis | Unknown:
    """`now` is the server's. `controllers` should live as long as the platform: its second check proves more."""
    kind = BY_NAME.get(ref.kind)
    if kind is None:
        return Unknown(f"gpukeeper does not support the kind {ref.kind}")
    version = await served(kind)
    if version is None:
        return Unknown(f"this cluster does not serve {kind.kind}")
    if isinstance(version, Unknown):
        return version
    try:
        seen = await _read(cluster, kind, version, ref)
    except ApiError as error:
        if error.is_not_found:
            return Diagnosis((), (Cause(f"{ref.kind}/{ref.name} no longer exists"),))
        return Unknown(f"{ref.kind}/{ref.name} could not be read: {error}")
    except PlatformError as error:
        return Unknown(f"{ref.kind}/{ref.name} could not be read: {error}")
    if ref.uid and seen.metadata.uid != ref.uid:
        words = (
            f"it no longer exists; another {kind.kind} with its name was created at {seen.metadata.creation_timestamp}"
        )
        return Diagnosis((), (Cause(words, f"Inspect that one: its uid is {seen.metadata.uid}"),))
    facts = await gather(cluster, served, TreeNode(kind, seen), now, controllers or Controllers(cluster))
    return Diagnosis(tuple(outline(facts)), tuple(causes(facts)))


async def _read(cluster: Cluster, kind: Kind, version: str, ref: Ref) -> Root | Pod:
    path = kind.path(version, ref.namespace, ref.name)
    return await cluster.get(path, kind.type_)


async def gather(
    cluster: Cluster, served: Served, node: TreeNode, now: datetime, controllers: Controllers
) -> DiagnosisFacts:
    """Everything that a diagnosis needs."""
    climbed = await climb(cluster, served, node.meta)
    top = climbed.above[-1] if climbed.above else node
    below = await descendants(cluster, served, top.kind, top.meta)
    chain = (top, *climbed.above, node, *below.every())
    wanted = dict.fromkeys([one.kind.controller for one in chain] + [c for n in chain for c in controllers_of(n.meta)])
    reports = {one.name: await controllers.report(one, now) for one in wanted}
    names = list(dict.fromkeys(one.meta.name for one in chain))[:NAMES]
    return DiagnosisFacts(
        node=node,
        top=top,
        climb=climbed,
        below=below,
        reports=reports,
        now=now,
        runtime=await _runtime_ttl(cluster, served, top),
        ttl_field=await _ttl_field(cluster, served, chain),
        events=await _events(cluster, node.meta, now),
        clashes={
            name: await controllers.clashes(report, names)
            for name, report in reports.items()
            if report.controller.deployments
        },
    )


async def _ttl_field(cluster: Cluster, served: Served, chain: Iterable[TreeNode]) -> bool | Unknown:
    """Read only if one of them is of a kind whose releases differ."""
    kind = next((one.kind for one in chain if one.kind.ttl_in_crd), None)
    version = None if kind is None else await served(kind)
    if kind is None or version is None:
        return NOT_CHECKED
    if isinstance(version, Unknown):
        return version
    return await has_ttl(cluster, kind, version)


async def _runtime_ttl(cluster: Cluster, served: Served, top: TreeNode) -> RuntimeTtl | NoRuntime | Unknown | None:
    named = top.kind.runtime(top.seen) if isinstance(top.seen, Root) else None
    if named is None:
        return None
    version = await served(top.kind)
    if not isinstance(version, str):
        return Unknown("its runtime could not be read: the served version is unknown")
    where = f"/namespaces/{top.meta.namespace}" if named.namespaced else ""
    try:
        path = f"/apis/{top.kind.group}/{version}{where}/{named.plural}/{named.name}"
        runtime = await _read_runtime(cluster, path)
    except PlatformError as error:
        return Unknown(f"its runtime could not be read: {error}")
    if runtime is None:
        return NoRuntime(named.kind, named.name, named.namespaced)
    seconds = runtime.spec.template.spec.ttl_seconds_after_finished
    return None if seconds is None else RuntimeTtl(f"{named.kind} {named.name}", seconds)


async def _read_runtime(cluster: Cluster, path: str) -> _Runtime | None:
    """None: it provably does not exist."""
    try:
        return await cluster.get(path, _Runtime)
    except ApiError as error:
        if error.is_not_found:
            return None
        raise


async def _events(cluster: Cluster, meta: Meta, now: datetime) -> tuple[str, ...] | Unknown:
    """The newest first. They expire, after an hour as a rule."""
    found: list[tuple[datetime, _Event]] = []
    path = f"/api/v1/namespaces/{meta.namespace}/events"
    try:
        async for page in cluster.pages(path, _Event, fieldSelector=f"involvedObject.uid={meta.uid}"):
            found += [(at, one) for one in page.items if (at := one.at) is not None]
            found = sorted(found, key=lambda pair: pair[0], reverse=True)[:EVENTS]
    except PlatformError as error:
        return Unknown(f"its Events could not be read: {error}")
    return tuple(f"Event, {ago(at, now)}: {one.type} {one.reason}: {cut(one.message)}" for at, one in found)
