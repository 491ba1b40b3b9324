"""Assesses a value: compares it with a floor, its peers and its history. The worst of the three counts.

A missing value never passes, nor does one that is implausible, too noisy, or that cannot be compared. A measured FAIL
is repeated by the run before it counts (`confirm`). Also: the smallest loss that a run would have found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpukeeper.acceptance.check import CheckContext
from gpukeeper.acceptance.judging import comparisons
from gpukeeper.acceptance.judging.comparisons import (
    HISTORY_WARN_DROP,
    Bounds,
    Figure,
    HistoryComparison,
    against_history,
    earlier_figures,
    grade,
    repeatability,
)
from gpukeeper.acceptance.record import Finding, Measurement, Power, Remedy, Thresholds
from gpukeeper.model.gpu import Grade, rank

USUAL_MARGIN = 0.10  # between floor and reference, where no reference is known
NOTHING = Thresholds()


def assess(measurements: Sequence[Measurement], context: CheckContext, *, confirm: bool = True) -> tuple[Finding, ...]:
    """All measurements of one check and metric: one of each GPU, or the node's one. A finding for each, in their order.

    A node's figure is held against the limits of its GPUs' model, and against the history under the node's name.
    """
    trials = [_try(one, context) for one in measurements]
    return tuple(_finding(one, _equals(one, trials), context, confirm) for one in trials)


def missing(check: str, metric: str, gpu: str | None, why: str) -> Finding:
    """A value that should have been measured and was not. Never a pass."""
    return Finding(
        check=check,
        metric=metric,
        gpu=gpu,
        verdict=Grade.INCONCLUSIVE,
        code=code_of(check, "missing"),
        message=f"{_named(check, metric)} was not measured: {why.rstrip(' .')}.",
        action=Remedy.RETEST,
    )


def limits_of(one: Measurement | Finding, context: CheckContext) -> Thresholds:
    """What it is compared with; nothing, if that is for another method.

    Of a node with several models: nothing, since it is unknown which of them applies.
    """
    limits = _limits(one, context)
    return limits if _is_for(limits, one.method) else NOTHING


def code_of(check: str, what: str) -> str:
    """Stable, one spelling: memory-bandwidth-below-floor."""
    return f"{check}-{what}".replace("_", "-")


def amount(value: float, unit: str) -> str:
    """Four digits are what a measurement is good for."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:.{digits}f} {unit}".rstrip()


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@dataclass(frozen=True)
class _Assessment:
    measurement: Measurement
    figure: Figure | None  # None: there is no number
    limits: Thresholds
    stratum: comparisons.Stratum | None
    alien: str = ""  # the method that the limits are for, when it is another one

    @property
    def value(self) -> float:
        return statistics.median(self.measurement.samples)

    @property
    def implausible(self) -> bool:
        ceiling = self.limits.ceiling
        if self.figure is None or ceiling is None:
            return False
        return self.figure.good > _turned(ceiling, self.measurement)


@dataclass(frozen=True)
class _LayerResult:
    """The result of one comparison: floor, peers or history."""

    grade: Grade | None  # None: there is nothing to compare the value with
    words: str  # for the layers
    what: str = ""  # the end of the code
    sentence: str = ""  # for the message, when this layer decides
    action: Remedy = Remedy.NONE


def _try(one: Measurement, context: CheckContext) -> _Assessment:
    found = _limits(one, context)
    alien = "" if _is_for(found, one.method) else found.method
    return _Assessment(one, _figure(one), limits_of(one, context), comparisons.stratum(one, context), alien)


def _limits(one: Measurement | Finding, context: CheckContext) -> Thresholds:
    if one.gpu is not None:
        return context.limits(context.gpu(one.gpu), one.check, one.metric, one.method)
    alike = len({gpu.name for gpu in context.gpus if isinstance(gpu.name, str)}) == 1
    return context.limits(context.gpus[0], one.check, one.metric, one.method) if alike else NOTHING


def _is_for(limits: Thresholds, method: str) -> bool:
    return not limits.method or fnmatchcase(method, limits.method)


