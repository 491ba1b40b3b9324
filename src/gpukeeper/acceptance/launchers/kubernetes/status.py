"""What is in the cluster: nodes that a run can test, objects that belong to it, the state of each of its nodes. Pure.

Labels only find candidates: anyone who may create an object can write them. These count: objects that nothing controls
and that carry the description of the run, and what they control, by uid. Why a pod waits or failed: a stable code and
a sentence (`Reason`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from gpukeeper.acceptance.fleet.launcher import LOST, STAYING, NodeStatus, Phase, RunSpec, Target
from gpukeeper.acceptance.launchers.kubernetes import forms, objects
from gpukeeper.acceptance.launchers.kubernetes.objects import GPU_RESOURCES, KubernetesOptions
from gpukeeper.clients.kubernetes.api import PODS, Resource
from gpukeeper.clients.kubernetes.wire import (
    ContainerStatus,
    DetailedPod,
    Event,
    Meta,
    Node,
    PartialObject,
    Pod,
    StatusCondition,
    condition,
    count,
)
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError

POD_ENDED = {"Succeeded", "Failed"}
_PODS_SHOWN = 3


def choose_targets(
    spec: RunSpec, options: KubernetesOptions, nodes: Sequence[Node], pods: Iterable[Pod] | None
) -> tuple[Target, ...]:
    """`options`: with the namespace of the run. `nodes`: those that the selector selects. `pods`: None if they may not
    be listed; then no node counts as busy."""
    named = frozenset(spec.nodes)
    missing = sorted(named - {one.metadata.name for one in nodes})
    if missing:
        raise UsageError(
            f"The cluster has no node {', '.join(missing)}. Nothing was created. `kubectl get nodes` lists the names."
        )
    own = (options.namespace, spec.run)  # a run that is started again does not make its own nodes busy
    used = _used_gpus(one for one in pods or () if (one.metadata.namespace, objects.run_of(one.metadata.labels)) != own)
    found = []
    for node in sorted(nodes, key=lambda one: one.metadata.name):
        name = node.metadata.name
        if named and name not in named:
            continue
        resource, gpus = gpus_of(node, options.gpu)
        if gpus is None and not named and spec.gpus_per_node != 0:
            continue  # a node without GPUs is not meant by "all"
        why = _obstacle(spec, options, node, resource, gpus, used.get(name, {}))
        found.append(Target(node=name, gpus=gpus, resource=resource, excluded=why))
    return tuple(found)


def gpus_of(node: Node, resource: str = "") -> tuple[str, int | None]:
    """The resource that the node announces, and how many of it pods can get. None: it announces none."""
    for name in (resource,) if resource else GPU_RESOURCES:
        free, whole = count(node.status.allocatable, name), count(node.status.capacity, name)
        if free or whole:
            return name, free or 0
    return resource, None


def _obstacle(
    spec: RunSpec,
    options: KubernetesOptions,
    node: Node,
    resource: str,
    gpus: int | None,
    used: Mapping[str, Mapping[str, int]],
) -> str:
    """A sentence, or nothing."""
    name = node.metadata.name
    ready = condition(node.status.conditions, "Ready")
    if ready is None or ready.status != "True":
        why = f" ({ready.message or ready.reason})" if ready and (ready.message or ready.reason) else ""
        return f"the node is not ready{why}; `kubectl describe node {name}` has the reason"
    if node.spec.unschedulable and name not in spec.nodes:
        return f"the node is cordoned; name it with --nodes to test it, or run `kubectl uncordon {name}`"
    taints = [one for one in node.spec.taints or () if one.blocks]
    taints = [one for one in taints if one.key != "node.kubernetes.io/unschedulable"]
    if taints and not options.tolerate:
        words = ", ".join(one.words for one in taints)
        return f"the node has a taint that the run does not tolerate ({words}); use the option tolerate=yes"
    wanted = spec.gpus_per_node
    if wanted == 0:
        return ""
    if gpus is None:
        return f"the node announces no GPU ({' or '.join(GPU_RESOURCES)}); check its device plugin"
    if gpus == 0:
        return f"none of its GPUs can be allocated ({resource}: 0); check its device plugin"
    if wanted is not None and wanted > gpus:
        return f"{wanted} GPUs are wanted and the node has {gpus} ({resource})"
    taken = used.get(resource, {})
    free = gpus - sum(taken.values())
    if options.busy == "exclude" and free < (wanted or gpus):
        holders = [f"{pod} ({number})" for pod, number in sorted(taken.items())]
        more = f" and {len(holders) - _PODS_SHOWN} more" if len(holders) > _PODS_SHOWN else ""
        return (
            f"{sum(taken.values())} of its {gpus} GPUs are in use by {', '.join(holders[:_PODS_SHOWN])}{more}; "
            "wait, or use the option busy=wait"
        )
    return ""


def _used_gpus(pods: Iterable[Pod]) -> dict[str, dict[str, dict[str, int]]]:
    """GPUs by node, resource and pod. A pod that is being removed has them until it is gone."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for pod in pods:
        if not pod.spec.node_name or pod.status.phase in POD_ENDED:
            continue
        for one in pod.spec.containers:
            limits = one.resources.limits if one.resources else None
            for resource in limits or {}:
                number = count(limits, resource) if "/" in resource else None
                if number:
                    taken = found[pod.spec.node_name][resource]
                    label = f"{pod.metadata.namespace}/{pod.metadata.name}"
                    taken[label] = taken.get(label, 0) + number
    return found


