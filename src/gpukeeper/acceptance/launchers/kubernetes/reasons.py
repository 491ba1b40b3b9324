"""Why a pod waits, failed or was removed: a stable code and a sentence. Pure.

Codes: taint, resources, affinity, unschedulable, quota, refused, image, config, creating, deadline, evicted, preempted,
node-not-ready, node-gone, oom, restarts, failed, vanished, never-created, excluded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from gpukeeper.acceptance.launchers.kubernetes.wire import Condition, ContainerStatus, Event, Node, Pod, condition

LONGEST = 600  # characters of a message of the cluster
_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_IMAGE |= {"RegistryUnavailable", "SignatureValidationFailed"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
_QUOTA = re.compile(r"exceeded quota", re.IGNORECASE)
_DISRUPTIONS = {
    "PreemptionByScheduler": ("preempted", "preempted by work of a higher priority"),
    "DeletionByTaintManager": ("evicted", "evicted because of a taint of its node"),
    "EvictionByEvictionAPI": ("evicted", "evicted through the API, as `kubectl drain` does"),
    "DeletionByPodGC": ("node-gone", "its node was removed from the cluster"),
    "TerminationByKubelet": ("evicted", "ended by its node (pressure or shutdown)"),
}


class Reason(msgspec.Struct, frozen=True):
    code: str = ""
    sentence: str = ""


def of_waiting(pod: Pod, status: ContainerStatus | None, events: Sequence[Event], node: Node | None = None) -> Reason:
    """A pod that has not started. `node`: the one that it is to run on, if that is one and was listed."""
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return unschedulable(scheduled, node)
    waiting = status.state.waiting if status else None
    if waiting is not None and waiting.reason in _IMAGE:
        return Reason("image", f"its image cannot be pulled ({waiting.reason}): {cut(waiting.message)}")
    if waiting is not None and waiting.reason in _CONFIG:
        return Reason("config", f"its container cannot be created ({waiting.reason}): {cut(waiting.message)}")
    warning = next((one for one in reversed(events) if one.type == "Warning"), None)
    if warning is not None:
        return Reason("creating", f"it does not start ({warning.reason}): {cut(warning.message)}")
    if pod.spec.node_name:
        return Reason("creating", "its container is being created; the image may be large")
    return Reason("unschedulable", "the scheduler has not considered it yet")


def unschedulable(scheduled: Condition, node: Node | None = None) -> Reason:
    """From the sentence of the scheduler: 0/3 nodes are available: 1 Insufficient nvidia.com/gpu, …"""
    said = cut(scheduled.message) or scheduled.reason
    lacking = re.search(r"Insufficient ([\w./-]+)", said)
    if lacking:
        return Reason("resources", f"its node has not enough {lacking.group(1)} free: {said}")
    if is_tainted(scheduled):
        return Reason("taint", f"its node has a taint that it does not tolerate{_taints(said, node)}: {said}")
    if "affinity" in said:
        return Reason("affinity", f"no node fits it: {said}")
    return Reason("unschedulable", f"it cannot be scheduled: {said}")


def is_tainted(scheduled: Condition | None) -> bool:
    """Whether the scheduler names a taint as the obstacle."""
    return scheduled is not None and scheduled.status == "False" and "untolerated taint" in scheduled.message


def _taints(said: str, node: Node | None) -> str:
    """By the node, since newer schedulers only count them: 1 node(s) had untolerated taint(s)."""
    blocking = [one.words for one in (node.spec.taints if node else None) or () if one.blocks]
    if blocking:
        return f" ({', '.join(blocking)})"
    named = re.search(r"untolerated taint(?:\(s\))? ?\{([^}]*)\}", said)
    return f" ({named.group(1).strip()})" if named else ""


def of_refused_creation(event: Event) -> Reason:
    """Its controller could not create the pod."""
    if _QUOTA.search(event.message):
        return Reason("quota", f"a quota of the namespace is exceeded: {cut(event.message)}")
    return Reason("refused", f"its pod cannot be created ({event.reason}): {cut(event.message)}")


def of_failed(pod: Pod, status: ContainerStatus | None) -> Reason:
    """A pod that ended without success."""
    said = cut(pod.status.message)
    target = condition(pod.status.conditions, "DisruptionTarget")
    if target is not None and target.status == "True" and target.reason in _DISRUPTIONS:
        code, words = _DISRUPTIONS[target.reason]
        return Reason(code, f"it was {words}{f': {said or cut(target.message)}' if said or target.message else ''}")
    ended = status.state.terminated if status else None
    if pod.status.reason == "Evicted":
        return Reason("evicted", f"its node evicted it: {said}")
    if pod.status.reason == "DeadlineExceeded":
        return Reason("deadline", f"it did not end in time: {said}")
    if pod.status.reason in {"NodeLost", "NodeShutdown", "Shutdown", "Terminated"}:
        return Reason("node-not-ready", f"its node was lost ({pod.status.reason}): {said}")
    if ended is not None and ended.reason == "OOMKilled":
        return Reason("oom", "it was killed because it used more memory than its limit, or its node had none left")
    if ended is not None and ended.reason in _CONFIG | {"ContainerCannotRun"}:
        return Reason("config", f"its container did not start ({ended.reason}): {cut(ended.message)}")
    if ended is not None:
        signal = f", signal {ended.signal}" if ended.signal else ""
        return Reason("failed", f"its program ended with exit code {ended.exit_code}{signal}")
    return Reason("failed", f"it failed{f' ({pod.status.reason})' if pod.status.reason else ''}: {said or 'no reason'}")


def of_job(conditions: tuple[Condition, ...] | None) -> Reason | None:
    """Of a Job that has failed. None: it has not."""
    failed = condition(conditions, "Failed")
    if failed is None or failed.status != "True":
        return None
    if failed.reason == "DeadlineExceeded":
        return Reason("deadline", "it did not end before its deadline (activeDeadlineSeconds); use a longer --timeout")
    if failed.reason == "BackoffLimitExceeded":
        return Reason("restarts", "it failed again and again (backoffLimit)")
    return Reason("failed", f"its Job failed ({failed.reason}): {cut(failed.message)}")


def of_node(name: str, nodes: Mapping[str, Node] | None) -> Reason | None:
    """Of a node on which a pod seems to run. None: nothing is wrong with it, or that is not known."""
    if nodes is None:
        return None
    node = nodes.get(name)
    if node is None:
        return Reason("node-gone", "its node is no longer part of the cluster")
    ready = condition(node.status.conditions, "Ready")
    if ready is not None and ready.status != "True":
        return Reason("node-not-ready", f"its node is not ready ({ready.reason}): {cut(ready.message)}")
    return None


def cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
