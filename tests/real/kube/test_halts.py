"""gpukeeper is killed at each point of a step on a cluster, by name and not by chance; a plain `apply` goes on.

No node is needed: pods are taken by no scheduler, and what a kubelet would write about them is written by hand.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.halt import ACTED, BEFORE_THE_ACT, BEFORE_THE_INTENT, BEFORE_THE_OUTCOME, CLOSED, POINTS
from tests.real.kube import objects
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.endings import text
from tests.real.kube.runs import marked
from tests.smoke import smoke

DUE, HELD = "due", "keep-held"
POLICY: dict[str, Any] = {
    "mode": "enforce",
    "retention": {"succeeded": "0s", "failed": "0s", "stopped": "1d"},
    "classes": {"cluster": {"max_runtime": "1s"}},
    "warnings": {"runtime": ["1%"], "lead": "0s", "undelivered": "0s"},
    "budget": {"per_pass": 1000, "per_hour": 100000},
    "breaker": {"running": "100%", "vanished": "100%", "floor": 1000},
    "kubernetes": {"requests": 1000, "burst": 1000},
}
Line = dict[str, Any]


class Shell:
    """gpukeeper over one namespace, with a ledger of its own."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        self.api, self.namespace, self.folder = plane.api, namespace, folder
        policy = {**POLICY, "scope": {"kubernetes": {"namespaces": [namespace]}}}
        (folder / "policy.yaml").write_text(json.dumps(policy))
        self._environ = {
            **forked.environment(),
            "HOME": str(folder),
            "KUBECONFIG": str(plane.keeper_kubeconfig()),
            "GPUKEEPER_STATE": str(folder / "state"),
            "GPUKEEPER_POLICY": str(folder / "policy.yaml"),
        }

    def apply(self, *halt: str) -> int:
        program = "tests.halt" if halt else "gpukeeper"
        words = (*halt, "apply", "--yes", "--quiet", "--platform", "kubernetes")
        code, *printed = forked.run(program, words, self._environ, folder=self.folder)
        assert code in (0, 3, -signal.SIGKILL), (code, printed)
        return code

    def lines(self, *types: str) -> list[Line]:
        with closing(sqlite3.connect(f"file:{self.folder / 'state' / 'ledger.db'}?mode=ro", uri=True)) as ledger:
            rows = ledger.execute("SELECT type, line FROM journal ORDER BY seq").fetchall()
        return [{**json.loads(line), "type": kind} for kind, line in rows if kind in types]

    def open_steps(self) -> list[str]:
        closed = {one["step"] for one in self.lines("outcome") if one["result"] != "unknown"}
        return [one["step"] for one in self.lines("intent") if one["step"] not in closed]

    # What is there.

    def make(self, action: str) -> None:
        """One that is due for it, and one in the same state that its owner holds."""
        held = {"hold_until": text(datetime.now(UTC) + timedelta(hours=20))}
        pods = {"schedulerName": "nobody"} if action == "stop" else {"parallelism": 0}
        self.api.create(objects.job(DUE, **pods), self.namespace)
        if action == "remove":  # a hold never suspends the maximum runtime
            self.api.create(marked(objects.job(HELD, **pods), **held), self.namespace)
            for name in (DUE, HELD):
                self.api.wait_condition("jobs", self.namespace, name, "Complete")
            return
        (pod,) = self.api.wait_pods(self.namespace, 1, phase="Pending")
        container = {"name": "main", "image": objects.IMAGE, "imageID": "", "ready": True, "restartCount": 0}
        runs = {**container, "state": {"running": {"startedAt": text(datetime.now(UTC) - timedelta(hours=1))}}}
        status = {"phase": "Running", "containerStatuses": [runs]}
        self.api.patch("pods", self.namespace, pod["metadata"]["name"], {"status": status}, subresource="status")

    def job(self, name: str) -> dict[str, Any] | None:
        found = self.api.get("jobs", self.namespace, name)
        return None if found is None or "deletionTimestamp" in found["metadata"] else found

    def is_done(self, action: str) -> bool:
        found = self.job(DUE)
        return found is None if action == "remove" else bool(found and found["spec"].get("suspend"))


@pytest.mark.parametrize("action", ["remove", "stop"])
@pytest.mark.parametrize("point", smoke(POINTS, ACTED.__eq__))
def test_killed_at_a_point_of_a_step_nothing_wrong_goes_and_nothing_twice(
    plane: ControlPlane, namespace: str, tmp_path: Path, action: str, point: str
) -> None:
    shell = Shell(plane, namespace, tmp_path)
    shell.make(action)
    if action == "stop":
        assert shell.apply() == 0  # warns, and stops in the next pass
        assert [one["ref"]["name"] for one in shell.lines("warning")] == [DUE]
    codes = [shell.apply(point, DUE)]
    while codes[-1] == 0 and len(codes) < 4:  # a pass in which it was not due yet, or the cluster was just changing
        codes.append(shell.apply(point, DUE))
    assert codes[-1] == -signal.SIGKILL, codes
    acted = point in (*BEFORE_THE_OUTCOME, CLOSED)
    assert shell.is_done(action) is acted
    written = [one["type"] for one in shell.lines("intent", "outcome")]
    open_step = point in BEFORE_THE_ACT + BEFORE_THE_OUTCOME
    assert written == ([] if point in BEFORE_THE_INTENT else ["intent"] if open_step else ["intent", "outcome"])

    def over() -> bool:
        """What is removed may need a moment more than a pass; later ones follow it."""
        return shell.apply() == 0 and shell.is_done(action) and not shell.open_steps()

    plane.until(over, "a plain apply ended it", 60)
    intents, outcomes = shell.lines("intent"), shell.lines("outcome")
    assert {one["ref"]["name"] for one in intents} == {DUE}
    closing_ones = Counter(one["step"] for one in outcomes if one["result"] != "unknown")
    assert closing_ones == Counter(one["step"] for one in intents)
    results = [one["result"] for one in outcomes if one["result"] != "unknown"]
    assert results == (["still there", "reclaimed"] if point in BEFORE_THE_ACT else ["reclaimed"])
    if action == "remove":
        held = shell.job(HELD)
        assert held is not None
        assert held["metadata"]["generation"] == 1, "it was held, and nothing of it was changed"
