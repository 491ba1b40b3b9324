"""Acceptance runs for readers: findings in lines, a verdict for each GPU, what was not tested, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from gpukeeper.acceptance.check import Check, CheckSize, RunRequest
from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.acceptance.fleet.launcher import Removal, RunSummary
from gpukeeper.acceptance.record import Finding, Machine, NotTested, Report
from gpukeeper.acceptance.reports.compare import Comparison
from gpukeeper.acceptance.reports.formats import report_json
from gpukeeper.acceptance.reports.legacy import finding_line, log_line, tag_of
from gpukeeper.acceptance.reports.merge import FleetReport, why_missing
from gpukeeper.acceptance.reports.store import StoredRun
from gpukeeper.acceptance.reports.wording import fact, figure, gpu_words, retest_command
from gpukeeper.acceptance.suite import is_not_selected
from gpukeeper.model import reading
from gpukeeper.model.gpu import Grade
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

TOGETHER = frozenset({Grade.PASS, Grade.SKIPPED, Grade.INCONCLUSIVE})  # of several GPUs in one line
OPENING = ("driver", "cuda_driver", "torch", "cuda", "nccl")  # of the environment, in the opening line
LEFT_OUT = ("schema", "timeline", "records")  # of a report: the document's own, and what is in samples.json


class RunsView(msgspec.Struct, frozen=True):
    """Newest first."""

    folder: str
    runs: tuple[StoredRun, ...]


class ComparisonView(msgspec.Struct, frozen=True):
    comparison: Comparison


class MergedView(msgspec.Struct, frozen=True):
    fleet: FleetReport


class CheckFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a check proves, what it cannot, and the sizes it comes in."""

    name: str
    title: str
    proves: str
    cannot: str
    how: str
    least_gpus: int
    slices: bool
    servings: tuple[CheckSize, ...]


class ChecksView(msgspec.Struct, frozen=True):
    checks: tuple[CheckFacts, ...]


class CheckView(msgspec.Struct, frozen=True):
    check: CheckFacts


class NodeVerdict(msgspec.Struct, frozen=True):
    """`gpus`: None: unknown. A node without a report has no run."""

    verdict: Grade
    node: str
    gpus: int | None
    run: str
    reason: str


def check_facts(check: Check) -> CheckFacts:
    return CheckFacts(
        name=check.name,
        title=check.title,
        proves=check.proves,
        cannot=check.cannot,
        how=check.how.value,
        least_gpus=check.least_gpus,
        slices=check.slices,
        servings=tuple(check.servings),
    )


def provisional(machine: Machine, wish: RunRequest) -> Report:
    """Only for the names of GPUs in the lines of a run that has no report yet."""
    begin = datetime.fromtimestamp(0, UTC)
    return Report(
        run="",
        node=machine.node,
        version="",
        device=wish.device,
        started=begin,
        ended=begin,
        profile=wish.profile,
        within_s=wish.within_s,
        verdict=Grade.INCONCLUSIVE,
        reason="",
        machine=machine,
    )


def machine_words(machine: Machine, wish: RunRequest) -> str:
    """ "node-3: 8 × NVIDIA H200; driver 570.1, torch 2.11.0"."""
    if isinstance(machine.gpus, Unknown):
        return f"{machine.node}: the GPUs could not be read ({machine.gpus.why})"
    names: dict[str, int] = {}
    for gpu in machine.gpus:
        name = fact(gpu.name) if not gpu.profile else f"{fact(gpu.name)} {gpu.profile}"
        names[name] = names.get(name, 0) + 1
    here = ", ".join(f"{count} × {name}" for name, count in names.items()) or "no GPU"
    facts = [f"{name.replace('_', ' ')} {fact(machine.environment[name])}" for name in OPENING if _known(machine, name)]
    mode = {"cpu": " (CPU mode: no GPU is tested)", "simulated": " (simulated: no GPU is tested)"}.get(wish.device, "")
    return f"{machine.node}: {here}{mode}" + (f"; {', '.join(facts)}" if facts else "")


def _known(machine: Machine, name: str) -> bool:
    return not isinstance(machine.environment.get(name), Unknown) and machine.environment.get(name) is not None


