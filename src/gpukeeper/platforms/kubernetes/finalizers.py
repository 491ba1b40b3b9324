"""What blocks a removal: the known finalizers, whether their controllers run (by Deployment and Lease: alive, down or
unknown), and when it is proven that no controller will act. Pure. Nothing is removed here.

Proven is only: the responsible controller does not run, the garbage collector loops or has nothing left to wait
for, or the Job of a pod that ended no longer exists. Everything else waits for its controller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.wire import Meta, PartialMetadata, Pod, Selector, Template, Wire, when
from gpukeeper.model.subject import Blocked
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS
from gpukeeper.platforms.kubernetes.kinds.kind import BUILT_IN, START, Controller, Finalizer, Kind, TreeNode
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES
from gpukeeper.platforms.kubernetes.owners import Descendants

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


class _DeploymentSpec(Wire, frozen=True):
    replicas: int | None = None
    selector: Selector = Selector()
    template: Template | None = None


class _DeploymentStatus(Wire, frozen=True):
    replicas: int | None = None
    ready_replicas: int | None = None


class ControllerDeployment(PartialMetadata, frozen=True):
    """The fields that are read of a Deployment or StatefulSet."""

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


class ControllerLease(PartialMetadata, frozen=True):
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


def state_of_controller(found: ControllerReport, now: datetime, still: timedelta, *, changed: bool) -> ControllerState:
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


FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
JOB_TRACKING = "batch.kubernetes.io/job-tracking"
NODE = "its node"  # in place of a finalizer; no list of finalizers names it
PATIENCE = timedelta(seconds=60)  # past its grace
CIRCLE = timedelta(seconds=30)  # a child created sooner after its root's removal was requested may be the last one
NOTHING_LEFT = timedelta(minutes=5)  # the collector needs seconds


KUEUE = Controller("Kueue", ("kueue-controller-manager",), "c1f6bfd2.kueue.x-k8s.io", ("kueue-system",), "kueue")
# Of no kind alone; those of one kind are in its file.
_TABLE = (
    Finalizer(
        FOREGROUND,
        "the garbage collector",
        BUILT_IN,
        "a child still exists, is recreated, or cannot be removed",
        "Check what is left below it, and fix that",
    ),
    Finalizer(
        ORPHAN,
        "the garbage collector",
        BUILT_IN,
        "a child could not be orphaned",
        "Check that kube-controller-manager runs and may update what is below it",
    ),
    Finalizer(
        JOB_TRACKING,
        "the Job controller",
        BUILT_IN,
        "its Job no longer exists and the pod is left",
        "Check that kube-controller-manager runs",
    ),
    Finalizer("kueue.x-k8s.io/managed", "Kueue", KUEUE, "Kueue is down", START, without=True),
    Finalizer("kueue.x-k8s.io/resource-in-use", "Kueue", KUEUE, "Kueue is down", START, without=True),
    Finalizer(
        "kubernetes.io/pvc-protection",
        "the control plane",
        BUILT_IN,
        "a pod still uses the volume, as intended",
        "End the pods that use the volume",
    ),
)
FINALIZERS: Mapping[str, Finalizer] = {
    one.name: one for one in (*_TABLE, *(one for kind in KINDS for one in kind.finalizers))
}


def controllers_of(meta: Meta) -> tuple[Controller, ...]:
    """The controllers that must act before it can be deleted."""
    known = (FINALIZERS.get(name) for name in meta.finalizers or ())
    return tuple(dict.fromkeys(one.controller for one in known if one is not None))


def blocked(
    meta: Meta,
    kind: Kind,
    children: Descendants | Unknown,
    controllers: Mapping[str, ControllerState],
    now: datetime,
    *,
    pod: Pod | None = None,
    owner_gone: bool | Unknown = False,
) -> Blocked | None:
    """What blocks its removal, long after its grace period. None: it is not being removed, or not for long enough.

    `children`: what is below it; `controllers`: by their name; for a pod also itself and whether its owner is gone.
    """
    deleted_at = when(meta.deletion_timestamp)  # with the grace counted in
    if not isinstance(deleted_at, datetime) or now - deleted_at <= PATIENCE:
        return None
    since = deleted_at - timedelta(seconds=max(0, meta.deletion_grace_period_seconds or 0))
    if not meta.finalizers:
        words = "no finalizer is left; the kubelet of its node must report that it ended: check the node"
        return Blocked(NODE, since, proven=False, why=words) if pod is not None else None
    tracked = _tracked(pod, owner_gone)
    found = [
        Blocked(name, since, *_judged(name, meta, kind, children, controllers, tracked, now))
        for name in meta.finalizers
    ]
    return next((one for one in found if one.proven is True), found[0])


def _judged(
    name: str,
    meta: Meta,
    kind: Kind,
    children: Descendants | Unknown,
    controllers: Mapping[str, ControllerState],
    tracked: tuple[bool | Unknown, str],
    now: datetime,
) -> tuple[bool | Unknown, str]:
    known = FINALIZERS.get(name)
    if known is None:
        return Unknown(
            f"gpukeeper does not know the finalizer {name}"
        ), "the controller that set this finalizer must remove it"
    if name == FOREGROUND:
        return _foreground(meta, kind, children, now)
    if name == JOB_TRACKING:
        return tracked
    controller_state = controllers.get(known.controller.name, Unknown(f"{known.controller.name} was not checked"))
    words = f"it belongs to {known.whose}"
    if isinstance(controller_state, Unknown):
        return (controller_state if known.without else False), f"{words}; usually blocked when {known.stuck}"
    if isinstance(controller_state, Down):
        return known.without, f"{words}, and {known.controller.name} does not run ({controller_state.words})"
    return (
        False,
        f"{words}, and {known.controller.name} runs ({controller_state.words}); usually blocked when {known.stuck}",
    )


def _foreground(meta: Meta, kind: Kind, children: Descendants | Unknown, now: datetime) -> tuple[bool | Unknown, str]:
    """Without this finalizer, the collector still deletes what is below it, in the background."""
    waits = "the garbage collector waits until everything below it is deleted"
    if isinstance(children, Unknown):
        return children, waits
    again = made_again(meta, kind, children, now)
    if again is not None:
        return True, (
            f"its controller recreates {again.words} each time the garbage collector deletes it, last"
            f" {_later(again, meta)} after the removal was requested; it completes by chance, or never"
        )
    left = children.of(meta.uid)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return False, f"{waits}; not deleted yet: {left[0].words} ({_why_left(left[0])}){more}"
    if not children.complete:
        why = children.unseen[0] if children.unseen else "it was searched by labels only"
        return Unknown(f"whether anything is left below it is unknown: {why}"), waits
    deleted_at = when(meta.deletion_timestamp)
    if isinstance(deleted_at, datetime) and now - deleted_at > NOTHING_LEFT:
        return True, (
            f"nothing of a known kind is left below it {in_words(now - deleted_at)} after its removal was requested;"
            " the garbage collector missed that"
        )
    return False, f"nothing is left below it; the garbage collector has {in_words(NOTHING_LEFT)} to notice that"


def made_again(meta: Meta, kind: Kind, children: Descendants, now: datetime) -> TreeNode | None:
    """A child that was created long after the removal of the root was requested, and that is not stuck itself.

    Each recreation is a race that the collector may win (within seconds, or never), so a single one proves nothing."""
    deleted_at = when(meta.deletion_timestamp)
    if not isinstance(deleted_at, datetime) or FOREGROUND not in (meta.finalizers or ()):
        return None
    for child in children.of(meta.uid):
        made, ends = when(child.meta.creation_timestamp), when(child.meta.deletion_timestamp)
        stuck = ends is not None and (isinstance(ends, Unknown) or now - ends > PATIENCE)
        if child.kind in kind.children and isinstance(made, datetime) and made - deleted_at > CIRCLE and not stuck:
            return child
    return None


def _later(child: TreeNode, meta: Meta) -> str:
    made, deleted_at = when(child.meta.creation_timestamp), when(meta.deletion_timestamp)
    return in_words(made - deleted_at) if isinstance(made, datetime) and isinstance(deleted_at, datetime) else "long"


def _why_left(child: TreeNode) -> str:
    if child.meta.finalizers:
        return f"finalizer {', '.join(child.meta.finalizers)}"
    return "being removed" if child.meta.deletion_timestamp else "its removal was not requested"


def _tracked(pod: Pod | None, owner_gone: bool | Unknown) -> tuple[bool | Unknown, str]:
    if pod is None:
        return Unknown("only pods are counted by a Job"), "the Job controller must count it first"
    if isinstance(owner_gone, Unknown):
        return owner_gone, "the Job controller must count it first"
    if not owner_gone:
        return False, "its Job exists and must count it first"
    if pod.status.phase not in OVER_PHASES:
        return False, f"its Job no longer exists, but the pod has not ended ({pod.status.phase or 'no phase'})"
    return True, "its Job no longer exists, and nothing else counts it"
