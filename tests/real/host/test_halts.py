"""gpukeeper is killed at each point of a tree's removal, by name and not by chance; a plain `apply` goes on."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.engines import require
from tests.halt import ACTED, BEFORE_THE_ACT, BEFORE_THE_INTENT, BEFORE_THE_OUTCOME, CLOSED, POINTS, SAVED
from tests.real.host.machine import Host, sees_everybody
from tests.real.host.test_apply import REPORTS, TREES
from tests.smoke import smoke

# Of a temporary tree there is nothing to save.
STEPS = [("tree", point) for point in POINTS if point != SAVED] + [("report", point) for point in POINTS]


@pytest.mark.parametrize(("kind", "point"), smoke(STEPS, ("tree", ACTED).__eq__))
def test_killed_at_a_point_of_a_removal_nothing_wrong_goes_and_nothing_twice(
    tmp_path: Path, kind: str, point: str
) -> None:
    require("root", sees_everybody())
    host = Host(tmp_path, TREES if kind == "tree" else REPORTS)
    due = [host.tree(name) for name in ("tmp-1", "tmp-2", "tmp-3")]
    kept = host.tree("zzz-kept")  # by its name, or as the newest report
    whole = _contents(kept)

    killed = host.apply(halt=(point, str(due[1])))
    assert killed.code == -signal.SIGKILL, killed
    acted = point in (*BEFORE_THE_OUTCOME, CLOSED)
    assert due[1].exists() is not acted
    written = [one["type"] for one in host.lines("intent", "outcome") if one["ref"]["name"] == str(due[1])]
    open_step = point in BEFORE_THE_ACT + BEFORE_THE_OUTCOME
    assert written == ([] if point in BEFORE_THE_INTENT else ["intent"] if open_step else ["intent", "outcome"])

    ran = host.apply()
    assert ran.code == 0, ran.err
    (place,) = ran.json()["places"]
    assert [one["ref"]["name"] for one in place["settled"]] == ([str(due[1])] if open_step else [])
    assert all(one["result"] == ("reclaimed" if acted else "still there") for one in place["settled"])
    assert host.names() == ["zzz-kept"]
    assert _contents(kept) == whole
    _check_ledger(host, due)


def _check_ledger(host: Host, due: list[Path]) -> None:
    """Of each tree one removal; of each intent one outcome."""
    intents, outcomes = host.lines("intent"), host.lines("outcome")
    assert Counter(one["step"] for one in intents) == Counter(one["step"] for one in outcomes)
    reclaimed = [one["ref"]["name"] for one in outcomes if one["result"] == "reclaimed"]
    assert sorted(reclaimed) == sorted(map(str, due))
    assert host.apply().json()["places"][0]["outcomes"] == []


def _contents(path: Path) -> dict[Path, bytes]:
    return {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}