class Found(msgspec.Struct, frozen=True):
    resource: Resource
    root: PartialObject

    @property
    def meta(self) -> Meta:
        return self.root.metadata

    @property
    def words(self) -> str:
        return f"{self.resource.kind.lower()}/{self.meta.name}"


# The namespace is the boundary: those who may create objects in it are trusted with its runs.
class Members(msgspec.Struct, frozen=True):
    """`uids`: of `own` and of all that they control. `foreign`: has the label of the run, and no description of it."""

    own: tuple[Found, ...]
    uids: frozenset[str]
    foreign: tuple[Found, ...] = ()

    @property
    def roots(self) -> list[PartialObject]:
        return [one.root for one in self.own if one.resource in forms.ROOTS]

    def has(self, pod: Pod) -> bool:
        return pod.metadata.controller in self.uids

    def description(self) -> tuple[RunSpec, tuple[Target, ...]]:
        """The one of the oldest object, with the names of all nodes if another one has them. The date is not earlier
        than the one that the server gave the object: an old date in a description makes no run end early."""
        ordered = sorted(self.own, key=lambda one: one.meta.creation_timestamp or "")
        described = [(spec, one) for one in ordered if (spec := objects.spec_of(one.meta.annotations)) is not None]
        first, oldest = described[0]
        same = [(spec, one) for spec, one in described if _without_nodes(spec) == _without_nodes(first)]
        spec = max((spec for spec, _ in same), key=lambda one: len(one.nodes))
        created = at(oldest.meta.creation_timestamp)
        targets = max((objects.targets_of(one.meta.annotations) for _, one in same), key=len)
        late = created is not None and created > spec.created
        return (msgspec.structs.replace(spec, created=created) if late else spec), targets


NO_MEMBERS = Members(own=(), uids=frozenset())


def members_by_run(found: Iterable[Found]) -> dict[str, Members]:
    """Runs of which at least one object carries the description; and those of which only labels were found."""
    candidates: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        candidates[objects.run_of(one.meta.labels)].append(one)
    return {run: _members_of(run, of_run) for run, of_run in sorted(candidates.items()) if run}


def without_controller(pods: Iterable[Pod]) -> list[Found]:
    """Their controller was removed without them, or somebody else created them: which of the two is unknown."""
    return [Found(PODS, PartialObject(metadata=one.metadata)) for one in pods if not one.metadata.controller]


def is_described(meta: Meta, run: str) -> bool:
    """Whether this is an object that a launcher created for this run."""
    spec = objects.spec_of(meta.annotations)
    return not meta.controller and objects.run_of(meta.labels) == run and spec is not None and spec.run == run


def _members_of(run: str, found: Sequence[Found]) -> Members:
    own = tuple(one for one in found if is_described(one.meta, run))
    foreign = tuple(one for one in found if not one.meta.controller and one not in own)
    return Members(
        own=own, uids=_controlled_by([one.meta for one in own], [one.meta for one in found]), foreign=foreign
    )


