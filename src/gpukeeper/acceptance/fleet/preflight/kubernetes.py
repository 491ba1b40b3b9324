"""The rules for a cluster in the order of the output: rights, namespace, image, nodes; and for what a trial printed.

That an image can be pulled, and starts with a GPU, is proven by a trial only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.preflight import nodes
from gpukeeper.acceptance.fleet.preflight.facts import (
    GPU,
    ClusterFacts,
    ClusterRequest,
    Finding,
    LimitFacts,
    QuotaFacts,
    Right,
    SecretFacts,
    counted,
    failed,
    gibibytes,
    in_order,
    named,
    passed,
    quantity,
    targets,
    unchecked,
    warning,
)
from gpukeeper.acceptance.fleet.preflight.nodes import Network, nccl_advice
from gpukeeper.model.unknown import Unknown

ENFORCE = "pod-security.kubernetes.io/enforce"
STRICT = ("baseline", "restricted")  # neither allows IPC_LOCK
ROLE = "kubectl apply -f examples/kubernetes/rbac-preflight.yaml"
# What creates the objects of each form of a run.
FORMS = {
    "job": "jobs.batch",
    "indexed-job": "jobs.batch",
    "daemonset": "daemonsets.apps",
    "statefulset": "statefulsets.apps",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
}
TOGETHER = ("indexed-job", "statefulset")  # with a headless Service of ours
RUNTIME = "trainingruntimes.trainer.kubeflow.org"  # a TrainJob has one of its own
# Kinds that controllers create between the objects of a run and its pods.
BETWEEN = {"trainjob": ("jobsets.jobset.x-k8s.io", "jobs.batch"), "jobset": ("jobs.batch",)}


def needed(request: ClusterRequest) -> tuple[Right, ...]:
    """What `gpukeeper accept --on kubernetes` does, and with --trial this command."""
    kind, where = FORMS[request.form], request.namespace
    rights = [
        Right(verb="list", resource="nodes", why="to select nodes"),
        *(
            Right(verb=verb, resource=kind, namespace=where, why="to run")
            for verb in ("create", "get", "list", "delete")
        ),
        *(Right(verb=verb, resource="pods", namespace=where, why="to follow the run") for verb in ("get", "list")),
        Right(verb="get", resource="pods/log", namespace=where, why="to collect reports"),
        Right(verb="list", resource="events", namespace=where, why="to say why a pod waits"),
        *(Right(verb=verb, resource="pods", namespace=where, why="for --trial") for verb in ("create", "delete")),
    ]

    def some(resource: str, why: str, *verbs: str) -> list[Right]:
        return [Right(verb=verb, resource=resource, namespace=where, why=why) for verb in verbs]

    if request.form in TOGETHER or request.together:
        rights += some("services", "for the rendezvous", "create", "get", "list", "delete")
    if request.form == "trainjob":
        rights += some(RUNTIME, "for the runtime of the run", "create", "get", "list", "patch", "delete")
    for one in BETWEEN.get(request.form, ()):
        rights += some(one, "to know which pods belong to the run", "list")
    return tuple(rights)


def rights(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    unread = [one for one in facts.rights if isinstance(one.allowed, Unknown)]
    if unread:
        first = unread[0].allowed
        assert isinstance(first, Unknown)
        yield unchecked("rights", first, [_words(one.right) for one in unread], [_can_i(unread[0].right)])
    missing = [one.right for one in facts.rights if one.allowed is False]
    for right in missing:
        where = f"in namespace {right.namespace}" if right.namespace else "in the cluster"
        words = f"may not {_words(right)} {where}; needed {right.why}"
        yield failed("rights", words, [_words(right)], _grant(right))
    if facts.rights and not unread and not missing:
        yield passed("rights", f"the login may do all that the run needs ({len(facts.rights)} permissions asked for)")


def _words(right: Right) -> str:
    return f"{right.verb} {right.resource}"


def _can_i(right: Right) -> str:
    where = f" -n {right.namespace}" if right.namespace else ""
    return f"kubectl auth can-i {right.verb} {right.resource}{where}"


def _grant(right: Right) -> list[str]:
    """Run by an administrator; USER is the login of the run."""
    name = f"gpukeeper-{right.verb}-{right.resource.replace('/', '-').replace('.', '-')}"
    if not right.namespace:
        return [
            f"kubectl create clusterrole {name} --verb={right.verb} --resource={right.resource}",
            f"kubectl create clusterrolebinding {name} --clusterrole={name} --user=USER",
        ]
    return [
        f"kubectl -n {right.namespace} create role {name} --verb={right.verb} --resource={right.resource}",
        f"kubectl -n {right.namespace} create rolebinding {name} --role={name} --user=USER",
    ]


def namespace_rule(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.namespace, Unknown)
    name, found = request.namespace, facts.namespace
    if not found.exists:
        yield failed("namespace", f"namespace {name} does not exist", [name], [f"kubectl create namespace {name}"])
        return
    if found.ending:
        words = f"namespace {name} is being deleted; nothing can be created there"
        yield failed(
            "namespace", words, [name], [f"kubectl get namespace {name} -o yaml", "repeat with --namespace NAME"]
        )
        return
    level = found.labels.get(ENFORCE, "")
    if level in STRICT and request.lock_memory:
        words = (
            f"namespace {name} enforces Pod Security {level}, which forbids IPC_LOCK; the pods of the run are refused"
        )
        yield failed("admission", words, [name], [f"kubectl label namespace {name} {ENFORCE}=privileged --overwrite"])
    else:
        yield passed("namespace", f"namespace {name} exists{f'; Pod Security {level}' if level else ''}")


def quota(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.quotas, Unknown)
    chosen = targets(facts, request)
    gpus = sum(node.usable if request.gpus_per_node is None else request.gpus_per_node for node in chosen)
    wants = {f"requests.{GPU}": gpus, f"limits.{GPU}": gpus, "pods": len(chosen), "count/pods": len(chosen)}
    wants[f"count/{FORMS[request.form]}"] = len(chosen) if request.form == "job" else 1
    problems = [found for one in facts.quotas for found in _short(one, wants, request.namespace)]
    yield from problems
    if not problems:
        which = named(one.name for one in facts.quotas)
        yield passed("quota", f"quota {which} leaves room for {gpus} GPUs" if facts.quotas else "no ResourceQuota")


def _short(one: QuotaFacts, wants: dict[str, int], where: str) -> Iterator[Finding]:
    for name, count in wants.items():
        hard, used = quantity(one.hard.get(name)), quantity(one.used.get(name)) or Decimal(0)
        if hard is None or hard - used >= count:
            continue
        raised = int(used) + count
        words = f"ResourceQuota {one.name}: {name} is limited to {int(hard)}, {int(used)} in use; the run needs {count}"
        body = f"""{{"spec":{{"hard":{{"{name}":"{raised}"}}}}}}"""
        patch = f"kubectl -n {where} patch resourcequota {one.name} --type merge -p '{body}'"
        yield failed("quota", words, [one.name], [patch])
    compute = [name for name in ("limits.cpu", "limits.memory") if name in one.hard]
    if compute:
        words = f"ResourceQuota {one.name} limits {' and '.join(compute)}: pods without such limits are refused"
        yield warning(
            "quota",
            f"{words}, unless a LimitRange sets defaults",
            [one.name],
            [f"kubectl -n {where} describe resourcequota {one.name}"],
        )


def limit_range(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    assert not isinstance(facts.limits, Unknown)
    gpus = max((node.usable for node in targets(facts, request)), default=0)
    wanted = gpus if request.gpus_per_node is None else request.gpus_per_node
    problems = [found for one in facts.limits for found in _limited(one, wanted, request)]
    yield from problems
    if not problems:
        yield passed("limit-range", "no LimitRange restricts the pods of the run" if facts.limits else "no LimitRange")


def _limited(one: LimitFacts, gpus: int, request: ClusterRequest) -> Iterator[Finding]:
    show = [f"kubectl -n {request.namespace} edit limitrange {one.name}"]
    most = quantity(one.most.get(GPU))
    if most is not None and most < gpus:
        words = f"LimitRange {one.name}: at most {int(most)} GPUs in one {one.kind}, the run needs {gpus}"
        yield failed("limit-range", words, [one.name], show)
    shm = quantity(request.shm) or Decimal(0)
    for limit, what in ((one.most, "at most"), (one.default, "a default limit of")):
        memory = quantity(limit.get("memory"))
        if memory is not None and memory < shm:
            words = (
                f"LimitRange {one.name}: {what} {gibibytes(memory)} of memory; its shared memory of {gibibytes(shm)}"
            )
            yield failed("limit-range", f"{words} counts as memory, so the pod would be killed", [one.name], show)


PULL_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
TRY_IMAGE = "gpukeeper accept preflight --on kubernetes --trial --image"


def image(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    name = request.image
    if not name:
        yield unchecked("image", "no image was given", (), [f"{TRY_IMAGE} REGISTRY/gpukeeper-accept:VERSION"])
        return
    if is_floating(name):
        words = f"{name}: no fixed tag or digest, so nodes can run different versions"
        yield warning("image", words, [name], [f"{TRY_IMAGE} {name.removesuffix(':latest')}:VERSION"])
    chosen = targets(facts, request)
    have = [node.name for node in chosen if spelled(name) & set(node.images)]
    if have and len(have) == len(chosen):
        yield passed("image", f"{name} is on {counted(len(have), 'GPU node')} already", have)
    else:
        words = (
            f"{name} is on {len(have)} of {counted(len(chosen), 'GPU node')}; only a trial proves that it can be pulled"
        )
        yield unchecked("image", words, [name], [f"{TRY_IMAGE} {name}"])


def spelled(image: str) -> set[str]:
    """As a node may list it: with the default registry and tag."""
    last = image.rpartition("/")[2]
    tagged = image if ":" in last or "@" in image else f"{image}:latest"
    first = image.partition("/")[0]
    if "/" not in image:
        return {image, tagged, f"docker.io/library/{tagged}"}
    return (
        {image, tagged}
        if "." in first or ":" in first or first == "localhost"
        else {image, tagged, f"docker.io/{tagged}"}
    )


def is_floating(image: str) -> bool:
    if "@" in image:
        return False
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag in ("", "latest")


def pull_secrets(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    for secret in facts.secrets:
        yield _judged_secret(secret, request)


def _judged_secret(secret: SecretFacts, request: ClusterRequest) -> Finding:
    where, name = request.namespace, secret.name
    registry = request.image.partition("/")[0] if "/" in request.image else "REGISTRY"
    create = (
        f"kubectl -n {where} create secret docker-registry {name} --docker-server={registry} "
        "--docker-username=USER --docker-password=TOKEN"
    )
    if isinstance(secret.kind, Unknown):
        return unchecked("pull-secret", secret.kind, [name], [f"kubectl -n {where} get secret {name}"])
    if secret.kind is None:
        words = f"imagePullSecret {name} does not exist in namespace {where}; the image cannot be pulled with it"
        return failed("pull-secret", words, [name], [create])
    if secret.kind not in PULL_TYPES:
        words = f"Secret {where}/{name} has type {secret.kind}; an imagePullSecret needs {PULL_TYPES[0]}"
        return failed("pull-secret", words, [name], [f"kubectl -n {where} delete secret {name}", create])
    return passed("pull-secret", f"imagePullSecret {where}/{name} exists and has the right type", [name])


def shm(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
    """The shared memory of the pods counts as their memory."""
    size = quantity(request.shm)
    if size is None:
        words = f"{request.shm} is not a size such as 16Gi"
        yield failed("shm", words, (), ["gpukeeper accept preflight --on kubernetes --shm 16Gi"])
        return
    small = []
    for node in targets(facts, request):
        memory = quantity(node.allocatable.get("memory")) or Decimal(0)
        if memory < size * 2:
            small.append(f"{node.name} ({gibibytes(memory)})")
    if small:
        words = f"shared memory of {gibibytes(size)} is more than half of the allocatable memory of {named(small)}"
        yield warning("shm", words, small, ["gpukeeper accept --on kubernetes --shm 8Gi"])
    else:
        yield passed("shm", f"shared memory of {gibibytes(size)} fits into the memory of the GPU nodes")


TRIAL_MARK = "gpukeeper-fact "
TRIAL_FACTS_MAX = 500  # lines; an image can print anything
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
LAYERS = ("InfiniBand", "Ethernet")


class TrialFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One trial pod. `exit_code` None: its program did not end."""

    run: str
    namespace: str
    name: str
    image: str
    node: str = ""  # where it ran; empty: nowhere
    wanted: str = ""  # the node it was for; empty: any
    exit_code: int | None = None
    reason: str = ""  # ImagePullBackOff, Unschedulable, …
    message: str = ""
    output: str | Unknown = ""
    events: tuple[str, ...] = ()
    left: str = ""  # why it is still there


