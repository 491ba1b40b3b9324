"""Promise 1: nothing that could not be measured is treated as idle, finished or healthy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from gpukeeper.model.event import WarningSent
from tests.simulation.harness import Run

HOUR = timedelta(hours=1)
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
}


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        look = run.last_look(act.uid, i)
        if intent is None or look is None:
            continue  # other promises speak of that
        needed = (NEEDED[intent.rule] | {"needed"}) - ({"devices", "started"} if act.action == "remove" else set())
        if look[1].vague in needed:
            yield f"{act.action} by {intent.rule} on {act.uid} although its {look[1].vague} was not known"
        if intent.rule == "idle" and act.action == "stop":
            wrong = [list(_measured_and_quiet(run, act.uid, look[1].at, one)) for one in _windows(run, act.uid, i)]
            if all(wrong):
                yield from wrong[0]


def _windows(run: Run, uid: str, before: int) -> list[timedelta]:
    """The idle times its owner was warned about: scarce GPUs halve it, and it grows again when they are not scarce."""
    sent = [entry.line for entry in run.world.log[:before] if entry.uid == uid]
    return sorted({line.limit for line in sent if isinstance(line, WarningSent) and line.rule == "idle"}) or [HOUR]


def _measured_and_quiet(run: Run, uid: str, at: datetime, window: timedelta) -> Iterator[str]:
    minutes = int(window / timedelta(minutes=1))
    by_device: dict[str, dict[int, float]] = defaultdict(dict)
    for when, device, value in run.world.samples.get(uid, []):
        back = int((at - when) / timedelta(minutes=1))
        if when < at and back < minutes:  # what was read at the very moment may have been read after the act
            by_device[device][back] = max(value, by_device[device].get(back, 0.0))
    if not by_device:
        yield f"idle stop of {uid} without any measurement"
    for device, buckets in by_device.items():
        # 80 % are asked for; buckets begin at full minutes and an act may come a minute after its look.
        if len(buckets) < minutes * 0.6:
            yield f"idle stop of {uid}: only {len(buckets)} of {minutes} minutes of {device} were measured"
        if max(buckets.values()) >= run.policy.activity.gpu:
            yield f"idle stop of {uid}: {device} was measured busy within its window"
