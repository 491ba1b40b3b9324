"""What every form is made from: options, names and labels, the run with its nodes, its pod, how nodes find each other.

Least privilege, as far as the probes allow. The number of nodes is written down, never counted by DNS: while pods
start, each of them would count another number. Pure.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.launcher import ALONE, RunSpec, Target, command
from gpukeeper.clients.kubernetes.api import SERVICES, Resource
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
KEEP_FINISHED_S = 24 * 3600
_QUANTITY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the pods of a run are made. Empty: not set."""

    namespace: str = ""
    gpu: str = ""  # the resource; empty: the one that the nodes announce
    shm: str = "16Gi"
    rdma: Mapping[str, int] = {}  # resource and count
    cpu: str = ""
    memory: str = ""
    priority: str = ""  # the name of a PriorityClass
    pull_secrets: tuple[str, ...] = ()
    pull_policy: str = ""
    runtime_class: str = ""
    service_account: str = ""
    tolerate: bool = True  # every taint
    host_network: bool = False
    ttl_s: int | None = KEEP_FINISHED_S
    at_once: int = 32  # requests at the same time while objects are created
    busy: str = "exclude"  # or wait: a node whose GPUs others have
    program: str = ""  # ConfigMaps NAME-1, NAME-2, … with gpukeeper, for an image that has only PyTorch
    framework: str = "torch"  # of the runtime of a TrainJob; or tensorflow: the Trainer then sets no PET_ variables


def options_of(options: Mapping[str, str]) -> KubernetesOptions:
    """`context` belongs to the connection."""
    found: dict[str, object] = {}
    problems: list[str] = []
    for name, text in options.items():
        if name == "context":
            continue
        reader = _READERS.get(name)
        if reader is None:
            near = difflib.get_close_matches(name, [*_READERS, "context"], 1)
            problems.append(f'unknown option "{name}"{f"; did you mean {near[0]}" if near else ""}')
            continue
        field, read = reader
        try:
            found[field] = read(text)
        except ValueError as problem:
            problems.append(f'{name}="{text[:80]}" {problem}')
    if problems:
        known = ", ".join(sorted([*_READERS, "context"]))
        raise UsageError(f"{'. '.join(problems)}. Nothing was created. Options of kubernetes: {known}.")
    return msgspec.convert(found, KubernetesOptions)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("is not a valid name: lower case letters, digits, dashes and dots")
    return text


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError("is not a quantity; write it like 16Gi or 14")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(one.strip()) for one in text.split(",") if one.strip())


def _resource(text: str) -> str:
    if "/" not in text or not _LABEL.fullmatch(text):
        raise ValueError("is not a resource; write it like nvidia.com/gpu")
    return text


def _resources(text: str) -> dict[str, int]:
    """`rdma/ib`, `rdma/ib=8`, several with commas."""
    found = {}
    for one in filter(None, text.split(",")):
        name, _, count = one.partition("=")
        found[_resource(name.strip())] = reading.whole(count.strip()) if count else 1
    return found


def _switch(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError("is neither yes nor no")
    return text == "yes"


def _seconds(text: str) -> int | None:
    """`never`: the objects stay until they are removed."""
    return None if text == "never" else int(reading.span(text).total_seconds())


def _count(text: str) -> int:
    count = reading.whole(text)
    if not 1 <= count <= 256:
        raise ValueError("is not between 1 and 256")
    return count


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"is none of {', '.join(words)}")
        return text

    return read


_READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "namespace": ("namespace", _name),
    "gpu": ("gpu", _resource),
    "shm": ("shm", _quantity),
    "rdma": ("rdma", _resources),
    "cpu": ("cpu", _quantity),
    "memory": ("memory", _quantity),
    "priority": ("priority", _name),
    "pull-secrets": ("pull_secrets", _names),
    "pull-policy": ("pull_policy", _one_of("Always", "IfNotPresent", "Never")),
    "runtime-class": ("runtime_class", _name),
    "service-account": ("service_account", _name),
    "tolerate": ("tolerate", _switch),
    "host-network": ("host_network", _switch),
    "ttl": ("ttl_s", _seconds),
    "at-once": ("at_once", _count),
    "busy": ("busy", _one_of("exclude", "wait")),
    "program": ("program", _name),
    "framework": ("framework", _one_of("torch", "tensorflow")),
}


def is_label_value(text: str) -> bool:
    return bool(_VALUE.fullmatch(text))


