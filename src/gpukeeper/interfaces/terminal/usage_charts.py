"""Pictures of a usage report as inline SVG: bars by day, and hours of the week. Pure; the page's style has the colours.

Every picture has a title and a description in words; each state has a pattern or a number, not only a colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpukeeper.interfaces.terminal.usage_tables import STATES
from gpukeeper.markup import svg
from gpukeeper.markup.elements import Markup, element
from gpukeeper.views.usage import GpuHours, HeatRow, UsageRow

WIDTH, LEFT, TOP, HEIGHT = 1000.0, 64.0, 10.0, 220.0
_CELL, _ROW = 38.0, 26.0
UNMEASURED = ("unmeasured", 5, "hatching")  # what is hatched in every picture of use
CHART_STYLE = """
:root{--active:#2a7453;--idle:#b86b00;--free:#8fb7cf;--unknown:#8b9299}
@media (prefers-color-scheme:dark){:root{--active:#5fb98f;--idle:#e3a04a;--free:#3f6f8c;--unknown:#7d868d}}
svg .active,.key.active{fill:var(--active);background:var(--active)}svg .idle,.key.idle{fill:var(--idle);
background:var(--idle)}svg .free,.key.free{fill:var(--free);background:var(--free)}
svg .unknown{fill:url(#unmeasured)}.key.unknown{background:repeating-linear-gradient(45deg,var(--unknown) 0 2px,
transparent 2px 5px)}svg .hatching{stroke:var(--unknown);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.85rem;margin:0 0 8px;padding:0;list-style:none}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;border:1px solid var(--muted)}
.wide{overflow-x:auto}.wide svg{min-width:720px}
svg text.ink{fill:var(--ink);stroke:none}figure+figure{margin-top:14px}
td,tbody th{overflow-wrap:anywhere}td.num,th.num{text-align:right;white-space:nowrap}
"""


def legend() -> Markup:
    keys = (element("li", element("span", class_=f"key {name}"), words) for name, words in STATES)
    return element("ul", *keys, class_="legend")


def bars(days: Sequence[UsageRow]) -> Markup:
    """A bar for each day, split by state."""
    highest = max((row.hours.all for row in days), default=0.0) or 1.0
    bottom, wide = TOP + HEIGHT, (WIDTH - LEFT - 10) / max(len(days), 1)
    parts = [svg.hatching(*UNMEASURED), *_axis(highest, bottom)]
    every = max(1, round(52 / wide + 0.5))
    for number, row in enumerate(days):
        left, at = LEFT + wide * number, bottom
        for name, words in STATES:
            hours = getattr(row.hours, name)
            size = HEIGHT * hours / highest
            at -= size
            if size > 0:
                title = element("title", f"{row.name}: {hours:.1f} GPU-hours {words}")
                box = {"x": left + wide * 0.1, "y": at, "width": max(wide * 0.8, 1.0), "height": size}
                parts.append(element("rect", title, class_=name, **box))
        if number % every == 0:
            parts.append(svg.label(row.name[5:], left + wide / 2, bottom + 16, "middle", "small"))
    words = "; ".join(f"{row.name} {_in_words(row.hours)}" for row in days)
    return svg.frame("GPU-hours by day", words or "no data", WIDTH, bottom + 24, *parts)


def heat(rows: Sequence[HeatRow], state: str, title: str) -> Markup:
    """The share of the measured time in that state, in percent, by day of the week and hour of the day."""
    highest = max((share for row in rows for one in row.hours if (share := _share(one, state)) is not None), default=0)
    parts = [svg.hatching(*UNMEASURED)]
    parts += [svg.label(f"{hour:02}", LEFT + 20 + _CELL * (hour + 0.5), 14, "middle", "small") for hour in range(24)]
    for y, row in enumerate(rows):
        parts.append(svg.label(row.day[:3], LEFT + 10, 22 + _ROW * y + 17, "end", "small"))
        for x, hours in enumerate(row.hours):
            parts += _heat_cell(hours, state, highest, LEFT + 20 + _CELL * x, 22 + _ROW * y, f"{row.day} {x:02}")
    return svg.frame(title, _heat_words(rows, state), WIDTH, 22 + _ROW * len(rows) + 6, *parts)


def _heat_cell(hours: GpuHours, state: str, highest: float, x: float, y: float, when: str) -> Iterator[Markup]:
    share = _share(hours, state)
    box = {"x": x + 1, "y": y + 1, "width": _CELL - 2, "height": _ROW - 2, "rx": 3}
    if share is None:
        yield element("rect", element("title", f"{when}: not measured"), class_="unknown", **box)
        return
    full = share / highest if highest else 0.0
    title = element("title", f"{when}: {share:.0%} of {hours.all - hours.unknown:.1f} measured GPU-hours")
    yield element("rect", title, class_=state, fill_opacity=f"{0.05 + 0.5 * full:.2f}", **box)
    yield svg.label(f"{share * 100:.0f}", x + _CELL / 2, y + 17, "middle", "small ink")


def _share(hours: GpuHours, state: str) -> float | None:
    measured = hours.all - hours.unknown
    return float(getattr(hours, state)) / measured if measured > 1e-9 else None


def _heat_words(rows: Sequence[HeatRow], state: str) -> str:
    found = []
    for row in rows:
        shares = [(share, hour) for hour, one in enumerate(row.hours) if (share := _share(one, state)) is not None]
        if shares:
            most, hour = max(shares)
            found.append(f"{row.day} up to {most:.0%} at {hour:02}")
    return "; ".join(found) or "not measured"


def _in_words(hours: GpuHours) -> str:
    return ", ".join(f"{getattr(hours, name):.1f} {words}" for name, words in STATES if getattr(hours, name) >= 0.05)


def _axis(highest: float, bottom: float) -> Iterator[Markup]:
    for share in (0.0, 0.5, 1.0):
        y = bottom - HEIGHT * share
        yield svg.line(LEFT, y, WIDTH - 10, y, "grid")
        yield svg.label(
            f"{highest * share:.0f} h" if highest >= 10 else f"{highest * share:.1f} h", LEFT - 8, y + 4, "end", "small"
        )
