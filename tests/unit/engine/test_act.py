"""One step from evidence to outcome: every way it can end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.act import gpu_hours, take, warn
from gpukeeper.model.decision import Action, Evidence, NothingToCapture, Result, Step
from gpukeeper.model.event import Captured, Closed, Intended, Paused, WarningSent
from gpukeeper.model.policy import AfterIdle, AtFinish, ClassSettings, Mode
from gpukeeper.model.subject import Outcome, Shape, State, Stopped, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import BEGIN, CALM, Faults
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, Unwritable, virtual
from tests.unit.engine.test_loop import serve


class Hasty(SimulatedPlatform):
    """Something happens between our last look and the act, or just after it."""

    before: Any = staticmethod(lambda: None)
    after: Any = staticmethod(lambda: None)

    async def act(self, step: Any, fresh: Any) -> Any:
        self.before()
        answer = await super().act(step, fresh)
        self.after()
        return answer


async def taken(b: Harness, step: Step) -> Closed:
    return await take(b.keeper, b.platform, step, b.book, 1)


@virtual
async def test_what_is_due_is_captured_then_intended_then_seen_to_be_gone(b: Harness) -> None:
    thing = b.ended("eval")
    line = await taken(b, await b.step(thing, Action.REMOVE))
    assert b.order() == ["Captured", "Intended", "Closed"]
    assert line.result is Result.RECLAIMED
    assert line.reason == "succeeded 2h ago, kept for 1h; verified: gone"
    assert (line.gpus_back, line.bytes_back, line.owner) == (0, 500, "ann")
    assert b.evidence.saved.keys() == {b.lines(Captured)[0].evidence}
    assert b.world.find(thing.ref) is None


@virtual
async def test_what_a_stop_removes_is_captured_whole(b: Harness) -> None:
    """Some workloads vanish when they stop."""
    asked: list[tuple[str, ...]] = []

    class Vanishing(SimulatedPlatform):
        async def read(self, ref: Any) -> Any:
            found = await super().read(ref)
            return msgspec.structs.replace(found, goes_when_stopped=True) if isinstance(found, Subject) else found

        async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
            asked.append(tuple(what))
            return await super().capture(subject, what)

    b.platform = Vanishing(b.world, HERE)
    await taken(b, await b.step(await b.overdue("train"), Action.STOP))
    assert asked == [b.book.policy.capture.what]


@virtual
async def test_a_warning_shows_what_would_be_lost_and_reaches_people_inside(b: Harness) -> None:
    heard: list[str] = []

    class Inside(SimulatedPlatform):
        async def read(self, ref: Any) -> Any:
            found = await super().read(ref)
            return msgspec.structs.replace(found, loses=("2 GiB written inside it",))

        async def notify(self, subject: Subject, message: str) -> bool:
            heard.append(message)
            return True

    b.platform = Inside(b.world, HERE)
    b.world.faults = Faults(undelivered=1.0)
    thing = b.running("train", 3 * HOUR)
    line = await warn(b.keeper, b.platform, await b.step(thing, Action.WARN), b.book)
    assert line is not None
    assert line.delivered
    assert heard == [line.message]
    assert line.message.endswith("Lost when it is removed: 2 GiB written inside it")


@virtual
async def test_a_stop_gives_its_gpus_back_and_shows_what_they_cost(b: Harness) -> None:
    thing = await b.overdue("train")
    line = await taken(b, await b.step(thing, Action.STOP))
    assert (line.result, line.gpus_back, line.bytes_back) == (Result.RECLAIMED, 1, 0)
    assert line.gpu_hours == 1.0, "one GPU, one hour beyond the limit"
    assert thing.state is State.ENDED
    memory = (await b.ledger.memories([thing.ref.key]))[thing.ref.key]
    assert memory.stopped == Stopped("gpukeeper", "max_runtime", b.now(), "run-1")


@virtual
async def test_a_stop_captures_enough_to_bring_it_back_as_it_was(b: Harness) -> None:
    asked: list[tuple[str, ...]] = []

    class Listening(SimulatedPlatform):
        async def capture(self, subject: Subject, what: Sequence[str]) -> Evidence | NothingToCapture | Unknown:
            asked.append(tuple(what))
            return await super().capture(subject, what)

    b.platform = Listening(b.world, HERE)
    await taken(b, await b.step(await b.overdue("train"), Action.STOP))
    assert asked == [("manifest",)]
    assert [line.evidence for line in b.lines(Captured)] != [""]


@virtual
async def test_children_are_trimmed_and_the_root_stays(b: Harness) -> None:
    thing = b.ended("run", ago=30 * MINUTE, children=2, devices=("GPU-0", "GPU-1"))
    line = await taken(b, await b.step(thing, Action.TRIM))
    assert (line.result, line.gpus_back) == (Result.RECLAIMED, 2)
    assert b.world.find(thing.ref) is thing


@virtual
async def test_gone_already_is_no_success_of_ours(b: Harness) -> None:
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.world.remove(thing)
    line = await taken(b, step)
    assert (line.result, line.reason) == (
        Result.CHANGED,
        "it is already gone; it was removed by another person or program",
    )
    assert b.lines(Intended) == []


@virtual
async def test_what_cannot_be_read_is_left_alone(b: Harness) -> None:
    thing = await b.overdue("train")
    step = await b.step(thing, Action.STOP)
    b.world.faults = Faults(blind=1)
    line = await taken(b, step)
    assert line.result is Result.CHANGED
    assert "could not be read" in line.reason
    assert thing.state is State.RUNNING


@virtual
async def test_evidence_that_cannot_be_captured_keeps(b: Harness) -> None:
    """C5.4: capture failed = kept."""
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.world.faults = Faults(uncaptured=1)
    line = await taken(b, step)
    assert (line.result, b.order()) == (Result.NOT_CAPTURED, ["Closed"])
    assert b.world.find(thing.ref) is thing


@virtual
async def test_evidence_that_cannot_be_saved_keeps(b: Harness) -> None:
    b.evidence = Unwritable()
    thing = b.ended("eval")
    line = await taken(b, await b.step(thing, Action.REMOVE))
    assert line.result is Result.NOT_CAPTURED
    assert "no space left" in line.reason
    assert b.world.find(thing.ref) is thing


@virtual
async def test_what_has_no_evidence_is_recorded_as_such(b: Harness) -> None:
    thing = b.running("4711", shape=Shape.ORPHAN, proof="its cgroup", devices=("GPU-1",))
    line = await taken(b, await b.step(thing, Action.REMOVE))
    assert (line.result, line.gpus_back) == (Result.RECLAIMED, 1)
    captured = b.lines(Captured)[0]
    assert (captured.evidence, captured.note) == ("", "nothing to capture: it has no log and no manifest")


@virtual
async def test_a_thing_that_was_restarted_since_the_plan_is_left_alone(b: Harness) -> None:
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    thing.start(b.now(), HOUR)
    line = await taken(b, step)
    assert (line.result, line.reason) == (
        Result.CHANGED,
        "changed since the plan was made: it was restarted since the plan was made",
    )


@virtual
async def test_a_restart_at_the_last_moment_wins(b: Harness) -> None:
    """C9.3: unforced removal: a user's restart wins."""
    b.platform = Hasty(b.world, HERE)
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.platform.before = lambda: thing.start(b.now(), HOUR)
    line = await taken(b, step)
    assert line.result is Result.CHANGED
    assert "at the last moment" in line.reason
    assert thing.state is State.RUNNING


