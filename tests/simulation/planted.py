"""Bugs on purpose. Each is planted into the real engine, and the simulation must catch it: a test of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.engine import act as engine_act
from gpukeeper.engine import loop as engine_loop
from gpukeeper.engine import observe as engine_observe
from gpukeeper.engine import reclaim as engine_reclaim
from gpukeeper.engine import view as engine_view
from gpukeeper.engine.keeper import ClockWatch
from gpukeeper.engine.memory import Pressure, WorkBeside
from gpukeeper.lifecycle import activity, budget, decide, forecast, warnings
from gpukeeper.lifecycle.rules import (
    hold,
    idle,
    keep_alive,
    leftover_tree,
    live_children,
    max_runtime,
    orphan,
    retention,
    target,
    temporary_tree,
)
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Answer, Decision, Result, Step, Verdict, View
from gpukeeper.model.event import Closed, Intended
from gpukeeper.model.ports import Delivery, Message
from gpukeeper.model.subject import Category, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.platforms.simulated import world as simulated_thing
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from tests.simulation.harness import LoggedLedger

Bug = Callable[[], Any]
PLANTED: dict[str, tuple[str, Bug]] = {}


def planted(caught_by: str) -> Callable[[Callable[[], Iterator[None]]], None]:
    """Registers a bug and the checker that must notice it."""

    def register(bug: Callable[[], Iterator[None]]) -> None:
        PLANTED[bug.__name__] = (caught_by, contextmanager(bug))

    return register


@contextmanager
def swapped(place: Any, name: str, other: Any) -> Iterator[None]:
    original = place.__dict__[name] if isinstance(place, type) else getattr(place, name)
    setattr(place, name, other)
    try:
        yield
    finally:
        setattr(place, name, original)


@contextmanager
def rule_swapped(rule: Any, evaluate: Any) -> Iterator[None]:
    original = dict(decide._APPLICABLE)
    for shape, rules in original.items():
        decide._APPLICABLE[shape] = tuple((n, evaluate if n == rule.NAME else a) for n, a in rules)
    try:
        yield
    finally:
        decide._APPLICABLE.update(original)


@planted("only_what_was_seen")
def act_without_looking_again() -> Iterator[None]:
    seen: dict[str, Subject] = {}
    views = engine_view.build_views

    async def remembering(keeper: Any, platform: Any, subjects: Any, *rest: Any) -> list[View]:
        seen.update((s.ref.uid, s) for s in subjects)
        return await views(keeper, platform, subjects, *rest)

    async def from_the_plan(keeper: Any, platform: Any, step: Step, book: Any) -> Any:
        return (await views(keeper, platform, [seen[step.decision.seen.ref.uid]], book, [], keeper.clock.now()))[0]

    with swapped(engine_observe, "build_views", remembering), swapped(engine_act, "read_again", from_the_plan):
        yield


@planted("only_what_was_seen")
def drop_the_condition() -> Iterator[None]:
    with (
        swapped(engine_act, "still_holds", lambda *_: None),
        swapped(SimulatedPlatform, "unchanged", staticmethod(lambda thing, fresh: True)),
    ):
        yield


@planted("only_what_was_seen")
def remove_without_an_atomic_guard() -> Iterator[None]:
    """An adapter that does not pass uid and version on to its platform."""
    with swapped(SimulatedPlatform, "unchanged", staticmethod(lambda thing, fresh: True)):
        yield


@planted("only_what_was_seen")
def hide_a_run_that_went_with_a_removal() -> Iterator[None]:
    async def silent(*_: Any) -> None:
        return None

    with swapped(engine_act, "_report_missed", silent):
        yield


@planted("ledger_tells_the_truth")
def record_the_wish() -> Iterator[None]:
    async def believed(*_: Any) -> tuple[Result, str]:
        return Result.RECLAIMED, "the command was accepted"

    with swapped(engine_act, "verify", believed):
        yield


@planted("unknown_keeps")
def treat_unmeasured_as_idle() -> Iterator[None]:
    judge = activity.assess_use

    def careless(series: Any, devices: Any, thresholds: Any, window: timedelta, now: Any, horizon: Any) -> Any:
        found = judge(series, devices, thresholds, window, now, horizon)
        if found.use is activity.Use.UNKNOWN:
            return activity.UseAssessment(activity.Use.QUIET, "no use seen", now - window)
        return found

    with swapped(idle, "assess_use", careless):
        yield


@planted("unknown_keeps")
def count_a_gap_as_idle() -> Iterator[None]:
    """Minutes that nobody measured, because gpukeeper was down, count like quiet ones."""
    with swapped(activity, "measured_span", lambda one, now: (now - timedelta(days=1), now)):
        yield


@planted("warned_first")
def call_an_undelivered_warning_delivered() -> Iterator[None]:
    async def to_owner(messages: Messages, message: Message) -> Delivery:
        await original(messages, message)
        return Delivery(tuple(channel.name for channel in messages.owners))

    original = Messages.to_owner
    with swapped(Messages, "to_owner", to_owner):
        yield


@planted("warned_first")
def stop_idle_work_whose_owner_was_not_reached() -> Iterator[None]:
    with swapped(warnings, "_heard", lambda sent: True):
        yield


@planted("warned_first")
def keep_warnings_across_a_gap() -> Iterator[None]:
    def forgiving(view: View, settings: Any, now: Any, to: Any) -> Answer:
        return staged(msgspec.structs.replace(view, watched_since=None), settings, now, to)

    staged = warnings.staged
    with swapped(idle, "staged", forgiving), swapped(max_runtime, "staged", forgiving):
        yield


@planted("warned_first")
def keep_warnings_across_a_hold() -> Iterator[None]:
    with swapped(warnings, "last_end", lambda *_, **__: None):
        yield


@planted("unknown_keeps")
def treat_an_unknown_outcome_as_success() -> Iterator[None]:
    def careless(view: View, settings: Any, now: Any) -> Answer:
        if isinstance(view.subject.outcome, Unknown):
            view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, outcome=None))
        return retention.evaluate(view, settings, now)

    with rule_swapped(retention, careless):
        yield


@planted("unknown_keeps")
def treat_unknown_children_as_none() -> Iterator[None]:
    def careless(rule: Any) -> Any:
        def evaluate(view: View, settings: Any, now: Any) -> Answer:
            if isinstance(view.subject.live_children, Unknown):
                view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, live_children=0))
            return decide.EVALUATORS[rule.NAME](view, settings, now)

        return evaluate

    with rule_swapped(live_children, careless(live_children)), rule_swapped(retention, careless(retention)):
        yield


@planted("holds_and_scope")
def ignore_a_hold() -> Iterator[None]:
    with rule_swapped(hold, lambda *_: Answer(hold.NAME, Verdict.SILENT, "it is not held")):
        yield


@planted("holds_and_scope")
def forget_a_keep_alive_lease() -> Iterator[None]:
    """It is written down and then not looked up."""
    with swapped(keep_alive, "running_lease", lambda *_: None):
        yield


@planted("due_is_reclaimed")
def never_write_a_keep_alive_lease_down() -> Iterator[None]:
    """A lease without a clock of ours begins anew in every pass."""
    with swapped(engine_observe, "_begun", lambda *_: []):
        yield


@planted("holds_and_scope")
def ignore_the_scope() -> Iterator[None]:
    with swapped(target, "in_scope", lambda *_: True), swapped(SimulatedPlatform, "_covers", lambda *_: True):
        yield


@planted("budget_and_breaker")
def exceed_the_budget() -> Iterator[None]:
    with swapped(budget, "room_left", lambda *_: 10**6):
        yield


@planted("budget_and_breaker")
def forget_the_last_hour() -> Iterator[None]:
    async def none(self: Any, since: Any, rules: Any, *, but: bool = False) -> int:
        return 0

    with _added(LoggedLedger, "acts_since", none):
        yield


@planted("budget_and_breaker")
def ignore_the_breaker() -> Iterator[None]:
    with swapped(budget, "open_breaker", lambda *_: None), swapped(budget, "room_left", lambda *_: 10**6):
        yield


@planted("ledger_tells_the_truth")
def forget_the_intent() -> Iterator[None]:
    append = LoggedLedger.append

    async def forgetful(self: LoggedLedger, lines: Any) -> None:
        await append(self, [line for line in lines if not isinstance(line, Intended)])

    with swapped(LoggedLedger, "append", forgetful):
        yield


@planted("ledger_tells_the_truth")
def replay_an_intent() -> Iterator[None]:
    """After a crash: do it again without looking, as a queue would."""

    async def replay(keeper: Any, platform: Any) -> list[Closed]:
        for intent in await keeper.ledger.open_intents(platform.name, platform.place):
            found = await platform.read(intent.ref)
            if isinstance(found, Subject):
                step = Step(intent.step, _decision_of(intent, found))
                await platform.act(step, found)
        return []

    with swapped(engine_reclaim, "settle", replay):
        yield


@planted("evidence_first")
def remove_before_capture() -> Iterator[None]:
    async def skip(*_: Any) -> None:
        return None

    with swapped(engine_act, "_save_evidence", skip):
        yield


@planted("evidence_first")
def remove_although_capture_failed() -> Iterator[None]:
    save = engine_act._save_evidence

    async def careless(*args: Any) -> None:
        await save(*args)

    with swapped(engine_act, "_save_evidence", careless):
        yield


@planted("warned_first")
def warn_after_the_stop() -> Iterator[None]:
    def at_once(view: View, settings: Any, now: Any, to: warnings.Countdown) -> Answer:
        if now >= to.begin + to.limit:
            return Answer(to.rule, Verdict.DUE, to.condition, to.action, now, to.since)
        return Answer(to.rule, Verdict.WAIT, to.condition, due=to.begin + to.limit)

    with swapped(idle, "staged", at_once), swapped(max_runtime, "staged", at_once):
        yield


@planted("warned_first")
def warn_and_stop_in_one_breath() -> Iterator[None]:
    with swapped(warnings, "_stop_at", lambda sent, settings, pressure, earliest, now: earliest):
        yield


@planted("warned_first")
def remove_before_the_announced_time() -> Iterator[None]:
    """At the limit, whatever was announced."""
    stop_at = warnings._stop_at

    def at_the_limit(sent: Any, settings: Any, pressure: bool, earliest: Any, now: Any) -> Any:
        is_announced = bool(sent) and sent[-1].until is not None
        return earliest if is_announced else stop_at(sent, settings, pressure, earliest, now)

    with (
        swapped(decide, "not_before_announced", lambda view, answer, now: answer),
        swapped(warnings, "_last_announced", lambda view, rule, oldest, now: []),
        swapped(warnings, "_stop_at", at_the_limit),
    ):
        yield


@planted("paused_means_paused")
def act_while_paused() -> Iterator[None]:
    async def never(self: Any) -> None:
        return None

    with _added(LoggedLedger, "paused", never):
        yield


@planted("ledger_tells_the_truth")
def count_a_deferred_step_as_done() -> Iterator[None]:
    take_steps = engine_reclaim._take_steps

    async def generous(keeper: Any, platform: Any, book: Any, report: Any, *rest: Any, **more: Any) -> None:
        await take_steps(keeper, platform, book, report, *rest, **more)
        for i, d in enumerate(report.plan.deferred):
            line = Closed(
                at=keeper.clock.now(),
                ref=d.seen.ref,
                step=f"{report.pass_id}.d{i}",
                action=d.action,
                rule=d.rule,
                result=Result.RECLAIMED,
                reason=d.reason,
            )
            await keeper.ledger.append([line])

    with swapped(engine_reclaim, "_take_steps", generous):
        yield


@planted("roots_only")
def act_on_children() -> Iterator[None]:
    def careless(view: View, settings: Any, now: Any) -> Answer:
        if view.subject.root is not None:
            view = msgspec.structs.replace(view, subject=msgspec.structs.replace(view.subject, root=None))
        return decide.EVALUATORS[target.NAME](view, settings, now)

    with rule_swapped(target, careless):
        yield


@planted("roots_only")
def ignore_owners_that_do_not_control() -> Iterator[None]:
    def careless(view: View, settings: Any, now: Any) -> Answer:
        subject = msgspec.structs.replace(view.subject, needed=None)
        return decide.EVALUATORS[target.NAME](msgspec.structs.replace(view, subject=subject), settings, now)

    with rule_swapped(target, careless):
        yield


@contextmanager
def _told_of_trees(told: Callable[[View], dict[str, Any]]) -> Iterator[None]:
    """Both rules about trees are told other facts than were seen."""

    def careless(rule: Any) -> Any:
        def evaluate(view: View, settings: Any, now: Any) -> Answer:
            subject = msgspec.structs.replace(view.subject, **told(view))
            return decide.EVALUATORS[rule.NAME](msgspec.structs.replace(view, subject=subject), settings, now)

        return evaluate

    with (
        rule_swapped(temporary_tree, careless(temporary_tree)),
        rule_swapped(leftover_tree, careless(leftover_tree)),
    ):
        yield


@planted("trees_are_free")
def delete_files_in_use() -> Iterator[None]:
    with _told_of_trees(lambda view: {"in_use": False}):
        yield


@planted("trees_are_free")
def delete_beside_work() -> Iterator[None]:
    """Both guards are away: the rule's, and that of the engine which leaves the rest of a folder alone."""
    with (
        _told_of_trees(lambda view: {"busy": None if isinstance(view.subject.busy, str) else view.subject.busy}),
        swapped(WorkBeside, "note", lambda self, step, found: None),
    ):
        yield


