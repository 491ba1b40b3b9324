"""What came back, and what was undone within a day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Noticed, Restored
from gpukeeper.model.policy import Prices
from gpukeeper.model.subject import Ref, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.usage import month
from gpukeeper.views.usage_report import ReportQuery, Savings, SavingsSums, not_covered

NOW = datetime(2026, 11, 16, 9, tzinfo=UTC)
HOUR = timedelta(hours=1)
EUR = Prices(currency="EUR", per_gpu_hour={"H100": 2.0, "A100": 1.0})


def ref(name: str, place: str = "node-1") -> Ref:
    return Ref("docker", place, "container", name, f"uid-{name}")


def closed(name: str = "train", after: float = 0, **more: Any) -> Closed:
    facts: dict[str, Any] = {
        "at": NOW + after * HOUR,
        "ref": ref(name),
        "owner": "ann",
        "step": f"{name}-{after}",
        "action": Action.STOP,
        "rule": "idle",
        "result": Result.RECLAIMED,
        "reason": "",
        "gpus_back": 2,
        "gpu_hours": 6.0,
        "bytes_back": 10,
    }
    return Closed(**(facts | more))


def sums(*lines: Any, models: dict[str, set[str]] | None = None) -> SavingsSums:
    found = SavingsSums(NOW - HOUR, NOW + 24 * HOUR, UTC, EUR, models or {"node-1": {"H100"}})
    for line in lines:
        found.add(line)
    return found


def test_only_verified_outcomes_within_the_span_count_and_each_step_once() -> None:
    found = sums(
        closed("early", -2),
        closed(),
        closed(),  # of a step that was looked at again after a crash
        closed("failed", 1, result=Result.STILL_THERE),
        closed("eval", 2, owner="bob", rule="retention", action=Action.REMOVE, gpu_hours=Unknown("?")),
        closed("late", 24),
    ).view()
    assert found.total == Savings(steps=2, gpus=4, gpu_hours=6.0, bytes=20, unmeasured=1, money=12.0)
    assert [(row.name, row.savings.steps) for row in found.rules] == [("idle", 1), ("retention", 1)]
    assert [row.name for row in found.owners] == ["ann", "bob"]
    assert [row.name for row in found.days] == ["2026-11-16"]


def test_money_needs_one_price_for_the_place() -> None:
    assert sums(closed(), models={"node-1": {"H100", "A100"}}).view().total.money == 0.0
    assert sums(closed(), models={"node-1": {"H100", "A100"}}).view().total.unpriced == 6.0
    assert sums(closed(), models={"node-2": {"H100"}}).view().total.unpriced == 6.0


def test_work_that_is_restored_or_restarted_within_a_day_is_regret() -> None:
    found = sums(
        closed("a"),
        closed("b"),
        closed("c"),
        closed("d"),
        Restored(at=NOW + HOUR, ref=ref("a"), evidence="", result="restored"),
        Noticed(at=NOW + 2 * HOUR, ref=ref("b"), incarnation="2", state=State.RUNNING),
        Restored(at=NOW + 3 * HOUR, ref=ref("c"), evidence="", result="the image is gone"),
        Noticed(at=NOW + 3 * HOUR, ref=ref("c"), incarnation="1", state=State.ENDED),
        Noticed(at=NOW + 25 * HOUR, ref=ref("d"), incarnation="2", state=State.RUNNING),
    ).view()
    assert (found.ended, found.regretted) == (4, 2)
    assert [(one.path, one.how, one.after) for one in found.regrets] == [
        (ref("a").path, "restored", HOUR),
        (ref("b").path, "restarted", 2 * HOUR),
    ]


def test_a_person_sees_their_own_and_the_totals() -> None:
    found = sums(closed(), closed("eval", owner="bob", rule="retention"))
    seen = found.view("ann")
    assert [row.name for row in seen.owners] == ["ann", "others"]
    assert [row.name for row in seen.rules] == ["idle", "others"]
    assert seen.total == found.view().total
    assert found.of_owner("bob").total.steps == found.of_owner("bob").ended == 1


def test_refused_and_failed_steps_are_counted_by_owner_rule_and_result() -> None:
    refused: dict[str, Any] = {"result": Result.REFUSED, "action": Action.REMOVE, "rule": "retention"}
    lines = (
        closed("a", 0, **refused),
        closed("a", 1, **refused),
        closed("a", 2, rule="retention", action=Action.REMOVE),
        closed("b", 1, **refused),
        closed("c", 1, owner="bob", result=Result.UNKNOWN),
        closed("w", 1, result=Result.UNDELIVERED, action=Action.WARN),
        closed("d", 1, result=Result.CHANGED),
        closed("late", 24, **refused),
        closed("mine", 1, rule="request", requested_by="eve"),
    )
    found = sums(*lines).view()
    rows = [(one.owner, one.rule, one.result, one.attempts, one.objects, one.open) for one in found.failures]
    assert rows == [("ann", "retention", "refused", 3, 2, 1), ("bob", "idle", "unknown", 1, 1, 1)]
    assert found.failed == 4
    assert {row.name: row.savings.steps for row in found.causes} == {"gpukeeper": 1, "eve": 1}
    own = sums(*lines).view("bob")
    assert ([one.owner for one in own.failures], own.failed) == (["bob"], 4)
    assert (sums(*lines).of_owner("bob").failed, {row.name for row in own.causes}) == (1, {"others"})


def test_a_month_that_the_ledger_does_not_cover_says_so() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    begin, end = month("2026-10", berlin)
    assert (begin.astimezone(UTC), end - begin.astimezone(UTC)) == (
        datetime(2026, 9, 30, 22, tzinfo=UTC),
        31 * 24 * HOUR + HOUR,  # clocks go back in it
    )
    query = ReportQuery(since=begin.astimezone(UTC), until=end.astimezone(UTC))
    assert not_covered(query, begin) == []
    (late,) = not_covered(query, datetime(2026, 10, 1, tzinfo=UTC))
    assert late.startswith("The ledger begins at 2026-10-01 00:00 UTC")
    assert not_covered(query, None) == ["The ledger is empty: what was given back in this time is not known."]
