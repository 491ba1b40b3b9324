"""The local machine with its GPUs as the workbench of an acceptance run: reads its state, and runs probes on it.
With `cpu` the probes run on the CPU instead: the same probes, the same kind of results, no health data. The caller
closes it. If this process is killed, everything it started ends as well. Other processes on a GPU are found, too.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from gpukeeper.acceptance.bench import machine
from gpukeeper.acceptance.bench.probing import ProbeLauncher, ProbeWorkers, run_ranks
from gpukeeper.acceptance.bench.supervisor import descendants
from gpukeeper.acceptance.record import Machine, ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.blocking import in_thread
from gpukeeper.devices import holders
from gpukeeper.devices.driver.client import HealthMonitor, gpus_of, health_of
from gpukeeper.devices.driver.facts import DriverReply as DriverAnswer
from gpukeeper.devices.driver.facts import GpuFacts, Listed
from gpukeeper.devices.gpus import holds, logged_xids
from gpukeeper.devices.holders import Holder
from gpukeeper.model.gpu import FIRST_BASELINE_MIB, INFRASTRUCTURE, OF_A_SESSION, Fact, Gpu, Health, Reading, Xid
from gpukeeper.model.unknown import Unknown

COMPUTES = "/dev/nvidia-uvm"
BUSY_PERCENT = 10.0  # of use before our first program started: another program computes on it
LONGEST_COMMAND = 80
OURS_MIB = 4096  # a worker that rests between probes keeps its context and some kernels, never that much


ProcessName: TypeAlias = tuple[int, int]  # pid and start time: a pid alone is reused


# By descriptors, as `holders` finds them, without our own processes and without those that only watch: a program that
# computes also has /dev/nvidia-uvm open. What cannot be seen from here is Unknown with the reason.
@dataclass(frozen=True)
class OtherProcesses:
    """One scan of all processes."""

    computing: tuple[Holder, ...]  # ours among them
    ours: frozenset[int]
    minors: Mapping[int, tuple[int, int, int]]  # which capability opens which slice
    blind: str | None = None  # why processes of other users could not be inspected
    walled: bool = False  # in a pid namespace of our own: processes outside are not visible
    proc: str = "/proc"

    @property
    def own(self) -> set[ProcessName]:
        """Those of ours that have a GPU open."""
        return {(one.pid, one.starttime) for one in self.computing if one.pid in self.ours}

    def others(self, whole: GpuFacts, uuid: str) -> set[int]:
        """By open descriptors alone: pids of others that compute on that GPU, or on that slice of it."""
        return {one.pid for one in self.computing if one.pid not in self.ours and self._holds(one, whole, uuid)}

    def on(
        self,
        whole: GpuFacts,
        uuid: str,
        listed: Listed,
        memory_used_mib: Fact,
        used_before_us_mib: Fact = None,
        busy_before_us: Fact = None,
    ) -> tuple[int, ...] | Unknown:
        """Pids of others that compute on that GPU, or on that slice of it. What was in use before we began there, and
        how busy it was then, shows other programs where our own use hides them."""
        here = [one.pid for one in self.computing if self._holds(one, whole, uuid)]
        others = self.others(whole, uuid)
        if not self.walled and not isinstance(listed, Unknown):
            others |= {pid for pid in listed if pid not in self.ours and self._is_alive(pid)}
        if others:
            return tuple(sorted(others))
        hidden = self.walled or self.blind is not None
        if hidden and isinstance(busy_before_us, int | float) and busy_before_us >= BUSY_PERCENT:
            return Unknown(
                f"it was {busy_before_us:.0f} % busy before the run started, and the process is not visible from here"
            )
        if self.walled:
            theirs = _besides_ours(memory_used_mib, used_before_us_mib) if here else memory_used_mib
            return self._behind_the_wall(theirs)
        if self.blind is not None:
            reason = listed.why if isinstance(listed, Unknown) else "the driver lists no other process"
            return Unknown(f"{self.blind}; {reason}", by_design=not isinstance(listed, Unknown))
        return ()

    def _behind_the_wall(self, used_mib: Fact) -> Unknown:
        """The driver lists pids of the machine, ours too: nothing to compare with. Memory can still be compared."""
        if isinstance(used_mib, int) and used_mib > FIRST_BASELINE_MIB:
            return Unknown(f"{used_mib} MiB of its memory are in use by a process that is not visible from here")
        return Unknown("processes outside this PID namespace are not visible from here", by_design=True)

    def _holds(self, one: Holder, whole: GpuFacts, uuid: str) -> bool:
        slices = () if isinstance(whole.slices, Unknown) else whole.slices
        part = next((each for each in slices if each.uuid == uuid), None)
        return holds(one, whole, part, self.minors)

    def _is_alive(self, pid: int) -> bool:
        """The driver still lists ended processes. Monitors and display servers do not count."""
        try:
            found = holders.look_up(pid, self.proc)
        except (OSError, ValueError):
            return True
        return found is not None and not watches(found)


def _besides_ours(now_mib: Fact, before_us_mib: Fact) -> Fact:
    """The most that is surely not ours: what was there before us, and what we never keep between probes."""
    above = now_mib - OURS_MIB if isinstance(now_mib, int) else None
    return max((one for one in (before_us_mib, above) if isinstance(one, int)), default=None)


def scan_processes(proc: str = "/proc", root: int | None = None, known: Collection[ProcessName] = ()) -> OtherProcesses:
    """`root`: the process that ours are below. `known`: ours as earlier scans found them; one that lost its parent
    while it ends is still ours. Blocks for the time of a scan."""
    mine = os.getpid() if root is None else root
    before = descendants(mine)
    scanned = holders.scan(proc)
    ended = {one.pid for one in scanned.found if (one.pid, one.starttime) in known}
    ours = frozenset({mine, *before, *descendants(mine), *ended})
    hidden = [pid for pid in scanned.hidden if pid not in ours]
    blind = f"{len(hidden)} processes of other users could not be inspected: run as root" if hidden else None
    if not holders.shows_everyone(proc):
        blind = "this /proc hides the processes of other users: run as root"
    return OtherProcesses(
        computing=tuple(one for one in scanned.found if not watches(one) and computes(one.pid, proc)),
        ours=ours,
        minors=holders.mig_minors(proc),
        blind=blind,
        walled=holders.is_walled(proc),
        proc=proc,
    )


def describe_process(pid: int, proc: str = "/proc") -> str:
    """ "pid 4242 (ann: python train.py)"; less where it cannot be read. The command line is untrusted text."""
    try:
        uid = holders.parse_uid(Path(proc, str(pid), "status").read_text("utf-8", "replace"))
    except (OSError, ValueError):
        return f"pid {pid}"
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"uid {uid}"
    try:
        with Path(proc, str(pid), "cmdline").open("rb") as file:
            arguments = file.read(4 * LONGEST_COMMAND).decode("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        arguments = ""
    shown = "".join(sign if sign.isprintable() else "?" for sign in arguments)
    command = shown if len(shown) <= LONGEST_COMMAND else f"{shown[:LONGEST_COMMAND]}…"
    return f"pid {pid} ({owner}: {command or 'command unknown'})"


def watches(one: Holder) -> bool:
    return one.comm in INFRASTRUCTURE and (one.uid == 0 or one.comm in OF_A_SESSION)


def computes(pid: int, proc: str = "/proc") -> bool:
    """In doubt yes."""
    try:
        return any(str(link.readlink()).startswith(COMPUTES) for link in Path(proc, str(pid), "fd").iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


CPU = "cpu"
CPU_MODE = Unknown("the CPU is tested instead of a GPU", by_design=True)
SCAN = timedelta(seconds=20)
SETTLES_S = 1.5  # the driver averages use over up to a second
WATCH_S = 1.0  # how often processes are listed while something is measured
_T = TypeVar("_T")
OF_TORCH = ("torch", "cuda", "nccl", "cudnn", "python")  # of a worker's greeting, by our own names
USELESS = ("cuda_mismatch", "driver_too_old", "driver_mismatch", "fabric")  # kinds of acceptance/judging/replies.py
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
        self._own: set[ProcessName] = set()  # processes of ours that had a GPU open at a scan
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

        if any(isinstance(use, int | float) and use >= BUSY_PERCENT for use in self._busy_before_us.values()):
            await asyncio.sleep(SETTLES_S)  # a driver that was just opened, or a program that just ended, shows use
            again = await self._driver.health()
            now = {} if isinstance(again, Unknown) else health_of(again, self._opened, lambda *_: (), {})
            self._busy_before_us = {uuid: one.states.get("utilisation") for uuid, one in now.items()}

    def _scan(self) -> OtherProcesses:
        found = scan_processes(known=self._own)
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
            one.uuid: logged_xids(one.pci, self._opened, boot) if isinstance(one.pci, str) else one.pci
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


def _others(neighbours: OtherProcesses, gpus: Sequence[GpuFacts]) -> dict[str, dict[int, str]]:
    """By uuid of a GPU or slice: processes of others on it now, by pid."""
    found: dict[str, dict[int, str]] = {}
    for one in gpus:
        slices = () if isinstance(one.slices, Unknown) else one.slices
        uuids = [part.uuid for part in slices] or ([one.uuid] if isinstance(one.uuid, str) else [])
        found |= {uuid: {pid: describe_process(pid) for pid in neighbours.others(one, uuid)} for uuid in uuids}
    return found


def _with_met(reading: Health, met: Mapping[int, str]) -> Health:
    """What a reading found, and what came and went since the previous one."""
    now = () if isinstance(reading.foreign, Unknown) else reading.foreign
    pids = tuple(sorted({*now, *met}))
    if not pids:
        return reading
    named = {pid: met.get(pid) or describe_process(pid) for pid in pids}
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
