"""Replies of probes: results to interpret, and a finding for each probe that returned none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpukeeper.acceptance.check import CheckContext, CheckRun
from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.judging.messages import broken_finding
from gpukeeper.acceptance.record import Finding, ProbeFailure, Values


def of_gpus(check: str, trial: CheckRun) -> tuple[dict[str, Values], tuple[Finding, ...]]:
    """By uuid the result of each probe, and findings about probes without a result."""
    results: dict[str, Values] = {}
    findings = []
    for gpu, answer in trial.answers.items():
        if isinstance(answer, ProbeFailure):
            findings.append(broken_finding(check, gpu, answer))
        else:
            results[gpu] = answer.result
    return results, tuple(findings)


def read_each(
    check: str, trial: CheckRun, read: Callable[[str, Values], Iterable[Finding]]
) -> tuple[dict[str, Values], tuple[Finding, ...]]:
    """One or more findings for each result. A result without a required field is not a measurement."""
    results, findings = of_gpus(check, trial)
    found = list(findings)
    for gpu, result in results.items():
        try:
            found += read(gpu, result)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            why = f"the probe's result could not be read ({type(error).__name__}: {error})"
            found.append(judge.missing(check, "", gpu, why))
    return results, tuple(found)


def figures(value: Any) -> tuple[float, ...]:
    """Samples. JSON has no infinity, so probes write such figures as words."""
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else ()


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def against_majority(values: Mapping[str, str], context: CheckContext) -> dict[str, tuple[str, int]]:
    """Of GPUs of one model that should all report the same: by uuid how one compares, and among how many.

    "like" the majority, "odd" against it, or "split": they differ without a majority, so it is unknown which one is
    wrong.
    """
    found: dict[str, tuple[str, int]] = {}
    for group in _by_model(values, context):
        majority, votes = Counter(values[gpu] for gpu in group).most_common(1)[0]
        decided = votes * 2 > len(group)  # never among two that differ: it is unknown which one is wrong
        for gpu in group:
            alike = decided and values[gpu] == majority
            found[gpu] = ("like" if alike else "odd" if decided else "split", len(group))
    return found


def _by_model(values: Mapping[str, str], context: CheckContext) -> Iterable[list[str]]:
    """A GPU without peers, or of an unknown model, is not compared."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for gpu in values:
        one = context.gpu(gpu)
        if isinstance(one.name, str):
            groups.setdefault((one.name, one.profile), []).append(gpu)
    return (group for group in groups.values() if len(group) > 1)