def facts_printed(output: str) -> dict[str, list[str]]:
    """Lines that begin with the mark: a name and a value."""
    found: dict[str, list[str]] = defaultdict(list)
    lines = [line for line in output.splitlines() if line.startswith(TRIAL_MARK)]
    for line in lines[:TRIAL_FACTS_MAX]:
        name, _, value = line.removeprefix(TRIAL_MARK).strip().partition(" ")
        found[name].append(value.strip())
    return found


def judge_trial(trial: TrialFacts) -> Iterator[Finding]:
    where = trial.node or trial.wanted or "any node"
    if trial.left:
        yield _trial_left(trial)
    if trial.exit_code is None:
        yield _not_started(trial, where)
        return
    if isinstance(trial.output, Unknown):
        yield unchecked("trial", f"{where}: the output of the trial pod: {trial.output.why}", [trial.name])
        return
    facts = facts_printed(trial.output)
    if trial.exit_code != 0 or "end" not in facts:
        last = trial.output.strip().splitlines()[-1:] or ["no output"]
        words = f"{where}: the trial pod ended with exit code {trial.exit_code}: {last[0][:200]}"
        yield failed("trial", words, [trial.name], _shows(trial))
        return
    yield passed("trial", f"{where}: {trial.image} started and ended; the image can be pulled there", [where])
    yield from _trial_gpu(facts, where)
    yield from _trial_node(facts, where)
    yield from _trial_network(facts, where)


