"""From objects of the API to subjects. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.clients.kubernetes.wire import Meta, Pod, Root, Spec, Status, Wire, when
from gpukeeper.model import reading
from gpukeeper.model.policy import WITHOUT_GPU
from gpukeeper.model.subject import Ref, Seen, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes import gpus, marks
from gpukeeper.platforms.kubernetes.gpus import PodTotals, held, held_slices
from gpukeeper.platforms.kubernetes.kinds.catalog import makes_runs
from gpukeeper.platforms.kubernetes.kinds.kind import INFRASTRUCTURE, Ending, Kind, Lever
from gpukeeper.platforms.kubernetes.kinds.pod import POD, not_running, of_pod
from gpukeeper.platforms.kubernetes.marks import NamespaceFacts, TranslationSettings, ending_of_run, is_of_run

PLATFORM = "kubernetes"
CLUSTER = "cluster"
SYSTEM = frozenset({"kube-system"})
MIRROR = "kubernetes.io/config.mirror"
OURS = (("app.kubernetes.io/name", "gpukeeper"), ("app.kubernetes.io/part-of", "gpukeeper"))
ONLY_RUN = "1"  # the incarnation of what never restarts under its uid
STOPPED = "gpukeeper.io/stopped"  # annotation: the setting of the lever before the stop, as JSON
IMAGE = "image"
NOT_MEASURED = Unknown("not measured")
NOT_COUNTED = Unknown("ended children are counted only if at_finish is All, or when their root is read")
NOT_REPORTED = Unknown("it has a node, which has not reported yet whether it runs")
FIRST_PODS = timedelta(minutes=1)  # after the start; a pod made later replaces another, or follows one
SHOWN = 80  # characters of quoted text in a message


class Observation(msgspec.Struct, frozen=True):
    """Where and when objects were read; `now` is the time of the server."""

    place: str
    now: datetime

    def ref(self, kind: Kind, meta: Meta) -> Ref:
        return Ref(PLATFORM, self.place, kind.name, meta.name, meta.uid, meta.namespace)


class ObjectOwner(msgspec.Struct, frozen=True):
    owner: str | Unknown | None
    verified: bool
    evidence: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


def root_subject(
    kind: Kind,
    root: Root,
    totals: PodTotals,
    namespace: NamespaceFacts,
    at: Observation,
    settings: TranslationSettings,
    part_of: str | Unknown | msgspec.UnsetType | None = msgspec.UNSET,
) -> Subject:
    """`part_of`: what was found above it. Without a word about that, an owner it names keeps it from being a root."""
    meta, spec = root.metadata, root.spec
    ending, message = ending_of(kind, root, at.now)
    over = ending.over is True
    held_by = totals.holds or namespace.held
    found, notes = marks.read(kind, meta, spec, ending, at.now, settings, held_by)
    owned = owner_of(meta, namespace, settings.owner_labels)
    unclear = None if totals.unclear is None else Unknown(totals.unclear)
    state = state_of(kind, root, totals, ending)
    return Subject(
        seen=Seen(at.ref(kind, meta), incarnation_of(kind, root), meta.resource_version, at.now),
        root=_root(meta) if isinstance(part_of, msgspec.UnsetType) else part_of,
        state=state,
        owner=owned.owner,
        owner_verified=owned.verified,
        class_=class_of(kind, meta, spec, totals),
        environment=namespace.environment,
        created=_created(meta),
        started=None if state is State.CREATED else _started(root, totals),
        ended=_ended(kind, ending),
        ends_for_good=not kind.runs,
        outcome=ending.outcome if over else None,
        ended_with=ending.how if over else "",
        devices=unclear if unclear is not None else tuple(totals.devices),
        starting=_starting(state, totals.waits) if totals.devices else "",
        slices=tuple(totals.slices),
        live_children=(unclear if unclear is not None else _alive(kind, totals)) if over else 0,
        dead_children=_dead(totals, unclear) if over else 0,
        children_go_with_it=kind.ends_with_run,
        suspended_by_stop=kind.lever is not Lever.NONE,
        size=NOT_MEASURED,
        evidence=(*owned.evidence, *_evidence(kind, root, totals, namespace, ending)),
        findings=(*owned.findings, *message, *notes, *_findings(kind, ending, totals)),
        marks=found,
        labels=_labels(meta, gpus.image_of(kind.templates(spec))),
    )


def pod_subject(
    pod: Pod,
    namespace: NamespaceFacts,
    at: Observation,
    settings: TranslationSettings,
    part_of: str | Unknown | msgspec.UnsetType | None = msgspec.UNSET,
) -> Subject:
    """A pod without a controller. `part_of` as for `root_subject`."""
    meta = pod.metadata
    ending, requested = of_pod(pod, at.now), gpus.requested(pod.spec)
    over, placed = ending.over is True, bool(pod.spec.node_name)
    holds = placed and not over
    pods_hold = marks.pod_hold(meta) or namespace.held
    found, notes = marks.read(POD, meta, None, ending, at.now, settings, pods_hold)
    owned = owner_of(meta, namespace, settings.owner_labels)
    devices: tuple[str, ...] | Unknown = tuple(held(meta.name, requested)) if holds else ()
    if holds and requested.unclear is not None:
        devices = Unknown(requested.unclear)
    state, idle = state_of_pod(pod, ending), not_running(pod)
    return Subject(
        seen=Seen(at.ref(POD, meta), ONLY_RUN, meta.resource_version, at.now),
        root=_root(meta) if isinstance(part_of, msgspec.UnsetType) else part_of,
        state=state,
        owner=owned.owner,
        owner_verified=owned.verified,
        class_=class_of(POD, meta, None, PodTotals()),
        environment=namespace.environment,
        created=_created(meta),
        started=None if state is State.CREATED else when(pod.status.start_time),
        ended=_ended(POD, ending),
        ends_for_good=pod.spec.restart_policy == "Never",
        outcome=ending.outcome if over else None,
        ended_with=ending.how if over else "",
        devices=devices,
        starting=""
        if idle is None or not holds or not requested
        else _starting(state, f"on {pod.spec.node_name}: {idle.why}"),
        slices=tuple(held_slices(meta.name, requested)) if holds else (),
        size=NOT_MEASURED,
        goes_when_stopped=True,  # it is evicted
        evidence=(*owned.evidence, *_held_evidence(None if over else pods_hold)),
        findings=(*owned.findings, *notes, *_findings(POD, ending, PodTotals())),
        marks=found,
        labels=_labels(meta, gpus.image_of((pod.spec,))),
    )


class StopNote(Wire, frozen=True):
    """The note on a stopped object: the run that was stopped, and the generation after the stop."""

    incarnation: str = ""
    generation: int = -1


def incarnation_of(kind: Kind, root: Root) -> str:
    """A resumed Job gets a new start time; most kinds have none, and their state decides. An object that gpukeeper
    stopped, unchanged since, is still the run that was stopped."""
    begun, generation = root.status.start_time or ONLY_RUN, root.metadata.generation
    ours = _our_stop(root.metadata)
    if ours is None or generation < ours.generation:  # a stop that left its note and came no further
        return begun
    if is_suspended(kind, root.spec):
        # Another generation: it was resumed and suspended again; no longer the run that gpukeeper stopped.
        return ours.incarnation if generation == ours.generation else f"{begun}@{generation}"
    # It was resumed. If its kind has no new start time, only the note distinguishes this run from the one before.
    return f"{ours.incarnation}+" if ours.incarnation.rstrip("+") == begun else begun


def _our_stop(meta: Meta) -> StopNote | None:
    note = (meta.annotations or {}).get(STOPPED)
    try:
        ours = None if note is None else reading.decode(note, type=StopNote)
    except msgspec.DecodeError:
        return None
    return ours if ours is not None and ours.incarnation and ours.generation >= 0 else None


def ending_of(kind: Kind, root: Root, now: datetime) -> tuple[Ending, tuple[str, ...]]:
    """Of a root of any kind, and findings about it."""
    if is_of_run(kind, root.metadata.labels) and kind.ends_with_run:
        return ending_of_run(kind, root.metadata, now)
    return kind.ending(root, now), ()


def state_of(kind: Kind, root: Root, totals: PodTotals, ending: Ending) -> State | Unknown:
    if root.metadata.deletion_timestamp is not None:
        return State.REMOVING
    if isinstance(ending.over, Unknown):
        return ending.over
    if ending.over:
        return State.ENDED
    if totals.living > totals.pending + totals.waiting + totals.unreported:
        return State.RUNNING
    if totals.unclear is not None:  # unlisted pods may run
        return Unknown(totals.unclear)
    if is_suspended(kind, root.spec) and totals.living == 0:
        return State.SUSPENDED
    if _has_run(kind, root, totals):
        return State.RUNNING
    return NOT_REPORTED if totals.unreported else State.CREATED


def _starting(state: State | Unknown, waits: str | None) -> str:
    return NOT_REPORTED.why if state is NOT_REPORTED else (waits or "") if state is State.CREATED else ""


def _has_run(kind: Kind, root: Root, totals: PodTotals) -> bool:
    """Or may have. A set or a service whose pods wait may have run for months; nothing in it proves "never"."""
    if kind.runs or totals.dead > 0 or totals.ran or ran(root.status):
        return True
    return when(root.status.start_time) is not None and not _has_first_pods(root, totals)


def _has_first_pods(root: Root, totals: PodTotals) -> bool:
    """A start time means only that its controller began. Its pods are the first ones if none was made later, as those
    are that replace others; what was resumed may have had others before."""
    start, newest = when(root.status.start_time), when(totals.newest)
    resumed = any(one.type == "Suspended" for one in root.status.conditions or ())
    if resumed or not isinstance(start, datetime) or not isinstance(newest, datetime):
        return False
    return newest - start <= FIRST_PODS


def ran(status: Status) -> bool:
    """Something of it got as far as a node, whatever waits for one now."""
    parts = (*(status.jobs_status or ()), *(status.replicated_jobs_status or ()))
    counts = (status.failed, status.succeeded, status.ready, status.restarts)
    return any(counts) or any(one.succeeded or one.failed or one.ready for one in parts)


def state_of_pod(pod: Pod, ending: Ending) -> State | Unknown:
    """Running though not Ready is running: it may be loading, or just finishing."""
    if pod.metadata.deletion_timestamp is not None:
        return State.REMOVING
    if ending.over is True:
        return State.ENDED
    if pod.status.phase == "Running":
        return State.RUNNING
    if pod.status.phase == "Pending":
        idle = not_running(pod)
        if idle is None:
            return State.RUNNING if pod.spec.node_name else State.CREATED
        return State.CREATED if idle.why is not None else NOT_REPORTED
    if pod.status.phase == "Unknown":
        return Unknown(f"its node ({pod.spec.node_name or 'none'}) does not respond")
    return Unknown(f"its phase is {pod.status.phase[:20]!r}")


def is_suspended(kind: Kind, spec: Spec) -> bool:
    return kind.lever is not Lever.NONE and kind.is_off(spec)


def class_of(kind: Kind, meta: Meta, spec: Spec | None, totals: PodTotals) -> str:
    """By what it is; a policy's match list comes before this."""
    labels = meta.labels or {}
    if meta.namespace in SYSTEM or MIRROR in (meta.annotations or {}):
        return INFRASTRUCTURE
    if is_of_run(kind, labels):
        return CLUSTER  # before our own: gpukeeper starts such runs, too
    if any(labels.get(key) == value for key, value in OURS):
        return INFRASTRUCTURE
    if kind.class_:
        return kind.class_
    requested = (
        totals.devices or totals.unclear is not None or (spec is not None and gpus.any_requested(kind.templates(spec)))
    )
    return WITHOUT_GPU if kind.runs and not requested else CLUSTER