@planted("unknown_keeps")
def treat_an_unknown_node_as_idle() -> Iterator[None]:
    with _told_of_trees(lambda view: {"busy": None} if isinstance(view.subject.busy, Unknown) else {}):
        yield


@planted("unknown_keeps")
def treat_files_that_could_not_be_seen_as_closed() -> Iterator[None]:
    with _told_of_trees(lambda view: {"in_use": False} if isinstance(view.subject.in_use, Unknown) else {}):
        yield


@planted("trees_are_free")
def let_a_full_disk_shrink_conditions() -> Iterator[None]:
    with _told_of_trees(lambda view: {"in_use": False, "busy": None} if view.pressure else {}):
        yield


@planted("trees_are_free")
def call_every_disk_too_full() -> Iterator[None]:
    with (
        swapped(Pressure, "is_too_full", lambda self, subject, marks: True),
        swapped(Pressure, "is_full", lambda self, place, disk: True),
    ):
        yield


@planted("trees_are_free")
def delete_what_was_opened_since_the_look() -> Iterator[None]:
    """An adapter that does not look for open files once more after it moved a tree away."""
    with swapped(SimulatedPlatform, "is_free", staticmethod(lambda thing: True)):
        yield


@planted("trees_are_free")
def treat_an_old_access_time_as_unused() -> Iterator[None]:
    """An adapter that takes a read of which there is no record for none."""

    def believed(thing: Any) -> Any:
        return max(
            (one for one in (thing.changed, thing.moved, thing.read) if one is not None), default=thing.last_used
        )

    with swapped(simulated_thing, "recorded_last_use", believed):
        yield