def finding_lines(findings: Sequence[Finding], report: Report | None, *, verbose: bool) -> list[str]:
    """One for each; but equal findings of several GPUs are one line, unless all are requested. A fault has its own
    line."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(findings):
        apart = verbose or one.gpu is None or one.verdict not in TOGETHER
        alike.setdefault((str(number),) if apart else (one.check, one.metric, one.code), []).append(one)
    return [
        _group_line(group, report) if len(group) > 1 else finding_line(group[0], report)
        for group in alike.values()
        if verbose or group[0].verdict is not Grade.SKIPPED
    ]


def _group_line(group: Sequence[Finding], report: Report | None) -> str:
    first = group[0]
    name = f"{first.check}.{first.metric}" if first.metric else first.check
    values = sorted(one.value for one in group if one.value is not None)
    least = "" if not values or values[0] == values[-1] else f"{figure(values[0])} to "
    span = "" if not values else f" {least}{figure(values[-1], first.unit)}"
    why = "" if first.verdict is Grade.PASS else f": {first.message}"
    head = f"{first.verdict} {len(group)} {_kind(report)}s {name}{span}{why}"
    return log_line(tag_of(first.check, first.metric), head)


def _kind(report: Report | None) -> str:
    return "CPU" if report is not None and report.device == "cpu" else "GPU"


def gpu_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """Of each GPU its verdict, path, model, serial number, share of the time that it was busy, and the reason."""
    for tally in report.tallies:
        assert not isinstance(report.machine.gpus, Unknown), "a tally belongs to a known GPU"
        gpu = next(one for one in report.machine.gpus if one.uuid == tally.gpu)
        busy = "-" if tally.busy is None else f"{tally.busy:.0%}"
        yield (tally.verdict.value, gpu_words(report, gpu.uuid), fact(gpu.name), gpu.identity, busy, tally.reason)


def node_verdicts(fleet: FleetReport) -> Iterator[NodeVerdict]:
    """Of those with a report, then of those that should have one."""
    for one in fleet.nodes:
        yield NodeVerdict(one.verdict, one.node, one.gpus, one.run, one.reason)
    for name in fleet.missing:
        yield NodeVerdict(Grade.INCONCLUSIVE, name, None, "", why_missing(fleet, name))


def fleet_notes(fleet: FleetReport) -> Iterator[str]:
    """GPUs that stand out among all, and what is odd about the reports themselves."""
    for figures in fleet.figures:
        for one in figures.outliers:
            name = f"{figures.check}.{figures.metric}"
            yield (
                f"{one.verdict}  {one.node} GPU {one.index} ({one.gpu}): {name} {one.value:.4g} {figures.unit}, "
                f"{one.drop:.1%} worse than the median {figures.median:.4g} of {figures.n}"
            )
    yield from (*fleet.replaced, *fleet.doubles, *(f"{name} was not expected." for name in fleet.unexpected))


def coverage_lines(coverage: Iterable[NotTested], *, verbose: bool) -> list[str]:
    """What was skipped, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in coverage:
        if not verbose and (one.within or is_not_selected(one.why)):
            continue  # listed in the next steps, or deselected by the user
        name = f"{one.check} ({one.what})" if one.what else one.check
        by_reason.setdefault(one.why, []).append(name)
    return [f"not tested: {', '.join(dict.fromkeys(names))}: {why}" for why, names in by_reason.items()]


def verdict_line(report: Report) -> str:
    took = in_words(report.ended - report.started)
    who = f"{report.node}, {len(report.tallies)} {_kind(report)}{'' if len(report.tallies) == 1 else 's'}, {took}"
    return f"{report.verdict}  {who}: {report.reason}"


def next_steps(report: Report) -> list[str]:
    steps = []
    if report.verdict in (Grade.FAIL, Grade.INCONCLUSIVE) and report.tallies and report.device == "cuda":
        steps.append(f"Test again: {retest_command(report)}")
    spans: dict[str, dict[str, str]] = {}
    for one in report.coverage:
        if one.within:
            words = f"{one.check} ({one.what})" if one.what else one.check
            spans.setdefault(one.within, {}).setdefault(one.check, words)
    if spans:
        within = min(spans, key=reading.span)
        steps.append(f"Not tested yet; --within {within} adds: {', '.join(spans[within].values())}")
    return steps


def acceptance_document(report: Report, directory: str) -> dict[str, object]:
    """The report for programs, without what is in samples.json, and where all of it is."""
    body: dict[str, object] = reading.decode(report_json(report))
    return {name: value for name, value in body.items() if name not in LEFT_OUT} | {"report_folder": directory or None}


def run_rows(report: RunReport) -> list[tuple[str, ...]]:
    """A row for each node; the reason of one without a report begins with its code."""
    rows: list[tuple[str, ...]] = []
    codes = {one.node: f"[{one.code}] " for one in report.missing}
    for one in node_verdicts(report.fleet):
        gpus = "–" if one.gpus is None else str(one.gpus)
        rows.append((one.verdict.value, one.node, gpus, f"{codes.get(one.node, '')}{one.reason}"))
    return rows


def run_document(
    report: RunReport, directory: str, removal: Removal | None = None, problems: tuple[str, ...] = ()
) -> dict[str, object]:
    """The report of a run over many nodes, where it is, and what was removed."""
    body: dict[str, object] = {name: getattr(report, name) for name in report.__struct_fields__ if name != "schema"}
    return body | {"verdict": report.verdict, "report_folder": directory, "removal": removal, "problems": problems}


class RunOnEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A run that an engine has objects of."""

    run: str
    owner: str
    created: datetime
    nodes: dict[str, int]  # how many are in each phase
    objects: int
    over: bool  # past its deadline


class RunsOnEngine(msgspec.Struct, frozen=True):
    engine: str
    runs: tuple[RunOnEngine, ...]


class RunStatusView(msgspec.Struct, frozen=True):
    """`nodes`: how far each is."""

    run: RunSummary


def run_on_engine(summary: RunSummary, *, over: bool) -> RunOnEngine:
    phases = [one.phase.value for one in summary.nodes]
    return RunOnEngine(
        run=summary.spec.run,
        owner=summary.spec.owner,
        created=summary.spec.created,
        nodes={phase: phases.count(phase) for phase in dict.fromkeys(phases)},
        objects=len(summary.objects),
        over=over,
    )