def _figure(one: Measurement) -> Figure | None:
    """A time of zero is no measurement, nor is a negative speed; a speed of zero is a dead GPU."""
    least = math.ulp(0.0) if one.lower_is_better else 0.0
    if not one.samples or not all(math.isfinite(sample) and sample >= least for sample in one.samples):
        return None
    return Figure(tuple(_turned(sample, one) for sample in one.samples))


def _turned(value: float, one: Measurement) -> float:
    if not one.lower_is_better:
        return value
    return 1 / value if value > 0 else math.inf


def _equals(one: _Assessment, trials: Iterable[_Assessment]) -> tuple[Figure, ...]:
    """Its peers, itself included; without those whose value is implausible."""
    return tuple(
        other.figure
        for other in trials
        if one.stratum is not None and other.stratum == one.stratum
        if other.figure is not None and not other.implausible
    )


def _finding(one: _Assessment, equals: tuple[Figure, ...], context: CheckContext, confirm: bool) -> Finding:
    measurement = one.measurement
    if one.figure is None:
        return _no_number(measurement)
    standing = comparisons.against_peers(one.figure, equals) if not one.implausible else None
    before = earlier_figures(measurement, context.history.get(_identity(measurement, context), ()))
    past = against_history(one.figure, before, lower_is_better=measurement.lower_is_better)
    layers = (_by_floor(one, one.figure), _by_peers(one, standing), _by_history(one, past))
    verdict, decided = _worst(one, layers)
    return Finding(
        check=measurement.check,
        metric=measurement.metric,
        gpu=measurement.gpu,
        verdict=verdict,
        code=code_of(measurement.check, decided.what),
        message=f"{_named(measurement.check, measurement.metric)}: {amount(one.value, measurement.unit)}"
        f"{decided.sentence}.",
        action=decided.action,
        value=one.value,
        unit=measurement.unit,
        method=measurement.method,
        samples=measurement.samples,
        lower_is_better=measurement.lower_is_better,
        repeatability=repeatability(measurement.samples),
        floor=one.limits.floor,
        ceiling=one.limits.ceiling,
        reference=one.limits.reference,
        source=one.limits.source,
        peer_median=_turned(standing.median, measurement) if standing else None,
        peer_z=standing.z if standing else None,
        peer_n=standing.n if standing else 0,
        baseline=past.baseline if past else None,
        layers=tuple(layer.words for layer in layers),
        confirm=confirm and verdict is Grade.FAIL,
    )


def _identity(one: Measurement, context: CheckContext) -> str:
    return context.machine.node if one.gpu is None else context.gpu(one.gpu).identity


def _no_number(measurement: Measurement) -> Finding:
    samples = [sample for sample in measurement.samples if not (math.isfinite(sample) and sample > 0)]
    why = (
        (f"the probe reported {samples[0]!r}, which is not a valid value in {measurement.unit}")
        if samples
        else "the probe reported no samples"
    )
    return missing(measurement.check, measurement.metric, measurement.gpu, f"{why}. Run it again")


def _worst(one: _Assessment, layers: tuple[_LayerResult, ...]) -> tuple[Grade, _LayerResult]:
    if one.implausible:
        return Grade.INCONCLUSIVE, _too_good(one)
    spoke = [(layer.grade, layer) for layer in layers if layer.grade is not None]
    if not spoke:
        return Grade.INCONCLUSIVE, _nothing_to_hold_it_against(one)
    verdict, decided = max(spoke, key=lambda each: rank(each[0]))  # of equals the first: floor, peers, history
    if verdict is Grade.PASS:
        return verdict, _LayerResult(Grade.PASS, "", "ok", _approval(layers))
    return verdict, decided


def _too_good(one: _Assessment) -> _LayerResult:
    ceiling = one.limits.ceiling or 0.0
    return _LayerResult(
        Grade.INCONCLUSIVE,
        "",
        "implausible",
        f", more than the maximum for this model ({amount(ceiling, one.measurement.unit)}), so the measurement is"
        " wrong, or the GPU is not the model it reports. Run it again; if it persists, check its name, clocks and the"
        " timer",
        Remedy.RETEST,
    )


