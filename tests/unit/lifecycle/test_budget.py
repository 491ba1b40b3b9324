"""The budget defers, oldest first; the breaker refuses everything when the world looks broken."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from gpukeeper.lifecycle.budget import (
    BudgetFacts,
    backlog_sentence,
    duplicate_sentences,
    hourly_budget,
    make_plan,
    open_breaker,
    room_left,
)
from gpukeeper.model.decision import Action, Decision, Plan
from gpukeeper.model.policy import Amount, Breaker, Budget, Policy, Schedule
from tests.unit.lifecycle.examples import DAY, HOUR, MINUTE, NOW, decision


def fleet(**more: Any) -> BudgetFacts:
    return BudgetFacts(**({"seen": 100, "running": 50, "before": 100, "vanished": 0, "acts_last_hour": 0} | more))


def policy(per_pass: Amount | None = None, **breaker: Any) -> Policy:
    budget = Budget(per_pass=per_pass or Amount(count=2), per_hour=Amount(count=5))
    return Policy(budget=budget, breaker=Breaker(**breaker), digest="d1")


def plan(decisions: list[Decision], rules: Policy, **more: Any) -> Plan:
    allow = more.pop("allow", None)
    return make_plan(decisions, rules, fleet(**more), NOW, pass_id=7, allow=allow)


def names(decisions: Any) -> list[str]:
    return [d.seen.ref.name for d in decisions]


def test_the_oldest_go_first_and_the_rest_is_deferred() -> None:
    made = plan([decision(1), decision(3), decision(2)], policy())
    assert names(step.decision for step in made.steps) == ["job-3", "job-2"]
    assert names(made.deferred) == ["job-1"]


def test_what_has_no_due_time_counts_as_oldest() -> None:
    made = plan([decision(1), decision(2), decision(3, due=None)], policy())
    assert names(step.decision for step in made.steps) == ["job-3", "job-2"]


def test_steps_are_numbered_within_their_pass() -> None:
    made = plan([decision(1), decision(2)], policy())
    assert [step.id for step in made.steps] == ["7.1", "7.2"]
    assert (made.policy_digest, made.at, made.breaker) == ("d1", NOW, None)


def test_warnings_come_first_and_cost_no_budget() -> None:
    warnings = [decision(n, Action.WARN) for n in (4, 5, 6)]
    made = plan([decision(1), *warnings], policy(Amount(count=1)))
    assert [step.decision.action for step in made.steps] == [Action.WARN] * 3 + [Action.REMOVE]
    assert made.deferred == ()


def test_keeping_is_no_step() -> None:
    assert plan([decision(1, Action.KEEP)], policy()).steps == ()


def test_a_share_of_the_fleet_allows_at_least_one() -> None:
    rules = policy(Amount(share=0.05))
    assert room_left(rules, fleet(seen=100)) == 5
    assert room_left(rules, fleet(seen=3)) == 1


def test_what_was_done_in_the_last_hour_counts() -> None:
    assert room_left(policy(), fleet(acts_last_hour=4)) == 1
    assert room_left(policy(), fleet(acts_last_hour=9)) == 0


def test_nothing_is_taken_when_the_hour_is_used_up() -> None:
    made = plan([decision(1)], policy(), acts_last_hour=5)
    assert made.steps == ()
    assert names(made.deferred) == ["job-1"]


def test_the_breaker_opens_when_too_much_running_work_is_due() -> None:
    due = [decision(n, Action.STOP, running=True) for n in range(11)]
    made = plan(due, policy())
    assert made.steps == ()
    assert made.breaker == (
        "The plan would stop 11 of 50 running workloads at once; the breaker opens above 20%. Nothing was touched."
    )


def test_the_breaker_stays_closed_at_its_mark() -> None:
    due = [decision(n, Action.STOP, running=True) for n in range(10)]
    assert open_breaker(due, policy(), fleet()) is None


def test_what_does_not_run_does_not_open_the_breaker() -> None:
    assert open_breaker([decision(n) for n in range(60)], policy(), fleet()) is None


def test_a_small_fleet_believes_as_many_as_the_floor() -> None:
    two = [decision(n, Action.STOP, running=True) for n in (1, 2)]
    assert open_breaker(two[:1], policy(), fleet(running=1)) is None
    assert open_breaker(two, policy(), fleet(running=2)) is not None
    assert open_breaker(two, policy(floor=2), fleet(running=2)) is None


def test_the_breaker_opens_when_too_much_vanished() -> None:
    broken = open_breaker([decision(1)], policy(), fleet(vanished=51))
    assert broken is not None
    assert "51 of 100 objects of the last pass are missing" in broken
    assert open_breaker([], policy(), fleet(vanished=50)) is None


def test_a_clock_in_doubt_opens_the_breaker() -> None:
    for allow in (None, 9):
        made = plan([decision(1)], policy(), clock="The clock jumped", allow=allow)
        assert (made.steps, made.breaker) == ((), "The clock jumped. Nothing was touched.")


def test_an_open_breaker_sends_no_warnings_either() -> None:
    made = plan([decision(1, Action.WARN)], policy(), clock="The clock jumped")
    assert made.steps == ()


def test_a_person_who_read_the_plan_may_allow_more_once() -> None:
    due = [decision(n, Action.STOP, running=True) for n in range(41)]
    made = plan(due, policy(), allow=40, clock=None)
    assert len(made.steps) == 40
    assert made.breaker is None
    assert names(made.deferred) == ["job-0"]


def test_equally_old_things_keep_a_stable_order() -> None:
    same = NOW - timedelta(hours=1)
    made = plan([decision(n, due=same) for n in (3, 1, 2)], policy(Amount(count=3)))
    assert names(step.decision for step in made.steps) == ["job-1", "job-2", "job-3"]


def left(number: int, minutes_ago: int) -> Decision:
    return decision(number, running=True, rule="orphan", since=NOW - timedelta(minutes=minutes_ago))


def test_what_one_workload_left_running_counts_once_for_the_breaker() -> None:
    """A dead training leaves a process for each of its loaders; that is not a broken world."""
    assert plan([left(n, 5) for n in range(8)], policy(floor=1), running=2).breaker is None


def test_remainders_of_many_workloads_at_once_open_the_breaker() -> None:
    made = plan([left(n, n) for n in range(1, 9)], policy(floor=1), running=2)
    assert made.breaker is not None
    assert "8 of 2" in made.breaker


def test_images_and_build_cache_wait_behind_everything_else() -> None:
    """They are due for weeks by the time a GPU is."""
    old = [decision(100 + n, rule=rule) for n, rule in enumerate(["unused_image", "build_cache"])]
    made = plan([*old, decision(1), decision(2)], policy())
    assert names(step.decision for step in made.steps) == ["job-2", "job-1"]


def tree(number: int, **more: Any) -> Decision:
    return decision(number, **({"rule": "temporary_tree", "rank": 3} | more))


def limited(trees: int, per_pass: int = 2, per_hour: int = 5) -> Policy:
    return Policy(budget=Budget(per_pass=Amount(count=per_pass), per_hour=Amount(count=per_hour), trees=trees))


def test_trees_and_work_have_budgets_of_their_own() -> None:
    """Hundreds of trees defer no work, and work defers no tree."""
    work, trees = [decision(n) for n in range(4)], [tree(100 + n) for n in range(4)]
    made = plan([*trees, *work], limited(trees=3))
    assert names(step.decision for step in made.steps) == ["job-3", "job-2", "job-103", "job-102", "job-101"]
    assert names(made.deferred) == ["job-1", "job-0", "job-100"]


def test_what_work_did_in_the_last_hour_is_nothing_to_trees_and_the_other_way_round() -> None:
    due = [decision(1), tree(2)]
    assert names(s.decision for s in plan(due, limited(trees=3), acts_last_hour=5).steps) == ["job-2"]
    assert names(s.decision for s in plan(due, limited(trees=3), trees_last_hour=3).steps) == ["job-1"]


def test_trees_of_the_last_hour_count() -> None:
    made = plan([tree(n) for n in range(5)], limited(trees=7), trees_last_hour=5)
    assert names(step.decision for step in made.steps) == ["job-4", "job-3"]
    assert plan([tree(1)], limited(trees=3), trees_last_hour=9).steps == ()


def test_of_trees_the_cheapest_category_goes_first_and_then_the_oldest() -> None:
    due = [
        tree(9, rank=4),
        tree(1, rank=0, rule="leftover_tree"),
        tree(3),
        tree(7),
        tree(8, rank=1, rule="leftover_tree"),
    ]
    made = plan(due, limited(trees=4))
    assert names(step.decision for step in made.steps) == ["job-1", "job-8", "job-7", "job-3"]
    assert names(made.deferred) == ["job-9"]


def test_the_rank_of_what_is_no_tree_means_nothing() -> None:
    made = plan([decision(1, rank=0), decision(2, rank=4)], policy())
    assert names(step.decision for step in made.steps) == ["job-2", "job-1"]


def test_images_wait_behind_trees() -> None:
    made = plan([decision(300, rule="unused_image"), tree(1)], limited(trees=1, per_pass=1))
    assert names(step.decision for step in made.steps) == ["job-1", "job-300"]


def test_trees_do_not_open_the_breaker() -> None:
    assert open_breaker([tree(n) for n in range(900)], limited(trees=1000), fleet(running=1)) is None


def test_an_open_breaker_spares_trees_too() -> None:
    made = plan([tree(1)], limited(trees=9), vanished=99)
    assert (made.steps, made.breaker is not None) == ((), True)


def test_a_person_who_allows_so_many_allows_that_many_of_both_together() -> None:
    made = plan([*(tree(n) for n in range(5)), decision(100)], limited(trees=1, per_pass=1), allow=4)
    assert names(step.decision for step in made.steps) == ["job-100", "job-4", "job-3", "job-2"]
    assert len(made.deferred) == 2


def test_each_step_is_held_to_the_hour_of_its_kind() -> None:
    rules = limited(trees=7, per_hour=5)
    assert (hourly_budget(tree(1), rules, 100), hourly_budget(decision(1), rules, 100)) == (7, 5)


def test_a_backlog_shows_how_long_it_takes_and_what_makes_it_shorter() -> None:
    """The default clears 5,000 in a night."""
    words = backlog_sentence([decision(n) for n in range(5000)], Policy(), seen=5000)
    assert words == (
        "5000 deferred by the budget, oldest first: about 8h20m with a pass every 5m. "
        "To take more at once: `gpukeeper apply --budget N`, or raise budget.per_pass and budget.per_hour."
    )


def test_passes_that_come_seldom_take_as_much_as_one_pass_may() -> None:
    rules = Policy(schedule=Schedule(every=timedelta(hours=1)))
    assert "about 4d4h with a pass every 1h." in backlog_sentence([decision(n) for n in range(5000)], rules, seen=5000)


def test_a_backlog_of_trees_has_its_own_number() -> None:
    trees = [msgspec.structs.replace(decision(n), rule="temporary_tree") for n in range(2500)]
    words = backlog_sentence(trees, Policy(), seen=10)
    assert "about 2h30m" in words
    assert words.endswith("or raise budget.trees.")


def test_kind_rule_and_outcome_do_not_change_the_order() -> None:
    """C6.6, ADR 28: the longest due first; work before trees, trees before images. No kind keeps another waiting."""
    made = plan(
        [
            decision(1, rule="unused_image", due=NOW - 90 * DAY),
            decision(2, rule="temporary_tree", due=NOW - 30 * DAY),
            *(decision(number, reason="succeeded 2h ago", due=NOW - HOUR) for number in range(10, 15)),
            decision(3, reason="failed 8d ago", due=NOW - 2 * HOUR),
            decision(4, rule="never_started", due=NOW - 3 * HOUR),
            decision(5, rule="own_ttl", due=NOW - 90 * MINUTE),
        ],
        policy(Amount(count=4)),
    )
    assert names(step.decision for step in made.steps) == ["job-4", "job-3", "job-5", "job-10", "job-2"]
    assert names(made.deferred) == ["job-11", "job-12", "job-13", "job-14", "job-1"]


def test_of_two_decisions_about_one_thing_only_the_first_becomes_a_step() -> None:
    first, second = decision(1), decision(1, Action.STOP, rule="idle")
    made = plan([first, decision(2), second], policy(Amount(count=10)))
    assert names(step.decision for step in made.steps) == ["job-2", "job-1"]
    assert [step.decision.action for step in made.steps] == [Action.REMOVE, Action.REMOVE]
    assert (made.duplicates, made.deferred) == ((second,), ())
    (words,) = duplicate_sentences(made)
    assert words.startswith(f"two decisions about {first.seen.ref.path} in one plan: stop by idle is not done")


def test_the_same_decision_twice_is_one_step_and_reported() -> None:
    one = decision(1)
    made = plan([one, one], policy(Amount(count=10)))
    assert (len(made.steps), made.duplicates) == (1, (one,))


def test_a_warning_beside_an_act_is_not_sent() -> None:
    warning = decision(1, Action.WARN)
    made = plan([decision(1), warning], policy(Amount(count=10)))
    assert [step.decision.action for step in made.steps] == [Action.REMOVE]
    assert made.duplicates == (warning,)


def test_what_is_kept_is_no_second_decision() -> None:
    made = plan([decision(1, Action.KEEP), decision(1)], policy(Amount(count=10)))
    assert (len(made.steps), made.duplicates) == (1, ())


def test_no_plan_has_two_steps_on_one_thing_whatever_is_allowed() -> None:
    made = plan([decision(1), decision(1), decision(2)], policy(), allow=5)
    assert names(step.decision for step in made.steps) == ["job-2", "job-1"]
