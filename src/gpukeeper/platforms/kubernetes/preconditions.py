"""Whether an object is unchanged since the decision, and may be stopped or removed. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.subject import Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.act_results import ActResult
from gpukeeper.platforms.kubernetes.kinds.kind import QUEUE, Kind, Lever
from gpukeeper.platforms.kubernetes.wire import Meta, Pod, Root

_NEVER = datetime.min.replace(tzinfo=UTC)


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
    return msgspec.structs.replace(subject, seen=msgspec.structs.replace(subject.seen, version="", at=_NEVER))


def removal_in_progress() -> Changed:
    return Changed("its removal is already in progress")
