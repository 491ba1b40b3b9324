"""May a GPU be reset? Pure. Every condition that does not hold is a sentence; unknown refuses.

A reset takes everything from everybody on the GPU, so this is a list of reasons not to.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.model.condition import Advice, Condition
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

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


def why_not(facts: ResetFacts, now: datetime) -> tuple[str, ...]:
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
    return (*reasons, *_about(condition, facts.residue_for))


def _about(condition: Condition, residue_for: timedelta | None) -> list[str]:
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
    reasons += [f"pid {holder.pid} ({holder.comm}) has it open" for holder in condition.holders if not holder.ours]
    return reasons
