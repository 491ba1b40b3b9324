"""Which GPUs a pod requests, and what runs below one owner, added up over its pods: the status of the owner may hide
running pods. Pure.

The scheduler gives a pod what it requests, whole numbers only, so a scheduled pod holds exactly that. The API does
not show which device of the node it got; of a claim (dynamic resource allocation) not even how many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal

import msgspec

from gpukeeper.clients.kubernetes.wire import Container, Pod, PodSpec, when
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, not_running
from gpukeeper.platforms.kubernetes.marks import pod_hold

WHOLE = frozenset({"nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"})
SLICES = frozenset({"nvidia.com/gpu.shared"})
SLICE_PREFIX = "nvidia.com/mig-"
MOST_GPUS = 256  # of one pod; a manifest may contain any number, and no node has more
_QUANTITY = re.compile(r"(\d{1,18})([kMGT]?)")  # the API itself writes 1000 as 1k
_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class PodGpuRequest(msgspec.Struct, frozen=True):
    whole: int = 0
    slices: int = 0
    unclear: str | None = None  # why that may not be all
    written: int = 0  # what is requested, if that is more than is counted

    def __bool__(self) -> bool:
        """It requests a GPU, or may do so."""
        return self.whole > 0 or self.slices > 0 or self.unclear is not None


def requested(spec: PodSpec) -> PodGpuRequest:
    """What the scheduler counts: containers together, or the largest step of the start if that needs more."""
    unclear = _claims(spec)
    together, largest = {"whole": 0, "slices": 0}, {"whole": 0, "slices": 0}
    beside = {"whole": 0, "slices": 0}  # init containers that stay, as far as they are started
    for container in spec.init_containers or ():
        wants, odd = _requested(container)
        unclear = unclear or odd
        for part, count in wants.items():
            if container.restart_policy == "Always":
                beside[part] += count
                largest[part] = max(largest[part], beside[part])
            else:
                largest[part] = max(largest[part], beside[part] + count)
    for container in spec.containers:
        wants, odd = _requested(container)
        unclear = unclear or odd
        for part, count in wants.items():
            together[part] += count
    counts = {part: max(together[part] + beside[part], largest[part]) for part in together}
    written = sum(counts.values())
    if written <= MOST_GPUS:
        return PodGpuRequest(counts["whole"], counts["slices"], unclear)
    unclear = f"it requests {written} GPUs, more than any node has; counted as {MOST_GPUS}"
    counts = {part: min(count, MOST_GPUS) for part, count in counts.items()}
    return PodGpuRequest(counts["whole"], counts["slices"], unclear, written)


def any_requested(specs: Iterable[PodSpec]) -> bool:
    """One of these requests a GPU, or something that may be one."""
    return any(requested(one) for one in specs)


def image_of(specs: Iterable[PodSpec]) -> str | None:
    """Of the first container that requests a GPU, else of the first one."""
    containers = [container for spec in specs for container in spec.containers]
    if len(containers) == 1:  # most; its requests need not be read
        return containers[0].image or None
    with_gpu = [one for one in containers if any(_requested(one)[0].values())]
    return next((one.image for one in (*with_gpu, *containers) if one.image), None)


def _claims(spec: PodSpec) -> str | None:
    if not spec.resource_claims:
        return None
    names = ", ".join(one.name[:60] for one in spec.resource_claims[:4])
    return f"it has a resource claim ({names}), which may be a GPU"


def _requested(container: Container) -> tuple[dict[str, int], str | None]:
    """A request that is not written is as large as the limit; for GPUs both are always the same."""
    wants = {"whole": 0, "slices": 0}
    resources = container.resources
    if resources is None:
        return wants, None
    unclear = None
    for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
        part = "whole" if name in WHOLE else "slices" if name in SLICES or name.startswith(SLICE_PREFIX) else None
        if part is None:
            continue
        count = _count(quantity)
        if count is None:
            unclear = f"it requests {str(quantity)[:40]!r} of {name[:60]}, which is not a number of GPUs"
        else:
            wants[part] += count
    return wants, unclear


def _count(quantity: str | float) -> int | None:
    if not isinstance(quantity, str):
        return int(quantity) if quantity >= 0 and quantity == int(quantity) else None
    found = _QUANTITY.fullmatch(quantity)
    return int(Decimal(found[1]) * _SCALES[found[2]]) if found is not None else None


class PodTotals(msgspec.Struct):
    living: int = 0  # pods that are neither Succeeded nor Failed; those that are being ended, too
    holding: int = 0  # of them, scheduled pods that request GPUs: they hold them
    pending: int = 0  # of the living: not given a node yet
    waiting: int = 0  # of the living: on a node, and none of their containers ever ran
    unreported: int = 0  # of the living: on a node that has not reported them yet
    waits: str | None = None  # why the first of those waits
    newest: str | None = None  # the latest creation of the living
    dead: int = 0  # pods that ended and are still there
    ran: bool = False  # a child reports that some of its pods ran; they may be deleted
    dead_counted: bool = True  # False: they were not counted
    devices: list[str] = msgspec.field(default_factory=list)  # one name per GPU or slice held: "<pod>/<index>"
    slices: list[str] = msgspec.field(default_factory=list)  # which of them are slices
    pods: list[tuple[str, str, str | None]] = msgspec.field(default_factory=list)  # that hold them: name, uid, start
    started: str | None = None  # earliest start of a living pod
    grace: int = 30  # longest termination grace of the living, seconds
    unclear: str | None = None  # why the count is not to be trusted
    holds: str | None = None  # a hold mark on one of its pods
    lost: str | None = None  # a pod whose node does not respond

    def add(self, other: PodTotals) -> None:
        self.living += other.living
        self.holding += other.holding
        self.pending += other.pending
        self.waiting += other.waiting
        self.unreported += other.unreported
        self.waits = self.waits or other.waits
        self.newest = _later_of(self.newest, other.newest)
        self.dead += other.dead
        self.ran = self.ran or other.ran
        self.devices += other.devices
        self.slices += other.slices
        self.pods += other.pods
        self.started = _earlier_of(self.started, other.started)
        self.grace = max(self.grace, other.grace)
        self.unclear = self.unclear or other.unclear
        self.holds = self.holds or other.holds
        self.lost = self.lost or other.lost

    def add_pod(self, pod: Pod, requested: PodGpuRequest) -> None:
        name = pod.metadata.name
        if pod.status.phase in OVER_PHASES:
            self.dead += 1
            return
        self.living += 1
        self.newest = _later_of(self.newest, pod.metadata.creation_timestamp)
        self.grace = max(self.grace, pod.spec.termination_grace_period_seconds or 0)
        self.holds = self.holds or pod_hold(pod.metadata)
        if pod.status.phase == "Unknown":
            self.lost = self.lost or name
        if not pod.spec.node_name and pod.status.phase != "Running":
            self.pending += 1
            return
        idle = not_running(pod)
        if idle is not None:
            self.waiting += idle.why is not None
            self.unreported += idle.why is None
            self.waits = self.waits or (idle.why and f"pod {name} on {pod.spec.node_name}: {idle.why}")
        self.started = _earlier_of(self.started, pod.status.start_time)
        if requested:
            self.holding += 1
            self.pods.append((name, pod.metadata.uid, pod.status.start_time))
            self.devices += held(name, requested)
            self.slices += held_slices(name, requested)
        if requested.unclear is not None:
            self.unclear = self.unclear or f"pod {name}: {requested.unclear}"


def held(name: str, requested: PodGpuRequest) -> list[str]:
    """A name for each GPU; the API does not show which devices of the node they are. Slices come last."""
    return [f"{name}/{index}" for index in range(requested.whole + requested.slices)]


def held_slices(name: str, requested: PodGpuRequest) -> list[str]:
    return held(name, requested)[requested.whole :]


def _earlier_of(one: str | None, other: str | None) -> str | None:
    """What cannot be read is left out."""
    first, second = when(one), when(other)
    if not isinstance(second, datetime):
        return one
    return other if not isinstance(first, datetime) or second < first else one


def _later_of(one: str | None, other: str | None) -> str | None:
    """What cannot be read counts as later than everything."""
    first, second = when(one), when(other)
    if isinstance(first, Unknown) or second is None:
        return one
    return other if first is None or isinstance(second, Unknown) or second > first else one
