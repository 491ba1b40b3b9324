"""Pictures of a report as inline SVG: which ones it has data for, their captions, and the drawing. Pure.

Every picture has a title and a description in words; no meaning is in colour alone. Colours come from the style.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from gpukeeper import markup
from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.formats import floats, mappings, probe_records
from gpukeeper.acceptance.reports.wording import (
    direction,
    figure,
    gpu_of,
    gpu_words,
    less_is_better,
    metric_words,
    unit_words,
    value_of,
)
from gpukeeper.markup import Markup, element
from gpukeeper.model.gpu import Grade, Reading

SYMBOLS: Mapping[Grade, str] = {
    Grade.PASS: "✓",
    Grade.WARN: "▲",
    Grade.FAIL: "✕",
    Grade.INCONCLUSIVE: "?",
    Grade.SKIPPED: "–",
}
WIDTH, WIDE = 560.0, 1000.0
_LEFT, _RIGHT, _ROW, _LANE = 86.0, 454.0, 19.0, 14.0
# Why clocks are held back, by the driver's bits: the first that matches names the moment.
REASONS: tuple[tuple[int, str, str], ...] = (
    (0x80, "power brake", "bad"),
    (0x40, "hardware thermal slowdown", "bad"),
    (0x08, "hardware slowdown", "bad"),
    (0x20, "software thermal slowdown", "bad"),
    (0x04, "power cap", "cap"),
    (0x02, "application clocks", "cap"),
)
_BUCKETS = 280
_COLUMNS = 120


@dataclass(frozen=True)
class PlotRow:
    label: str
    samples: tuple[float, ...]
    value: float
    verdict: Grade


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    left: float
    right: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log2(v) if self.logarithmic else v for v in (self.low, self.high, value))
        share = 0.5 if high == low else (here - low) / (high - low)
        return self.left + max(0.0, min(1.0, share)) * (self.right - self.left)


def strips(title: str, unit: str, rows: Sequence[PlotRow], marks: Mapping[str, float]) -> Markup:
    """A line for every GPU: its samples as dots, its figure as a bar, the marks (floor, median, …) across all."""
    shown = {name: value for name, value in marks.items() if math.isfinite(value)}
    scale = _scale([value for row in rows for value in (*row.samples, row.value)], shown.values())
    top = 6 + _LANE * len(shown)
    bottom = top + _ROW * len(rows)
    summary = "; ".join(f"{row.label} {figure(row.value, unit)} {row.verdict}" for row in rows)
    return markup.frame(
        f"{title}, {unit}" if unit else title,
        f"{summary}. {', '.join(f'{name} {figure(value, unit)}' for name, value in shown.items())}",
        WIDTH,
        bottom + 22,
        *_marks(shown, scale, top, bottom),
        *(part for place, row in enumerate(rows) for part in _strip(row, scale, top + _ROW * (place + 0.5))),
        *_axis(scale, bottom),
    )


def matrix(
    title: str, across: Sequence[str], down: Sequence[str], values: Mapping[tuple[int, int], float], unit: str
) -> Markup:
    """A square for every pair; the fuller, the higher. `values` by line and column; what is absent is left open."""
    known = list(values.values())
    highest = max(known, default=1.0)
    # From four fifths on: pairs that differ by noise look alike, one at half speed does not.
    scale = Scale(min(min(known, default=0.0), 0.8 * highest), highest, 0.08, 0.6)
    side = min(52.0, (WIDTH - _LEFT) / max(1, len(across)))
    height = 24 + min(side, 26.0) * len(down)
    parts = [markup.label(name, _LEFT + side * (x + 0.5), 14, "middle") for x, name in enumerate(across)]
    for y, name in enumerate(down):
        middle = 24 + min(side, 26.0) * (y + 0.5)
        parts.append(markup.label(name, _LEFT - 8, middle + 4, "end"))
        for x in range(len(across)):
            parts += _square(values.get((y, x)), scale, _LEFT + side * x, middle, side, unit)
    summary = f"from {figure(min(known, default=0.0), unit)} to {figure(max(known, default=0.0), unit)}"
    return markup.frame(title, summary, WIDTH, height + 4, *parts)


def steps(title: str, spans: Mapping[str, Sequence[float]], unit: str) -> Markup:
    """Rank by step: how much longer than the median of all ranks each took. A slow rank is a coloured line."""
    size = math.ceil(max((len(line) for line in spans.values()), default=1) / _COLUMNS)
    lines = {name: _squeezed(line, max(1, size)) for name, line in spans.items() if line}
    columns = max((len(line) for line in lines.values()), default=0)
    middle = [median(line[x] for line in lines.values() if x < len(line)) for x in range(columns)]
    wide = (WIDTH - _LEFT) / max(1, columns)
    parts = []
    for y, (name, line) in enumerate(lines.items()):
        parts.append(markup.label(name, _LEFT - 8, 8 + 16 * y + 11, "end"))
        for x, value in enumerate(line):
            late = max(0.0, min(1.0, (value / middle[x] - 1) / 0.2)) if middle[x] else 0.0
            cell = {"x": _LEFT + wide * x, "y": 8 + 16.0 * y, "width": wide + 0.3, "height": 14}
            parts.append(element("rect", class_="heat", fill_opacity=f"{0.08 + 0.9 * late:.2f}", **cell))
    summary = "; ".join(f"{name} {figure(median(spans[name]), unit)}" for name in lines)
    return markup.frame(title, f"median step: {summary}", WIDTH, 8 + 16.0 * len(lines) + 4, *parts)


def curves(title: str, unit: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Markup:
    """Over sizes in bytes, each twice the one before; lines differ by their dashes and are named at their end."""
    points = [point for line in series.values() for point in line]
    across = Scale(min(x for x, _ in points), max(x for x, _ in points), _LEFT, _RIGHT, logarithmic=True)
    up = Scale(0.0, max(y for _, y in points) * 1.08 or 1.0, 190, 16)
    parts = [*_grid(up, unit), *_sizes(across)]
    taken: list[float] = []
    for place, (name, line) in enumerate(series.items()):
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in sorted(line))
        parts.append(element("polyline", points=path, class_=f"curve dash{place % 5}"))
        parts += [element("circle", cx=across.at(x), cy=up.at(y), r=2.2, class_="dot") for x, y in line]
        last = _apart(up.at(max(line)[1]), taken)
        taken.append(last)
        parts.append(markup.label(name, _RIGHT + 8, last + 4, "start"))
    summary = "; ".join(f"{name} up to {figure(max(y for _, y in line), unit)}" for name, line in series.items())
    return markup.frame(f"{title}, {unit}", summary, WIDTH, 216, *parts)


def timeline(title: str, readings: Sequence[Reading]) -> Markup:
    """Clock, power and temperature of one GPU; above them which check ran, behind them why clocks were held back."""
    ordered = sorted(readings, key=lambda one: one.at)
    across = Scale(ordered[0].at, max(ordered[-1].at, ordered[0].at + 1), _LEFT, WIDE - 12)
    lanes = [
        ("SM clock", "MHz", [(one.at, one.sm_mhz) for one in ordered]),
        ("power", "W", [(one.at, one.power_w) for one in ordered]),
        ("temperature", "°C", [(one.at, one.temperature_c) for one in ordered]),
    ]
    parts = [
        markup.hatching("hatch", 6, "stripe"),
        *_bands(ordered, across),
        *_held_back(ordered, across, 24, 24 + 62 * len(lanes)),
    ]
    for place, (name, unit, points) in enumerate(lanes):
        parts += _lane(name, unit, [(x, y) for x, y in points if y is not None], across, 28 + 62.0 * place)
    seconds = "".join(f"; {name} for {span:.0f} s" for name, span in held_back(ordered).items())
    bottom = 24 + 62.0 * len(lanes)
    parts += [markup.label(f"{x:g} s", across.at(x), bottom + 14, "middle") for x in _nice(across.low, across.high, 10)]
    summary = f"{len(ordered)} readings over {across.high - across.low:.0f} s{seconds}"
    return markup.frame(title, summary, WIDE, bottom + 20, *parts)


def held_back(readings: Sequence[Reading]) -> dict[str, float]:
    """Seconds by reason for which clocks were held back, as the readings show it."""
    found: dict[str, float] = {}
    for one, following in pairwise(readings):
        name, _ = reason_of(one.reasons)
        if name:
            found[name] = found.get(name, 0.0) + following.at - one.at
    return found


def reason_of(bits: int | None) -> tuple[str, str]:
    return next(((name, kind) for bit, name, kind in REASONS if (bits or 0) & bit), ("", ""))


def _scale(values: Iterable[float], marks: Iterable[float]) -> Scale:
    known = [value for value in (*values, *marks) if math.isfinite(value)] or [0.0]
    room = (max(known) - min(known)) * 0.06 or abs(max(known)) * 0.02 or 1.0
    return Scale(min(known) - room, max(known) + room, _LEFT, _RIGHT)


def _marks(marks: Mapping[str, float], scale: Scale, top: float, bottom: float) -> Iterable[Markup]:
    """Each has a line of its own for its name, so that names never meet."""
    for lane, (name, value) in enumerate(marks.items()):
        x, y = scale.at(value), 12 + _LANE * lane
        before = x > (_LEFT + _RIGHT) / 2
        yield markup.line(x, y - 9, x, bottom, f"mark {name.split()[0]}")
        yield markup.label(
            f"{name} {figure(value)}", x - 5 if before else x + 5, y, "end" if before else "start", "small"
        )
    yield element("rect", x=_LEFT, y=top, width=_RIGHT - _LEFT, height=bottom - top, class_="frame")


def _strip(row: PlotRow, scale: Scale, y: float) -> Iterable[Markup]:
    yield markup.line(_LEFT, y, _RIGHT, y, "grid")
    yield markup.label(row.label, _LEFT - 8, y + 4, "end")
    for sample in row.samples:
        yield element("circle", cx=scale.at(sample), cy=y, r=2.6, class_=f"sample {row.verdict}")
    x = scale.at(row.value)
    yield element("rect", x=x - 1.5, y=y - 7, width=3, height=14, rx=1.5, class_=f"value {row.verdict}")
    yield markup.label(
        f"{SYMBOLS[row.verdict]} {figure(row.value)}", _RIGHT + 10, y + 4, "start", f"figure {row.verdict}"
    )


def _axis(scale: Scale, bottom: float) -> Iterable[Markup]:
    for value in _nice(scale.low, scale.high, 5):
        yield markup.label(figure(value), scale.at(value), bottom + 15, "middle", "small")


def _grid(up: Scale, unit: str) -> Iterable[Markup]:
    for value in _nice(up.low, up.high, 4):
        yield markup.line(_LEFT, up.at(value), _RIGHT, up.at(value), "grid")
        yield markup.label(f"{figure(value)} {unit}", _LEFT - 8, up.at(value) + 4, "end", "small")


def _sizes(across: Scale) -> Iterable[Markup]:
    low, high = math.ceil(math.log2(across.low)), math.floor(math.log2(across.high))
    for power in range(low, high + 1, max(1, (high - low) // 5)):
        value, unit = _binary(power)
        yield markup.label(f"{value} {unit}", across.at(2.0**power), 208, "middle", "small")


def _binary(power: int) -> tuple[int, str]:
    return 2 ** (power % 10), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[min(power // 10, 5)]


def _apart(wanted: float, taken: Sequence[float]) -> float:
    """A place for a name that no other name has."""
    while any(abs(wanted - other) < 12 for other in taken):
        wanted += 3
    return wanted


def _square(value: float | None, scale: Scale, x: float, middle: float, side: float, unit: str) -> Iterable[Markup]:
    high = min(side, 26.0)
    place = {"x": x + 1, "y": middle - high / 2 + 1, "width": side - 2, "height": high - 2, "rx": 2}
    if value is None:
        return (element("rect", class_="frame", **place),)
    tooltip = element("title", figure(value, unit))
    cell = element("rect", tooltip, class_="cell", fill_opacity=f"{scale.at(value):.2f}", **place)
    words = (markup.label(figure(value), x + side / 2, middle + 4, "middle", "small inside"),) if side >= 34 else ()
    return (cell, *words)


def _squeezed(values: Sequence[float], size: int) -> list[float]:
    """The mean of every `size` of them: the same stretch of steps for all ranks."""
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def _bands(readings: Sequence[Reading], across: Scale) -> Iterable[Markup]:
    """Where one check ends and the next begins, with its name where it fits."""
    start = 0
    for place in range(1, len(readings) + 1):
        if place < len(readings) and readings[place].check == readings[start].check:
            continue
        until = readings[min(place, len(readings) - 1)].at
        left, right = across.at(readings[start].at), across.at(until)
        name = readings[start].check
        if name:
            yield markup.line(left, 20, left, 24 + 186, "grid")
            if right - left > 6.2 * len(name):
                yield markup.label(name, (left + right) / 2, 14, "middle", "small")
        start = place


def _held_back(readings: Sequence[Reading], across: Scale, top: float, bottom: float) -> Iterable[Markup]:
    start = 0
    for place in range(1, len(readings) + 1):
        kind = reason_of(readings[start].reasons)
        if place < len(readings) and reason_of(readings[place].reasons) == kind:
            continue
        left, right = across.at(readings[start].at), across.at(readings[min(place, len(readings) - 1)].at)
        if kind[0]:
            tooltip = element("title", f"clocks throttled: {kind[0]}")
            place_of = {"x": left, "y": top, "width": max(1.5, right - left), "height": bottom - top}
            yield element("rect", tooltip, class_=f"held {kind[1]}", **place_of)
        start = place


def _lane(name: str, unit: str, points: Sequence[tuple[float, float]], across: Scale, top: float) -> Iterable[Markup]:
    yield element("rect", x=_LEFT, y=top, width=across.right - _LEFT, height=52, class_="frame")
    yield markup.label(name, _LEFT - 8, top + 14, "end")
    if not points:
        yield markup.label("not measured", _LEFT + 8, top + 30, "start", "small")
        return
    highest, lowest = max(y for _, y in points), min(y for _, y in points)
    up = Scale(lowest, highest if highest > lowest else lowest + 1, top + 48, top + 4)
    yield markup.label(f"{figure(lowest)} to", _LEFT - 8, top + 31, "end", "small")
    yield markup.label(f"{figure(highest)} {unit}", _LEFT - 8, top + 45, "end", "small")
    path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in _thinned(points))
    yield element("polyline", points=path, class_="curve")


def _thinned(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Lowest and highest of every stretch: a day of readings draws as fast as a minute, and no peak is lost."""
    size = math.ceil(len(points) / _BUCKETS)
    if size <= 2:
        yield from points
        return
    for start in range(0, len(points), size):
        part = points[start : start + size]
        low, high = min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])
        yield from sorted({low, high})


