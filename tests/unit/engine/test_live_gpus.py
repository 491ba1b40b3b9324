"""What is kept for metrics: GPUs and their holders alone, without the cost of a dashboard."""

from __future__ import annotations

import msgspec

from gpukeeper.engine.live import coming_of
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.view import read_subject
from gpukeeper.lifecycle.decide import decide
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import Held
from gpukeeper.model.subject import Hold
from gpukeeper.views.live_rows import workload_line
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual


@virtual
async def test_for_metrics_only_what_has_a_gpu_is_kept_and_nothing_is_forecast(b: Harness) -> None:
    live = b.keeper.live
    live.enabled, live.gpus_only = True, True
    b.running("train")
    b.running("web", devices=())
    report = await reclaim(b.keeper, b.platform, b.book, act=False)
    (place,) = live.places.values()
    assert [fact.view.subject.ref.name for fact in place.facts.values()] == ["train"]
    assert all(fact.ahead == () for fact in place.facts.values())
    assert sum(report.survey.counts.decided.values()) == 2


@virtual
async def test_the_version_rises_with_every_pass_and_nothing_is_kept_unless_wanted(b: Harness) -> None:
    b.running("train")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    assert (b.keeper.live.version, b.keeper.live.places) == (0, {})
    b.keeper.live.enabled = True
    await reclaim(b.keeper, b.platform, b.book, act=False)
    before = b.keeper.live.version
    await reclaim(b.keeper, b.platform, b.book, act=False)
    assert b.keeper.live.version > before > 0


@virtual
async def test_a_step_that_failed_is_forecast_for_when_it_is_tried_again(b: Harness) -> None:
    """Pages said 'at the next pass' for as long as the engine waited."""
    b.keeper.live.enabled = True
    thing = b.ended("eval", ago=30 * DAY)
    view = (await read_subject(b.keeper, b.book, thing.ref)).view  # type: ignore[union-attr]
    now = b.now()
    decision = decide(view, b.book, now)
    assert coming_of(view, decision, b.book, now, tuple(Action))[0].at == now
    waits = msgspec.structs.replace(decision, action=Action.KEEP, verdict=Verdict.REPORT, due=now + 20 * MINUTE)
    assert coming_of(view, waits, b.book, now, tuple(Action))[0].at == now + 20 * MINUTE


@virtual
async def test_what_ended_is_shown_with_its_removal(b: Harness) -> None:
    """Rows said for a whole day that it will be checked again."""
    live = b.keeper.live
    live.enabled = True
    b.ended("eval", ago=MINUTE)
    await reclaim(b.keeper, b.platform, b.book, act=False)
    for _ in live.forecast(b.book, b.now()):
        pass
    ((fact,),) = (place.facts.values() for place in live.places.values())
    (step,) = workload_line(fact, "m", b.now()).steps
    assert (step.action, step.at, step.rule) == (Action.REMOVE, fact.decision.due, "retention")
    assert fact.decision.verdict is Verdict.WAIT
    assert live.unknown_history() == [], "it has no use to recall"


@virtual
async def test_what_ended_and_is_held_is_shown_with_its_removal_after_that(b: Harness) -> None:
    live = b.keeper.live
    live.enabled = True
    thing = b.ended("eval", ago=MINUTE)
    hold = Hold("ann", b.now(), b.now() + 9 * HOUR)
    await b.ledger.append([Held(at=b.now(), ref=thing.ref, by="ann", hold=hold)])
    await reclaim(b.keeper, b.platform, b.book, act=False)
    for _ in live.forecast(b.book, b.now()):
        pass
    ((fact,),) = (place.facts.values() for place in live.places.values())
    (step,) = workload_line(fact, "m", b.now()).steps
    assert (fact.decision.rule, step.action, step.at) == ("hold", Action.REMOVE, hold.until)


@virtual
async def test_a_whole_pass_that_ended_midway_does_not_replace_what_a_narrow_one_finds(b: Harness) -> None:
    """Its incomplete set became the facts of the place at the end of the next narrow pass."""
    live = b.keeper.live
    live.enabled = True
    train, other = b.running("train"), b.running("other")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    live.begin(b.platform, whole=True)  # and never finished: the pass ended by a bug
    await reclaim(b.keeper, b.platform, b.book, only=[train.ref], act=False)
    (place,) = live.places.values()
    assert set(place.facts) == {train.ref.key, other.ref.key}
