"""A cluster that holds objects and answers as the client does: pages, selectors, refusals, and what is gone.

Deliberately small: no watch, no writes. What it is told to refuse, it refuses in the API server's words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable, ListPage
from gpukeeper.model.errors import PlatformError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.catalog import BY_NAME, known_owner
from gpukeeper.platforms.kubernetes.kinds.kind import Kind

T = TypeVar("T")
OTHERS = {
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Event": ("/api/v1", "events"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "Workflow": ("/apis/argoproj.io/v1alpha1", "workflows"),
    "TrainingRuntime": ("/apis/trainer.kubeflow.org/v1alpha1", "trainingruntimes"),
    "ClusterTrainingRuntime": ("/apis/trainer.kubeflow.org/v1alpha1", "clustertrainingruntimes"),
}


class StoredCluster:
    def __init__(self, *objects: Mapping[str, Any], page: int = 2) -> None:
        self.objects: list[Mapping[str, Any]] = list(objects)
        self.logs: dict[str, str] = {}  # by pod
        self.documents: dict[str, object] = {}  # by path: what is no object
        self.refused: dict[str, PlatformError] = {}  # by how the path ends
        self.inconsistent = False
        self.asked: list[str] = []
        self._page = page

    @property
    def as_cluster(self) -> Cluster:
        return cast(Cluster, self)

    async def served(self, kind: Kind) -> str | Unknown | None:
        return kind.versions[0]

    async def get(self, path: str, type_: type[T], **query: object) -> T:
        self._ask(path)
        if path in self.documents:
            return msgspec.json.decode(msgspec.json.encode(self.documents[path]), type=type_)
        collection, _, name = path.rpartition("/")
        for one in self.objects:
            if one["metadata"]["name"] == name and collection == _collection(one, everywhere=False):
                return msgspec.json.decode(msgspec.json.encode(one), type=type_)
        raise gone(name)

    async def pages(
        self, path: str, type_: type[T], *, limit: int = 500, **query: object
    ) -> AsyncIterator[ListPage[T]]:
        self._ask(path + "".join(f"?{value}" for value in query.values() if value))
        found = [
            one
            for one in self.objects
            if path in {_collection(one, everywhere=False), _collection(one, everywhere=True)} and _chosen(one, query)
        ]
        size = min(self._page, limit)
        for start in range(0, max(1, len(found)), size):
            items = [msgspec.json.decode(msgspec.json.encode(one), type=type_) for one in found[start : start + size]]
            yield ListPage(items=items, version="1", inconsistent=self.inconsistent and start > 0)

    async def raw(self, path: str, **query: object) -> bytes:
        self._ask(path)
        return self.logs[path.split("/")[-2]].encode()

    def _ask(self, path: str) -> None:
        self.asked.append(path)
        for end, error in self.refused.items():
            if path.partition("?")[0].endswith(end):
                raise error


def gone(name: str) -> ApiError:
    return ApiError(404, "NotFound", f'"{name}" not found', name=name)


def forbidden(what: str = "it") -> ApiError:
    return ApiError(403, "Forbidden", f'User "keeper" cannot get {what}')


def silent() -> ClusterUnavailable:
    return ClusterUnavailable("the cluster did not answer within 10s")


def _collection(one: Mapping[str, Any], *, everywhere: bool) -> str:
    namespace = one["metadata"].get("namespace")
    kind = known_owner(one.get("apiVersion", ""), one["kind"]) or BY_NAME.get(one["kind"].lower())
    if kind is not None:
        return kind.path(kind.versions[0], None if everywhere else namespace)
    root, plural = OTHERS[one["kind"]]
    return root + ("" if everywhere or not namespace else f"/namespaces/{namespace}") + f"/{plural}"


def _chosen(one: Mapping[str, Any], query: Mapping[str, object]) -> bool:
    fields, labels = str(query.get("fieldSelector") or ""), str(query.get("labelSelector") or "")
    if fields:
        key, _, wanted = fields.partition("=")
        value: Any = one
        for part in key.split("."):
            value = value.get(part, {})
        if value != wanted:
            return False
    has = one["metadata"].get("labels") or {}
    if " in (" in labels:
        key, _, values = labels.partition(" in (")
        return has.get(key) in values.rstrip(")").split(",")
    return all(has.get(pair.partition("=")[0]) == pair.partition("=")[2] for pair in labels.split(",") if pair)
