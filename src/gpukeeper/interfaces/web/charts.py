"""Small charts as SVG: pure functions of numbers. Colours come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from gpukeeper import markup
from gpukeeper.engine.live import STEPS
from gpukeeper.lifecycle.explain import amount
from gpukeeper.markup import Markup, element
from gpukeeper.model.series import Signal
from gpukeeper.model.words import in_words
from gpukeeper.views.acceptance_history import Figure, FigurePoint
from gpukeeper.views.explain import STEP, Timeline, TimelineMark, TimelineSeries


def sparkline(
    values: Sequence[float | None], *, steps: int = STEPS, most: float = 100.0, width: int = 144, height: int = 28
) -> Markup:
    """One line over the last `steps`, so that a short one is short; a gap where nothing was measured.
    Described in words for those who do not see it."""
    if not any(one is not None for one in values):
        return element("span", "not measured", class_="spark none")
    step = width / max(len(values) - 1, steps - 1, 1)
    first = width - step * (len(values) - 1)
    points = (
        None if value is None else (first + number * step, _height(value, most, height, height - 2))
        for number, value in enumerate(values)
    )
    known = [one for one in values if one is not None]
    title = f"use over time: mean {sum(known) / len(known):.0f} %, now {known[-1]:.0f} %"
    return markup.small("spark", title, width, height, *markup.broken_line(points), stretched=True)


def stacked(parts: Sequence[tuple[str, float]], *, label: str) -> Markup:
    """A bar of shares, each with a class of its own."""
    total = sum(size for _, size in parts) or 1.0
    x, rects = 0.0, []
    for name, size in parts:
        share = 100.0 * size / total
        if size:
            rects.append(element("rect", class_=f"s-{name}", x=f"{x:.3f}", y=0, width=f"{share:.3f}", height=10))
        x += share
    return markup.small("stacked", label, 100, 10, *rects, stretched=True)


def figure_lines(found: Figure) -> Markup:
    """A figure of one GPU over its runs, the median of its peers as a dashed line, and the floor as a dotted one."""
    width, height = 480, 120
    points, floor = found.points, found.floor
    peers = [(number, one.peers) for number, one in enumerate(points) if one.peers is not None]
    known = [*(one.value for one in points), *(value for _, value in peers), *([] if floor is None else [floor])]
    low, high = min(known), max(known)
    room = (high - low) or abs(high) or 1.0
    low, high = low - 0.1 * room, high + 0.1 * room
    step = (width - 20) / max(len(points) - 1, 1)

    def at(number: int, value: float) -> tuple[float, float]:
        return 10 + number * step, height - (value - low) / (high - low) * height

    parts = [_line("peers", [at(number, value) for number, value in peers])] if peers else []
    if floor is not None:
        y = at(0, floor)[1]
        parts.append(markup.line(0, y, width, y, "floor", f"floor {floor:g}"))
    parts.append(_line("own", [at(number, one.value) for number, one in enumerate(points)]))
    parts += [_dot(one, *at(number, one.value)) for number, one in enumerate(points)]
    return markup.small("figure", figure_in_words(found), width, height, *parts)


def figure_in_words(found: Figure) -> str:
    first, last = found.points[0], found.points[-1]
    words = [f"{found.name}: {first.value:g} on {first.at:%Y-%m-%d}, {last.value:g} on {last.at:%Y-%m-%d}"]
    if last.peers is not None:
        words.append(f"median of its peers {last.peers:g}")
    words.append("no floor known" if found.floor is None else f"floor {found.floor:g}")
    return "; ".join(words)


def _line(name: str, points: Sequence[tuple[float, float]]) -> Markup:
    return element("polyline", class_=name, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def _dot(one: FigurePoint, x: float, y: float) -> Markup:
    title = element("title", f"{one.at:%Y-%m-%d}: {one.value:g}{'' if one.passed else ', did not pass'}")
    size, name = (3, "dot") if one.passed else (5, "dot failed")
    return element("circle", title, class_=name, cx=x, cy=y, r=size)


def timeline_chart(found: Timeline) -> Markup:
    """Use of each GPU over time; the idle window as a band that ends now; marks as vertical lines."""
    width, height = 960, 160
    x = _scale(found, width)
    gpus = [one for one in found.series if one.signal is Signal.GPU]
    parts = [
        markup.line(0, height, width, height, "grid"),
        *_window(found, x, width, height),
        *(_held(one, found, x) for one in found.marks if one.kind == "hold" and one.until is not None),
        *(line for one in gpus for line in _polylines(one, x, height, most=100.0)),
        *(_mark(one, x, height) for one in found.marks),
    ]
    return markup.small("timeline", timeline_in_words(found), width, height, *parts, stretched=True)


def timeline_in_words(found: Timeline) -> str:
    """The picture for those who do not see it; the events themselves are a list beside it."""
    gpus = [one for one in found.series if one.signal is Signal.GPU]
    means = [value for one in gpus for value in one.values if value is not None]
    words = [f"Use of its GPUs since {found.since:%Y-%m-%d %H:%M} UTC: " + _measured(len(gpus), means)]
    if found.idle_window is not None:
        words.append(f"idle window: the last {in_words(found.idle_window)}")
    if found.idle_since is not None:
        words.append(f"not used since {found.idle_since:%Y-%m-%d %H:%M} UTC")
    kinds = {"warning": "warning", "hold": "hold", "release": "release", "decision": "decision", "act": "action"}
    for kind, name in kinds.items():
        number = sum(one.kind == kind for one in found.marks)
        if number:
            words.append(f"{number} {name}{'s' if number > 1 else ''}")
    return "; ".join(words)


def _measured(gpus: int, means: Sequence[float]) -> str:
    if not means:
        return "not measured"
    return (
        f"{gpus} GPU{'s' if gpus != 1 else ''} measured, mean {sum(means) / len(means):.0f} %, most {max(means):.0f} %"
    )


def signal_charts(found: Timeline) -> list[tuple[str, Markup]]:
    """Every other signal that was recorded (CPU, network, disk, terminal), each in its own scale, with its title."""
    width, height, made = 960, 56, []
    x = _scale(found, width)
    for one in found.series:
        known = [value for value in one.values if value is not None]
        if one.signal is Signal.GPU or not known:
            continue
        title = f"{_SIGNALS[one.signal]}: at most {amount(one.signal, max(known))}"
        parts = [*_window(found, x, width, height), *_polylines(one, x, height, most=max(known) or 1.0)]
        made.append((title, markup.small("timeline small", title, width, height, *parts, stretched=True)))
    return made


_SIGNALS = {Signal.CPU: "CPU", Signal.NETWORK: "Network", Signal.DISK: "Disk", Signal.TERMINAL: "Terminal"}
X = Callable[[datetime], float]


def _scale(found: Timeline, width: int) -> X:
    span = (found.now - found.since).total_seconds() or 1.0
    return lambda at: min(max((at - found.since).total_seconds() / span, 0.0), 1.0) * width


def _window(found: Timeline, x: X, width: int, height: int) -> list[Markup]:
    if found.idle_window is None:
        return []
    left = x(found.now - found.idle_window)
    title = element("title", f"idle window: {in_words(found.idle_window)}")
    return [element("rect", title, class_="window", x=left, y=0, width=width - left, height=height)]


def _held(hold: TimelineMark, found: Timeline, x: X) -> Markup:
    left, right = x(hold.at), x(min(hold.until or found.now, found.now))
    return element(
        "rect", element("title", hold.words), class_="held", x=left, y=0, width=max(right - left, 2), height=8
    )


def _mark(mark: TimelineMark, x: X, height: int) -> Markup:
    at = x(mark.at)
    return markup.line(at, 0, at, height, f"mark m-{mark.kind}", f"{mark.at:%Y-%m-%d %H:%M} UTC: {mark.words}")


def _polylines(one: TimelineSeries, x: X, height: int, *, most: float) -> list[Markup]:
    return markup.broken_line(
        None if value is None else (x(one.start + number * STEP), _height(value, most, height, height - 12))
        for number, value in enumerate(one.values)
    )


def _height(value: float, most: float, height: int, room: int) -> float:
    return height - 1 - min(max(value / most, 0.0), 1.0) * room
