"""Labels and annotations about the lifetime of an object, of its namespace and of an acceptance run, of gpukeeper and
of other tools. Pure. All of them are claims. Those of gpukeeper come first; TTLs of other tools count if the policy
names them, their holds always hold running work. A value that cannot be read is reported and keeps the object.
Labels of an acceptance run only select candidates: nothing ends before the recorded end of the run, or one day.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpukeeper.clients.kubernetes.wire import Meta, Spec, Wire, when
from gpukeeper.model import reading
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import Marks, Outcome, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.kubernetes.kinds.kind import (
    FIELD_TTL,
    NOT_CHECKED,
    NOT_ENDED,
    QUOTED,
    TTL,
    TTL_NAME,
    Ending,
    Kind,
    usable,
)
from gpukeeper.platforms.kubernetes.settings import settings_of

HOLD_UNTIL, OWNER, EXEMPT = "gpukeeper.io/hold-until", "gpukeeper.io/owner", "gpukeeper.io/exempt"
INFRASTRUCTURE = "gpukeeper.io/infrastructure"
WARNED = "gpukeeper.io/warned"  # what gpukeeper announced about this very object
JANITOR_TTL, JANITOR_EXPIRES = "janitor/ttl", "janitor/expires"
TWIN_TTL, TWIN_REFRESHED = "k8s-ttl-controller.twin.sh/ttl", "k8s-ttl-controller.twin.sh/refreshed-at"
KYVERNO_TTL = "cleanup.kyverno.io/ttl"
EXCLUDE, EXCLUDE_UNTIL = "downscaler/exclude", "downscaler/exclude-until"
POD_HOLDS = (("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"), ("karpenter.sh/do-not-disrupt", "true"))
MULTIKUEUE_ORIGIN = "kueue.x-k8s.io/multikueue-origin"
GITOPS_ANNOTATIONS = {"argocd.argoproj.io/tracking-id": "Argo CD"}
GITOPS_LABELS = {
    "argocd.argoproj.io/instance": "Argo CD",
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
}
FAR = datetime(9999, 1, 1, tzinfo=UTC)  # the hold rule bounds it
APPLIED = "kubectl.kubernetes.io/last-applied-configuration"  # what was written, before the server dropped anything
LONGEST_APPLIED = 256 * 1024  # bytes; the annotations of an object are together no longer
_ONE_UNIT = re.compile(r"[0-9]{1,9}[smhdw]")


class Expiry(msgspec.Struct, frozen=True):
    """`after`: counted from the finish. `at`: absolute. Neither: never."""

    after: timedelta | None = None
    at: datetime | None = None


NEVER = Expiry()


class TranslationSettings(msgspec.Struct, frozen=True):
    """How objects are translated: settings of the policy, and what the cluster supports."""

    owner_labels: tuple[str, ...] = ()
    foreign_ttl: tuple[str, ...] = ()
    gitops: bool = False  # objects of a GitOps tool are acted on, too
    ttl_field: bool | Unknown = NOT_CHECKED  # whether the served TrainJob has one

    @classmethod
    def of(cls, policy: Policy) -> TranslationSettings:
        return cls(policy.owner_labels, policy.foreign_ttl, settings_of(policy).gitops)


class AnnouncedWarnings(msgspec.Struct, frozen=True):
    """`uid`: of the object they are about. A copy of its manifest takes the annotation along, and was not warned."""

    uid: str
    warned: tuple[Warned, ...] = ()


class _AppliedSpec(Wire, frozen=True):
    ttl_seconds_after_finished: Any = None


class _Applied(Wire, frozen=True):
    spec: _AppliedSpec = _AppliedSpec()


def read(
    kind: Kind,
    root_meta: Meta,
    spec: Spec | None,
    ending: Ending,
    now: datetime,
    settings: TranslationSettings,
    pods_hold: str | None = None,
) -> tuple[Marks, tuple[str, ...]]:
    """The marks, and problems to fix."""
    notes: list[str] = []
    foreign, ttl_field = settings.foreign_ttl, settings.ttl_field
    field = None if spec is None else kind.ttl(spec, ttl_field)
    ttl, elsewhere, forever = _ttl(field, root_meta, ending, foreign, notes)
    named = [*_own_holds(root_meta), *([("a TTL without an end", FAR)] if forever else [])]
    over = ending.over is True
    if not over:
        named += _foreign_holds(root_meta, pods_hold)
    if spec is not None and over:
        until = kind.busy_until(spec, ending)
        named += [] if until is None else [("its controller, which cleans up", until)]
    holds = [until for _, until in named]
    hold = _longest(holds, now) if holds else None
    notes += [one.why for one in holds if isinstance(one, Unknown)]
    marks = Marks(
        ttl=ttl,
        ttl_by=_ttl_by(kind, root_meta, foreign, field) if isinstance(ttl, timedelta) else "",
        ttl_elsewhere=elsewhere,
        hold_until=hold,
        hold_by=next((by for by, until in named if until is hold), ""),
        unhold=_unhold(kind, root_meta),
        hold_with=f"kubectl -n {root_meta.namespace} annotate --overwrite"
        f" {kind.in_kubectl} {root_meta.name} {HOLD_UNTIL}=",
        warned=_warned(root_meta, notes),
        asks_exemption=_requested_exemption(root_meta),
        managed_elsewhere=managed_elsewhere(kind, root_meta, spec, gitops=settings.gitops),
    )
    if spec is not None:
        notes += [*kind.misplaced(spec, ttl_field), *_dropped(kind, root_meta, spec)]
    return marks, tuple(dict.fromkeys(notes))


def pod_hold(meta: Meta) -> str | None:
    """A pod that other tools must not move: its root is held while it runs."""
    given = meta.annotations or {}
    found = next((key for key, value in POD_HOLDS if given.get(key, "").lower() == value), None)
    return None if found is None else f"pod {meta.name} has {found}={given[found][:QUOTED]}"


def excluded(given: Mapping[str, str], now: datetime) -> str | None:
    """The mark of a downscaler on a namespace; one that cannot be read holds."""
    until = _exclusion(given)
    if until is None or (isinstance(until, datetime) and until <= now):
        return None
    if isinstance(until, Unknown):
        return until.why
    return EXCLUDE if until == FAR else f"{EXCLUDE_UNTIL}={given[EXCLUDE_UNTIL][:QUOTED]}"


def managed_elsewhere(kind: Kind, meta: Meta, spec: Spec | None, *, gitops: bool = False) -> str | None:
    """Another manager of the object: it would recreate or dispatch it again after a removal."""
    by = None if spec is None else kind.managed_by(spec)
    if by is not None and by != kind.manager:
        return f"{by[:QUOTED]} (managedBy)"
    labels, annotations = meta.labels or {}, meta.annotations or {}
    if MULTIKUEUE_ORIGIN in labels:
        return f"MultiKueue of another cluster ({labels[MULTIKUEUE_ORIGIN][:QUOTED]})"
    if gitops:
        return None
    for marks, given in ((GITOPS_ANNOTATIONS, annotations), (GITOPS_LABELS, labels)):
        for key, tool in marks.items():
            if key in given:
                return f"{tool} ({key}={given[key][:QUOTED]}), which would recreate it"
    return None


def _dropped(kind: Kind, meta: Meta, spec: Spec) -> Iterator[str]:
    """A TTL that was applied where the kind has no such field: the API server dropped it silently."""
    given = meta.annotations or {}
    if TTL in given or spec.ttl_seconds_after_finished is not None:
        return
    place = kind.ttl_belongs(spec)
    if place is None:
        return
    written = _applied_ttl(given.get(APPLIED, ""))
    if written is not None:
        shown = str(written)[:QUOTED]
        yield f"{FIELD_TTL}: {shown} was applied, but the {kind.kind} has no such field: no effect; use {place}"


def _applied_ttl(text: str) -> object:
    """Of any type: nothing checked it. None: there is none, or the annotation cannot be read."""
    if TTL_NAME not in text or len(text) > LONGEST_APPLIED:
        return None
    try:
        return reading.decode(text, type=_Applied).spec.ttl_seconds_after_finished
    except msgspec.DecodeError:
        return None


def span(marker: str, text: str) -> timedelta | Unknown:
    """30m, 2d, 1h30m, 0s. Nothing is skipped: 10ay is no length."""
    try:
        return reading.span(text.strip())
    except ValueError as problem:
        return Unknown(f"{marker}={text[:QUOTED]!r} {problem}; write it like 30m, 2h or 1d")


def moment(marker: str, text: str) -> datetime | Unknown:
    """RFC 3339 or a date; without a zone it is UTC."""
    try:
        return reading.moment(text.strip(), naive_is_utc=True)
    except ValueError as problem:
        return Unknown(f"{marker}={text[:QUOTED]!r} {problem}; write it like 2026-12-01T18:00:00Z")


# Times to live


def _ttl(
    field: timedelta | Unknown | None, meta: Meta, ending: Ending, foreign: Sequence[str], notes: list[str]
) -> tuple[timedelta | Unknown | None, bool, bool]:
    """Its TTL after the finish, whether the platform itself acts on it, and whether it requests to be kept for ever."""
    others = _foreign_ttl(meta, foreign) if foreign else []
    notes += [one.why for one in others if isinstance(one, Unknown)]
    forever = NEVER in others
    annotations = meta.annotations or {}
    if TTL in annotations:
        own = span(TTL, annotations[TTL])
        notes += [own.why] if isinstance(own, Unknown) else []
        return own, False, forever
    if field is not None:
        notes += [field.why] if isinstance(field, Unknown) else []
        return field, isinstance(field, timedelta), forever
    broken = next((one for one in others if isinstance(one, Unknown)), None)
    if broken is not None:
        return broken, False, forever
    left = [_after_finish(one, meta, ending) for one in others if isinstance(one, Expiry) and one != NEVER]
    unclear = next((one for one in left if isinstance(one, Unknown)), None)
    if unclear is not None:
        return unclear, False, forever
    return max((one for one in left if isinstance(one, timedelta)), default=None), False, forever


def _ttl_by(kind: Kind, meta: Meta, foreign: Sequence[str], field: object) -> str:
    """The mark that `_ttl` counts; of several of other tools, all of them."""
    annotations = meta.annotations or {}
    if TTL in annotations:
        return f"{TTL}={annotations[TTL][:QUOTED]}"
    if field is not None:
        return kind.ttl_field
    given = [(name, ((meta.labels or {}) if name == KYVERNO_TTL else annotations).get(name)) for name in foreign]
    return ", ".join(f"{name}={text[:QUOTED]}" for name, text in given if text is not None)


def _foreign_ttl(meta: Meta, foreign: Sequence[str]) -> list[Expiry | Unknown]:
    annotations, labels = meta.annotations or {}, meta.labels or {}
    found: list[Expiry | Unknown] = []
    if JANITOR_TTL in foreign and (text := annotations.get(JANITOR_TTL)) is not None:
        found.append(_janitor(meta, text))
    if JANITOR_EXPIRES in foreign and (text := annotations.get(JANITOR_EXPIRES)) is not None:
        found.append(_expires(moment(JANITOR_EXPIRES, text)))
    if TWIN_TTL in foreign and (text := annotations.get(TWIN_TTL)) is not None:
        found.append(_twin(meta, text, annotations.get(TWIN_REFRESHED)))
    if KYVERNO_TTL in foreign and (text := labels.get(KYVERNO_TTL)) is not None:
        found.append(_kyverno(text))
    return found


def _janitor(meta: Meta, text: str) -> Expiry | Unknown:
    if text.strip() == "forever":
        return NEVER
    if not _ONE_UNIT.fullmatch(text.strip()):
        return Unknown(f"{JANITOR_TTL}={text[:QUOTED]!r} is not a number with one unit (s, m, h, d, w)")
    return _from_creation(meta, JANITOR_TTL, span(JANITOR_TTL, text))


def _twin(meta: Meta, text: str, refreshed: str | None) -> Expiry | Unknown:
    """A lease: renewing it restarts it."""
    after = span(TWIN_TTL, text)
    if refreshed is None or isinstance(after, Unknown):
        return _from_creation(meta, TWIN_TTL, after)
    begun = moment(TWIN_REFRESHED, refreshed)
    return begun if isinstance(begun, Unknown) else _expires(_sum(TWIN_TTL, begun, after))


def _kyverno(text: str) -> Expiry | Unknown:
    """A length counts from when Kyverno saw the label. We cannot know that; the finish is later than the creation."""
    compact = re.fullmatch(r"([0-9]{4}-[0-9]{2}-[0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z", text.strip())
    if compact is not None:
        return _expires(moment(KYVERNO_TTL, f"{compact[1]}T{compact[2]}:{compact[3]}:{compact[4]}Z"))
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text.strip()):
        return _expires(moment(KYVERNO_TTL, text))
    after = span(KYVERNO_TTL, text)
    return after if isinstance(after, Unknown) else Expiry(after=after)


def _from_creation(meta: Meta, marker: str, after: timedelta | Unknown) -> Expiry | Unknown:
    if isinstance(after, Unknown):
        return after
    created = when(meta.creation_timestamp)
    if not isinstance(created, datetime):
        return Unknown(f"{marker} counts from its creation, which is unknown")
    return _expires(_sum(marker, created, after))


def _expires(at: datetime | Unknown) -> Expiry | Unknown:
    return at if isinstance(at, Unknown) else Expiry(at=at)


def _after_finish(expiry: Expiry, meta: Meta, ending: Ending) -> timedelta | Unknown | None:
    """From an absolute expiry to a TTL after the finish, never negative.

    Where the finish is unknown, the rules count from later than the creation, so counting from that keeps longer."""
    if expiry.after is not None or expiry.at is None:
        return expiry.after
    begun = ending.at if isinstance(ending.at, datetime) else when(meta.creation_timestamp)
    if not isinstance(begun, datetime):
        return Unknown(f"it expires at {expiry.at.isoformat()}, but neither its end nor its creation is known")
    return max(timedelta(), expiry.at - begun)


def _sum(marker: str, begun: datetime, after: timedelta) -> datetime | Unknown:
    try:
        return begun + after
    except OverflowError:
        return Unknown(f"{marker}: {in_words(after)} after {begun.year} is out of range")


# Holds


def _own_holds(meta: Meta) -> list[tuple[str, datetime | Unknown]]:
    text = (meta.annotations or {}).get(HOLD_UNTIL)
    return [] if text is None else [(f"{HOLD_UNTIL}={text[:QUOTED]}", moment(HOLD_UNTIL, text))]


def _foreign_holds(meta: Meta, pods_hold: str | None) -> list[tuple[str, datetime | Unknown]]:
    given = meta.annotations or {}
    own = _exclusion(given)
    name = EXCLUDE if own == FAR else EXCLUDE_UNTIL
    return [
        *([] if own is None else [(f"{name}={given.get(name, '')[:QUOTED]}", own)]),
        *([(pods_hold, FAR)] if pods_hold is not None else []),
    ]


def _exclusion(given: Mapping[str, str]) -> datetime | Unknown | None:
    value = given.get(EXCLUDE, "").strip().lower()
    if value == "true":
        return FAR
    if value not in {"", "false"}:
        return Unknown(f"{EXCLUDE}={given[EXCLUDE][:QUOTED]!r} is neither true nor false")
    return moment(EXCLUDE_UNTIL, given[EXCLUDE_UNTIL]) if EXCLUDE_UNTIL in given else None


def _longest(holds: Sequence[datetime | Unknown], now: datetime) -> datetime | Unknown | None:
    """What cannot be read counts where nothing that can be read still holds."""
    broken = next((one for one in holds if isinstance(one, Unknown)), None)
    longest = max((one for one in holds if isinstance(one, datetime)), default=None)
    return longest if broken is None or (longest is not None and longest > now) else broken


def _warned(meta: Meta, notes: list[str]) -> tuple[Warned, ...]:
    """What cannot be read was not announced: its owner is warned again, and has the whole time."""
    text = (meta.annotations or {}).get(WARNED)
    if text is None:
        return ()
    try:
        found = reading.decode(text, type=AnnouncedWarnings)
    except msgspec.DecodeError:
        notes.append(f"{WARNED} cannot be read, so its warnings are ignored; remove the annotation")
        return ()
    return found.warned if found.uid == meta.uid else ()


def _unhold(kind: Kind, meta: Meta) -> str:
    if HOLD_UNTIL not in (meta.annotations or {}):
        return ""
    return f"kubectl -n {meta.namespace} annotate {kind.in_kubectl} {meta.name} {HOLD_UNTIL}-"


def _requested_exemption(meta: Meta) -> str | None:
    given = {**(meta.labels or {}), **(meta.annotations or {})}
    for key in (EXEMPT, INFRASTRUCTURE):
        if given.get(key, "false").strip().lower() != "false":
            return f"{key}={given[key][:QUOTED]}"
    return None


ENVIRONMENT = "gpukeeper.io/environment"
PART_OF, PROFILE, PROFILE_OWNER = "app.kubernetes.io/part-of", "kubeflow-profile", "owner"


class NamespaceFacts(msgspec.Struct, frozen=True):
    environment: str | Unknown | None = None
    owner: str | Unknown | None = None
    evidence: str = ""  # a sentence: why it is that owner's
    held: str | None = None  # a mark that holds all running work in it


def namespace_facts(meta: Meta, environments: Mapping[str, str], now: datetime) -> NamespaceFacts:
    """`environments`: pattern of names to environment, the first that fits; the namespace's own label wins."""
    labels, annotations = meta.labels or {}, meta.annotations or {}
    environment = labels.get(ENVIRONMENT) or next(
        (given for pattern, given in environments.items() if fnmatchcase(meta.name, pattern)), None
    )
    # Profiles are created by their controller; their users cannot change the namespace itself.
    owner = annotations.get(PROFILE_OWNER, "").strip() if labels.get(PART_OF) == PROFILE else ""
    held = excluded(annotations, now)
    return NamespaceFacts(
        environment=environment,
        owner=owner or None,
        evidence=f"namespace {meta.name} is the Kubeflow profile of {owner}" if owner else "",
        held=None if held is None else f"namespace {meta.name} has {held}",
    )