def owner_of(meta: Meta, namespace: NamespaceFacts, trusted: Sequence[str]) -> ObjectOwner:
    """A label that only the site's wrapper sets, the profile its namespace is, or a claim of its own."""
    labels = meta.labels or {}
    evidence: list[str] = [namespace.evidence] if namespace.evidence else []
    labelled = next(((key, labels[key].strip()) for key in trusted if labels.get(key, "").strip()), None)
    claim = ((meta.annotations or {}).get(marks.OWNER) or labels.get(marks.OWNER) or "").strip() or None
    if claim is not None:
        evidence.append(f"{marks.OWNER} claims {claim[:SHOWN]}")
    if labelled is not None:
        key, who = labelled
        evidence.insert(0, f"label {key} names {who[:SHOWN]}")
        return _against(who, (namespace.owner,), evidence)
    if namespace.owner is None and claim is not None:
        return ObjectOwner(claim, False, tuple(evidence))
    return ObjectOwner(
        namespace.owner, isinstance(namespace.owner, str), tuple(evidence), _differs(namespace.owner, claim)
    )


def _against(who: str, others: Sequence[str | Unknown | None], evidence: Sequence[str]) -> ObjectOwner:
    """Two trusted sources that name different owners: not verified."""
    if any(isinstance(other, str) and other != who for other in others):
        return ObjectOwner(who, False, tuple(evidence), (f"its owner is ambiguous: {', but '.join(evidence[:2])}",))
    return ObjectOwner(who, True, tuple(evidence))


