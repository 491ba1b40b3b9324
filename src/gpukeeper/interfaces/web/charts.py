"""Small charts as SVG: pure functions of numbers. Colours come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from markupsafe import Markup

from gpukeeper.engine.live import STEPS
from gpukeeper.lifecycle.explain import amount
from gpukeeper.model.durations import in_words
from gpukeeper.model.series import Signal
from gpukeeper.views.acceptance_history import Figure, FigurePoint
from gpukeeper.views.timeline import STEP, Timeline, TimelineMark, TimelineSeries


def sparkline(
    values: Sequence[float | None], *, steps: int = STEPS, most: float = 100.0, width: int = 144, height: int = 28
) -> Markup:
    """One line over the last `steps`, so that a short one is short; a gap where nothing was measured.
    Described in words for those who do not see it."""
    if not any(one is not None for one in values):
        return Markup('<span class="spark none">not measured</span>')
    step = width / max(len(values) - 1, steps - 1, 1)
    first = width - step * (len(values) - 1)
    runs: list[list[str]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            y = height - 1 - min(max(value / most, 0.0), 1.0) * (height - 2)
            runs[-1].append(f"{first + number * step:.1f},{y:.1f}")
    lines = Markup("").join(
        Markup('<polyline points="{}"/>').format(" ".join(run if len(run) > 1 else run * 2)) for run in runs if run
    )
    known = [one for one in values if one is not None]
    title = f"use over time: mean {sum(known) / len(known):.0f} %, now {known[-1]:.0f} %"
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}</svg>'
    ).format(width, height, title, lines)


def stacked(parts: Sequence[tuple[str, float]], *, label: str) -> Markup:
    """A bar of shares, each with a class of its own."""
    total = sum(size for _, size in parts) or 1.0
    x, rects = 0.0, []
    for name, size in parts:
        share = 100.0 * size / total
        if size:
            rects.append(
                Markup('<rect class="s-{}" x="{:.3f}" y="0" width="{:.3f}" height="10"/>').format(name, x, share)
            )
        x += share
    return Markup(
        '<svg class="stacked" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(label, Markup("").join(rects))


def figure_lines(found: Figure, *, width: int = 480, height: int = 120) -> Markup:
    """A figure of one GPU over its runs, the median of its peers as a dashed line, and the floor as a dotted one."""
    points, floor = found.points, found.floor
    peers = [(number, one.peers) for number, one in enumerate(points) if one.peers is not None]
    known = [*(one.value for one in points), *(value for _, value in peers), *([] if floor is None else [floor])]
    low, high = min(known), max(known)
    room = (high - low) or abs(high) or 1.0
    low, high = low - 0.1 * room, high + 0.1 * room
    step = (width - 20) / max(len(points) - 1, 1)

    def at(number: int, value: float) -> str:
        return f"{10 + number * step:.1f},{height - (value - low) / (high - low) * height:.1f}"

    parts = [_line("peers", [at(number, value) for number, value in peers])]
    if floor is not None:
        y = at(0, floor).partition(",")[2]
        parts.append(
            Markup('<line class="floor" x1="0" x2="{0}" y1="{1}" y2="{1}"><title>floor {2:g}</title></line>').format(
                width, y, floor
            )
        )
    parts.append(_line("own", [at(number, one.value) for number, one in enumerate(points)]))
    parts += [_dot(one, *at(number, one.value).split(",")) for number, one in enumerate(points)]
    return Markup('<svg class="figure" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, figure_in_words(found), Markup("").join(parts)
    )


def figure_in_words(found: Figure) -> str:
    first, last = found.points[0], found.points[-1]
    words = [f"{found.name}: {first.value:g} on {first.at:%Y-%m-%d}, {last.value:g} on {last.at:%Y-%m-%d}"]
    if last.peers is not None:
        words.append(f"median of its peers {last.peers:g}")
    words.append("no floor known" if found.floor is None else f"floor {found.floor:g}")
    return "; ".join(words)


def _line(name: str, points: Sequence[str]) -> Markup:
    return Markup('<polyline class="{}" points="{}"/>').format(name, " ".join(points)) if points else Markup("")


def _dot(one: FigurePoint, x: str, y: str) -> Markup:
    title = f"{one.at:%Y-%m-%d}: {one.value:g}{'' if one.passed else ', did not pass'}"
    return Markup('<circle class="{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>').format(
        "dot" if one.passed else "dot failed", x, y, 3 if one.passed else 5, title
    )


def timeline_chart(found: Timeline, *, width: int = 960, height: int = 160) -> Markup:
    """Use of each GPU over time; the idle window as a band that ends now; marks as vertical lines."""
    x = _scale(found, width)
    gpus = [one for one in found.series if one.signal is Signal.GPU]
    parts = [
        Markup('<line class="grid" x1="0" x2="{0}" y1="{1}" y2="{1}"/>').format(width, height),
        _window(found, x, width, height),
        *(_held(one, found, x) for one in found.marks if one.kind == "hold" and one.until is not None),
        *(line for one in gpus for line in _polylines(one, x, height, most=100.0)),
        *(_mark(one, x, height) for one in found.marks),
    ]
    return Markup(
        '<svg class="timeline" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}</svg>'
    ).format(width, height, timeline_in_words(found), Markup("").join(parts))


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


def signal_charts(found: Timeline, *, width: int = 960, height: int = 56) -> list[tuple[str, Markup]]:
    """Every other signal that was recorded (CPU, network, disk, terminal), each in its own scale, with its title."""
    made = []
    x = _scale(found, width)
    for one in found.series:
        known = [value for value in one.values if value is not None]
        if one.signal is Signal.GPU or not known:
            continue
        title = f"{_SIGNALS[one.signal]}: at most {amount(one.signal, max(known))}"
        lines = _polylines(one, x, height, most=max(known) or 1.0)
        made.append(
            (
                title,
                Markup(
                    '<svg class="timeline small" viewBox="0 0 {} {}" role="img" aria-label="{}"'
                    ' preserveAspectRatio="none">{}{}</svg>'
                ).format(width, height, title, _window(found, x, width, height), Markup("").join(lines)),
            )
        )
    return made


_SIGNALS = {Signal.CPU: "CPU", Signal.NETWORK: "Network", Signal.DISK: "Disk", Signal.TERMINAL: "Terminal"}
X = Callable[[datetime], float]


def _scale(found: Timeline, width: int) -> X:
    span = (found.now - found.since).total_seconds() or 1.0
    return lambda at: min(max((at - found.since).total_seconds() / span, 0.0), 1.0) * width


def _window(found: Timeline, x: X, width: int, height: int) -> Markup:
    if found.idle_window is None:
        return Markup("")
    left = x(found.now - found.idle_window)
    return Markup('<rect class="window" x="{:.1f}" y="0" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
        left, width - left, height, f"idle window: {in_words(found.idle_window)}"
    )


def _held(hold: TimelineMark, found: Timeline, x: X) -> Markup:
    left, right = x(hold.at), x(min(hold.until or found.now, found.now))
    return Markup('<rect class="held" x="{:.1f}" y="0" width="{:.1f}" height="8"><title>{}</title></rect>').format(
        left, max(right - left, 2), hold.words
    )


def _mark(mark: TimelineMark, x: X, height: int) -> Markup:
    return Markup('<line class="mark m-{}" x1="{:.1f}" x2="{:.1f}" y1="0" y2="{}"><title>{}</title></line>').format(
        mark.kind, x(mark.at), x(mark.at), height, f"{mark.at:%Y-%m-%d %H:%M} UTC: {mark.words}"
    )


def _polylines(one: TimelineSeries, x: X, height: int, *, most: float) -> list[Markup]:
    runs: list[list[str]] = [[]]
    for number, value in enumerate(one.values):
        if value is None:
            runs.append([])
        else:
            y = height - 1 - min(max(value / most, 0.0), 1.0) * (height - 12)
            runs[-1].append(f"{x(one.start + number * STEP):.1f},{y:.1f}")
    return [Markup('<polyline points="{}"/>').format(" ".join(run if len(run) > 1 else run * 2)) for run in runs if run]
