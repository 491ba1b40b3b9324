"""The page of one workload: its timeline with everything drawn in, verdicts, evidence, and buttons by rights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.interfaces.link import Credentials, Person
from gpukeeper.interfaces.web.app import said
from gpukeeper.interfaces.web.security import Visitor
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import Captured, Decided, Held, Released, WarningSent
from gpukeeper.model.series import Sample, Signal
from gpukeeper.model.subject import Hold
from tests.unit.interfaces.web.sites import Dashboard, dashboard

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def recorded(site: Dashboard) -> None:
    """Two hours of signals; a hold of two days ago that lasts, one that was released; a warning and a decision."""
    now = site.session.keeper.clock.now()
    (ref,) = site.session.keeper.live.named("train")
    about: dict[str, Any] = {"ref": ref, "owner": "ann"}
    long_ago = Hold("ann", now - 48 * HOUR, now + 9 * HOUR, "paper")
    short = Hold("bob", now - 3 * HOUR, now + 9 * HOUR, "demo")
    lines = [
        Held(at=long_ago.at, by="ann", hold=long_ago, **about),
        Held(at=short.at, by="bob", hold=short, **about),
        Released(at=now - 2 * HOUR, by="bob", own=True, **about),
        WarningSent(
            at=now - HOUR,
            rule="idle",
            stage=1,
            incarnation="1",
            limit=HOUR,
            delivered=False,
            channel="",
            message="it is idle",
            **about,
        ),
        Decided(at=now - HOUR, action=Action.STOP, rule="idle", verdict=Verdict.DUE, reason="idle", **about),
        Captured(at=now - HOUR, step="s1", evidence="20260310/train-s1", **about),
    ]
    signals = ((Signal.GPU, "GPU-1", 40.0), (Signal.CPU, "", 35.0), (Signal.NETWORK, "", 2048.0))
    samples = [
        Sample(ref.key, signal, device, now - minute * MINUTE, value)
        for minute in range(120)
        for signal, device, value in signals
    ]

    async def write() -> None:
        await site.session.keeper.ledger.append(lines)
        await site.session.signals.add(samples)

    site.call(write)


def test_idle_window_warnings_holds_and_decisions_are_drawn_and_described(site: Dashboard) -> None:
    recorded(site)
    page = site.get(f"/workload/{site.workload('train')}", "ann").text
    chart = page.partition('<svg class="timeline"')[2].partition("</svg>")[0]
    for mark in ('class="window"', "m-warning", "m-decision", "m-hold", "m-release", 'class="held"', "<polyline"):
        assert mark in chart, mark
    assert chart.count('class="held"') == 2, "a hold that began before the picture is drawn while it lasts"
    described = re.findall(r'class="timeline"[^>]*aria-label="([^"]+)"', page)[0]
    for words in (
        "1 GPU measured, mean 40 %, most 40 %",
        "idle window: the last",
        "1 warning",
        "2 holds",
        "2 decisions",
    ):
        assert words in described, words
    events = page.partition("<details>")[2].partition("</details>")[0]
    for words in ("warning 1, not delivered", "held by ann", "released by bob", "stop by rule idle"):
        assert words in events, words
    assert "The idle rule judges the last" in page


def test_other_signals_have_a_picture_each_with_its_own_scale(site: Dashboard) -> None:
    recorded(site)
    page = site.get(f"/workload/{site.workload('train')}", "ann").text
    assert "CPU: at most 35 % of a core" in page
    assert "Network: at most 2.0 KiB/s" in page
    assert page.count("timeline small") == 2


def test_what_was_not_measured_says_so(site: Dashboard) -> None:
    page = site.get(f"/workload/{site.workload('train')}", "ann").text
    assert "Its use was not measured in this time" in page
    assert "since" in page
    assert "not measured" in re.findall(r'class="timeline"[^>]*aria-label="([^"]+)"', page)[0]


def test_the_evidence_says_what_was_seen_and_when(site: Dashboard) -> None:
    recorded(site)
    page = site.get(f"/workload/{site.workload('train')}", "ann").text
    evidence = page.partition("Evidence</h2>")[2].partition("</section>")[0]
    for words in (
        "running, incarnation",
        "gpu GPU-1",
        "at most 40 %",
        "idle, stage 1, not delivered",
        "20260310/train-s1",
    ):
        assert words in evidence, words
    assert evidence.count("<time ") >= 5
    verdicts = page.partition("Each rule's verdict</h2>")[2].partition("</section>")[0]
    assert "These rules do not apply" in verdicts


def test_facts_and_history_have_their_times_in_the_zone_of_the_reader(site: Dashboard) -> None:
    """A hold until 07:24 was shown as until 06:24, beside times of the reader's zone."""
    recorded(site)
    page = site.get(f"/workload/{site.workload('train')}", "ann").text
    facts = page.partition("Facts</h2>")[2].partition("</section>")[0]
    history = page.partition("History</h2>")[2].partition("</section>")[0]
    assert 'ann, until <time datetime="' in facts
    assert "idle, stage 1, not delivered, <time " in facts
    assert 'by ann until <time datetime="' in history


