"""What gpukeeper knows about a kind: its fields, whether and when an object has ended, its TTL field, its controller.
Pure: from the object as it was read to a result; the adapter reads and acts. The file of a kind makes one of these
and overrides what differs; an action that a kind does not define is never performed. An end is the condition that
its controller writes last, never counts or age (a Job that succeeded after retries has failed pods). An implausible
time is Unknown; then the rules count from when it was first seen ended, which is later.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gpukeeper.clients.kubernetes.wire import (
    EPOCH,
    Meta,
    PartialMetadata,
    PartialStatus,
    Pod,
    PodSpec,
    Root,
    RunPolicy,
    Spec,
    StatusCondition,
    Template,
    Wire,
    when,
)
from gpukeeper.model import reading
from gpukeeper.model.decision import Refused
from gpukeeper.model.subject import Cause, Outcome
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

TTL = "gpukeeper.io/ttl"  # of any kind: gpukeeper itself removes it
TTL_NAME = "ttlSecondsAfterFinished"
FIELD_TTL, RUN_POLICY_TTL = f"spec.{TTL_NAME}", f"spec.runPolicy.{TTL_NAME}"
BY_RETENTION = (
    f"gpukeeper removes it after the policy's retention; for this object only: annotation {TTL}: 1h"  # a remedy
)
NOT_CHECKED = Unknown(f"it was not checked whether the TrainJob of this cluster has {FIELD_TTL}")
QUOTED = 40  # characters of quoted text in a message


def seconds(field: str, value: int | None) -> timedelta | Unknown | None:
    if value is None:
        return None
    if value < 0:
        return Unknown(f"{field}={value} is negative")
    if value > reading.SPAN_MAX.total_seconds():
        return Unknown(f"{field}={str(value)[:QUOTED]!r} is longer than 100 years")
    return timedelta(seconds=value)


class Controller(msgspec.Struct, frozen=True):
    """Where one is usually found."""

    name: str
    deployments: tuple[str, ...] = ()  # none: part of the control plane, which may run outside the cluster
    lease: str = ""
    namespaces: tuple[str, ...] = ()  # read one by one if listing all is not permitted
    word: str = ""  # part of the image name, to find it under another name


class Finalizer(msgspec.Struct, frozen=True):
    name: str
    whose: str  # for people
    controller: Controller
    stuck: str  # when it usually is
    remedy: str
    without: bool = False  # it may be removed if its controller does not run


# Pods, Jobs, Deployments and the like belong to the control plane itself.
BUILT_IN = Controller("kube-controller-manager", lease="kube-controller-manager", namespaces=("kube-system",))
START = "Start its controller again: it then completes the removal"  # a remedy


SKEW = timedelta(minutes=5)  # clocks of a cluster differ; beyond this a time is wrong
REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


class Ending(msgspec.Struct, frozen=True):
    """`at` None: ended, and no time is recorded."""

    over: bool | Unknown = False
    outcome: Outcome | Unknown | None = None
    at: datetime | Unknown | None = None
    how: str = ""  # a short cause of a failure


NOT_ENDED = Ending()


def by_conditions(root: Root, succeeded: Sequence[str], failed: Sequence[str], now: datetime) -> Ending:
    """By the condition types that mark the end if their status is True."""
    conditions = [one for one in root.status.conditions or () if one.type in failed or one.type in succeeded]
    over = [one for one in conditions if one.status == "True"]
    if not over:
        odd = next((one for one in conditions if one.status != "False"), None)
        return NOT_ENDED if odd is None else Ending(Unknown(f"its condition {odd.type} is {odd.status[:20]!r}"))
    written = latest(one.last_transition_time for one in over)
    return Ending(
        over=True,
        # Both at once: it counts as what is kept longer.
        outcome=Outcome.FAILED if any(one.type in failed for one in over) else Outcome.SUCCEEDED,
        at=first_usable((written, when(root.status.completion_time)), root.metadata, now),
        how=next((_reason(one) for one in over if one.type in failed), ""),
    )


def _reason(condition: StatusCondition) -> str:
    """The reason that the controller gives, such as BackoffLimitExceeded; not one that only repeats the failure."""
    word = condition.reason
    return word if REASON.fullmatch(word) and not word.endswith("Failed") else ""


def usable(at: datetime | Unknown | None, meta: Meta, now: datetime) -> datetime | Unknown | None:
    """A plausible time: not in the future, and not before the creation."""
    if not isinstance(at, datetime):
        return at
    if at < EPOCH:
        return Unknown(f"{at.isoformat()} is not a plausible time")
    if at > now + SKEW:
        return Unknown(f"{at.isoformat()} is in the future")
    created = when(meta.creation_timestamp)
    if isinstance(created, datetime) and at < created - SKEW:
        return Unknown(f"{at.isoformat()} is before its creation")
    return at


def latest(times: Iterable[str | None]) -> datetime | Unknown | None:
    """Unknown if one of them cannot be read: it may be the latest."""
    found: datetime | None = None
    for text in times:
        at = when(text)
        if isinstance(at, Unknown):
            return at
        if at is not None and (found is None or at > found):
            found = at
    return found


def first_usable(times: Iterable[datetime | Unknown | None], meta: Meta, now: datetime) -> datetime | Unknown | None:
    """Otherwise, why the first recorded time is not usable."""
    why: Unknown | None = None
    for time in times:
        at = usable(time, meta, now)
        if isinstance(at, datetime):
            return at
        if why is None:
            why = at
    return why


LONGEST_QUOTE = 240  # characters of quoted text


def lasting(at: datetime, now: datetime) -> str:
    return in_words(max(now - at, timedelta()))


def ago(at: datetime, now: datetime) -> str:
    return f"{lasting(at, now)} ago"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def cut(words: str) -> str:
    plain = " ".join(words.split())
    return plain if len(plain) <= LONGEST_QUOTE else plain[: LONGEST_QUOTE - 1] + "…"


INFRASTRUCTURE, SERVING = "infrastructure", "serving"
QUEUE = "kueue.x-k8s.io/queue-name"

Json: TypeAlias = dict[str, Any]


class Lever(StrEnum):
    """How work of a kind is stopped so that it can be resumed."""

    NONE = "none"
    SUSPEND = "suspend"  # spec.suspend
    SCALE = "scale"  # the scale subresource, to 0


class Propagation(StrEnum):
    """Always named: a bare DELETE of a Job leaves its pods behind. In the foreground the root vanishes last, and each
    waits for the garbage collector, which asks twenty times a second by default: not for Jobs, of which there are
    thousands, and whose pods have ended."""

    FOREGROUND = "Foreground"
    BACKGROUND = "Background"


class Matters(StrEnum):
    """When an object without an owner is a workload for the rules."""

    ALWAYS = "always"
    WITH_GPU = "with a GPU"  # without one it is a service of others
    NEVER = "never"


class SuspendItself(msgspec.Struct, frozen=True):
    """What is left of a root ends with its suspension. What follows it is done only if that was accepted."""


class SuspendPart(msgspec.Struct, frozen=True):
    """One of its children, by name; only if it controls it."""

    kind: Kind
    name: str


class EvictPod(msgspec.Struct, frozen=True):
    pod: Pod


End: TypeAlias = SuspendItself | SuspendPart | EvictPod


class Runtime(msgspec.Struct, frozen=True):
    """Another object of the same group that it is made from."""

    kind: str
    name: str
    plural: str
    namespaced: bool


class RuntimeTtl(msgspec.Struct, frozen=True):
    """A TTL in the runtime that it is made from."""

    runtime: str
    seconds: int


class NoRuntime(msgspec.Struct, frozen=True):
    """It names a runtime that does not exist."""

    kind: str
    name: str
    namespaced: bool


class _WatchedSpec(Wire, frozen=True):
    suspend: bool | None = None


class WatchedStatus(PartialStatus, frozen=True):
    @property
    def stage(self) -> str:
        """How far it is, where its kind writes that elsewhere than in conditions."""
        return ""


class WatchedObject(PartialMetadata, frozen=True, gc=True):
    """The fields by which a watch detects changes that are relevant to a rule."""

    spec: _WatchedSpec = _WatchedSpec()
    status: WatchedStatus = WatchedStatus()


class Kind(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    # Where it is served
    kind: str  # as the API writes it
    plural: str
    group: str = ""  # empty: the core group
    versions: tuple[str, ...]  # that we can read, the best first
    called: str = ""  # how people write it, where another group has a kind of the same name
    root: type[Root] = Root  # what is read of one; a kind with fields of its own has a type of its own
    watched_as: type[WatchedObject] = WatchedObject  # what a watch reads of one

    # What it is
    children: tuple[Kind, ...] = ()  # the kinds it makes
    part_label: str = ""  # the label of its children that has its name
    uid_label: str = ""  # the label of its pods that has its uid, if its selector uses it
    controller: Controller = BUILT_IN
    finalizers: tuple[Finalizer, ...] = ()  # that its controller puts on it
    manager: str = ""  # its controller's name in `managedBy`; with any other value it is not acted on
    runs: bool = False  # never over by itself: a service, a set
    matters: Matters = Matters.ALWAYS
    watched: bool = True  # False: it changes often; the regular pass finds changes
    in_bulk: bool = False  # there may be thousands of them, so many are read by one list
    in_runs: bool = False  # acceptance runs are made of it
    class_: str = ""  # of each of them; else by what it holds

    # How it ends and is removed
    succeeded: tuple[str, ...] = ()  # conditions that mark its end, if their status is True
    failed: tuple[str, ...] = ()
    lever: Lever = Lever.NONE
    evicted: bool = False  # while it runs: never deleted, and it does not come back
    counts_annotations: bool = False  # in its generation
    in_run_policy: bool = False  # suspend, managedBy and the TTL are in spec.runPolicy, not in the spec itself
    propagation: Propagation = Propagation.BACKGROUND
    has_ttl: bool = False  # it has ttlSecondsAfterFinished
    ttl_in_crd: bool = False  # only some releases have that field, so the CRD must be read
    ttl_unless: str = ""  # what else may name one, as the end of a sentence
    removed_alone: str = "its log is lost and the root stays"  # what happens if one is, below a root that has ended

    @property
    def name(self) -> str:
        """How people write it, and `Ref.kind`."""
        return self.called or self.kind.lower()

    @property
    def in_kubectl(self) -> str:
        """How kubectl names it, so that it does not take it for one of another group."""
        return f"{self.plural}.{self.group}" if self.called else self.plural

    @property
    def below(self) -> tuple[Kind, ...]:
        """All kinds below it."""
        found: list[Kind] = []
        waiting = list(self.children)
        while waiting:
            kind = waiting.pop()
            if kind not in found:
                found.append(kind)
                waiting += kind.children
        return tuple(found)

    @property
    def ends_with_run(self) -> bool:
        """It never ends by itself, so that of an acceptance run it ends with the run."""
        return self.in_runs and self.runs

    @property
    def type_(self) -> type[Root] | type[Pod]:
        """What is read of one: a root, or a pod."""
        return self.root

    def path(self, version: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
        """Its place in the API. None: in every namespace."""
        root = f"/apis/{self.group}/{version}" if self.group else f"/api/{version}"
        where = "" if namespace is None else f"/namespaces/{namespace}"
        return root + where + f"/{self.plural}" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")

    # What is read from an object

    def ending(self, root: Root, now: datetime) -> Ending:
        """Whether it has ended, its outcome, and when. `now`: the time of the server."""
        return by_conditions(root, self.succeeded, self.failed, now)

    def settings(self, spec: Spec) -> Spec | RunPolicy | None:
        """Where suspend, managedBy and the TTL are."""
        return spec.run_policy if self.in_run_policy else spec

    def is_suspended(self, spec: Spec) -> bool:
        settings = self.settings(spec)
        return settings is not None and bool(settings.suspend)

    def is_off(self, spec: Spec) -> bool:
        """By its lever, no matter who changed it. Absent replicas count as one."""
        return spec.replicas == 0 if self.lever is Lever.SCALE else self.is_suspended(spec)

    def managed_by(self, spec: Spec) -> str | None:
        settings = self.settings(spec) if self.manager else None
        return None if settings is None else settings.managed_by

    def templates(self, spec: Spec) -> Iterator[PodSpec]:
        """The pod specs that it contains."""
        yield from pod_specs(spec.template)

    def evidence(self, spec: Spec, ending: Ending) -> Iterator[str]:
        """Facts that help to understand a decision about it."""
        yield from ()

    def parts_query(self, makers: Sequence[Root | Pod]) -> dict[str, str] | None:
        """The selector that finds the children of these, all of this kind. None: no label does, so all is listed."""
        names = ",".join(sorted(one.metadata.name for one in makers))
        return {"labelSelector": f"{self.part_label} in ({names})"} if self.part_label else None

    # How it is acted on

    def why_not_stopped(self, root: Root) -> str | None:
        """Why its lever must not be moved, as it is now."""
        return None

    def why_not_removed(self, root: Root) -> str | None:
        return None

    def suspension(self, *, suspend: bool) -> Json:
        """Of its spec, as a merge patch."""
        return {"runPolicy": {"suspend": suspend}} if self.in_run_policy else {"suspend": suspend}

    def clean_pods(self, spec: Spec, *, everything: bool) -> Json | Refused | None:
        """Of one that is over: the merge patch of its spec upon which its own operator removes its pods; `everything`:
        those that ended, too. None: it has no such setting."""
        return None

    def trim(self, root: Root, living: Sequence[Pod]) -> Sequence[End] | Refused:
        """The gentlest way to end these pods below a finished root and keep the root."""
        return Refused(f"only the removal of a {self.kind} ends its running pods")

    # How a removed object is recreated from its manifest

    def detach(self, spec: Json, labels: dict[str, str]) -> None:
        """Remove what ties the manifest to the removed object."""

    def suspend_manifest(self, spec: Json, labels: Mapping[str, str]) -> Json | Refused:
        """Change the manifest so that it does not start. Returns the note with the former setting; empty: it did not
        run before, either."""
        match self.lever:
            case Lever.SCALE:
                replicas, spec["replicas"] = spec.get("replicas", 1), 0
                return {"replicas": replicas} if replicas else {}
            case Lever.NONE:
                return Refused(f"a {self.kind} cannot be created without starting at once")
        holder = self.settings_of(spec)
        running = not holder.get("suspend")
        holder["suspend"] = True
        return {"suspend": False} if running else {}

    def resumed(self, note: Mapping[str, Any]) -> Json:
        """What else of its spec the note restores."""
        return {}

    def settings_of(self, spec: Json) -> Json:
        """As `settings`, of a manifest."""
        if not self.in_run_policy:
            return spec
        policy: Json = dict(spec.get("runPolicy") or {})
        spec["runPolicy"] = policy
        return policy

    # Its time to live, by the field that its own controller obeys

    @property
    def ttl_field(self) -> str:
        return RUN_POLICY_TTL if self.in_run_policy else FIELD_TTL

    def ttl_seconds(self, spec: Spec) -> int | None:
        settings = self.settings(spec) if self.has_ttl else None
        return None if settings is None else settings.ttl_seconds_after_finished

    def ttl(self, spec: Spec, in_crd: bool | Unknown) -> timedelta | Unknown | None:
        """After which its controller removes the root itself. `in_crd`: whether the served version has the field."""
        return seconds(self.ttl_field, self.ttl_seconds(spec))

    def ttl_words(self, spec: Spec, in_crd: bool | Unknown) -> str:
        if not self.has_ttl:
            return ""
        value = self.ttl_seconds(spec)
        return "no TTL" if value is None else f"TTL {in_words(timedelta(seconds=value))}"

    def misplaced(self, spec: Spec, in_crd: bool | Unknown) -> Iterator[str]:
        """Settings that do nothing where they are."""
        yield from ()

    def ttl_belongs(self, spec: Spec) -> str | None:
        """Where a TTL belongs that was applied as a field which this kind does not have. None: the kind has it, or it
        is set where it belongs."""
        return None

    def busy_until(self, spec: Spec, ending: Ending) -> datetime | Unknown | None:
        """Until when its own controller still cleans up after this end; gpukeeper waits for that."""
        return None

    # Why one still exists

    def runtime(self, root: Root) -> Runtime | None:
        return None

    def no_end(self, root: Root) -> str:
        """Of one that has not ended: its state."""
        true = [one.type for one in root.status.conditions or () if one.status == "True"]
        none = f"no condition {' or '.join((*self.succeeded, *self.failed))} is True"
        return f"{none}, only {', '.join(true)}" if true else none

    def without(self, part: Kind, facts: RootFacts, ending: Ending) -> str:
        """What happens to it if this part of it is removed alone."""
        if ending.over is not True:
            return "its controller recreates it, or the work fails"
        return part.removed_alone

    def causes_elsewhere(self, root: Root) -> Iterator[Cause]:
        """Causes that other controllers are responsible for."""
        yield from ()

    def causes_of_ttl(
        self, spec: Spec, ending: Ending, in_crd: bool | Unknown, found: timedelta | Unknown | None
    ) -> Sequence[Cause] | None:
        """Of one that has ended, where its TTL is not as usual. `found`: the TTL that counts. None: it is as usual."""
        return None

    def more_causes(self, facts: RootFacts, ending: Ending) -> Iterator[Cause]:
        yield from ()


Served: TypeAlias = Callable[[Kind], Awaitable[str | Unknown | None]]  # `ApiDiscovery.served`


class TreeNode(msgspec.Struct, frozen=True):
    """One object of a tree, as it was just read."""

    kind: Kind
    seen: Root | Pod

    @property
    def meta(self) -> Meta:
        return self.seen.metadata

    @property
    def words(self) -> str:
        """How people write it: jobset/run-7."""
        return f"{self.kind.name}/{self.meta.name}"


class RootFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was read about a root, for the causes that only its kind knows."""

    root: TreeNode
    children: tuple[TreeNode, ...]
    runtime: RuntimeTtl | NoRuntime | Unknown | None
    release: str | None  # of its controller; None: unknown
    now: datetime


def pod_specs(*templates: Template | None) -> Iterator[PodSpec]:
    for template in templates:
        if template is not None and template.spec is not None:
            yield template.spec
