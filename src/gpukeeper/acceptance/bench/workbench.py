"""The local machine with its GPUs as the workbench of an acceptance run: reads its state, and runs probes on it.

With `cpu` the probes run on the CPU instead of GPUs: the same probes, the same kind of results, no health data. The
caller closes it. If this process is killed, everything it started ends as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from gpukeeper.acceptance.bench import machine, other_processes
from gpukeeper.acceptance.bench.probing import ProbeLauncher, ProbeWorkers, run_ranks
from gpukeeper.acceptance.record import Machine, ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders, kernel_log
from gpukeeper.devices.driver.facts import GpuFacts, Listed
from gpukeeper.devices.driver.protocol import DriverReply as DriverAnswer
from gpukeeper.devices.health import HealthMonitor, gpus_of, health_of
from gpukeeper.model.condition import Xid
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading
from gpukeeper.model.unknown import Unknown

CPU = "cpu"
CPU_MODE = Unknown("the CPU is tested instead of a GPU", by_design=True)
SCAN = timedelta(seconds=20)
SETTLES_S = 1.5  # the driver averages use over up to a second
WATCH_S = 1.0  # how often processes are listed while something is measured
_T = TypeVar("_T")
OF_TORCH = ("torch", "cuda", "nccl", "cudnn", "python")  # of a worker's greeting, by our own names
USELESS = ("cuda_mismatch", "driver_too_old", "driver_mismatch", "fabric")  # kinds of acceptance/judging/messages.py
OF_A_GPU = ("capability", "sms", "l2_bytes")


class LocalWorkbench:
    """`python`: an interpreter with PyTorch, or why there is none (interpreter.find_python). `count`: how many CPUs."""

    def __init__(
        self,
        python: str | Unknown,
        device: str = "cuda",
        *,
        count: int = 1,
        driver: HealthMonitor | None = None,
        bench: ProbeLauncher | None = None,
    ) -> None:
        assert device in ("cuda", CPU), device
        self._python, self._device, self._count = python, device, count
        self._driver = driver or HealthMonitor()
        self._bench = bench or ProbeLauncher("" if isinstance(python, Unknown) else python, device)
        self._workers = ProbeWorkers(self._bench)
        self._opened, self._opened_ticks = datetime.now(UTC), time.monotonic()
        self._facts: tuple[GpuFacts, ...] | None = None
        self._used_before_us: dict[str, Fact] | None = None  # MiB, by uuid
        self._busy_before_us: dict[str, Fact] = {}  # percent, by uuid
        self._own: set[other_processes.Name] = set()  # processes of ours that had a GPU open at a scan
        self._met: dict[
            str, dict[int, str]
        ] = {}  # by uuid: other users' processes since the last reading, pid and description
        self._hidden: frozenset[str] = frozenset()  # GPUs that other processes use now
        self._logs: dict[str, str] = {}
        self._ranks_ran = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def machine(self) -> Machine:
        environment = await in_thread(machine.environment, SCAN)
        gpus, rest = (self._cpus(environment), {}) if self._device == CPU else await self._gpus(environment)
        await self._read_before_us()
        hello, more = await self._greeting(gpus[0].uuid if isinstance(gpus, tuple) and gpus else None)
        if isinstance(gpus, tuple) and gpus and hello:
            gpus = (with_facts(gpus[0], {key: hello[key] for key in OF_A_GPU if key in hello}), *gpus[1:])
        return Machine(node=machine.node_name(), gpus=gpus, environment={**environment, **more}, **rest)

    async def health(self) -> Mapping[str, Health] | Unknown:
        if self._device == CPU:
            return {}
        if self._facts is None:
            facts = await self._driver.identity()
            if isinstance(facts, Unknown):
                return facts
            self._facts = facts.gpus
        readings = await self._driver.health()
        if isinstance(readings, Unknown):
            return readings
        known, met = self._facts, self._met
        self._met = {}

        def seen() -> dict[str, Health]:
            neighbours = self._scan()

            def others(uuid: str, listed: Listed, memory: Fact) -> tuple[int, ...] | Unknown:
                whole = whole_of(uuid, known)
                if whole is None:
                    return Unknown("it was not present at the start")
                used, busy = (self._used_before_us or {}).get(uuid), self._busy_before_us.get(uuid)
                return neighbours.on(whole, uuid, listed, memory, used, busy)

            found = health_of(readings, datetime.now(UTC), others, self._xids(known))
            return {uuid: _with_met(one, met.get(uuid, {})) for uuid, one in found.items()}

        try:
            return self._only_ours(await in_thread(seen, SCAN))
        except (TimeoutError, OSError) as error:
            why = Unknown(f"processes and the kernel log could not be read: {error or 'timeout'}")
            unseen = health_of(readings, datetime.now(UTC), lambda *_: why, {})
            return self._only_ours({uuid: _with_met(one, met.get(uuid, {})) for uuid, one in unseen.items()})

    async def readings(self) -> Sequence[Reading]:
        if self._device == CPU:
            return ()
        taken = [one for one in await self._driver.readings() if one.uuid not in self._hidden]
        return [msgspec.structs.replace(one, at=one.at - self._opened_ticks) for one in taken]

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        if isinstance(self._python, Unknown):
            return dict.fromkeys(jobs, self._no_torch(self._python))
        replies = await self._watched(self._workers.each(jobs))
        return {gpu: self._since_opened(reply) for gpu, reply in replies.items()}

    def _since_opened(self, reply: ProbeReply) -> ProbeReply:
        """`loaded`: from when to when the GPU was under load, by the machine's monotonic clock like readings."""
        if not isinstance(reply, ProbeResult) or "loaded" not in reply.result:
            return reply
        loaded = [at - self._opened_ticks for at in reply.result["loaded"]]
        return msgspec.structs.replace(reply, result={**reply.result, "loaded": loaded})

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        if isinstance(self._python, Unknown):
            return {str(rank): self._no_torch(self._python) for rank in range(len(gpus))}
        await self._workers.close()  # they keep memory, and a GPU that lets in one process only
        answers, logs = await self._watched(run_ranks(self._bench, gpus, job))
        self._ranks_ran += 1
        self._logs |= {f"ranks-{self._ranks_ran}-{job.probe}/{name}": words for name, words in logs.items() if words}
        return answers

    async def close(self) -> None:
        try:
            await self._workers.close()
        finally:
            await self._driver.close()

    @property
    def logs(self) -> Mapping[str, str]:
        """The last output of probes, ranks and NCCL, by file name."""
        return {**{f"worker-{gpu}.log": words for gpu, words in self._workers.words.items()}, **self._logs}

    def _cpus(self, environment: Mapping[str, Fact]) -> tuple[Gpu, ...]:
        memory = environment.get("memory_mib")
        return tuple(
            Gpu(
                uuid=f"cpu-{index}",
                index=index,
                name="CPU",
                serial=CPU_MODE,
                pci=CPU_MODE,
                memory_mib=memory if isinstance(memory, int) else CPU_MODE,
                facts={"cpus": environment.get("cpus")},
            )
            for index in range(self._count)
        )

    async def _gpus(self, environment: dict[str, Fact]) -> tuple[tuple[Gpu, ...] | Unknown, dict[str, Any]]:
        """What the driver names, without what the variables of this process hide from it."""
        facts = await self._driver.identity()
        if isinstance(facts, Unknown):
            return facts, {}
        inside = environment["containerized"] is True
        if facts.state != "answered":
            environment |= dict.fromkeys(("driver", "cuda_driver"), None if _is_absent(facts) else Unknown(facts.why))
            return await in_thread(lambda: _without_a_driver(facts, inside=inside), SCAN)
        environment |= {"driver": facts.driver, "cuda_driver": facts.cuda_driver}
        self._facts = facts.gpus
        named, silent = gpus_of(facts.gpus)
        minors = [one.minor for one in facts.gpus if isinstance(one.minor, int)]
        found = await in_thread(lambda: machine.on_bus(minors, inside=inside), SCAN)
        gpus = tuple(with_facts(one, {"numa": _numa(one)}) for one in machine.visible(named))
        self._hidden = frozenset(one.uuid for one in named) - {one.uuid for one in gpus}
        return gpus, {"silent": silent, "on_bus": found, "topology": facts.topology}

    async def _read_before_us(self) -> None:
        """Once, before our first worker: what memory is in use then is not ours."""
        if self._device == CPU or self._used_before_us is not None:
            return
        readings = await self._driver.health() if self._facts else ()
        seen = {} if isinstance(readings, Unknown) else health_of(readings, self._opened, lambda *_: (), {})
        self._used_before_us = {uuid: one.states.get("memory_used_mib") for uuid, one in seen.items()}
        self._busy_before_us = {uuid: one.states.get("utilisation") for uuid, one in seen.items()}

        if any(
            isinstance(use, int | float) and use >= other_processes.BUSY_PERCENT
            for use in self._busy_before_us.values()
        ):
            await asyncio.sleep(SETTLES_S)  # a driver that was just opened, or a program that just ended, shows use
            again = await self._driver.health()
            now = {} if isinstance(again, Unknown) else health_of(again, self._opened, lambda *_: (), {})
            self._busy_before_us = {uuid: one.states.get("utilisation") for uuid, one in now.items()}

    def _scan(self) -> other_processes.OtherProcesses:
        found = other_processes.scan(known=self._own)
        self._own |= found.own
        return found

    async def _watched(self, work: Awaitable[_T]) -> _T:
        """The result of the work. Other processes that come and go meanwhile are stored for the next reading."""
        watching = asyncio.create_task(self._watch())
        try:
            return await work
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        while self._facts and self._device != CPU:
            known = self._facts
            try:
                found = await in_thread(lambda: _others(self._scan(), known), SCAN)  # noqa: B023 - awaited in this round
            except (TimeoutError, OSError):
                found = {}  # the reading after the work reports that it cannot be seen
            for uuid, processes in found.items():
                self._met[uuid] = {**processes, **self._met.get(uuid, {})}
            await asyncio.sleep(WATCH_S)

    async def _greeting(self, gpu: str | None) -> tuple[dict[str, Any], dict[str, Fact]]:
        """What PyTorch reports about itself, and which part of it is stored in the report. Its worker stays for the
        first probe."""
        if isinstance(self._python, Unknown):
            return {}, {**dict.fromkeys(OF_TORCH, self._python), "torch_why": _cause(self._python)}
        where = machine.written(self._python)
        hello = await (self._without_gpu() if gpu is None else self._workers.hello(gpu))
        if not isinstance(hello, ProbeFailure):
            return hello, {**{key: hello.get(key) for key in OF_TORCH}, "torch_why": None, "interpreter": where}
        plain = await self._without_gpu() if self._device != CPU and gpu is not None else hello
        why = Unknown(hello.words)
        facts: dict[str, Fact] = dict.fromkeys(OF_TORCH, why)
        if not isinstance(plain, ProbeFailure):
            facts = {key: plain.get(key) for key in OF_TORCH}
        if hello.kind in USELESS:  # it is there, and no use on this machine
            facts |= {"torch": why, "torch_version": facts["torch"]}
        return {}, {**facts, "torch_why": hello.words, "interpreter": where}

    async def _without_gpu(self) -> dict[str, Any] | ProbeFailure:
        """It cannot use the GPU, but may still report its release."""
        alone = ProbeWorkers(replace(self._bench, kind=CPU))
        try:
            return await alone.hello(CPU)
        finally:
            await alone.close()

    def _only_ours(self, health: Mapping[str, Health]) -> dict[str, Health]:
        return {uuid: one for uuid, one in health.items() if uuid not in self._hidden}

    def _xids(self, gpus: Sequence[GpuFacts]) -> dict[str, tuple[Xid, ...] | Unknown]:
        boot = holders.boot_time()
        return {
            one.uuid: kernel_log.xids(one.pci, self._opened, boot) if isinstance(one.pci, str) else one.pci
            for one in gpus
            if isinstance(one.uuid, str)
        }

    @staticmethod
    def _no_torch(why: Unknown) -> ProbeFailure:
        return ProbeFailure(kind="no_torch", words=_cause(why))


