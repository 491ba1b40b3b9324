"""Acceptance runs on a simulated machine that fails in the middle, and their reports after somebody cut them.

The log says what truly happened: which GPUs were there, which probes answered, when the driver was silent. The checker
of promise 10 compares verdicts with it and does not ask the code that gave them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpukeeper.acceptance.bench.simulated import SimulatedWorkbench
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Machine, ProbeFailure, ProbeReply, ProbeRequest, ProbeResult, Report
from gpukeeper.acceptance.reports import formats
from gpukeeper.acceptance.run import RunConfig, accept
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.model.gpu import Grade, Health
from gpukeeper.model.unknown import Unknown

TROUBLES = ("", "", "silent GPU", "no answer", "crash", "driver", "no driver", "missing", "late", "interrupted", "none")
CUTS = ("", "findings", "check", "gpu", "health", "verdict")


@dataclass
class Truth:
    """What happened on the machine."""

    expected: int
    gpus: set[str] | None = None  # None: could not be learned
    measured: dict[str, set[str]] = field(default_factory=dict)  # by GPU: probes that answered
    unanswered: set[tuple[str, str]] = field(default_factory=set)  # GPU and probe, of the first try
    blind: bool = False  # the driver was silent at a look
    interrupted: bool = False
    cut: str = ""


@dataclass
class AcceptanceRun:
    seed: int
    truth: Truth
    report: Report
    read: Report  # the report as it is read back, after it was cut and its verdict fields set to PASS


class TroubledBench(SimulatedWorkbench):
    def __init__(self, rng: random.Random, trouble: str, truth: Truth, stop: asyncio.Event, **more: Any) -> None:
        super().__init__(**more)
        self._dice, self._trouble, self._truth, self._stop = rng, trouble, truth, stop
        self._looks = 0
        self._strike = rng.randrange(6)  # the call in which it happens
        self._calls = 0

    async def machine(self) -> Machine:
        machine = await super().machine()
        if self._trouble == "no driver":
            return msgspec.structs.replace(machine, gpus=Unknown("the driver did not respond"))
        if self._trouble == "none":
            return msgspec.structs.replace(machine, gpus=(), on_bus=0)
        assert not isinstance(machine.gpus, Unknown)
        self._truth.gpus = {gpu.uuid for gpu in machine.gpus}
        return machine

    async def health(self) -> Mapping[str, Health] | Unknown:
        self._looks += 1
        if self._trouble == "driver" and self._looks > self._strike:
            self._truth.blind = True
            return Unknown("the driver did not respond within 20s")
        return await super().health()

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        answers = dict(await super().each(jobs))
        struck = self._struck()
        if struck and self._trouble == "crash":
            self._lost(jobs)
            raise OSError("the workers are gone")
        if struck and self._trouble == "no answer":
            answers.pop(sorted(answers)[0])
        if struck and self._trouble == "silent GPU":
            answers[sorted(answers)[0]] = ProbeFailure(kind="crashed", words="killed")
        self._log(jobs, answers)
        return answers

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        answers = dict(await super().together(gpus, job))
        if self._struck() and self._trouble in ("crash", "no answer", "silent GPU"):
            answers = {rank: ProbeFailure(kind="rendezvous", words="one rank is gone") for rank in answers}
            self._truth.unanswered.add(("node", job.probe))
        return answers

    def _struck(self) -> bool:
        """Once; a second try of the same probe may then answer."""
        self._calls += 1
        if self._trouble == "late":
            self._gpus._at += 40.0  # everything takes longer than was thought
        if self._calls == self._strike and self._trouble == "interrupted":
            self._truth.interrupted = True
            self._stop.set()
        return self._calls == self._strike

    def _lost(self, jobs: Mapping[str, ProbeRequest]) -> None:
        self._truth.unanswered |= {(uuid, job.probe) for uuid, job in jobs.items()}

    def _log(self, jobs: Mapping[str, ProbeRequest], answers: Mapping[str, ProbeReply]) -> None:
        for uuid, job in jobs.items():
            if isinstance(answers.get(uuid), ProbeResult):
                self._truth.measured.setdefault(uuid, set()).add(job.probe)
            else:
                self._truth.unanswered.add((uuid, job.probe))


def simulate_acceptance(seed: int) -> AcceptanceRun:
    rng = random.Random(seed)
    gpus, trouble = rng.choice((1, 2, 3, 8)), rng.choice(TROUBLES)
    truth, stop = Truth(expected=gpus), asyncio.Event()
    faults: dict[str, Any] = {"missing": 1} if trouble == "missing" else {}
    if rng.random() < 0.2:
        faults["hang"] = {rng.randrange(gpus): rng.choice(("gemm", "exact", "training"))}
    bench = TroubledBench(rng, trouble, truth, stop, gpus=gpus, seed=seed % 100, **faults)
    wish = RunRequest(device="cuda", within_s=rng.choice((60.0, 300.0)), expected=gpus)
    order = RunConfig(
        run="run", version="0", wish=wish, checks=CHECKS, limits=reference.limits, history=lambda gpus: {}
    )
    report = asyncio.run(accept(bench, order, bench.clock, stop))
    truth.cut = rng.choice(CUTS)
    left = cut(report, truth.cut, rng)
    return AcceptanceRun(seed, truth, report, formats.read_report(formats.report_json(left), "report.json"))


def cut(report: Report, how: str, rng: random.Random) -> Report:
    """`how`: what is removed. Then every verdict field says PASS, as after an edit by hand."""
    findings = list(report.findings)
    machine = report.machine
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    if how == "findings":
        findings = []
    elif how in ("check", "health") and findings:
        gone = "health" if how == "health" else rng.choice(findings).check
        findings = [one for one in findings if one.check != gone]
    elif how == "gpu" and gpus:
        gone = rng.choice(gpus).uuid
        findings = [one for one in findings if one.gpu != gone]
        machine = msgspec.structs.replace(machine, gpus=tuple(one for one in gpus if one.uuid != gone))
    if not how:
        return report
    tallies = tuple(msgspec.structs.replace(one, verdict=Grade.PASS) for one in report.tallies)
    told = {"verdict": Grade.PASS, "reason": "All findings are good.", "tallies": tallies}
    return msgspec.structs.replace(report, findings=tuple(findings), machine=machine, **told)