def _trial_left(trial: TrialFacts) -> Finding:
    delete = f"kubectl -n {trial.namespace} delete pod -l gpukeeper.io/run={trial.run}"
    return failed(
        "trial-left", f"trial pod {trial.namespace}/{trial.name} is still there: {trial.left}", [trial.name], [delete]
    )


def _not_started(trial: TrialFacts, where: str) -> Finding:
    """Its events come with it: the pod itself is removed."""
    events = f" Events: {named(trial.events, 3)}" if trial.events else ""
    words = f"{where}: the trial pod did not run: {trial.reason or 'unknown reason'}"
    words += f" ({trial.message})" if trial.message else ""
    if trial.reason in IMAGE_REASONS:
        return failed("trial", f"{words}.{events}", [trial.image], _pulls(trial))
    if trial.reason in ("Unschedulable", "Forbidden", "Invalid"):
        return failed("trial", f"{words}.{events}", [where], ["kubectl describe nodes"])
    return unchecked("trial", f"{words}.{events}", [where], _shows(trial))


def _pulls(trial: TrialFacts) -> list[str]:
    registry = trial.image.partition("/")[0] if "/" in trial.image else "REGISTRY"
    secret = (
        f"kubectl -n {trial.namespace} create secret docker-registry regcred --docker-server={registry} "
        "--docker-username=USER --docker-password=TOKEN"
    )
    return [secret, f"gpukeeper accept preflight --on kubernetes --trial --image {trial.image} --pull-secret regcred"]