@virtual
async def test_a_refusal_is_an_outcome(b: Harness) -> None:
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.world.faults = Faults(refused=1)
    line = await taken(b, step)
    assert (line.result, line.reason) == (Result.REFUSED, "the platform refused")


@virtual
async def test_an_accepted_command_that_did_nothing_is_still_there(b: Harness) -> None:
    """The outcome comes from a second look, never from the command's answer."""
    thing = await b.overdue("train")
    step = await b.step(thing, Action.STOP)
    b.world.faults = Faults(lost=1)
    began = b.now()
    line = await taken(b, step)
    assert (line.result, line.gpus_back, line.gpu_hours) == (Result.STILL_THERE, 0, 0.0)
    assert b.now() - began == timedelta(seconds=0.2 + 1 + 5 + 30 + 60), "looked until its grace was over"


@virtual
async def test_a_lost_answer_is_looked_up(b: Harness) -> None:
    b.world.rng.seed(7)
    b.platform = Hasty(b.world, HERE)
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.world.faults = Faults(garbled=1)
    line = await taken(b, step)
    done = b.world.find(thing.ref) is None
    assert line.result is (Result.RECLAIMED if done else Result.STILL_THERE)
    assert line.bytes_back == (Unknown("the response to the command was lost") if done else 0)


@virtual
async def test_an_outcome_nobody_could_see_stays_open(b: Harness) -> None:
    b.platform = Hasty(b.world, HERE)
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    b.platform.after = lambda: setattr(b.world, "faults", Faults(blind=1))
    line = await taken(b, step)
    assert line.result is Result.UNKNOWN
    assert [one.step for one in await b.ledger.open_intents("docker", "node-3")] == ["1.1"]
    assert (await b.ledger.memories([thing.ref.key])) == {}