@planted("trees_are_free")
def forget_when_a_tree_was_moved_here() -> Iterator[None]:
    """An adapter that looks at what is inside a tree, and not at its top."""
    told = simulated_thing.recorded_last_use

    def forgetful(thing: Any) -> Any:
        return told(replace(thing, moved=None))

    with swapped(simulated_thing, "recorded_last_use", forgetful):
        yield


@planted("roots_only")
def ignore_the_names_to_keep() -> Iterator[None]:
    named_by = temporary_tree.named_by

    def greedy(policy: Any, subject: Subject) -> Any:
        entries = tuple(msgspec.structs.replace(one, keep=()) for one in policy.temporary)
        return named_by(msgspec.structs.replace(policy, temporary=entries), subject)

    with swapped(temporary_tree, "named_by", greedy):
        yield


@planted("budget_and_breaker")
def ignore_the_budget_of_trees() -> Iterator[None]:
    hourly = engine_reclaim.hourly_budget

    def unbounded(decision: Decision, *rest: Any) -> int:
        return 10**6 if decision.rule in budget.TREES else hourly(decision, *rest)

    def all_trees(acting: Any, policy: Any, fleet: Any) -> Any:
        others, deferred = within([one for one in acting if one.rule not in budget.TREES], policy, fleet)
        return [*others, *(one for one in acting if one.rule in budget.TREES)], deferred

    within = budget._within_budget
    with swapped(engine_reclaim, "hourly_budget", unbounded), swapped(budget, "_within_budget", all_trees):
        yield


