"""The recorded comparison of a backtest: what each idle limit would have won here, and how often it would have been
regretted. Values and sentences only; nothing is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from gpukeeper.ledger.backtest_record import BacktestPoint, BacktestRecord
from gpukeeper.lifecycle.backtest.variants import GIVEN, Variant
from gpukeeper.model.durations import in_words
from gpukeeper.views.backtest import BacktestReport, Interval, Tally, VariantRow, wilson


class BacktestOnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`record`: of the policy in effect, else the newest of another one. None: nothing is on record."""

    record: BacktestRecord | None
    in_effect: bool
    regret_max: float


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One limit, as people read it. `between`: where the share of regretted stops lies with 95 % confidence. `best`:
    it wins most of those whose regret is within what is allowed with that confidence. `likely`: there is none, and
    this one wins most of those whose share is allowed as far as it was seen."""

    row: VariantRow
    between: Interval | None
    sentence: str
    best: bool
    likely: bool


def points_of(curve: Iterable[VariantRow]) -> tuple[BacktestPoint, ...]:
    return tuple(
        BacktestPoint(
            window=row.variant.window,
            threshold=row.variant.threshold,
            stops=row.tally.stops,
            unused=row.tally.unused,
            regrets=row.tally.regrets,
            censored=row.tally.censored,
            unknowable=row.tally.unknowable,
            won=row.tally.won,
        )
        for row in curve
    )


def record_of(found: BacktestReport, at: datetime) -> BacktestRecord:
    total = found.total
    return BacktestRecord(
        at=at,
        source=found.trace.source,
        begin=found.trace.begin,
        end=found.trace.end,
        runs=total.runs,
        stops=total.stops,
        known=total.known,
        regrets=total.regrets,
        won=total.won,
        horizon=found.judging.horizon,
        points=points_of(found.curve) if len(found.curve) > 1 else (),
    )


def limit_rows(record: BacktestRecord, regret_max: float) -> tuple[LimitRow, ...]:
    rows = [_variant_row(point, record.runs) for point in record.points]
    best = best_within(rows, regret_max, lambda row: row.regret_high)
    likely = None if best is not None else best_within(rows, regret_max, lambda row: row.regret)
    return tuple(
        LimitRow(
            row=row,
            between=wilson(row.tally.regrets, row.tally.known) if row.tally.known else None,
            sentence=limit_sentence(row, record.horizon),
            best=row.variant == best,
            likely=row.variant == likely,
        )
        for row in rows
    )


def best_within(
    rows: Sequence[VariantRow], regret_max: float, regret: Callable[[VariantRow], float | None]
) -> Variant | None:
    """Which wins most with at most this regret; of equal ones the first. None: none does."""
    known = [(row, regret(row)) for row in rows]
    allowed = [row for row, share in known if share is not None and share <= regret_max]
    return max(allowed, key=lambda row: row.tally.won).variant if allowed else None


def limit_sentence(row: VariantRow, horizon: timedelta | None) -> str:
    total = row.tally
    if not total.stops:
        return f"{_subject(row.variant)} would have stopped none of the {total.runs} workloads here."
    won = f"would have stopped {total.stops} of {total.runs} workloads here and won {total.won:,.0f} GPU-hours"
    return f"{_subject(row.variant)} {won}; {_afterwards(total, horizon)}."


def _subject(variant: Variant) -> str:
    if variant == GIVEN:
        return "The policy itself"
    if variant.window is None:
        return f"With GPU use below {variant.threshold:g}% counted as idle, the policy"
    threshold = "" if variant.threshold is None else f", with GPU use below {variant.threshold:g}% counted as idle,"
    return f"An idle limit of {in_words(variant.window)}{threshold}"


def _afterwards(total: Tally, horizon: timedelta | None) -> str:
    within = "" if horizon is None else f" within {in_words(horizon)}"
    if total.regret is None and total.stops == 1:
        return f"whether it would have used its GPUs again{within} is not known"
    again = f"would have used their GPUs again{within}"
    if total.regret is None:
        return f"whether any of the {total.stops} {again} is not known"
    if total.known == total.stops:
        return f"{total.regrets} of the {total.stops} ({total.regret:.0%}) {again}"
    return (
        f"of the {total.known} whose end is known, {total.regrets} ({total.regret:.0%}) {again}; "
        f"of {total.stops - total.known} it is not known"
    )


def _variant_row(point: BacktestPoint, runs: int) -> VariantRow:
    total = Tally(
        runs=runs,
        stops=point.stops,
        unused=point.unused,
        regrets=point.regrets,
        censored=point.censored,
        unknowable=point.unknowable,
        won=point.won,
    )
    variant = Variant(point.window, point.threshold)
    high = wilson(total.regrets, total.known).high if total.known else None
    return VariantRow(variant, variant.words, total, total.regret, high)
