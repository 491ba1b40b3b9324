"""What all pictures share: the frame with its description, labels, lines, hatching, lines with gaps."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.markup.elements import Markup, element


def frame(title: str, words: str, width: float, height: float, *parts: Markup) -> Markup:
    """`words`: the picture for those who do not see it."""
    return element(
        "svg",
        element("title", title),
        element("desc", words),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}: {words}",
    )


def small(class_: str, words: str, width: float, height: float, *parts: Markup, stretched: bool = False) -> Markup:
    """A chart inside of a page, described by `words` alone. `stretched`: fills its place in both directions."""
    ratio = {"preserveAspectRatio": "none"} if stretched else {}
    box = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": words, **ratio}
    return element("svg", *parts, class_=class_, **box)


def label(words: str, x: float, y: float, anchor: str, class_: str = "label") -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, title: str | None = None) -> Markup:
    return element(
        "line", None if title is None else element("title", title), x1=x1, y1=y1, x2=x2, y2=y2, class_=class_
    )


def hatching(name: str, side: int, class_: str) -> Markup:
    """Stripes to fill with (`url(#name)`), so that colour is not the only sign. Define them once in each picture."""
    stripe = element("line", x1=0, y1=0, x2=0, y2=side, class_=class_)
    turned = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    return element("defs", element("pattern", stripe, id=name, width=side, height=side, **turned))


def broken_line(points: Iterable[tuple[float, float] | None]) -> list[Markup]:
    """A line with a gap at every None. A single point is drawn as a line from it to itself, which has round ends."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(f"{point[0]:.1f},{point[1]:.1f}")
    lines = (" ".join(run if len(run) > 1 else run * 2) for run in runs if run)
    return [Markup(f'<polyline points="{points}"/>') for points in lines]  # numbers only, so nothing to escape
