"""What is true of any decision and any plan."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.lifecycle.budget import TREES, BudgetFacts, make_plan
from gpukeeper.lifecycle.decide import RULES, answers, decide, still_holds
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import ACTING, Action, Decision, Step, Verdict, View
from gpukeeper.model.policy import Amount, Budget, ClassSettings, Policy, Retention
from gpukeeper.model.subject import Category, Hold, Ref, Seen, Shape, State
from tests.effort import examples
from tests.property.strategies import DAY, HOUR, MINUTE, NOW, Dozens, dozens, hold, pair, policy, view

replace = msgspec.structs.replace
Pairs = Dozens[tuple[View, Policy]]
OFTEN = examples(0.5)


@OFTEN
@given(pairs=dozens(pair))
def test_a_rule_is_silent_in_every_state_it_does_not_speak_in(pairs: Pairs) -> None:
    """`decide` does not ask it there, so it must not have anything to say."""
    for one, rules in pairs:
        said = {answer.rule: answer.verdict for answer in answers(one, Rulebook(rules), NOW)}
        for rule in RULES:
            if isinstance(one.subject.state, State) and one.subject.state not in rule.states:
                assert said[rule.name] is Verdict.SILENT, rule.name


@OFTEN
@given(pairs=dozens(pair), factor=st.sampled_from([1.5, 2, 100]))
def test_a_more_patient_policy_never_reclaims_more(pairs: Pairs, factor: float) -> None:
    """What the patient policy acts on, the other one acts on or is just warning about."""
    for one, rules in pairs:
        if decide(one, Rulebook(_patient(rules, factor)), NOW).action in ACTING:
            assert decide(one, Rulebook(rules), NOW).action is not Action.KEEP, one


def _patient(rules: Policy, factor: float) -> Policy:
    return replace(
        rules,
        retention=_longer(rules.retention, factor),
        environments={name: _longer(one, factor) for name, one in rules.environments.items()},
        classes={name: _slower(one, factor) for name, one in rules.classes.items()},
        groups={name: _slower(one, factor) for name, one in rules.groups.items()},
        temporary=tuple(
            replace(one, **_times(one, ("older_than", "under_pressure"), factor)) for one in rules.temporary
        ),
        kept={
            name: replace(one, **_times(one, ("older_than", "under_pressure"), factor))
            for name, one in rules.kept.items()
        },
        images=replace(rules.images, **_times(rules.images, ("unused", "under_pressure"), factor)),
        build_cache=replace(rules.build_cache, **_times(rules.build_cache, ("unused",), factor)),
        volumes=replace(rules.volumes, **_times(rules.volumes, ("anonymous_unused",), factor)),
        networks=replace(rules.networks, **_times(rules.networks, ("unused",), factor)),
    )


def _longer(retention: Retention, factor: float) -> Retention:
    return replace(retention, **_times(retention, ("succeeded", "failed", "stopped", "max"), factor))


def _slower(limits: Any, factor: float) -> Any:
    names = ("idle", "max_runtime", "hold_after_stop")
    more = ("never_started", "hold", "idle_when_large") if isinstance(limits, ClassSettings) else ()
    return replace(limits, **_times(limits, (*names, *more), factor))


def _times(value: Any, names: tuple[str, ...], factor: float) -> dict[str, timedelta]:
    """Every span of these; a factor of a group is of a span that grows with it."""
    return {name: span * factor for name in names if isinstance(span := getattr(value, name), timedelta)}


@OFTEN
@given(many=dozens(lambda rng: (*pair(rng), hold(rng))))
def test_adding_a_hold_never_causes_a_removal(many: Dozens[tuple[View, Policy, Hold]]) -> None:
    for one, rules, added in many:
        over = not added.admin and min(added.until, added.at + DAY) <= NOW
        if over and one.subject.marks.keep_alive is True:
            continue  # what was held before is what a keep-alive file can no longer ask for
        held = replace(one, memory=replace(one.memory, holds=(*one.memory.holds, added)))
        if decide(held, Rulebook(rules), NOW).action in ACTING:
            assert decide(one, Rulebook(rules), NOW).action is not Action.KEEP, f"{one}\n{added}"


@OFTEN
@given(pairs=dozens(pair))
def test_a_users_valid_hold_leaves_only_the_maximum_runtime(pairs: Pairs) -> None:
    valid = Hold("ann", NOW - HOUR, NOW + HOUR)
    for one, rules in pairs:
        held = replace(one, memory=replace(one.memory, holds=(*one.memory.holds, valid)))
        made = decide(held, Rulebook(rules), NOW)
        assert made.action is Action.KEEP or made.rule == "max_runtime"


@OFTEN
@given(pairs=dozens(pair))
def test_a_keep_alive_lease_begins_only_when_it_keeps_and_never_beyond_the_total(pairs: Pairs) -> None:
    """C8.5, for any view: a lease is a hold within the class's limit, and one is never granted beside another."""
    for one, rules in pairs:
        made = decide(one, Rulebook(rules), NOW)
        if made.begins is None:
            continue
        assert made.action is Action.KEEP
        assert one.subject.owner is not None
        assert NOW < made.begins.until <= NOW + DAY
        after = replace(one, memory=replace(one.memory, holds=(*one.memory.holds, made.begins)))
        again = decide(after, Rulebook(rules), NOW + MINUTE)
        assert again.begins is None
        assert again.action not in ACTING or again.rule == "max_runtime"
        at_end = decide(replace(after, series=()), Rulebook(rules), made.begins.until)
        assert at_end.begins is None, "a file alone renews nothing"


