"""kill -9 at each point of a step: the next run looks first, does nothing twice, and the ledger stays true."""

from __future__ import annotations

import signal

import pytest

from tests.cli.fleet import Fleet
from tests.halt import ACTED, BEFORE_THE_INTENT, BEFORE_THE_OUTCOME, CLOSED, POINTS, SIGNAL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_the_middle_of_apply(fleet: Fleet, point: str) -> None:
    for n in range(4):
        fleet.ended(f"old-{n}", days=10 - n)
    killed = fleet.run_halting(point, "old-1", "apply", "--yes")
    assert killed.code == -signal.SIGKILL, killed
    intents, outcomes = fleet.lines("intent"), fleet.lines("outcome")
    steps, closed = [line["step"] for line in intents], [line["step"] for line in outcomes]
    assert len(intents) == (1 if point in BEFORE_THE_INTENT else 2)
    assert closed == (steps if point in (*BEFORE_THE_INTENT, CLOSED) else steps[:1])

    again = fleet.run("apply", "--yes", "--json")
    assert again.code == 0, again.err
    assert fleet.names() == set()
    settled = again.json()["places"][0]["settled"]
    assert [line["step"] for line in settled] == [step for step in steps if step not in closed]
    found = "reclaimed" if point in BEFORE_THE_OUTCOME else "still there"
    assert all(line["result"] == found and "in a later pass" in line["reason"] for line in settled)
    _nothing_twice_and_every_removal_recorded(fleet)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_ended_by_a_signal_it_ends_its_step_and_shows_what_was_done(fleet: Fleet, name: str) -> None:
    for n in range(4):
        fleet.ended(f"old-{n}", days=10 - n)
    ended = fleet.run_halting(ACTED, "old-1", "apply", "--yes", **{SIGNAL: name})
    assert ended.code == 130, ended
    assert fleet.names() == {"old-2", "old-3"}
    told = [line.split()[:2] for line in ended.out.splitlines() if line.startswith("reclaimed")]
    assert told == [["reclaimed", f"docker/node-1/old-{n}"] for n in range(2)]
    assert "Stopping after the steps in progress" in ended.err
    assert "2 of 4 due reclaimed" in ended.err
    assert "Ended by a signal before all steps were done" in ended.err
    assert "gpukeeper resume" not in ended.err
    assert len(fleet.lines("intent")) == len(fleet.lines("outcome")) == 2
    as_json = fleet.run_halting(ACTED, "old-2", "apply", "--yes", "--json", **{SIGNAL: name})
    assert as_json.code == 130
    assert [line["ref"]["name"] for line in as_json.json()["places"][0]["outcomes"]] == ["old-2"]


def test_killed_again_and_again_it_still_ends_well(fleet: Fleet) -> None:
    names = [f"old-{n}" for n in range(6)]
    for n, name in enumerate(names):
        fleet.ended(name, days=20 - n)
    for name in names:
        assert fleet.run_halting(ACTED, name, "apply", "--yes").code == -signal.SIGKILL
    fleet.run("apply", "--yes")
    assert fleet.names() == set()
    _nothing_twice_and_every_removal_recorded(fleet)


def _nothing_twice_and_every_removal_recorded(fleet: Fleet) -> None:
    intents, outcomes = fleet.lines("intent"), fleet.lines("outcome")
    assert len({line["step"] for line in intents}) == len(intents)
    assert {line["step"] for line in outcomes} == {line["step"] for line in intents}
    reclaimed = [line["ref"]["name"] for line in outcomes if line["result"] == "reclaimed"]
    assert len(reclaimed) == len(set(reclaimed))
    assert all(line["reason"] for line in outcomes)