def _nothing_to_hold_it_against(one: _Assessment) -> _LayerResult:
    return _LayerResult(
        Grade.INCONCLUSIVE,
        "",
        "no-yardstick",
        ", and there is no value to compare it with: no reference for this model and method, fewer than"
        f" {comparisons.LEAST_PEERS} identical GPUs, no earlier accepted run. Provide a reference file with the values"
        " of a good GPU",
        Remedy.CHECK_CONFIG,
    )


def _approval(layers: tuple[_LayerResult, ...]) -> str:
    floor, among, before = (layer.grade is not None for layer in layers)
    if floor:
        return ", within the limits"
    if among:
        return ", like its peers; there is no floor, so a loss common to all of them is not detected"
    assert before, "a pass without any comparison"
    return ", as in earlier runs; there is neither a floor nor peers, so whether earlier values were good is unknown"


def _by_floor(one: _Assessment, figure: Figure) -> _LayerResult:
    limits, measurement = one.limits, one.measurement
    if one.alien:
        return _LayerResult(None, f"floor: known only for method {one.alien}; measured with {measurement.method}")
    bounds = [bound for bound in (limits.floor, limits.warn) if bound is not None]
    if not bounds:
        return _LayerResult(None, "floor: none known for this model and method")
    lines = _floor_lines(limits, measurement)
    verdict = grade(figure, lines)
    floor = bounds[0]
    side = "above" if measurement.lower_is_better else "below"
    where = f"floor {amount(floor, measurement.unit)}, {_of_reference(one)}{limits.source or 'unknown source'}"
    if verdict is Grade.INCONCLUSIVE:
        return _noisy(figure, lines, "floor", where)
    if verdict is Grade.PASS:
        return _LayerResult(verdict, f"floor: passed ({where})")
    under = limits.floor is not None and figure.good < _turned(limits.floor, measurement)
    if under:
        kept = "" if limits.may_fail else "; the floor is an estimate, so it only warns"
        sentence = f", {_off(one.value, floor)} {side} the floor of {amount(floor, measurement.unit)}{kept}"
        return _LayerResult(verdict, f"floor: {side} it ({where})", "below-floor", sentence, _hint(verdict))
    sentence = f", {side} the warning limit of {amount(bounds[-1], measurement.unit)}, but not {side} the floor"
    return _LayerResult(verdict, f"floor: near it ({where})", "near-floor", sentence, Remedy.WATCH)


def _floor_lines(limits: Thresholds, measurement: Measurement) -> Bounds:
    bounds = [_turned(bound, measurement) for bound in (limits.floor, limits.warn) if bound is not None]
    fail = bounds[0] if limits.floor is not None and limits.may_fail else -math.inf
    usual = _turned(limits.reference, measurement) if limits.reference else 0.0
    margin = 1 - bounds[0] / usual if usual > bounds[0] else USUAL_MARGIN
    return Bounds(max(bounds), fail, margin)


def _of_reference(one: _Assessment) -> str:
    reference = one.limits.reference
    return f"{percent(one.value / reference)} of {amount(reference, one.measurement.unit)}, " if reference else ""


def _by_peers(one: _Assessment, standing: comparisons.PeerComparison | None) -> _LayerResult:
    if one.implausible:
        return _LayerResult(None, "peers: not compared, since the value is implausible")
    if standing is None:
        return _LayerResult(None, f"peers: fewer than {comparisons.LEAST_PEERS} identical GPUs were measured")
    figure, measurement = one.figure, one.measurement
    assert figure is not None
    median = _turned(standing.median, measurement)
    z = f", z {standing.z:.1f}" if standing.z is not None else ""
    reference = one.limits.reference
    common = f", which is {percent(median / reference)} of the reference" if reference else ""
    where = f"median of {standing.n} {amount(median, measurement.unit)}{common}{z}"
    if standing.grade is Grade.INCONCLUSIVE:
        return _LayerResult(
            standing.grade, f"peers: too noisy to judge ({where})", "noisy", _scatter(figure), Remedy.RETEST
        )
    if standing.grade is Grade.PASS:
        return _LayerResult(standing.grade, f"peers: like them ({where})")
    loss = (
        f"{percent(standing.loss)} worse than the median of {standing.n} identical GPUs"
        f" ({amount(median, measurement.unit)})"
    )
    return _LayerResult(
        standing.grade, f"peers: slower ({where})", "slower-than-peers", f", {loss}", _hint(standing.grade)
    )