@given(pairs=dozens(pair))
def test_no_stop_without_two_warnings_and_their_lead(pairs: Pairs) -> None:
    for one, rules in pairs:
        made = decide(one, Rulebook(rules), NOW)
        if made.action is Action.STOP:
            sent = [w for w in one.memory.warnings if (w.rule, w.limit) == (made.rule, made.limit)]
            told = [w.at for w in sent if w.delivered] or [w.at + rules.warnings.undelivered for w in sent]
            assert {w.stage for w in sent} == {1, 2}
            assert NOW - min(told) >= rules.warnings.lead, f"{one.memory.warnings}"


@OFTEN
@given(pairs=dozens(pair))
def test_a_running_workload_is_removed_only_as_a_loop_and_after_a_warning(pairs: Pairs) -> None:
    for one, rules in pairs:
        made = decide(one, Rulebook(rules), NOW)
        runs = one.subject.shape is Shape.WORKLOAD and one.subject.state in (State.RUNNING, State.PAUSED)
        if made.action is Action.REMOVE and runs:
            assert made.rule == "restart_loop"
            assert any(w.rule == made.rule and NOW - w.at >= rules.warnings.lead for w in one.memory.warnings)


@OFTEN
@given(pairs=dozens(pair))
def test_a_step_decided_just_now_still_holds(pairs: Pairs) -> None:
    for one, rules in pairs:
        book = Rulebook(rules)
        assert still_holds(Step("1.1", decide(one, book, NOW)), one, book, NOW) is None


@OFTEN
@given(pairs=dozens(pair), minutes=st.integers(1, 3000))
def test_what_is_due_without_measurements_stays_due(pairs: Pairs, minutes: int) -> None:
    """A finished, warned or forgotten thing that is due now is still due later: nothing slips through by waiting."""
    later = NOW + minutes * MINUTE
    for one, rules in pairs:
        # A label that asks for an exemption asks again when the one it got is over.
        still = replace(
            one, series=(), subject=replace(one.subject, marks=replace(one.subject.marks, asks_exemption=None))
        )
        if decide(still, Rulebook(rules), NOW).action in ACTING:
            assert decide(still, Rulebook(rules), later).action is not Action.KEEP, still


