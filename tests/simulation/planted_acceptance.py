"""Bugs on purpose in acceptance: each lets through what could not be tested, and `could_not_test` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gpukeeper.acceptance import run as engine_accept
from gpukeeper.acceptance.checks import environment, health
from gpukeeper.acceptance.judging import replies as acceptance_replies
from gpukeeper.acceptance.judging import verdicts
from gpukeeper.acceptance.record import Finding, Remedy, Report
from gpukeeper.acceptance.reports import formats
from gpukeeper.model.gpu import Grade
from tests.simulation.planted import planted, swapped


@planted("could_not_test")
def count_a_check_not_run_as_passed() -> Iterator[None]:
    """A check that ended with an error, or that time did not allow."""
    unmeasured = engine_accept._unmeasured

    def passed(*given: Any) -> tuple[Finding, ...]:
        good = {"verdict": Grade.PASS, "action": Remedy.NONE}
        found = (msgspec.structs.replace(one, code=f"{one.check}-ok", **good) for one in unmeasured(*given))
        return tuple(found)

    with swapped(engine_accept, "_unmeasured", passed):
        yield


@planted("could_not_test")
def trust_the_verdict_of_a_report() -> Iterator[None]:
    with swapped(formats, "recomputed", lambda report, doubts=(): report):
        yield


@planted("could_not_test")
def forget_findings_that_a_report_has_lost() -> Iterator[None]:
    """Only the findings that are left are looked at."""

    def careless(report: Report, doubts: Any = ()) -> Report:
        left = {"verdict": verdicts.worst(one.verdict for one in report.findings)}
        return msgspec.structs.replace(report, **left)

    with swapped(formats, "recomputed", careless):
        yield


@planted("could_not_test")
def overlook_missing_gpus() -> Iterator[None]:
    with swapped(environment, "_count", lambda machine, setting: iter(())), swapped(environment, "_bus", _nothing):
        yield


@planted("could_not_test")
def take_a_silent_driver_for_a_healthy_gpu() -> Iterator[None]:
    def healthy(gpu: Any, setting: Any) -> list[Finding]:
        found = of_gpu(gpu, setting)
        known = [one for one in found if "not-known" not in one.code and not one.code.endswith(("-lost", "-readings"))]
        return known or [health._finding(gpu, Grade.PASS, "ok", "nothing wrong")]

    of_gpu = health._of_gpu
    with swapped(health, "_of_gpu", healthy):
        yield


@planted("could_not_test")
def take_a_broken_probe_for_one_that_does_not_apply() -> Iterator[None]:
    broken = acceptance_replies.broken_finding

    def skipped(*given: Any, **more: Any) -> Finding:
        return msgspec.structs.replace(broken(*given, **more), verdict=Grade.SKIPPED, action=Remedy.NONE)

    with swapped(acceptance_replies, "broken_finding", skipped):
        yield


def _nothing(machine: Any) -> Iterator[Finding]:
    return iter(())
