"""What is sent to the API server: conditions, options and patches. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.kubernetes.kinds.kind import Kind, Propagation
from gpukeeper.platforms.kubernetes.translate import STOPPED
from gpukeeper.platforms.kubernetes.wire import Meta, Root


def conditions_of(subject: Subject, *, uid_only: bool = False) -> dict[str, str]:
    return {"uid": subject.ref.uid} | ({} if uid_only else {"resourceVersion": subject.seen.version})


def delete_options(conditions: Mapping[str, str], policy: Propagation) -> dict[str, Any]:
    """Without a grace period: that of the object applies."""
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": dict(conditions),
        "propagationPolicy": policy.value,
    }


def eviction(name: str, namespace: str, conditions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": dict(conditions)},
    }


def suspension(
    kind: Kind, conditions: Mapping[str, str], *, suspend: bool, note: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A merge patch that sets the lever and writes (or removes) the note with its former value."""
    written = msgspec.json.encode(note or {"suspend": False}).decode() if suspend else None
    return {
        "metadata": {**conditions, "annotations": {STOPPED: written}},
        "spec": kind.suspension(suspend=suspend),
    }


def without_finalizer(
    meta: Meta, finalizer: str, uid: str, generation: int
) -> list[dict[str, str]] | Changed | Refused:
    """A JSON patch that changes nothing unless all its tests hold."""
    if meta.uid != uid:
        return Changed("another object has its name now")
    if not meta.deletion_timestamp:
        return Refused(f"its removal was not requested, so the finalizer {finalizer} is kept")
    if meta.generation != generation:
        return Changed("its spec changed since it was read")
    if finalizer not in (meta.finalizers or ()):
        return Changed(f"the finalizer {finalizer} was already removed")
    place = f"/metadata/finalizers/{(meta.finalizers or ()).index(finalizer)}"
    return [
        {"op": "test", "path": "/metadata/uid", "value": meta.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": meta.resource_version},
        {"op": "test", "path": place, "value": finalizer},
        {"op": "remove", "path": place},
    ]


def stopped_run(kind: Kind, fresh: Subject, root: Root) -> dict[str, Any]:
    """Part of the note: which run we stopped, and the generation that our change makes. A later one is not ours. Where
    annotations count as well, the note itself makes one."""
    writes = 2 if kind.counts_annotations else 1
    return {"incarnation": fresh.seen.incarnation, "generation": root.metadata.generation + writes}


def replicas_of(root: Root) -> int:
    return 1 if root.spec.replicas is None else root.spec.replicas