def unreadable_namespace(name: str, why: str) -> NamespaceFacts:
    """Its label may name any environment, its profile any owner, and its mark may hold what runs in it."""
    unknown = Unknown(f"namespace {name} could not be read: {why}")
    return NamespaceFacts(environment=unknown, owner=unknown, held=unknown.why)


RUN_APPS = frozenset({"gpu-accept-daemon", "gpu-accept-ddp", "gpu-acceptance-test", "gpu-cluster-test"})
RUN_ROLES = frozenset({"master", "worker"})
RUN_MODES = frozenset({"single-gpu", "multi-gpu-single-node", "multi-node-ddp"})
RUN_ENDED = "gpukeeper.io/run-ended"
RUN_LIMIT = timedelta(hours=24)


def is_of_run(kind: Kind, labels: Mapping[str, str] | None) -> bool:
    return labels is not None and _has_run_labels(labels) and kind.in_runs


def _has_run_labels(labels: Mapping[str, str]) -> bool:
    if labels.get("app") in RUN_APPS:
        return True
    return labels.get("cleanup") == "auto" and (labels.get("role") in RUN_ROLES or labels.get("mode") in RUN_MODES)


def ending_of_run(kind: Kind, meta: Meta, now: datetime) -> tuple[Ending, tuple[str, ...]]:
    """The end of a workload that `is_run` and whose kind never finishes, and findings about it."""
    recorded = (meta.annotations or {}).get(RUN_ENDED)
    if recorded is not None:
        at = usable(moment(RUN_ENDED, recorded), meta, now)
        if isinstance(at, Unknown):
            return NOT_ENDED, (
                f"the end of its acceptance run cannot be read ({at.why}); it is kept until {RUN_ENDED} is fixed",
            )
        return (Ending(True, Outcome.STOPPED, at) if at is not None and at <= now else NOT_ENDED), ()
    created = when(meta.creation_timestamp)
    if not isinstance(created, datetime) or now - created <= RUN_LIMIT:
        return NOT_ENDED, ()
    words = f"an acceptance run ends within a day; this {kind.kind} was created {in_words(now - created)} ago"
    return Ending(True, Outcome.STOPPED, created + RUN_LIMIT), (words,)
