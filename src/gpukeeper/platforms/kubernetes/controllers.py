"""Reads the Deployment, Lease and log of a controller. controller_state.py evaluates them.

A failed request is Unknown, and so is a controller without a trace: it may run outside the cluster. Down needs two
checks: no replica is wanted, and the Lease was not renewed in between. The times in a Lease are of another clock, so
the time at which gpukeeper saw it change counts most.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.controller_state import (
    ControllerDeployment,
    ControllerLease,
    ControllerReport,
    ControllerState,
    clashes_in,
    state_of,
)
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.controller import Controller
from gpukeeper.platforms.kubernetes.wire import Pod

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

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
        report = msgspec.structs.replace(found, controller_state=state_of(found, now, still, changed=changed))
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