def _without_a_driver(facts: DriverAnswer, *, inside: bool) -> tuple[tuple[Gpu, ...] | Unknown, dict[str, Any]]:
    """No driver and none loaded: there are no GPUs, which is an answer. A driver that fails is not."""
    if _is_absent(facts):
        return (), {"on_bus": machine.on_bus((), inside=inside)}
    return Unknown(facts.why), {}


def _is_absent(facts: DriverAnswer) -> bool:
    return facts.state == "no driver" and not Path("/proc/driver/nvidia").exists()


def _others(neighbours: other_processes.OtherProcesses, gpus: Sequence[GpuFacts]) -> dict[str, dict[int, str]]:
    """By uuid of a GPU or slice: processes of others on it now, by pid."""
    found: dict[str, dict[int, str]] = {}
    for one in gpus:
        slices = () if isinstance(one.slices, Unknown) else one.slices
        uuids = [part.uuid for part in slices] or ([one.uuid] if isinstance(one.uuid, str) else [])
        found |= {uuid: {pid: other_processes.describe(pid) for pid in neighbours.others(one, uuid)} for uuid in uuids}
    return found


def _with_met(reading: Health, met: Mapping[int, str]) -> Health:
    """What a reading found, and what came and went since the previous one."""
    now = () if isinstance(reading.foreign, Unknown) else reading.foreign
    pids = tuple(sorted({*now, *met}))
    if not pids:
        return reading
    named = {pid: met.get(pid) or other_processes.describe(pid) for pid in pids}
    return msgspec.structs.replace(reading, foreign=pids, named=named)


def _cause(no_python: Unknown) -> str:
    """Without the advice at its end: the findings give it."""
    return no_python.why.partition(" To install it: ")[0]


def whole_of(uuid: str, gpus: Sequence[GpuFacts]) -> GpuFacts | None:
    """The GPU of that uuid, or the one that slice is a part of."""
    for one in gpus:
        slices = () if isinstance(one.slices, Unknown) else one.slices
        if one.uuid == uuid or any(part.uuid == uuid for part in slices):
            return one
    return None


def with_facts(gpu: Gpu, more: Mapping[str, Fact]) -> Gpu:
    return msgspec.structs.replace(gpu, facts={**gpu.facts, **more})


def _numa(gpu: Gpu) -> Fact:
    return gpu.pci if isinstance(gpu.pci, Unknown) else machine.numa_of(gpu.pci)
