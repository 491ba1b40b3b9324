"""One recorded run with the decisions about it, as one HTML file: use of its GPUs over time, warnings and the stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import isnan

from gpukeeper.acceptance.reports.html import section
from gpukeeper.acceptance.reports.markup import Markup, element
from gpukeeper.interfaces.terminal.backtest_tables import stamp
from gpukeeper.interfaces.terminal.usage_charts import hatch
from gpukeeper.interfaces.terminal.usage_page import document, table
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
    return document(f"{run.name}: backtest", STYLE, _sections(run, time, changes, threshold))


def _sections(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> Iterator[Markup]:
    gpus = len(run.devices)
    about = {
        "owner": run.owner or "nobody",
        "class": changes[-1].decision.class_,
        "GPUs": str(gpus),
        "started": stamp(run.started),
        "ended": "it still ran when the trace ended" if run.ended is None else stamp(run.ended),
    }
    facts = (element("div", element("dt", name), element("dd", words)) for name, words in about.items())
    yield element(
        "header",
        element("p", "What the policy would have decided", class_="eyebrow"),
        element("h1", run.name),
        element("dl", *facts, class_="facts"),
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
    yield section(
        "decisions", "Decisions", table(("at", "decision", "rule", "why"), rows, "Where the decision changed")
    )
    yield element("footer", "gpukeeper backtest · times in UTC")


def picture(run: RecordedRun, time: TraceTime, changes: Sequence[Evaluation], threshold: float) -> Markup:
    begin, end = max(run.started, time.begin), run.ended or time.end
    span = max(end - begin, timedelta(minutes=1))

    def x(at: datetime) -> float:
        return LEFT + (WIDTH - LEFT - 10) * min(max((at - begin) / span, 0.0), 1.0)

    parts: list[Markup] = [hatch(), *_axis(begin, end, x(begin), x(end))]
    width = (WIDTH - LEFT - 10) / COLUMNS
    for number, value in enumerate(highest(run, begin, end)):
        left = LEFT + number * width
        if value is None:
            parts.append(element("rect", x=f"{left:.1f}", y=TOP, width=f"{width:.2f}", height=HEIGHT, class_="gap"))
        elif value > 0:
            size = HEIGHT * min(value, 100.0) / 100
            box = {
                "x": f"{left:.1f}",
                "y": f"{TOP + HEIGHT - size:.1f}",
                "width": f"{width:.2f}",
                "height": f"{size:.1f}",
            }
            parts.append(element("rect", class_="use", **box))
    y = f"{TOP + HEIGHT * (1 - threshold / 100):.1f}"
    parts.append(element("line", x1=LEFT, x2=WIDTH - 10, y1=y, y2=y, class_="threshold"))
    acts = [one for one in changes if one.decision.action is not Action.KEEP]
    for one in acts:
        kind = "warn" if one.decision.action is Action.WARN else "stop"
        title = element("title", f"{stamp(one.at)} {one.decision.action}: {one.decision.reason}")
        at = f"{x(one.at):.1f}"
        parts.append(element("line", title, x1=at, x2=at, y1=TOP, y2=TOP + HEIGHT, class_=kind))
    words = "; ".join(f"{stamp(one.at)} {one.decision.action}" for one in acts) or "no warning and no stop"
    return element(
        "svg",
        element("title", f"Use of {run.name} over time"),
        element("desc", words),
        *parts,
        viewBox=f"0 0 {WIDTH:g} {TOP + HEIGHT + 26:g}",
        role="img",
        aria_label=f"Use of {run.name} over time: {words}",
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
        y = TOP + HEIGHT * (1 - percent / 100)
        yield element("line", x1=LEFT, x2=WIDTH - 10, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")
        yield element("text", f"{percent}%", x=LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end", class_="small")
    bottom = TOP + HEIGHT + 18
    yield element("text", stamp(begin), x=f"{left:.1f}", y=bottom, text_anchor="start", class_="small")
    yield element("text", stamp(end), x=f"{right:.1f}", y=bottom, text_anchor="end", class_="small")