@virtual
async def test_a_pause_while_evidence_is_taken_defers_the_step(b: Harness) -> None:
    """It may take minutes, and an admin who paused everything meanwhile relies on it."""
    thing = b.ended("eval")
    step = await b.step(thing, Action.REMOVE)
    save = b.evidence.save

    async def paused_meanwhile(*given: Any) -> Any:
        await b.ledger.append([Paused(at=b.now(), by="root", reason="maintenance")])
        return await save(*given)

    b.evidence.save = paused_meanwhile  # type: ignore[method-assign]
    line = await taken(b, step)
    assert line.result is Result.DEFERRED
    assert "maintenance, by root" in line.reason
    assert b.world.find(thing.ref) is thing
    assert b.lines(Intended) == []


@virtual
async def test_a_clock_that_jumps_before_the_act_stops_the_step(b: Harness) -> None:
    thing = await b.overdue("train")
    step = await b.step(thing, Action.STOP)
    assert b.keeper.clock_watch.doubt(b.clock.now()) is None
    b.clock.skew = 5 * HOUR
    line = await taken(b, step)
    assert line.result is Result.CHANGED
    assert "The clock jumped" in line.reason
    assert thing.state is State.RUNNING


@virtual
async def test_the_budget_of_the_hour_is_checked_again_just_before_the_intent(b: Harness) -> None:
    """Two places share the hour: what the other one did since the plan was made counts."""
    other, thing = await b.overdue("other"), await b.overdue("train")
    step = await b.step(thing, Action.STOP)
    await taken(b, await b.step(other, Action.STOP))
    line = await take(b.keeper, b.platform, step, b.book, 1, hourly=1)
    assert line.result is Result.DEFERRED
    assert thing.state is State.RUNNING
    assert len(b.lines(Intended)) == 1
    assert (await take(b.keeper, b.platform, step, b.book, 1, hourly=2)).result is Result.RECLAIMED


@virtual
async def test_a_removed_node_has_nothing_to_capture(b: Harness) -> None:
    class Emptied(SimulatedPlatform):
        async def capture(self, subject: Any, what: Any) -> Any:
            return NothingToCapture("its node is gone")

    b.platform = Emptied(b.world, HERE)
    line = await taken(b, await b.step(b.ended("eval"), Action.REMOVE))
    assert line.result is Result.RECLAIMED
    assert b.lines(Captured)[0].note == "nothing to capture: its node is gone"


