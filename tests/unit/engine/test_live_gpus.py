"""What is kept for metrics: GPUs and their holders alone, without the cost of a dashboard."""

from __future__ import annotations

from gpukeeper.engine.reclaim import reclaim
from tests.unit.engine.harness import Harness, virtual


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
