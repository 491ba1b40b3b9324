"""Memory: its speed, its link to the host, and whether it keeps what is written to it."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.checks import copies, memory_bandwidth, memory_pattern
from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.checks.trials import OUT_OF_MEMORY, codes, read, the
from tests.unit.acceptance.machines import context, gpus

GIB = 1 << 30


def copied(gbps: float = 4260, wrong: int = 0) -> dict[str, Any]:
    return {"gbps": [gbps] * 5, "bytes": 4 * GIB, "method": "copy/read+write", "wrong": wrong}


def sent(h2d: float = 55, **more: Any) -> dict[str, Any]:
    methods = {"h2d": "copy/pinned", "d2h": "copy/pinned", "d2d": "copy/read+write"}
    speeds = {"h2d": [h2d] * 5, "d2h": [55.0] * 5, "d2d": [4200.0] * 5}
    return speeds | {"pinned": True, "method": "copy/pinned", "methods": methods, "verified": True, "wrong": 0} | more


def kept(errors: int = 0, tested: float = 126, **more: Any) -> dict[str, Any]:
    where = [{"offset": 4096, "got": "0000000000020000", "want": "0000000000000000", "pattern": "zeros"}]
    return {
        "tested_bytes": int(tested * GIB),
        "total_bytes": 140 * GIB,
        "patterns": ["zeros", "ones"],
        "passes": 1,
        "errors": errors,
        "where": where if errors else [],
    } | more


def test_bandwidth_is_held_against_the_floor_of_its_model() -> None:
    assert codes(read(memory_bandwidth.CHECK, context(gpus(1)), copied())) == ["memory-bandwidth-ok"]
    (slow,) = read(memory_bandwidth.CHECK, context(gpus(1)), copied(2911))
    assert (slow.verdict, slow.code, slow.metric) == (Grade.FAIL, "memory-bandwidth-below-floor", "copy")


def test_a_copy_that_is_not_what_was_copied_fails_without_a_second_chance() -> None:
    findings = read(memory_bandwidth.CHECK, context(gpus(1)), copied(wrong=1))
    found = the(findings, "data")
    assert (found.verdict, found.code, found.confirm) == (Grade.FAIL, "memory-bandwidth-wrong-data", False)


def test_copies_are_judged_each_way() -> None:
    """C1.6: pinned H2D, D2H, D2D."""
    findings = read(copies.CHECK, context(gpus(1)), sent(h2d=24))
    assert [the(findings, way).verdict for way in ("h2d", "d2h", "d2d")] == [Grade.FAIL, Grade.PASS, Grade.PASS]


def test_data_that_came_back_changed_fails_and_an_unverified_copy_does_not_pass() -> None:
    changed = the(read(copies.CHECK, context(gpus(1)), sent(verified=False, wrong=3)), "data")
    assert (changed.verdict, changed.code) == (Grade.FAIL, "copies-wrong-data")
    assert the(read(copies.CHECK, context(gpus(1)), sent(verified=None)), "data").verdict is Grade.INCONCLUSIVE


def test_memory_that_could_not_be_pinned_is_told_and_not_held_against_the_links_floor() -> None:
    methods = {"h2d": "copy/pageable", "d2h": "copy/pageable", "d2d": "copy/read+write"}
    findings = read(copies.CHECK, context(gpus(1)), sent(h2d=8, pinned="cannot lock memory", methods=methods))
    assert the(findings, "pinned").action is Remedy.CHECK_CONFIG
    assert the(findings, "h2d").verdict is Grade.INCONCLUSIVE
    on_cpu = context(gpus(1), wish=RunRequest(device="cpu"))
    assert "copies-not-pinned" not in codes(read(copies.CHECK, on_cpu, sent(pinned="there is no GPU")))


def test_memory_that_keeps_its_patterns_passes_and_shows_how_much_was_tested() -> None:
    """C1.10."""
    (finding,) = read(memory_pattern.CHECK, context(gpus(1)), kept())
    assert (finding.verdict, finding.code) == (Grade.PASS, "memory-pattern-ok")
    assert "126.0 of 140.0 GiB kept all 2 patterns" in finding.message


def test_one_word_that_was_lost_fails_and_is_located() -> None:
    (finding,) = read(memory_pattern.CHECK, context(gpus(1)), kept(errors=1))
    assert (finding.verdict, finding.code, finding.confirm) == (Grade.FAIL, "memory-pattern-errors", False)
    assert "byte 4096" in finding.message
    assert finding.evidence["where"][0]["pattern"] == "zeros"


def test_memory_that_others_hold_is_no_excuse() -> None:
    """A tenth could be tested where nearly all was requested: told, not passed over."""
    (finding,) = read(memory_pattern.CHECK, context(gpus(1)), kept(tested=14))
    assert (finding.verdict, finding.code) == (Grade.WARN, "memory-pattern-partly")


@pytest.mark.parametrize("nothing", [{"tested_bytes": 0}, {"passes": 0}])
def test_nothing_tested_never_passes(nothing: dict[str, int]) -> None:
    (finding,) = read(memory_pattern.CHECK, context(gpus(1)), kept(**nothing))
    assert finding.verdict is Grade.INCONCLUSIVE


@pytest.mark.parametrize("check", [memory_bandwidth.CHECK, copies.CHECK, memory_pattern.CHECK])
def test_a_probe_without_an_answer_is_inconclusive(check: Any) -> None:
    assert codes(read(check, context(gpus(1)), OUT_OF_MEMORY)) == ["out-of-memory"]


def test_a_longer_test_gets_a_longer_deadline() -> None:
    wish = RunRequest(params={"memory_pattern": {"seconds": 7200}})
    ask = memory_pattern.CHECK.request
    assert ask is not None
    assert ask(memory_pattern.CHECK.servings[0], context(gpus(1), wish=wish)).deadline_s > 2 * 7200