@planted("budget_and_breaker")
def forget_the_trees_of_the_last_hour() -> Iterator[None]:
    acts_since = LoggedLedger.acts_since

    async def forgetful(self: Any, since: Any, rules: Any, *, but: bool = False) -> int:
        return await acts_since(self, since, rules, but=but) if but else 0

    with _added(LoggedLedger, "acts_since", forgetful):
        yield


@planted("due_is_reclaimed")
def forget_an_interrupted_removal() -> Iterator[None]:
    def forgetful(view: View, settings: Any, now: Any) -> Answer:
        if view.subject.category is Category.UNFINISHED:
            return Answer(leftover_tree.NAME, Verdict.PROTECT, "in the trash")
        return leftover_tree.evaluate(view, settings, now)

    with rule_swapped(leftover_tree, forgetful):
        yield


@planted("roots_only")
def end_foreign_processes() -> Iterator[None]:
    def careless(view: View, settings: Any, now: Any) -> Answer:
        if view.subject.shape is Shape.ORPHAN and view.subject.proof is None:
            return Answer(orphan.NAME, Verdict.DUE, "it holds a GPU", Action.REMOVE, now)
        return orphan.evaluate(view, settings, now)

    with rule_swapped(orphan, careless):
        yield


@planted("due_is_reclaimed")
def never_get_to_the_oldest() -> Iterator[None]:
    """Retention that waits for ever: unsafe in the other direction."""

    def late(view: View, settings: Any, now: Any) -> Answer:
        answer = retention.evaluate(view, settings, now)
        return Answer(answer.rule, Verdict.WAIT, answer.reason, due=now) if answer.verdict is Verdict.DUE else answer

    with rule_swapped(retention, late):
        yield


