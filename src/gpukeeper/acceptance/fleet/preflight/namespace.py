"""What the namespace of the run allows: Pod Security, quota, limits; and what the login may do."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from gpukeeper.acceptance.fleet.preflight.cluster import (
    GPU,
    ClusterFacts,
    ClusterRequest,
    LimitFacts,
    QuotaFacts,
    Right,
    targets,
)
from gpukeeper.acceptance.fleet.preflight.finding import Finding, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.quantity import gibibytes, quantity
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


def namespace(facts: ClusterFacts, request: ClusterRequest) -> Iterator[Finding]:
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
