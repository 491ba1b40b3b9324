"""kill -9 in the middle of apply: the next run looks first, does nothing twice, and the ledger stays true."""

from __future__ import annotations

import signal

import pytest

from tests.cli.fleet import Fleet


@pytest.mark.parametrize(
    ("moment", "found"),
    [("before act 2", "still there"), ("after act 2", "reclaimed")],
)
def test_killed_in_the_middle_of_apply(fleet: Fleet, moment: str, found: str) -> None:
    for n in range(4):
        fleet.ended(f"old-{n}", days=10 - n)
    killed = fleet.run("apply", "--yes", GPUKEEPER_FLEET_HALT=moment)
    assert killed.code == -signal.SIGKILL
    intents, outcomes = fleet.lines("intent"), fleet.lines("outcome")
    assert len(intents) == 2
    assert [line["step"] for line in outcomes] == [intents[0]["step"]], "the second intent is open"

    again = fleet.run("apply", "--yes", "--json")
    assert again.code == 0, again.err
    assert fleet.names() == set()
    (settled,) = again.json()["places"][0]["settled"]
    assert settled["step"] == intents[1]["step"]
    assert settled["result"] == found
    assert "at a later look" in settled["reason"]
    _nothing_twice_and_every_removal_recorded(fleet)


def test_killed_again_and_again_it_still_ends_well(fleet: Fleet) -> None:
    for n in range(6):
        fleet.ended(f"old-{n}", days=20 - n)
    while fleet.run("apply", "--yes", GPUKEEPER_FLEET_HALT="after act 1").code == -signal.SIGKILL:
        pass
    assert fleet.names() == set()
    _nothing_twice_and_every_removal_recorded(fleet)


def _nothing_twice_and_every_removal_recorded(fleet: Fleet) -> None:
    intents, outcomes = fleet.lines("intent"), fleet.lines("outcome")
    assert len({line["step"] for line in intents}) == len(intents)
    assert {line["step"] for line in outcomes} == {line["step"] for line in intents}
    reclaimed = [line["ref"]["name"] for line in outcomes if line["result"] == "reclaimed"]
    assert len(reclaimed) == len(set(reclaimed))
    assert all(line["reason"] for line in outcomes)