def _differs(owner: str | Unknown | None, claim: str | None) -> tuple[str, ...]:
    if not isinstance(owner, str) or claim is None or claim == owner:
        return ()
    return (f"{marks.OWNER} claims {claim[:SHOWN]}, but its namespace belongs to {owner[:SHOWN]}",)


def _alive(kind: Kind, totals: PodTotals) -> int:
    """Those that hold GPUs. Of a workload that ended with its acceptance run: all of them."""
    return totals.living if kind.ends_with_run else totals.holding


def _dead(totals: PodTotals, unclear: Unknown | None) -> int | Unknown:
    if unclear is not None:
        return unclear
    return totals.dead if totals.dead_counted else NOT_COUNTED


def _root(meta: Meta) -> Unknown | None:
    """Generators make runs; the run is the root, never they."""
    owner = meta.owner
    if owner is None or makes_runs(owner.api_version, owner.kind):
        return None
    return Unknown(f"it is owned by {owner.kind[:SHOWN]} {owner.name[:SHOWN]}")


def _created(meta: Meta) -> datetime | Unknown:
    created = when(meta.creation_timestamp)
    return created if created is not None else Unknown("the cluster reports no creation time")


def _started(root: Root, totals: PodTotals) -> datetime | Unknown | None:
    """A resumed Job gets a new start time."""
    started = when(root.status.start_time)
    return started if started is not None else when(totals.started)