def _by_history(one: _Assessment, past: HistoryComparison | None) -> _LayerResult:
    if past is None:
        return _LayerResult(None, "history: no accepted run of this GPU with this method")
    figure, measurement = one.figure, one.measurement
    assert figure is not None
    where = f"median of its last {past.n} accepted runs {amount(past.baseline, measurement.unit)}"
    if past.grade is Grade.INCONCLUSIVE:
        return _LayerResult(
            past.grade, f"history: too noisy to judge ({where})", "noisy", _scatter(figure), Remedy.RETEST
        )
    if past.grade is Grade.PASS:
        return _LayerResult(past.grade, f"history: as in earlier runs ({where})")
    sentence = f", {percent(past.loss)} worse than in earlier runs ({where})"
    return _LayerResult(past.grade, f"history: slower ({where})", "slower-than-before", sentence, _hint(past.grade))


def _noisy(figure: Figure, lines: Bounds, layer: str, where: str) -> _LayerResult:
    return _LayerResult(
        Grade.INCONCLUSIVE,
        f"{layer}: too noisy to judge ({where}; allowed scatter: {percent(lines.margin / 4)})",
        "noisy",
        _scatter(figure),
        Remedy.RETEST,
    )


def _scatter(figure: Figure) -> str:
    return (
        f", but its {len(figure.goods)} samples scatter by {percent(figure.noise or 0.0)}, too much to distinguish a"
        " good GPU from a bad one. Make sure that nothing else runs on the machine, and run it again"
    )


def _hint(verdict: Grade) -> Remedy:
    return Remedy.CONTACT_VENDOR if verdict is Grade.FAIL else Remedy.WATCH


def _off(value: float, bound: float) -> str:
    return percent(abs(1 - value / bound)) if bound else "much"


def _named(check: str, metric: str) -> str:
    return (check if metric in ("", check) else f"{check} {metric}").replace("_", " ")


def detection_power(findings: Iterable[Finding], context: CheckContext) -> tuple[Power, ...]:
    """For every check and metric that has figures, by the layer that notices the smallest loss. A loss that only warns
    is reported beside it, even if another layer finds it."""
    figures: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.samples and finding.value:
            figures.setdefault((finding.check, finding.metric), []).append(finding)
    return tuple(_power_of(check, metric, group, context) for (check, metric), group in figures.items())


Losses = tuple[float | None, float | None]  # share lost that fails, share lost that warns


def _power_of(check: str, metric: str, group: Sequence[Finding], context: CheckContext) -> Power:
    layers = {
        "floor": _losses_by_floor(group, context),
        "peers": _losses_by_peers(group),
        "history": _losses_by_history(group),
    }
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


def _losses_by_floor(group: Sequence[Finding], context: CheckContext) -> Losses:
    """From what these GPUs show down to the line; they may stand high above it, and then much is not noticed."""
    known = [(finding.value or 0.0, limits_of(finding, context)) for finding in group]
    fails = [_loss(value, limits.floor) for value, limits in known if limits.floor and limits.may_fail]
    warns = [_loss(value, line) for value, limits in known if (line := limits.warn or limits.floor)]
    return _usual_loss(fails, len(group)), _usual_loss(warns, len(group))


def _usual_loss(losses: Sequence[float], wanted: int) -> float | None:
    """None: at least one GPU has no such line."""
    return max(0.0, statistics.median(losses)) if len(losses) == wanted else None


def _loss(value: float, line: float) -> float:
    """Of a figure where less is better the line is above it."""
    return 1 - line / value if line < value else 1 - value / line


def _losses_by_peers(group: Sequence[Finding]) -> Losses:
    if any(finding.peer_n < comparisons.LEAST_PEERS for finding in group):
        return None, None
    figures = [Figure(finding.samples) for finding in group]
    warn, fail = comparisons.drops_among_peers(min(finding.peer_n for finding in group), comparisons.spread_of(figures))
    return fail, warn


def _losses_by_history(group: Sequence[Finding]) -> Losses:
    """Failing takes several earlier runs, and a finding does not contain their number: the smaller bound is used."""
    return (None, HISTORY_WARN_DROP) if all(finding.baseline for finding in group) else (None, None)
