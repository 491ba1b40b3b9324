"""The ledger and the register after marks and quarantines on a real API server, with the rights of the example."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukeeper.model.gpu import Grade
from tests import forked
from tests.real.kube.api import Api
from tests.real.kube.test_marks import (  # noqa: F401 fixtures
    BEFORE,
    PROGRAM,
    command,
    environ,
    mark,
    nodes,
    taints,
    user,
    write,
)


def test_a_machine_is_known_by_its_system_uuid_in_history_and_register(
    api: Api,
    nodes: list[str],  # noqa: F811
    environ: dict[str, str],  # noqa: F811
    command: Callable[..., Any],  # noqa: F811
    mark: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    bad, machine = nodes[1], f"uuid-of-{nodes[1]}"
    api.patch("nodes", None, bad, {"status": {"nodeInfo": {"systemUUID": machine}}}, subresource="status")
    code, document = command("node", "quarantine", bad, "--reason", "fans are loud", "--apply")
    assert (code, document["problems"]) == (0, []), document
    code, document = command("node", "return", bad, "--reason", "new fans", "--apply")
    assert code == 0, document
    write(tmp_path, "r1", dict.fromkeys(nodes, Grade.PASS) | {bad: Grade.FAIL}, BEFORE)
    code, document = mark("r1", "--apply")
    assert (code, len(taints(api, bad))) == (0, 1), document

    def read(*words: str) -> dict[str, Any]:
        code, printed, messages = forked.run("gpukeeper", [*words, "--json"], environ)
        assert code == 0, messages
        found: dict[str, Any] = json.loads(printed)
        return found

    history = read("ledger", "list", "--workload", bad)["lines"]
    assert [(one["action"], one["result"]) for one in history] == [
        (action, result) for action in ("quarantine", "return", "taint") for result in ("begun", "done")
    ]
    assert [one["reason"] for one in history[:4]] == ["fans are loud"] * 2 + ["new fans"] * 2
    found = {one["name"]: one for one in read("node", "register")["entries"]}
    entry = found.pop(machine)
    assert (entry["kind"], entry["taken_out"], entry["returned"], entry["failed"]) == ("machine", 2, 1, 1)
    assert [one["what"] for one in entry["events"]] == ["taken out", "returned", "failed", "taken out"]
    (gpu,) = found.values()
    assert (gpu["kind"], gpu["nodes"], gpu["taken_out"], gpu["failed"]) == ("gpu", [bad], 1, 1)
