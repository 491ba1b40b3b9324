"""What runs below one owner, added up over its pods. The status of the owner may hide running pods."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.gpus import PodGpuRequest
from gpukeeper.platforms.kubernetes.kinds.pod import OVER_PHASES, not_running
from gpukeeper.platforms.kubernetes.marks import pod_hold
from gpukeeper.platforms.kubernetes.wire import Pod, when


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
        self.newest = _later(self.newest, other.newest)
        self.dead += other.dead
        self.ran = self.ran or other.ran
        self.devices += other.devices
        self.slices += other.slices
        self.pods += other.pods
        self.started = _earlier(self.started, other.started)
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
        self.newest = _later(self.newest, pod.metadata.creation_timestamp)
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
        self.started = _earlier(self.started, pod.status.start_time)
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


def _earlier(one: str | None, other: str | None) -> str | None:
    """What cannot be read is left out."""
    first, second = when(one), when(other)
    if not isinstance(second, datetime):
        return one
    return other if not isinstance(first, datetime) or second < first else one


def _later(one: str | None, other: str | None) -> str | None:
    """What cannot be read counts as later than everything."""
    first, second = when(one), when(other)
    if isinstance(first, Unknown) or second is None:
        return one
    return other if first is None or isinstance(second, Unknown) or second > first else one
