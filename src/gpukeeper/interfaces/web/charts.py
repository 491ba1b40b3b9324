"""Small charts as SVG: pure functions of numbers. Colours come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup


def sparkline(values: Sequence[float | None], *, most: float = 100.0, width: int = 144, height: int = 28) -> Markup:
    """One line; a gap where nothing was measured. Described in words for those who do not see it."""
    if not any(one is not None for one in values):
        return Markup('<span class="spark none">not measured</span>')
    step = width / max(len(values) - 1, 1)
    runs: list[list[str]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            y = height - 1 - min(max(value / most, 0.0), 1.0) * (height - 2)
            runs[-1].append(f"{number * step:.1f},{y:.1f}")
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
