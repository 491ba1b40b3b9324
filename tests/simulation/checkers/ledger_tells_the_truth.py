"""Promise 6: "reclaimed" only for what was verified to be gone; intent before act; no step taken twice."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.model.decision import Result
from gpukeeper.model.event import Closed, Intended
from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    intended: set[str] = set()
    acted: set[str] = set()
    for i, entry in enumerate(run.world.log):
        match entry.line:
            case Intended():
                intended.add(entry.step)
            case Closed(result=Result.RECLAIMED):
                yield from _seen_to_be_so(run, i, entry.line)
            case _:
                pass
        if entry.kind == "act":
            if entry.step not in intended:
                yield f"{entry.action} on {entry.uid} without an intent"
            if entry.step in acted:
                yield f"step {entry.step} was taken twice"
            acted.add(entry.step)
    yield from _every_removal_has_a_line(run)


def _seen_to_be_so(run: Run, i: int, line: Closed) -> Iterator[str]:
    assert line.ref is not None
    read = run.last_look(line.ref.uid, i)
    if read is None:
        yield f"{line.ref.uid} recorded as reclaimed, yet nobody looked"
        return
    seen = read[1]
    truly = {
        "remove": seen.gone,
        "stop": seen.gone or seen.state in ("ended", "suspended"),
        "trim": seen.gone or seen.children == 0,
    }
    if not truly[line.action.value]:
        yield f"{line.ref.uid} recorded as reclaimed ({line.action}), yet the last look saw it {seen.state}"


def _every_removal_has_a_line(run: Run) -> Iterator[str]:
    lines = {x.step: x for x in run.lines if isinstance(x, Closed) and x.reason}
    for _, act in run.acts():
        if act.effect == "done" and act.step not in lines:
            yield f"{act.action} on {act.uid} has no outcome with a reason"
