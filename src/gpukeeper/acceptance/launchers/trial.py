"""The trial: one pod for one GPU, on any node or on each, that prints what is there.

Removed in every case: also when this command is interrupted. Killed, it leaves a pod that ends at its deadline and is
found by its run id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.preflight.facts import GPU, ClusterRequest, Finding, named, passed, warning
from gpukeeper.acceptance.fleet.preflight.kubernetes import IMAGE_REASONS, TrialFacts
from gpukeeper.acceptance.launchers.preflight import ENDED
from gpukeeper.clients.kubernetes.api import EVENTS, PODS, Api
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Event, Pod, condition
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown

RUN, TRIAL, OWNER = "gpukeeper.io/run", "gpukeeper.io/trial", "gpukeeper.io/owner"
LOG_MAX = 256 * 1024
POLL_S, GONE_S = 1.0, 60.0
USER = 10001
FINAL = (*IMAGE_REASONS, "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Only what every shell has built in, and nvidia-smi and gpukeeper where the image has them.
SCRIPT = r"""
say() { echo "gpukeeper-fact $*"; }
cpus=0
while read -r key rest; do [ "$key" = processor ] && cpus=$((cpus + 1)); done < /proc/cpuinfo
say cpus "$cpus"
while read -r key value unit; do [ "$key" = MemTotal: ] && say memory "$value $unit"; done < /proc/meminfo
while read -r device at kind options rest; do
    [ "$at" = /dev/shm ] && for option in $(IFS=,; set -f; echo $options); do
        case $option in size=*) say shm "${option#size=}";; esac
    done
done < /proc/mounts
say memlock "$(ulimit -l)"
while read -r key value rest; do
    [ "$key" = Uid: ] && say user "$value"
    [ "$key" = CapEff: ] && say capabilities "$value"
done < /proc/self/status
for path in /sys/class/net/*; do
    [ -e "$path" ] || continue
    state=; speed=
    read -r state < "$path/operstate" 2>/dev/null
    { read -r speed < "$path/speed"; } 2>/dev/null
    say interface "${path##*/} ${state:-unknown}${speed:+ $speed Mb/s}"
done
for path in /sys/class/infiniband/*/ports/*; do
    [ -e "$path" ] || continue
    layer=; state=; rate=
    read -r layer < "$path/link_layer"; read -r state < "$path/state"; read -r rate < "$path/rate"
    device=${path#/sys/class/infiniband/}
    say port "${device%%/*}/${path##*/} $layer $state $rate"
done
if command -v nvidia-smi >/dev/null 2>&1; then
    say nvidia-smi "$(nvidia-smi -L 2>&1 | { read -r first; echo "$first"; })"
    ask() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }
    ask name,uuid,serial | while read -r one; do say gpu "$one"; done
    ask driver_version | { read -r one && say driver "$one"; }
