"""What a run would have found: the smallest loss of each figure that it fails or warns about. Part of every report.

A pass is worth as much as the loss it would have noticed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gpukeeper.acceptance.check import CheckContext
from gpukeeper.acceptance.judging import history, judge, peers
from gpukeeper.acceptance.judging.bounds import Figure
from gpukeeper.acceptance.record import Finding, Power


def detection_power(findings: Iterable[Finding], context: CheckContext) -> tuple[Power, ...]:
    """For every check and metric that has figures, by the layer that notices the smallest loss. A loss that only warns
    is reported beside it, even if another layer finds it."""
    figures: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.samples and finding.value:
            figures.setdefault((finding.check, finding.metric), []).append(finding)
    return tuple(_power(check, metric, group, context) for (check, metric), group in figures.items())


Losses = tuple[float | None, float | None]  # share lost that fails, share lost that warns


def _power(check: str, metric: str, group: Sequence[Finding], context: CheckContext) -> Power:
    layers = {"floor": _floor(group, context), "peers": _peers(group), "history": _history(group)}
    failing = {name: fail for name, (fail, _) in layers.items() if fail is not None}
    warning = {name: warn for name, (_, warn) in layers.items() if warn is not None}
    best = min(failing, key=failing.__getitem__, default=min(warning, key=warning.__getitem__, default="nothing"))
    return Power(
        check=check,
        metric=metric,
        fails_at=failing.get(best),
        warns_at=min(warning.values(), default=None),
        by=best,
    )


def _floor(group: Sequence[Finding], context: CheckContext) -> Losses:
    """From what these GPUs show down to the line; they may stand high above it, and then much is not noticed."""
    known = [(finding.value or 0.0, judge.limits_of(finding, context)) for finding in group]
    fails = [_loss(value, limits.floor) for value, limits in known if limits.floor and limits.may_fail]
    warns = [_loss(value, line) for value, limits in known if (line := limits.warn or limits.floor)]
    return _usual(fails, len(group)), _usual(warns, len(group))


def _usual(losses: Sequence[float], wanted: int) -> float | None:
    """None: at least one GPU has no such line."""
    return max(0.0, statistics.median(losses)) if len(losses) == wanted else None


def _loss(value: float, line: float) -> float:
    """Of a figure where less is better the line is above it."""
    return 1 - line / value if line < value else 1 - value / line


def _peers(group: Sequence[Finding]) -> Losses:
    if any(finding.peer_n < peers.LEAST for finding in group):
        return None, None
    figures = [Figure(finding.samples) for finding in group]
    warn, fail = peers.drops(min(finding.peer_n for finding in group), peers.spread_of(figures))
    return fail, warn


def _history(group: Sequence[Finding]) -> Losses:
    """Failing takes several earlier runs, and a finding does not contain their number: the smaller bound is used."""
    return (None, history.WARN_DROP) if all(finding.baseline for finding in group) else (None, None)