def _controlled_by(own: Sequence[Meta], found: Sequence[Meta]) -> frozenset[str]:
    below: Mapping[str, list[str]] = defaultdict(list)
    for one in found:
        below[one.controller].append(one.uid)
    known: set[str] = set()
    waiting = [one.uid for one in own]
    while waiting:
        uid = waiting.pop()
        if uid and uid not in known:
            known.add(uid)
            waiting += below.get(uid, ())
    return frozenset(known)


def _without_nodes(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, nodes=())


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


def reason_of_waiting(
    pod: Pod, status: ContainerStatus | None, events: Sequence[Event], node: Node | None = None
) -> Reason:
    """A pod that has not started. `node`: the one that it is to run on, if that is one and was listed."""
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return unschedulable(scheduled, node)
    waiting = status.waiting if status else None
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


def unschedulable(scheduled: StatusCondition, node: Node | None = None) -> Reason:
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


def is_tainted(scheduled: StatusCondition | None) -> bool:
    """Whether the scheduler names a taint as the obstacle."""
    return scheduled is not None and scheduled.status == "False" and "untolerated taint" in scheduled.message


def _taints(said: str, node: Node | None) -> str:
    """By the node, since newer schedulers only count them: 1 node(s) had untolerated taint(s)."""
    blocking = [one.words for one in (node.spec.taints if node else None) or () if one.blocks]
    if blocking:
        return f" ({', '.join(blocking)})"
    named = re.search(r"untolerated taint(?:\(s\))? ?\{([^}]*)\}", said)
    return f" ({named.group(1).strip()})" if named else ""


def reason_of_refusal(event: Event) -> Reason:
    """Its controller could not create the pod."""
    if _QUOTA.search(event.message):
        return Reason("quota", f"a quota of the namespace is exceeded: {cut(event.message)}")
    return Reason("refused", f"its pod cannot be created ({event.reason}): {cut(event.message)}")


def reason_of_failure(pod: Pod, status: ContainerStatus | None) -> Reason:
    """A pod that ended without success."""
    said = cut(pod.status.message)
    target = condition(pod.status.conditions, "DisruptionTarget")
    if target is not None and target.status == "True" and target.reason in _DISRUPTIONS:
        code, words = _DISRUPTIONS[target.reason]
        return Reason(code, f"it was {words}{f': {said or cut(target.message)}' if said or target.message else ''}")
    ended = status.terminated if status else None
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


def reason_of_job(conditions: tuple[StatusCondition, ...] | None) -> Reason | None:
    """Of a Job that has failed. None: it has not."""
    failed = condition(conditions, "Failed")
    if failed is None or failed.status != "True":
        return None
    if failed.reason == "DeadlineExceeded":
        return Reason("deadline", "it did not end before its deadline (activeDeadlineSeconds); use a longer --timeout")
    if failed.reason == "BackoffLimitExceeded":
        return Reason("restarts", "it failed again and again (backoffLimit)")
    return Reason("failed", f"its Job failed ({failed.reason}): {cut(failed.message)}")


def reason_of_node(name: str, nodes: Mapping[str, Node] | None) -> Reason | None:
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


