"""One recorded run with the decisions about it, as one HTML file: use of its GPUs over time, warnings and the stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import isnan

from gpukeeper.interfaces.terminal.backtest_tables import stamp
from gpukeeper.interfaces.terminal.usage_charts import UNMEASURED
from gpukeeper.interfaces.terminal.usage_page import text_table, usage_document
from gpukeeper.markup import svg
from gpukeeper.markup.elements import Markup, element, facts, section
from gpukeeper.model.decision import Action
from gpukeeper.model.series import Signal
from gpukeeper.model.trace import RecordedRun, TraceTime
from gpukeeper.wiring.backtests import Evaluation

WIDTH, LEFT, TOP, HEIGHT = 1000.0, 56.0, 14.0, 200.0
COLUMNS = 470  # one bar for each part of the time
STYLE = """
svg .use{fill:var(--active)}svg .gap{fill:url(#unmeasured)}svg .threshold{stroke:var(--idle);stroke-dasharray:4 4}
svg .warn{stroke:var(--idle);stroke-width:2}svg .stop{stroke:#c0392b;stroke-width:3}
"""


def timeline_page(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> str:
    return usage_document(f"{run.name}: backtest", STYLE, _sections(run, time, changes, threshold))


def _sections(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> Iterator[Markup]:
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
        facts(about),
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
        return LEFT + (WIDTH - LEFT - 10) * min(max((at - begin) / span, 0.0), 1.0)

    parts: list[Markup] = [svg.hatching(*UNMEASURED), *_axis(begin, end, x(begin), x(end))]
    width = (WIDTH - LEFT - 10) / COLUMNS
    for number, value in enumerate(highest(run, begin, end)):
        left = LEFT + number * width
        if value is None:
            parts.append(element("rect", x=left, y=TOP, width=f"{width:.2f}", height=HEIGHT, class_="gap"))
        elif value > 0:
            size = HEIGHT * min(value, 100.0) / 100
            at = TOP + HEIGHT - size
            parts.append(element("rect", class_="use", x=left, y=at, width=f"{width:.2f}", height=size))
    y = TOP + HEIGHT * (1 - threshold / 100)
    parts.append(svg.line(LEFT, y, WIDTH - 10, y, "threshold"))
    acts = [one for one in changes if one.decision.action is not Action.KEEP]
    for one in acts:
        kind = "warn" if one.decision.action is Action.WARN else "stop"
        title = f"{stamp(one.at)} {one.decision.action}: {one.decision.reason}"
        parts.append(svg.line(x(one.at), TOP, x(one.at), TOP + HEIGHT, kind, title))
    words = "; ".join(f"{stamp(one.at)} {one.decision.action}" for one in acts) or "no warning and no stop"
    return svg.frame(f"Use of {run.name} over time", words, WIDTH, TOP + HEIGHT + 26, *parts)


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
        y = TOP + HEIGHT * (1 - percent / 100)
        yield svg.line(LEFT, y, WIDTH - 10, y, "grid")
        yield svg.label(f"{percent}%", LEFT - 8, y + 4, "end", "small")
    bottom = TOP + HEIGHT + 18
    yield svg.label(stamp(begin), left, bottom, "start", "small")
    yield svg.label(stamp(end), right, bottom, "end", "small")
