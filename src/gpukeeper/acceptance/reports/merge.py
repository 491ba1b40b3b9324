"""Many nodes' reports as one: the fleet's verdict, and GPUs that stand out among all of one model; CSV of both. Pure.

A node that was expected and has no report is inconclusive, never forgotten; a node with several counts by its newest
that tested all of it. A newer run of a part cannot make up for a failure of the whole.
"""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, TypeAlias

import msgspec

from gpukeeper.acceptance.judging import comparisons
from gpukeeper.acceptance.judging.comparisons import Figure
from gpukeeper.acceptance.record import Finding, Report
from gpukeeper.acceptance.reports.wording import (
    SPEEDS,
    TIMES,
    gpu_of,
    gpus_of,
    identity_of,
    less_is_better,
    needs_attention,
    serial_of,
    value_of,
)
from gpukeeper.model.gpu import Grade, rank, worst
from gpukeeper.model.unknown import Unknown

COLUMNS = (
    *("run", "started", "node", "device", "gpu", "uuid", "serial", "model", "check", "metric", "verdict", "code"),
    *("value", "unit", "method", "samples", "repeatability", "floor", "ceiling", "reference", "source"),
    *("peer_median", "peer_z", "peer_n", "baseline", "action", "message"),
)


def report_csv(report: Report) -> str:
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


FLEET_SCHEMA = "gpukeeper/fleet/v1"
SLICE_OF = "slice"


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    verdict: Grade
    reason: str
    run: str
    ended: datetime
    device: str
    version: str
    gpus: int | None  # None: could not be learned
    worst: tuple[str, ...] = ()  # codes of what needs attention, worst first


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """`drop`: how much worse than the median of the fleet, 0.05 is 5 %. `z`: none when all are equal."""

    node: str
    gpu: str  # identity
    index: int
    value: float
    drop: float
    z: float | None
    verdict: Grade


class FleetFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of all GPUs of one model, by one method."""

    check: str
    metric: str
    method: str
    unit: str
    model: str
    n: int
    median: float
    low: float
    high: float
    reference: float | None = None
    values: tuple[tuple[str, float], ...] = ()  # node/index and figure
    outliers: tuple[Outlier, ...] = ()


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Grade
    reason: str
    nodes: tuple[FleetNode, ...] = ()  # failing first
    missing: tuple[str, ...] = ()  # expected, and no report
    reasons: Mapping[str, str] = {}  # why there is none, by node, as far as known
    unexpected: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()  # sentences: reports that do not count, since another one of the node does
    doubles: tuple[str, ...] = ()  # sentences: a GPU that two nodes claim to have, a name that two machines have
    figures: tuple[FleetFigure, ...] = ()
    schema: str = FLEET_SCHEMA


_Stratum: TypeAlias = tuple[str, str, str, str, str]  # check, metric, method, unit, model


def merge(
    reports: Iterable[Report], expected: Sequence[str] = (), reasons: Mapping[str, str] | None = None
) -> FleetReport:
    """`expected`: names of nodes that must have a report; empty: any. `reasons`: why some have none."""
    machines = _machines(reports)
    newest = [_that_counts(one.runs) for one in machines]
    nodes = tuple(sorted((_node(one) for one in newest), key=lambda one: (-rank(one.verdict), one.node)))
    missing = tuple(sorted(set(expected) - {one.node for one in nodes}))
    unexpected = tuple(sorted({one.node for one in nodes} - set(expected))) if expected else ()
    figures = _fleet_figures(newest)
    grades = [*(one.verdict for one in nodes), *(Grade.INCONCLUSIVE for _ in missing)]
    grades += [outlier.verdict for one in figures for outlier in one.outliers]
    verdict = worst(grades)
    return FleetReport(
        verdict=verdict,
        reason=_reason(nodes, missing, figures),
        nodes=nodes,
        missing=missing,
        reasons={name: words for name, words in (reasons or {}).items() if name in missing},
        unexpected=unexpected,
        replaced=tuple(words for one, best in zip(machines, newest, strict=True) for words in _replaced(one, best)),
        doubles=(*_doubles(newest), *_namesakes(newest)),
        figures=figures,
    )


def fleet_csv(fleet: FleetReport) -> str:
    """A line for every node, expected ones without a report included."""
    head = ("node", "verdict", "gpus", "run", "ended", "device", "version", "reason")
    there = [
        (one.node, one.verdict.value, one.gpus, one.run, one.ended.isoformat(), one.device, one.version, one.reason)
        for one in fleet.nodes
    ]
    absent = [
        (name, Grade.INCONCLUSIVE.value, None, "", "", "", "", why_missing(fleet, name)) for name in fleet.missing
    ]
    return rows(head, [*there, *absent])


def why_missing(fleet: FleetReport, node: str) -> str:
    return fleet.reasons.get(node, "no report of this node")


@dataclass
class _Machine:
    node: str
    gpus: set[str]  # their uuids; of slices also those of the whole GPUs
    runs: list[Report]  # oldest first


def _machines(reports: Iterable[Report]) -> list[_Machine]:
    """Names are not unique; GPUs are. Reports of one name are of one machine when they have a GPU in common. A report
    without GPUs is taken for one of the only machine of its name."""
    found: list[_Machine] = []
    for report in sorted(reports, key=lambda one: (not _uuids(one), one.ended, one.run)):
        own = _uuids(report)
        here = [one for one in found if one.node == report.node]
        alike = [one for one in here if own & one.gpus or not (own or one.gpus)]
        if not own and len(here) == 1:
            alike = here
        runs = [*(run for one in alike for run in one.runs), report]
        joined = _Machine(report.node, own.union(*(one.gpus for one in alike)), runs)
        found = [*(one for one in found if one not in alike), joined]
    for one in found:
        one.runs.sort(key=lambda run: (run.ended, run.run))
    return found


def _uuids(report: Report) -> set[str]:
    """None where CPUs or a simulation stood in for GPUs."""
    gpus = gpus_of(report.machine) if report.device == "cuda" else ()
    return {uuid for gpu in gpus for uuid in (gpu.uuid, gpu.part_of) if uuid}


def _that_counts(runs: Sequence[Report]) -> Report:
    """The newest that tested all of it, or a failure of a part since then; the worst, where none tested all of it."""
    whole = [place for place, one in enumerate(runs) if not _doubts(one)]
    if whole:
        since = runs[whole[-1] + 1 :]
        runs = [runs[whole[-1]], *(one for one in since if one.device == "cuda" and one.verdict is Grade.FAIL)]
    return max(reversed(runs), key=lambda one: rank(_believed(one)[0]))


def _replaced(machine: _Machine, best: Report) -> Iterable[str]:
    for one in machine.runs:
        name = f"{one.node}: run {one.run} ({one.verdict})"
        if one.run != best.run and one.ended <= best.ended:
            yield f"{name} is superseded by the newer run {best.run}."
        elif one.run != best.run:
            yield f"{name} does not supersede run {best.run}: {' and '.join(_doubts(one))}."


def _namesakes(reports: Sequence[Report]) -> Iterable[str]:
    for node, count in Counter(one.node for one in reports).items():
        if count > 1:
            runs = ", ".join(one.run for one in reports if one.node == node)
            yield f"{count} machines have the name {node}: the runs {runs} have no GPU in common. Each counts."


def _node(report: Report) -> FleetNode:
    verdict, reason = _believed(report)
    codes = dict.fromkeys(finding.code for finding in needs_attention(report))
    return FleetNode(
        node=report.node,
        verdict=verdict,
        reason=reason,
        run=report.run,
        ended=report.ended,
        device=report.device,
        version=report.version,
        gpus=None if isinstance(report.machine.gpus, Unknown) else len(report.machine.gpus),
        worst=tuple(codes)[:5],
    )


def _believed(report: Report) -> tuple[Grade, str]:
    """Only a run on all GPUs, of all checks, to its end, can accept a node, whatever its file contains."""
    doubts = _doubts(report)
    if doubts and report.verdict in {Grade.PASS, Grade.WARN, Grade.SKIPPED}:
        return Grade.INCONCLUSIVE, f"{' and '.join(doubts)}; its own verdict {report.verdict} does not count."
    return (Grade.INCONCLUSIVE if report.verdict is Grade.SKIPPED else report.verdict), report.reason


def _doubts(report: Report) -> list[str]:
    """Why its verdict is not one on the whole node."""
    wish = report.settings.get("wish")
    request = wish if isinstance(wish, Mapping) else {}
    words = {
        f"it ran on {report.device}, not on GPUs": report.device != "cuda",
        "it was a self-test": report.self_test,
        "it was interrupted": report.interrupted,
        f"it ran only {_listed(request.get('only'))}": request.get("only"),
        f"it skipped {_listed(request.get('skip'))}": request.get("skip"),
        f"it tested only GPU {_listed(request.get('gpus'))}": request.get("gpus"),
    }
    return [doubt for doubt, so in words.items() if so]


def _listed(names: Any) -> str:
    return ", ".join(str(name) for name in names) if isinstance(names, list | tuple) else str(names)


def _reason(nodes: Sequence[FleetNode], missing: Sequence[str], figures: Sequence[FleetFigure]) -> str:
    if not nodes and not missing:
        return "No report was given."
    counts = Counter(one.verdict for one in nodes)
    parts = [f"{counts[grade]} {grade}" for grade in sorted(counts, key=rank, reverse=True)]
    if missing:
        parts.append(f"{len(missing)} without a report ({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''})")
    out = {(outlier.node, outlier.gpu) for one in figures for outlier in one.outliers}
    slow = (
        (
            f" {len(out)} {'GPU is an outlier' if len(out) == 1 else 'GPUs are outliers'} among all GPUs of the same"
            " model."
        )
        if out
        else ""
    )
    total = len(nodes) + len(missing)
    return f"{total} node{'' if total == 1 else 's'}: {', '.join(parts)}.{slow}"


def _doubles(reports: Iterable[Report]) -> Iterable[str]:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for report in reports:
        for gpu in gpus_of(report.machine) if report.device == "cuda" else ():
            where[identity_of(report, gpu)].append(report.node)
    for identity, nodes in where.items():
        if len(nodes) > 1:
            yield f"GPU {identity} is in the reports of {', '.join(nodes)}: it was moved, or one report is old."


def _fleet_figures(reports: Iterable[Report]) -> tuple[FleetFigure, ...]:
    strata: defaultdict[_Stratum, list[tuple[Report, Finding, float]]] = defaultdict(list)
    for report in reports:
        for finding in report.findings if report.device == "cuda" else ():
            value = value_of(finding)
            if value is not None and finding.gpu is not None and finding.unit in SPEEDS | TIMES:
                strata[_stratum(report, finding)].append((report, finding, value))
    return tuple(_fleet_figure(key, found) for key, found in strata.items() if len(found) >= comparisons.LEAST_PEERS)


def _stratum(report: Report, finding: Finding) -> _Stratum:
    """Only equals are compared: same model or slice, same power limit, same method."""
    gpu = gpu_of(report, finding.gpu)
    name = "unknown" if gpu is None or isinstance(gpu.name, Unknown) else gpu.name
    if gpu is not None and gpu.part_of:
        name += f" {SLICE_OF} {gpu.profile}"
    limit = gpu.facts.get("power_limit_w") if gpu is not None else None
    if isinstance(limit, int | float):
        name += f" at {limit:.0f} W"
    return finding.check, finding.metric, finding.method, finding.unit, name


def _fleet_figure(key: _Stratum, found: Sequence[tuple[Report, Finding, float]]) -> FleetFigure:
    check, metric, method, unit, model = key
    values = [value for _, _, value in found]
    middle = median(values)
    references = [finding.reference for _, finding, _ in found if finding.reference is not None]
    return FleetFigure(
        check=check,
        metric=metric,
        method=method,
        unit=unit,
        model=model,
        n=len(values),
        median=middle,
        low=min(values),
        high=max(values),
        reference=references[0] if references else None,
        values=tuple((_place(report, finding), value) for report, finding, value in found),
        outliers=tuple(_outliers(found)),
    )


def _place(report: Report, finding: Finding) -> str:
    gpu = gpu_of(report, finding.gpu)
    return f"{report.node}/{finding.gpu if gpu is None else gpu.index}"


def _outliers(found: Sequence[tuple[Report, Finding, float]]) -> Iterable[Outlier]:
    """By the rules for peers of one run, which take the number of peers into account."""
    group = [_good(finding, value) for _, finding, value in found]
    for (report, finding, value), good in zip(found, group, strict=True):
        standing = comparisons.against_peers(good, group)
        if standing is None or standing.loss <= 0 or standing.grade not in {Grade.FAIL, Grade.WARN}:
            continue
        gpu = gpu_of(report, finding.gpu)
        yield Outlier(
            node=report.node,
            gpu=(finding.gpu or "") if gpu is None else gpu.identity,
            index=-1 if gpu is None else gpu.index,
            value=value,
            drop=standing.loss,
            z=standing.z,
            verdict=standing.grade,
        )


def _good(finding: Finding, value: float) -> Figure:
    """Turned so that more is better."""
    samples = finding.samples or (value,)
    if not less_is_better(finding.unit):
        return Figure(samples)
    return Figure(tuple(1 / sample if sample else math.inf for sample in samples))


def by_verdict(fleet: FleetReport) -> Mapping[Grade, tuple[str, ...]]:
    found: defaultdict[Grade, list[str]] = defaultdict(list)
    for node in fleet.nodes:
        found[node.verdict].append(node.node)
    found[Grade.INCONCLUSIVE].extend(fleet.missing)
    return {grade: tuple(sorted(names)) for grade, names in found.items() if names}
