"""Promise 9: running work, children of a finished root included, is stopped only after warnings, with time to act, and
never before the time that a warning announced. Warnings from before the end of a hold do not count. A warning is
recorded as delivered only if its owner heard it, and idle work is stopped only after one that was."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpukeeper.lifecycle.decide import REQUEST
from gpukeeper.model.decision import Action
from gpukeeper.model.event import Held, Released, WarningSent
from gpukeeper.platforms.simulated.world import LogEntry
from tests.simulation.harness import Run

STAGES = {"idle": 2, "max_runtime": 2, "restart_loop": 1, "taken_gpu": 1, "retention": 1, "own_ttl": 1}
NOT_BY_A_USER = {"max_runtime"}  # their holds do not suspend it
LONGEST = timedelta(hours=1)  # of every class in the simulation


def violations(run: Run) -> Iterator[str]:
    yield from _not_heard(run)
    for i, act in run.acts():
        intent = run.intent(act.step)
        if intent is not None and intent.rule != REQUEST and not _clock_was_wrong(run):
            yield from _too_early(run, i, act, intent.rule)
        if intent is None or intent.rule not in STAGES or not intent.running or _was_stopped(run, i, act):
            continue
        # One that comes at the same moment is another place's; this life of it goes on to its next wait.
        crashes = [n for n, h in enumerate(run.world.log[:i]) if h.kind == "crash" and h.at < act.at]
        begun = max(crashes, default=0)
        # While gpukeeper was down nobody could answer a warning, and nobody saw whether it was used.
        sent = [
            h
            for h in run.world.log[begun:i]
            if h.uid == act.uid and isinstance(h.line, WarningSent) and h.line.rule == intent.rule
        ]
        held = _held_until(run, i, act) if intent.rule not in NOT_BY_A_USER and not _clock_was_wrong(run) else None
        if held is not None and sum(h.at >= held for h in sent) < STAGES[intent.rule]:
            yield f"{act.action} by {intent.rule} on {act.uid} without all warnings after its hold until {held}"
        if intent.rule == "idle" and not any(isinstance(h.line, WarningSent) and h.line.delivered for h in sent):
            yield f"{act.action} by idle on {act.uid}, and no warning of this life was delivered"
        if len(sent) < STAGES[intent.rule]:
            yield f"{act.action} by {intent.rule} on {act.uid} after {len(sent)} warnings of this life"
        elif act.at - sent[0].at < run.policy.warnings.lead and not _clock_was_wrong(run):
            yield f"{act.action} by {intent.rule} on {act.uid} only {act.at - sent[0].at} after the first warning"


def _held_until(run: Run, i: int, act: LogEntry) -> datetime | None:
    """When its last hold ended that was not shorter than the lead."""
    lines = [h.line for h in run.world.log[:i] if h.uid == act.uid and isinstance(h.line, Held | Released)]
    ends = []
    for number, line in enumerate(lines):
        if isinstance(line, Held):
            released = [one.at for one in lines[number + 1 :] if isinstance(one, Released) and _ends(one, line)]
            end = min(line.hold.until, line.hold.at + LONGEST, *released)
            ends += [end] if end - line.hold.at >= run.policy.warnings.lead and end <= act.at else []
    return max(ends, default=None)


def _ends(release: Released, line: Held) -> bool:
    return release.at < line.hold.until and (release.by == line.hold.by or not release.own)


def _not_heard(run: Run) -> Iterator[str]:
    heard: set[str] = set()
    for one in run.world.log:
        if one.kind == "heard":
            heard.add(one.message)
        elif isinstance(one.line, WarningSent) and one.line.delivered and one.line.message not in heard:
            yield f"the warning about {one.uid} at {one.at} is recorded as delivered and nobody heard it"


def _was_stopped(run: Run, i: int, act: LogEntry) -> bool:
    """What is removed was stopped by gpukeeper before, with its warnings, and nobody has started it since."""
    mine = [h for h in run.world.log[:i] if h.uid == act.uid and (h.kind == "person" or h.effect == "done")]
    return bool(mine) and act.action == Action.REMOVE and (mine[-1].action, mine[-1].effect) == (Action.STOP, "done")


def _too_early(run: Run, i: int, act: LogEntry, rule: str) -> Iterator[str]:
    """Never before the time that was announced last by this rule; nor, by any rule, before an announced removal."""
    sent = [h.line for h in run.world.log[:i] if h.uid == act.uid and isinstance(h.line, WarningSent) and h.line.until]
    own = [line.until for line in sent if line.rule == rule][-1:]
    removals = [line.until for line in sent if line.removes] if act.action in (Action.TRIM, Action.REMOVE) else []
    for until in (*own, *removals):
        if until is not None and act.at < until:
            yield f"{act.action} by {rule} on {act.uid} at {act.at}, announced for {until}"


def _clock_was_wrong(run: Run) -> bool:
    return any(h.effect == "clock jumps" for h in run.world.log)
