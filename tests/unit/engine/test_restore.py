"""What comes back after a restore, who may request it, and what they read when it is refused."""

from __future__ import annotations

import pytest

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.restore import restore
from gpukeeper.model.decision import Action, Evidence, Refused
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Captured, Closed, Restored
from gpukeeper.model.subject import State
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_requests import ask


@virtual
async def test_what_was_stopped_is_started_again(b: Harness) -> None:
    thing = b.running("train")
    await ask(b, "stop", "train")
    assert (await ask(b, "restore", "train")).words.startswith("docker/node-3/train was restored and runs again.")
    assert thing.state is State.RUNNING
    captured = [line.evidence for line in b.lines(Captured)]
    assert captured != [""]  # its description, so that it comes back as it was
    assert [(line.evidence, line.result, line.by) for line in b.lines(Restored)] == [(captured[0], "restored", "ann")]


@virtual
async def test_what_was_removed_comes_back_from_its_evidence(b: Harness) -> None:
    """C9.3: offer `restore`."""
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    assert (await ask(b, "restore", "eval")).done
    again = list(b.world.things["docker", "node-3"].values())
    assert [(thing.ref.name, thing.owner) for thing in again] == [("eval", "ann")]


@virtual
async def test_what_was_never_reclaimed_cannot_be_restored(b: Harness) -> None:
    b.running("train")
    assert "gpukeeper reclaimed nothing named" in (await ask(b, "restore", "train")).words


@virtual
async def test_only_the_owner_or_an_admin_restores(b: Harness) -> None:
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    assert "belongs to ann; bob may not restore it" in (await ask(b, "restore", "eval", who="bob")).words
    assert (await ask(b, "restore", "eval", who="root")).done


@virtual
async def test_a_restore_that_is_not_possible_gives_the_reason(b: Harness) -> None:
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    b.evidence.saved.clear()
    assert "cannot be read (no evidence named" in (await ask(b, "restore", "eval")).words
    b.change_ports(platforms=())
    assert "is not reachable from here" in (await ask(b, "restore", "eval")).words


@virtual
async def test_a_refused_restore_is_recorded_and_reported(b: Harness) -> None:
    class Stubborn(SimulatedPlatform):
        async def restore(self, ref: object, evidence: Evidence | None) -> Refused:  # type: ignore[override]
            return Refused("its image is gone")

    b.platform = Stubborn(b.world, HERE)
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    with pytest.raises(UsageError, match="was not restored: its image is gone"):
        await restore(b.keeper, b.book, "eval", "ann")
    assert b.lines(Restored)[0].result == "its image is gone"


@virtual
async def test_trimmed_children_are_nothing_to_restore(b: Harness) -> None:
    """The root of trimmed children had finished by itself; starting it again would train anew."""
    thing = b.ended("run", ago=30 * MINUTE, children=2)
    await reclaim(b.keeper, b.platform, b.book)
    assert [line.action for line in b.lines(Closed)] == [Action.TRIM]
    assert not (await ask(b, "restore", "run")).done
    assert thing.state is State.ENDED


@virtual
async def test_a_restore_of_an_ambiguous_name_is_refused(b: Harness) -> None:
    """Bob's `eval` was removed after ann's: ann's restore must neither be refused as bob's nor bring back his."""
    b.ended("eval", ago=3 * HOUR)
    b.ended("eval", ago=2 * HOUR, owner="bob")
    await reclaim(b.keeper, b.platform, b.book)
    reply = await ask(b, "restore", "eval", who="root")
    assert not reply.done
    assert "use more of the path, or the uid" in reply.words


@virtual
async def test_a_restore_says_in_what_state_it_comes_back_and_what_comes_next(b: Harness) -> None:
    b.running("eval", MINUTE)
    assert (await ask(b, "stop", "eval")).done
    words = (await ask(b, "restore", "eval")).words
    assert (
        "It is running now. If nothing changes: warn by max_runtime at 2026-03-02 09:30 UTC (in 1h30m), then" in words
    )
