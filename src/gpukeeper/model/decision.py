"""What should happen and what did: answers of rules, decisions, plans, intents and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model.series import Series
from gpukeeper.model.subject import EMPTY, Hold, Memory, Seen, Subject
from gpukeeper.model.unknown import Unknown, direct
from gpukeeper.model.words import in_words


@direct
class Action(StrEnum):
    KEEP = "keep"
    WARN = "warn"
    STOP = "stop"
    TRIM = "trim"  # end the live children of a finished root, keep the root
    REMOVE = "remove"
    RELEASE = "release"  # remove what blocks a removal in progress


ACTING = frozenset({Action.STOP, Action.TRIM, Action.REMOVE, Action.RELEASE})


@direct
class Guard(StrEnum):
    """How an action is tied to what was read."""

    ATOMIC = "atomic"  # the platform itself refuses if it changed; irreversible verbs must have this
    # The platform refuses while it runs. A run that begins and ends between the last read and the act is not refused;
    # it is searched for afterwards and reported. For removing what has ended, if a platform has no other condition.
    NOT_RUNNING = "not running"
    LOOKED = "looked"  # read immediately before; allowed for what can be undone


@direct
class Verdict(StrEnum):
    SILENT = "silent"  # the rule does not apply
    PROTECT = "protect"  # suspends other rules
    WAIT = "wait"  # it will be due, at `due`
    DUE = "due"
    UNKNOWN = "unknown"  # a fact is missing, so the rule keeps
    REPORT = "report"  # it would be due, and the policy only reports it


EVERY_RULE = frozenset({"*"})


class Announcement(msgspec.Struct, frozen=True, gc=False):
    """When something will happen, and the sentence that announces it. None: no time is announced."""

    at: datetime | None
    words: str


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What one rule returns for one subject. `suspends` names the rules that must not act because of it, "*" all."""

    rule: str
    verdict: Verdict
    reason: str
    action: Action = Action.KEEP
    due: datetime | None = None
    since: datetime | None = None  # when the condition began; what it cost is counted from here
    stage: int = 0  # of a warning
    limit: timedelta = timedelta()  # the limit a warning is about
    then: Action = Action.KEEP  # what a warning announces
    suspends: frozenset[str] = frozenset()
    spares: frozenset[str] = frozenset()  # when it suspends every rule: but not these
    complaint: str | None = None  # a problem that an admin should fix
    begins: Hold | None = None  # a hold that begins with this answer; the engine writes it down
    pressed: bool = False  # due only because something is scarce
    announced: datetime | None = None  # of a warning: the time that it announces
    unheard: Announcement | None = None  # of a warning: what it announces instead if it is not delivered


class Tenant(msgspec.Struct, frozen=True):
    """Other work that got a device of a workload between its stop and its next start, and still has it."""

    path: str
    owner: str | None
    device: str
    since: datetime


class View(msgspec.Struct, frozen=True, gc=False):
    """All a rule gets. `pressure`: GPUs (or disk) are scarce at this place. `elsewhere`: its owner's holds on other
    workloads that have some of its GPUs. `watched_since`: a daemon has watched without interruption since then; None
    where none runs."""

    subject: Subject
    series: tuple[Series, ...] = ()
    memory: Memory = EMPTY
    pressure: bool = False
    elsewhere: tuple[Hold, ...] = ()
    watched_since: datetime | None = None
    tenant: Tenant | None = None


class Unseen(msgspec.Struct, frozen=True):
    """What could not be listed, and why. Its workloads are unknown, never absent."""

    what: str
    why: str


def too_slow(what: str, deadline: timedelta) -> Unseen:
    return Unseen(what, f"did not answer within {in_words(deadline)}")


class Snapshot(msgspec.Struct, frozen=True):
    """One page of what is at a place."""

    platform: str
    place: str
    at: datetime
    subjects: tuple[Subject, ...]
    unseen: tuple[Unseen, ...] = ()


