"""Promise 2: no rule acts on what a valid hold or exemption suspends for it, nor outside the policy's scope."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpukeeper.model.event import Held, Released
from tests.simulation.harness import Run

NOT_BY_A_USER = {"max_runtime", "request"}


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        read = run.last_look(act.uid, i)
        if intent is None or read is None or intent.ref is None:
            continue
        if intent.rule not in NOT_BY_A_USER and _is_held(run, act.uid, read[0]):
            yield f"{act.action} by {intent.rule} on {act.uid} while it was held"
        for exemption in run.policy.exemptions:  # type: ignore[union-attr]
            if intent.owner == exemption.owner and intent.rule in exemption.rules and read[1].at < exemption.until:
                yield f"{act.action} by {intent.rule} on {act.uid} of {intent.owner}, who is exempt"
        scope = run.policy.scope[intent.ref.platform]
        if intent.ref.namespace and not any(fnmatchcase(intent.ref.namespace, one) for one in scope.namespaces):
            yield f"{act.action} on {intent.ref.path}, which is out of scope"


def _is_held(run: Run, uid: str, before: int) -> bool:
    """By what the ledger said when it was last looked at."""
    at = run.world.log[before].at
    until = None
    for entry in run.world.log[:before]:
        if entry.uid == uid and isinstance(entry.line, Held):
            until = max(until or entry.line.hold.until, entry.line.hold.until)
        elif entry.uid == uid and isinstance(entry.line, Released):
            until = None
    return until is not None and until > at
