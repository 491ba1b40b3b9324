"""The state of every node of a run, from what the cluster lists: roots, pods, events, nodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.fleet.status import LOST, NodeStatus, Phase
from gpukeeper.acceptance.launchers.kubernetes import marks, reasons
from gpukeeper.acceptance.launchers.kubernetes.catalog import STAYING
from gpukeeper.acceptance.launchers.kubernetes.reasons import Reason
from gpukeeper.acceptance.launchers.kubernetes.wire import ContainerStatus, Event, Node, Pod, Root, at, condition

ENDED = {"Succeeded", "Failed"}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. `nodes` None: not listed, because no pod needs them or because they may not be listed."""

    spec: RunSpec
    targets: tuple[Target, ...]
    roots: Sequence[Root]
    pods: Sequence[Pod]
    events: Sequence[Event] = ()
    nodes: Mapping[str, Node] | None = None


def statuses(facts: Facts) -> tuple[NodeStatus, ...]:
    by_node, homeless = _by_node(facts)
    roots = {(one.metadata.annotations or {}).get(marks.NODE, ""): one for one in facts.roots}
    shared = roots.get("") if "" in roots else None
    events: dict[str, list[Event]] = defaultdict(list)
    for one in facts.events:
        events[one.involved_object.uid].append(one)
    found = []
    names = sorted({one.node for one in facts.targets} | set(by_node) | set(filter(None, roots)))
    excluded = {one.node: one.excluded for one in facts.targets if one.excluded}
    for node in names:
        if node in excluded and node not in by_node:
            found.append(NodeStatus(node=node, phase=Phase.GONE, code="excluded", reason=excluded[node]))
            continue
        root = roots.get(node, shared)
        pods = sorted(by_node.get(node, ()), key=lambda one: one.metadata.creation_timestamp or "")
        found.append(_status(node, root, pods, homeless, events, facts))
    return tuple(found)


def node_of(pod: Pod) -> str:
    """Where it runs, or is to run. Empty: any of several nodes."""
    if pod.spec.node_name:
        return pod.spec.node_name
    named = (pod.metadata.annotations or {}).get(marks.NODE)
    if named:
        return named
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    terms = affinity.required.node_selector_terms if affinity and affinity.required else ()
    fields = [one for term in terms for one in term.match_fields or () if one.key == "metadata.name"]
    values = {value for one in fields for value in one.values or ()}
    return values.pop() if len(values) == 1 else ""


def _by_node(facts: Facts) -> tuple[dict[str, list[Pod]], list[Pod]]:
    found: dict[str, list[Pod]] = defaultdict(list)
    homeless = []
    for one in facts.pods:
        node = node_of(one)
        if node:
            found[node].append(one)
        else:
            homeless.append(one)
    return found, homeless


def _status(
    node: str,
    root: Root | None,
    pods: Sequence[Pod],
    homeless: Sequence[Pod],
    events: Mapping[str, Sequence[Event]],
    facts: Facts,
) -> NodeStatus:
    failed = reasons.of_job(root.status.conditions) if root else None
    if pods:
        found = _of_pod(node, pods, events, facts)
        if failed is not None and failed.code == "deadline" and found.code not in {"oom", "evicted"}:
            why = Reason(found.code, found.reason) if found.code in LOST else failed  # a longer one would not help
            return msgspec.structs.replace(found, phase=Phase.ENDED, code=why.code, reason=why.sentence)
        return found
    phase, why = _without_pods(root, failed, homeless, events)
    return NodeStatus(node=node, phase=phase, code=why.code, reason=why.sentence)


