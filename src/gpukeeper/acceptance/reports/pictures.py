"""Which pictures a report has data for, and their captions. Pure; the drawing is in plots.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports import plots
from gpukeeper.acceptance.reports.records import floats, mappings, probe_records
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
from gpukeeper.markup.elements import Markup, element
from gpukeeper.model.gpu import Reading


def of_check(report: Report, check: str) -> list[Markup]:
    """A strip plot for every figure of a check, and what its probes can show besides."""
    groups: defaultdict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        if finding.check == check and value_of(finding) is not None and finding.unit:
            groups[metric_words(finding), finding.method, finding.unit].append(finding)
    drawn = [_strip_plot(report, *key, found) for key, found in groups.items() if _worth_drawing(found)]
    return [*drawn, *_of_ranks(report, check)]


def of_gpu(report: Report, uuid: str) -> Markup | None:
    """Its clocks, power and temperature over the run."""
    mine: Sequence[Reading] = [one for one in report.timeline if one.uuid == uuid]
    if len(mine) < 2:
        return None
    held = plots.held_back(sorted(mine, key=lambda one: one.at))
    spans = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in held.items())
    words = f"clocks throttled: {spans}" if spans else "clocks were not throttled"
    return _figure(f"{gpu_words(report, uuid)} over time", words, plots.timeline(gpu_words(report, uuid), mine))


def _worth_drawing(findings: Sequence[Finding]) -> bool:
    """A single value or a count without a reference is shown in the table only."""
    known = [value_of(one) for one in findings]
    differ = len({*known, *(sample for one in findings for sample in one.samples)}) > 1
    return differ or any(one.floor is not None for one in findings)


def _strip_plot(report: Report, name: str, method: str, unit: str, findings: Sequence[Finding]) -> Markup:
    ordered = sorted(findings, key=lambda one: _place(report, one))
    times, shown = (100.0, "percent") if unit == "share" else (1.0, unit)
    lines = [
        plots.PlotRow(gpu_words(report, one.gpu), tuple(times * s for s in one.samples), times * value, one.verdict)
        for one in ordered
        if (value := value_of(one)) is not None
    ]
    marks = {mark: times * value for mark, value in _marks(ordered, unit).items()}
    source = next((f"compared with: {one.source}" for one in ordered if one.source), "")
    notes = (unit_words(shown), direction(unit), f"method {method}" if method else "", source)
    return _figure(name, "; ".join(words for words in notes if words), plots.strips(name, shown, lines, marks))


def _place(report: Report, finding: Finding) -> tuple[int, str]:
    gpu = gpu_of(report, finding.gpu)
    return (-1 if gpu is None else gpu.index, finding.gpu or "")


def _marks(findings: Sequence[Finding], unit: str) -> dict[str, float]:
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
        yield _figure("Steps by rank", words, plots.steps("Step time by rank and step", spans, "ms"))


def _bus_curves(results: object) -> Iterable[Markup]:
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in mappings(results):
        size, speeds = one.get("bytes"), floats(one.get("busbw", []))
        if isinstance(size, int) and size > 0 and speeds:
            series[str(one.get("op", "all_reduce"))].append((float(size), median(speeds)))
    several = {name: points for name, points in series.items() if len(points) > 1}
    if several:
        words = "bus bandwidth by message size, measured on rank 0"
        yield _figure("Bus bandwidth", words, plots.curves("Bus bandwidth", "GB/s", several))


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
        yield _figure("Between GPUs", words, plots.matrix("Bandwidth between GPUs", names, names, values, "GB/s"))


def _figure(title: str, words: str, picture: Markup) -> Markup:
    return element("figure", element("figcaption", title, element("span", words)), picture)
