"""Is the controller of a kind alive? By its Deployment and its Lease; of which release is it, and what does it log?

A missing answer is Unknown, and so is a controller that left no trace: it may run outside the cluster. Gone takes two
looks: no replica is wanted, and the Lease was not renewed in between. A Lease's own times are written by another clock,
so what counts most is when we saw it change.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ApiError
from gpukeeper.platforms.kubernetes.kinds.controller import Controller
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Template, Wire, when

if TYPE_CHECKING:
    from gpukeeper.platforms.kubernetes.connect import Cluster

T = TypeVar("T")
FEWEST = 15  # seconds; a Lease that was given back says 1
TIMES = 10  # not renewed for so many of its durations: nobody holds it
RECENT = 5.0  # seconds for which an answer is good for everybody who asks
LINES, LOG_BYTES, LONGEST_LINE, MOST_LINES = 2000, 4 * 1024 * 1024, 300, 5
LOG_PODS = 3
CLASH = re.compile(r"\b409\b|conflict|object has been modified|\brace\b", re.IGNORECASE)


class Alive(msgspec.Struct, frozen=True):
    words: str
    version: str | None = None


class Gone(msgspec.Struct, frozen=True):
    """By two looks."""

    words: str
    version: str | None = None


Standing: TypeAlias = Alive | Gone | Unknown


class _Selector(Wire, frozen=True):
    match_labels: Mapping[str, str] | None = None


class _Wanted(Wire, frozen=True):
    replicas: int | None = None
    selector: _Selector = _Selector()
    template: Template | None = None


class _Have(Wire, frozen=True):
    replicas: int | None = None
    ready_replicas: int | None = None


class Installed(Wire, frozen=True):
    """A Deployment (or StatefulSet), as far as it is looked at."""

    metadata: Meta = Meta()
    spec: _Wanted = _Wanted()
    status: _Have = _Have()

    @property
    def wanted(self) -> int:
        return 1 if self.spec.replicas is None else self.spec.replicas

    @property
    def there(self) -> int:
        """Ready, or at least not gone yet."""
        return max(self.status.ready_replicas or 0, self.status.replicas or 0 if not self.wanted else 0)

    @property
    def images(self) -> tuple[str, ...]:
        template = self.spec.template
        return () if template is None or template.spec is None else tuple(c.image for c in template.spec.containers)

    @property
    def words(self) -> str:
        where = f"Deployment {self.metadata.namespace}/{self.metadata.name}"
        if not self.wanted:
            return f"{where} is scaled to 0" + (f", {self.there} not gone yet" if self.there else "")
        return f"{where}: {self.status.ready_replicas or 0} of {self.wanted} ready"


class _LeaseSpec(Wire, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None


class Lease(Wire, frozen=True):
    metadata: Meta = Meta()
    spec: _LeaseSpec = _LeaseSpec()

    @property
    def duration(self) -> timedelta:
        return timedelta(seconds=max(FEWEST, self.spec.lease_duration_seconds or 0))

    @property
    def where(self) -> str:
        return f"Lease {self.metadata.namespace}/{self.metadata.name}"


class Report(msgspec.Struct, frozen=True):
    """What was found of one controller."""

    controller: Controller
    installed: tuple[Installed, ...] = ()
    leases: tuple[Lease, ...] = ()
    similar: tuple[str, ...] = ()  # others whose image may be it
    unseen: tuple[str, ...] = ()
    standing: Standing = Unknown("not looked at")

    @property
    def image(self) -> str | None:
        return next((image for one in self.installed for image in one.images if self.controller.word in image), None)

    @property
    def version(self) -> str | None:
        """By the image's tag, else by the label that charts write."""
        labels = (one.metadata.labels or {} for one in self.installed)
        tagged = version_of(self.image or "")
        return tagged or next((v for each in labels if (v := each.get("app.kubernetes.io/version"))), None)


