"""Promise 5: what the policy says to keep is captured before anything is removed."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.event import Captured
from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        if act.action != "remove":
            continue
        before = run.world.log[:i]
        recorded = [h for h in before if isinstance(h.line, Captured) and h.step == act.step]
        if not recorded:
            yield f"{act.uid} was removed without a line about its evidence"
        elif recorded[-1].line.evidence and not any(h.kind == "capture" and h.uid == act.uid for h in before):
            yield f"{act.uid} was removed; its evidence is recorded but was never taken"