def _without_pods(
    root: Root | None, failed: Reason | None, homeless: Sequence[Pod], events: Mapping[str, Sequence[Event]]
) -> tuple[Phase, Reason]:
    if root is None:
        return Phase.GONE, Reason("vanished", "the cluster has nothing of it: it was removed, or never created")
    if failed is not None:
        why = (
            failed if failed.code == "deadline" else Reason("vanished", f"{failed.sentence}; its pod no longer exists")
        )
        return Phase.GONE, why
    if any(
        one.type in {"Complete", "Succeeded", "Completed"} and one.status == "True"
        for one in root.status.conditions or ()
    ):
        return Phase.GONE, Reason("vanished", "it has ended, and its pod with its log no longer exists")
    refused = [one for one in events.get(root.metadata.uid, ()) if one.reason == "FailedCreate"]
    if refused:
        return Phase.WAITING, reasons.of_refused_creation(refused[-1])
    if homeless:
        one = homeless[0]
        return Phase.WAITING, reasons.of_waiting(one, _container(one), events.get(one.metadata.uid, ()))
    return Phase.WAITING, Reason("never-created", "its controller has not created its pod yet")


def _of_pod(node: str, pods: Sequence[Pod], events: Mapping[str, Sequence[Event]], facts: Facts) -> NodeStatus:
    """By the newest pod that says something: one that succeeded, or runs, or the last."""
    pod = next((one for one in pods if one.status.phase == "Succeeded"), pods[-1])
    status = _container(pod)
    attempt = len(pods) - 1 + (status.restart_count if status else 0)
    ended = status.state.terminated if status else None
    since = at(pod.status.start_time) or at(pod.metadata.creation_timestamp)
    if pod.status.phase in ENDED:
        why = Reason() if pod.status.phase == "Succeeded" else reasons.of_failed(pod, status)
        return NodeStatus(
            node=node,
            phase=Phase.ENDED,
            code=why.code,
            reason=why.sentence,
            exit_code=ended.exit_code if ended else None,
            attempt=attempt,
            message=ended.message if ended else "",
            since=(at(ended.finished_at) if ended else None) or since,
        )
    return _of_living(node, pod, status, attempt, since, events, facts)


def _of_living(
    node: str,
    pod: Pod,
    status: ContainerStatus | None,
    attempt: int,
    since: datetime | None,
    events: Mapping[str, Sequence[Event]],
    facts: Facts,
) -> NodeStatus:
    lost = reasons.of_node(node, facts.nodes)
    before = status.last_state.terminated if status else None
    if lost is not None:
        phase = Phase.WAITING if status is None or status.state.running is None else Phase.RUNNING
        return NodeStatus(node=node, phase=phase, code=lost.code, reason=lost.sentence, attempt=attempt, since=since)
    if status is None or status.state.running is None:
        if before is not None and status is not None and status.state.waiting is not None:
            why = Reason(
                "restarts", f"it is restarted after exit code {before.exit_code} ({status.state.waiting.reason})"
            )
        else:
            where = (facts.nodes or {}).get(node)
            why = reasons.of_waiting(pod, status, events.get(pod.metadata.uid, ()), where)
        return NodeStatus(
            node=node, phase=Phase.WAITING, code=why.code, reason=why.sentence, attempt=attempt, since=since
        )
    if facts.spec.form in STAYING and status.ready:
        return NodeStatus(node=node, phase=Phase.ENDED, attempt=attempt, since=since)
    going = "it is being removed" if pod.metadata.deletion_timestamp else ""
    return NodeStatus(
        node=node, phase=Phase.RUNNING, code="removing" if going else "", reason=going, attempt=attempt, since=since
    )


def needs_events(pods: Sequence[Pod], roots: Sequence[Root]) -> bool:
    """Whether a pod waits, or a controller may have been refused one."""
    if any(one.status.phase == "Pending" for one in pods):
        return True
    owners = {owner.uid for one in pods for owner in one.metadata.owner_references or ()}
    return any(one.metadata.uid not in owners for one in roots)


def needs_nodes(pods: Sequence[Pod]) -> bool:
    """Whether a pod seems to run, and its node may not: the control plane marks its pods as not ready. Or a taint of
    its node is an obstacle."""
    for one in pods:
        if reasons.is_tainted(condition(one.status.conditions, "PodScheduled")):
            return True
        ready = condition(one.status.conditions, "Ready")
        if one.status.phase == "Running" and (ready is None or ready.status != "True"):
            return True
    return False


def _container(pod: Pod) -> ContainerStatus | None:
    return next(iter(pod.status.container_statuses or ()), None)
