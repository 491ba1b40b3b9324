"""The answer of a backtest as lines and tables, and its trade-off curve as inline SVG, for the terminal and the
dashboard; as HTML files, the whole of it or one recorded run with the decisions about it: use of its GPUs over time,
warnings and the stop. Pure; no scripts, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import isnan
from typing import TYPE_CHECKING, NamedTuple

from gpukeeper import markup
from gpukeeper.interfaces.terminal.usage import UNMEASURED, text_table, usage_document
from gpukeeper.lifecycle.replay import GIVEN, Variant
from gpukeeper.lifecycle.replay_outcome import Afterwards
from gpukeeper.markup import Markup, element, section
from gpukeeper.model.decision import Action
from gpukeeper.model.series import RecordedRun, Signal, TraceTime
from gpukeeper.model.words import in_words
from gpukeeper.views.backtest import BacktestReport, GroupRow, Interval, LimitFacts, StopRow, Tally, VariantRow

if TYPE_CHECKING:
    from gpukeeper.backtest.comparison import Evaluation

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


WIDTH, LEFT, TOP, HEIGHT, RIGHT = 1000.0, 80.0, 16.0, 340.0, 30.0
LABEL = (44.0, 14.0)  # width and height
TITLE = "GPU-hours won against regret"


class Point(NamedTuple):
    row: VariantRow
    regret: float
    x: float
    y: float


def tradeoff(rows: Sequence[VariantRow], *, best: Variant | None = None, allowed: float | None = None) -> Markup:
    """Points without a stop whose end is known have no place on it. `best` is marked, and the regret that is allowed
    is a line."""
    placed = [(row, row.regret) for row in rows if row.regret is not None]
    most = max((row.tally.won for row, _ in placed), default=0.0) or 1.0
    worst = max((regret for _, regret in placed), default=0.0) or 0.01
    parts = [*_axes(most, worst), *_allowed(allowed, worst)]
    points = [Point(row, regret, _x(regret, worst), _y(row.tally.won, most)) for row, regret in placed]
    lines: dict[float, list[Point]] = {}
    for one in points:
        if one.row.variant != GIVEN:
            lines.setdefault(one.row.variant.threshold or 0.0, []).append(one)
    for number, (_, line) in enumerate(sorted(lines.items())):
        ordered = sorted(line, key=lambda one: one.row.variant.window or timedelta())
        at = " ".join(f"{one.x:.1f},{one.y:.1f}" for one in ordered)
        parts.append(element("polyline", points=at, class_=f"won line-{number % 4}"))
        parts += map(_dot, ordered)
        if number == 0:
            parts += _windows(ordered, [one for one in points if one.row.variant == GIVEN])
    for one in points:
        parts += _marks(one, best)
    words = "; ".join(f"{row.words}: {_point_words(row, regret)}" for row, regret in placed)
    return markup.frame(TITLE, words or "no policy has a stop with a known end", WIDTH, TOP + HEIGHT + 44, *parts)


def point_key(variant: Variant) -> str:
    """Names a point on the page: seconds and percent, as far as they are given."""
    window = "" if variant.window is None else f"{variant.window.total_seconds():.0f}"
    return f"{window}/{'' if variant.threshold is None else f'{variant.threshold:g}'}"


def _dot(one: Point) -> Markup:
    title = element("title", _point_words(one.row, one.regret))
    return element("circle", title, cx=one.x, cy=one.y, r=4, class_="dot", data_point=point_key(one.row.variant))


def _windows(line: Sequence[Point], others: Sequence[Point]) -> Iterable[Markup]:
    """The idle times of some points; none so near to another label that neither could be read."""
    near = [(one.x + 12, one.y + 4) for one in others]
    for one in line[:: max(1, len(line) // 8)]:
        x, y = one.x + 6, one.y - 6
        is_free = not any(abs(x - left) < LABEL[0] and abs(y - top) < LABEL[1] for left, top in near)
        if one.row.variant.window is not None and is_free:
            near.append((x, y))
            yield markup.label(in_words(one.row.variant.window), x, y, "start", "small ink")


def _marks(one: Point, best: Variant | None) -> Iterable[Markup]:
    """The policy itself as a larger dot, the best as a ring; below each other where they are the same."""
    words = _point_words(one.row, one.regret)
    if one.row.variant == GIVEN:
        title = element("title", f"this policy: {words}")
        yield element("circle", title, cx=one.x, cy=one.y, r=8, class_="today")
        yield markup.label("this policy", one.x + 12, one.y + 4, "start", "small ink")
    if one.row.variant == best:
        title = element("title", f"best within the allowed regret: {words}")
        yield element("circle", title, cx=one.x, cy=one.y, r=10, class_="best")
        yield markup.label("best", one.x + 14, one.y + 20, "start", "small ink")


def _allowed(share: float | None, worst: float) -> Iterable[Markup]:
    """Beyond the picture: all of it is allowed."""
    if share is not None and share <= worst:
        x = _x(share, worst)
        yield markup.line(x, TOP, x, TOP + HEIGHT, "allowed", f"allowed regret: {share:.1%}")
        yield markup.label(f"allowed: {share:.0%}", x + 6, TOP + HEIGHT - 8, "start", "small ink")


def _axes(most: float, worst: float) -> Iterable[Markup]:
    bottom = TOP + HEIGHT
    for part in (0.0, 0.5, 1.0):
        y, x = _y(most * part, most), _x(worst * part, worst)
        yield markup.line(LEFT, y, WIDTH - RIGHT, y, "grid")
        yield markup.label(f"{most * part:,.0f} h", LEFT - 8, y + 4, "end", "small ink")
        yield markup.label(f"{worst * part:.1%}", x, bottom + 18, "middle", "small ink")
    yield markup.label("stops that were used again", (LEFT + WIDTH) / 2, bottom + 38, "middle", "small ink")


def _x(regret: float, worst: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT - 60) * regret / worst


def _y(won: float, most: float) -> float:
    return TOP + HEIGHT - HEIGHT * won / most


def _point_words(row: VariantRow, regret: float) -> str:
    return f"{row.words}: {row.tally.won:,.0f} GPU-hours won, {row.tally.stops} stops, {regret:.1%} regretted"


BACKTEST_STYLE = """
svg .won{stroke:var(--active);fill:none;stroke-width:2}svg .dot{fill:var(--active)}
svg .today{fill:var(--idle)}
svg .line-1{stroke:var(--idle)}svg .line-2{stroke:var(--free)}svg .line-3{stroke:var(--unknown)}
"""


def backtest_page(report: BacktestReport) -> str:
    return usage_document("Backtest of a policy", BACKTEST_STYLE, _backtest_sections(report))


def _backtest_sections(report: BacktestReport) -> Iterator[Markup]:
    yield element(
        "header",
        element("p", "What this policy would have done", class_="eyebrow"),
        element("h1", f"{report.total.stops} of {report.total.runs} runs stopped, {share(report.regret)} regretted"),
        markup.facts(facts(report)),
        class_="card",
    )
    yield from (element("p", words, class_="note") for words in report.notes)
    if len(report.curve) > 1:
        yield section("tradeoff", "GPU-hours won against regret", _figure(report))
    for one in tables(report):
        yield section(one.name, one.title, *_described(one))
    listing = stops(worst_first(report.stops))
    yield section(listing.name, listing.title, *_described(listing))
    yield element("footer", "gpukeeper backtest · times in UTC")


def _described(one: Table) -> list[Markup]:
    return [text_table(one.head, one.rows, one.title)] if one.rows else [element("p", "None.")]


def _figure(report: BacktestReport) -> Markup:
    return element(
        "figure",
        element(
            "figcaption",
            "Each point is a policy: further up wins more, further left is regretted less. One line for each "
            "threshold; its points are idle times.",
        ),
        element("div", tradeoff(report.curve), class_="wide"),
    )


TIMELINE_WIDTH, TIMELINE_LEFT, TIMELINE_TOP, TIMELINE_HEIGHT = 1000.0, 56.0, 14.0, 200.0
COLUMNS = 470  # one bar for each part of the time
TIMELINE_STYLE = """
svg .use{fill:var(--active)}svg .gap{fill:url(#unmeasured)}svg .threshold{stroke:var(--idle);stroke-dasharray:4 4}
svg .warn{stroke:var(--idle);stroke-width:2}svg .stop{stroke:#c0392b;stroke-width:3}
"""


def timeline_page(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> str:
    return usage_document(f"{run.name}: backtest", TIMELINE_STYLE, _timeline_sections(run, time, changes, threshold))


def _timeline_sections(
    run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float
) -> Iterator[Markup]:
    gpus = len(run.devices)
    about = {
        "owner": run.owner or "nobody",
        "class": changes[-1].decision.class_,
        "GPUs": str(gpus),
        "started": stamp(run.started),
        "ended": "it still ran when the trace ended" if run.ended is None else stamp(run.ended),
    }
    yield element(
        "header",
        element("p", "What the policy would have decided", class_="eyebrow"),
        element("h1", run.name),
        markup.facts(about),
        class_="card",
    )
    caption = "Highest use of its GPUs, in percent. Hatched: not measured. Dashed: counts as use from there on."
    yield section(
        "use",
        "Use and decisions",
        element(
            "figure",
            element("figcaption", caption),
            element("div", picture(run, time, changes, threshold), class_="wide"),
        ),
    )
    rows = [(stamp(one.at), one.decision.action.value, one.decision.rule, one.decision.reason) for one in changes]
    listed = text_table(("at", "decision", "rule", "why"), rows, "Where the decision changed")
    yield section("decisions", "Decisions", listed)
    yield element("footer", "gpukeeper backtest · times in UTC")


def picture(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> Markup:
    begin, end = max(run.started, time.begin), run.ended or time.end
    span = max(end - begin, timedelta(minutes=1))

    def x(at: datetime) -> float:
        return TIMELINE_LEFT + (TIMELINE_WIDTH - TIMELINE_LEFT - 10) * min(max((at - begin) / span, 0.0), 1.0)

    parts: list[Markup] = [markup.hatching(*UNMEASURED), *_axis(begin, end, x(begin), x(end))]
    width = (TIMELINE_WIDTH - TIMELINE_LEFT - 10) / COLUMNS
    for number, value in enumerate(highest(run, begin, end)):
        left = TIMELINE_LEFT + number * width
        if value is None:
            parts.append(
                element("rect", x=left, y=TIMELINE_TOP, width=f"{width:.2f}", height=TIMELINE_HEIGHT, class_="gap")
            )
        elif value > 0:
            size = TIMELINE_HEIGHT * min(value, 100.0) / 100
            at = TIMELINE_TOP + TIMELINE_HEIGHT - size
            parts.append(element("rect", class_="use", x=left, y=at, width=f"{width:.2f}", height=size))
    y = TIMELINE_TOP + TIMELINE_HEIGHT * (1 - threshold / 100)
    parts.append(markup.line(TIMELINE_LEFT, y, TIMELINE_WIDTH - 10, y, "threshold"))
    acts = [one for one in changes if one.decision.action is not Action.KEEP]
    for one in acts:
        kind = "warn" if one.decision.action is Action.WARN else "stop"
        title = f"{stamp(one.at)} {one.decision.action}: {one.decision.reason}"
        parts.append(markup.line(x(one.at), TIMELINE_TOP, x(one.at), TIMELINE_TOP + TIMELINE_HEIGHT, kind, title))
    words = "; ".join(f"{stamp(one.at)} {one.decision.action}" for one in acts) or "no warning and no stop"
    return markup.frame(
        f"Use of {run.name} over time", words, TIMELINE_WIDTH, TIMELINE_TOP + TIMELINE_HEIGHT + 26, *parts
    )


def highest(run: RecordedRun, begin: datetime, end: datetime) -> list[float | None]:
    """Of each part of the time, over its GPUs. None: a minute of it was not measured, and no use was."""
    minute = timedelta(minutes=1)
    total = max(1, -((begin - end) // minute))
    found: list[float | None] = []
    gpus = [one for one in run.series if one.signal is Signal.GPU]
    for number in range(COLUMNS):
        first, last = number * total // COLUMNS, max(number * total // COLUMNS + 1, (number + 1) * total // COLUMNS)
        values: list[float] = []
        for one in gpus:
            shift = (begin - one.start) // minute
            part = one.minutes[max(0, first + shift) : max(0, last + shift)]
            values += part
            values += [float("nan")] * (last - first - len(part))
        known = [value for value in values if not isnan(value)]
        top = max(known, default=0.0)
        found.append(None if len(known) < len(values) and top == 0 else top)
    return found


def _axis(begin: datetime, end: datetime, left: float, right: float) -> Iterable[Markup]:
    for percent in (0, 50, 100):
        y = TIMELINE_TOP + TIMELINE_HEIGHT * (1 - percent / 100)
        yield markup.line(TIMELINE_LEFT, y, TIMELINE_WIDTH - 10, y, "grid")
        yield markup.label(f"{percent}%", TIMELINE_LEFT - 8, y + 4, "end", "small")
    bottom = TIMELINE_TOP + TIMELINE_HEIGHT + 18
    yield markup.label(stamp(begin), left, bottom, "start", "small")
    yield markup.label(stamp(end), right, bottom, "end", "small")
