"""Whether a controller runs, by its Deployment and its Lease: alive, down or unknown; its release, its log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.controller import Controller
from gpukeeper.platforms.kubernetes.wire import Meta, Template, Wire, when

FEWEST = 15  # seconds; a released Lease has 1
TIMES = 10  # not renewed for so many of its durations: it has no holder
LONGEST_LINE, MOST_LINES = 300, 5
CLASH = re.compile(r"\b409\b|conflict|object has been modified|\brace\b", re.IGNORECASE)


class Alive(msgspec.Struct, frozen=True):
    words: str
    version: str | None = None


class Down(msgspec.Struct, frozen=True):
    """Confirmed by two checks."""

    words: str
    version: str | None = None


ControllerState: TypeAlias = Alive | Down | Unknown


class _Selector(Wire, frozen=True):
    match_labels: Mapping[str, str] | None = None


class _DeploymentSpec(Wire, frozen=True):
    replicas: int | None = None
    selector: _Selector = _Selector()
    template: Template | None = None


class _DeploymentStatus(Wire, frozen=True):
    replicas: int | None = None
    ready_replicas: int | None = None


class ControllerDeployment(Wire, frozen=True):
    """The fields that are read of a Deployment or StatefulSet."""

    metadata: Meta = Meta()
    spec: _DeploymentSpec = _DeploymentSpec()
    status: _DeploymentStatus = _DeploymentStatus()

    @property
    def wanted(self) -> int:
        return 1 if self.spec.replicas is None else self.spec.replicas

    @property
    def there(self) -> int:
        """Ready, or not terminated yet."""
        return max(self.status.ready_replicas or 0, self.status.replicas or 0 if not self.wanted else 0)

    @property
    def images(self) -> tuple[str, ...]:
        template = self.spec.template
        return () if template is None or template.spec is None else tuple(c.image for c in template.spec.containers)

    @property
    def words(self) -> str:
        where = f"Deployment {self.metadata.namespace}/{self.metadata.name}"
        if not self.wanted:
            return f"{where} is scaled to 0" + (f", {self.there} not terminated yet" if self.there else "")
        return f"{where}: {self.status.ready_replicas or 0} of {self.wanted} ready"


class _LeaseSpec(Wire, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None


class ControllerLease(Wire, frozen=True):
    metadata: Meta = Meta()
    spec: _LeaseSpec = _LeaseSpec()

    @property
    def duration(self) -> timedelta:
        return timedelta(seconds=max(FEWEST, self.spec.lease_duration_seconds or 0))

    @property
    def where(self) -> str:
        return f"Lease {self.metadata.namespace}/{self.metadata.name}"


class ControllerReport(msgspec.Struct, frozen=True):
    """What was found of one controller."""

    controller: Controller
    installed: tuple[ControllerDeployment, ...] = ()
    leases: tuple[ControllerLease, ...] = ()
    similar: tuple[str, ...] = ()  # others whose image may be it
    unseen: tuple[str, ...] = ()
    controller_state: ControllerState = Unknown("not checked")

    @property
    def image(self) -> str | None:
        return next((image for one in self.installed for image in one.images if self.controller.word in image), None)

    @property
    def version(self) -> str | None:
        """By the image's tag, else by the label that charts write."""
        labels = (one.metadata.labels or {} for one in self.installed)
        tagged = version_of(self.image or "")
        return tagged or next((v for each in labels if (v := each.get("app.kubernetes.io/version"))), None)


def state_of(found: ControllerReport, now: datetime, still: timedelta, *, changed: bool) -> ControllerState:
    """`still`: how long it has been unchanged over our checks; `changed`: its Lease changed since the last check."""
    controller, installed = found.controller, found.installed
    fresh = next((one for one in found.leases if changed or _renewed_lately(one, now)), None)
    stale = found.leases and all(_stale(one, now, still) for one in found.leases)
    words = "; ".join((*(one.words for one in installed), *(_lease_words(one, now) for one in found.leases)))
    if not controller.deployments:
        return _built_in(found, words, alive=fresh is not None, stale=bool(stale))
    if any(one.there for one in installed):
        if stale:
            return Unknown(f"{controller.name} is ready but does not renew its Lease: it may hang ({words})")
        return Alive(words, found.version)
    if fresh is not None:
        return Alive(words, found.version)
    if any(one.wanted for one in installed):
        return Unknown(f"{controller.name} is deployed but not ready: check its pods ({words})")
    if found.unseen:
        return Unknown(f"whether {controller.name} runs is unknown: {found.unseen[0]}")
    if found.similar:
        return Unknown(f"{found.similar[0]} may be {controller.name} under another name")
    if not installed and not found.leases:
        # Managed clusters run some of them outside the cluster, and so do developers on their machines.
        return Unknown(f"{controller.name} was not found in the cluster; it may run outside of it")
    if not installed:
        words = "; ".join(
            filter(None, (f"no Deployment {' or '.join(controller.deployments)} in any namespace", words))
        )
    if found.leases and not stale:
        return Unknown(f"{controller.name} seems not to run ({words}); a later check must find its Lease unchanged")
    if still.total_seconds() < FEWEST:
        return Unknown(f"{controller.name} seems not to run ({words}); a second check must confirm it")
    return Down(words, found.version)


def _built_in(found: ControllerReport, words: str, *, alive: bool, stale: bool) -> ControllerState:
    name = found.controller.name
    if alive:
        return Alive(words)
    if stale:
        return Down(words)
    if found.leases:
        return Unknown(f"{name} does not seem to renew its Lease ({words}); a later check must confirm it")
    why = found.unseen[0] if found.unseen else "it has no Lease, which is optional"
    return Unknown(f"whether {name} runs is unknown: {why}")


def _age(lease: ControllerLease, now: datetime) -> timedelta | None:
    renewed = when(lease.spec.renew_time)
    return now - renewed if isinstance(renewed, datetime) else None


def _renewed_lately(lease: ControllerLease, now: datetime) -> bool:
    age = _age(lease, now)
    return bool(lease.spec.holder_identity) and age is not None and abs(age) < 2 * lease.duration


def _stale(lease: ControllerLease, now: datetime, still: timedelta) -> bool:
    """A holder renews it within its duration, no matter what the clocks show."""
    age = _age(lease, now)
    if still >= TIMES * lease.duration:
        return True
    return still >= lease.duration and age is not None and age >= TIMES * lease.duration


def _lease_words(lease: ControllerLease, now: datetime) -> str:
    age = _age(lease, now)
    renewed = "never renewed" if age is None else f"renewed {in_words(max(age, timedelta()))} ago"
    return f"{lease.where} {renewed}" + (f" by {lease.spec.holder_identity}" if lease.spec.holder_identity else "")


def version_of(image: str) -> str | None:
    """The tag of an image, where it reads like a release."""
    _, colon, tag = image.partition("@")[0].rpartition(":")
    return tag if colon and re.fullmatch(r"v?\d+(\.\d+)+([-+.][\w.]+)?", tag) else None


def clashes_in(lines: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The newest of these lines that report a conflict over one of these names."""
    wanted = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in names) or r"(?!)")
    found = [line[:LONGEST_LINE] for line in lines if CLASH.search(line) and wanted.search(line)]
    return tuple(found[-MOST_LINES:])
