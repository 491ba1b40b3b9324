"""A write to the API server, without sending it: whether the object is unchanged and may be stopped or removed, what
is sent (conditions, options, patches), and what the response means. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import Meta, Pod, Root
from gpukeeper.model.decision import Accepted, ActResult, Changed, Refused
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Kind, Lever
from gpukeeper.platforms.kubernetes.translate import STOPPED

WORDS_OF_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")


def result_of_error(error: ApiError, right: str, namespace: str) -> Changed | Refused | Unknown:
    """The meaning of an error of the API server. `right`: verb and resource, as in a role."""
    if error.is_not_found:
        return Changed("it is already gone")
    if error.is_conflict:
        return Changed("it changed since it was read")
    if any(words in error.words for words in WORDS_OF_ADMISSION):
        return Refused(f"an admission policy of the cluster refuses it: {error.words}")
    match error.status:
        case 401:
            return Refused(f"the cluster does not accept the credentials of gpukeeper: {error.words}")
        case 403:
            return Refused(
                f"gpukeeper may not {right} in namespace {namespace}; add this permission to its role ({error.words})"
            )
        case 429 if error.is_disruption_budget:
            return Refused(f"a PodDisruptionBudget does not allow the eviction now: {error.words}")
        case 429:
            return Refused(f"the API server is overloaded and did nothing; try again later ({error.words})")
        case 500 if "PodDisruptionBudget" in error.words:
            return Refused(f"more than one PodDisruptionBudget covers it, so it cannot be evicted: {error.words}")
        case 400 | 422:
            return Refused(f"This is a bug in gpukeeper: the API server rejected the request as invalid: {error.words}")
        case 404 | 410:
            return Unknown(f"the response does not prove that the object is gone: {error}")
        case status if status < 500:
            return Refused(error.words)
    return Unknown(str(error))


def resource(kind: Kind, sub: str = "") -> str:
    """As a role names it."""
    return kind.plural + (f"/{sub}" if sub else "") + (f".{kind.group}" if kind.group else "")


def combined(answers: Sequence[ActResult]) -> ActResult:
    """Of several results: a refusal or an unknown result first, then an accepted one."""
    for kind_of in (Refused, Unknown, Accepted):
        for answer in answers:
            if isinstance(answer, kind_of):
                return answer
    return answers[0]


_NO_TIME = datetime.min.replace(tzinfo=UTC)


def another(fresh: Subject, meta: Meta) -> Changed | None:
    """Whether this root is not the object that was decided on."""
    if meta.uid != fresh.ref.uid:
        return Changed("another object has its name now")
    if meta.deletion_timestamp:
        return removal_in_progress()
    return None


def cannot_stop(kind: Kind, root: Root) -> Changed | Refused | None:
    """Why its lever must not be moved."""
    if kind.lever is Lever.NONE:
        return Refused(f"a {kind.kind} cannot be stopped and resumed; it can only be removed")
    if kind.is_off(root.spec):
        return Changed("it is already stopped")
    if QUEUE in (root.metadata.labels or {}):
        return Refused("Kueue manages its suspension; set its Workload's spec.active to false, or remove it")
    why = kind.why_not_stopped(root)
    return None if why is None else Refused(why)


def cannot_remove(kind: Kind, root: Root | Pod) -> Refused | None:
    why = kind.why_not_removed(root) if isinstance(root, Root) else None
    return None if why is None else Refused(why)


def unchanged(fresh: Subject, again: Subject | Gone | Changed | Unknown) -> Subject | ActResult:
    """The object as read again, if nothing relevant to the decision changed."""
    if isinstance(again, Unknown | Changed):
        return again
    if isinstance(again, Gone):
        return Changed("it is already gone")
    if again.ref.uid != fresh.ref.uid:
        return Changed("another object has its name now")
    if again.state is State.REMOVING:
        return removal_in_progress()
    before, now = _facts(fresh), _facts(again)
    differ = [name for name in before.__struct_fields__ if getattr(before, name) != getattr(now, name)]
    return Changed(f"its {', '.join(differ)} changed since it was read") if differ else again


def _facts(subject: Subject) -> Subject:
    return msgspec.structs.replace(subject, seen=msgspec.structs.replace(subject.seen, version="", at=_NO_TIME))


def removal_in_progress() -> Changed:
    return Changed("its removal is already in progress")


def conditions_of(subject: Subject, *, uid_only: bool = False) -> dict[str, str]:
    return {"uid": subject.ref.uid} | ({} if uid_only else {"resourceVersion": subject.seen.version})


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