RUN_LABEL = "gpukeeper.io/run"
ACCEPTANCE_LABEL = "gpukeeper.io/acceptance"
OWNER_ANNOTATION = "gpukeeper.io/owner"
SPEC_ANNOTATION = "gpukeeper.io/spec"
TARGETS_ANNOTATION = "gpukeeper.io/targets"
NODE_ANNOTATION = "gpukeeper.io/node"
OF_RUNS = f"{ACCEPTANCE_LABEL}=run"
# Which app label the older kit had for a form; the reclaimer recognises them, too.
APPS = {"job": "gpu-acceptance-test", "daemonset": "gpu-accept-daemon"}
ONE_RUN = "gpu-accept-ddp"
NAME_MAX = 46  # a StatefulSet, a JobSet and an indexed Job append to it, and a label value has 63 characters
_HASH = 8


def labels(spec: RunSpec) -> dict[str, str]:
    return {"app": APPS.get(spec.form, ONE_RUN), ACCEPTANCE_LABEL: "run", RUN_LABEL: spec.run}


def labels_of(selector: str) -> dict[str, str]:
    """KEY=VALUE, several with commas: a nodeSelector has no other conditions."""
    found = {}
    for one in filter(None, selector.split(",")):
        key, _, value = (part.strip() for part in one.replace("==", "=").partition("="))
        if not (_LABEL.fullmatch(key) and value and is_label_value(value)):
            raise UsageError(
                f'--nodes "{selector}": a set that names no nodes selects them by KEY=VALUE, several with commas. '
                "Nothing was created."
            )
        found[key] = value
    return found


def run_selector(run: str) -> str:
    return f"{OF_RUNS},{RUN_LABEL}={run}"


def run_of(labels: Mapping[str, str] | None) -> str:
    return (labels or {}).get(RUN_LABEL, "")


def run_annotations(spec: RunSpec, targets: Sequence[Target], *, whole: bool) -> dict[str, str]:
    """`whole`: with the names of all nodes. Not on every object: 512 of them with 512 names each are megabytes."""
    kept = spec if whole else msgspec.structs.replace(spec, nodes=())
    found = {OWNER_ANNOTATION: spec.owner, SPEC_ANNOTATION: msgspec.json.encode(kept).decode()}
    return found | ({TARGETS_ANNOTATION: msgspec.json.encode(list(targets)).decode()} if whole else {})


def pod_annotations(spec: RunSpec) -> dict[str, str]:
    return {OWNER_ANNOTATION: spec.owner}


def spec_of(annotations: Mapping[str, str] | None) -> RunSpec | None:
    """None: it is none of ours, or cannot be read."""
    try:
        return reading.decode((annotations or {}).get(SPEC_ANNOTATION, ""), RunSpec)
    except ValueError:
        return None


def targets_of(annotations: Mapping[str, str] | None) -> tuple[Target, ...]:
    try:
        return tuple(reading.decode((annotations or {}).get(TARGETS_ANNOTATION, "[]"), list[Target]))
    except ValueError:
        return ()


def name_of(run: str, node: str = "") -> str:
    """Of an object. The same for the same run and node, and another one for every other pair: where letters are
    replaced or cut off, a checksum follows."""
    said = f"accept-{run}-{node}" if node else f"accept-{run}"
    slug = re.sub(r"[^a-z0-9]+", "-", said.lower()).strip("-")
    if slug == said and len(slug) <= NAME_MAX:
        return slug
    digest = hashlib.sha256(f"{run}\0{node}".encode()).hexdigest()[:_HASH]
    return f"{slug[: NAME_MAX - _HASH - 1].rstrip('-')}-{digest}"


class Item(msgspec.Struct, frozen=True):
    """An object to create. `owned`: the first root owns it, so that it goes with the run."""

    resource: Resource
    manifest: dict[str, Any]
    owned: bool = False


