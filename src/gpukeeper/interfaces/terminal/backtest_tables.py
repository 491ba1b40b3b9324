"""The answer of a backtest as lines and tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from gpukeeper.lifecycle.backtest.outcome import Afterwards
from gpukeeper.lifecycle.backtest.variants import GIVEN
from gpukeeper.model.durations import in_words
from gpukeeper.views.backtest import BacktestReport, GroupRow, Interval, LimitFacts, StopRow, Tally

SHOWN = 20  # stops in the terminal; the page and --json have all
_HEAD = ("stops", "regretted", "unused", "open", "GPU-hours won", "after last use", "restarts cost")
_AFTERWARDS = {
    Afterwards.UNUSED: "not used again",
    Afterwards.REGRET: "used again",
    Afterwards.CENSORED: "its record ends first",
    Afterwards.UNKNOWABLE: "not measured afterwards",
}


class Table(NamedTuple):
    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def facts(report: BacktestReport) -> dict[str, str]:
    """What the answer rests on, and the answer in four lines."""
    trace, total = report.trace, report.total
    coverage = "nothing was held" if total.coverage is None else f"{total.coverage:.1%} measured"
    found = {
        "trace": f"{trace.source}: {stamp(trace.begin)} to {stamp(trace.end)}, {trace.runs} runs, "
        f"{total.held:,.0f} GPU-hours held, {coverage}",
        "policy": report.policy,
        "stopped": f"{total.stops} of {total.runs} runs; {total.warned} warnings, and {total.came_back} times the work "
        "was used again after the first one",
        "regretted": f"{share(report.regret)}{_between(report.regret_between, percent=True)}: "
        f"{total.regrets} of {total.known} stops with a known end were used again within "
        f"{in_words(report.judging.horizon)}",
        "won": f"{total.won:,.0f} GPU-hours; {total.unused_tail:,.0f} were held after the last use; restarts cost "
        f"{total.cost:,.0f}{_between(report.won_between, percent=False)}",
        "not known": f"{total.censored} stops: the trace ends first; {total.unknowable}: not measured afterwards",
    }
    return found | _limits(report.limits)


def _limits(given: LimitFacts) -> dict[str, str]:
    found = {}
    if given.later or given.not_stopped:
        found["deferred"] = (
            f"{given.later} stops came later and {given.not_stopped} did not come at all, because the policy limits "
            "how much is stopped at once (budget, breaker)"
        )
    if given.breaker:
        first, passes = given.breaker[0], sum(one.passes for one in given.breaker)
        found["breaker"] = f"open in {passes} passes; first at {first.place}, {stamp(first.first)}: {first.words}"
    return found


def tables(report: BacktestReport) -> Iterator[Table]:
    if len(report.curve) > 1:
        yield curve(report)
    yield Table("classes", "By class", ("class", "runs", *_HEAD), _rows(report.classes))
    yield Table("owners", "By owner", ("owner", "runs", *_HEAD), _rows(report.owners))
    yield Table("rules", "By rule", ("rule", "runs", *_HEAD), _rows(report.rules))


def curve(report: BacktestReport) -> Table:
    rows = tuple(
        ("today" if row.variant == GIVEN else "", row.words, *_cells(row.tally), _most(row.regret_high))
        for row in report.curve
    )
    return Table(
        "curve", "Idle times and thresholds (only stops of idle work)", ("", "policy", *_HEAD, "regret at most"), rows
    )


def stops(rows: Sequence[StopRow]) -> Table:
    lines = tuple(
        (
            one.workload,
            one.owner,
            one.class_,
            str(one.gpus),
            stamp(one.at),
            one.rule,
            _AFTERWARDS[one.afterwards]
            + ("" if one.used_again is None else f" {in_words(one.used_again - one.at)} later"),
            f"{one.won:,.1f}",
        )
        for one in rows
    )
    head = ("workload", "owner", "class", "GPUs", "stopped at", "rule", "afterwards", "GPU-hours won")
    return Table("stops", "What would have been stopped", head, lines)


def worst_first(rows: Iterable[StopRow]) -> list[StopRow]:
    """Regrets first, the soonest return first; then by what was won."""
    return sorted(rows, key=lambda one: (one.afterwards is not Afterwards.REGRET, -one.won, one.workload))


def share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1%}"


def stamp(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"


def _rows(groups: Sequence[GroupRow]) -> tuple[tuple[str, ...], ...]:
    return tuple((one.name, str(one.tally.runs), *_cells(one.tally)) for one in groups)


def _cells(one: Tally) -> tuple[str, ...]:
    return (
        str(one.stops),
        f"{one.regrets} ({share(one.regret)})" if one.known else str(one.regrets),
        str(one.unused),
        str(one.censored + one.unknowable),
        f"{one.won:,.1f}",
        f"{one.unused_tail:,.1f}",
        f"{one.cost:,.1f}",
    )


def _most(high: float | None) -> str:
    return "-" if high is None else f"{high:.1%}"


def _between(interval: Interval | None, *, percent: bool) -> str:
    if interval is None:
        return ""
    low, high = interval.low, interval.high
    return f" (95%: {low:.1%} to {high:.1%})" if percent else f" (95%, net: {low:,.0f} to {high:,.0f})"
