"""A report as CSV: a line for every finding, with its values and what they were compared with. Pure."""

from __future__ import annotations

import csv as comma_separated
import io
from collections.abc import Iterable

from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.wording import gpu_of, serial_of
from gpukeeper.model.unknown import Unknown

COLUMNS = (
    *("run", "started", "node", "device", "gpu", "uuid", "serial", "model", "check", "metric", "verdict", "code"),
    *("value", "unit", "method", "samples", "repeatability", "floor", "ceiling", "reference", "source"),
    *("peer_median", "peer_z", "peer_n", "baseline", "action", "message"),
)


def csv(report: Report) -> str:
    return rows(COLUMNS, (_row(report, finding) for finding in report.findings))


def rows(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    written = io.StringIO()
    writer = comma_separated.writer(written, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow([_cell(value) for value in line])
    return written.getvalue()


def _row(report: Report, finding: Finding) -> tuple[object, ...]:
    gpu = gpu_of(report, finding.gpu)
    name = "" if gpu is None or isinstance(gpu.name, Unknown) else gpu.name
    return (
        *(report.run, report.started.isoformat(), report.node, report.device),
        *("" if gpu is None else gpu.index, finding.gpu or "", serial_of(gpu), name),
        *(finding.check, finding.metric, finding.verdict.value, finding.code, finding.value, finding.unit),
        *(finding.method, " ".join(repr(sample) for sample in finding.samples), finding.repeatability),
        *(finding.floor, finding.ceiling, finding.reference, finding.source),
        *(finding.peer_median, finding.peer_z, finding.peer_n or None, finding.baseline),
        *(finding.action.value, finding.message),
    )


def _cell(value: object) -> str:
    """Nothing for what was not measured. Spreadsheets run what begins with = + - or @; an apostrophe makes it text."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        return repr(value)
    words = "".join(ch if ch.isprintable() else " " for ch in str(value))
    return "'" + words if words.lstrip().startswith(("=", "+", "-", "@")) else words
