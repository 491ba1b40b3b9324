"""How much in one pass. The budget defers, oldest first; the breaker refuses all steps if too much is due or lost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.lifecycle.decide import RULES
from gpukeeper.lifecycle.rule import Turn
from gpukeeper.model.decision import ACTING, Action, Decision, Plan, Step
from gpukeeper.model.policy import Policy
from gpukeeper.model.words import in_words

_TURNS = {rule.name: rule.turn for rule in RULES}
TREES = frozenset(name for name, turn in _TURNS.items() if turn is Turn.TREES)  # an hour has its own number of them
_COUNTED_ONCE = frozenset(rule.name for rule in RULES if rule.counted_once)


class BudgetFacts(msgspec.Struct, frozen=True):
    """What the pass saw, as far as budget and breaker care."""

    seen: int
    running: int
    before: int  # there in the pass before
    vanished: int  # of those, missing now
    acts_last_hour: int
    clock: str | None = None  # why the clock is not to be trusted
    trees_last_hour: int = 0
    broken: str | None = None  # what the last full pass found, if this one is narrow


def make_plan(
    decisions: Sequence[Decision],
    policy: Policy,
    facts: BudgetFacts,
    now: datetime,
    *,
    pass_id: int,
    allow: int | None = None,
) -> Plan:
    """`allow`: a person read the plan and allows this many once, past budget and breaker; a wrong clock stays wrong."""
    decisions, duplicates = _one_each([d for d in decisions if d.action is not Action.KEEP])
    warn = [d for d in decisions if d.action is Action.WARN]
    acting = sorted((d for d in decisions if d.action in ACTING), key=_oldest_first)
    breaker = doubted_clock(facts) or (None if allow is not None else open_breaker(acting, policy, facts))
    taken, deferred = _within_budget(acting, policy, facts) if allow is None else (acting[:allow], acting[allow:])
    steps = tuple(Step(f"{pass_id}.{number}", d) for number, d in enumerate([*warn, *taken], start=1))
    return Plan(policy.digest, now, () if breaker else steps, tuple(deferred), breaker, duplicates)


def _one_each(decisions: Sequence[Decision]) -> tuple[list[Decision], tuple[Decision, ...]]:
    """The first about each object, and the others: two steps on one object in one plan are a bug."""
    first: dict[str, Decision] = {}
    others: list[Decision] = []
    for one in decisions:
        if one.seen.ref.key in first:
            others.append(one)
        else:
            first[one.seen.ref.key] = one
    return list(first.values()), tuple(others)


def duplicate_sentences(plan: Plan) -> list[str]:
    return [
        f"two decisions about {one.seen.ref.path} in one plan: {one.action} by {one.rule} is not done. "
        "This is a bug in gpukeeper, not in your setup; please report it."
        for one in plan.duplicates
    ]


def _within_budget(
    acting: Sequence[Decision], policy: Policy, facts: BudgetFacts
) -> tuple[list[Decision], list[Decision]]:
    left = {False: room_left(policy, facts), True: max(0, policy.budget.trees - facts.trees_last_hour)}
    taken: list[Decision] = []
    deferred: list[Decision] = []
    for decision in acting:
        is_tree = decision.rule in TREES
        left[is_tree] -= 1
        (taken if left[is_tree] >= 0 else deferred).append(decision)
    return taken, deferred


def hourly_budget(decision: Decision, policy: Policy, seen: int) -> int:
    return policy.budget.trees if decision.rule in TREES else policy.budget.per_hour.of(seen)


def room_left(policy: Policy, facts: BudgetFacts) -> int:
    per_pass = policy.budget.per_pass.of(facts.seen)
    per_hour = policy.budget.per_hour.of(facts.seen) - facts.acts_last_hour
    return max(0, min(per_pass, per_hour))


def backlog_sentence(deferred: Sequence[Decision], policy: Policy, seen: int) -> str:
    """How long it takes until all of these had their turn, and what makes it shorter."""
    trees = sum(one.rule in TREES for one in deferred)
    hour, every = timedelta(hours=1), policy.schedule.every
    by_passes = policy.budget.per_pass.of(seen) * max(hour / every, 1)
    steps = min(by_passes, policy.budget.per_hour.of(seen))
    takes = max((len(deferred) - trees) / steps if steps else 0.0, trees / max(policy.budget.trees, 1)) * hour
    names = ["budget.trees"] if trees else []
    names = ["budget.per_pass and budget.per_hour", *names] if trees < len(deferred) else names
    about = in_words(max(takes, every))
    return (
        f"{len(deferred)} deferred by the budget, oldest first: about {about} with a pass every "
        f"{in_words(every)}. To take more at once: `gpukeeper apply --budget N`, or raise {' and '.join(names)}."
    )


def doubted_clock(facts: BudgetFacts) -> str | None:
    return f"{facts.clock}. Nothing was touched." if facts.clock is not None else None


def open_breaker(acting: Sequence[Decision], policy: Policy, facts: BudgetFacts) -> str | None:
    """A sentence if a place looks broken, else None. A part of it cannot look whole again by itself."""
    if facts.broken is not None:
        return facts.broken
    due = _stopped_at_once([decision for decision in acting if decision.running])
    if due > max(policy.breaker.floor, int(facts.running * policy.breaker.running)):
        return (
            f"The plan would stop {due} of {facts.running} running workloads at once; "
            f"the breaker opens above {policy.breaker.running:.0%}. Nothing was touched."
        )
    if facts.vanished > max(policy.breaker.floor, int(facts.before * policy.breaker.vanished)):
        return (
            f"{facts.vanished} of {facts.before} objects of the last pass are missing; "
            f"the breaker opens above {policy.breaker.vanished:.0%}. Nothing was touched."
        )
    return None


def _stopped_at_once(running: Sequence[Decision]) -> int:
    """What one workload left running counts once, however many processes that are: all began to be left at its end."""
    left = [decision.since for decision in running if decision.rule in _COUNTED_ONCE]
    return len(running) - len(left) + len(set(left))


def _oldest_first(decision: Decision) -> tuple[int, int, float, str]:
    """Of trees the cheapest category first, and then the oldest."""
    due = decision.due.timestamp() if decision.due else 0.0
    turn = _TURNS.get(decision.rule, Turn.WORK)
    return (turn, decision.rank if decision.rule in TREES else 0, due, decision.seen.ref.key)