@virtual
async def test_a_warning_that_was_delivered_is_recorded_as_such(b: Harness) -> None:
    thing = b.running("train", 100 * MINUTE)
    line = await warn(b.keeper, b.platform, await b.step(thing, Action.WARN), b.book)
    assert line is not None
    assert b.lines(WarningSent) == [line]
    assert (line.delivered, line.stage, line.rule, line.limit) == (True, 1, "max_runtime", 2 * HOUR)
    assert line.message.startswith(
        "docker/node-3/train: ran for 1h40m, allowed 2h; will be stopped at 2026-03-02 08:20 UTC (in 20m)"
    )
    assert b.terminal.told == [("ann", line.message)]


@pytest.mark.parametrize("after", AfterIdle)
def test_a_warning_about_idle_work_says_what_survives_its_removal(after: AfterIdle) -> None:
    @virtual
    async def story(b: Harness) -> None:
        b.set_policy(classes={"docker": ClassSettings(idle=30 * MINUTE, after_idle=after)})
        b.running("notebook", HOUR)
        await serve(b, 26 * MINUTE)
        (line,) = b.lines(WarningSent)
        later = "" if after is AfterIdle.REMOVE else " 1h later"
        assert f", then deleted{later}. " in line.message
        assert "Mounted volumes stay; what was written inside it is deleted with it" in line.message

    story()


@virtual
async def test_a_warning_that_an_admin_sends_in_mode_plan_says_that_nothing_follows_by_itself(b: Harness) -> None:
    b.set_policy(mode=Mode.PLAN)
    thing = b.running("train", 100 * MINUTE)
    line = await warn(b.keeper, b.platform, await b.step(thing, Action.WARN), b.book)
    assert line is not None
    assert "; would be stopped at 2026-03-02 08:20 UTC (in 20m)." in line.message
    assert line.message.endswith("this happens only if an admin applies the policy after that time")


@virtual
async def test_a_warning_that_reached_nobody_is_recorded_as_such(b: Harness) -> None:
    """C14.1: record delivered or not."""
    thing = b.running("train", 100 * MINUTE)
    step = await b.step(thing, Action.WARN)
    b.world.faults = Faults(undelivered=1)
    line = await warn(b.keeper, b.platform, step, b.book)
    assert line is not None
    assert not line.delivered


@virtual
async def test_nobody_is_warned_about_what_is_over(b: Harness) -> None:
    thing = b.running("train", 100 * MINUTE)
    step = await b.step(thing, Action.WARN)
    thing.end(b.now(), Outcome.SUCCEEDED)
    assert await warn(b.keeper, b.platform, step, b.book) is None
    b.world.remove(thing)
    assert await warn(b.keeper, b.platform, step, b.book) is None
    assert b.terminal.told == []


@virtual
async def test_without_a_meter_nothing_is_measured_before_the_act(b: Harness) -> None:
    b.meter = None  # type: ignore[assignment]
    line = await taken(b, await b.step(await b.overdue("train"), Action.STOP))
    assert line.result is Result.RECLAIMED
    assert b.world.samples == {}
    assert b.world.faults is CALM


def test_gpu_hours_are_unknown_when_the_gpus_are() -> None:
    lost, when = Unknown("which GPUs is not known"), BEGIN
    assert gpu_hours(lost, None, when) is lost
    assert gpu_hours(2, None, when) == 0.0
    assert gpu_hours(0, when, when) == 0.0
    assert gpu_hours(2, when - 3 * HOUR, when) == 6.0
    assert gpu_hours(2, when + HOUR, when) == 0.0


@virtual
async def test_only_what_is_over_is_removed_in_bulk(b: Harness) -> None:
    """Not a stop, and not a removal that ends children: each of those is looked at alone."""
    b.set_policy(at_finish=AtFinish.NONE)
    b.ended("over", 3 * HOUR)
    await b.overdue("runs")
    parent = b.ended("with children", 3 * HOUR, children=2)
    lead = b.policy.warnings.lead
    await b.ledger.append([msgspec.structs.replace(b.warned(parent, 1), rule="retention", limit=lead, removes=True)])
    names = {name: made.action for name, made in (await b.decide()).items()}
    assert names == {"over": Action.REMOVE, "runs": Action.STOP, "with children": Action.REMOVE}
    assert await b.pass_in_bulk() == ["over"]