class Plan(msgspec.Struct, frozen=True):
    spec: RunSpec
    options: KubernetesOptions
    targets: tuple[Target, ...]  # all, with those that are excluded
    by_label: bool = False  # a manifest for every node that the selector selects, also later ones; never started by us

    @property
    def nodes(self) -> tuple[Target, ...]:
        return tuple(one for one in self.targets if not one.excluded)

    @property
    def name(self) -> str:
        return name_of(self.spec.run)

    @property
    def node_labels(self) -> dict[str, str]:
        """Instead of the names of nodes."""
        return labels_of(self.spec.selector) if self.by_label else {}

    def gpus(self, target: Target) -> int:
        """0: the nodes announce none; the pods then request none."""
        return target.gpus or 0 if self.spec.gpus_per_node is None else self.spec.gpus_per_node

    def devices(self, target: Target) -> dict[str, int]:
        """The resource of its GPUs, and how many."""
        count = self.gpus(target)
        return {self.options.gpu or target.resource or GPU_RESOURCES[0]: count} if count else {}

    def same_devices(self) -> dict[str, int]:
        """Of forms whose pods are all alike."""
        kinds = sorted({tuple(self.devices(one).items()) for one in self.nodes})
        if len(kinds) > 1:
            words = ", ".join(f"{count} {name}" for kind in kinds for name, count in kind)
            raise UsageError(
                f"--as {self.spec.form}: the nodes have different GPUs ({words}), and its pods are all alike. "
                "Nothing was created. Use --gpus-per-node, --as job, or a selector for nodes of one kind."
            )
        return dict(kinds[0]) if kinds else {}

    def metadata(self, name: str, *, whole: bool = True, node: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {"name": name}
        if self.options.namespace:
            found["namespace"] = self.options.namespace
        found["labels"] = labels(self.spec)
        found["annotations"] = run_annotations(self.spec, self.targets, whole=whole)
        if node:
            found["annotations"][NODE_ANNOTATION] = node
        return found


def head(resource: Resource) -> dict[str, Any]:
    return {"apiVersion": resource.api_version, "kind": resource.kind}


def node_names(targets: Sequence[Target]) -> tuple[str, ...]:
    return tuple(one.node for one in targets)


def headless_service(plan: Plan) -> Item:
    """Addresses of pods that are not ready are published, too: they become ready after they have met."""
    manifest = {
        **head(SERVICES),
        "metadata": plan.metadata(plan.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {ACCEPTANCE_LABEL: "run", RUN_LABEL: plan.spec.run},
            "ports": [{"name": "rendezvous", "port": plan.spec.port}],
        },
    }
    return Item(SERVICES, manifest, owned=True)


def group_variables(plan: Plan, first: str, index: dict[str, Any] | None) -> list[dict[str, Any]]:
    """`first`: the host name of the node with index 0. `index`: None where the controller sets its own variable."""
    found: list[dict[str, Any]] = [
        {"name": "MASTER_ADDR", "value": first},
        {"name": "MASTER_PORT", "value": str(plan.spec.port)},
        {"name": "GPUKEEPER_GROUP_SIZE", "value": str(len(plan.nodes))},
    ]
    return found + ([{"name": "GPUKEEPER_GROUP_INDEX", **index}] if index else [])


def from_field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


CONTAINER = "accept"
TERMINATION_LOG = "/dev/termination-log"
REPORTS = "/app/reports"
SHM = "/dev/shm"  # noqa: S108
HOST = "kubernetes.io/hostname"
GRACE_S = 30  # a run that is ended sends the report of what it has done
# 2: a wrong flag, 3: partly done, 4: a check failed, 5: inconclusive. Its report is sent; once more gives no other.
JUDGED = (2, 3, 4, 5)
POD_NODE = {"fieldRef": {"fieldPath": "spec.nodeName"}}


# Least privilege, as far as the probes allow: no token, no capability except IPC_LOCK (pinned memory for RDMA), no
# more privileges than at the start, the runtime's seccomp profile. The root filesystem is writable: PyTorch caches
# kernels.
def pod_template(
    plan: Plan,
    *,
    devices: Mapping[str, int],
    nodes: Sequence[str],
    node: str = "",
    group: Sequence[dict[str, Any]] = (),
    stays: bool = False,
    apart: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """`nodes`: where it may run. `node`: the one, if that is known. `group`: variables of a run over all nodes, left
    out where each is tested alone. `stays`: restarted for ever, so the program waits when it has reported. `apart`: one
    on each node."""
    annotations = pod_annotations(plan.spec) | ({NODE_ANNOTATION: node} if node else {})
    group = group if plan.spec.together else ()
    return {
        "metadata": {"labels": labels(plan.spec), "annotations": annotations},
        "spec": _pod_spec(plan, devices, nodes, node, group, stays=stays, apart=apart) | more,
    }


def _pod_spec(
    plan: Plan,
    devices: Mapping[str, int],
    nodes: Sequence[str],
    node: str,
    group: Sequence[dict[str, Any]],
    *,
    stays: bool,
    apart: bool,
) -> dict[str, Any]:
    options = plan.options
    spec: dict[str, Any] = {
        "restartPolicy": "Always" if stays else "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        **_affinity(plan, nodes, apart=apart),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(plan, devices, node, group, stays=stays)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}],
    }
    if stays:
        spec["volumes"].append({"name": "reports", "emptyDir": {}})
    if options.program:
        spec["volumes"].append(_program_volume(options.program))
    if labels := plan.node_labels:
        spec["nodeSelector"] = labels
    if options.tolerate:
        spec["tolerations"] = [{"operator": "Exists"}]
    if options.priority:
        spec["priorityClassName"] = options.priority
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec


def _container(
    plan: Plan, devices: Mapping[str, int], node: str, group: Sequence[dict[str, Any]], *, stays: bool
) -> dict[str, Any]:
    options = plan.options
    limits: dict[str, Any] = {**devices, **options.rdma}
    requests = {key: text for key, text in (("cpu", options.cpu), ("memory", options.memory)) if text}
    resources: dict[str, Any] = {"limits": limits | requests} if limits or requests else {}
    found: dict[str, Any] = {
        "name": CONTAINER,
        "image": plan.spec.image,
        "command": [*(UNPACKED if options.program else ()), *command(plan.spec)],
        "env": _environment(plan, node, group, stays),
        "resources": resources | ({"requests": requests} if requests else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        },
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": SHM}],
    }
    if options.program:
        found["volumeMounts"].append({"name": "program", "mountPath": PROGRAM, "readOnly": True})
    if options.pull_policy:
        found["imagePullPolicy"] = options.pull_policy
    if group:
        found["ports"] = [{"name": "rendezvous", "containerPort": plan.spec.port}]
    if stays:
        found["volumeMounts"].append({"name": "reports", "mountPath": REPORTS})
        # Ready means: it has reported. The program writes this file last.
        found["readinessProbe"] = {"exec": {"command": ["test", "-s", TERMINATION_LOG]}, "periodSeconds": 5}
    return found


def _environment(plan: Plan, node: str, group: Sequence[dict[str, Any]], stays: bool) -> list[dict[str, Any]]:
    own = {"GPUKEEPER_TERMINATION_LOG": TERMINATION_LOG}
    own |= {"GPUKEEPER_STAY": "1", "REPORT_DIR": REPORTS} if stays else {}
    own |= {} if plan.spec.together else ALONE
    given = {key: text for key, text in plan.spec.environment.items() if key not in own}
    where = {"name": "GPUKEEPER_NODE", "value": node} if node else {"name": "GPUKEEPER_NODE", "valueFrom": POD_NODE}
    return [where, *({"name": key, "value": text} for key, text in (own | given).items()), *group]


# A ConfigMap has at most 1 MiB, so the program is cut into parts; `make program` writes them. The first word of the
# command of a node, `gpukeeper`, becomes $0.
PROGRAM, PROGRAM_PARTS = "/gpukeeper", 9
UNPACKED = (
    "sh",
    "-c",
    f'cat {PROGRAM}/part-* >"${{TMPDIR:-/tmp}}/gpukeeper.pyz" && exec python3 "${{TMPDIR:-/tmp}}/gpukeeper.pyz" "$@"',
)


def _program_volume(name: str) -> dict[str, Any]:
    """A part that does not exist is left out; a program that is not complete does not start."""
    parts = [
        {"configMap": {"name": f"{name}-{at}", "optional": at > 1, "items": [{"key": "part", "path": f"part-{at}"}]}}
        for at in range(1, PROGRAM_PARTS + 1)
    ]
    return {"name": "program", "projected": {"sources": parts}}


def _affinity(plan: Plan, nodes: Sequence[str], *, apart: bool) -> dict[str, Any]:
    found = {"nodeAffinity": on_nodes(nodes)} if nodes else {}
    found |= {"podAntiAffinity": _apart(plan)} if apart else {}
    return {"affinity": found} if found else {}


def on_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    """By the name of the node, not by its hostname label, which can differ. One term each: a field has one value."""
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in sorted(nodes)]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _apart(plan: Plan) -> dict[str, Any]:
    run = {RUN_LABEL: plan.spec.run}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {"matchLabels": run}, "topologyKey": HOST}]
    }
