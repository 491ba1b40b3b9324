"""What policies would have done to recorded work, as totals, rows and a curve; and the recorded comparison: what
each idle limit would have won here, and how often it would have been regretted. Values only; nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import sqrt
from random import Random

import msgspec

from gpukeeper.ledger.meta import BacktestPoint, BacktestRecord
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Afterwards, JudgedRun, Judging
from gpukeeper.lifecycle.rules import idle
from gpukeeper.model.words import in_words

RESAMPLES = 500
SEED = 1  # the same trace gives the same intervals
Z = 1.96


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over runs; hours are hours times GPUs. `won` is what stops gave back; `cost` what restarts took."""

    runs: int = 0
    held: float = 0.0
    measured: float = 0.0
    unused_tail: float = 0.0
    warned: int = 0
    came_back: int = 0
    stops: int = 0
    unused: int = 0
    regrets: int = 0
    censored: int = 0
    unknowable: int = 0
    won: float = 0.0
    cost: float = 0.0

    @property
    def known(self) -> int:
        """Stops of which it is known whether they would have been regretted."""
        return self.unused + self.regrets

    @property
    def regret(self) -> float | None:
        return self.regrets / self.known if self.known else None

    @property
    def net(self) -> float:
        return self.won - self.cost

    @property
    def coverage(self) -> float | None:
        return self.measured / self.held if self.held else None


class Interval(msgspec.Struct, frozen=True):
    """95 %: between these."""

    low: float
    high: float


class GroupRow(msgspec.Struct, frozen=True):
    name: str
    tally: Tally


class VariantRow(msgspec.Struct, frozen=True):
    """Only stops of idle work: nothing else depends on these settings. `regret_high`: what its regret is at most, with
    95 % confidence; None without a stop whose end is known."""

    variant: Variant
    words: str
    tally: Tally
    regret: float | None
    regret_high: float | None