def _ended(kind: Kind, ending: Ending) -> datetime | Unknown | None:
    if ending.over is not True:
        return None
    return ending.at if ending.at is not None else Unknown(f"this {kind.kind} does not record its end time")


def _labels(meta: Meta, image: str | None) -> Mapping[str, str]:
    """The image comes last, so that a label of that name cannot replace it."""
    labels = {key: value for key, value in (meta.labels or {}).items() if key != IMAGE}
    return labels if image is None else {**labels, IMAGE: image}


def _evidence(kind: Kind, root: Root, totals: PodTotals, namespace: NamespaceFacts, ending: Ending) -> Iterator[str]:
    if ending.over is not True:
        yield from _held_evidence(totals.holds or namespace.held)
    if is_of_run(kind, root.metadata.labels):
        yield "its labels claim that it is part of an acceptance run"
    yield from kind.evidence(root.spec, ending)


def _held_evidence(words: str | None) -> tuple[str, ...]:
    return () if words is None else (f"held while it runs: {words}",)


def _findings(kind: Kind, ending: Ending, totals: PodTotals) -> Iterator[str]:
    if isinstance(ending.over, Unknown):
        yield f"whether it has ended is unknown: {ending.over.why}"
    if ending.over is True and not isinstance(ending.at, datetime):
        why = f"this {kind.kind} does not record it" if ending.at is None else ending.at.why
        yield f"its end time is unknown: {why}; its retention counts from when it was first seen ended"
    if isinstance(ending.outcome, Unknown):
        yield f"its outcome is unknown: {ending.outcome.why}"
    if totals.unclear is not None:
        yield f"what it holds is unknown: {totals.unclear}"
    if totals.lost is not None:
        yield f"the node of its pod {totals.lost} does not respond; the pod may still run and hold its GPUs"
