"""What an acceptance run is made of: a machine with GPUs, measurements, findings, a report; and the run as a line of
the ledger, and what the ledger remembers of earlier ones as history. Values, no judgement.

A finding without a measurement is never a pass; see judging/judge.py. The report is one record; JSON, HTML, CSV, JUnit
and metrics are views of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model.event import NodeTested
from gpukeeper.model.gpu import NOT_QUERIED, Fact, Gpu, Grade, Past, Reading, worst
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown, direct

SCHEMA = "gpukeeper/acceptance/v1"
GROUP_SCHEMA = "gpukeeper/acceptance-group/v1"
Values: TypeAlias = Mapping[str, Any]  # parameters or result of a probe; plain JSON


@direct
class Remedy(StrEnum):
    """What to do about a finding."""

    NONE = "none"
    WATCH = "watch"
    RETEST = "retest"
    RESET_SETTING = "reset_setting"  # undo the setting that the finding names, then test again
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    RESEAT_OR_CABLE = "reseat_or_cable"
    REPLACE_GPU = "replace_gpu"
    REPLACE_NIC = "replace_nic"
    CHECK_CONFIG = "check_config"
    CONTACT_VENDOR = "contact_vendor"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as it was before the first check."""

    node: str
    gpus: tuple[Gpu, ...] | Unknown
    silent: tuple[str, ...] = ()  # GPUs that are there and do not answer: why, one each
    on_bus: int | Unknown = NOT_QUERIED  # GPUs that the PCI bus shows, whatever the driver reports
    environment: Mapping[str, Fact] = {}  # driver, cuda, torch, nccl, kernel, python, shm, memlock, …
    topology: Mapping[str, Mapping[str, str]] = {}  # by uuid and uuid: nvlink, switch, bridge, node, system


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe is to do."""

    probe: str
    params: Values = {}
    deadline_s: float = 120.0


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """What a probe measured."""

    result: Values
    seconds: float = 0.0
    busy_s: float = 0.0  # in which the GPU had work of ours


class ProbeFailure(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """A probe that returned no measurement."""

    kind: str  # one of acceptance/judging/replies.py
    words: str
    seconds: float = 0.0


ProbeReply: TypeAlias = ProbeResult | ProbeFailure


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement is compared with. None: there is no such limit."""

    floor: float | None = None  # below it FAIL
    warn: float | None = None  # below it WARN
    reference: float | None = None  # what a healthy one shows
    ceiling: float | None = None  # above it the value is implausible
    method: str = ""  # the only method these figures are valid for; empty: any
    source: str = ""
    may_fail: bool = True  # an estimate may only warn


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one GPU (or of the node), measured several times. More is better unless `lower_is_better`."""

    check: str
    metric: str
    gpu: str | None  # uuid; None: the node's
    unit: str
    method: str
    samples: tuple[float, ...]
    lower_is_better: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict on one subject, with its reason. The smallest part of a report."""

    check: str
    metric: str = ""
    gpu: str | None = None
    verdict: Grade
    code: str  # stable: gemm-below-floor
    message: str  # a sentence
    action: Remedy = Remedy.NONE
    value: float | None = None
    unit: str = ""
    method: str = ""
    samples: tuple[float, ...] = ()
    lower_is_better: bool = False
    repeatability: float | None = None  # standard deviation ÷ mean of the samples
    floor: float | None = None
    ceiling: float | None = None
    reference: float | None = None
    source: str = ""  # where floor and reference come from
    peer_median: float | None = None
    peer_z: float | None = None
    peer_n: int = 0
    baseline: float | None = None  # the same GPU before
    layers: tuple[str, ...] = ()  # the result of each layer (floor, peers, history), in words
    confirm: bool = False  # a FAIL that must be seen again before it counts
    evidence: Values = {}
    seconds: float = 0.0


class NotTested(msgspec.Struct, frozen=True, kw_only=True):
    """Coverage: what was skipped, and why."""

    check: str
    what: str = ""
    why: str
    within: str = ""  # the span of --within in which it would have run


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A counter that changed while a check ran."""

    gpu: str
    check: str
    counter: str
    before: int
    after: int


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Detection limit of this run: the smallest loss of a value that fails or warns."""

    check: str
    metric: str
    fails_at: float | None  # share lost, 0.05 is 5 %; None: it cannot fail
    warns_at: float | None
    by: str  # floor, peers, history


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one GPU."""

    gpu: str
    verdict: Grade
    reason: str
    busy: float | None = None  # share of the run's time in which it had work of ours


class GroupFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of several nodes as one run, and which of them it is about. No node: it is about the whole group."""

    finding: Finding
    nodes: tuple[str, ...] = ()
    rank: int | None = None


class SubjectVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one rank (its GPU), one node, or the nodes of one job, which are linked by what it sent."""

    nodes: tuple[str, ...]
    verdict: Grade
    reason: str
    rank: int | None = None
    gpu: str | None = None
    last: str = ""  # of a rank: the last step that it began


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Several nodes tested as one run. Written by the node with index 0; every node gets it."""

    run: str
    size: int
    verdict: Grade
    reason: str
    nodes: tuple[SubjectVerdict, ...] = ()
    ranks: tuple[SubjectVerdict, ...] = ()
    links: tuple[SubjectVerdict, ...] = ()
    findings: tuple[GroupFinding, ...] = ()
    jobs: tuple[Values, ...] = ()  # what ran: number, probe, nodes, attempt, seconds, how it ended
    schema: str = GROUP_SCHEMA


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `device`: cuda, cpu or simulated; only cuda can accept a GPU."""

    run: str
    node: str
    version: str
    device: str
    started: datetime
    ended: datetime
    profile: str  # quick, or the span of --within
    within_s: float
    verdict: Grade
    reason: str
    machine: Machine
    expected: int | None = None
    tallies: tuple[GpuSummary, ...] = ()
    findings: tuple[Finding, ...] = ()
    deltas: tuple[Delta, ...] = ()
    coverage: tuple[NotTested, ...] = ()
    power: tuple[Power, ...] = ()
    timeline: tuple[Reading, ...] = ()
    records: tuple[Values, ...] = ()  # the complete output of the probes
    settings: Mapping[str, Any] = {}
    programme: tuple[str, ...] = ()  # the checks that were to run; each has a finding, or a line in `coverage`
    interrupted: bool = False
    self_test: bool = False
    group: GroupReport | None = None  # of a run together with other nodes
    schema: str = SCHEMA


def ref_of(node: str) -> Ref:
    return Ref("host", node, "node", node, node)


def line_of(report: Report, directory: str) -> NodeTested:
    """`folder`: where the report was written. Later runs are held against its figures, so only those that passed, or
    that nothing could be held against yet, are remembered: a GPU that gets slower must not become its own yardstick.
    Figures of all GPUs together are the node's."""
    identity = _identities(report)
    found = () if report.interrupted or report.self_test else report.findings
    measured = [one for one in found if one.gpu in identity and one.value is not None]
    values = _figures(identity, ((one, one.value) for one in measured if _may_be_held_against(one)))
    gpus = {identity[one.gpu]: one.verdict for one in report.tallies if one.gpu in identity}
    if report.node in values:
        gpus[report.node] = report.verdict
    if report.interrupted:
        gpus = {who: worst((verdict, Grade.INCONCLUSIVE)) for who, verdict in gpus.items()}
    return NodeTested(
        at=report.ended,
        ref=ref_of(report.node),
        run=report.run,
        verdict=report.verdict,
        reason=report.reason,
        device=report.device,
        report=directory,
        expected=report.expected,
        gpus=gpus,
        values=values,
        not_passed=_figures(identity, ((one, one.value) for one in measured if not _may_be_held_against(one))),
        floors=_figures(identity, ((one, one.floor) for one in measured)),
        models=_models(report),
        serials={one.uuid: one.identity for one in _gpus(report) if one.identity != one.uuid},
    )


def _figures(
    identity: Mapping[str | None, str], found: Iterable[tuple[Finding, float | None]]
) -> dict[str, dict[str, float]]:
    """By GPU and figure; what is None is left out."""
    made: dict[str, dict[str, float]] = {}
    for one, value in found:
        if value is not None:
            made.setdefault(identity[one.gpu], {})[figure(one)] = value
    return made


def _models(report: Report) -> dict[str, str]:
    return {one.identity: one.name for one in _gpus(report) if isinstance(one.name, str)}


def _gpus(report: Report) -> tuple[Gpu, ...]:
    gpus = with_unique_serials(report.machine).gpus
    return () if isinstance(gpus, Unknown) else gpus


def _may_be_held_against(finding: Finding) -> bool:
    return finding.verdict is Grade.PASS or (finding.verdict is Grade.SKIPPED and bool(finding.samples))


def with_unique_serials(machine: Machine) -> Machine:
    """A board with several GPUs has one serial number; a number that several GPUs share identifies none of them."""
    if isinstance(machine.gpus, Unknown):
        return machine
    counts = Counter(gpu.serial for gpu in machine.gpus if not isinstance(gpu.serial, Unknown))
    gpus = tuple(
        gpu
        if isinstance(gpu.serial, Unknown) or counts[gpu.serial] == 1
        else msgspec.structs.replace(gpu, serial=Unknown(f"{gpu.serial} is shared by {counts[gpu.serial]} GPUs"))
        for gpu in machine.gpus
    )
    return msgspec.structs.replace(machine, gpus=gpus)


def figure(finding: Finding) -> str:
    """What a figure is remembered by. Another method is another figure."""
    return f"{finding.check}.{finding.metric} {finding.method}"


def history_of(tested: Iterable[Past]) -> dict[str, tuple[Past, ...]]:
    """What the ledger remembers of a machine's GPUs, by the GPU's identity, oldest first."""
    found: dict[str, list[Past]] = {}
    for past in tested:
        found.setdefault(past.identity, []).append(past)
    return {who: tuple(sorted(runs, key=lambda one: one.at)) for who, runs in found.items()}


def _identities(report: Report) -> dict[str | None, str]:
    return {None: report.node, **{gpu.uuid: gpu.identity for gpu in _gpus(report)}}