class _Sight(msgspec.Struct, frozen=True):
    """What a look found, and when it was first found just so."""

    leases: tuple[object, ...]
    installed: tuple[object, ...]
    since: float


class Controllers:
    """Of one cluster. Remembers what it saw and since when, so that the second look can tell."""

    def __init__(self, cluster: Cluster, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._monotonic = monotonic
        self._first: dict[str, _Sight] = {}  # by name
        self._last: dict[str, tuple[Report, float]] = {}

    async def ask(self, controller: Controller, now: datetime) -> Standing:
        return (await self.report(controller, now)).standing

    async def report(self, controller: Controller, now: datetime) -> Report:
        """`now`: the server's clock."""
        at = self._monotonic()
        last = self._last.get(controller.name)
        if last is not None and at - last[1] < RECENT:
            return last[0]
        found = await self._look(controller)
        still, changed = self._unchanged(found, at)
        report = msgspec.structs.replace(found, standing=judge(found, now, still, changed=changed))
        self._last[controller.name] = report, at
        return report

    def _unchanged(self, found: Report, at: float) -> tuple[timedelta, bool]:
        """For how long it has been as it is now, and whether its Lease changed since the look before."""
        leases = tuple((one.metadata.uid, one.metadata.resource_version, one.spec.renew_time) for one in found.leases)
        installed = tuple((one.metadata.uid, one.wanted, one.there) for one in found.installed)
        before = self._first.get(found.controller.name)
        if before is not None and (before.leases, before.installed) == (leases, installed):
            return timedelta(seconds=at - before.since), False
        self._first[found.controller.name] = _Sight(leases, installed, at)
        return timedelta(), before is not None and bool(before.leases) and bool(leases) and before.leases != leases

    async def _look(self, controller: Controller) -> Report:
        leases, unseen = await self._leases(controller)
        installed: tuple[Installed, ...] = ()
        similar: tuple[str, ...] = ()
        if controller.deployments:
            installed, more = await self._named(controller)
            unseen += more
            if not installed and not more:
                similar, more = await self._similar(controller)
                unseen += more
        return Report(controller, installed, leases, similar, unseen)

    async def _leases(self, controller: Controller) -> tuple[tuple[Lease, ...], tuple[str, ...]]:
        path = "/apis/coordination.k8s.io/v1"
        return await self._by_name(path, "leases", (controller.lease,), controller.namespaces, Lease)

    async def _named(self, controller: Controller) -> tuple[tuple[Installed, ...], tuple[str, ...]]:
        names, spaces = controller.deployments, controller.namespaces
        return await self._by_name("/apis/apps/v1", "deployments", names, spaces, Installed)

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
                continue  # that the list could not be read is said already

    async def _similar(self, controller: Controller) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Anything that may be it under a name of its own."""
        found: list[str] = []
        unseen: list[str] = []
        for plural in ("deployments", "statefulsets"):
            try:
                async for page in self._cluster.pages(f"/apis/apps/v1/{plural}", Installed):
                    unseen += page.problems
                    found += [
                        f"{one.metadata.namespace}/{one.metadata.name}"
                        for one in page.items
                        if any(controller.word in image for image in one.images) and one.wanted
                    ]
            except PlatformError as error:
                unseen.append(f"{plural} of all namespaces could not be listed: {error}")
        return tuple(found), tuple(unseen)

    async def clashes(self, report: Report, names: Iterable[str]) -> tuple[str, ...] | Unknown:
        """Its newest log lines about a conflict over one of these names."""
        if not report.installed:
            return Unknown(f"no Deployment of {report.controller.name} was found, so its log could not be read")
        lines: list[str] = []
        for one in report.installed:
            said = await self._log(one)
            if isinstance(said, Unknown):
                return said
            lines += said
        return clashes_in(lines, names)

    async def _log(self, one: Installed) -> list[str] | Unknown:
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
            missing = "; it needs `get` on pods/log there" if error.says_refused else ""
            return Unknown(f"{called} could not be read: {error}{missing}")
        except PlatformError as error:
            return Unknown(f"{called} could not be read: {error}")
        return lines


def judge(found: Report, now: datetime, still: timedelta, *, changed: bool) -> Standing:
    """Pure. `still`: for how long it has been exactly so while we looked; `changed`: its Lease, since our last look."""
    controller, installed = found.controller, found.installed
    fresh = next((one for one in found.leases if changed or _lately(one, now)), None)
    stale = found.leases and all(_stale(one, now, still) for one in found.leases)
    words = "; ".join((*(one.words for one in installed), *(_lease_words(one, now) for one in found.leases)))
    if not controller.deployments:
        return _built_in(found, words, alive=fresh is not None, stale=bool(stale))
    if any(one.there for one in installed):
        if stale:
            return Unknown(f"{controller.name} is ready, yet does not renew its Lease: it hangs? ({words})")
        return Alive(words, found.version)
    if fresh is not None:
        return Alive(words, found.version)
    if any(one.wanted for one in installed):
        return Unknown(f"{controller.name} is wanted and not ready: look at its pods ({words})")
    if found.unseen:
        return Unknown(f"whether {controller.name} runs cannot be told: {found.unseen[0]}")
    if found.similar:
        return Unknown(f"{found.similar[0]} may be {controller.name} under another name")
    if not installed and not found.leases:
        # Managed clusters run some of them where nobody sees it, and people run them on their own machines.
        return Unknown(f"nothing of {controller.name} is in the cluster, so it may run outside of it")
    if not installed:
        words = "; ".join(
            filter(None, (f"no Deployment {' or '.join(controller.deployments)} in any namespace", words))
        )
    if found.leases and not stale:
        return Unknown(f"{controller.name} looks gone ({words}); a later look must find its Lease unchanged")
    if still.total_seconds() < FEWEST:
        return Unknown(f"{controller.name} looks gone ({words}); a second look must confirm it")
    return Gone(words, found.version)


def _built_in(found: Report, words: str, *, alive: bool, stale: bool) -> Standing:
    name = found.controller.name
    if alive:
        return Alive(words)
    if stale:
        return Gone(words)
    if found.leases:
        return Unknown(f"{name} does not seem to renew its Lease ({words}); a later look will tell")
    why = found.unseen[0] if found.unseen else "it has no Lease, which it need not have"
    return Unknown(f"whether {name} runs cannot be told: {why}")


def _age(lease: Lease, now: datetime) -> timedelta | None:
    renewed = when(lease.spec.renew_time)
    return now - renewed if isinstance(renewed, datetime) else None


def _lately(lease: Lease, now: datetime) -> bool:
    age = _age(lease, now)
    return bool(lease.spec.holder_identity) and age is not None and abs(age) < 2 * lease.duration


def _stale(lease: Lease, now: datetime, still: timedelta) -> bool:
    """Whoever holds one renews it within its duration, whatever the clocks say."""
    age = _age(lease, now)
    if still >= TIMES * lease.duration:
        return True
    return still >= lease.duration and age is not None and age >= TIMES * lease.duration


def _lease_words(lease: Lease, now: datetime) -> str:
    age = _age(lease, now)
    renewed = "never renewed" if age is None else f"renewed {in_words(max(age, timedelta()))} ago"
    return f"{lease.where} {renewed}" + (f" by {lease.spec.holder_identity}" if lease.spec.holder_identity else "")


def version_of(image: str) -> str | None:
    """The tag of an image, where it reads like a release."""
    _, colon, tag = image.partition("@")[0].rpartition(":")
    return tag if colon and re.fullmatch(r"v?\d+(\.\d+)+([-+.][\w.]+)?", tag) else None


def clashes_in(lines: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The newest of these lines that tell of a conflict over one of these names."""
    wanted = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in names) or r"(?!)")
    found = [line[:LONGEST_LINE] for line in lines if CLASH.search(line) and wanted.search(line)]
    return tuple(found[-MOST_LINES:])
