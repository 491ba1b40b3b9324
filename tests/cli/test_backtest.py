"""`gpukeeper backtest` and `gpukeeper advise` on a synthetic trace."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpukeeper.__main__ import app
from gpukeeper.backtest.comparison import Where, compare
from gpukeeper.config.load import load_policy
from gpukeeper.interfaces.cli.backtest import ReplayOptions, where_of
from gpukeeper.ledger.files import ledger_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.meta import BacktestRecord, newest_backtest
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.model.errors import UsageError
from gpukeeper.traces.synthetic import SyntheticTrace
from tests.docs.markdown import ROOT
from tests.unit.backtest.traces import HOUR

pytestmark = pytest.mark.slow

TRACE = "synthetic:1/24/9"
TRUSTED = ("--trust-cluster",)  # root is asked for it
MANY = "window=" + "/".join(f"{minutes}m" for minutes in range(1, 301))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path / "state"))


def test_the_answer_as_tables_and_as_a_document_and_as_a_page(tmp_path: Path) -> None:
    shown = run("backtest", TRACE, "--workers", 1, "--sweep", "window=30m/5h")
    assert shown.exit_code == 0, shown.output
    for words in ("24 runs", "regretted:", "By class", "By owner", "What would have been stopped", "idle 5h"):
        assert words in shown.stdout
    assert re.search(r"won: +[\d,]+ GPU-hours; [\d,]+ were held after the last use", shown.stdout), "no share of it"
    assert "AFTER LAST USE" in shown.stdout
    page = tmp_path / "b.html"
    made = run("backtest", TRACE, "--workers", 1, "--sweep", "window=30m/5h", "--html", page, "--json")
    found = json.loads(made.stdout)
    assert found["schema"] == "gpukeeper/backtest/v1"
    assert found["total"]["runs"] == 24
    assert found["total"]["stops"] == len(found["stops"]) > 0
    assert [row["words"] for row in found["curve"]] == ["this policy", "idle 30m", "idle 5h"]
    text = page.read_text()
    assert "GPU-hours won against regret" in text
    assert "<script" not in text
    assert all(one["workload"] in text for one in found["stops"])


def test_what_the_budget_defers_is_reported(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("preset: ds01\nbudget: {per_pass: 1, per_hour: 1}\nscope: {docker: {}}\nmode: plan\n")
    shown = run("backtest", "synthetic:1/48/9", "--workers", 1, "--policy", policy)
    assert "deferred:" in shown.stdout, shown.output
    assert "budget, breaker" in shown.stdout
    found = json.loads(run("backtest", "synthetic:1/48/9", "--workers", 1, "--policy", policy, "--json").stdout)
    assert found["limits"]["later"] > 0
    assert len({one["at"] for one in found["stops"]}) == len(found["stops"]), "one in a pass"


def test_high_demand_is_replayed_if_the_number_of_gpus_is_known(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("preset: ds01\nscope: {docker: {}}\n")
    asked = ("backtest", TRACE, "--workers", 1, "--policy", policy, "--json")
    without, scarce = (json.loads(run(*asked, *more).stdout) for more in ((), ("--gpus", 1)))
    assert not without["trace"]["demand_known"]
    assert any("scarce" in words for words in without["notes"])
    assert scarce["trace"]["demand_known"]
    assert any("while GPUs are scarce" in one["reason"] for one in scarce["stops"])
    assert not any("while GPUs are scarce" in one["reason"] for one in without["stops"])


def test_a_run_is_explained_by_the_pass_of_that_time_also_if_nothing_could_be_due_in_it() -> None:
    shown = run("backtest", "synthetic:1", "--workload", "work-0002", "--at", "2026-01-13T07:02")
    assert shown.stdout.startswith("work-0002 at 2026-01-13 07:00: keep"), shown.output


def test_two_processes_give_the_very_same_as_one() -> None:
    trace, policy = SyntheticTrace(7, 20, 5), load_policy(None).policy
    variants = (GIVEN, Variant(5 * HOUR, 2.0))
    one = compare(trace, policy, variants, Judging())
    assert compare(trace, policy, variants, Judging(), Where(2)) == one
    assert [run.name for run in one[GIVEN]] == [run.name for run in trace.runs()]


def test_an_interrupted_backtest_is_continued_from_its_file(tmp_path: Path) -> None:
    first = run("backtest", TRACE, "--workers", 1, "--json", "--resume", tmp_path / "kept")
    assert first.exit_code == 0, first.output
    again = run("backtest", TRACE, "--workers", 1, "--json", "--resume", tmp_path / "kept")
    assert (again.exit_code, again.stdout) == (0, first.stdout)


def test_one_run_is_explained(tmp_path: Path) -> None:
    stopped = json.loads(run("backtest", TRACE, "--workers", 1, "--json").stdout)["stops"][0]
    shown = run("backtest", TRACE, "--workload", stopped["workload"])
    assert shown.exit_code == 0, shown.output
    assert "warn" in shown.stdout
    assert stopped["at"][:10] in shown.stdout
    course = json.loads(run("backtest", TRACE, "--workload", stopped["workload"], "--json").stdout)
    last = course["decisions"][-1]
    assert (last["at"], last["rule"], last["reason"]) == (stopped["at"], stopped["rule"], stopped["reason"])
    then = run("backtest", TRACE, "--workload", stopped["workload"], "--at", stopped["at"], "--json")
    assert json.loads(then.stdout)["answers"]
    page = tmp_path / "run.html"
    assert run("backtest", TRACE, "--workload", stopped["workload"], "--html", page).exit_code == 0
    text = page.read_text()
    assert 'class="stop"' in text
    assert 'class="use"' in text
    assert stopped["reason"] in text
    before = run("backtest", TRACE, "--workload", stopped["workload"], "--at", "2020-01-01")
    assert before.exit_code != 0


def test_a_short_trace_gives_no_advice_and_a_longer_one_a_policy(tmp_path: Path) -> None:
    short = run("advise", TRACE, "--workers", 1)
    assert short.exit_code == 3
    assert "too short" in short.output
    file = tmp_path / "advice.yaml"
    words = ("--workers", 1, "--sweep", "window=30m", "--horizon", "6h", "--regret", "90%", "--out", file)
    made = run("advise", "synthetic:3/150/3", *words, "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    advised = {one["class"]: one["window"] for one in found["classes"] if one["window"] is not None}
    assert advised
    kinds = [one["kind"] for one in found["choice"]["tried"]]
    assert kinds == ["plain", "signals", "owners", "hours"]
    assert [one["kind"] for one in found["choice"]["tried"] if not one["why"]] == [found["kind"]]
    assert all(f"# - {kind} (" in file.read_text() for kind in kinds)
    shown = run("advise", "synthetic:3/150/3", *words)
    assert shown.exit_code == 0, shown.output
    assert all(one["words"] in shown.stdout for one in found["choice"]["tried"])
    loaded = load_policy(file).policy
    assert loaded.mode == "plan"
    assert all(loaded.classes[name].idle == HOUR / 2 for name in advised)
    assert all(f'  "{name}": ' in file.read_text() for name in advised)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("backtest", "nonsense"), "not a trace"),
        (("backtest", "synthetic:x"), "needs a seed"),
        (("backtest", TRACE, "--sweep", "speed=3"), "write window=15m..6h"),
        (("backtest", TRACE, "--sweep", "window=6h..15m"), "Write the smaller one first"),
        (("backtest", TRACE, "--sweep", "window=5"), "is not a duration"),
        (("backtest", TRACE, "--at", "2026-01-01"), "--at needs --workload"),
        (("backtest", TRACE, "--workload", "nobody"), "has no run"),
        (("backtest", "synthetic:1", "--workload", "work-0003", "--at", "2030-01-01T00:00"), "Name a time before that"),
        (("backtest", TRACE, "--horizon", "soon"), "--horizon"),
        (("backtest", TRACE, "--gpus", "0"), "--gpus"),
        (("backtest", TRACE, "--html", "no/where/b.html"), "there is no directory no/where. Nothing was replayed"),
        (("advise", TRACE, "--regret", "2"), "--regret"),
        (("advise", TRACE, "--regret", "200%"), "more than all stops"),
        (("backtest", TRACE, "--on", "auto", *TRUSTED), "needs Ray in the Python"),
        (("backtest", TRACE, "--on", "somewhere", *TRUSTED), "write auto, HOST:PORT"),
        (("advise", TRACE, "--on", "ray://:99999", *TRUSTED), "write auto, HOST:PORT"),
        (("backtest", TRACE, "--trust-cluster"), "--trust-cluster needs --on"),
        (("backtest", TRACE, "--record"), "--record needs recorded work"),
        (("backtest", "ledger", "--record", "--sweep", MANY), "keeps 256 combinations at most; --sweep has 300"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], said: str) -> None:
    found = run(*words)
    assert found.exit_code != 0
    assert said in f"{found.output} {found.exception}"


@pytest.mark.skipif(os.geteuid() != 0, reason="about what root is asked for")
@pytest.mark.parametrize("verb", ["backtest", "advise"])
def test_root_says_that_it_trusts_the_cluster(verb: str) -> None:
    found = run(verb, TRACE, "--on", "127.0.0.1:6379")
    assert isinstance(found.exception, UsageError), found.output
    assert "could run code as root here" in str(found.exception)


def test_an_ordinary_user_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert where_of(ReplayOptions(on="auto")).on == "auto"


UNREACHED = "warnings: {require_delivery: false}\n"  # otherwise owners with only terminals are warned about, too


def test_a_policy_that_acts_is_warned_about_until_its_backtest_is_on_record(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("mode: enforce\nscope: {docker: {}}\nbacktest: {regret_max: 100%}\n" + UNREACHED)
    assert "is not on record here" in run("policy", "check", policy).stderr
    dry = tmp_path / "dry.yaml"
    dry.write_text("mode: plan\nscope: {docker: {}}\n" + UNREACHED)
    assert run("policy", "check", dry).stderr == ""
    table = ROOT / "examples/traces/duty-cycle.csv"
    done = run("backtest", table, "--mapping", table.with_suffix(".yaml"), "--policy", dry, "--workers", 1, "--record")
    assert done.exit_code == 0, done.output
    assert run("policy", "check", policy).stderr == "", "the same policy in another mode was backtested"
    policy.write_text("mode: enforce\nscope: {docker: {}}\nactivity: {gpu: 3%}\n")
    assert "is not on record here" in run("policy", "check", policy).stderr, "another policy"


def test_a_recorded_sweep_is_in_the_ledger_and_a_record_without_one_replaces_it() -> None:
    table = ROOT / "examples/traces/duty-cycle.csv"
    words = ("backtest", table, "--mapping", table.with_suffix(".yaml"), "--workers", 1)
    swept = ("--sweep", "window=10m/2h,threshold=5%")
    assert run(*words, *swept, "--record", "--json").exit_code == 0
    found = json.loads(run(*words, *swept, "--json").stdout)
    record = recorded()
    assert record.horizon == 72 * HOUR
    assert [(one.window, one.threshold) for one in record.points] == [(None, None), (HOUR / 6, 5.0), (2 * HOUR, 5.0)]
    for point, row in zip(record.points, found["curve"], strict=True):
        assert (point.stops, point.won) == (row["tally"]["stops"], row["tally"]["won"])
    assert run(*words, "--record").exit_code == 0
    assert recorded().points == ()


def recorded() -> BacktestRecord:
    ledger = open_ledger(ledger_path(), write=False)
    try:
        found = asyncio.run(newest_backtest(ledger))
    finally:
        ledger.close()
    assert found is not None
    return found
