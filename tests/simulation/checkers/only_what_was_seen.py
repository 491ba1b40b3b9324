"""Promise 3: acting takes what was looked at, never a bare name. If it changed since, it is left alone."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.event import Intended
from tests.simulation.harness import Run

ATOMIC = {"remove", "trim"}


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        look = run.last_look(act.uid, i)
        if intent is None:
            continue
        intended_at = next(
            j for j, h in enumerate(run.world.log) if isinstance(h.line, Intended) and h.step == act.step
        )
        if look is None or look[0] < intended_at:
            yield f"{act.action} on {act.uid} without looking again after the intent"
            continue
        if look[1].incarnation != intent.incarnation:
            yield f"{act.action} on {act.uid}: {look[1].incarnation} was seen, {intent.incarnation} was decided on"
        if act.effect == "done" and act.action in ATOMIC and act.version != look[1].version:
            yield f"{act.action} on {act.uid} hit version {act.version}, looked at was {look[1].version}"