@OFTEN
@given(many=dozens(view), seed=st.integers(0, 2**32))
def test_decisions_do_not_depend_on_the_order_of_subjects(many: Dozens[View], seed: int) -> None:
    seen = list(many)
    rng = random.Random(seed)
    rules, order = policy(rng), rng.sample(range(len(seen)), len(seen))
    one, other = Rulebook(rules), Rulebook(rules)
    first = [decide(each, one, NOW) for each in seen]
    second = {n: decide(seen[n], other, NOW) for n in order}
    assert first == [second[n] for n in range(len(seen))]


def _decision(number: int, action: Action, age: int | None, running: bool) -> Decision:
    seen = Seen(Ref("docker", "node-3", "container", f"job-{number}", f"u{number}"), "run-1", "1", NOW)
    due = None if age is None else NOW - age * MINUTE
    return Decision(seen=seen, action=action, rule="retention", reason="over", due=due, running=running)


def _tree(number: int, rule: str, rank: int, age: int) -> Decision:
    seen = Seen(Ref("host", "node-3", "tree", f"/tmp/tmp{number}", f"8:{number}"), "v1", "1", NOW)
    return Decision(seen=seen, action=Action.REMOVE, rule=rule, reason="over", due=NOW - age * MINUTE, rank=rank)


DUE = st.lists(
    st.tuples(st.sampled_from(Action), st.one_of(st.none(), st.integers(0, 9)), st.booleans()), max_size=30
).map(lambda given: [_decision(n, *one) for n, one in enumerate(given)])
DUE_TREES = st.lists(st.tuples(st.sampled_from(sorted(TREES)), st.integers(0, 4), st.integers(0, 9)), max_size=30).map(
    lambda given: [_tree(n, *one) for n, one in enumerate(given)]
)
AMOUNTS = st.builds(
    Amount, count=st.one_of(st.none(), st.integers(0, 9)), share=st.one_of(st.none(), st.floats(0.01, 1))
)


@given(due=DUE, per_pass=AMOUNTS, per_hour=AMOUNTS, acts=st.integers(0, 12), running=st.integers(0, 40))
def test_the_budget_is_never_exceeded(
    due: list[Decision], per_pass: Amount, per_hour: Amount, acts: int, running: int
) -> None:
    rules = Policy(budget=Budget(per_pass=per_pass, per_hour=per_hour))
    plan = make_plan(due, rules, BudgetFacts(40, running, 40, 0, acts), NOW, pass_id=1)
    taken = [step.decision for step in plan.steps if step.decision.action in ACTING]
    assert len(taken) <= per_pass.of(40)
    assert not taken or len(taken) + acts <= per_hour.of(40)
    if plan.breaker is None:
        assert len(taken) + len(plan.deferred) == sum(one.action in ACTING for one in due)
        assert max(map(_due, taken), default=0) <= min(map(_due, plan.deferred), default=float("inf"))
    else:
        assert plan.steps == ()


def _due(decision: Decision) -> float:
    return decision.due.timestamp() if decision.due else 0.0


