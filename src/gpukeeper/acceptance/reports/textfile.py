"""A report as metrics, for the textfile collector of a node_exporter. Pure text, in the format's own words.

What was not measured has no series; a skipped check has none either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.wording import gpu_of, metric_words, serial_of, worst_first
from gpukeeper.model.grade import Grade

PREFIX = "gpukeeper_acceptance_"
CODES: Mapping[Grade, int] = {Grade.PASS: 0, Grade.WARN: 1, Grade.FAIL: 2, Grade.INCONCLUSIVE: 3}
_VERDICTS = "0 PASS, 1 WARN, 2 FAIL, 3 INCONCLUSIVE."
SERIES: Mapping[str, str] = {
    "info": "Always 1; the labels identify the run.",
    "node_verdict": f"Verdict on the node: {_VERDICTS}",
    "gpu_verdict": f"Verdict on a GPU: {_VERDICTS}",
    "verdict": f"Verdict of a test: {_VERDICTS}",
    "value": "Measured value of a test, in its unit.",
    "floor": "Floor of a test, in its unit; below it the test fails.",
    "peer_z": "Distance of a GPU from the median of its peers, in robust standard deviations.",
    "last_run_timestamp_seconds": "End of the last acceptance run.",
    "run_duration_seconds": "Duration of the last acceptance run.",
}


@dataclass(frozen=True)
class _Sample:
    series: str
    labels: Mapping[str, str]
    value: float


def metrics(report: Report) -> str:
    samples = [*_of_run(report), *_of_gpus(report), *_of_findings(report)]
    lines: list[str] = []
    for series, meaning in SERIES.items():
        mine = [sample for sample in samples if sample.series == series]
        if mine:
            lines += [f"# HELP {PREFIX}{series} {meaning}", f"# TYPE {PREFIX}{series} gauge"]
            lines += [_line(sample) for sample in mine]
    return "\n".join(lines) + "\n"


def _of_run(report: Report) -> Iterable[_Sample]:
    node = {"node": report.node}
    labels = {"run": report.run, "version": report.version, "device": report.device, "profile": report.profile}
    yield _Sample("info", node | labels, 1)
    if report.verdict in CODES:
        yield _Sample("node_verdict", node, CODES[report.verdict])
    yield _Sample("last_run_timestamp_seconds", node, report.ended.timestamp())
    yield _Sample("run_duration_seconds", node, (report.ended - report.started).total_seconds())


def _of_gpus(report: Report) -> Iterable[_Sample]:
    for tally in report.tallies:
        if tally.verdict in CODES:
            yield _Sample("gpu_verdict", _place(report, tally.gpu), CODES[tally.verdict])


def _of_findings(report: Report) -> Iterable[_Sample]:
    """One series for a test, however many findings it has: the worst."""
    seen: set[tuple[str, str | None]] = set()
    for finding in worst_first(report.findings):
        key = (metric_words(finding), finding.gpu)
        if finding.verdict not in CODES or key in seen:
            continue
        seen.add(key)
        labels = _place(report, finding.gpu) | {"test": metric_words(finding)}
        yield _Sample("verdict", labels, CODES[finding.verdict])
        yield from _figures(finding, labels)


def _figures(finding: Finding, labels: Mapping[str, str]) -> Iterable[_Sample]:
    for series, value in (("value", finding.value), ("floor", finding.floor)):
        if value is not None and math.isfinite(value):
            yield _Sample(series, {**labels, "unit": finding.unit}, value)
    if finding.peer_z is not None and math.isfinite(finding.peer_z):
        yield _Sample("peer_z", labels, finding.peer_z)


def _place(report: Report, uuid: str | None) -> dict[str, str]:
    gpu = gpu_of(report, uuid)
    name = "" if uuid is None else uuid if gpu is None else f"{gpu.index}"
    if gpu is not None and gpu.part_of:
        name = gpu.uuid  # slices share their GPU's place
    return {"node": report.node, "gpu": name, "serial": serial_of(gpu)}


def _line(sample: _Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    return f"{PREFIX}{sample.series}{{{labels}}} {float(sample.value)!r}"


def _escaped(value: str) -> str:
    """The format forbids only backslash, quote and line end as they are; halves of characters are no UTF-8."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
