"""The ranks of one job on this node: one process for each device, watched, and ended with what they left behind.

They are started as a launcher does it, by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. torchrun is not
used here: its agents would wait for each other after one of them is gone.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.acceptance.bench import probing
from gpukeeper.acceptance.bench.probing import FOLDER, NCCL_LOG, ProbeLauncher, RanksOutput, answer_of
from gpukeeper.acceptance.fleet import flight_recorder
from gpukeeper.acceptance.fleet.group_jobs import Job, RankDevice, RankProgress, RankResult
from gpukeeper.acceptance.record import ProbeFailure, ProbeRequest
from gpukeeper.devices.child_process import ChildProcess
from gpukeeper.model import reading

LOOK_S = 0.25
DUMP_S = 3.0  # for the ranks to write where they are
_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


class LocalRanks:
    """`first`: the number of the first rank here. `result` returns when all have ended, or were stopped."""

    def __init__(
        self, bench: ProbeLauncher, member: int, devices: Sequence[RankDevice], job: Job, first: int, world: int
    ) -> None:
        self._bench, self._member, self._devices, self._job = bench, member, tuple(devices), job
        self._first, self._world = first, world
        self._folder = Path(tempfile.mkdtemp(prefix="gpukeeper-group-"))
        self._stop: asyncio.Event = asyncio.Event()
        self._why, self._hang = "", False
        self._began = time.monotonic()

    def stop(self, why: str, *, hang: bool = False) -> None:
        self._why, self._hang = self._why or why, self._hang or hang
        self._stop.set()

    def quiet_s(self) -> float:
        """Since one of the ranks here last began a step; 0 until they have met."""
        ages = [one.step_age_s for one in self._progress().values() if one.step_age_s is not None]
        return min(ages, default=0.0)

    async def result(self, address: str, port: int) -> tuple[tuple[RankResult, ...], str, dict[str, str]]:
        """The results, how it ended (empty: by itself), and logs by name."""
        processes: dict[int, ChildProcess] = {}
        ended, progress = "", {}
        try:
            for local, rank in enumerate(self._ranks()):
                processes[rank] = await self._start(rank, local, address, port)
            ended = await self._wait(processes)
            if ended and self._hang:
                await self._dump()
            progress = self._progress()
        except OSError as error:
            ended, self._why = "failed", f"a rank could not be started: {error.strerror}"
        finally:
            await asyncio.gather(*(one.end() for one in processes.values()), return_exceptions=True)
            results = tuple(self._rank(rank, processes.get(rank), ended, progress) for rank in self._ranks())
            logs = probing.logs_in(self._folder)
            logs |= {f"rank-{rank}.stderr": one.words for rank, one in processes.items() if one.words}
            shutil.rmtree(self._folder, ignore_errors=True)
        return results, ended, logs

    def _ranks(self) -> range:
        return range(self._first, self._first + len(self._devices))

    async def _start(self, rank: int, local: int, address: str, port: int) -> ChildProcess:
        gpus = [one.uuid for one in self._devices]
        identity = {"RANK": rank, "WORLD_SIZE": self._world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": len(gpus)}
        environment = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING,NET",
            **_RECORDER,
            **self._bench.environment(gpus),
            "NCCL_DEBUG_FILE": str(self._folder / NCCL_LOG),
            **{name: str(value) for name, value in identity.items()},
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        request = ProbeRequest(probe=self._job.probe, params=self._job.params)
        words = (str(self._folder), self._bench.kind, probing.request_json(request))
        return await ChildProcess.start((self._bench.python, self._bench.main, "ranks", *words), environment, FOLDER)

    async def _wait(self, processes: Mapping[int, ChildProcess]) -> str:
        """Until all have ended, one has failed, the deadline has passed, or it is stopped."""
        waiting = {rank: asyncio.ensure_future(one.wait(1e6)) for rank, one in processes.items()}
        until = self._began + self._job.deadline_s + self._bench.ranks_to_start_s
        try:
            while not self._stop.is_set():
                if all(one.done() for one in waiting.values()):
                    return ""
                if failed := [rank for rank, one in waiting.items() if one.done() and one.result() != 0]:
                    self._why = f"rank {failed[0]} failed"
                    return "failed"
                if time.monotonic() > until:
                    self._hang = True
                    return "deadline"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), LOOK_S)
            return "stopped"
        finally:
            for one in waiting.values():
                one.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)

    async def _dump(self) -> None:
        """Ask the ranks where they are. One that is stopped writes nothing."""
        (self._folder / "dump").touch()
        until = time.monotonic() + DUMP_S
        wanted = [self._folder / f"rank-{rank}.where" for rank in self._ranks()]
        while time.monotonic() < until and not all(path.exists() for path in wanted):  # noqa: ASYNC110 - files
            await asyncio.sleep(LOOK_S)

    def _rank(
        self, rank: int, process: ChildProcess | None, ended: str, progress: Mapping[int, RankProgress]
    ) -> RankResult:
        record = probing.record_in(self._folder / f"rank-{rank}.json")
        code = None if ended == "deadline" or process is None else process.exit_code
        left = RanksOutput(
            records={} if record is None else {rank: record},
            words={} if process is None else {rank: process.words},
            stages={one: each.stage for one, each in progress.items()},
            torchrun="",
            exit_code=code,
            deadline_s=self._job.deadline_s,
            seconds=time.monotonic() - self._began,
        )
        reply = answer_of(rank, left)
        if record is None and ended in ("stopped", "failed") and not self._why.startswith(f"rank {rank} "):
            words = f"rank {rank} was stopped because {self._why}"
            reply = ProbeFailure(kind="failed", words=words, seconds=left.seconds)
        device = self._devices[rank - self._first].uuid
        return RankResult(
            rank=rank, member=self._member, device=device, reply=reply, progress=progress.get(rank, RankProgress())
        )

    def _progress(self) -> dict[int, RankProgress]:
        return {rank: read_progress(self._folder, rank) for rank in self._ranks()}


def read_progress(folder: Path, rank: int) -> RankProgress:
    """From the files that a rank writes (probes/progress.py). What is not there is not known."""
    step = _step(folder / f"rank-{rank}.step")
    number, what, pid = step.get("step"), step.get("what"), step.get("pid")
    alive = folder / f"rank-{rank}.alive"
    pid = pid if isinstance(pid, int) else _pid(alive)
    trace = _bytes(folder / f"rank-{rank}.trace")
    arrived, completed = flight_recorder.counts(trace) if trace else (None, None)
    return RankProgress(
        stage=_bytes(folder / f"rank-{rank}.stage").decode("utf-8", "replace").strip(),
        step=number if isinstance(number, int) else None,
        what=what if isinstance(what, str) else "",
        step_age_s=_age(folder / f"rank-{rank}.step"),
        heartbeat_age_s=_age(alive),
        state=_state(pid),
        arrived=arrived,
        completed=completed,
        where=_bytes(folder / f"rank-{rank}.where").decode("utf-8", "replace")[-2000:],
    )


def _step(path: Path) -> dict[str, Any]:
    try:
        found = reading.decode(_bytes(path) or b"{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _pid(path: Path) -> int | None:
    text = _bytes(path).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() and len(text) < 10 else None


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _state(pid: int | None) -> str:
    text = _bytes(Path(f"/proc/{pid}/stat")).decode("utf-8", "replace") if pid else ""
    return text.rpartition(")")[2].strip()[:1]


def free_port() -> int:
    """A port that is free now. If another program takes it before the job starts, the job is ordered again."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
