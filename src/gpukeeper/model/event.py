"""The lines of the journal. Append-only; everything else in the ledger is a fold over these."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TypeAlias

import msgspec

from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.gpu import CheckResult, Grade
from gpukeeper.model.reading import Moment
from gpukeeper.model.subject import Hold, Memory, Outcome, Ref, State
from gpukeeper.model.unknown import Unknown

SCHEMA_VERSION = 1


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", gc=False):
    at: Moment
    ref: Ref | None = None
    owner: str | None = None
    by: str = "gpukeeper"  # the user or program that caused it
    via: str | msgspec.UnsetType = msgspec.UNSET  # of a request that did not come from this machine's command line: how


class Noticed(Line, frozen=True, tag="noticed"):
    """Seen for the first time, or in another state, incarnation or class than before."""

    incarnation: str
    state: State | Unknown
    started: Moment | None = None
    ended: Moment | None = None
    previous_end: Moment | None = None
    outcome: Outcome | None = None
    ended_with: str = ""  # of what failed
    class_: str | None = None  # of what runs and has to do with a GPU; see Memory


class Vanished(Line, frozen=True, tag="vanished"):
    """Was there in an earlier pass, is provably not there now."""


class Decided(Line, frozen=True, tag="decision"):
    """Written when the decision about an object changes, not every pass."""

    action: Action
    rule: str
    verdict: Verdict
    reason: str
    due: Moment | None = None


class WarningSent(Line, frozen=True, tag="warning"):
    rule: str
    stage: int
    incarnation: str
    limit: timedelta
    delivered: bool
    channel: str  # those that delivered it
    message: str
    until: Moment | None = None  # the announced time; nothing happens before it
    removes: bool = False  # it announced a removal, not a stop
    why_not: str = ""  # the channels that did not deliver it, and why


class Notified(Line, frozen=True, tag="notification"):
    """What became of a message that was sent in the background: to an owner over mail or chat, or to admins."""

    kind: str
    key: str  # messages of the same kind and key are one message
    message: str
    delivered: bool
    channel: str = ""  # those that delivered it
    why_not: str = ""


class Held(Line, frozen=True, tag="hold"):
    hold: Hold


class Released(Line, frozen=True, tag="release"):
    own: bool = False  # True: only the holds of `by` end
    mark: str = ""  # an admin's: why its own hold mark, which ends with this, could not be read
    lasting: str = ""  # of a tree: see Subject.lasting


class Intended(Line, frozen=True, tag="intent"):
    """Written durably before acting. Without an outcome it is open: read first, never replay."""

    step: str
    pass_id: int
    action: Action
    rule: str
    reason: str
    incarnation: str
    running: bool = False
    gpus: int | Unknown = 0
    since: Moment | None = None
    owner_verified: bool = False
    requested_by: str | msgspec.UnsetType = msgspec.UNSET  # only with the rule `request`


class Captured(Line, frozen=True, tag="evidence"):
    step: str
    evidence: str  # where it is; empty when there was nothing to capture
    note: str = ""


class Closed(Line, frozen=True, tag="outcome"):
    step: str
    action: Action
    rule: str
    result: Result
    reason: str
    incarnation: str = ""
    gpus_back: int | Unknown = 0
    gpu_hours: float | Unknown = 0.0  # held from the beginning of the condition until it was seen to be over
    bytes_back: int | Unknown = 0
    owner_verified: bool = False  # False: the owner is only claimed, or the line is older than this field
    requested_by: str | msgspec.UnsetType = msgspec.UNSET  # only with the rule `request`


class Passed(Line, frozen=True, tag="pass"):
    pass_id: int
    platform: str
    place: str
    seen: int
    due: int
    reclaimed: int
    deferred: int
    failed: int
    unseen: tuple[str, ...] = ()
    breaker: str | None = None
    seconds: float = 0.0
    unwritten: int = 0  # decisions about trees that changed, beyond what one pass writes
    running: int = 0  # workloads
    scarce: bool = False  # GPUs were scarce there, so idle times were shorter


class Paused(Line, frozen=True, tag="pause"):
    reason: str = ""

    @property
    def words(self) -> str:
        """Why, by whom and since when: shown to every user who meets the pause."""
        since = f"by {self.by or 'an unknown user'} since {self.at:%Y-%m-%d %H:%M} UTC"
        return f"{self.reason}, {since}" if self.reason else since


class Resumed(Line, frozen=True, tag="resume"):
    pass


class Complaint(Line, frozen=True, tag="complaint"):
    """A problem that an admin should fix: an invalid exemption or TTL, a pass that was not run."""

    what: str


class Restored(Line, frozen=True, tag="restore"):
    evidence: str
    result: str


class GpuChecked(Line, frozen=True, tag="gpu_check"):
    """How a GPU was found after the work on it ended. `ref` is the GPU."""

    result: CheckResult
    reason: str
    workload: str = ""  # paths of what ended
    memory_used_mib: int | Unknown = Unknown("not measured")


class BaselineSeen(Line, frozen=True, tag="baseline"):
    """A GPU without holders, with less memory in use than ever measured before."""

    memory_used_mib: int


class Quarantined(Line, frozen=True, tag="quarantine"):
    """A GPU that must not be used until an admin returns it."""

    reason: str


class Returned(Line, frozen=True, tag="return"):
    """The end of a quarantine."""

    reason: str = ""


class ResetTried(Line, frozen=True, tag="reset"):
    """Written durably before a GPU is reset, so that it happens at most once a day."""

    reason: str


class NodeTested(Line, frozen=True, tag="acceptance"):
    """An acceptance run ended. `ref` is the node."""

    run: str
    verdict: Grade
    reason: str
    device: str
    report: str = ""  # the directory it was written to
    expected: int | None = None
    gpus: Mapping[str, Grade] = {}  # by serial number (uuid where there is none); the node's own name for its figures
    values: Mapping[str, Mapping[str, float]] = {}  # by the same; then by "check.metric method"
    not_passed: Mapping[str, Mapping[str, float]] = {}  # likewise: figures that are shown and never compared with
    floors: Mapping[str, Mapping[str, float]] = {}  # likewise: what they were judged by
    models: Mapping[str, str] = {}  # by serial number or uuid
    serials: Mapping[str, str] = {}  # by uuid, of GPUs that have one


class NodeMarked(Line, frozen=True, tag="node_mark"):
    """A node of a cluster is taken out or put back, or its failed run is noted on it. `ref` is the node.

    Written durably before the first change (`result` is begun), and again when the node was read afterwards, with the
    same `step`. A step without a second line was interrupted."""

    step: str
    action: str  # quarantine, update (its reason or end), taint, return, label (a failed run, without a taint)
    result: str  # begun; then done, unchanged, deferred or failed
    reason: str
    out: bool = False  # afterwards it has the taint of this action
    run: str = ""  # the acceptance run it follows from
    failed: bool = False  # that run failed
    until: Moment | None = None  # of a quarantine
    machine: str = ""  # system UUID; stays the same if the machine gets another node name
    gpus: tuple[str, ...] = ()  # serial numbers (uuid where there is none) of those that failed in the run


class PolicyChange(msgspec.Struct, frozen=True):
    """One setting in words. None: there was, or is, no such setting."""

    setting: str
    before: str | None
    after: str | None


class PolicyChanged(Line, frozen=True, tag="policy"):
    """Another policy is in effect than before. Without changes: only members of Unix groups differ."""

    digest: str
    before: str  # the digest of the last one
    source: str
    changes: tuple[PolicyChange, ...] = ()


class Checkpoint(Line, frozen=True, tag="checkpoint"):
    """The whole state as of here, written before older lines are archived, so that folding can begin here."""

    memories: Mapping[str, Memory]
    paused: bool = False
    pause_reason: str = ""
    present: tuple[Ref, ...] = ()
    decided: Mapping[str, str] = {}
    open: tuple[Intended, ...] = ()
    passes: int = 0


Event: TypeAlias = (
    Noticed
    | Vanished
    | Decided
    | WarningSent
    | Notified
    | Held
    | Released
    | Intended
    | Captured
    | Closed
    | Passed
    | Paused
    | Resumed
    | Complaint
    | Restored
    | GpuChecked
    | BaselineSeen
    | Quarantined
    | Returned
    | ResetTried
    | NodeTested
    | NodeMarked
    | PolicyChanged
    | Checkpoint
)