ENDED = {"Succeeded", "Failed"}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. `nodes` None: not listed, because no pod needs them or because they may not be listed."""

    spec: RunSpec
    targets: tuple[Target, ...]
    roots: Sequence[PartialObject]
    pods: Sequence[DetailedPod]
    events: Sequence[Event] = ()
    nodes: Mapping[str, Node] | None = None


def statuses(facts: Facts) -> tuple[NodeStatus, ...]:
    by_node, homeless = _by_node(facts)
    roots = {(one.metadata.annotations or {}).get(objects.NODE_ANNOTATION, ""): one for one in facts.roots}
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


def node_of(pod: DetailedPod) -> str:
    """Where it runs, or is to run. Empty: any of several nodes."""
    if pod.spec.node_name:
        return pod.spec.node_name
    named = (pod.metadata.annotations or {}).get(objects.NODE_ANNOTATION)
    if named:
        return named
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    terms = affinity.required.node_selector_terms if affinity and affinity.required else ()
    fields = [one for term in terms for one in term.match_fields or () if one.key == "metadata.name"]
    values = {value for one in fields for value in one.values or ()}
    return values.pop() if len(values) == 1 else ""


def _by_node(facts: Facts) -> tuple[dict[str, list[DetailedPod]], list[DetailedPod]]:
    found: dict[str, list[DetailedPod]] = defaultdict(list)
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
    root: PartialObject | None,
    pods: Sequence[DetailedPod],
    homeless: Sequence[DetailedPod],
    events: Mapping[str, Sequence[Event]],
    facts: Facts,
) -> NodeStatus:
    failed = reason_of_job(root.status.conditions) if root else None
    if pods:
        found = _of_pod(node, pods, events, facts)
        if failed is not None and failed.code == "deadline" and found.code not in {"oom", "evicted"}:
            why = Reason(found.code, found.reason) if found.code in LOST else failed  # a longer one would not help
            return msgspec.structs.replace(found, phase=Phase.ENDED, code=why.code, reason=why.sentence)
        return found
    phase, why = _without_pods(root, failed, homeless, events)
    return NodeStatus(node=node, phase=phase, code=why.code, reason=why.sentence)


def _without_pods(
    root: PartialObject | None,
    failed: Reason | None,
    homeless: Sequence[DetailedPod],
    events: Mapping[str, Sequence[Event]],
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
        return Phase.WAITING, reason_of_refusal(refused[-1])
    if homeless:
        one = homeless[0]
        return Phase.WAITING, reason_of_waiting(one, _container(one), events.get(one.metadata.uid, ()))
    return Phase.WAITING, Reason("never-created", "its controller has not created its pod yet")


def _of_pod(node: str, pods: Sequence[DetailedPod], events: Mapping[str, Sequence[Event]], facts: Facts) -> NodeStatus:
    """By the newest pod that says something: one that succeeded, or runs, or the last."""
    pod = next((one for one in pods if one.status.phase == "Succeeded"), pods[-1])
    status = _container(pod)
    attempt = len(pods) - 1 + (status.restart_count if status else 0)
    ended = status.terminated if status else None
    since = at(pod.status.start_time) or at(pod.metadata.creation_timestamp)
    if pod.status.phase in ENDED:
        why = Reason() if pod.status.phase == "Succeeded" else reason_of_failure(pod, status)
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
    lost = reason_of_node(node, facts.nodes)
    before = status.terminated_before if status else None
    if lost is not None:
        phase = Phase.WAITING if status is None or status.running is None else Phase.RUNNING
        return NodeStatus(node=node, phase=phase, code=lost.code, reason=lost.sentence, attempt=attempt, since=since)
    if status is None or status.running is None:
        if before is not None and status is not None and status.waiting is not None:
            why = Reason("restarts", f"it is restarted after exit code {before.exit_code} ({status.waiting.reason})")
        else:
            where = (facts.nodes or {}).get(node)
            why = reason_of_waiting(pod, status, events.get(pod.metadata.uid, ()), where)
        return NodeStatus(
            node=node, phase=Phase.WAITING, code=why.code, reason=why.sentence, attempt=attempt, since=since
        )
    if facts.spec.form in STAYING and status.ready:
        return NodeStatus(node=node, phase=Phase.ENDED, attempt=attempt, since=since)
    going = "it is being removed" if pod.metadata.deletion_timestamp else ""
    return NodeStatus(
        node=node, phase=Phase.RUNNING, code="removing" if going else "", reason=going, attempt=attempt, since=since
    )


def needs_events(pods: Sequence[DetailedPod], roots: Sequence[PartialObject]) -> bool:
    """Whether a pod waits, or a controller may have been refused one."""
    if any(one.status.phase == "Pending" for one in pods):
        return True
    owners = {owner.uid for one in pods for owner in one.metadata.owner_references or ()}
    return any(one.metadata.uid not in owners for one in roots)


def needs_nodes(pods: Sequence[DetailedPod]) -> bool:
    """Whether a pod seems to run, and its node may not: the control plane marks its pods as not ready. Or a taint of
    its node is an obstacle."""
    for one in pods:
        if is_tainted(condition(one.status.conditions, "PodScheduled")):
            return True
        ready = condition(one.status.conditions, "Ready")
        if one.status.phase == "Running" and (ready is None or ready.status != "True"):
            return True
    return False


def _container(pod: Pod) -> ContainerStatus | None:
    return next(iter(pod.status.container_statuses or ()), None)


def at(text: str | None) -> datetime | None:
    """None: it is not set, or cannot be read."""
    try:
        return reading.moment(text) if text else None
    except ValueError:
        return None
