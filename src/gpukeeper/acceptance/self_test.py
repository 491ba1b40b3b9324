"""Is a planted fault found? Acceptance runs with faults in them, and clean ones, which must find nothing.

On a simulated machine: what cannot be planted on a real one (a slow GPU, a throttle, a missing one). On this machine:
wrong bits in what the probes really compute. Faults are planted in the work, never in the judgement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpukeeper.acceptance.check import Check, RunRequest
from gpukeeper.acceptance.record import Finding, Machine, Report, Thresholds
from gpukeeper.acceptance.run import RunConfig, Workbench, accept
from gpukeeper.model.gpu import Gpu, Grade
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

GPUS = 8
WITHIN_S = 300.0  # virtual time costs nothing
SHORT_S = 1.0  # real time does: the smallest size of a check that is selected by name runs in any case
NOTHING = "nothing"


@dataclass(frozen=True)
class FaultTarget:
    """A machine to inject faults on. `words`: its name in the output."""

    workbench: Workbench
    clock: Clock
    device: str
    words: str


@dataclass(frozen=True)
class FaultCase:
    """On the simulated machine. It is found when a finding of `check` has this verdict and a code that ends so."""

    words: str
    plant: Mapping[str, Any]
    check: str
    verdict: Grade
    code: str = ""
    gpu: int | None = None  # the one that must be blamed, and no other


@dataclass(frozen=True)
class ProbeFault:
    """On this machine: the fault that is injected into a probe."""

    check: str
    inject: Mapping[str, Any]
    words: str
    together: bool = False


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    where: str
    injected: str
    expected: str
    found: str
    caught: bool


class SelfTestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Grade
    reason: str
    attempts: tuple[Attempt, ...]


# Each is as small as what a run must find; indices are those of the simulated machine.
FAULTS = (
    FaultCase("GPU 3 is 10 % slower", {"slow": {3: 0.10}}, "gemm", Grade.FAIL, "-slower-than-peers", gpu=3),
    FaultCase("GPU 5 overheats and throttles", {"throttle": (5,)}, "health", Grade.FAIL, "-clocks-slowed", gpu=5),
    FaultCase("one GPU of eight is missing", {"missing": 1}, "environment", Grade.FAIL, "gpus-missing"),
    FaultCase("bit flip on GPU 2 in bf16", {"flip": {2: "bf16"}}, "exact", Grade.FAIL, gpu=2),
    FaultCase("a wrong element in a collective", {"wrong_collective": True}, "collectives", Grade.FAIL),
    FaultCase("an ECC error on GPU 1", {"ecc": (1,)}, "health", Grade.FAIL, gpu=1),
    FaultCase("a probe on GPU 4 hangs", {"hang": (4,)}, "gemm", Grade.INCONCLUSIVE, gpu=4),
)
PROBE_FAULTS = (
    ProbeFault("training", {"flip": True}, "one bit of one weight, in the second of two runs"),
    ProbeFault("memory_pattern", {"flip": True}, "one bit of memory between writing and reading"),
    ProbeFault("copies", {"flip": True}, "one bit of a copy"),
    ProbeFault("collectives", {"wrong_rank": 1}, "one element on rank 1 after a collective", together=True),
    ProbeFault("ddp", {"wrong_rank": 1}, "one bit of one weight on rank 1", together=True),
)


@dataclass(frozen=True)
class SelfTestSetup:
    """What the attempts are made with. `simulated`: a new machine with these faults. `alone`, `together`: this machine,
    for probes of one GPU and of several; Unknown where no probe can run."""

    simulated: Callable[[Mapping[str, Any]], FaultTarget]
    alone: FaultTarget | Unknown
    together: FaultTarget | Unknown
    checks: tuple[Check, ...]
    limits: Callable[[Gpu, str, str, str], Thresholds]
    tell: Callable[[Attempt], None] = lambda attempt: None


async def self_test(bed: SelfTestSetup) -> SelfTestOutcome:
    attempts: list[Attempt] = []

    async def add(attempt: Awaitable[Attempt]) -> Attempt:
        attempts.append(await attempt)
        bed.tell(attempts[-1])
        return attempts[-1]

    await add(_clean_simulation(bed))
    for fault in FAULTS:
        await add(_simulated(bed, fault))
    if not isinstance(bed.alone, Unknown):
        known = replace(bed, alone=_known(bed.alone), together=_known(bed.together))
        await _real(known, add)
    return outcome(attempts, bed)


def outcome(attempts: Sequence[Attempt], bed: SelfTestSetup) -> SelfTestOutcome:
    """Without probes on this machine it is unknown whether its detectors work."""
    missed = [one for one in attempts if not one.caught]
    found = f"{len(attempts) - len(missed)} of {len(attempts)} attempts had the expected result"
    if missed:
        words = "; ".join(f"{one.injected} on {one.where}: {one.found}" for one in missed)
        return SelfTestOutcome(verdict=Grade.FAIL, reason=f"{found}. Unexpected: {words}", attempts=tuple(attempts))
    unknown = next((one for one in (bed.alone, bed.together) if isinstance(one, Unknown)), None)
    if unknown is not None:
        reason = f"{found}, but no fault was injected into probes on this machine: {unknown.why}"
        return SelfTestOutcome(verdict=Grade.INCONCLUSIVE, reason=reason, attempts=tuple(attempts))
    return SelfTestOutcome(verdict=Grade.PASS, reason=f"{found}.", attempts=tuple(attempts))


async def _clean_simulation(bed: SelfTestSetup) -> Attempt:
    report = await _run(bed, bed.simulated({}), RunRequest(device="simulated", expected=GPUS, within_s=WITHIN_S))
    return Attempt(
        where="simulated",
        injected=NOTHING,
        expected=Grade.PASS,
        found=f"{report.verdict}: {report.reason}",
        caught=report.verdict is Grade.PASS,
    )


async def _simulated(bed: SelfTestSetup, fault: FaultCase) -> Attempt:
    wish = RunRequest(device="simulated", expected=GPUS, within_s=WITHIN_S)
    report = await _run(bed, bed.simulated(fault.plant), wish)
    of_check = [one for one in report.findings if one.check == fault.check and one.verdict is fault.verdict]
    fitting = [one for one in of_check if one.code.endswith(fault.code)]
    blamed = {_index(report, one) for one in fitting}
    right = bool(fitting) and (fault.gpu is None or blamed == {fault.gpu})
    place = "" if fault.gpu is None else f" on GPU {fault.gpu}"
    return Attempt(
        where="simulated",
        injected=fault.words,
        expected=f"{fault.verdict} by {fault.check}{place}",
        found=_found(fitting, report),
        caught=right and report.verdict not in (Grade.PASS, Grade.WARN),
    )


class _CachedWorkbench:
    """A workbench that reads its machine once: starting PyTorch for every attempt takes seconds."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._machine: Machine | None = None
        self.health, self.readings = workbench.health, workbench.readings
        self.each, self.together, self.close = workbench.each, workbench.together, workbench.close

    async def machine(self) -> Machine:
        self._machine = self._machine or await self._workbench.machine()
        return self._machine


