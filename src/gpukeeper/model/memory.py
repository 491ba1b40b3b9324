"""What the ledger remembers of a workload and the platform does not report. Rebuilt by folding the journal."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from gpukeeper.model.condition import GpuMemory
from gpukeeper.model.grade import Past
from gpukeeper.model.reading import Moment

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
