"""Why does it still exist? Reads everything about one object; causes.py turns that into sentences. Reads only: up to
its root and down to its pods, the controllers of these kinds (Deployment, Lease, log; finalizers.py evaluates
them), and its Events. A failed request is Unknown, and so is a controller without a trace: it may run outside the
cluster. Down needs two checks: no replica is wanted, and the Lease was not renewed in between. The times in a Lease
are of another clock, so the time at which gpukeeper saw it change counts most.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Event, Meta, Pod, Root, Spec, Wire
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.subject import Cause, Diagnosis, Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.causes import DiagnosisFacts, causes, outline
from gpukeeper.platforms.kubernetes.discovery import has_ttl
from gpukeeper.platforms.kubernetes.finalizers import (
    ControllerDeployment,
    ControllerLease,
    ControllerReport,
    ControllerState,
    clashes_in,
    controllers_of,
    state_of_controller,
)
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME
from gpukeeper.platforms.kubernetes.kinds.kind import (
    NOT_CHECKED,
    Controller,
    Kind,
    NoRuntime,
    RuntimeTtl,
    Served,
    TreeNode,
    ago,
    cut,
)
from gpukeeper.platforms.kubernetes.owners import climb, descendants

if TYPE_CHECKING:
    from gpukeeper.clients.kubernetes.connect import Cluster


T = TypeVar("T")
CACHE_SECONDS = 5.0  # how long a report is reused
LINES, LOG_BYTES = 2000, 4 * 1024 * 1024
LOG_PODS = 3


class _FirstSeen(msgspec.Struct, frozen=True):
    """What a check found, and when it was first found unchanged."""

    leases: tuple[object, ...]
    installed: tuple[object, ...]
    since: float


class Controllers:
    """Of one cluster. Keeps what was seen and since when, for the second check."""

    def __init__(self, cluster: Cluster, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._monotonic = monotonic
        self._first_seen: dict[str, _FirstSeen] = {}  # by name
        self._last: dict[str, tuple[ControllerReport, float]] = {}

    async def state(self, controller: Controller, now: datetime) -> ControllerState:
        return (await self.report(controller, now)).controller_state

    async def report(self, controller: Controller, now: datetime) -> ControllerReport:
        """`now`: the server's clock."""
        at = self._monotonic()
        last = self._last.get(controller.name)
        if last is not None and at - last[1] < CACHE_SECONDS:
            return last[0]
        found = await self._read_state(controller)
        still, changed = self._unchanged(found, at)
        report = msgspec.structs.replace(
            found, controller_state=state_of_controller(found, now, still, changed=changed)
        )
        self._last[controller.name] = report, at
        return report

    def _unchanged(self, found: ControllerReport, at: float) -> tuple[timedelta, bool]:
        """For how long it has been as it is now, and whether its Lease changed since the last check."""
        leases = tuple((one.metadata.uid, one.metadata.resource_version, one.spec.renew_time) for one in found.leases)
        installed = tuple((one.metadata.uid, one.wanted, one.there) for one in found.installed)
        before = self._first_seen.get(found.controller.name)
        if before is not None and (before.leases, before.installed) == (leases, installed):
            return timedelta(seconds=at - before.since), False
        self._first_seen[found.controller.name] = _FirstSeen(leases, installed, at)
        return timedelta(), before is not None and bool(before.leases) and bool(leases) and before.leases != leases

    async def _read_state(self, controller: Controller) -> ControllerReport:
        leases, unseen = await self._leases(controller)
        installed: tuple[ControllerDeployment, ...] = ()
        similar: tuple[str, ...] = ()
        if controller.deployments:
            installed, more = await self._named(controller)
            unseen += more
            if not installed and not more:
                similar, more = await self._similar(controller)
                unseen += more
        return ControllerReport(controller, installed, leases, similar, unseen)

    async def _leases(self, controller: Controller) -> tuple[tuple[ControllerLease, ...], tuple[str, ...]]:
        path = "/apis/coordination.k8s.io/v1"
        return await self._by_name(path, "leases", (controller.lease,), controller.namespaces, ControllerLease)

    async def _named(self, controller: Controller) -> tuple[tuple[ControllerDeployment, ...], tuple[str, ...]]:
        names, spaces = controller.deployments, controller.namespaces
        return await self._by_name("/apis/apps/v1", "deployments", names, spaces, ControllerDeployment)

    async def _by_name(
        self, root: str, plural: str, names: Iterable[str], namespaces: Iterable[str], type_: type[T]
    ) -> tuple[tuple[T, ...], tuple[str, ...]]:
        """In all namespaces; where that is refused, in those where it usually is: then its absence proves nothing."""
        found: list[T] = []
        unseen: list[str] = []
        for name in names:
            try:
                async for page in self._cluster.pages(f"{root}/{plural}", type_, fieldSelector=f"metadata.name={name}"):
                    found += page.items
                    unseen += page.problems
            except PlatformError as error:
                unseen.append(f"{plural} of all namespaces could not be listed: {error}")
                found += [one async for one in self._one_by_one(root, plural, name, namespaces, type_)]
        return tuple(found), tuple(unseen)

    async def _one_by_one(
        self, root: str, plural: str, name: str, namespaces: Iterable[str], type_: type[T]
    ) -> AsyncIterator[T]:
        for namespace in namespaces:
            try:
                yield await self._cluster.get(f"{root}/namespaces/{namespace}/{plural}/{name}", type_)
            except PlatformError:
                continue  # the failed list is already reported

    async def _similar(self, controller: Controller) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Anything that may be it under a name of its own."""
        found: list[str] = []
        unseen: list[str] = []
        for plural in ("deployments", "statefulsets"):
            try:
                async for page in self._cluster.pages(f"/apis/apps/v1/{plural}", ControllerDeployment):
                    unseen += page.problems
                    found += [
                        f"{one.metadata.namespace}/{one.metadata.name}"
                        for one in page.items
                        if any(controller.word in image for image in one.images) and one.wanted
                    ]
            except PlatformError as error:
                unseen.append(f"{plural} of all namespaces could not be listed: {error}")
        return tuple(found), tuple(unseen)

    async def clashes(self, report: ControllerReport, names: Iterable[str]) -> tuple[str, ...] | Unknown:
        """Its newest log lines about a conflict over one of these names."""
        if not report.installed:
            return Unknown(f"no Deployment of {report.controller.name} was found, so its log could not be read")
        lines: list[str] = []
        for one in report.installed:
            log = await self._log(one)
            if isinstance(log, Unknown):
                return log
            lines += log
        return clashes_in(lines, names)

    async def _log(self, one: ControllerDeployment) -> list[str] | Unknown:
        labels = one.spec.selector.match_labels or {}
        where = f"/api/v1/namespaces/{one.metadata.namespace}/pods"
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        called = f"the log of {one.metadata.namespace}/{one.metadata.name}"
        if not selector:
            return Unknown(f"{called} could not be read: its Deployment selects no pods by label")
        lines: list[str] = []
        try:
            pods = [pod async for page in self._cluster.pages(where, Pod, labelSelector=selector) for pod in page.items]
            for pod in pods[:LOG_PODS]:
                read = await self._cluster.raw(
                    f"{where}/{pod.metadata.name}/log",
                    most=LOG_BYTES,
                    tailLines=LINES,
                    limitBytes=LOG_BYTES,
                    container=pod.spec.containers[0].name if pod.spec.containers else None,
                )
                lines += read.decode("utf-8", "replace").splitlines()
        except ApiError as error:
            missing = "; gpukeeper needs `get` on pods/log there" if error.is_denied else ""
            return Unknown(f"{called} could not be read: {error}{missing}")
        except PlatformError as error:
            return Unknown(f"{called} could not be read: {error}")
        return lines


EVENTS = 5
NAMES = 30  # searched in logs


class _JobSetTemplate(Wire, frozen=True):
    spec: Spec = Spec()


class _RuntimeSpec(Wire, frozen=True):
    template: _JobSetTemplate = _JobSetTemplate()


class _Runtime(Wire, frozen=True):
    spec: _RuntimeSpec = _RuntimeSpec()


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
    found: list[tuple[datetime, Event]] = []
    path = f"/api/v1/namespaces/{meta.namespace}/events"
    try:
        async for page in cluster.pages(path, Event, fieldSelector=f"involvedObject.uid={meta.uid}"):
            found += [(at, one) for one in page.items if (at := one.at) is not None]
            found = sorted(found, key=lambda pair: pair[0], reverse=True)[:EVENTS]
    except PlatformError as error:
        return Unknown(f"its Events could not be read: {error}")
    return tuple(f"Event, {ago(at, now)}: {one.type} {one.reason}: {cut(one.message)}" for at, one in found)
