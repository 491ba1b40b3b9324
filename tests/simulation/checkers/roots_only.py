"""Promise 8: only roots, only proven remainders, only files below a root that the policy names."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from tests.simulation.harness import Run


def violations(run: Run) -> Iterator[str]:
    for i, act in run.acts():
        intent = run.intent(act.step)
        read = run.last_look(act.uid, i)
        if intent is None or read is None or intent.ref is None:
            continue
        if not read[1].root:
            yield f"{act.action} on {intent.ref.path}, which is part of another"
        if read[1].needed:
            yield f"{act.action} on {intent.ref.path}, although an owner that does not control it exists"
        if intent.rule == "temporary_tree":
            name = intent.ref.name.removeprefix("/tmp/")
            if not any(fnmatchcase(name, pattern) for entry in run.policy.temporary for pattern in entry.names):
                yield f"{intent.ref.name} was deleted and no pattern names it"
            if any(fnmatchcase(name, pattern) for entry in run.policy.temporary for pattern in entry.keep):
                yield f"{intent.ref.name} was deleted, and its name is to be kept"
        if intent.ref.kind == "process" and "cgroup" not in intent.reason:
            yield f"{intent.ref.path} was ended without proof"
