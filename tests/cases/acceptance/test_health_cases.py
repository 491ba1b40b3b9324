"""What driver and kernel said of a sick GPU: which findings, and why. One data file each, below health/.

A case says what differs from a healthy H200 (tests/unit/acceptance/machines.py): `before`, then each of `checks` and
`after` on top of what was before them; a look is ten seconds after the last. `{"why": …}` is a fact that is not known.
`readings` are runs of equal readings under load, half a second apart; without them one, where checks ran. `expect`
lists verdict, code and action of every finding but those that are only told (SKIPPED); `says` are fragments of words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.acceptance.check import CheckRun, CheckSize
from gpukeeper.acceptance.checks import health as check
from gpukeeper.model.gpu import Gpu, Grade, Health, Reading, Xid
from gpukeeper.model.unknown import Unknown
from tests.unit.acceptance.machines import H200, context, health

CASES = sorted((Path(__file__).parent / "health").glob("*.json"))
KEYS = {"why", "name", "gpus", "before", "checks", "after", "readings", "others", "expect", "says"}
LOADED = {"check": "stress", "utilisation": 99.0, "power_w": 690.0, "temperature_c": 60.0, "reasons": 4}
LOADED |= {"sm_mhz": 1755.0, "memory_mhz": 3201.0, "pcie_generation": 5, "pcie_width": 16}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = json.loads(path.read_text())
    found = check.interpret(CheckRun(serving=CheckSize(depth=0, seconds=0, worth=0, what="")), _setting(case))
    mine = [one for one in found if one.gpu in ("GPU-0", None) and one.verdict is not Grade.SKIPPED]
    assert [[one.verdict, one.code, one.action] for one in mine] == case["expect"], case["why"]
    words = " ".join(one.message for one in found)
    for fragment in case.get("says", []):
        assert fragment in words, words


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_gives_the_reason(path: Path) -> None:
    case = json.loads(path.read_text())
    assert set(case) <= KEYS, set(case) - KEYS
    assert len(case["why"]) > 20


def test_every_rule_has_a_case() -> None:
    """A rule that nobody tried is a guess."""
    expected = {code for path in CASES for _, code, _ in json.loads(path.read_text())["expect"]}
    rules = (*check.STATES, *check.LEVELS, *check.RISES)
    assert {f"health-{rule.code}" for rule in rules} <= expected


def _setting(case: dict[str, Any]) -> Any:
    gpus = tuple(_gpu(i, case) for i in range(case.get("gpus", 8)))
    facts, seconds = case.get("before", {}), 0
    before = {} if facts is None else {gpu.uuid: _read(gpu, facts if gpu.index == 0 else {}, 0) for gpu in gpus}
    at_check = {}
    for name, change in case.get("checks", {}).items():
        facts, seconds = {**(facts or {}), **change}, seconds + 10
        at_check[name] = {"GPU-0": _read(gpus[0], facts, seconds)}
    after = {gpu.uuid: _read(gpu, {}, seconds + 10) for gpu in gpus[1:]}
    last = case.get("after", {})
    if last is not None:
        after["GPU-0"] = _read(gpus[0], {**(facts or {}), **last}, seconds + 10)
    some = [{}] if at_check else []
    readings = _readings("GPU-0", case.get("readings", some))
    readings += [one for gpu in gpus[1:] for one in _readings(gpu.uuid, case.get("others", some))]
    return context(gpus, before=before, at_check=at_check, after=after, readings=tuple(readings))


def _gpu(index: int, case: dict[str, Any]) -> Gpu:
    return Gpu(uuid=f"GPU-{index}", index=index, name=case.get("name", H200))


def _read(gpu: Gpu, facts: dict[str, Any], seconds: float) -> Health:
    known = {name: _fact(value) for name, value in facts.items()}
    known["xids"] = _xids(facts.get("xids", []))
    return health(gpu.uuid, seconds, **known)


def _fact(value: Any) -> Any:
    if isinstance(value, dict):
        return msgspec.convert(value, Unknown)
    return tuple(value) if isinstance(value, list) else value


def _xids(told: Any) -> Any:
    return msgspec.convert(told, Unknown) if isinstance(told, dict) else tuple(Xid(n, words) for n, words in told)


def _readings(uuid: str, runs: list[dict[str, Any]]) -> list[Reading]:
    found: list[Reading] = []
    for run in runs:
        told = LOADED | {name: value for name, value in run.items() if name != "times"}
        for _ in range(run.get("times", 1)):
            found.append(Reading(uuid=uuid, at=0.5 * len(found), **told))
    return found