def _shows(trial: TrialFacts) -> list[str]:
    return [f"kubectl -n {trial.namespace} get events --field-selector involvedObject.name={trial.name}"]


def _trial_gpu(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    gpus = facts.get("gpu", [])
    if len(gpus) == 1:
        yield passed("trial-gpu", f"{where}: one GPU in the pod: {gpus[0]}", [where])
    elif gpus:
        words = f"{where}: one GPU was requested, {len(gpus)} are visible in the pod; GPUs are not isolated"
        env = "remove NVIDIA_VISIBLE_DEVICES from the image and from the runtime's defaults; the device plugin sets it"
        yield warning("trial-gpu", words, [where], [env])
    elif facts.get("nvidia-smi"):
        words = f"{where}: nvidia-smi finds no GPU in the pod: {facts['nvidia-smi'][0]}"
        yield failed("trial-gpu", words, [where], [f"kubectl describe node {where}"])
    else:
        words = f"{where}: no nvidia-smi and no GPU in the pod; the NVIDIA runtime did not add them"
        runtime = "sudo nvidia-ctk runtime configure --runtime=containerd --set-as-default"
        yield failed("trial-gpu", words, [where], [runtime, "sudo systemctl restart containerd"])


def _trial_node(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    names = ("cpus", "memory", "shm", "memlock", "user", "capabilities", "gpukeeper")
    known = [f"{name} {facts[name][0]}" for name in names if facts.get(name)]
    yield passed("trial-node", f"{where}: {', '.join(known)}", [where])
    locked = (facts.get("memlock") or [""])[0]
    if locked.isdecimal():
        words = f"{where}: locked memory is limited to {locked} KiB; RDMA needs unlimited"
        file = "/etc/systemd/system/containerd.service.d/memlock.conf"
        fix = f"printf '[Service]\\nLimitMEMLOCK=infinity\\n' | sudo tee {file}; sudo systemctl daemon-reload"
        yield warning("trial-node", words, [where], [fix, "sudo systemctl restart containerd kubelet"])
    if not facts.get("gpukeeper"):
        words = f"{where}: gpukeeper is not in the image; the run needs an image with it"
        yield failed("trial-node", words, [where], ["add to its Containerfile: RUN pip install ./gpukeeper"])


def _trial_network(facts: Mapping[str, list[str]], where: str) -> Iterator[Finding]:
    interfaces = named(facts.get("interface", []), 8) or "none"
    ports = facts.get("port", [])
    words = f"{where}: interfaces {interfaces}; InfiniBand ports {named(ports, 16) or 'none'}"
    down = [port for port in ports if "ACTIVE" not in port]
    if down:
        show = "ibstat; sudo mlxlink -d DEVICE"
        yield warning("trial-network", f"{words}. Not active: {named(down)}", [where], [show])
    else:
        yield passed("trial-network", words, [where])


def link_layers(trials: Iterable[TrialFacts]) -> frozenset[str]:
    """Link layers of all ports."""
    outputs = [trial.output for trial in trials if isinstance(trial.output, str)]
    ports = [port for output in outputs for port in facts_printed(output).get("port", [])]
    return frozenset(layer for layer in LAYERS for port in ports if layer in port)


def network_advice(trials: Iterable[TrialFacts]) -> tuple[Finding, ...]:
    """InfiniBand or RoCE: only the ports show it."""
    found = link_layers(trials)
    if not found:
        return ()
    return (nccl_advice(Network.INFINIBAND if "InfiniBand" in found else Network.ROCE),)


def drivers_of_trials(trials: Iterable[TrialFacts]) -> Iterator[Finding]:
    """Where labels do not show the versions, the trial does."""
    versions: dict[str, list[str]] = defaultdict(list)
    for trial in trials:
        for version in facts_printed(trial.output).get("driver", []) if isinstance(trial.output, str) else ():
            versions[version].append(trial.node)
    if len(versions) > 1:
        words = "; ".join(f"{version} on {named(nodes)}" for version, nodes in sorted(versions.items()))
        yield warning("drivers", f"driver versions differ: {words}", (), ["nvidia-smi --version"])


Check: TypeAlias = Callable[[ClusterFacts, ClusterRequest], Iterable[Finding]]


class Rule(msgspec.Struct, frozen=True):
    """`code` is reported as "could not check" if something of `needs` is not known."""

    code: str
    check: Check
    needs: tuple[str, ...] = ("nodes",)


RULES = (
    Rule("gpu-nodes", nodes.announced),
    Rule("node-not-ready", nodes.present),
    Rule("taints", nodes.taints),
    Rule("gpus-unhealthy", nodes.health),
    Rule("gpus-in-use", nodes.occupied, ("nodes", "workloads")),
    Rule("gpus-differ", nodes.sameness),
    Rule("gpu-labels", nodes.labelled),
    Rule("device-plugin", nodes.device_plugin, ("nodes", "plugins")),
    Rule("drivers", nodes.drivers),
    Rule("rdma", nodes.rdma),
    Rule("nccl", nodes.nccl, ("nodes", "workloads")),
    Rule("image", image),
    Rule("pull-secret", pull_secrets, ()),
    Rule("shm", shm),
    Rule("namespace", namespace_rule, ("namespace",)),
    Rule("quota", quota, ("nodes", "quotas")),
    Rule("limit-range", limit_range, ("nodes", "limits")),
    Rule("rights", rights, ()),
)
# What reads each part of the facts.
READ_BY = {
    "nodes": "list nodes",
    "workloads": "list pods --all-namespaces",
    "plugins": "list daemonsets.apps --all-namespaces",
    "namespace": "get namespaces",
    "quotas": "list resourcequotas",
    "limits": "list limitranges",
}


def judge(facts: ClusterFacts, request: ClusterRequest) -> tuple[Finding, ...]:
    """In the order of the output: by group, then by rule."""
    found = [finding for rule in RULES for finding in _applied(rule, facts, request)]
    return in_order(found)


def _applied(rule: Rule, facts: ClusterFacts, request: ClusterRequest) -> Iterable[Finding]:
    for need in rule.needs:
        value = getattr(facts, need)
        if isinstance(value, Unknown):
            return [unchecked(rule.code, value, (), [f"kubectl auth can-i {READ_BY[need]}", ROLE])]
    return rule.check(facts, request)
