"""Promise 4: never more than the budget in one pass or one hour; nothing when the world looks broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from gpukeeper.lifecycle.budget import TREES
from gpukeeper.model.event import Intended, Passed
from gpukeeper.platforms.simulated.world import LogEntry
from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    """Trees end no work: they have an hour of their own, and a pass may take all of it."""
    intents = [h for h in run.world.log if isinstance(h.line, Intended)]
    trees = [h for h in intents if h.line.rule in TREES]  # type: ignore[union-attr]
    work = [h for h in intents if h.line.rule not in TREES]  # type: ignore[union-attr]
    per_pass, budget = run.policy.budget.per_pass.count or 0, run.policy.budget
    for pass_id, count in Counter(h.line.pass_id for h in work).items():  # type: ignore[union-attr]
        if count > per_pass:
            yield f"pass {pass_id} acted {count} times, the budget is {per_pass}"
    yield from _within_an_hour(run, work, budget.per_hour.count or 0, "acts")
    yield from _within_an_hour(run, trees, budget.trees, "trees")
    broken = {x.pass_id for x in run.lines if isinstance(x, Passed) and x.breaker}
    for entry in intents:
        if entry.line.pass_id in broken:  # type: ignore[union-attr]
            yield f"pass {entry.line.pass_id} acted although its breaker was open"  # type: ignore[union-attr]
    yield from _running_at_once(run)


def _within_an_hour(run: Run, intents: list[LogEntry], most: int, what: str) -> Iterator[str]:
    for i, entry in enumerate(intents):
        hour = [h for h in intents[i:] if h.at - entry.at < timedelta(minutes=59)]
        if len(hour) > most and not _clock_was_wrong(run):
            yield f"{len(hour)} {what} within an hour of {entry.at:%H:%M}, the budget is {most}"
            break


def _running_at_once(run: Run) -> Iterator[str]:
    running: dict[str, int] = {}
    stopped: dict[str, int] = {}
    for entry in run.world.log:
        if entry.kind == "listing":
            running[entry.place], stopped[entry.place] = entry.running, 0
        elif entry.kind == "act" and entry.state == "running" and entry.effect in ("done", "nothing"):
            count = stopped[entry.place] = stopped.get(entry.place, 0) + 1
            allowed = max(run.policy.breaker.floor, int(running.get(entry.place, 0) * run.policy.breaker.running))
            # Workloads may end or begin between the list and the act; one is allowed for.
            if count > allowed + 1:
                yield f"{count} of {running.get(entry.place)} running workloads were acted on in one pass"


def _clock_was_wrong(run: Run) -> bool:
    return any(h.effect == "clock jumps" for h in run.world.log)
