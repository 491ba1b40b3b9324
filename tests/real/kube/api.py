"""A small client of the API server for the tests: its own view, independent of gpukeeper's code and libraries.

api.create({"kind": "Job", ...}, "team-a")
api.wait_for("jobs", "team-a", "train", lambda job: job and job["status"].get("succeeded"))
api.delete("jobs", "team-a", "train", propagation="Background")
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

Object = dict[str, Any]
Objects = list[Object]  # `Api.list` hides the builtin in its class

# Where each kind lives, and its name in addresses.
GROUPS: dict[str, dict[str, str]] = {
    "v1": {
        "Pod": "pods",
        "Node": "nodes",
        "Namespace": "namespaces",
        "Secret": "secrets",
        "ConfigMap": "configmaps",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
        "Event": "events",
        "ReplicationController": "replicationcontrollers",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "PersistentVolume": "persistentvolumes",
        "ResourceQuota": "resourcequotas",
        "LimitRange": "limitranges",
    },
    "apps/v1": {
        "Deployment": "deployments",
        "ReplicaSet": "replicasets",
        "StatefulSet": "statefulsets",
        "DaemonSet": "daemonsets",
    },
    "batch/v1": {"Job": "jobs", "CronJob": "cronjobs"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "coordination.k8s.io/v1": {"Lease": "leases"},
    "scheduling.k8s.io/v1": {"PriorityClass": "priorityclasses"},
    "rbac.authorization.k8s.io/v1": {
        "Role": "roles",
        "RoleBinding": "rolebindings",
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
    },
    "admissionregistration.k8s.io/v1": {
        "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
        "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    },
    "apiextensions.k8s.io/v1": {"CustomResourceDefinition": "customresourcedefinitions"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "trainer.kubeflow.org/v1alpha1": {
        "TrainJob": "trainjobs",
        "TrainingRuntime": "trainingruntimes",
        "ClusterTrainingRuntime": "clustertrainingruntimes",
    },
    "kubeflow.org/v1": {
        "PyTorchJob": "pytorchjobs",
        "TFJob": "tfjobs",
        "MPIJob": "mpijobs",
        "XGBoostJob": "xgboostjobs",
        "PaddleJob": "paddlejobs",
        "JAXJob": "jaxjobs",
    },
    "ray.io/v1": {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayService": "rayservices"},
    "kwok.x-k8s.io/v1alpha1": {"Logs": "logs", "Stage": "stages"},
}
CATCH_UP_S = 60  # for the cache of the API server
GONE = "gone"
PATIENCE_S = 150  # a scheduler that lost the API server needs up to half a minute to list again, then backs off
PLURALS = {plural: group for group, kinds in GROUPS.items() for plural in kinds.values()}
PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


@dataclass(frozen=True)
class Answer:
    status: int
    raw: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.raw) if self.raw else None

    @property
    def ok(self) -> bool:
        return self.status < 400


class EngineLate(AssertionError):
    """Kubernetes itself did not get there in time: a Job that does not end, a pod that no node takes."""


class Refused(AssertionError):
    """The API server said no where a test needed a yes."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class Api:
    """As one user. One connection for each call: an API server that is restarted leaves nothing half open."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, token: str | None) -> None:
        self.host, self.port, self._context, self._token = host, port, context, token

    # Plain calls.

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        content_type: str = "application/json",
        deadline: float = 90,
    ) -> Answer:
        """Whatever is answered; `body` bytes go as they are, all else as JSON. OSError when nobody answers."""
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=deadline, context=self._context)
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, quote(path) + _tail(query), payload, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            connection.close()

    def must(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """The answer's JSON; a refusal fails the test in the server's own words."""
        answer = self.call(method, path, body, **more)
        ends = time.monotonic() + CATCH_UP_S
        while answer.status == 504 and b"Too large resource version" in answer.raw and time.monotonic() < ends:
            time.sleep(0.1)  # its cache lags behind etcd
            answer = self.call(method, path, body, **more)
        if not answer.ok:
            raise Refused(f"{method} {path}: {answer.status} {_message(answer)}", answer.status)
        return answer.json

    def ready(self, path: str = "/readyz") -> bool:
        try:
            return self.call("GET", path, deadline=5).status == 200
        except (OSError, http.client.HTTPException):
            return False

    # Objects. `what` is a plural ("pods", "jobs") or a whole path ("/apis/…").

    def get(self, what: str, namespace: str | None = None, name: str | None = None) -> Object | None:
        """None: there is no such object."""
        path = path_of(what, namespace, name)
        answer = self.call("GET", path)
        if answer.status == 404:
            return None
        if not answer.ok:
            raise Refused(f"GET {path}: {answer.status} {_message(answer)}", answer.status)
        found: Object = answer.json
        return found

    def list(self, what: str, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Objects:
        """Of one namespace, or of all."""
        query = {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
        items: Objects = self.must("GET", path_of(what, namespace), query=query)["items"]
        return items

    def names(self, what: str, namespace: str | None = None, *, labels: str = "") -> set[str]:
        return {str(item["metadata"]["name"]) for item in self.list(what, namespace, labels=labels)}

    def create(self, made: Mapping[str, Any], namespace: str | None = None) -> Object:
        """`apiVersion` may be left out where the kind is known here."""
        whole, path = _addressed(made, namespace)
        created: Object = self.must("POST", path, whole)
        return created

    def apply(self, made: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Server-side, whoever wrote the fields before."""
        whole, path = _addressed(made, namespace)
        name = whole["metadata"]["name"]
        query = {"fieldManager": "test", "force": "true"}
        applied: Object = self.must("PATCH", f"{path}/{name}", whole, query=query, content_type=PATCHES["apply"])
        return applied

    def patch(
        self, what: str, namespace: str | None, name: str, body: object, *, kind: str = "merge", subresource: str = ""
    ) -> Object:
        path = path_of(what, namespace, name) + (f"/{subresource}" if subresource else "")
        patched: Object = self.must("PATCH", path, body, content_type=PATCHES[kind])
        return patched

    def delete(
        self, what: str, namespace: str | None, name: str, *, propagation: str | None = None, grace: int | None = None
    ) -> Answer:
        """The server's answer; gone already is 404, no failure."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        options |= {"propagationPolicy": propagation} if propagation else {}
        options |= {"gracePeriodSeconds": grace} if grace is not None else {}
        answer = self.call("DELETE", path_of(what, namespace, name), options)
        if not answer.ok and answer.status != 404:
            raise Refused(f"DELETE {what} {namespace}/{name}: {answer.status} {_message(answer)}", answer.status)
        return answer

    def log(self, namespace: str, pod: str, **query: object) -> str:
        """What a pod printed, asked of its node through the API server."""
        answer = self.call("GET", f"{path_of('pods', namespace, pod)}/log", query=query)
        if not answer.ok:
            raise Refused(f"log of {namespace}/{pod}: {answer.status} {_message(answer)}", answer.status)
        return answer.raw.decode("utf-8", "replace")

    # Waiting.

    def wait_for(
        self,
        what: str,
        namespace: str | None,
        name: str,
        predicate: Callable[[Object | None], Any],
        timeout: float = PATIENCE_S,
        *,
        words: str = "",
    ) -> Any:
        """Look until the predicate is true of the object (None: it is gone); the object, or None."""
        ends = time.monotonic() + timeout
        while True:
            seen = self.get(what, namespace, name)
            if predicate(seen):
                return seen
            if time.monotonic() > ends:
                taints = seen and seen.get("spec", {}).get("taints")
                raise (AssertionError if words == GONE else EngineLate)(
                    f"not within {timeout:.0f} s: {words or 'as awaited'}: {what} {namespace}/{name}; last seen: "
                    f"{f'taints {json.dumps(taints)}, ' if taints else ''}{json.dumps(seen and seen.get('status'))}"
                )
            time.sleep(0.05)

    def wait_gone(self, what: str, namespace: str | None, name: str, timeout: float = PATIENCE_S) -> None:
        self.wait_for(what, namespace, name, lambda seen: seen is None, timeout, words=GONE)

    def wait_condition(
        self, what: str, namespace: str | None, name: str, kind: str, status: str = "True", timeout: float = PATIENCE_S
    ) -> Any:
        return self.wait_for(
            what, namespace, name, lambda seen: condition(seen, kind) == status, timeout, words=f"{kind}={status}"
        )

    def wait_pods(
        self, namespace: str, count: int, *, phase: str = "Running", labels: str = "", timeout: float = PATIENCE_S
    ) -> Objects:
        """Until exactly so many pods are in this phase and not being deleted; those."""
        ends = time.monotonic() + timeout
        while True:
            every = self.list("pods", namespace, labels=labels)
            there = [
                pod
                for pod in every
                if pod["status"].get("phase") == phase and "deletionTimestamp" not in pod["metadata"]
            ]
            if len(there) == count:
                return there
            if time.monotonic() > ends:
                raise EngineLate(
                    f"not within {timeout:.0f} s: {count} pods {phase} in {namespace}; there are "
                    f"{[(pod['metadata']['name'], pod['status'].get('phase')) for pod in every]}"
                )
            time.sleep(0.05)


def condition(seen: Mapping[str, Any] | None, kind: str) -> str | None:
    """The status of a condition; None where it has none of that type."""
    conditions = ((seen or {}).get("status") or {}).get("conditions") or []
    return next((str(one["status"]) for one in conditions if one["type"] == kind), None)


def path_of(what: str, namespace: str | None = None, name: str | None = None) -> str:
    if what.startswith("/"):
        return what
    assert what in PLURALS, f"{what}: not in tests/real/kube/api.py, add it to GROUPS"
    path = _root(PLURALS[what]) + (f"/namespaces/{namespace}" if namespace else "")
    return f"{path}/{what}" + (f"/{name}" if name else "")


def _addressed(made: Mapping[str, Any], namespace: str | None) -> tuple[Object, str]:
    kind = made["kind"]
    group = made.get("apiVersion") or next(group for group, kinds in GROUPS.items() if kind in kinds)
    plural = GROUPS[group][kind]
    namespace = namespace or made.get("metadata", {}).get("namespace")
    path = _root(group) + (f"/namespaces/{namespace}" if namespace else "") + f"/{plural}"
    return {**made, "apiVersion": group}, path


def _root(group: str) -> str:
    return f"/apis/{group}" if "/" in group else f"/api/{group}"


def _tail(query: Mapping[str, object] | None) -> str:
    return "?" + urlencode(query, doseq=True) if query else ""


def _message(answer: Answer) -> str:
    try:
        return str(answer.json["message"])
    except (ValueError, KeyError, TypeError):
        return answer.raw.decode("utf-8", "replace").strip()
