"""What an acceptance run is made of: a machine with GPUs, measurements, findings, a report. Values, no judgement.

A finding without a measurement is never a pass; see judging/judge.py. The report is one record; JSON, HTML, CSV, JUnit
and metrics are views of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gpukeeper.model.gpu import NOT_QUERIED, Fact, Gpu, Grade, Reading
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