def _nice(low: float, high: float, wanted: int) -> list[float]:
    """Round figures between two others."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]


def pictures_of_check(report: Report, check: str) -> list[Markup]:
    """A strip plot for every figure of a check, and what its probes can show besides."""
    groups: defaultdict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        if finding.check == check and value_of(finding) is not None and finding.unit:
            groups[metric_words(finding), finding.method, finding.unit].append(finding)
    drawn = [_strip_plot(report, *key, found) for key, found in groups.items() if _worth_drawing(found)]
    return [*drawn, *_of_ranks(report, check)]


def pictures_of_gpu(report: Report, uuid: str) -> Markup | None:
    """Its clocks, power and temperature over the run."""
    mine: Sequence[Reading] = [one for one in report.timeline if one.uuid == uuid]
    if len(mine) < 2:
        return None
    held = held_back(sorted(mine, key=lambda one: one.at))
    spans = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in held.items())
    words = f"clocks throttled: {spans}" if spans else "clocks were not throttled"
    return _picture(f"{gpu_words(report, uuid)} over time", words, timeline(gpu_words(report, uuid), mine))


def _worth_drawing(findings: Sequence[Finding]) -> bool:
    """A single value or a count without a reference is shown in the table only."""
    known = [value_of(one) for one in findings]
    differ = len({*known, *(sample for one in findings for sample in one.samples)}) > 1
    return differ or any(one.floor is not None for one in findings)


def _strip_plot(report: Report, name: str, method: str, unit: str, findings: Sequence[Finding]) -> Markup:
    ordered = sorted(findings, key=lambda one: _place(report, one))
    times, shown = (100.0, "percent") if unit == "share" else (1.0, unit)
    lines = [
        PlotRow(gpu_words(report, one.gpu), tuple(times * s for s in one.samples), times * value, one.verdict)
        for one in ordered
        if (value := value_of(one)) is not None
    ]
    marks = {mark: times * value for mark, value in _picture_marks(ordered, unit).items()}
    source = next((f"compared with: {one.source}" for one in ordered if one.source), "")
    notes = (unit_words(shown), direction(unit), f"method {method}" if method else "", source)
    return _picture(name, "; ".join(words for words in notes if words), strips(name, shown, lines, marks))


def _place(report: Report, finding: Finding) -> tuple[int, str]:
    gpu = gpu_of(report, finding.gpu)
    return (-1 if gpu is None else gpu.index, finding.gpu or "")


def _picture_marks(findings: Sequence[Finding], unit: str) -> dict[str, float]:
    """Lines across all GPUs, only where they all have the same; the median is of this run."""
    values = [value for one in findings if (value := value_of(one)) is not None]
    marks = {"limit" if less_is_better(unit) else "floor": _shared(one.floor for one in findings)}
    marks["median of this run"] = median(values) if len(values) > 2 else None
    marks["reference"] = _shared(one.reference for one in findings)
    if len(findings) == 1:
        marks["before"] = findings[0].baseline
    return {name: value for name, value in marks.items() if value is not None}


def _shared(values: Iterable[float | None]) -> float | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _of_ranks(report: Report, check: str) -> Iterable[Markup]:
    ranks = probe_records(report, check)
    if not ranks:
        return
    yield from _bus_curves(ranks[0].result.get("results") or ranks[0].result.get("rows"))
    yield from _pairs(ranks[0].result.get("pairs"))
    spans = {f"rank {one.by}": spent for one in ranks if len(spent := floats(one.result.get("step_ms", []))) > 1}
    if len(spans) > 1:
        words = "colour: slower than the other ranks in the same step; full colour at 20 % or more"
        yield _picture("Steps by rank", words, steps("Step time by rank and step", spans, "ms"))


def _bus_curves(results: object) -> Iterable[Markup]:
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in mappings(results):
        size, speeds = one.get("bytes"), floats(one.get("busbw", []))
        if isinstance(size, int) and size > 0 and speeds:
            series[str(one.get("op", "all_reduce"))].append((float(size), median(speeds)))
    several = {name: points for name, points in series.items() if len(points) > 1}
    if several:
        words = "bus bandwidth by message size, measured on rank 0"
        yield _picture("Bus bandwidth", words, curves("Bus bandwidth", "GB/s", several))


def _pairs(pairs: object) -> Iterable[Markup]:
    listed = mappings(pairs)
    values = {
        (int(one["from"]), int(one["to"])): median(speeds)
        for one in listed
        if isinstance(one.get("from"), int)
        and isinstance(one.get("to"), int)
        and (speeds := floats(one.get("gbps", [])))
    }
    if values:
        names = [f"GPU {place}" for place in range(max(max(pair) for pair in values) + 1)]
        low, high = min(values.values()), max(values.values())
        words = f"GB/s from the GPU of the row to the GPU of the column; {figure(low)} to {figure(high)}"
        yield _picture("Between GPUs", words, matrix("Bandwidth between GPUs", names, names, values, "GB/s"))


def _picture(title: str, words: str, picture: Markup) -> Markup:
    return element("figure", element("figcaption", title, element("span", words)), picture)
