"""The story of an acceptance run: observe the machine, decide which checks fit, act (run them), verify (judge; what
fails is seen again before it counts), record. And what it needs of the machine under test, as a Protocol.

Nothing here depends on a single check. An interruption leaves a report of the results so far, which accepts no node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, count
from typing import Any, Protocol

import msgspec

from gpukeeper.acceptance import suite
from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, RunMode, RunRequest
from gpukeeper.acceptance.judging import judge, verdicts
from gpukeeper.acceptance.judging.judge import detection_power
from gpukeeper.acceptance.judging.verdicts import qualified
from gpukeeper.acceptance.record import (
    Delta,
    Finding,
    Machine,
    NotTested,
    ProbeFailure,
    ProbeReply,
    ProbeRequest,
    ProbeResult,
    Remedy,
    Report,
    Thresholds,
    Values,
    with_unique_serials,
)
from gpukeeper.acceptance.suite import CheckPlan, PlannedCheck
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Gpu, Grade, Health, Past, Reading
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown


class Workbench(Protocol):
    """The machine under test: reads its state and runs probes on it. The caller that opened it closes it."""

    async def machine(self) -> Machine:
        """The machine before the first check. What could not be read is Unknown."""
        ...

    async def health(self) -> Mapping[str, Health] | Unknown:
        """Every GPU now, by uuid; Xids since the workbench was opened."""
        ...

    async def readings(self) -> Sequence[Reading]:
        """Readings since the last call, two per second; `at` counts from when the workbench was opened."""
        ...

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        """A probe on each of these GPUs, by uuid, on all at the same time. A reply for each, whatever happens."""
        ...

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        """One probe over these GPUs, one rank per GPU. A reply for every rank, by its number."""
        ...

    async def close(self) -> None: ...


ATTEMPTS = 3  # a FAIL that could be chance counts when two of three agree
NO_DELTA = ("energy_mj", "violation_power_ns")  # they always rise
SILENT = ProbeFailure(kind="failed", words="the probe on the GPU returned no result")


class CheckStarted(msgspec.Struct, frozen=True):
    """A check begins; `left_s`: what the rest is thought to take."""

    check: str
    what: str
    number: int
    of: int
    left_s: float


class ProbeStarted(msgspec.Struct, frozen=True):
    """The probe of a check begins, with these parameters."""

    check: str
    params: Mapping[str, Any]


class CheckRepeated(msgspec.Struct, frozen=True):
    """It is run again, to see whether what failed fails again."""

    check: str
    attempt: int
    gpus: tuple[str, ...]


Step = CheckStarted | ProbeStarted | CheckRepeated | Finding | NotTested | Machine
Progress = Callable[[Step], None]


@dataclass(frozen=True)
class RunConfig:
    """What a run needs besides the machine."""

    run: str
    version: str
    wish: RunRequest
    checks: tuple[Check, ...]
    limits: Callable[[Gpu, str, str, str], Thresholds]
    history: Callable[[Sequence[Gpu]], Mapping[str, tuple[Past, ...]]]
    progress: Progress = lambda step: None
    self_test: bool = False
    node: str = ""  # what the machine is called in this run; empty: as it calls itself


@dataclass
class RunState:
    """Results so far."""

    order: RunConfig
    started: datetime
    machine: Machine
    gpus: tuple[Gpu, ...]
    before: dict[str, Health] = field(default_factory=dict)
    last: dict[str, Health] = field(default_factory=dict)
    at_check: dict[str, Mapping[str, Health]] = field(default_factory=dict)
    history: Mapping[str, tuple[Past, ...]] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    coverage: list[NotTested] = field(default_factory=list)
    records: list[Values] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    programme: tuple[str, ...] = ()
    interrupted: bool = False

    def context(self, after: Mapping[str, Health] | None = None) -> CheckContext:
        order = self.order
        return CheckContext(
            wish=order.wish,
            machine=self.machine,
            gpus=self.gpus,
            limits=order.limits,
            history=self.history,
            before=self.before,
            after=after or {},
            readings=tuple(self.readings),
            at_check=self.at_check,
        )

    def found(self, findings: Iterable[Finding]) -> None:
        for one in findings:
            self.findings.append(one)
            self.order.progress(one)

    def left_out(self, one: NotTested) -> None:
        self.coverage.append(one)
        self.order.progress(one)


async def accept(workbench: Workbench, order: RunConfig, clock: Clock, stop: asyncio.Event | None = None) -> Report:
    """`stop`: set to interrupt the run. The report is then marked as interrupted and is never a pass."""
    stop = stop or asyncio.Event()
    run = await _observe(workbench, order, clock)
    programme = suite.choose(order.checks, order.wish, run.gpus)
    run.programme = tuple(one.check.name for one in programme.chosen)
    for left_out in programme.left_out:
        run.left_out(left_out)
    try:
        await _act(workbench, run, programme, clock, stop)
        after = await _read_health(workbench, run)
    except _Interrupted:
        after = run.last
    run.interrupted = stop.is_set()
    context = run.context(after)
    for one in programme.chosen:
        if one.check.how is RunMode.LOOK:
            try:
                run.found(one.check.interpret(CheckRun(one.serving), context))
            except Exception as error:
                run.found(_failed(run, one.check, error))
    if not run.interrupted:
        run.found(_without_result(run))
    return _report(run, clock.now())


async def _observe(workbench: Workbench, order: RunConfig, clock: Clock) -> RunState:
    started = clock.now()
    machine = with_unique_serials(await workbench.machine())
    if order.node:
        machine = msgspec.structs.replace(machine, node=order.node)
    order.progress(machine)
    gpus: tuple[Gpu, ...] = ()
    if not isinstance(machine.gpus, Unknown):
        _refuse_unknown(machine.gpus, order.wish.gpus)
        gpus = verdicts.wanted(machine.gpus, order.wish.gpus)
    run = RunState(order, started, machine, gpus, history=order.history(gpus))
    run.before = await _read_health(workbench, run)
    return run


def _refuse_unknown(gpus: Sequence[Gpu], names: Sequence[str]) -> None:
    """A requested GPU that does not exist is an error: the verdict must not be about the others only."""
    unknown = [name for name in names if not verdicts.wanted(gpus, (name,))]
    if unknown:
        here = ", ".join(f"{gpu.index} ({gpu.identity})" for gpu in gpus) or "none"
        raise UsageError(f"--gpus {', '.join(unknown)}: GPU not found. Nothing was run. Available GPUs: {here}")


async def _read_health(workbench: Workbench, run: RunState, check: str = "") -> dict[str, Health]:
    """Health of every GPU now. One that cannot be read has no entry; the health check reports it."""
    try:
        seen = await workbench.health()
        run.readings += [msgspec.structs.replace(one, check=check) for one in await workbench.readings()]
    except Exception as error:
        seen = Unknown(f"{type(error).__name__}: {error}")
    now = {} if isinstance(seen, Unknown) else dict(seen)
    if check:
        run.deltas += changes(run.last, now, check)
        run.at_check[_unused(check, run.at_check)] = now
    run.last = {**run.last, **now}
    return now


def _unused(check: str, taken: Collection[str]) -> str:
    """A reading of an earlier attempt stays: what it found may be gone in the next one."""
    names = chain((check,), (f"{check}, attempt {number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def changes(before: Mapping[str, Health], after: Mapping[str, Health], check: str) -> list[Delta]:
    found = []
    for uuid, now in after.items():
        then = before[uuid].counters if uuid in before else {}
        for counter, value in now.counters.items():
            old = then.get(counter)
            if isinstance(old, int) and isinstance(value, int) and old != value and counter not in NO_DELTA:
                found.append(Delta(gpu=uuid, check=check, counter=counter, before=old, after=value))
    return found


class _Interrupted(Exception):
    """The run was interrupted."""


async def _act(workbench: Workbench, run: RunState, programme: CheckPlan, clock: Clock, stop: asyncio.Event) -> None:
    running = [one for one in programme.chosen if one.check.how is not RunMode.LOOK]
    # PyTorch from a cold disk may take a minute to start: that must not cost the checks their time.
    slow_start = max((clock.now() - run.started).total_seconds() - suite.START_S, 0.0)
    for number, one in enumerate(running, start=1):
        rest = running[number - 1 :]
        why = _replaced_anyway(run, one)
        late = _time_is_up(run, one, (clock.now() - run.started).total_seconds() - slow_start)
        if why is not None or late is not None:
            run.left_out(NotTested(check=one.check.name, what=one.serving.what, why=why or late or ""))
            run.found(() if why is not None else _not_run(run, one.check, late or ""))
            continue
        if stop.is_set():
            _leave_out(run, rest)
            raise _Interrupted
        left = sum(each.serving.seconds for each in rest)
        run.order.progress(CheckStarted(one.check.name, one.serving.what, number, len(running), left))
        try:
            found = await _unless(stop, _verified(workbench, run, one, clock))
        except _Interrupted:
            _leave_out(run, rest)
            raise
        except Exception as error:  # whatever it is, it must not take the report of the others with it
            await _read_health(workbench, run, one.check.name)
            found = _failed(run, one.check, error)
        run.found(found)


def _leave_out(run: RunState, rest: Sequence[PlannedCheck]) -> None:
    for one in rest:
        run.left_out(NotTested(check=one.check.name, what=one.serving.what, why="the run was interrupted"))


def _time_is_up(run: RunState, one: PlannedCheck, used: float) -> str | None:
    """Earlier checks took longer than thought."""
    wish = run.order.wish
    if one.check.name not in wish.only and wish.device == "cuda" and used + 0.7 * one.serving.seconds > wish.within_s:
        return f"no time left: {used:.0f} s of {wish.within_s:.0f} s were used"
    return None


def _replaced_anyway(run: RunState, one: PlannedCheck) -> str | None:
    lost = next((each for each in run.findings if _is_final(each)), None)
    if lost is not None and one.serving.depth > 0:
        return f"a GPU must be replaced anyway: {lost.message}"
    return None


def _not_run(run: RunState, check: Check, why: str) -> tuple[Finding, ...]:
    """It was planned and did not run: a verdict without it would claim more than was tested."""
    words = f"{check.name} did not run: {why}. Run it again with more time (--within)."
    return _unmeasured(run, check, "not-run", words)


def _without_result(run: RunState) -> tuple[Finding, ...]:
    """Checks selected by name without any result: a good verdict must not read as if it included them."""
    judged = {one.check for one in run.findings if one.verdict is not Grade.SKIPPED}
    return tuple(
        Finding(
            check=name,
            verdict=Grade.INCONCLUSIVE,
            code=judge.code_of(name, "not-run"),
            message=f"{name} was selected (--check) and did not run: {_why_not(run, name)}.",
            action=Remedy.CHECK_CONFIG,
        )
        for name in run.order.wish.only
        if name not in judged
    )


def _why_not(run: RunState, check: str) -> str:
    why = [one.why for one in run.coverage if one.check == check and not one.what]
    why += [one.message for one in run.findings if one.check == check]
    return next(iter(why), "it does not apply to this machine").rstrip(".")


def _failed(run: RunState, check: Check, error: Exception) -> tuple[Finding, ...]:
    words = (
        f"{check.name} ended with an error ({type(error).__name__}: {error}), so it has no result. Run it again; if"
        " the cause is not on your side, report a bug with the report's JSON."
    )
    return _unmeasured(run, check, "failed", words)


def _unmeasured(run: RunState, check: Check, what: str, message: str) -> tuple[Finding, ...]:
    """Of every GPU, where each was to be measured: none of them passes."""
    whose: list[str | None] = [gpu.uuid for gpu in run.gpus] if check.how is RunMode.EACH else [None]
    bare = Finding(
        check=check.name,
        verdict=Grade.INCONCLUSIVE,
        code=judge.code_of(check.name, what),
        message=message,
        action=Remedy.RETEST,
    )
    return tuple(msgspec.structs.replace(bare, gpu=gpu) for gpu in whose)


def _is_final(finding: Finding) -> bool:
    return finding.verdict is Grade.FAIL and finding.action is Remedy.REPLACE_GPU


async def _verified(workbench: Workbench, run: RunState, one: PlannedCheck, clock: Clock) -> tuple[Finding, ...]:
    """Run it and read it; what fails by a figure that could be chance is run again.

    On all GPUs: alone, a suspect has the machine's power and air for itself and is held against others that did not.
    Only a probe without a reply is not repeated: it would hang as long again.
    """
    gpus = [gpu.uuid for gpu in run.gpus]
    first = await _run_probes(workbench, run, one, clock, gpus)
    answering = [uuid for uuid in gpus if isinstance(first.answers.get(uuid), ProbeResult)]
    tries = [_read(run, one, first, first)]
    while len(tries) < ATTEMPTS and (suspects := _suspects(tries)):
        run.order.progress(CheckRepeated(one.check.name, len(tries) + 1, tuple(sorted(filter(None, suspects)))))
        try:
            again = await _run_probes(workbench, run, one, clock, answering, again=True)
            merged = replace(again, answers={**first.answers, **again.answers})
            tries.append(_read(run, one, merged, again))
        except Exception as error:  # what the tries before it showed still counts
            tries.append(_failed(run, one.check, error))
    return verdicts.confirmed(tries)


def _read(run: RunState, one: PlannedCheck, trial: CheckRun, latest: CheckRun) -> tuple[Finding, ...]:
    """`latest`: the try that was just made; what else was going on meanwhile decides what a slow figure is worth."""
    context = run.context()
    return qualified(one.check.interpret(trial, context), latest, context)


def _suspects(tries: Sequence[tuple[Finding, ...]]) -> set[str | None]:
    """GPUs (None: the node) about which the tries so far do not agree, or which failed only once."""
    return {
        key[2]
        for key in {verdicts.key(one) for found in tries for one in found if verdicts.needs_another(one)}
        if verdicts.undecided([verdicts.find(one, key) for one in tries])
    }


async def _run_probes(
    workbench: Workbench, run: RunState, one: PlannedCheck, clock: Clock, gpus: Sequence[str], *, again: bool = False
) -> CheckRun:
    """`gpus`: the GPUs to run on, where each has its own probe."""
    assert one.check.request is not None, f"{one.check.name} has nothing to run"
    began, before = clock.now(), dict(run.last)
    job = one.check.request(one.serving, run.context())
    if (limit := run.order.wish.check_timeout_s) is not None:
        job = msgspec.structs.replace(job, deadline_s=limit)
    run.order.progress(ProbeStarted(one.check.name, job.params))
    answers: Mapping[str, ProbeReply]
    if one.check.how is RunMode.TOGETHER:
        answers = await workbench.together([gpu.uuid for gpu in run.gpus], job)
    else:
        given = await workbench.each(dict.fromkeys(gpus, job))
        answers = {uuid: given.get(uuid, SILENT) for uuid in gpus}
    _add_busy(run, answers)
    after = await _read_health(workbench, run, one.check.name)
    seconds = (clock.now() - began).total_seconds()
    for who, answer in answers.items():
        record = {"check": one.check.name, "who": who, "params": job.params, "again": again}
        run.records.append({**record, "answer": msgspec.to_builtins(answer)})
    return CheckRun(one.serving, answers, seconds, (before, after))


def _add_busy(run: RunState, answers: Mapping[str, ProbeReply]) -> None:
    """By GPU; a rank is the GPU at its place."""
    ranks = {str(rank): gpu.uuid for rank, gpu in enumerate(run.gpus)}
    for who, answer in answers.items():
        if isinstance(answer, ProbeResult):
            uuid = ranks.get(who, who)
            run.busy[uuid] = run.busy.get(uuid, 0.0) + answer.busy_s


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """The findings of the work; if the run is interrupted, the work is ended first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _Interrupted
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def _report(run: RunState, ended: datetime) -> Report:
    order, seconds = run.order, (ended - run.started).total_seconds()
    tallies = verdicts.of_gpus(run.gpus, run.findings, run.busy, seconds)
    verdict, reason = verdicts.of_run(
        order.wish, run.gpus, run.findings, interrupted=run.interrupted, self_test=order.self_test
    )
    return Report(
        run=order.run,
        node=run.machine.node,
        version=order.version,
        device=order.wish.device,
        started=run.started,
        ended=ended,
        profile=order.wish.profile,
        within_s=order.wish.within_s,
        verdict=verdict,
        reason=reason,
        machine=run.machine,
        expected=order.wish.expected,
        tallies=tallies,
        findings=tuple(run.findings),
        deltas=tuple(run.deltas),
        coverage=tuple(run.coverage),
        power=detection_power(run.findings, run.context()),
        timeline=tuple(run.readings),
        records=tuple(run.records),
        settings={"wish": msgspec.to_builtins(order.wish)},
        programme=run.programme,
        interrupted=run.interrupted,
        self_test=order.self_test,
    )
