"""One data file, one case: given this view, policy and time, which decision, and why.

A case names what its subject is `like` (defaults.json) and only says what differs. `-2h` and `+30m` are instants
relative to now, `30m` is a span, `{"why": …}` is a fact that is not known. Series are runs of one-minute buckets,
newest last: `0*58 40 0`; what is running is quiet for 90 minutes by every sign unless the case says otherwise.
`expect` is compared field by field: `reason` and `complaint` are fragments, `answers` gives single rules' verdicts.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle.decide import RULES, answers, decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Tenant, View
from gpukeeper.model.policy import Policy
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Hold, Memory, Seen, Subject
from gpukeeper.model.unknown import Unknown

HERE = Path(__file__).parent
NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
CASES = sorted(HERE.glob("*/*.json"))
DEFAULTS = json.loads((HERE / "defaults.json").read_text())
QUIET = "0*90"
SIDE_SIGNALS = ("cpu", "network", "disk", "terminal")
WARNED = {"rule": "idle", "delivered": True, "incarnation": "run-1", "limit": "30m"}
HELD = {"by": "ann", "at": "-1h"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"([+-]?)((?:\d+[smhd])+)")


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path) -> None:
    case = json.loads(path.read_text())
    view, book = view_of(case), Rulebook(msgspec.convert(_values(_policy(case)), Policy))
    expect = dict(case["expect"])
    decision = decide(view, book, NOW)
    assert expect.pop("reason", "") in decision.reason, case["why"]
    assert expect.pop("complaint", "") in " ".join(decision.complaints), case["why"]
    given = {answer.rule: answer.verdict for answer in answers(view, book, NOW)}
    for rule, verdict in expect.pop("answers", {}).items():
        assert rule in given, f"{path.name}: no rule {rule} is in RULES of lifecycle/decide.py"
        assert given[rule] == verdict, f"{rule}: {case['why']}"
    found = {name: getattr(decision, name) for name in expect}
    assert found == _values(expect), f"{case['why']}\n{decision.reason}"


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_has_cases(rule: str) -> None:
    assert len(list((HERE / rule).glob("*.json"))) >= 3, f"add cases below tests/cases/{rule}/"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_gives_the_reason_and_what_it_expects(path: Path) -> None:
    case = json.loads(path.read_text())
    assert set(case) <= {
        "why",
        "like",
        "subject",
        "series",
        "memory",
        "pressure",
        "elsewhere",
        "tenant",
        "policy",
        "expect",
    }
    assert len(case["why"]) > 20
    assert case["expect"]["action"]


def view_of(case: dict[str, Any]) -> View:
    facts = _values(DEFAULTS["like"][case["like"]] | case.get("subject", {}))
    ref = facts.pop("ref") | facts.pop("other_ref", {})
    incarnation = facts.pop("incarnation", "run-1")
    seen = msgspec.convert({"ref": ref, "incarnation": incarnation, "version": "1", "at": NOW}, Seen)
    subject = msgspec.convert({"seen": seen, **facts}, Subject, from_attributes=True)
    memory = dict(case.get("memory", {}))
    memory["warnings"] = [WARNED | one for one in memory.get("warnings", [])]
    memory["holds"] = [HELD | one for one in memory.get("holds", [])]
    elsewhere = [HELD | one for one in case.get("elsewhere", [])]
    return View(
        subject,
        _series(case, facts),
        msgspec.convert(_values(memory), Memory),
        pressure=case.get("pressure", False),
        elsewhere=msgspec.convert(_values(elsewhere), tuple[Hold, ...]),
        tenant=msgspec.convert(_values(case.get("tenant")), Tenant | None),
    )


def _policy(case: dict[str, Any]) -> dict[str, Any]:
    return _merge(DEFAULTS["policy"], case.get("policy", {}))


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merge(below[name], above[name]) for name in above if _are_maps(below.get(name), above[name])}
    return below | above | both


def _are_maps(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _series(case: dict[str, Any], facts: dict[str, Any]) -> tuple[Series, ...]:
    """Keys are `cpu`, `gpu GPU-0` or `slice MIG-1`; null takes a signal away."""
    given: dict[str, Any] = {}
    if facts["state"] in ("running", "paused"):
        devices = facts["devices"] if isinstance(facts.get("devices"), list) else []
        given = dict.fromkeys([*(f"gpu {device}" for device in devices), *SIDE_SIGNALS], QUIET)
    given |= case.get("series", {})
    return tuple(_one_series(name, runs) for name, runs in given.items() if runs is not None)


def _one_series(name: str, runs: str | dict[str, Any]) -> Series:
    kind, _, device = name.partition(" ")
    signal = Signal.GPU if kind == "slice" else Signal(kind)
    if isinstance(runs, dict):
        return Series(signal, device, NOW, (), kind == "slice", missing=msgspec.convert(runs, Unknown))
    minutes: list[float] = []
    for run in runs.split():
        value, _, times = run.partition("*")
        minutes += [float(value)] * int(times or 1)
    return Series(signal, device, NOW - timedelta(minutes=len(minutes) - 1), tuple(minutes), kind == "slice")


def _values(given: Any) -> Any:
    """Instants and spans in words become values, everywhere."""
    if isinstance(given, dict):
        return {name: _values(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_values(value) for value in given]
    if isinstance(given, str) and (words := _SPAN.fullmatch(given)):
        span = timedelta(seconds=sum(int(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", words[2])))
        return span if not words[1] else NOW + (span if words[1] == "+" else -span)
    return given
