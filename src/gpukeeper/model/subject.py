"""What gpukeeper decides about: a workload, or something a workload left behind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.model.identity import Ref, Seen
from gpukeeper.model.memory import Warned
from gpukeeper.model.unknown import Unknown


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


@direct
class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # ended by a person or by gpukeeper: neither success nor failure


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