_KEPT = {Verdict.REPORT: "report", Verdict.UNKNOWN: "unknown"}


class PlaceHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found at a place in sum, and why it may not act there. Every account of a place begins with it."""

    platform: str
    place: str
    at: datetime
    seen: int
    running: int
    unseen: tuple[Unseen, ...]
    breaker: str | None


def head_fields(place: PlaceHead) -> dict[str, Any]:
    """To begin another account of that place with."""
    return {name: getattr(place, name) for name in PlaceHead.__struct_fields__}


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`verdict` explains why nothing happens if the action is keep: waiting, protected, unknown, report."""

    seen: Seen
    action: Action
    rule: str
    reason: str
    verdict: Verdict = Verdict.SILENT
    due: datetime | None = None
    since: datetime | None = None
    stage: int = 0
    limit: timedelta = timedelta()
    then: Action = Action.KEEP
    grace: timedelta = timedelta()  # between the signal and the stop
    running: bool = False
    owner: str | None = None
    gpus: int | Unknown = 0
    size: int | Unknown = 0
    complaints: tuple[str, ...] = ()
    begins: Hold | None = None
    rank: int = 0  # of a tree: what is cheaper to lose goes first
    disk: str = ""  # of a tree that is due only because a disk is too full: that disk
    owner_verified: bool = False  # False: the owner is only claimed
    class_: str = ""  # whose limits apply: by the policy's match, else as the platform recognized it
    announced: datetime | None = None  # of a warning: the time that it announces
    unheard: Announcement | None = None  # of a warning: what it announces instead if it is not delivered

    @property
    def word(self) -> str:
        """The action, or how it is kept."""
        return self.action.value if self.action is not Action.KEEP else _KEPT.get(self.verdict, "kept")


class Step(msgspec.Struct, frozen=True, gc=False):
    """`uid`: it was requested by this user, for whom at most is done what they could do themselves. None: a rule
    or an admin decided it. `requested_by`: empty when a rule decided it."""

    id: str
    decision: Decision
    uid: int | None = None
    requested_by: str = ""


class Plan(msgspec.Struct, frozen=True):
    """Steps in the order in which they will be taken. An open breaker (a sentence) means that none will be."""

    policy_digest: str
    at: datetime
    steps: tuple[Step, ...]
    deferred: tuple[Decision, ...] = ()
    breaker: str | None = None
    duplicates: tuple[Decision, ...] = ()  # second decisions about one object: a bug; none of them is acted on


@direct
class Result(StrEnum):
    RECLAIMED = "reclaimed"  # verified: gone (or stopped, or trimmed)
    STILL_THERE = "still there"
    CHANGED = "changed"  # not what was decided on any more; left alone
    DEFERRED = "deferred"  # the hour's budget was used up meanwhile, by a pass on another place
    NOT_CAPTURED = "not captured"  # evidence could not be saved, so it was kept
    REFUSED = "refused"  # by the platform
    UNKNOWN = "unknown"  # could not be read afterwards; the next pass reads first
    DELIVERED = "delivered"  # a warning
    UNDELIVERED = "undelivered"


# What a platform returns.


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The platform took the command. A request, not a result."""

    bytes_back: int | Unknown = Unknown("not measured")
    missed: str = ""  # what changed at the last moment, was not refused, and is lost
    resumed: bool | None = None  # of a restore. True: it was there, and runs again; False: it was recreated, and waits


class Changed(msgspec.Struct, frozen=True, gc=False):
    """The platform refused because the object has changed since it was read."""

    why: str


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The platform refused, and a retry will not help: missing permission, protected."""

    why: str


ActResult: TypeAlias = Accepted | Changed | Refused | Unknown


class Evidence(msgspec.Struct, frozen=True):
    """What was captured of a subject: named files."""

    files: Mapping[str, bytes]


class NothingToCapture(msgspec.Struct, frozen=True, gc=False):
    """It provably no longer exists (its node is gone), or it is of a shape that has no evidence."""

    why: str
