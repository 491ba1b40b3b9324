"""A pod: its end, and how a single pod is suspended and restored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from gpukeeper.clients.kubernetes.wire import ContainerState, Pod, Root, StatusCondition, Terminated
from gpukeeper.model.decision import Refused
from gpukeeper.model.subject import Outcome
from gpukeeper.platforms.kubernetes.kinds.kind import (
    NOT_ENDED,
    QUEUE,
    Ending,
    Json,
    Kind,
    WatchedObject,
    WatchedStatus,
    cut,
    first_usable,
    latest,
)

OVER_PHASES = {"Succeeded": Outcome.SUCCEEDED, "Failed": Outcome.FAILED}
DISRUPTED = "DisruptionTarget"
OUT_OF_MEMORY = "OOMKilled"
_USUAL = frozenset(
    {"", "PodInitializing", "ContainerCreating"}
)  # while an image is pulled, or for lack of another reason
GATE = "gpukeeper.io/restored"
# Of a former pod: the cluster sets them again, or rejects them.
OF_ITS_NODE = ("nodeName", "ephemeralContainers", "priority", "preemptionPolicy", "overhead")


class _Status(WatchedStatus, frozen=True):
    phase: str = ""

    @property
    def stage(self) -> str:
        return self.phase


class _WatchedPod(WatchedObject, frozen=True, gc=True):
    status: _Status = _Status()


class _Pod(Kind, frozen=True):
    @property
    def type_(self) -> type[Root] | type[Pod]:
        return Pod

    def suspend_manifest(self, spec: Json, labels: Mapping[str, str]) -> Json | Refused:
        """Behind a scheduling gate, which may be taken off at any time."""
        if QUEUE in labels:
            return Refused("Kueue controls when it starts, from its creation on")
        for name in OF_ITS_NODE:
            spec.pop(name, None)
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), {"name": GATE}]
        return {}


POD = _Pod(
    kind="Pod",
    plural="pods",
    versions=("v1",),
    watched_as=_WatchedPod,
    in_bulk=True,
    in_runs=True,
    evicted=True,
)


def of_pod(pod: Pod, now: datetime) -> Ending:
    """Its end is the latest of all its containers; Ready is not considered."""
    status = pod.status
    outcome = OVER_PHASES.get(status.phase)
    if outcome is None:
        return NOT_ENDED
    ended = [
        one.terminated
        for one in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
        if one.terminated is not None
    ]
    at = latest(one.finished_at for one in ended)
    disrupted = (one.last_transition_time for one in status.conditions or () if _is(one, DISRUPTED))
    how = _exit_in_words(ended) if outcome is Outcome.FAILED else ""
    return Ending(True, outcome, first_usable((at, latest(disrupted)), pod.metadata, now), how)


class NotRunning(msgspec.Struct, frozen=True):
    """A pod with a node, and none of its containers has ever run. `why`: in the words of its kubelet; None: it has not
    reported the pod yet."""

    why: str | None


def not_running(pod: Pod) -> NotRunning | None:
    """None: it has no node, or something of it runs or ran, or that cannot be excluded."""
    status = pod.status
    if not pod.spec.node_name or status.phase != "Pending":
        return None
    containers = (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    if not containers:
        return NotRunning(None)
    waiting = [one.waiting for one in containers if one.waiting is not None]
    tried = any(one.restart_count or one.last_state not in (None, ContainerState()) for one in containers)
    if tried or len(waiting) < len(containers):
        return None
    first = next((one for one in waiting if one.reason not in _USUAL), waiting[0])
    return NotRunning(": ".join(word for word in (first.reason or "waiting", cut(first.message)) if word))


def _exit_in_words(ended: Iterable[Terminated]) -> str:
    """Of the container that ran out of memory, else of the first that failed."""
    failed = sorted((one for one in ended if one.exit_code), key=lambda one: one.reason != OUT_OF_MEMORY)
    if not failed:
        return ""
    return f"exit code {failed[0].exit_code}{', out of memory' if failed[0].reason == OUT_OF_MEMORY else ''}"


def _is(condition: StatusCondition, type_: str) -> bool:
    return condition.type == type_ and condition.status == "True"
