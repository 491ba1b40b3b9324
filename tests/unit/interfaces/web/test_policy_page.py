"""The policy page: values, what the last change changed, and the trial of a hypothetical workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.interfaces.terminal.watching import PolicyReloader
from tests.unit.interfaces.web.sites import POLICY, Dashboard, dashboard

TRY = "/policy/try?try=1"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def test_a_trial_shows_what_happens_when_and_why(site: Dashboard) -> None:
    page = site.get(f"{TRY}&owner=ann&running_for=6h&idle_for=20m&class=managed", "ann")
    assert page.status_code == 200
    for words in ("warn", "stop", "by class", "The workload is", "Every warning is delivered"):
        assert words in page.text, words
    assert 'value="6h"' in page.text  # the form keeps what was given


def test_a_trial_is_in_the_api_with_the_values_of_the_command(site: Dashboard) -> None:
    found = site.get("/api/v1/policy/try?owner=ann&label=team=vision&label=x=y&busy=true", "ann").json()
    assert {
        "policy",
        "at",
        "workload",
        "class",
        "class_because",
        "groups",
        "decision",
        "timeline",
        "end",
        "assumes",
    } == (set(found))
    assert found["workload"]["labels"] == {"team": "vision", "x": "y"}
    assert found["policy"]["digest"] == site.session.loaded.policy.digest


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("idle_for=soon", "idle_for: "),
        ("idle_for=2h&running_for=1h", "cannot be idle for 2h"),
        ("busy=1&idle_for=2h", "busy and idle_for cannot be combined"),
        ("class=nonsense", "the policy has no class"),
        ("platform=ray", "have workloads"),
        ("state=gone", "is not one of: running, ended, created"),
        ("outcome=odd", "is not one of"),
        ("hold=3h", "hold needs owner"),
        ("label==x", "has no key"),
        ("gpus=65", "a number from 0 to 64"),
        ("gpus=many", "is not a number of GPUs"),
        ("running_for=99999999999d", "longer than 100 years"),
    ],
)
def test_what_cannot_be_is_answered_with_a_sentence(site: Dashboard, query: str, words: str) -> None:
    page = site.get(f"{TRY}&{query}", "root")
    assert page.status_code == 400
    assert words in page.text
    assert "--" not in page.text.partition('role="alert">')[2].partition("</p>")[0]


def test_a_trial_needs_a_login(site: Dashboard) -> None:
    assert "to try the policy" in site.get(f"{TRY}&owner=ann").text
    assert "What would happen</h2>" not in site.get(f"{TRY}&owner=ann").text
    assert site.get("/api/v1/policy/try?owner=ann").status_code == 401


def test_nothing_is_written_by_a_trial(site: Dashboard) -> None:
    before = site.get("/api/v1/ledger?limit=1000", "root").json()
    site.get(f"{TRY}&owner=ann&hold=1h", "ann")
    assert site.get("/api/v1/ledger?limit=1000", "root").json() == before


def test_the_page_shows_what_the_last_change_changed(site: Dashboard) -> None:
    file = Path(site.session.loaded.source)
    reloader = PolicyReloader(site.session, file, lambda words: None)
    assert "Not recorded yet" in site.get("/policy", "root").text
    site.call(reloader.refresh)
    assert "No change since" in site.get("/policy", "root").text
    file.write_text(POLICY.replace("enforce", "plan") + "notify: {admins: [{command: [/bin/secret-pager]}]}\n")
    site.call(reloader.refresh)
    for person in ("ann", "root"):
        page = site.get("/policy", person).text
        section = page.partition("Last change</h2>")[2].partition("</section>")[0]
        assert "<td>enforce</td><td>plan</td>" in section, person
        assert ("notify" in section) == (person == "root")
        assert ("shown to admins only" in section) == (person == "ann")
        assert "secret-pager" not in section, "addresses are not recorded"
    (line,) = site.get("/api/v1/ledger?type=policy", "root").json()["lines"]
    assert {"setting": "mode", "before": "enforce", "after": "plan"} in line["changes"]
    assert site.get("/api/v1/policy", "ann").json()["change"]["hidden"] > 0
    assert site.get("/api/v1/policy").json()["change"] is None
    assert "Last change" not in site.get("/policy").text
    assert "mode: enforce -&gt; plan" in site.get("/history?type=policy", "root").text


def test_a_change_while_no_daemon_ran_is_noticed(site: Dashboard) -> None:
    file = Path(site.session.loaded.source)
    site.call(PolicyReloader(site.session, file, lambda words: None).refresh)
    file.write_text(POLICY + "classes: {managed: {idle: 47m}}\n")
    site.call(PolicyReloader(site.session, file, lambda words: None).refresh)
    page = site.get("/policy", "ann").text
    assert "classes.managed.idle" in page
    assert "<td>47m</td>" in page
    site.call(PolicyReloader(site.session, file, lambda words: None).refresh)
    assert len(site.get("/api/v1/ledger?type=policy", "root").json()["lines"]) == 1


def test_admins_see_that_a_policy_that_acts_has_no_backtest_on_record(site: Dashboard) -> None:
    assert site.session.loaded.policy.mode == "enforce"
    words = "what this policy would have done to recorded work is not on record here"
    assert words in site.get("/policy", "root").text
    assert words not in site.get("/policy", "ann").text