def _known(place: FaultTarget | Unknown) -> FaultTarget | Unknown:
    return place if isinstance(place, Unknown) else replace(place, workbench=_CachedWorkbench(place.workbench))


async def _real(bed: SelfTestSetup, add: Callable[[Awaitable[Attempt]], Awaitable[Attempt]]) -> None:
    alone = bed.alone
    assert not isinstance(alone, Unknown), "no fault can be injected where no probe runs"
    exact, dtypes = await _clean(bed, alone, "exact")
    await add(_done(exact))
    for dtype in dtypes:
        plant = ProbeFault("exact", {"flip": dtype}, f"the lowest bit of one element, in {dtype}")
        await add(_planted(bed, alone, plant, {"dtypes": [dtype]}))
    for plant in PROBE_FAULTS:
        place = bed.together if plant.together else alone
        if not isinstance(place, Unknown) and any(one.name == plant.check for one in bed.checks):
            await add(_done((await _clean(bed, place, plant.check))[0]))
            await add(_planted(bed, place, plant))


async def _done(attempt: Attempt) -> Attempt:
    return attempt


async def _clean(bed: SelfTestSetup, place: FaultTarget, check: str) -> tuple[Attempt, tuple[str, ...]]:
    """No fault is injected and none may be found; also the data types that were tested."""
    report = await _run(bed, place, RunRequest(device=place.device, only=(check,), within_s=SHORT_S))
    own = [one for one in report.findings if one.check == check]
    wrong = [one for one in own if one.verdict is Grade.FAIL]
    tested = any(one.verdict is Grade.PASS or one.samples for one in own)  # a speed may have nothing to be held against
    attempt = Attempt(
        where=place.words,
        injected=NOTHING,
        expected=f"no FAIL by {check}",
        found=_found(wrong, report) if wrong or not tested else "no FAIL",
        caught=tested and not wrong,
    )
    return attempt, _dtypes(report)


async def _planted(
    bed: SelfTestSetup, place: FaultTarget, plant: ProbeFault, params: Mapping[str, Any] | None = None
) -> Attempt:
    wish = RunRequest(
        device=place.device,
        only=(plant.check,),
        within_s=SHORT_S,
        params={plant.check: params} if params else {},
        inject={plant.check: plant.inject},
    )
    report = await _run(bed, place, wish)
    found = [one for one in report.findings if one.check == plant.check and one.verdict is Grade.FAIL]
    return Attempt(
        where=place.words,
        injected=plant.words,
        expected=f"{Grade.FAIL} by {plant.check}",
        found=_found(found, report),
        caught=bool(found),
    )


async def _run(bed: SelfTestSetup, place: FaultTarget, wish: RunRequest) -> Report:
    order = RunConfig(
        run="self-test",
        version="",
        wish=wish,
        checks=bed.checks,
        limits=bed.limits,
        history=lambda gpus: {},
        self_test=True,
    )
    return await accept(place.workbench, order, place.clock)


def _dtypes(report: Report) -> tuple[str, ...]:
    """Those that any GPU here can multiply."""
    found: dict[str, None] = {}
    for record in report.records:
        result = record["answer"].get("result", {})
        tested = result.get("dtypes", {}) if isinstance(result, Mapping) else {}
        found |= {name: None for name, one in tested.items() if isinstance(one, Mapping) and "unsupported" not in one}
    return tuple(found)


def _found(findings: Sequence[Finding], report: Report) -> str:
    """What was found, or what was found instead."""
    if not findings:
        return f"not found; the run: {report.verdict}: {report.reason}"
    first = findings[0]
    index = _index(report, first)
    place = "" if index is None else f" {'CPU' if report.device == 'cpu' else 'GPU'} {index}"
    return f"{first.verdict}{place} {first.code}: {first.message}"


def _index(report: Report, finding: Finding) -> int | None:
    gpus = () if isinstance(report.machine.gpus, Unknown) else report.machine.gpus
    return next((gpu.index for gpu in gpus if gpu.uuid == finding.gpu), None)
