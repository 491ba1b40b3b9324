"""How much may be held: on one workload, and of one GPU over all workloads of a user, so that a new workload does not
begin a new count. Pure; used for holds by command and for keep-alive leases alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from gpukeeper.model.decision import View
from gpukeeper.model.durations import in_words
from gpukeeper.model.memory import Hold
from gpukeeper.model.policy import Policy


def left_to_hold(view: View, policy: Policy, now: datetime) -> timedelta | str:
    """What is left of the total; a sentence when nothing is."""
    used, what = _held_already(view, policy, now)
    left = policy.hold_total - used
    if left > timedelta():
        return left
    return (
        f"{what} was held for {in_words(used)} of the last {in_words(policy.hold_within)}, and "
        f"{in_words(policy.hold_total)} is the limit. Use it, or ask an admin."
    )


def held_within(holds: Iterable[Hold], since: datetime, now: datetime) -> timedelta:
    """Time between `since` and now that users' holds covered; overlapping holds count once."""
    spans = sorted((max(h.at, since), min(h.until, now)) for h in holds if not h.admin and h.until > since)
    total, reached = timedelta(), since
    for begin, end in spans:
        begin = max(begin, reached)  # noqa: PLW2901 - the part not counted yet
        if end > begin:
            total, reached = total + (end - begin), end
    return total


def _held_already(view: View, policy: Policy, now: datetime) -> tuple[timedelta, str]:
    """The longest of: this workload, each of its GPUs."""
    own, since = view.memory.holds, now - policy.hold_within
    longest, what = held_within(own, since, now), "it"
    devices = view.subject.devices
    for device in devices if isinstance(devices, tuple) else ():
        shared = [hold for hold in view.elsewhere if device in hold.devices]
        together = held_within((*own, *shared), since, now) if shared else timedelta()
        if together > longest:
            longest, what = together, f"GPU {device}, counted over all workloads of its owner,"
    return longest, what
