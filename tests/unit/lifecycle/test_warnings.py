"""Announced times are the times used: never earlier, and later only with a reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Decision, Verdict, View
from gpukeeper.model.policy import AfterIdle, AtFinish, ClassSettings, Demand, Warnings
from gpukeeper.model.subject import Hold, Marks, Memory, Warned
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import BOOK, DAY, HOUR, MINUTE, NOW, POLICY, ended, quiet, subject, warned

LEAD = 10 * MINUTE
BEHIND = Rulebook(msgspec.structs.replace(POLICY, warnings=Warnings(lead=LEAD, undelivered=LEAD)))
COMMAND = "kubectl -n research annotate --overwrite jobs eval gpukeeper.io/hold-until="


def removal(until: timedelta, ago: timedelta = MINUTE, rule: str = "retention", limit: timedelta = LEAD) -> Warned:
    return Warned(rule, 1, NOW - ago, False, "run-1", limit, NOW + until, removes=True)


def with_children(*warnings: Warned, children: int = 2, marks: Marks | None = None, **more: Any) -> View:
    thing = ended(2 * DAY, live_children=children, marks=marks or Marks())
    return View(thing, (), Memory(warnings=warnings), **more)


def decided(view: View, book: Rulebook = BEHIND, after: timedelta = timedelta()) -> Decision:
    return decide(view, book, NOW + after)


def test_what_is_not_delivered_announces_the_longer_time() -> None:
    warned = decided(with_children())
    assert (warned.action, warned.announced) == (Action.WARN, NOW + LEAD)
    assert "will be removed at 2026-03-10 12:10 UTC (in 10m)." in warned.reason
    assert warned.unheard is not None
    assert warned.unheard.at == NOW + 2 * LEAD
    assert "will be removed at 2026-03-10 12:20 UTC (in 20m)." in warned.unheard.words


def test_the_announced_time_is_used_whatever_the_lead_is_by_then() -> None:
    view = with_children(removal(15 * MINUTE))
    for lead in (timedelta(), LEAD, HOUR):
        book = Rulebook(msgspec.structs.replace(POLICY, warnings=Warnings(lead=LEAD, undelivered=lead)))
        assert decided(view, book, 14 * MINUTE).due == NOW + 15 * MINUTE, "reported, and looked at again then"
        assert decided(view, book, 15 * MINUTE).action is Action.REMOVE


def test_nothing_is_removed_earlier_because_its_children_ended_meanwhile() -> None:
    view = with_children(removal(15 * MINUTE), children=0)
    waiting = decided(view)
    assert (waiting.action, waiting.verdict, waiting.due) == (Action.KEEP, Verdict.WAIT, NOW + 15 * MINUTE)
    assert "announced for 2026-03-10 12:15 UTC" in waiting.reason
    assert decided(view, after=15 * MINUTE).action is Action.REMOVE


def test_a_warning_from_the_future_announces_nothing() -> None:
    """It was written under a clock that was ahead, and what it says about a time means nothing."""
    view = with_children(removal(15 * MINUTE, ago=-5 * MINUTE), children=0)
    assert decided(view).action is Action.REMOVE
    assert decided(view, after=5 * MINUTE).due == NOW + 15 * MINUTE


def test_children_are_not_ended_before_the_time_announced_for_them() -> None:
    book = Rulebook(msgspec.structs.replace(BEHIND.policy, at_finish=AtFinish.RUNNING))
    assert decided(with_children(removal(15 * MINUTE)), book).verdict is Verdict.WAIT
    assert decided(with_children(removal(15 * MINUTE)), book, 15 * MINUTE).action is Action.TRIM


def test_where_children_are_ended_first_no_removal_is_announced_for_a_later_time() -> None:
    book = Rulebook(msgspec.structs.replace(BEHIND.policy, at_finish=AtFinish.RUNNING))
    thing = ended(MINUTE, live_children=2, marks=Marks(ttl=timedelta()))
    early = decide(View(thing), book, NOW)
    assert (early.action, early.verdict, early.due) == (Action.KEEP, Verdict.WAIT, NOW + 4 * MINUTE)
    assert decide(View(thing), book, NOW + 4 * MINUTE).action is Action.TRIM


def test_what_another_instance_left_on_the_object_counts_for_one_that_just_began() -> None:
    view = with_children(marks=Marks(warned=(removal(15 * MINUTE),)), watched_since=NOW)
    assert (decided(view).action, decided(view).due) == (Action.KEEP, NOW + 15 * MINUTE)
    assert decided(view, after=15 * MINUTE).action is Action.REMOVE


def test_what_was_left_on_the_object_before_a_hold_does_not_count_after_it() -> None:
    """What it announced did not happen then, and its owner does not expect it now."""
    held = Hold("ann", NOW - 2 * HOUR, NOW - 10 * MINUTE)
    for ago, action in ((5 * MINUTE, Action.KEEP), (20 * MINUTE, Action.WARN)):
        marks = Marks(warned=(removal(15 * MINUTE, ago=ago),))
        thing = ended(2 * DAY, live_children=2, marks=marks)
        assert decided(View(thing, (), Memory(holds=(held,)), watched_since=NOW)).action is action
        assert decided(View(thing, (), Memory(), watched_since=NOW)).action is Action.KEEP


def test_the_object_cannot_move_what_our_own_ledger_announced() -> None:
    forged = removal(HOUR, ago=timedelta())
    view = View(
        subject(
            marks=Marks(warned=(msgspec.structs.replace(forged, rule="max_runtime", limit=DAY),)),
            started=NOW - DAY,
            class_="api",
        ),
        (),
        Memory(warnings=tuple(Warned("max_runtime", stage, NOW - HOUR, True, "run-1", DAY, NOW) for stage in (1, 2))),
    )
    assert decided(view).action is Action.STOP


def test_a_restart_without_a_note_warns_again_and_gives_the_reason() -> None:
    again = decided(with_children(removal(5 * MINUTE), watched_since=NOW))
    assert again.action is Action.WARN
    assert again.announced == NOW + LEAD
    assert "the announcement for 2026-03-10 12:05 UTC is void, because gpukeeper did not run" in again.reason


def test_a_time_that_moved_back_gives_the_reason() -> None:
    sent = tuple(Warned("max_runtime", stage, NOW - HOUR, True, "run-1", DAY, NOW) for stage in (1, 2))
    later = decided(View(subject(started=NOW - 23 * HOUR, class_="api"), (), Memory(warnings=sent)))
    assert later.verdict is Verdict.WAIT
    assert "later than announced (2026-03-10 12:00 UTC): the limit of 1d is not over" in later.reason


def test_the_advice_is_the_command_that_counts_where_it_runs() -> None:
    assert decided(with_children()).reason.endswith("Keep it: gpukeeper workload hold docker/node-3/eval")
    on_the_object = decided(with_children(marks=Marks(hold_with=COMMAND)))
    assert on_the_object.reason.endswith(f"Keep it: {COMMAND}2026-03-11T12:00:00Z")


def test_without_a_recorded_time_the_lead_counts() -> None:
    """Of a ledger that an earlier version wrote."""
    old = Warned("retention", 1, NOW - 9 * MINUTE, True, "run-1", BOOK.policy.warnings.lead)
    book = Rulebook(msgspec.structs.replace(POLICY, warnings=Warnings(lead=old.limit)))
    assert decided(with_children(old), book).due == old.at + old.limit


def test_a_note_on_the_object_cannot_keep_it_longer_than_a_week() -> None:
    """Whoever may change the object can write the annotation."""
    kept = with_children(children=0, marks=Marks(warned=(removal(6 * DAY),)))
    assert (decided(kept).action, decided(kept).due) == (Action.KEEP, NOW + 6 * DAY)
    forged = with_children(children=0, marks=Marks(warned=(removal(8 * DAY),)))
    assert decided(forged).action is Action.REMOVE


# What follows the stop of idle work


def idle_words(minutes: int, after_idle: AfterIdle, warnings: tuple[Warned, ...] = (), **facts: Any) -> str:
    classes = {"managed": ClassSettings(idle=30 * MINUTE, after_idle=after_idle, start_grace=timedelta())}
    book = Rulebook(msgspec.structs.replace(POLICY, classes=classes))
    return decide(View(subject(**facts), quiet(minutes), Memory(warnings=warnings)), book, NOW).reason


def test_warnings_and_the_stop_itself_announce_the_removal_that_follows() -> None:
    assert "; will be stopped at 2026-03-10 12:10 UTC (in 10m), then deleted. " in idle_words(28, AfterIdle.REMOVE)
    assert idle_words(90, AfterIdle.REMOVE, warned()).endswith("; stopped, then deleted")


def test_work_that_is_kept_after_its_stop_is_announced_to_be_deleted_like_other_stopped_work() -> None:
    assert "(in 10m), then deleted 1d later. " in idle_words(28, AfterIdle.KEEP)
    assert idle_words(90, AfterIdle.KEEP, warned()).endswith("; stopped, then deleted 1d later")
    own = {"marks": Marks(ttl=2 * HOUR)}
    assert "(in 10m), then deleted 2h later. " in idle_words(28, AfterIdle.KEEP, **own)
    unread = {"marks": Marks(ttl=Unknown("it is no duration"))}
    assert "deleted" not in idle_words(28, AfterIdle.KEEP, **unread)


def test_what_a_stop_suspends_is_announced_to_be_kept_until_a_person_acts() -> None:
    suspended = {"suspended_by_stop": True}
    kept = "then kept until a person resumes or removes it"
    assert f"(in 10m), {kept}. " in idle_words(28, AfterIdle.KEEP, **suspended)
    assert idle_words(90, AfterIdle.KEEP, warned(), **suspended).endswith(f"; stopped, {kept}")


def test_high_demand_that_shortens_nothing_is_not_mentioned_and_changes_no_time() -> None:
    """Also not the lead, which counts from the last warning where demand shortened the limit."""
    book = Rulebook(msgspec.structs.replace(POLICY, demand=Demand(idle_factor=1.0)))
    for minutes in range(20, 60):
        view = View(subject(), quiet(minutes), Memory(warnings=warned()[1:]))
        scarce = decide(msgspec.structs.replace(view, pressure=True), book, NOW)
        assert scarce == decide(view, book, NOW)
        assert "scarce" not in scarce.reason
    shorter = decide(View(subject(), quiet(20), Memory(), pressure=True), BOOK, NOW)
    assert "allowed 15m while GPUs are scarce" in shorter.reason


def unreached(ago: timedelta) -> tuple[Warned, ...]:
    return tuple(
        Warned("idle", stage, NOW - ago - gap, False, "run-1", 30 * MINUTE)
        for stage, gap in ((1, 5 * MINUTE), (2, 0 * MINUTE))
    )


def test_a_warning_that_is_not_delivered_announces_no_stop() -> None:
    found = decide(View(subject(), quiet(28), Memory()), BOOK, NOW)
    assert found.announced == NOW + 10 * MINUTE
    assert found.unheard is not None
    assert found.unheard.at is None
    assert "; not stopped before a warning is delivered to its owner. Use it, or keep it: " in found.unheard.words


def test_work_is_never_stopped_for_idleness_while_no_warning_was_delivered() -> None:
    """Its owner is warned again every hour; the stop follows the first that is delivered, with the usual lead."""
    for minutes in range(200):
        found = decide(View(subject(), quiet(150), Memory(warnings=unreached(minutes * MINUTE))), BOOK, NOW)
        assert found.action is (Action.WARN if minutes >= 60 else Action.KEEP), minutes
    again = decide(View(subject(), quiet(150), Memory(warnings=unreached(HOUR))), BOOK, NOW)
    assert (again.stage, again.announced) == (2, NOW + 10 * MINUTE)
    reached = (*unreached(11 * MINUTE), Warned("idle", 2, NOW - 10 * MINUTE, True, "run-1", 30 * MINUTE, NOW))
    assert decide(View(subject(), quiet(90), Memory(warnings=reached)), BOOK, NOW).action is Action.STOP


def test_a_removal_that_comes_later_is_announced_with_its_time() -> None:
    assert "UTC (in 10m), then deleted 1d later. " in idle_words(28, AfterIdle.REMOVE, suspended_by_stop=True)


def test_a_stop_that_is_a_removal_is_announced_as_one() -> None:
    assert "UTC (in 10m), then deleted. " in idle_words(28, AfterIdle.KEEP, goes_when_stopped=True)
