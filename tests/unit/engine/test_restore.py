"""What comes back after a restore, who may request it, and what they read when it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import msgspec
import pytest

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.restore import restore
from gpukeeper.model.decision import Accepted, Action, Evidence, Refused, Snapshot
from gpukeeper.model.errors import UsageError
from gpukeeper.model.event import Captured, Closed, Restored, WarningSent
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Gone, Ref, State, Subject
from gpukeeper.model.unknown import Unknown
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
    coming = "if not idle before, will be warned at 2026-03-02 09:30 UTC (in 1h30m), then stopped"
    assert f"It is running now. What comes next: {coming}" in words


async def passes(b: Harness, span: timedelta) -> None:
    for _ in range(span // (5 * MINUTE)):
        await reclaim(b.keeper, b.platform, b.book)
        await asyncio.sleep(300)


@virtual
async def test_what_ran_for_its_maximum_gets_an_hour_by_a_restore_and_is_warned_before_it_is_stopped(
    b: Harness,
) -> None:
    thing = await b.overdue("train")
    await reclaim(b.keeper, b.platform, b.book)
    assert thing.state is State.ENDED
    await passes(b, 5 * MINUTE)
    restored = b.now()
    words = (await ask(b, "restore", "train")).words
    coming = "if not idle before, will be warned at 2026-03-02 09:05 UTC (in 1h)"
    assert f"It is running now. What comes next: {coming}" in words
    assert "A hold does not prevent max_runtime. Ask an admin: root: gpukeeper workload hold" in words
    before = len(b.lines(WarningSent))
    await passes(b, HOUR)
    assert thing.state is State.RUNNING
    await passes(b, 2 * HOUR)
    stop = next(line for line in b.lines(Closed) if line.action is Action.STOP and line.at > restored)
    warned = b.lines(WarningSent)[before:]
    assert [line.stage for line in warned] == [1, 2]
    assert stop.at >= restored + HOUR
    assert stop.at - warned[0].at >= b.policy.warnings.lead


@virtual
async def test_a_second_restore_within_a_day_is_refused_before_it_runs(b: Harness) -> None:
    """Otherwise restoring it again and again would make it immortal. An admin may."""
    thing = await b.overdue("train")
    await reclaim(b.keeper, b.platform, b.book)
    assert (await ask(b, "restore", "train")).done
    await passes(b, 2 * HOUR)
    assert thing.state is State.ENDED
    reply = await ask(b, "restore", "train")
    assert not reply.done
    assert "a restore has granted more within the last day. Ask an admin: root: gpukeeper workload hold" in reply.words
    assert thing.state is State.ENDED
    assert (await ask(b, "restore", "train", who="root")).done
    assert thing.state is State.RUNNING


@virtual
async def test_what_a_restore_grants_is_no_obstacle_to_its_owner(b: Harness) -> None:
    thing = await b.overdue("train")
    await reclaim(b.keeper, b.platform, b.book)
    await ask(b, "restore", "train", who="root")
    assert (await ask(b, "stop", "train")).done
    assert thing.state is State.ENDED


@virtual
async def test_what_was_removed_stays_for_a_day_after_a_restore(b: Harness) -> None:
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    words = (await ask(b, "restore", "eval")).words
    assert "will be deleted at 2026-03-03 08:00 UTC (in 1d)" in words
    await passes(b, 23 * HOUR)
    assert [thing.ref.name for thing in b.world.things["docker", "node-3"].values()] == ["eval"]
    assert (await ask(b, "release", "eval")).done, "its owner does not want to keep it"
    await passes(b, 5 * MINUTE)
    assert not b.world.things["docker", "node-3"]


class Suspending(SimulatedPlatform):
    """A stop suspends, and is noted on the object itself. What was evicted is recreated, and waits."""

    noted = True

    async def restore(self, ref: Ref, evidence: Evidence | None) -> Accepted | Refused | Unknown:
        if evidence is not None:
            return Accepted(resumed=False)
        return Accepted(resumed=True) if self.noted else Refused("it is not recorded that gpukeeper stopped it")

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        async for page in super().observe(scope):
            yield msgspec.structs.replace(page, subjects=tuple(_suspended(one) for one in page.subjects))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found = await super().read(ref)
        return _suspended(found) if isinstance(found, Subject) else found


def _suspended(subject: Subject) -> Subject:
    state = State.SUSPENDED if subject.state is State.ENDED else subject.state
    return msgspec.structs.replace(subject, state=state, suspended_by_stop=True)


@virtual
async def test_an_admin_restores_what_another_instance_stopped_by_the_note_on_it(b: Harness) -> None:
    """Its ledger is elsewhere, with an operator."""
    b.platform = Suspending(b.world, HERE)
    b.ended("train")
    assert "belongs to ann; bob may not restore it" in (await ask(b, "restore", "train", who="bob")).words
    reply = await ask(b, "restore", "train", who="root")
    assert "docker/node-3/train was restored and runs again" in reply.words
    assert [(line.by, line.owner, line.result) for line in b.lines(Restored)] == [("root", "ann", "restored")]


@virtual
async def test_what_somebody_else_suspended_is_not_restored(b: Harness) -> None:
    b.platform = Suspending(b.world, HERE)
    b.platform.noted = False
    b.ended("train")
    reply = await ask(b, "restore", "train", who="root")
    assert not reply.done
    assert "it is not recorded that gpukeeper stopped it" in reply.words


@virtual
async def test_what_was_evicted_and_is_recreated_does_not_run_again(b: Harness) -> None:
    """A pod comes back behind a scheduling gate."""
    b.platform = Suspending(b.world, HERE)
    b.running("train")
    await ask(b, "stop", "train")
    words = (await ask(b, "restore", "train")).words
    assert "run `gpukeeper restore` again" in words
    assert "runs again" not in words