@examples(0.5)
@given(due=DUE, seed=st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_decisions(due: list[Decision], seed: random.Random) -> None:
    rules, fleet = Policy(budget=Budget(per_pass=Amount(count=3))), BudgetFacts(40, 40, 40, 0, 0)
    mixed = due.copy()
    seed.shuffle(mixed)
    one, other = (make_plan(some, rules, fleet, NOW, pass_id=1) for some in (due, mixed))
    acting = [[s.decision for s in plan.steps if s.decision.action in ACTING] for plan in (one, other)]
    assert acting[0] == acting[1]
    assert (one.deferred, one.breaker) == (other.deferred, other.breaker)


def _is_tree(decision: Decision) -> bool:
    return decision.rule in TREES


@given(due=DUE, trees=DUE_TREES, most=st.integers(0, 9), before=st.integers(0, 12), acts=st.integers(0, 12))
def test_trees_and_work_never_use_up_each_others_budget(
    due: list[Decision], trees: list[Decision], most: int, before: int, acts: int
) -> None:
    """With or without the other kind the same of each kind is taken, in the same order."""
    rules = Policy(budget=Budget(per_pass=Amount(count=3), per_hour=Amount(count=9), trees=most))
    fleet = BudgetFacts(40, 40, 40, 0, acts, trees_last_hour=before)
    both = make_plan([*trees, *due], rules, fleet, NOW, pass_id=1)
    if both.breaker is not None:
        return
    for kind, alone in ((True, trees), (False, due)):
        single = make_plan(alone, rules, fleet, NOW, pass_id=1)
        taken, wanted = ([s.decision for s in plan.steps if _is_tree(s.decision) is kind] for plan in (both, single))
        assert taken == wanted
        assert [one for one in both.deferred if _is_tree(one) is kind] == list(single.deferred)


@given(trees=DUE_TREES, most=st.integers(0, 9), before=st.integers(0, 12))
def test_the_hour_of_trees_is_never_exceeded_and_the_cheapest_go_first(
    trees: list[Decision], most: int, before: int
) -> None:
    rules, fleet = Policy(budget=Budget(trees=most)), BudgetFacts(0, 0, 0, 0, 0, trees_last_hour=before)
    plan = make_plan(trees, rules, fleet, NOW, pass_id=1)
    taken = [step.decision for step in plan.steps]
    assert len(taken) == min(len(trees), max(0, most - before))
    order = [(one.rank, _due(one)) for one in (*taken, *plan.deferred)]
    assert order == sorted(order)


@examples(0.5)
@given(trees=DUE_TREES, most=st.integers(1, 9))
def test_over_many_passes_every_tree_goes_and_no_hour_has_too_many(trees: list[Decision], most: int) -> None:
    """Ten minutes between passes: what is deferred waits its turn, and none waits for ever."""
    rules, left, done = Policy(budget=Budget(trees=most)), list(trees), list[int]()
    for number in range(6 * (len(trees) // most + 2)):
        recent = sum(number - at < 6 for at in done)
        plan = make_plan(left, rules, BudgetFacts(0, 0, 0, 0, 0, trees_last_hour=recent), NOW, pass_id=number)
        gone = {step.decision.seen.ref.uid for step in plan.steps}
        left = [one for one in left if one.seen.ref.uid not in gone]
        done += [number] * len(gone)
        assert sum(number - at < 6 for at in done) <= most
    assert left == []


@OFTEN
@given(pairs=dozens(pair))
def test_a_full_disk_shrinks_ages_and_no_condition(pairs: Pairs) -> None:
    """Whatever is removed under pressure is closed, beside nothing, and known to be so; a report goes no sooner."""
    for one, rules in pairs:
        if one.subject.shape not in (Shape.TREE, Shape.IMAGE):
            continue
        pressed, calm = (decide(replace(one, pressure=full), Rulebook(rules), NOW) for full in (True, False))
        assert calm.action is Action.KEEP or pressed.action is Action.REMOVE
        assert bool(pressed.disk) == (pressed.action is Action.REMOVE and calm.action is Action.KEEP)
        if pressed.action is Action.REMOVE:
            assert one.subject.in_use is False
            assert one.subject.shape is Shape.IMAGE or one.subject.busy is None
            assert one.subject.category is not Category.REPORT or calm.action is Action.REMOVE


@OFTEN
@given(pairs=dozens(pair))
def test_a_category_that_is_switched_off_is_never_acted_on(pairs: Pairs) -> None:
    for one, rules in pairs:
        off = replace(rules, kept={name: replace(kept, older_than=None) for name, kept in rules.kept.items()})
        for full in (True, False):
            made = decide(replace(one, pressure=full), Rulebook(off), NOW)
            assert made.rule != "leftover_tree" or made.action is Action.KEEP