def test_others_see_neither_evidence_nor_signals_nor_buttons(site: Dashboard) -> None:
    recorded(site)
    for person in ("", "bob"):
        page = site.get(f"/workload/{site.workload('train')}", person).text
        for words in (
            "Evidence</h2>",
            'class="timeline',
            "CPU:",
            "<h2>Actions",
            "paper",
            "Facts</h2>",
            "History</h2>",
        ):
            assert words not in page, (person, words)
    assert "<h2>Actions" in site.get(f"/workload/{site.workload('train')}", "root").text


def test_a_claimed_owner_has_no_buttons_to_stop() -> None:
    def visitor(name: str, *, admin: bool = False) -> Visitor:
        person = Person(name=name, admin=admin)
        return Visitor(person=person, credentials=Credentials(), by_cookie=True, csrf="")

    assert visitor("ann").may_change("ann")
    assert not visitor("ann").may_stop("ann", verified=False)
    assert visitor("ann").may_stop("ann", verified=True)
    assert not visitor("bob").may_stop("ann", verified=True)
    assert visitor("root", admin=True).may_stop("ann", verified=False)
    assert not visitor("").may_stop("", verified=True)


def test_a_workload_that_is_gone_is_a_sentence(site: Dashboard) -> None:
    reply = site.get("/workload/000000000000000000", "ann")
    assert reply.status_code == 404
    assert "search for it in the history" in reply.text


def test_a_link_of_a_message_leads_to_the_page_or_to_the_history_of_what_is_gone(site: Dashboard) -> None:
    (uid,) = [ref.uid for ref in site.session.keeper.live.named("train")]
    found = site.get(f"/find?uid={uid}&machine=other", "ann", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, f"/workload/{site.workload('train')}")
    gone = site.get("/find?uid=0:1%26&machine=other", "ann", follow_redirects=False)
    assert (gone.status_code, gone.headers["location"]) == (303, "/history?workload=0%3A1%26")
    assert site.get("/find", "ann").status_code == 400


def test_the_link_to_removed_work_says_what_happened_and_whether_it_can_be_restored(site: Dashboard) -> None:
    (uid,) = [ref.uid for ref in site.session.keeper.live.named("eval")]
    assert "was removed by gpukeeper" not in site.get(f"/history?workload={uid}", "bob").text
    site.call(lambda: reclaim(site.session.keeper, site.session.keeper.platforms[0], site.session.book))
    found = site.get(f"/history?workload={uid}", "bob")  # where the link leads
    assert "docker/node-1/eval was removed by gpukeeper at <time " in found.text
    assert "Restore it: gpukeeper restore docker/node-1/eval (until <time " in found.text
    assert "was removed by gpukeeper" not in site.get(f"/history?workload={uid}", "ann").text


def test_times_in_sentences_are_shown_in_the_zone_of_the_reader() -> None:
    assert str(said("held until 2026-03-02 09:30 UTC (in <1h>)")) == (
        'held until <time datetime="2026-03-02T09:30:00Z" data-mode="time">2026-03-02 09:30 UTC</time> (in &lt;1h&gt;)'
    )
    assert str(said("of 2026-99-99 25:61 UTC")) == "of 2026-99-99 25:61 UTC"


def test_a_page_names_the_time_of_the_server_for_countdowns(site: Dashboard) -> None:
    """With a clock that is 20 minutes fast a browser showed 'now' for what comes in 2 minutes."""
    assert '<body data-now="20' in site.get("/", "ann").text
