"""Small charts as SVG: pure functions of numbers. Colours come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from markupsafe import Markup

from gpukeeper.engine.live import STEPS
from gpukeeper.model.durations import in_words
from gpukeeper.model.series import Signal
from gpukeeper.views.acceptance_history import FigurePoint
from gpukeeper.views.timeline import STEP, Timeline, TimelineSeries


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


def figure_lines(points: Sequence[FigurePoint], *, label: str, width: int = 480, height: int = 120) -> Markup:
    """A figure of one GPU over its runs, and the median of its peers as a dashed line."""
    known = [one.value for one in points] + [one.peers for one in points if one.peers is not None]
    low, high = min(known), max(known)
    room = (high - low) or abs(high) or 1.0
    low, high = low - 0.1 * room, high + 0.1 * room
    step = (width - 20) / max(len(points) - 1, 1)

    def at(number: int, value: float) -> str:
        return f"{10 + number * step:.1f},{height - (value - low) / (high - low) * height:.1f}"

    own = " ".join(at(i, one.value) for i, one in enumerate(points))
    peers = " ".join(at(i, one.peers) for i, one in enumerate(points) if one.peers is not None)
    dots = Markup("").join(
        Markup('<circle cx="{}" cy="{}" r="3"><title>{}</title></circle>').format(
            *at(i, one.value).split(","), f"{one.at:%Y-%m-%d}: {one.value:g}"
        )
        for i, one in enumerate(points)
    )
    words = f"{label}: {points[0].value:g} on {points[0].at:%Y-%m-%d}, {points[-1].value:g} on {points[-1].at:%Y-%m-%d}"
    return Markup(
        '<svg class="figure" viewBox="0 0 {} {}" role="img" aria-label="{}">'
        '<polyline class="peers" points="{}"/><polyline class="own" points="{}"/>{}</svg>'
    ).format(width, height, words, peers, own, dots)


def timeline_chart(found: Timeline, *, width: int = 960, height: int = 160) -> Markup:
    """Use of each GPU over time; the idle window as a band that ends now; marks as vertical lines."""
    span = (found.now - found.since).total_seconds() or 1.0

    def x(at: datetime) -> float:
        return min(max((at - found.since).total_seconds() / span, 0.0), 1.0) * width

    parts = [Markup('<line class="grid" x1="0" x2="{0}" y1="{1}" y2="{1}"/>').format(width, height)]
    if found.idle_window is not None:
        left = x(found.now - found.idle_window)
        parts.append(
            Markup('<rect class="window" x="{:.1f}" y="0" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
                left, width - left, height, f"idle window: {in_words(found.idle_window)}"
            )
        )
    for hold in (one for one in found.marks if one.kind == "hold" and one.until is not None):
        left, right = x(hold.at), x(min(hold.until or found.now, found.now))
        parts.append(
            Markup('<rect class="held" x="{:.1f}" y="0" width="{:.1f}" height="8"><title>{}</title></rect>').format(
                left, max(right - left, 2), hold.words
            )
        )
    gpus = [one for one in found.series if one.signal is Signal.GPU]
    for one in gpus:
        parts += _polylines(one, x, height)
    for mark in found.marks:
        parts.append(
            Markup('<line class="mark m-{}" x1="{:.1f}" x2="{:.1f}" y1="0" y2="{}"><title>{}</title></line>').format(
                mark.kind, x(mark.at), x(mark.at), height, f"{mark.at:%Y-%m-%d %H:%M} UTC: {mark.words}"
            )
        )
    measured = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''} measured" if gpus else "not measured"
    words = f"Use of its GPUs since {found.since:%Y-%m-%d %H:%M} UTC: {measured}; {len(found.marks)} events"
    return Markup(
        '<svg class="timeline" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}</svg>'
    ).format(width, height, words, Markup("").join(parts))


def _polylines(one: TimelineSeries, x: Callable[[datetime], float], height: int) -> list[Markup]:
    runs: list[list[str]] = [[]]
    for number, value in enumerate(one.values):
        if value is None:
            runs.append([])
        else:
            y = height - 1 - min(max(value / 100.0, 0.0), 1.0) * (height - 12)
            runs[-1].append(f"{x(one.start + number * STEP):.1f},{y:.1f}")
    return [Markup('<polyline points="{}"/>').format(" ".join(run if len(run) > 1 else run * 2)) for run in runs if run]
