"""What gpukeeper decides about: a workload, or something a workload left behind. Its identity (a name for people, a
uid for acting: nothing is ever acted on by its name alone), what its platform reports, and why it still exists; and
what the ledger remembers of it, rebuilt by folding the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from gpukeeper.model.gpu import GpuMemory, Past
from gpukeeper.model.reading import Moment
from gpukeeper.model.unknown import Unknown, direct

PlaceKey: TypeAlias = tuple[str, str]  # platform and place


class Ref(msgspec.Struct, frozen=True, gc=False):
    """One object at one place. `uid`: an id of its platform that is never reused, dev:inode or pid@start."""

    platform: str
    place: str
    kind: str
    name: str
    uid: str
    namespace: str = ""

    @property
    def path(self) -> str:
        """How people write it: platform/place/name, or platform/place/namespace/kind/name."""
        if self.namespace:
            return f"{self.platform}/{self.place}/{self.namespace}/{self.kind}/{self.name.lstrip('/')}"
        return f"{self.platform}/{self.place}/{self.name.lstrip('/')}"

    @property
    def key(self) -> str:
        """What the ledger remembers it by. Names are reused, uids are not."""
        return f"{self.platform}/{self.place}/{self.uid}"

    def ends_with(self, words: str) -> bool:
        """Any ending of the path on a word boundary names it: `eval`, `node-3/eval`, `job/run-7`."""
        path, wanted = self.path.lower(), words.strip("/").lower()
        return path == wanted or path.endswith("/" + wanted) or self.uid == words


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An object as it was at one read. `incarnation` changes when it starts again under the same uid
    (its start, resource generation, inode and newest ctime); `version` at any change at all."""

    ref: Ref
    incarnation: str
    version: str
    at: datetime


KEEP_ALIVE = "keep-alive"  # `by` of a hold that a file inside the workload requested
# `by` of a hold that a restore granted: every user who may release holds on that workload may release this one. No
# user has a name with a space.
RESTORE = "a restore"


class Warned(msgspec.Struct, frozen=True, gc=False):
    rule: str
    stage: int
    at: Moment
    delivered: bool
    incarnation: str
    limit: timedelta = timedelta()  # what it warned about; a changed limit needs new warnings
    until: Moment | None = None  # the announced time; nothing happens before it
    removes: bool = False  # it announced a removal, not a stop


class Hold(msgspec.Struct, frozen=True, gc=False):
    """A request to leave it alone. `suspends` empty means: idle and every removal, never max runtime."""

    by: str
    at: Moment
    until: Moment
    reason: str = ""
    admin: bool = False
    suspends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # what it held; a user's holds of one GPU add up over workloads
    lasting: str = ""  # of a tree: see Subject.lasting; it is remembered by this uid, too


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """Who stopped it. `by` is "gpukeeper" only when a journalled intent says so; otherwise a person did."""

    by: str
    rule: str
    at: Moment
    incarnation: str


class ClockRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the processes of one boot of a machine saw of its clock. The steady clock counts from the boot and is the
    same for all of them."""

    zero: Moment  # what the clock showed when the steady one was 0; another value: the clock was set
    doubted_until: float | None = None  # seconds of the steady clock; None: it is trusted
    watched: bool = False  # a daemon has begun, and judged how long the machine was off before this boot


class Memory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    first_start: Moment | None = None
    state: str = ""  # as last noticed
    incarnation: str = ""
    started: Moment | None = None
    ran: timedelta = timedelta()  # of earlier incarnations
    warnings: tuple[Warned, ...] = ()
    holds: tuple[Hold, ...] = ()
    released_mark: str = ""  # what could not be read of its own hold mark when an admin released it
    stopped: Stopped | None = None
    first_seen_ended: Moment | None = None
    class_: str = ""  # while it last ran, if it had to do with a GPU: a GPU that it only held is not seen when it ended
    ended: Moment | None = None  # as last noticed; another end under the same identity is another turn of a loop
    ends_seen: int = 0  # times this uid was seen to end; a root that ends and runs again is a loop
    gpu: GpuMemory | None = None  # of a GPU itself: baseline, last check, quarantine
    tested: tuple[Past, ...] = ()  # of a machine: what its GPUs showed in acceptance runs, oldest first


EMPTY = Memory()


@direct
class Shape(StrEnum):
    """Workloads run or ran; the other shapes are leftovers."""

    WORKLOAD = "workload"
    ORPHAN = "orphan"  # a running remainder of a workload that ended
    TREE = "tree"  # files below a root that the policy names
    IMAGE = "image"
    CACHE = "cache"
    VOLUME = "volume"  # that work may have attached
    NETWORK = "network"  # that work may have attached
    DEVICE = "device"  # a GPU itself: shown, never acted on
    NODE = "node"  # what work runs on, a node or a disk: shown, never acted on
    REMNANT = "remnant"  # what work left behind besides files, and holds nothing: shown, never acted on


@direct
class Category(StrEnum):
    """What a tree is. The first is the cheapest to lose, and goes first."""

    UNFINISHED = "unfinished"  # what an interrupted removal of our own left
    DEAD_SESSION = "dead-session"  # everything that a run of a cluster left, proven to be over
    DEAD_LOGS = "dead-logs"  # logs of processes that ended, of a session that lives
    TEMPORARY = "temporary"  # below a root that the policy names, by pattern
    REPORT = "report"  # results that people may still want to read


@direct
class State(StrEnum):
    CREATED = "created"  # never started, failed starts included
    RUNNING = "running"
    PAUSED = "paused"  # quiet by every sign, yet holds its GPUs
    SUSPENDED = "suspended"  # stopped in a way that can be undone
    ENDED = "ended"
    REMOVING = "removing"  # its removal was requested already


LIVE: Final = (State.RUNNING, State.PAUSED)
OVER: Final = (State.ENDED, State.SUSPENDED)


@direct
class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # ended by a person or by gpukeeper: neither success nor failure


OUTCOMES: Final = tuple(one.value for one in Outcome)


class Marks(msgspec.Struct, frozen=True, gc=False):
    """What the workload declares about itself. Claims, never permission to remove sooner than retention.max allows."""

    ttl: timedelta | Unknown | None = None  # its own time to live after the finish; Unknown: garbled
    ttl_by: str = ""  # the mark that says so, as it is written: "janitor/ttl=10s"
    ttl_elsewhere: bool = False  # the platform itself removes it when that is over
    hold_until: datetime | Unknown | None = None
    hold_by: str = ""  # the mark that holds it for longest, as it is written
    unhold: str = ""  # how that mark is taken off the workload, in words
    hold_with: str = ""  # the command that holds it on the object itself; the time is appended
    warned: tuple[Warned, ...] = ()  # announcements that another instance of gpukeeper left on the object
    asks_exemption: str | None = None  # the words of a label that requests an exemption
    managed_elsewhere: str | None = None  # by what else its life is managed
    keep_alive: bool | Unknown | None = None  # a file inside requests a hold; None: it has no place for one


class Blocked(msgspec.Struct, frozen=True, gc=False):
    """Why a removal in progress does not end. `proven`: its controller provably never ends it."""

    by: str  # the name of what blocks, as the policy's release list writes it
    since: datetime
    proven: bool | Unknown
    why: str  # a sentence


class Disk(msgspec.Struct, frozen=True, gc=False):
    """How full the filesystem of something is, like `df`."""

    name: str  # where it is mounted
    used: float  # share of its bytes
    inodes: float | None = None  # share of its inodes; None: it has no limit of them

    @property
    def full(self) -> float:
        return self.used if self.inodes is None else max(self.used, self.inodes)


class Crashes(msgspec.Struct, frozen=True, gc=False):
    """Failures in a row, after each of which its platform started it again without a longer run in between."""

    count: int
    first: datetime
    last: datetime


class Subject(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything the rules may know of one object, as of `seen.at`."""

    seen: Seen
    shape: Shape = Shape.WORKLOAD
    root: str | Unknown | None = None  # path of what it is part of; None: it is a root, and only roots are acted on
    needed: str | Unknown | None = None  # why something else needs it, so that it stays; a clause; Unknown: it may
    state: State | Unknown
    owner: str | Unknown | None = None  # None: it has none
    owner_verified: bool = True  # False: only a claim, such as a label that any user can set
    class_: str | Unknown = "unknown"
    environment: str | Unknown | None = None
    created: datetime | Unknown
    started: datetime | Unknown | None = None  # start of this incarnation
    ended: datetime | Unknown | None = None
    previous_end: datetime | Unknown | None = None  # end of the incarnation before this one
    ends_for_good: bool = False  # of a kind that never runs again once it ended; if it does, it loops
    crashes: Crashes | None = None
    outcome: Outcome | Unknown | None = None
    ended_with: str = ""  # of what failed, as reported by its platform: "exit code 137, out of memory"
    devices: tuple[str, ...] | Unknown = ()
    starting: str = ""  # of one that is created: its GPUs are taken, and this is why it does not run yet; a clause
    slices: tuple[str, ...] = ()  # which of its devices are only a part of a GPU
    live_children: int | Unknown = 0  # descendants that run and hold GPUs
    dead_children: int | Unknown = 0  # descendants that ended and are still kept
    children_go_with_it: bool = False  # nothing but its own removal ends them
    blocked: Blocked | None = None  # being removed, and something keeps that from ending
    size: int | Unknown = Unknown("not measured")  # bytes
    last_used: datetime | Unknown | None = None  # of a tree: not used after that; ahead while a read may go unrecorded
    use_evidence: str = ""  # what `last_used` of a tree follows from, as a clause
    # Bytes of all trees of the same root, or node; None: only its own count. Of an unused image: with those used later.
    together: int | Unknown | None = None
    in_use: bool | Unknown = False  # open files, locks, processes inside a tree
    category: Category = Category.TEMPORARY  # of a tree
    uids: frozenset[int] | None = None  # of a tree: owners of all its entries; None: not established
    # What runs beside a tree and may need it, or has a device open and is no service; in a few words. None: nothing.
    busy: str | Unknown | None = None
    # Why a tree or a volume stays however old it is, as a clause: "the link latest leads to it"
    kept: str | None = None
    disk: Disk | None = None  # the filesystem it lies on; None: not read, so never too full
    lasting: str | None = None  # of a tree: its uid with an id of the filesystem that outlasts its device number
    proof: str | Unknown | None = None  # an orphan: what ties it to the workload that ended
    evidence: tuple[str, ...] = ()  # sentences: why it is attributed to this owner
    findings: tuple[str, ...] = ()  # sentences: what a person should fix; nothing is repaired here
    loses: tuple[str, ...] | Unknown = ()  # what its removal would destroy; filled in by a read, not when listed
    goes_when_stopped: bool = False  # a stop is its removal, so that evidence comes first
    image: Ref | None = None  # what it was made from, at the same place: without it, it cannot be restored
    attached: tuple[Ref, ...] = ()  # at the same place: what else it cannot be restored without
    suspended_by_stop: bool = False  # a stop suspends it: it is kept as long as stopped work, or for ever (after_idle)
    marks: Marks = Marks()
    labels: Mapping[str, str] = {}

    @property
    def ref(self) -> Ref:
        return self.seen.ref

    @property
    def disk_name(self) -> str:
        """Two nodes of one place may have disks of the same name."""
        return "" if self.disk is None else f"{self.ref.namespace} {self.disk.name}".strip()


class Gone(msgspec.Struct, frozen=True, gc=False):
    """Searched for by uid and provably absent."""

    ref: Ref
    at: datetime
    announced: bool = False  # the platform reported its removal when it happened


class Cause(msgspec.Struct, frozen=True):
    words: str  # a sentence
    remedy: str = ""  # what to do about it


class Diagnosis(msgspec.Struct, frozen=True):
    """`tree`: one line each from the root down, indented."""

    tree: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
