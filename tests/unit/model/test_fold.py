"""State from journal: the same lines give the same memory."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.model.decision import Action, Result, Verdict
from gpukeeper.model.event import (
    BaselineSeen,
    Closed,
    Decided,
    Event,
    GpuChecked,
    Held,
    Noticed,
    Quarantined,
    Released,
    ResetTried,
    Returned,
    Vanished,
    WarningSent,
)
from gpukeeper.model.fold import WARNINGS_KEPT, closes, decision_words, is_gone, recalled, remember
from gpukeeper.model.gpu import CheckResult, GpuMemory
from gpukeeper.model.subject import EMPTY, Hold, Memory, Outcome, Ref, State, Stopped
from tests.unit.lifecycle.examples import DAY, EVAL, HOUR, MINUTE, NOW, subject


def at(minutes: float) -> datetime:
    return NOW + minutes * MINUTE


def noticed(minute: float, state: State, run: int = 1, **more: Any) -> Noticed:
    return Noticed(at=at(minute), ref=EVAL, incarnation=f"run-{run}", state=state, **more)


def started(minute: float, run: int = 1, **more: Any) -> Noticed:
    return noticed(minute, State.RUNNING, run, started=at(minute), **more)


def over(minute: float, outcome: Outcome = Outcome.SUCCEEDED, run: int = 1, **more: Any) -> Noticed:
    return noticed(minute, State.ENDED, run, ended=at(minute), outcome=outcome, **more)


def closed(action: Action = Action.STOP, result: Result = Result.RECLAIMED, minute: float = 0, run: int = 1) -> Closed:
    return Closed(
        at=at(minute),
        ref=EVAL,
        step="1.1",
        action=action,
        rule="idle",
        result=result,
        reason="",
        incarnation=f"run-{run}",
    )


def warning(minute: float, stage: int = 1) -> WarningSent:
    return WarningSent(
        at=at(minute),
        ref=EVAL,
        rule="idle",
        stage=stage,
        incarnation="run-1",
        limit=HOUR,
        delivered=True,
        channel="terminal",
        message="",
    )


def test_attempts_to_reach_an_owner_do_not_displace_warnings_of_other_rules() -> None:
    other = msgspec.structs.replace(warning(0), rule="max_runtime")
    attempts = [msgspec.structs.replace(warning(60 * n, 2), delivered=False) for n in range(1, 30)]
    found = fold(other, warning(1), *attempts).warnings
    assert [(one.rule, one.stage) for one in found] == [("max_runtime", 1), ("idle", 1), ("idle", 2)]
    assert found[-1].at == attempts[-1].at


def fold(*lines: Event) -> Memory:
    memory = EMPTY
    for line in lines:
        memory = remember(memory, line) or EMPTY
    return memory


def test_runtime_adds_up_over_restarts() -> None:
    """C9.1: a restart reset the clock."""
    memory = fold(started(0), over(60), started(90, run=2), over(120, run=2), started(200, run=3))
    assert memory.ran == 90 * MINUTE
    assert memory.first_start == at(0)
    assert memory.started == at(200)


def test_a_restart_between_two_reads_adds_the_run_before() -> None:
    memory = fold(started(0), started(70, run=2, previous_end=at(60)))
    assert memory.ran == HOUR


def test_an_end_nobody_saw_adds_nothing() -> None:
    """Less runtime keeps longer."""
    assert fold(started(0), started(70, run=2)).ran == timedelta()
    assert fold(started(0), noticed(9, State.ENDED)).ran == timedelta()
    assert fold(started(60), over(50)).ran == timedelta()


def test_a_run_that_was_seen_only_when_it_had_ended_counts() -> None:
    memory = fold(over(60, started=at(0)))
    assert memory.ran == HOUR
    assert memory.first_start == at(0)


def test_a_run_is_not_added_twice() -> None:
    memory = fold(started(0), over(60), noticed(61, State.REMOVING), over(62))
    assert memory.ran == HOUR


def test_the_first_start_is_when_we_saw_it_if_nobody_says() -> None:
    assert fold(noticed(5, State.RUNNING)).first_start == at(5)


def test_created_is_remembered_without_a_start() -> None:
    memory = fold(noticed(0, State.CREATED, run=0))
    assert (memory.state, memory.first_start, memory.incarnation) == ("created", None, "run-0")


def test_pausing_is_part_of_the_same_run() -> None:
    memory = fold(started(0), noticed(10, State.PAUSED, started=at(0)), noticed(20, State.RUNNING, started=at(0)))
    assert (memory.ran, memory.started) == (timedelta(), at(0))


def test_a_stop_without_our_intent_was_a_persons() -> None:
    """C9.4: the ledger knows who stopped it."""
    memory = fold(started(0), over(30, Outcome.STOPPED))
    assert memory.stopped == Stopped("somebody", "", at(30), "run-1")


def test_our_stop_is_ours() -> None:
    memory = fold(started(0), closed(minute=31), over(30, Outcome.STOPPED))
    assert memory.stopped == Stopped("gpukeeper", "idle", at(31), "run-1")


def test_our_stop_of_an_earlier_run_says_nothing_about_this_one() -> None:
    memory = fold(started(0), closed(minute=31), over(30, Outcome.STOPPED), started(40, run=2))
    assert memory.stopped is None
    memory = fold(started(0), closed(minute=31), over(60, Outcome.STOPPED, run=2))
    assert memory.stopped == Stopped("somebody", "", at(60), "run-2")


def test_who_ended_by_itself_was_stopped_by_nobody() -> None:
    assert fold(started(0), over(30)).stopped is None


@pytest.mark.parametrize("result", [r for r in Result if r is not Result.RECLAIMED])
def test_a_stop_that_did_not_happen_is_not_remembered(result: Result) -> None:
    assert fold(started(0), closed(result=result)).stopped is None


def test_loops_are_counted() -> None:
    memory = fold(started(0), over(5, Outcome.FAILED), started(6), over(10, Outcome.FAILED), started(11))
    assert memory.ends_seen == 2
    assert memory.first_seen_ended is None


def test_the_first_read_of_an_end_is_kept() -> None:
    memory = fold(started(0), over(30), noticed(40, State.REMOVING), over(50))
    assert memory.first_seen_ended == at(30)


def test_the_end_of_a_later_run_is_seen_again() -> None:
    """It ran again between two looks. Counting from the earlier end would remove it too soon."""
    memory = fold(started(0), noticed(30, State.ENDED), noticed(600, State.ENDED, run=2))
    assert memory.first_seen_ended == at(600)


def test_holds_are_remembered_and_ended_by_a_release() -> None:
    old, valid = Hold("ann", at(-90), at(-60)), Hold("ann", at(0), at(60))
    lines = [Held(at=at(0), ref=EVAL, hold=one) for one in (old, valid)]
    memory = fold(*lines, Released(at=at(10), ref=EVAL, by="ann"))
    assert memory.holds == (old, Hold("ann", at(0), at(10)))


def test_a_users_release_does_not_end_an_admins_hold() -> None:
    """An admin's hold is an admin's to end; the owner's release is about the owner's own."""
    admins = Hold("root", at(0), NOW + DAY, admin=True, suspends=("*",))
    memory = fold(Held(at=at(0), ref=EVAL, by="root", hold=admins), Released(at=at(10), ref=EVAL, by="ann"))
    assert memory.holds == (admins,)


def test_only_the_newest_warnings_are_kept() -> None:
    memory = fold(*(warning(n) for n in range(WARNINGS_KEPT + 3)))
    assert len(memory.warnings) == WARNINGS_KEPT
    assert memory.warnings[-1].at == at(WARNINGS_KEPT + 2)


def test_what_was_removed_is_forgotten() -> None:
    assert remember(fold(started(0)), closed(Action.REMOVE)) is None
    assert remember(fold(started(0)), closed(Action.REMOVE, Result.STILL_THERE)) is not None


def test_what_vanished_is_remembered() -> None:
    """A platform that lost its list for a moment must not cost anybody a hold."""
    held = Held(at=at(0), ref=EVAL, hold=Hold("ann", at(0), at(60)))
    assert fold(held, Vanished(at=at(1), ref=EVAL)) == fold(held)


def test_which_lines_mean_that_it_is_gone() -> None:
    assert is_gone(Vanished(at=NOW, ref=EVAL))
    assert is_gone(closed(Action.REMOVE))
    assert not is_gone(closed(Action.STOP))
    assert not is_gone(closed(Action.REMOVE, Result.STILL_THERE))
    assert not is_gone(warning(0))


def test_what_could_not_be_verified_stays_open() -> None:
    assert [result for result in Result if not closes(closed(result=result))] == [Result.UNKNOWN]


def test_a_decision_is_remembered_in_three_words() -> None:
    line = Decided(at=NOW, ref=EVAL, action=Action.KEEP, rule="idle", verdict=Verdict.WAIT, reason="")
    assert decision_words(line) == "keep idle wait"


GPU = Ref("host", "node-3", "gpu", "GPU-1", "GPU-1")


def test_a_gpu_is_remembered_by_its_baseline_its_last_check_and_its_quarantine() -> None:
    later = NOW + timedelta(hours=1)
    memory = fold(
        BaselineSeen(at=NOW, ref=GPU, memory_used_mib=615),
        GpuChecked(at=NOW, ref=GPU, result=CheckResult.DIRTY, reason="5000 MiB are in use by nobody"),
        ResetTried(at=NOW, ref=GPU, reason="dirty"),
        Quarantined(at=NOW, ref=GPU, reason="dirty"),
        Quarantined(at=later, ref=GPU, by="root", reason="still dirty"),
    )
    assert memory.gpu is not None
    assert (memory.gpu.baseline_mib, memory.gpu.result, memory.gpu.checked) == (615, CheckResult.DIRTY, NOW)
    assert (memory.gpu.quarantined, memory.gpu.quarantine_reason, memory.gpu.quarantined_by) == (
        NOW,
        "dirty",
        "gpukeeper",
    )
    assert memory.gpu.last_reset == NOW


def test_a_return_ends_the_quarantine_and_the_baseline_is_learned_again() -> None:
    memory = fold(
        BaselineSeen(at=NOW, ref=GPU, memory_used_mib=615),
        ResetTried(at=NOW, ref=GPU, reason="dirty"),
        Quarantined(at=NOW, ref=GPU, reason="dirty"),
        Returned(at=NOW, ref=GPU, by="root"),
    )
    assert memory.gpu == GpuMemory(last_reset=NOW)


# What the platform forgot


def test_the_class_of_a_run_is_remembered_to_its_end_and_not_beyond() -> None:
    assert fold(started(0, class_="docker"), over(60)).class_ == "docker"
    assert fold(started(0, class_="docker"), started(10), over(60)).class_ == "docker"
    assert fold(started(0, class_="docker"), over(60), started(90, run=2), over(99, run=2)).class_ == ""


@pytest.mark.parametrize(
    ("facts", "run", "expected"),
    [
        ({}, 1, ("docker", Outcome.STOPPED)),
        ({"outcome": Outcome.SUCCEEDED}, 1, ("docker", Outcome.STOPPED)),
        ({}, 2, ("without-gpu", Outcome.FAILED)),
        ({"state": State.RUNNING, "outcome": None}, 1, ("without-gpu", None)),
        ({"class_": "api"}, 1, ("api", Outcome.STOPPED)),
    ],
)
def test_ended_work_is_what_the_ledger_knows_of_that_very_run(
    facts: dict[str, Any], run: int, expected: tuple[str, Outcome | None]
) -> None:
    memory = fold(started(0, class_="docker"), closed(minute=50), over(60, Outcome.STOPPED))
    known = {"state": State.ENDED, "class_": "without-gpu", "outcome": Outcome.FAILED, "incarnation": f"run-{run}"}
    found = recalled(subject(**(known | facts)), memory)
    assert (found.class_, found.outcome) == expected


def test_what_nobody_stopped_keeps_its_outcome() -> None:
    memory = fold(started(0, class_="docker"), over(60, Outcome.FAILED))
    assert recalled(subject(state=State.ENDED, outcome=Outcome.FAILED), memory).outcome is Outcome.FAILED
