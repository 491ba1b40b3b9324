"""Two reports side by side: what changed, and whether that is more than noise. Pure.

Figures are compared per GPU by its identity, and only where the method is the same. The tests (Welch's t, the exact
rank test, Holm's correction) know the noise inside the two runs, not what differs from run to run anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import fmean, variance
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.wording import (
    NODE,
    fact,
    figure,
    gpu_of,
    gpu_words,
    gpus_of,
    identity_of,
    less_is_better,
    moment,
    printable,
    value_of,
)
from gpukeeper.model.gpu import Grade, rank

FEWEST = 3  # samples on each side; with two a spread is a guess
MANY = 8  # from here on ranks suffice, even after a correction for many metrics, and outliers do no harm
_EXACT_LIMIT = 60  # samples together; beyond it the normal approximation is as good
_TINY = 1e-300


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided: how likely noise alone makes such a difference. None: too few samples."""
    if min(len(a), len(b)) < FEWEST:
        return None
    return mann_whitney(a, b) if min(len(a), len(b)) >= MANY else welch(a, b)


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    va, vb = variance(a) / len(a), variance(b) / len(b)
    apart = fmean(a) - fmean(b)
    if va + vb == 0:
        return 1.0 if apart == 0 else 0.0
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    t = apart / math.sqrt(va + vb)
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact for small samples, ties included: all ways to deal out the ranks are counted."""
    doubled = _doubled_ranks([*a, *b])
    observed = sum(doubled[: len(a)])
    middle = len(a) * sum(doubled) / len(doubled)
    if len(doubled) > _EXACT_LIMIT:
        return _by_normal(doubled, len(a), observed - middle)
    ways = _ways(doubled, len(a))
    apart = abs(observed - middle) - 1e-9
    extreme = sum(count for total, count in ways.items() if abs(total - middle) >= apart)
    return extreme / sum(ways.values())


def holm(found: Sequence[float]) -> list[float]:
    """Each p corrected for the number of tests; never smaller than one that was smaller before."""
    order = sorted(range(len(found)), key=found.__getitem__)
    corrected = [0.0] * len(found)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, found[index] * (len(found) - place)))
        corrected[index] = highest
    return corrected


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank, so that the middle rank of equal values is whole."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(ordered)}
    count = Counter(ordered)
    return [2 * first[value] + count[value] + 1 for value in values]


def _ways(doubled: Sequence[int], size: int) -> dict[int, int]:
    """Of every sum that `size` of these ranks can have: in how many ways."""
    table: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(size))]
    for place in doubled:
        for taken in range(size, 0, -1):
            for total, count in table[taken - 1].items():
                table[taken][total + place] += count
    return table[size]


def _by_normal(doubled: Sequence[int], size: int, apart: float) -> float:
    n, other = len(doubled), len(doubled) - size
    mean = sum(doubled) / n
    spread = size * other / (n * (n - 1)) * sum((rank - mean) ** 2 for rank in doubled)
    return 1.0 if spread == 0 else math.erfc(max(0.0, abs(apart) - 1) / math.sqrt(2 * spread))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised one, by its continued fraction (Lentz); the tail of Student's t is one."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, 300):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + step * d)
            c = _away_from_zero(1 + step / c)
            found *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return found


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


SURE = 0.05  # after the correction for how many figures are compared
SHARES = {"share": 100.0, "percent": 1.0}  # units whose difference is shown in points
NEAR_ZERO = 0.01
MATTERS = 0.02  # a smaller change happens between any two runs

_Key: TypeAlias = tuple[str, str, str]  # identity, check, metric


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    node: str
    started: datetime
    verdict: Grade
    device: str


class ValueChange(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one GPU in both runs. `share`: 0.03 is 3 % more; none of a figure that is a share itself, or near
    zero. `p`: corrected; None: too few samples."""

    identity: str
    gpu: str
    check: str
    metric: str
    method: str
    unit: str
    before: float
    after: float
    share: float | None
    points: float | None  # of a figure that is a share: 0.9 is 0.9 points more
    p: float | None
    sure: bool
    worse: bool
    sentence: str


