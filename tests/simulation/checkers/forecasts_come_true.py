"""What is said to come for certain comes true in the pass that was named: not before it, and not after it. What depends
on use is not certain. A person, a pause, a budget, a crash, a warning that was not delivered (its owner gets more
time), a step that its platform refused or a mark of it that cannot be read any more ends a forecast."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpukeeper.lifecycle.forecast import UpcomingAction
from gpukeeper.model.decision import Action
from gpukeeper.model.event import Complaint, Held, Passed, Paused, Released, Resumed, WarningSent
from tests.simulation.harness import Run, Told

PASSES = timedelta(minutes=11)  # two of them, each up to five minutes apart and not instant: a step has one of its own


def violations(run: Run) -> Iterator[str]:
    if any(one.effect == "clock jumps" for one in run.world.log):
        return  # nobody can say when that was
    for told in run.told:
        act = next((one for one in told.steps if one.action is not Action.WARN), None)
        if act is None or act.provided or act.would:
            continue
        end = act.at + PASSES
        if end > run.end or _ended_by_others(run, told, end):
            continue
        yield from _did_not_happen(run, told, act)


def _did_not_happen(run: Run, told: Told, act: UpcomingAction) -> Iterator[str]:
    acts = [h for _, h in run.acts() if h.uid == told.ref.uid and h.at >= told.at]
    words = f"{act.action} by {act.rule} on {told.ref.uid}, told at {told.at} for {act.at},"
    if not acts:
        yield f"{words} did not happen"
    elif acts[0].action != act.action:
        yield f"{words} was a {acts[0].action}"
    elif acts[0].at < act.at:
        yield f"{words} happened before, at {acts[0].at}"
    elif acts[0].at > act.at + PASSES:
        yield f"{words} happened later, at {acts[0].at}"


def _ended_by_others(run: Run, told: Told, end: datetime) -> bool:
    paused = False
    for h in run.world.log:
        line = h.line
        if h.at < told.at or h.at > end:
            if h.at < told.at and isinstance(line, Paused | Resumed):
                paused = isinstance(line, Paused)
            continue
        if h.kind in ("crash", "person") and h.uid in ("", told.ref.uid):
            return True
        if h.kind == "act" and h.uid == told.ref.uid and h.effect != "done":
            return True
        if isinstance(line, Paused | Resumed) or (isinstance(line, Held | Released) and h.uid == told.ref.uid):
            return True
        if isinstance(line, WarningSent) and line.ref == told.ref and not line.delivered:
            return True
        if isinstance(line, Complaint) and line.ref == told.ref and h.at > told.at:
            return True  # what is unknown keeps it
        if isinstance(line, Passed) and (line.breaker or line.deferred):
            return True
    return paused
