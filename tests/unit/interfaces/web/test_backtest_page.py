"""The backtest page: from the ledger, for admins; a table of all limits, the curve, and what to run where none is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec import structs

from gpukeeper.config.sections import deciding_digest
from gpukeeper.ledger.meta import BacktestPoint, BacktestRecord, record_backtest
from tests.unit.interfaces.web.sites import HOUR, Dashboard, dashboard
from tests.unit.ledger.test_backtest_record import RECORD

COMMAND = "gpukeeper backtest ledger --sweep window=15m..6h --record"


def point(window: timedelta | None, threshold: float | None, regrets: int, won: float) -> BacktestPoint:
    return BacktestPoint(
        window=window,
        threshold=threshold,
        stops=20,
        unused=20 - regrets,
        regrets=regrets,
        censored=0,
        unknowable=0,
        won=won,
    )


SWEEP = (
    point(None, None, 2, 100.0),
    point(HOUR, 2.0, 5, 900.0),
    point(2 * HOUR, 2.0, 1, 310.0),
    point(HOUR, 5.0, 5, 950.0),
    point(2 * HOUR, 5.0, 2, 320.0),
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def record(site: Dashboard, points: tuple[BacktestPoint, ...], digest: str = "") -> None:
    line: BacktestRecord = structs.replace(RECORD, points=points)
    name = digest or deciding_digest(site.session.loaded.policy)
    site.call(lambda: record_backtest(site.session.ledger, name, line))


def test_only_admins_read_it_and_find_it_in_the_navigation(site: Dashboard) -> None:
    record(site, SWEEP)
    assert site.get("/backtest", "root").status_code == 200
    refused = site.get("/backtest", "ann")
    assert refused.status_code == 403
    assert "shown to admins only" in refused.text
    assert "GPU-hours" not in refused.text
    anonymous = site.get("/backtest", follow_redirects=False)
    assert (anonymous.status_code, anonymous.headers["location"]) == (303, "/login")
    link = 'href="/backtest"'
    assert link in site.get("/policy", "root").text
    assert link not in site.get("/policy", "ann").text
    assert link not in site.get("/policy").text


def test_without_a_record_it_says_what_to_run(site: Dashboard) -> None:
    page = site.get("/backtest", "root").text
    assert "No backtest is on record here" in page
    assert COMMAND in page
    assert "backtest.js" not in page


def test_a_record_without_a_comparison_says_what_to_run(site: Dashboard) -> None:
    record(site, ())
    page = site.get("/backtest", "root").text
    assert "would have stopped 14 of 120 workloads" in page
    assert COMMAND in page
    assert "<svg" not in page


def test_every_limit_is_a_row_and_a_point(site: Dashboard) -> None:
    record(site, SWEEP)
    page = site.get("/backtest", "root").text
    for key in ("3600/2", "7200/2", "3600/5", "7200/5"):
        assert f'<tr data-point="{key}"' in page
        assert f'class="dot" data-point="{key}"' in page
    assert "An idle limit of 1h, with GPU use below 5% counted as idle, would have stopped 20 of 120" in page
    assert "1 of 20 (5.0%)" in page
    assert '<option value="2" selected>below 2%</option>' in page
    assert 'max="1"' in page
    assert 'class="today"' in page
    likely = page.partition('<span class="chip">best seen, not proven</span>')[0].rpartition("<tr")[2]
    assert 'data-point="7200/2"' in likely
    assert "1 of 20 known stops were used again, which can mean a regret of up to 24%" in page
    assert 'class="best"' not in page
    assert "of another policy" not in page
    assert "style=" not in page
    assert re.findall(r"<script(?![^>]*src=)", page) == []


def test_the_best_is_proven_by_enough_stops(site: Dashboard) -> None:
    many = [structs.replace(one, stops=500, unused=500 - one.regrets) for one in SWEEP]
    record(site, (many[0], structs.replace(many[1], regrets=250, unused=250), *many[2:]))
    page = site.get("/backtest", "root").text
    best = page.partition('<span class="chip">best</span>')[0].rpartition("<tr")[2]
    assert 'data-point="3600/5"' in best
    assert "Best within <code>backtest.regret_max</code> (5%): <b>idle 1h, GPU below 5%</b>" in page
    assert "with 95 % confidence (at most 2.3% here)" in page
    assert "not proven" not in page
    assert page.count('class="best"') == 1


def test_the_record_of_another_policy_is_shown_as_such(site: Dashboard) -> None:
    record(site, SWEEP, digest="f" * 64)
    page = site.get("/backtest", "root").text
    assert "The policy in effect has no backtest on record" in page
    assert "idle 2h, GPU below 2%" in page


def test_one_threshold_needs_no_choice_of_it_and_one_window_no_slider(site: Dashboard) -> None:
    record(site, (SWEEP[0], point(HOUR, None, 0, 5.0), point(2 * HOUR, None, 0, 3.0)))
    page = site.get("/backtest", "root").text
    assert "limit-threshold" not in page
    assert 'type="range"' in page
    record(site, (SWEEP[0], point(None, 2.0, 0, 5.0), point(None, 5.0, 0, 3.0)))
    page = site.get("/backtest", "root").text
    assert "limit-threshold" in page
    assert 'type="range"' not in page


def test_points_without_a_known_end_give_no_picture(site: Dashboard) -> None:
    record(site, tuple(structs.replace(one, unused=0, regrets=0, censored=20) for one in SWEEP))
    page = site.get("/backtest", "root").text
    assert "has a known end" in page
    assert "<svg" not in page
    assert "None of these policies stays within" in page


def test_reading_changes_nothing(site: Dashboard) -> None:
    record(site, SWEEP)
    before = site.get("/api/v1/ledger?limit=1000", "root").json()
    site.get("/backtest", "root")
    assert site.get("/api/v1/ledger?limit=1000", "root").json() == before
    assert site.post("/backtest", "root").status_code == 405