@contextmanager
def _added(place: type, name: str, other: Any) -> Iterator[None]:
    setattr(place, name, other)
    try:
        yield
    finally:
        delattr(place, name)


@planted("due_is_reclaimed")
def let_a_bug_at_one_place_end_every_pass() -> Iterator[None]:
    """What an error that leaves its task does to the tasks beside it."""
    one_pass = engine_loop._pass

    async def fatal(w: Any, platform: Any, agenda: Any, only: Any) -> timedelta:
        if any("bug in gpukeeper" in said for said in w.keeper.last_passes.failures.values()):
            return timedelta(days=1)
        return await one_pass(w, platform, agenda, only)

    with swapped(engine_loop, "_pass", fatal):
        yield


def _decision_of(intent: Intended, found: Subject) -> Decision:
    return Decision(seen=found.seen, action=intent.action, rule=intent.rule, reason=intent.reason)


@planted("clock_is_right")
def forget_that_the_clock_jumped() -> Iterator[None]:
    """With the process."""

    async def nothing(self: ClockWatch, ports: Any) -> None:
        return None

    with swapped(ClockWatch, "recall", nothing):
        yield


@planted("forecasts_come_true")
def forecast_with_the_limits_of_others() -> Iterator[None]:
    """Whose work it is changes the limits: a forecast that forgets the owner's group names the wrong time."""

    def of_nobody(view: View, book: Rulebook, now: datetime) -> Decision:
        subject = msgspec.structs.replace(view.subject, owner="nobody")
        return decide.decide(msgspec.structs.replace(view, subject=subject), book, now)

    with swapped(forecast, "decide", of_nobody):
        yield
