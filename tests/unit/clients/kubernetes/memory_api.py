"""A cluster in memory: its Api over dictionaries. It stores, selects and deletes as an API server does;
controllers are for the tests to play."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gpukeeper.clients.kubernetes.api import Api, Listing, Manifest, PatchType, Resource
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
Key = tuple[str, str, str]  # jobs.batch, namespace, name


class MemoryApi(Api):
    def __init__(self, namespace: str = "default") -> None:
        self.place, self.namespace = "memory", namespace
        self.objects: dict[Key, dict[str, Any]] = {}
        self.logs: dict[tuple[str, str, bool], bytes] = {}  # namespace, pod, previous
        self.missing: set[str] = set()  # kinds that are not installed: jobsets.jobset.x-k8s.io
        self.forbidden: Callable[[str, Resource, str], bool] = lambda verb, resource, namespace: False
        self.fail: Callable[[str, Resource, str], Exception | None] = lambda verb, resource, name: None
        self.created: Callable[[Resource, dict[str, Any]], None] = lambda resource, one: None  # a controller
        self.slow: set[str] = set()  # names of objects that the garbage collector has not removed yet
        self.log_limit = 1 << 40
        self.asked: Counter[str] = Counter()
        self._numbers = itertools.count(1)

    @property
    def requests(self) -> int:
        return self.asked.total()

    def add(self, resource: Resource, manifest: Mapping[str, Any], namespace: str = "") -> dict[str, Any]:
        """As a test or a controller creates it."""
        one: dict[str, Any] = copy.deepcopy(dict(manifest))
        number = next(self._numbers)
        meta = one.setdefault("metadata", {})
        if resource.namespaced:
            meta.setdefault("namespace", namespace or self.namespace)
        meta.update(uid=meta.get("uid") or f"uid-{number}", resourceVersion=str(number))
        meta.setdefault("creationTimestamp", "2026-01-05T10:00:00Z")
        self.objects[self._key(resource, meta.get("namespace", ""), meta["name"])] = one
        return one

    def remove(self, resource: Resource, name: str, namespace: str = "") -> None:
        """With what it owns, as the garbage collector does."""
        key = self._key(resource, namespace or self.namespace, name)
        self._collect_owned(key[1], self.objects.pop(key)["metadata"]["uid"])

    def of(self, resource: Resource) -> Sequence[dict[str, Any]]:
        return [one for (words, _, _), one in self.objects.items() if words == resource.words]

    async def get(self, resource: Resource, name: str, type_: type[T], *, namespace: str = "") -> T | None:
        self._ask("get", resource, namespace, name)
        found = self.objects.get(self._key(resource, namespace, name))
        return None if found is None else msgspec.convert(found, type_)

    async def list(
        self, resource: Resource, type_: type[T], *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> Listing[T]:
        self._ask("list", resource, namespace, "")
        found = [
            one
            for (words, where, _), one in self.objects.items()
            if words == resource.words and namespace in {"", where} and selects(labels, one["metadata"].get("labels"))
            if _has_fields(one, fields)
        ]
        return Listing(items=[msgspec.convert(one, type_) for one in found])

    async def create(
        self, resource: Resource, manifest: Manifest, type_: type[T], *, namespace: str = "", dry_run: bool = False
    ) -> T:
        name = manifest.get("metadata", {}).get("name", "")
        self._ask("create", resource, namespace, name)
        if self._key(resource, namespace, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f'{resource.words} "{name}" already exists')
        if dry_run:
            return msgspec.convert(copy.deepcopy(dict(manifest)), type_)
        one = self.add(resource, manifest, namespace)
        self.created(resource, one)
        return msgspec.convert(one, type_)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Manifest | Sequence[Manifest],
        type_: type[T],
        *,
        namespace: str = "",
        how: PatchType = "merge",
        subresource: str = "",
    ) -> T:
        """Merge patches only."""
        assert how == "merge", "the cluster in memory supports merge patches only"
        assert isinstance(patch, Mapping)
        self._ask("patch", resource, namespace, name)
        found = self.objects.get(self._key(resource, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{resource.words} "{name}" not found')
        meta = patch.get("metadata", {})
        for field in ("uid", "resourceVersion"):
            if field in meta and meta[field] != found["metadata"][field]:
                raise ApiError(409, "Conflict", f"the {field} has changed")
        _merge(found, patch)
        found["metadata"]["resourceVersion"] = str(next(self._numbers))
        return msgspec.convert(found, type_)

    async def delete(
        self,
        resource: Resource,
        name: str,
        uid: str,
        *,
        namespace: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> bool:
        self._ask("delete", resource, namespace, name)
        found = self.objects.get(self._key(resource, namespace, name))
        if found is None or found["metadata"]["uid"] != uid:
            return False
        if version and found["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "Conflict", "the resourceVersion has changed")
        self.remove(resource, name, namespace)
        return True

    async def log(
        self,
        name: str,
        *,
        namespace: str,
        container: str = "",
        previous: bool = False,
        since: str = "",
        timestamps: bool = False,
        limit: int = 16 * 1024 * 1024,
    ) -> bytes:
        self.asked["log"] += 1
        found = self.logs.get((namespace, name, previous))
        if found is None:
            raise ApiError(404, "NotFound", f'the log of pod "{name}" was not found')
        lines = found.splitlines(keepends=True)
        # One line each second, as the kubelet stamps them.
        stamped = [(f"2026-01-05T10:{n // 60:02}:{n % 60:02}Z", line) for n, line in enumerate(lines)]
        kept = [f"{at} ".encode() + line if timestamps else line for at, line in stamped if not since or at >= since]
        return b"".join(kept)[: min(limit, self.log_limit)]

    async def version(self) -> str:
        return "Kubernetes v1.36.3"

    async def serves(self, resource: Resource) -> bool | Unknown:
        return resource.words not in self.missing

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _ask(self, verb: str, resource: Resource, namespace: str, name: str) -> None:
        self.asked[verb] += 1
        failure = self.fail(verb, resource, name)
        if failure is not None:
            raise failure
        if self.forbidden(verb, resource, namespace):
            raise ApiError(403, "Forbidden", f"{resource.words} is forbidden")
        if resource.words in self.missing:
            raise ApiError(404, "", "the server could not find the requested resource")

    def _collect(self, key: Key) -> None:
        if key[2] in self.slow:
            self.objects[key]["metadata"]["deletionTimestamp"] = "2026-01-05T10:06:00Z"
            return
        self._collect_owned(key[1], self.objects.pop(key)["metadata"]["uid"])

    def _collect_owned(self, namespace: str, uid: str) -> None:
        """References do not reach into another namespace."""
        for key in [key for key, one in self.objects.items() if uid in _owners(one) and key[1] == namespace]:
            if key in self.objects:
                self._collect(key)

    def _key(self, resource: Resource, namespace: str, name: str) -> Key:
        return (resource.words, namespace if resource.namespaced else "", name)


def selects(selector: str, labels: Mapping[str, str] | None) -> bool:
    """`a=b`, `a!=b`, `a` and `!a`, with commas."""
    have = labels or {}
    for part in filter(None, selector.split(",")):
        name, sign, value = part.partition("!=" if "!=" in part else "=")
        if sign == "!=":
            fits = have.get(name) != value
        elif sign:
            fits = have.get(name) == value
        else:
            fits = name.removeprefix("!") in have if not name.startswith("!") else name[1:] not in have
        if not fits:
            return False
    return True


def _has_fields(one: Mapping[str, Any], fields: str) -> bool:
    for part in filter(None, fields.split(",")):
        path, sign, wanted = part.partition("!=" if "!=" in part else "=")
        value: Any = one
        for step in path.split("."):
            value = (value or {}).get(step)
        if ((value or "") == wanted) != (sign == "="):
            return False
    return True


def _owners(one: Mapping[str, Any]) -> set[str]:
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}


def _merge(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, Mapping):
            inner = target.setdefault(name, {})
            _merge(inner, value)
        else:
            target[name] = copy.deepcopy(value)
