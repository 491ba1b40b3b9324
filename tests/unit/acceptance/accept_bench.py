"""A workbench whose every answer a test writes down, with a clock that only its work moves; and checks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode, RunRequest, params_of
from gpukeeper.acceptance.record import (
    Finding,
    Machine,
    NotTested,
    ProbeFailure,
    ProbeReply,
    ProbeRequest,
    ProbeResult,
    Report,
    Thresholds,
)
from gpukeeper.acceptance.run import RunConfig, Step, accept
from gpukeeper.model.gpu import Gpu, Grade, Health, Past, Reading
from gpukeeper.model.unknown import Unknown

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
FLOOR = 100.0


class Bench:
    """`script`: by check and GPU (or rank): what each try in turn gives, the last one for ever; else a good figure."""

    def __init__(
        self, gpus: int = 2, script: Mapping[tuple[str, int], Sequence[float | ProbeReply]] | None = None
    ) -> None:
        self.gpus: tuple[Gpu, ...] | Unknown = tuple(
            Gpu(uuid=f"GPU-{n}", index=n, name="NVIDIA H200", serial=f"S{n}") for n in range(gpus)
        )
        self.script = dict(script or {})
        self.asked: list[tuple[str, str]] = []
        self.params: list[Mapping[str, Any]] = []
        self.counters: dict[str, dict[str, int | Unknown | None]] = {
            f"GPU-{n}": {"pcie_replays": 0} for n in range(gpus)
        }
        self.blind = False  # the driver does not answer
        self.during: Callable[[str], None] = lambda check: None  # what happens while a probe runs
        self.hangs_at = ""  # a probe that never answers
        self.ended: list[str] = []  # those that were ended while they ran
        self.now_s = 0.0
        self.closed = False

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self.now_s)

    async def machine(self) -> Machine:
        return Machine(node="node-1", gpus=self.gpus)

    async def health(self) -> Mapping[str, Health] | Unknown:
        if self.blind:
            return Unknown("the driver did not respond")
        return {
            uuid: Health(uuid=uuid, at=self.now(), counters=dict(counters)) for uuid, counters in self.counters.items()
        }

    async def readings(self) -> Sequence[Reading]:
        return [Reading(uuid="GPU-0", at=self.now_s, sm_mhz=1980.0)]

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        found = {uuid: self._answer(job, uuid.removeprefix("GPU-"), uuid) for uuid, job in jobs.items()}
        await self._work(jobs)
        return found

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        found = {str(rank): self._answer(job, str(rank), str(rank)) for rank in range(len(gpus))}
        await self._work({"": job})
        return found

    async def close(self) -> None:
        self.closed = True

    async def _work(self, jobs: Mapping[str, ProbeRequest]) -> None:
        probe = next(iter(jobs.values())).probe
        self.during(probe)
        if probe == self.hangs_at:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(probe)
        self.now_s += float(next(iter(jobs.values())).params.get("takes", 1.0))

    def _answer(self, job: ProbeRequest, place: str, who: str) -> ProbeReply:
        tries = self.asked.count((job.probe, who))
        self.asked.append((job.probe, who))
        self.params.append(job.params)
        told = self.script.get((job.probe, int(place)), (FLOOR * 1.2,))
        answer = told[min(tries, len(told) - 1)]
        return (
            answer
            if isinstance(answer, ProbeResult | ProbeFailure)
            else ProbeResult(result={"x": answer}, seconds=1.0, busy_s=0.8)
        )


def figure_check(name: str, *servings: CheckSize, how: RunMode = RunMode.EACH, confirm: bool = True) -> Check:
    """A figure for each GPU (or rank), FAIL below the floor."""

    def ask(serving: CheckSize, context: CheckContext) -> ProbeRequest:
        return ProbeRequest(probe=name, params=params_of(name, serving, context))

    def read(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
        return tuple(
            _read(name, who if how is RunMode.EACH else None, answer, confirm=confirm)
            for who, answer in trial.answers.items()
        )

    default = (CheckSize(depth=0, seconds=5, worth=1, what="some"),)
    return Check(
        name=name,
        title=name,
        proves=".",
        cannot=".",
        how=how,
        servings=servings or default,
        interpret=read,
        request=ask,
    )


def _read(name: str, gpu: str | None, answer: ProbeReply, *, confirm: bool) -> Finding:
    if isinstance(answer, ProbeFailure):
        return Finding(
            check=name, gpu=gpu, verdict=Grade.INCONCLUSIVE, code=answer.kind, message=f"{name}: {answer.words}."
        )
    value = float(answer.result["x"])
    verdict = Grade.FAIL if value < FLOOR else Grade.PASS
    return Finding(
        check=name,
        metric="x",
        gpu=gpu,
        verdict=verdict,
        code=f"{name}-{'below-floor' if verdict is Grade.FAIL else 'ok'}",
        message=f"{name} is {value:g}.",
        value=value,
        unit="GB/s",
        method="m",
        samples=(value,),
        confirm=confirm and verdict is Grade.FAIL,
    )


def look_check(name: str, read: Callable[[CheckContext], Sequence[Finding]]) -> Check:
    serving = CheckSize(depth=0, seconds=0, worth=1, what="look")
    return Check(
        name=name,
        title=name,
        proves=".",
        cannot=".",
        how=RunMode.LOOK,
        servings=(serving,),
        interpret=lambda trial, context: tuple(read(context)),
    )


def run(
    bench: Any,
    checks: Sequence[Check],
    wish: RunRequest | None = None,
    *,
    stop_at: str | None = None,
    history: Mapping[str, tuple[Past, ...]] | None = None,
    clock: Any = None,
    limits: Callable[[Gpu, str, str, str], Thresholds] = lambda *_: Thresholds(),
) -> tuple[Report, list[Step]]:
    """`stop_at`: interrupt when this check begins."""
    steps: list[Step] = []

    async def story() -> Report:
        stop = asyncio.Event()

        def progress(step: Step) -> None:
            steps.append(step)
            if (
                stop_at is not None
                and getattr(step, "check", None) == stop_at
                and not isinstance(step, Finding | NotTested)
            ):
                stop.set()

        order = RunConfig(
            run="r-1",
            version="0",
            wish=wish or RunRequest(),
            checks=tuple(checks),
            limits=limits,
            history=lambda gpus: history or {},
            progress=progress,
        )
        return await accept(bench, order, clock or bench, stop)

    return asyncio.run(story()), steps
