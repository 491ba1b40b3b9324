"""Trials for the tests of checks: what probes said, by GPU. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun
from gpukeeper.acceptance.record import Finding, ProbeFailure, ProbeReply, ProbeResult

OUT_OF_MEMORY = ProbeFailure(kind="out_of_memory", words="OutOfMemoryError: CUDA out of memory.")


def trial(check: Check, *said: Mapping[str, Any] | ProbeFailure, depth: int = 0) -> CheckRun:
    """`said`: of each GPU what its probe answered."""
    answers: dict[str, ProbeReply] = {
        f"GPU-{i}": one if isinstance(one, ProbeFailure) else ProbeResult(result=one) for i, one in enumerate(said)
    }
    serving = next(one for one in check.servings if one.depth >= depth)
    return CheckRun(serving=serving, answers=answers)


def read(
    check: Check, context: CheckContext, *said: Mapping[str, Any] | ProbeFailure, depth: int = 0
) -> tuple[Finding, ...]:
    return check.interpret(trial(check, *said, depth=depth), context)


def codes(findings: Sequence[Finding], gpu: int | None = None) -> list[str]:
    return [one.code for one in findings if gpu is None or one.gpu == f"GPU-{gpu}"]


def the(findings: Sequence[Finding], metric: str, gpu: int = 0) -> Finding:
    (found,) = [one for one in findings if one.metric == metric and one.gpu == f"GPU-{gpu}"]
    return found
