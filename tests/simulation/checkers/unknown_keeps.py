"""Promise 1: nothing that could not be measured is treated as idle, finished or healthy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise

from gpukeeper.model.event import WarningSent
from tests.simulation.harness import USED_WHILE_DOWN, Run

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
APART_MAX = 3 * MINUTE  # between two readings; two are allowed, and buckets begin at full minutes
LATE_MAX = 4 * MINUTE  # three are allowed, and an act may come a minute after its look
NEEDED = {
    "idle": {"state", "root", "devices", "started", "class_", "owner"},
    "max_runtime": {"state", "root", "started", "class_", "owner"},
    "retention": {"state", "root", "outcome", "live_children"},
    "own_ttl": {"state", "root", "live_children"},
    "live_children": {"state", "root", "live_children"},
    "never_started": {"state", "root", "class_", "owner"},
    "temporary_tree": {"state", "root", "in_use", "busy", "last_used", "size"},
    "leftover_tree": {"state", "root", "in_use", "busy", "last_used"},
    "orphan": {"state", "root", "proof"},
    "restart_loop": {"state", "root"},
    "taken_gpu": {"state", "root", "devices", "started", "class_", "owner"},
}


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        read = run.last_look(act.uid, i)
        if intent is None or read is None:
            continue  # other promises speak of that
        needed = (NEEDED[intent.rule] | {"needed"}) - ({"devices", "started"} if act.action == "remove" else set())
        if read[1].vague in needed:
            yield f"{act.action} by {intent.rule} on {act.uid} although its {read[1].vague} was not known"
        if intent.rule == "idle" and act.action == "stop":
            wrong = [list(_measured_and_quiet(run, act.uid, read[1].at, one)) for one in _windows(run, act.uid, i)]
            if all(wrong):
                yield from wrong[0]


def _windows(run: Run, uid: str, before: int) -> list[timedelta]:
    """The idle times its owner was warned about: scarce GPUs halve it, and it grows again when they are not scarce."""
    sent = [entry.line for entry in run.world.log[:before] if entry.uid == uid]
    return sorted({line.limit for line in sent if isinstance(line, WarningSent) and line.rule == "idle"}) or [HOUR]


def _measured_and_quiet(run: Run, uid: str, at: datetime, window: timedelta) -> Iterator[str]:
    begin = at - window
    by_device: dict[str, dict[datetime, float]] = defaultdict(dict)
    for when, device, value in run.world.samples.get(uid, []):
        if begin - APART_MAX <= when < at:  # what was read at the very moment may have been read after the act
            by_device[device][when] = value
    if not by_device:
        yield f"idle stop of {uid} without any measurement"
    for device, readings in by_device.items():
        times = sorted(readings)
        if at - times[-1] > LATE_MAX:
            yield f"idle stop of {uid}: {device} was not measured for {at - times[-1]}"
        for earlier, later in pairwise([begin - APART_MAX, *times]):
            if later - max(earlier, begin) > APART_MAX:
                yield f"idle stop of {uid}: {device} was not measured for {later - earlier} of its window"
        if any(value >= run.policy.activity.gpu for when, value in readings.items() if when > begin + MINUTE):
            yield f"idle stop of {uid}: {device} was measured busy within its window"
    used = [h.at for h in run.world.log if h.uid == uid and h.effect == USED_WHILE_DOWN and begin + MINUTE < h.at < at]
    if used:
        yield f"idle stop of {uid}: it was used {at - used[-1]} before, while gpukeeper was down"