fi
command -v gpukeeper >/dev/null 2>&1 && say gpukeeper "$(gpukeeper --version 2>&1)"
say end
"""


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    owner: str
    cluster: ClusterRequest
    nodes: tuple[str, ...] = ()  # one pod each; empty: one on any node
    deadline_s: float = 300.0


async def tried(
    api: Api, request: TrialRequest, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> tuple[TrialFacts, ...]:
    """Every trial; the pods are gone afterwards, or the facts say which are not."""
    left: dict[str, str] = {}
    found: list[TrialFacts] = []
    try:
        found = list(
            await asyncio.gather(
                *(_one(api, request, number, node, sleep) for number, node in enumerate(request.nodes or ("",)))
            )
        )
    finally:
        left = await removed(api, request, sleep)
    return tuple(msgspec.structs.replace(one, left=left.get(one.name, "")) for one in found)


async def removed(
    api: Api, request: TrialRequest, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> dict[str, str]:
    """Delete the pods of this trial, each by its uid, and read again until they are gone; what is left, and why."""
    namespace, left = request.cluster.namespace, dict[str, str]()
    waited = 0.0
    while True:
        try:
            listed = (await api.list(PODS, Pod, namespace=namespace, labels=f"{RUN}={request.run},{TRIAL}")).items
            pods = [pod for pod in listed if _is_of(pod, request.owner)]
            left = {pod.metadata.name: "it is being deleted" for pod in pods}
            for pod in pods:
                if pod.metadata.deletion_timestamp is None:
                    await api.delete(PODS, pod.metadata.name, pod.metadata.uid, namespace=namespace, grace=1)
        except PlatformError as error:
            left = left or {"": str(error)}
            left = dict.fromkeys(left, str(error))
        if not left or waited >= GONE_S:
            return left
        await sleep(POLL_S)
        waited += POLL_S


async def leftovers(api: Api, namespace: str, owner: str) -> tuple[Finding, ...]:
    """Trial pods of earlier commands that were killed. Those of this owner that have ended are removed; the others are
    named: a label alone does not prove whose pod it is."""
    try:
        pods = (await api.list(PODS, Pod, namespace=namespace, labels=TRIAL)).items
    except PlatformError:
        return ()  # the trial itself will say so
    ended = [pod for pod in pods if pod.status.phase in ENDED]
    over = [pod for pod in ended if _is_of(pod, owner) and pod.metadata.deletion_timestamp is None]
    for pod in over:
        await api.delete(PODS, pod.metadata.name, pod.metadata.uid, namespace=namespace)
    found = []
    if over:
        names = [pod.metadata.name for pod in over]
        found.append(passed("trial-left", f"removed {named(names)}, left by an earlier preflight", names))
    found += _kept(
        [pod for pod in pods if pod.status.phase not in ENDED],
        "another trial runs, or was killed and ends at its deadline",
        namespace,
    )
    found += _kept([pod for pod in ended if not _is_of(pod, owner)], "ended, of another owner; kept", namespace)
    return tuple(found)


def _kept(pods: list[Pod], why: str, namespace: str) -> list[Finding]:
    if not pods:
        return []
    names = [pod.metadata.name for pod in pods]
    fix = [f"kubectl -n {namespace} delete pod {name}" for name in names]
    return [warning("trial-left", f"{named(names)}: {why}", names, fix)]


def _name(run: str, number: int) -> str:
    return f"gpukeeper-trial-{run}-{number}"


def _is_of(pod: Pod, owner: str) -> bool:
    """Whether a preflight of this owner created it."""
    meta = pod.metadata
    stem, _, number = meta.name.rpartition("-")
    named_so = number.isdecimal() and f"{stem}-{number}" == _name((meta.labels or {}).get(RUN, ""), int(number))
    return named_so and not meta.owner_references and (meta.annotations or {}).get(OWNER) == owner


async def _one(
    api: Api, request: TrialRequest, number: int, node: str, sleep: Callable[[float], Awaitable[None]]
) -> TrialFacts:
    where = request.cluster.namespace
    name = _name(request.run, number)
    facts = TrialFacts(run=request.run, namespace=where, name=name, image=request.cluster.image, wanted=node)
    # Not cancelled on its way: a pod that was created and is not known would be left.
    making = asyncio.ensure_future(api.create(PODS, manifest(request, name, node), Pod, namespace=where))
    try:
        made = await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        raise
    except ApiError as error:
        return msgspec.structs.replace(facts, reason=error.reason or "Refused", message=str(error))
    except PlatformError as error:
        return msgspec.structs.replace(facts, reason="NoAnswer", message=str(error))
    return await _followed(api, request, facts, made.metadata.uid, sleep)


async def _followed(
    api: Api, request: TrialRequest, facts: TrialFacts, uid: str, sleep: Callable[[float], Awaitable[None]]
) -> TrialFacts:
    waited = 0.0
    while True:
        try:
            pod = await api.get(PODS, facts.name, Pod, namespace=facts.namespace)
        except PlatformError as error:
            return msgspec.structs.replace(facts, reason="NoAnswer", message=str(error))
        if pod is None or pod.metadata.uid != uid:
            return msgspec.structs.replace(facts, reason="Vanished", message="it was removed before it ended")
        reason, message = _waits(pod)
        if pod.status.phase in ENDED or reason in FINAL or waited >= request.deadline_s:
            break
        await sleep(POLL_S)
        waited += POLL_S
    events = await _events(api, facts.namespace, uid)
    facts = msgspec.structs.replace(facts, node=pod.spec.node_name, reason=reason, message=message, events=events)
    ended = [one.terminated for one in pod.status.container_statuses or () if one.terminated is not None]
    if pod.status.phase not in ENDED or not ended:
        return facts if facts.reason else msgspec.structs.replace(facts, reason="Deadline", message=pod.status.phase)
    output = await _output(api, facts)
    return msgspec.structs.replace(facts, exit_code=ended[0].exit_code, output=output)


def _waits(pod: Pod) -> tuple[str, str]:
    for one in pod.status.container_statuses or ():
        if one.waiting is not None and one.waiting.reason != "ContainerCreating":
            return one.waiting.reason, one.waiting.message
    scheduled = condition(pod.status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled.reason, scheduled.message
    return pod.status.reason, pod.status.message


async def _events(api: Api, namespace: str, uid: str) -> tuple[str, ...]:
    try:
        found = await api.list(EVENTS, Event, namespace=namespace, fields=f"involvedObject.uid={uid}")
    except PlatformError:
        return ()
    return tuple(
        f"{one.reason}: {one.message}" for one in found.items if one.type == "Warning" or one.reason == "Scheduled"
    )


async def _output(api: Api, facts: TrialFacts) -> str | Unknown:
    try:
        found = await api.log(facts.name, namespace=facts.namespace, limit=LOG_MAX)
    except PlatformError as error:
        return Unknown(str(error))
    return found.decode("utf-8", "replace")


def manifest(request: TrialRequest, name: str, node: str) -> dict[str, Any]:
    """Least privilege: no root, no capability, no token, nothing of the host, a read-only root."""
    cluster = request.cluster
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(request.deadline_s) + 60,  # this command ends first, unless it was killed
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": one} for one in cluster.pull_secrets],
        "tolerations": [_plain(one) for one in cluster.tolerations],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "trial",
                "image": cluster.image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", SCRIPT],
                "resources": {"limits": {GPU: "1", "memory": "1Gi"}, "requests": {"cpu": "100m"}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - of the pod
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}],
    }
    if node:
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    labels = {RUN: request.run, "gpukeeper.io/acceptance": "run", TRIAL: "preflight", "app": "gpu-acceptance-test"}
    meta = {"name": name, "labels": labels, "annotations": {OWNER: request.owner}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _plain(one: object) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(one).items() if value}  # type: ignore[arg-type]