class VerdictChange(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    check: str
    metric: str
    before: Grade | None
    after: Grade | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    before: ComparedRun
    after: ComparedRun
    sentence: str
    changes: tuple[ValueChange, ...] = ()
    verdicts: tuple[VerdictChange, ...] = ()
    added: tuple[str, ...] = ()  # GPUs, by identity
    removed: tuple[str, ...] = ()
    environment: Mapping[str, tuple[str, str]] = {}  # by name: before, after
    not_compared: tuple[str, ...] = ()


def compare(a: Report, b: Report) -> Comparison:
    """From a to b."""
    before, after = _figures(a), _figures(b)
    pairs = [(key, before[key], after[key]) for key in before if key in after]
    equal = [pair for pair in pairs if pair[1].method == pair[2].method and pair[1].unit == pair[2].unit]
    changes = _changes(b, equal)
    names_a, names_b = _identities(a), _identities(b)
    return Comparison(
        before=_side(a),
        after=_side(b),
        sentence=_sentence(changes, names_a & names_b),
        changes=changes,
        verdicts=_verdicts(a, b),
        added=tuple(sorted(names_b - names_a)),
        removed=tuple(sorted(names_a - names_b)),
        environment=_environment(a, b),
        not_compared=tuple(_not_compared(b, pairs)),
    )


def is_worse(comparison: Comparison) -> bool:
    """A figure beyond the noise, a GPU that is gone, or any verdict. What was not tested in one of them is not worse,
    unless it is no pass now that it is tested."""
    return (
        any(one.sure and one.worse for one in comparison.changes)
        or bool(comparison.removed)
        or any(one.after is not None and _below(one.before or Grade.PASS, one.after) for one in comparison.verdicts)
    )


def _below(before: Grade, after: Grade) -> bool:
    return rank(after) > max(rank(before), rank(Grade.PASS))


def text(comparison: Comparison) -> str:
    """For a terminal: what matters first."""
    before, after = comparison.before, comparison.after
    lines = [_side_words(before), _side_words(after), comparison.sentence]
    lines += [f"GPU {name} is only in the second run." for name in comparison.added]
    lines += [f"GPU {name} is only in the first run." for name in comparison.removed]
    lines += [
        f"{one.gpu} {_named(one.check, one.metric)}: {one.before or 'not tested'} → {one.after or 'not tested'}"
        for one in comparison.verdicts
    ]
    lines += [f"{name}: {old} → {new}" for name, (old, new) in comparison.environment.items()]
    lines += [change.sentence for change in comparison.changes]
    return "\n".join(printable(line) for line in [*lines, *comparison.not_compared]) + "\n"


def _figures(report: Report) -> dict[_Key, Finding]:
    """Those with a figure; the last one where a check was repeated."""
    return {
        (_identity(report, finding.gpu), finding.check, finding.metric): finding
        for finding in report.findings
        if value_of(finding) is not None
    }


def _identity(report: Report, uuid: str | None) -> str:
    """Of a node by its name: figures of two machines are not compared."""
    gpu = gpu_of(report, uuid)
    if gpu is not None:
        return identity_of(report, gpu)
    return f"{NODE} {report.node}" if uuid is None else f"{report.node}/{uuid}"


def _identities(report: Report) -> set[str]:
    return {identity_of(report, gpu) for gpu in gpus_of(report.machine)}


def _changes(report: Report, pairs: Iterable[tuple[_Key, Finding, Finding]]) -> tuple[ValueChange, ...]:
    listed = list(pairs)
    p_values = [p_value(old.samples, new.samples) for _, old, new in listed]
    corrected = iter(holm([p for p in p_values if p is not None]))
    found = [
        _change(report, key, old, new, None if p is None else next(corrected))
        for (key, old, new), p in zip(listed, p_values, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: (not (one.sure and one.worse), not one.sure, -abs(one.share or 0))))


def _change(report: Report, key: _Key, old: Finding, new: Finding, p: float | None) -> ValueChange:
    before, after = value_of(old), value_of(new)
    assert before is not None, "only findings with a value are compared"
    assert after is not None, "only findings with a value are compared"
    points = (after - before) * SHARES[new.unit] if new.unit in SHARES else None
    share = (after - before) / abs(before) if points is None and _comparable(before, after) else None
    moved_by = share if points is None else points / 100
    sure = p is not None and p < SURE and (moved_by is None or abs(moved_by) >= MATTERS)
    less = new.lower_is_better or less_is_better(new.unit)
    worse = after > before if less else after < before
    place = gpu_words(report, new.gpu)
    moved = "no change" if after == before else f"{figure(before, new.unit)} → {figure(after, new.unit)}"
    return ValueChange(
        identity=key[0],
        gpu=place,
        check=new.check,
        metric=new.metric,
        method=new.method,
        unit=new.unit,
        before=before,
        after=after,
        share=share,
        points=points,
        p=p,
        sure=sure,
        worse=worse,
        sentence=f"{place} {_named(new.check, new.metric)}: {moved}{_share_words(share, points)},"
        f" {_sureness(p, moved_by)}",
    )


def _named(check: str, metric: str) -> str:
    return f"{check}.{metric}" if metric else check


def _comparable(before: float, after: float) -> bool:
    """A relative change of what is nearly nothing, or changes its sign, means nothing."""
    return before * after > 0 and abs(before) >= NEAR_ZERO * abs(after)


def _share_words(share: float | None, points: float | None) -> str:
    if points is not None:
        return f" ({points:+.1f} points)"
    return "" if share is None else f" ({share * 100:+.1f} %)"


def _sureness(p: float | None, share: float | None) -> str:
    if p is None:
        return "too few samples to tell it from noise."
    shown = f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
    if p >= SURE:
        return f"within the noise ({shown})."
    if share is not None and abs(share) < MATTERS:
        return f"beyond the noise of the runs ({shown}), but too small to matter."
    return f"beyond the noise ({shown})."


def _sentence(changes: Iterable[ValueChange], shared: set[str]) -> str:
    listed = list(changes)
    if not listed:
        seen = "No GPU is in both runs" if not shared else "The runs have no value of the same method in common"
        return f"{seen}; nothing was compared."
    worse = sum(one.sure and one.worse for one in listed)
    better = sum(one.sure and not one.worse for one in listed)
    unsure = sum(one.p is None for one in listed)
    few = f" {unsure} have too few samples to judge." if unsure else ""
    return f"{len(listed)} values compared: {worse} worse and {better} better beyond the noise.{few}"


def _verdicts(a: Report, b: Report) -> tuple[VerdictChange, ...]:
    before, after = _grades(a), _grades(b)
    keys = dict.fromkeys([*before, *after])
    return tuple(
        VerdictChange(gpu=key[0], check=key[1], metric=key[2], before=before.get(key), after=after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    )


def _grades(report: Report) -> dict[_Key, Grade]:
    """The worst, where a check has several findings about one thing."""
    grades = {(NODE, RUN_VERDICT, ""): report.verdict}
    for one in report.findings:
        key = (_identity(report, one.gpu), one.check, one.metric)
        grades[key] = one.verdict if key not in grades or rank(one.verdict) > rank(grades[key]) else grades[key]
    return grades


RUN_VERDICT = "run"


def _environment(a: Report, b: Report) -> dict[str, tuple[str, str]]:
    before = {"gpukeeper": a.version, **a.machine.environment, "gpus": len(gpus_of(a.machine))}
    after = {"gpukeeper": b.version, **b.machine.environment, "gpus": len(gpus_of(b.machine))}
    return {
        name: (fact(before.get(name)), fact(after.get(name)))
        for name in dict.fromkeys([*before, *after])
        if fact(before.get(name)) != fact(after.get(name))
    }


def _not_compared(report: Report, pairs: Iterable[tuple[_Key, Finding, Finding]]) -> Iterable[str]:
    for _, old, new in pairs:
        if (old.method, old.unit) != (new.method, new.unit):
            place = gpu_words(report, new.gpu)
            ways = f"{old.method or 'unnamed'} ({old.unit}) and {new.method or 'unnamed'} ({new.unit})"
            yield f"{place} {_named(new.check, new.metric)}: not compared, measured by different methods: {ways}."


def _side(report: Report) -> ComparedRun:
    return ComparedRun(
        run=report.run, node=report.node, started=report.started, verdict=report.verdict, device=report.device
    )


def _side_words(side: ComparedRun) -> str:
    return f"{side.run}  {side.node}  {moment(side.started)}  {side.verdict}"