class StopRow(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    owner: str
    class_: str = msgspec.field(name="class")
    gpus: int
    at: datetime
    rule: str
    reason: str
    afterwards: Afterwards
    used_again: datetime | None
    won: float


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    begin: datetime
    end: datetime
    runs: int
    rows: int
    bad_rows: int
    bad: tuple[str, ...]  # the first, with their lines
    not_recorded: tuple[str, ...]  # signals that the policy uses and the trace does not have
    demand_known: bool = True  # whether GPUs were scarce, or the policy does not ask


class BreakerRow(msgspec.Struct, frozen=True):
    """The breaker would have been open at `place` in this many passes."""

    place: str
    first: datetime
    last: datetime
    passes: int
    words: str


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What budget and breaker refused. `later`: runs that were stopped in a later pass; `not_stopped`: in none.
    `approximate`: breaker and warnings depend on each other in a way that was not resolved."""

    later: int = 0
    not_stopped: int = 0
    breaker: tuple[BreakerRow, ...] = ()
    approximate: bool = False


class BacktestReport(msgspec.Struct, frozen=True, kw_only=True):
    """`stops`: by the given policy. `curve`: one row for each policy of the comparison."""

    policy: str
    digest: str
    trace: TraceFacts
    judging: Judging
    limits: LimitFacts
    total: Tally
    regret: float | None
    regret_between: Interval | None
    won_between: Interval | None
    owners: tuple[GroupRow, ...]
    classes: tuple[GroupRow, ...]
    rules: tuple[GroupRow, ...]
    stops: tuple[StopRow, ...]
    curve: tuple[VariantRow, ...]
    notes: tuple[str, ...]


NO_LIMITS = LimitFacts()


def tally(runs: Iterable[JudgedRun], rule: str | None = None) -> Tally:
    """With `rule`: only its stops."""
    found = list(runs)
    stops = [one.stop for one in found if one.stop is not None and rule in (None, one.stop.rule)]
    count = {kind: sum(one.afterwards is kind for one in stops) for kind in Afterwards}
    return Tally(
        runs=len(found),
        held=sum(one.held for one in found),
        measured=sum(one.measured for one in found),
        unused_tail=sum(one.unused_tail for one in found),
        warned=sum(one.warned for one in found),
        came_back=sum(one.came_back for one in found),
        stops=len(stops),
        unused=count[Afterwards.UNUSED],
        regrets=count[Afterwards.REGRET],
        censored=count[Afterwards.CENSORED],
        unknowable=count[Afterwards.UNKNOWABLE],
        won=sum(one.won for one in stops),
        cost=sum(one.cost for one in stops),
    )


def report(
    policy: str,
    digest: str,
    trace: TraceFacts,
    judging: Judging,
    judged: Mapping[Variant, Sequence[JudgedRun]],
    limits: LimitFacts = NO_LIMITS,
) -> BacktestReport:
    """`judged` has the runs of the given policy under GIVEN."""
    mine = judged[GIVEN]
    total = tally(mine)
    return BacktestReport(
        policy=policy,
        digest=digest,
        trace=trace,
        judging=judging,
        limits=limits,
        total=total,
        regret=total.regret,
        regret_between=regret_between(mine),
        won_between=won_between(mine),
        owners=_groups(mine, lambda one: one.owner or "nobody"),
        classes=_groups(mine, lambda one: one.class_ or "unknown"),
        rules=_groups([one for one in mine if one.stop is not None], lambda one: one.stop.rule if one.stop else ""),
        stops=tuple(sorted(map(_stop_row, (one for one in mine if one.stop is not None)), key=lambda row: row.at)),
        curve=tuple(_variant_row(variant, runs) for variant, runs in judged.items()),
        notes=tuple(_notes(trace, total, judging, limits)),
    )


def regret_between(runs: Sequence[JudgedRun]) -> Interval | None:
    """Of the share of stops that would have been regretted. The wider of two on each side: owners drawn with
    replacement, because the work of one owner is alike; and Wilson's, because no regret in few stops proves little."""
    total = tally(runs)
    if not total.known:
        return None
    drawn = _drawn(_owners(runs), _share)
    alone = wilson(total.regrets, total.known)
    return Interval(min(drawn.low, alone.low), max(drawn.high, alone.high))


def won_between(runs: Sequence[JudgedRun]) -> Interval | None:
    """Of the hours won, net of restarts. The wider of two: owners drawn with replacement, and runs."""
    if not any(one.stop for one in runs):
        return None
    owners = _drawn(_owners(runs), _net)
    single = _drawn([*_by(runs, lambda one: one.name).values()], _net)
    return Interval(min(owners.low, single.low), max(owners.high, single.high))


def _owners(runs: Sequence[JudgedRun]) -> list[Tally]:
    """What nobody owns stands for itself."""
    return list(_by(runs, lambda one: one.owner or one.name).values())


def _share(parts: Sequence[Tally]) -> float | None:
    known = sum(one.known for one in parts)
    return sum(one.regrets for one in parts) / known if known else None


def _net(parts: Sequence[Tally]) -> float | None:
    return sum(one.net for one in parts)


def _drawn(parts: Sequence[Tally], measure: Callable[[Sequence[Tally]], float | None]) -> Interval:
    """The middle 95 % of what it is when the parts are drawn again, with replacement."""
    random = Random(SEED)  # noqa: S311
    values = [measure(random.choices(parts, k=len(parts))) for _ in range(RESAMPLES)]
    known = sorted(value for value in values if value is not None)
    if not known:
        return Interval(0.0, 1.0)
    return Interval(known[int(0.025 * len(known))], known[min(int(0.975 * len(known)), len(known) - 1)])


def wilson(hits: int, count: int) -> Interval:
    """Of a share: 95 %."""
    share, square = hits / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z * sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def _by(runs: Sequence[JudgedRun], key: Callable[[JudgedRun], str]) -> dict[str, Tally]:
    grouped: dict[str, list[JudgedRun]] = {}
    for one in runs:
        grouped.setdefault(key(one), []).append(one)
    return {name: tally(mine) for name, mine in grouped.items()}


def _groups(runs: Sequence[JudgedRun], key: Callable[[JudgedRun], str]) -> tuple[GroupRow, ...]:
    rows = [GroupRow(name, total) for name, total in _by(runs, key).items()]
    return tuple(sorted(rows, key=lambda row: (-row.tally.won, row.name)))


def _variant_row(variant: Variant, runs: Sequence[JudgedRun]) -> VariantRow:
    total = tally(runs, idle.NAME)
    high = wilson(total.regrets, total.known).high if total.known else None
    return VariantRow(variant, variant.words, total, total.regret, high)


def _stop_row(one: JudgedRun) -> StopRow:
    stop = one.stop
    assert stop is not None, "only runs that would have been stopped"
    return StopRow(
        workload=one.name,
        owner=one.owner or "nobody",
        class_=one.class_,
        gpus=one.gpus,
        at=stop.at,
        rule=stop.rule,
        reason=stop.reason,
        afterwards=stop.afterwards,
        used_again=stop.used_again,
        won=stop.won,
    )


def _notes(trace: TraceFacts, total: Tally, judging: Judging, limits: LimitFacts) -> Iterable[str]:
    if trace.not_recorded:
        yield (
            f"Not every run of the trace has these signals, which can prevent a stop: {', '.join(trace.not_recorded)}. "
            "With them fewer workloads are stopped."
        )
    if trace.bad_rows:
        yield f"{trace.bad_rows} rows of the trace could not be used; their minutes count as not measured."
    if total.coverage is not None and total.coverage < ENOUGH_MEASURED:
        yield f"Only {total.coverage:.0%} of the GPU time was measured. What is not measured is never stopped as idle."
    if trace.end - trace.begin < 2 * judging.horizon:
        yield (
            f"The trace is short: {_days(trace.end - trace.begin)}, and a return within {_days(judging.horizon)} "
            "counts as regret. Read the shares with care; no policy is recommended from it."
        )
    yield "No owner in the trace was warned. Some would have used or held their work after a warning."
    if not trace.demand_known:
        yield "Whether GPUs were scarce is not in the trace, so high demand shortens no idle time. See --gpus."
    if limits.breaker:
        yield "The breaker stays open until less is due, or until a person allows it: gpukeeper apply --budget N."
    if limits.approximate:
        yield "Some stops after the breaker first opened are approximate: warnings and breaker were not reconciled."


ENOUGH_MEASURED = 0.9


def _days(span: timedelta) -> str:
    return f"{span / timedelta(days=1):.1f} days"


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
    rows = [_point_row(point, record.runs) for point in record.points]
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


def _point_row(point: BacktestPoint, runs: int) -> VariantRow:
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
