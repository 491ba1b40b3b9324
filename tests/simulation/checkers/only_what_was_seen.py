"""Promise 3: acting takes what was looked at, never a bare name. If it changed since, it is left alone."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.event import Closed, Complaint, Intended
from gpukeeper.model.subject import State
from gpukeeper.platforms.simulated.adapter import RAN_MEANWHILE
from tests.simulation.harness import Run

ATOMIC = {"remove", "trim"}


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        read = run.last_look(act.uid, i)
        if intent is None:
            continue
        intended_at = next(
            j for j, h in enumerate(run.world.log) if isinstance(h.line, Intended) and h.step == act.step
        )
        if read is None or read[0] < intended_at:
            yield f"{act.action} on {act.uid} without looking again after the intent"
            continue
        if read[1].incarnation != intent.incarnation:
            yield f"{act.action} on {act.uid}: {read[1].incarnation} was seen, {intent.incarnation} was decided on"
        if act.effect == "done" and act.action in ATOMIC and act.version != read[1].version:
            if not _ran_unseen(run, i):
                yield f"{act.action} on {act.uid} hit version {act.version}, looked at was {read[1].version}"
            elif not _is_reported(run, i):
                yield f"{act.action} on {act.uid} took a run with it that nobody saw, and nothing says so"


def _ran_unseen(run: Run, i: int) -> bool:
    """The one window of an engine without a conditional removal: a whole run, just before the act and over by then."""
    act, before = run.world.log[i], run.world.log[i - 1]
    return (before.uid, before.effect, act.state) == (act.uid, RAN_MEANWHILE, State.ENDED.value)


def _is_reported(run: Run, i: int) -> bool:
    """Unless the answer was lost, or gpukeeper died before it could say so."""
    act = run.world.log[i]
    for entry in run.world.log[i + 1 :]:
        if isinstance(entry.line, Complaint) and entry.uid == act.uid:
            return True
        if entry.kind == "crash":
            return True
        if isinstance(entry.line, Closed) and entry.step == act.step:
            return act.answer == "lost"
    return True
