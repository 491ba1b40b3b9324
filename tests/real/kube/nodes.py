"""Nodes of KWOK: they take pods and pretend to run them.

A pod there is Running at once and ends when told: by `finish_pod`, or by its own annotations, which a Job's template
gives to every pod it makes:

    test/exit-code: "1"         it ends with this code …
    test/finish-after: 2s       … so long after it began to run (at once without this)
    test/starts: "never"        it is scheduled and stays Pending: an image that does not come
    test/ends: "never"          deleted, it stays Terminating, with its GPUs: a node that does not answer
    test/end-after: 3s          deleted, it needs so long to end (no time without this)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.real.kube import binaries
from tests.real.kube.api import Api, EngineLate, Object, condition
from tests.real.kube.processes import listens

if TYPE_CHECKING:
    from tests.real.kube.control_plane import ControlPlane

GPU = "nvidia.com/gpu"
DEFAULT_LOG = "step 1 loss 2.31\nstep 2 loss 1.97\nstep 3 loss 1.64\n"


def start_kwok(plane: ControlPlane) -> None:
    plane.install_crds("kwok")
    config, port = plane.folder / "kwok.yaml", plane.block.port()
    _write_log(plane, "default", DEFAULT_LOG)
    config.write_text("---\n".join(json.dumps(one, indent=1) + "\n" for one in [*_stages(), _default_logs(plane)]))
    keys = plane.certificates
    command = [
        *(binaries.program("kwok"), f"--kubeconfig={plane.kubeconfig()}", f"--config={config}"),
        *("--manage-nodes-with-label-selector=type=kwok", "--enable-crds=Logs"),
        *("--node-ip=127.0.0.1", f"--node-port={port}", f"--server-address=127.0.0.1:{port}"),
        *(f"--tls-cert-file={keys.certificate}", f"--tls-private-key-file={keys.key}"),
        "--node-lease-duration-seconds=40",
    ]
    # It looks for files of its own in the home folder.
    plane.start_program("kwok", command, lambda: listens(port), env={"HOME": str(plane.folder)})


def gpu_node(plane: ControlPlane, name: str, gpus: int = 8, labels: Mapping[str, str] | None = None) -> Object:
    """Ready, and taken by the scheduler."""
    plane.need("kwok")
    made = {"type": "kwok", "kubernetes.io/hostname": name, **(labels or {})}
    plane.api.create({"kind": "Node", "metadata": {"name": name, "labels": made}})
    room = {"cpu": "64", "memory": "512Gi", "pods": "500", **({GPU: str(gpus)} if gpus else {})}
    plane.api.patch("nodes", None, name, {"status": {"capacity": room, "allocatable": room}}, subresource="status")

    def is_ready(node: Object | None) -> bool:
        plane.need("kwok")  # it panics when an API server that was paused has lost objects it knew, some time later
        return condition(node, "Ready") == "True" and node is not None and not node["spec"].get("taints")

    try:
        ready: Object = plane.api.wait_for("nodes", None, name, is_ready, words="Ready without taints")
    except EngineLate as late:
        kwok = plane.programs["kwok"]
        runs = "runs" if kwok.runs else "does not run"
        raise EngineLate(f"kwok {runs}; the end of its log: {kwok.log[-2500:]}\n{late}") from late
    return ready


def finish_pod(api: Api, namespace: str, name: str, exit_code: int = 0, reason: str | None = None) -> None:
    """As its node would say it. It must be on a node; a pod that is only now getting there is waited for."""
    pod = api.wait_for("pods", namespace, name, lambda seen: seen and seen["spec"].get("nodeName"), words="on a node")
    if "test/starts" not in (pod["metadata"].get("annotations") or {}):
        pod = api.wait_for("pods", namespace, name, lambda seen: seen and seen["status"].get("podIP"), words="started")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    why = reason or ("Completed" if exit_code == 0 else "Error")
    ended = {"exitCode": exit_code, "reason": why, "startedAt": pod["status"].get("startTime", now), "finishedAt": now}
    status = {
        "phase": "Succeeded" if exit_code == 0 else "Failed",
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container.get("image", ""),
                "imageID": "",
                "ready": False,
                "started": False,
                "restartCount": 0,
                "state": {"terminated": ended},
            }
            for container in pod["spec"]["containers"]
        ],
    }
    api.patch("pods", namespace, name, {"status": status}, subresource="status")


def set_log(plane: ControlPlane, namespace: str, pod: str, text: str) -> None:
    file = _write_log(plane, f"{namespace}-{pod}", text)
    spec = {"logs": [{"logsFile": file, "follow": False}]}
    plane.api.apply({"kind": "Logs", "metadata": {"name": pod}, "spec": spec}, namespace)
    plane.until(lambda: _said(plane.api, namespace, pod) == text, f"the log of {namespace}/{pod} is as set")


def _said(api: Api, namespace: str, pod: str) -> str | None:
    answer = api.call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log")
    return answer.raw.decode() if answer.ok else None


def _write_log(plane: ControlPlane, name: str, text: str) -> str:
    """In the format of container runtimes; the last line may lack its end."""
    file = plane.folder / f"pod-{name}.log"
    lines = [(line.rstrip("\n"), "F" if line.endswith("\n") else "P") for line in text.splitlines(keepends=True)]
    file.write_text("".join(f"2026-01-01T00:00:00Z stdout {whole} {line}\n" for line, whole in lines))
    return str(file)


def _default_logs(plane: ControlPlane) -> Object:
    spec = {"logs": [{"logsFile": f"{plane.folder}/pod-default.log", "follow": False}]}
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "ClusterLogs", "metadata": {"name": "all"}, "spec": spec}


# Stages: the first whose conditions a pod fulfils is played. Without stages of ours for nodes KWOK takes its own.


def _stages() -> list[Object]:
    present = (".metadata.deletionTimestamp", "DoesNotExist")
    deleted = (".metadata.deletionTimestamp", "Exists")
    new = (".status.podIP", "DoesNotExist")
    running = (".status.phase", "In", "Running")
    told = (_annotation("exit-code"), "Exists")
    may_end = (_annotation("ends"), "DoesNotExist")
    return [
        _stage("start", [present, new, (_annotation("starts"), "DoesNotExist")], _STARTED),
        _stage("finish", [present, running, told, (_annotation("finish-after"), "DoesNotExist")], _FINISHED),
        _stage(
            "finish-later", [present, running, told, (_annotation("finish-after"), "Exists")], _FINISHED, "finish-after"
        ),
        # A node reports how the containers ended before it lets the pod go.
        _stage("end", [deleted, running, may_end, (_annotation("end-after"), "DoesNotExist")], _KILLED),
        _stage("end-later", [deleted, running, may_end, (_annotation("end-after"), "Exists")], _KILLED, "end-after"),
        _stage("go", [deleted, (".status.phase", "In", "Pending", "Succeeded", "Failed"), may_end]),
    ]


def _annotation(name: str) -> str:
    return f'.metadata.annotations["test/{name}"]'


def _stage(name: str, conditions: list[tuple[str, ...]], status: str | None = None, wait: str = "") -> Object:
    """`wait`: the annotation that says how long. Without a status the pod is let go."""
    selector = [{"key": key, "operator": how, "values": values} for key, how, *values in conditions]
    spec: dict[str, Any] = {
        "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
        "selector": {"matchExpressions": selector},
        "next": {"delete": True} if status is None else {"statusTemplate": status},
    }
    if wait:
        spec["delay"] = {"durationFrom": {"expressionFrom": _annotation(wait)}}
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": f"pod-{name}"}, "spec": spec}


_STARTED = """
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
{{ $of := .metadata }}
podIP: {{ PodIPWith .spec.nodeName (or .spec.hostNetwork false) $of.uid $of.name $of.namespace | Quote }}
conditions:
{{ range (list "PodReadyToStartContainers" "Initialized" "ContainersReady" "Ready") }}
- {type: {{ . }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
initContainerStatuses:
{{ range .spec.initContainers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""
_ENDED = """
{{ $now := Now }}
{{ $code := %(code)s }}
{{ $good := eq $code "0" }}
phase: {{ if $good }}Succeeded{{ else }}Failed{{ end }}
conditions:
{{ range (list "ContainersReady" "Ready") }}
- {type: {{ . }}, status: "False", reason: PodCompleted, lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ $began := .status.startTime }}
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: false
  started: false
  restartCount: 0
  state:
    terminated:
      exitCode: {{ $code }}
      reason: {{ if $good }}Completed{{ else }}Error{{ end }}
      startedAt: {{ $began | Quote }}
      finishedAt: {{ $now | Quote }}
{{ end }}
"""
_FINISHED = _ENDED % {"code": 'index .metadata.annotations "test/exit-code"'}
_KILLED = _ENDED % {"code": '"143"'}
