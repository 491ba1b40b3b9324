"""Is a GPU clean after its workload ended, and may it be reset? Pure: ends and resets nothing; unknown refuses.

Holders of the device are found by their open descriptors. The driver's list is never used for that: it may name a
process that has ended, whose pid now belongs to another. A reset takes everything from everybody on the GPU, so that
part is a list of reasons not to.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpukeeper.model.gpu import (
    FIRST_BASELINE_MIB,
    IN_A_WORKLOAD,
    INFRASTRUCTURE,
    OF_A_SESSION,
    Advice,
    CheckResult,
    Condition,
    GpuHolder,
)
from gpukeeper.model.unknown import Unknown, direct
from gpukeeper.model.words import in_words

TOLERANCE_MIB = 64
# What a program does to itself: a bad address, an illegal instruction, being killed in the middle of a kernel.
XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})


@direct
class Life(StrEnum):
    """What became of the workload that a holder belongs to."""

    LIVE = "live"
    ENDED = "ended"  # it is there and does not run, or it was known and is gone
    STRANGER = "stranger"  # gone, and unknown here: perhaps of another engine


@direct
class HolderKind(StrEnum):
    FOREIGN = "foreign"  # belongs to live work: never touched, the GPU is shared
    ORPHAN = "orphan"
    INFRASTRUCTURE = "infrastructure"
    BARE = "bare"  # a program on the bare host: reported only
    STRANGER = "stranger"
    UNKNOWN = "unknown"


@direct
class CleanStatus(StrEnum):
    CLEAN = "clean"
    SHARED = "shared"  # nothing of what ended is left, and others use it
    ORPHANED_SHARED = "orphaned_shared"
    DIRTY = "dirty"
    UNKNOWN = "unknown"


class Cleanliness(msgspec.Struct, frozen=True):
    status: CleanStatus
    reason: str
    residue: bool = False  # dirty without a holder: only a reset could help

    @property
    def settled(self) -> bool:
        """Reading again would not change it."""
        return self.status in (CleanStatus.CLEAN, CleanStatus.SHARED)

    @property
    def result(self) -> CheckResult:
        return _RESULTS[self.status]


_RESULTS = {
    CleanStatus.CLEAN: CheckResult.CLEANED,
    CleanStatus.SHARED: CheckResult.CLEANED,
    CleanStatus.ORPHANED_SHARED: CheckResult.ORPHANED_SHARED,
    CleanStatus.DIRTY: CheckResult.DIRTY,
    CleanStatus.UNKNOWN: CheckResult.UNKNOWN,
}
Lives = Mapping[str, Life | Unknown]


def assess_gpu(condition: Condition | Unknown, lives: Lives, baseline_mib: int | None) -> Cleanliness:
    """`lives`: what became of each workload that a holder belongs to; one that is missing is not known."""
    if isinstance(condition, Unknown):
        return Cleanliness(CleanStatus.UNKNOWN, f"the GPU could not be read ({condition.why})")
    standings = {holder: holder_kind(holder, lives) for holder in condition.holders}
    orphans = [h for h, s in standings.items() if s is HolderKind.ORPHAN]
    others = [h for h, s in standings.items() if s in (HolderKind.FOREIGN, HolderKind.BARE)]
    unclear = [h for h, s in standings.items() if s in (HolderKind.STRANGER, HolderKind.UNKNOWN)]
    if orphans and (others or unclear):
        words = f"{_left(orphans)}; shared with {_named([*others, *unclear])}, which is skipped"
        return Cleanliness(CleanStatus.ORPHANED_SHARED, words)
    if orphans:
        return Cleanliness(CleanStatus.DIRTY, _left(orphans))
    doubt = _doubt_about_holders(condition, standings, lives)
    if doubt is not None:
        return Cleanliness(CleanStatus.UNKNOWN, doubt)
    sick = _sickness(condition)
    if sick is not None:
        return Cleanliness(CleanStatus.DIRTY, sick, residue=not others)
    if others:
        return Cleanliness(
            CleanStatus.SHARED, f"nothing of it is left; shared with {_named(others)}, so its memory cannot be compared"
        )
    return _assess_unheld(condition, baseline_mib)


def holder_kind(holder: GpuHolder, lives: Lives) -> HolderKind:
    if holder.ours:
        return HolderKind.INFRASTRUCTURE
    if isinstance(holder.workload_id, Unknown):
        return HolderKind.UNKNOWN
    if holder.workload_id is None:
        return HolderKind.INFRASTRUCTURE if is_infrastructure(holder) else HolderKind.BARE
    match lives.get(holder.workload_id):
        case Life.LIVE:
            watches = holder.comm in IN_A_WORKLOAD and is_infrastructure(holder)
            return HolderKind.INFRASTRUCTURE if watches else HolderKind.FOREIGN
        case Life.ENDED:
            return HolderKind.ORPHAN
        case Life.STRANGER:
            return HolderKind.STRANGER
        case _:
            return HolderKind.UNKNOWN


def is_infrastructure(holder: GpuHolder) -> bool:
    return holder.comm in INFRASTRUCTURE and (holder.uid < 1000 or holder.comm in OF_A_SESSION)


def unheld(condition: Condition, lives: Lives) -> bool:
    """Provably nothing but infrastructure has it open."""
    return not condition.unread and all(
        holder_kind(holder, lives) is HolderKind.INFRASTRUCTURE for holder in condition.holders
    )


def new_baseline(condition: Condition, lives: Lives, known: int | None) -> int | None:
    """The memory in use without a holder, if that is less than ever measured; None: nothing new."""
    used = condition.memory_used_mib
    if isinstance(used, Unknown) or not unheld(condition, lives) or condition.listed != ():
        return None
    return used if used < (FIRST_BASELINE_MIB + 1 if known is None else known) else None


def _assess_unheld(condition: Condition, baseline_mib: int | None) -> Cleanliness:
    listed, used = condition.listed, condition.memory_used_mib
    if isinstance(listed, Unknown):
        return Cleanliness(CleanStatus.UNKNOWN, f"which processes the driver lists is unknown ({listed.why})")
    known = {holder.pid for holder in condition.holders}
    ghosts = [pid for pid in listed if pid not in known]
    if ghosts:
        pids = ", ".join(map(str, ghosts))
        words = f"the driver lists pid {pids}, which does not hold it, and no other process does: residue of the driver"
        return Cleanliness(CleanStatus.DIRTY, words, residue=True)
    if isinstance(used, Unknown):
        return Cleanliness(CleanStatus.UNKNOWN, f"its memory could not be measured ({used.why})")
    if baseline_mib is None:
        words = f"{used} MiB are in use by no process, and its baseline is unknown"
        return Cleanliness(CleanStatus.UNKNOWN, words)
    if used > baseline_mib + TOLERANCE_MIB:
        words = f"{used} MiB are in use by no process, {baseline_mib} MiB when it is free: residue of the driver"
        return Cleanliness(CleanStatus.DIRTY, words, residue=True)
    return Cleanliness(
        CleanStatus.CLEAN, f"no process holds it, {used} MiB in use, {baseline_mib} MiB when free" + _aside(condition)
    )


def _doubt_about_holders(condition: Condition, standings: Mapping[GpuHolder, HolderKind], lives: Lives) -> str | None:
    for holder, found in standings.items():
        if found is HolderKind.STRANGER:
            return f"{_named([holder])} holds it, in an unknown workload, perhaps of another engine"
        if found is HolderKind.UNKNOWN:
            return f"what {_named([holder])} belongs to is unknown ({_why(holder, lives)})"
    if condition.unread:
        return f"the open files of {condition.unread} processes could not be read; that needs root (CAP_SYS_PTRACE)"
    return None


def _sickness(condition: Condition) -> str | None:
    """What the driver and the kernel report. What this model does not report is ignored."""
    if isinstance(condition.advice, Advice) and condition.advice is not Advice.NONE:
        return f"the driver advises: {condition.advice}"
    if condition.remap_failed is True:
        return "memory rows could not be replaced"
    if condition.remap_pending is True:
        return "memory rows wait for a reset to be replaced"
    xids = () if isinstance(condition.xids, Unknown) else condition.xids
    bad = [xid for xid in xids if xid.number not in XIDS_OF_PROGRAMS]
    if bad:
        return f"the kernel reported Xid {bad[0].number}: {bad[0].words}"
    return None


def _aside(condition: Condition) -> str:
    """Names what could not be read."""
    facts = (("advice", condition.advice), ("row remapping", condition.remap_pending), ("Xids", condition.xids))
    missing = [name for name, fact in facts if isinstance(fact, Unknown)]
    return f"; unknown: {', '.join(missing)}" if missing else ""


def _left(orphans: list[GpuHolder]) -> str:
    return f"still held by {_named(orphans)}, left behind by work that ended"


def _named(holders: list[GpuHolder]) -> str:
    return ", ".join(f"pid {h.pid} ({h.comm}{_stuck(h)})" for h in holders)


def _stuck(holder: GpuHolder) -> str:
    return ", in state D: no signal ends it" if holder.state == "D" else ""


def _why(holder: GpuHolder, lives: Lives) -> str:
    if isinstance(holder.workload_id, Unknown):
        return holder.workload_id.why
    life = lives.get(holder.workload_id or "")
    return life.why if isinstance(life, Unknown) else "no platform could be queried"


DAY = timedelta(days=1)
RESIDUE = timedelta(seconds=120)
_ADVISED = (Advice.RESET, Advice.DRAIN_AND_RESET)


class ResetFacts(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool
    root: bool
    condition: Condition | Unknown
    residue_for: timedelta | None  # how long it was dirty without a holder; None: it was not
    users: tuple[str, ...] | Unknown  # paths of workloads there that run, are paused or are on stop-hold
    last_reset: datetime | None


def why_no_reset(facts: ResetFacts, now: datetime) -> tuple[str, ...]:
    """Empty: the gate is open."""
    condition = facts.condition
    reasons = [] if facts.enabled else ["resets are off (gpu.reset)"]
    if not facts.root:
        reasons.append("a reset needs root")
    if facts.last_reset is not None and now - facts.last_reset < DAY:
        reasons.append(f"it was reset {in_words(now - facts.last_reset)} ago; the limit is once a day")
    if isinstance(facts.users, Unknown):
        reasons.append(f"which workloads have it is unknown ({facts.users.why})")
    elif facts.users:
        reasons.append(f"it belongs to {', '.join(facts.users)}")
    if isinstance(condition, Unknown):
        return (*reasons, f"the GPU could not be read ({condition.why})")
    return (*reasons, *_about_reset(condition, facts.residue_for))


def _about_reset(condition: Condition, residue_for: timedelta | None) -> list[str]:
    reasons = []
    if isinstance(condition.sliced, Unknown):
        reasons.append(f"whether it is divided into slices is unknown ({condition.sliced.why})")
    elif condition.sliced:
        reasons.append("it is divided into slices, and a reset affects all of them")
    if isinstance(condition.reset_alone, Unknown):
        reasons.append(f"whether it can be reset without its peers is unknown ({condition.reset_alone.why})")
    elif not condition.reset_alone:
        reasons.append("it cannot be reset without its peers")
    if condition.advice not in _ADVISED and (residue_for is None or residue_for < RESIDUE):
        reasons.append("the driver does not advise a reset, and no residue stayed for two minutes")
    if condition.unread:
        reasons.append(f"the open files of {condition.unread} processes could not be read")
    # Infrastructure counts, too: a reset under the driver's own clients fails or takes them down.
    # We ourselves let go of it before a reset.
    reasons += [_open_by(holder) for holder in condition.holders if not holder.ours]
    return reasons


def _open_by(holder: GpuHolder) -> str:
    """A service that keeps it open for good makes a reset impossible, so that an admin has to reset it by hand."""
    words = f"pid {holder.pid} ({holder.comm}) has it open"
    service = is_infrastructure(holder) and (holder.workload_id is None or holder.comm in IN_A_WORKLOAD)
    return f"{words}, a service that gpukeeper does not stop" if service else words
