"""One node of the run: connects to the coordinator, runs the ranks that it orders, and ends when the run is over.

Whatever happens there is a result in bounded time. One process for each device, watched, and ended with what it left
behind; torchrun is not used here: its agents would wait for each other after one of them is gone.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.acceptance.bench import probing
from gpukeeper.acceptance.bench.child_process import ChildProcess
from gpukeeper.acceptance.bench.probing import FOLDER, NCCL_LOG, ProbeLauncher, RanksOutput, answer_of
from gpukeeper.acceptance.fleet.group_jobs import Job, Member, RankDevice, RankProgress, RankResult
from gpukeeper.acceptance.group.members import (
    BEFORE_PROOF,
    NONCE,
    Alive,
    Challenge,
    Done,
    MemberRefused,
    Membership,
    Order,
    Over,
    Present,
    Proof,
    ProtocolError,
    Stop,
    Welcome,
    is_proof,
    key_of,
    proof_of,
    receive_message,
    send_message,
)
from gpukeeper.acceptance.record import GroupReport, ProbeFailure, ProbeRequest, Values
from gpukeeper.model import reading


def recorded_counts(dump: bytes) -> tuple[int | None, int | None]:
    """Collectives begun and completed: the largest sequence number of each."""
    entries = list(_recorded_entries(dump))
    began = [number for number, _ in entries]
    completed = [number for number, state in entries if state == "completed"]
    return max(began, default=None), max(completed, default=0 if began else None)


def _recorded_entries(dump: bytes) -> Iterator[tuple[int, str]]:
    try:
        found = reading.decode(dump)
    except msgspec.DecodeError:
        return
    entries = found.get("entries") if isinstance(found, Mapping) else None
    for one in entries if isinstance(entries, list) else []:
        number = _recorded_number(one)
        if number is not None and not (isinstance(one, Mapping) and one.get("is_p2p") is True):
            yield number, str(one.get("state", ""))


def _recorded_number(entry: Any) -> int | None:
    """PyTorch 2.4 named it seq_id."""
    if not isinstance(entry, Mapping):
        return None
    found = entry.get("collective_seq_id", entry.get("seq_id"))
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


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
    """From the files that a rank writes (probes/ranks.py). What is not there is not known."""
    step = _step(folder / f"rank-{rank}.step")
    number, what, pid = step.get("step"), step.get("what"), step.get("pid")
    alive = folder / f"rank-{rank}.alive"
    pid = pid if isinstance(pid, int) else _pid(alive)
    trace = _bytes(folder / f"rank-{rank}.trace")
    arrived, completed = recorded_counts(trace) if trace else (None, None)
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


RETRY_S = 0.5
GREETING_S = 20.0


@dataclass(frozen=True)
class AgentResult:
    """The report of the run, or why there is none; and what the ranks of this node returned and wrote."""

    report: GroupReport | None
    failure: ProbeFailure | None
    records: tuple[Values, ...]
    logs: dict[str, str]


class Agent:
    def __init__(self, run: str, who: Membership, member: Member, bench: ProbeLauncher, rendezvous_s: float) -> None:
        self._run, self._who, self._member, self._bench = run, who, member, bench
        self._rendezvous_s = rendezvous_s
        self._key = key_of(run, who.secret)
        self._records: list[Values] = []
        self._logs: dict[str, str] = {}
        self._ranks: LocalRanks | None = None
        self._job = 0

    async def run(self, host: str = "", stop: asyncio.Event | None = None) -> AgentResult:
        """`host`: where to connect, instead of the address of the run (the first node itself). `stop`: leave."""
        connected = await self._connect(host or self._who.address)
        if isinstance(connected, ProbeFailure):
            return self._result(None, connected)
        reader, writer, welcome = connected
        working = asyncio.ensure_future(self._serve(reader, writer, welcome))
        stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return self._result(None, ProbeFailure(kind="failed", words="interrupted on this node"))
            found = working.result()
            return self._result(found, None) if isinstance(found, GroupReport) else self._result(None, found)
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
            writer.close()

    def _result(self, report: GroupReport | None, failure: ProbeFailure | None) -> AgentResult:
        return AgentResult(report, failure, tuple(self._records), self._logs)

    async def _connect(self, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Welcome] | ProbeFailure:
        """Tried again until the first node is up: it may start last. A refusal is final."""
        until, last = time.monotonic() + self._rendezvous_s, "no attempt was made"
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(max(0.1, min(10.0, until - time.monotonic()))):
                    reader, writer = await asyncio.open_connection(host, self._who.port)
                async with asyncio.timeout(GREETING_S):
                    greeted = await self._greet(reader, writer)
            except (OSError, TimeoutError, ProtocolError) as error:
                last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if isinstance(greeted, Welcome):
                    return reader, writer, greeted
                writer.close()
                if isinstance(greeted, MemberRefused):
                    words = f"the node with index 0 ({host}, port {self._who.port}) refused this node: {greeted.why}"
                    return ProbeFailure(kind="bad_setting", words=words)
                last = "it closed the connection"
            await asyncio.sleep(RETRY_S)
        kind = "dns" if "gaierror" in last else "rendezvous"
        words = f"no connection to {host} port {self._who.port} within {self._rendezvous_s:g} s; last: {last}"
        return ProbeFailure(kind=kind, words=words)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Welcome | MemberRefused | None:
        challenge = await receive_message(reader, BEFORE_PROOF)
        if not isinstance(challenge, Challenge):
            return None
        nonce = secrets.token_hex(NONCE // 2)
        who = self._who
        words = (challenge.nonce, self._run, str(who.index), str(who.size))
        proof = Proof(run=self._run, index=who.index, size=who.size, nonce=nonce, proof=proof_of(self._key, *words))
        await send_message(writer, proof)
        answer = await receive_message(reader, BEFORE_PROOF)
        if isinstance(answer, Welcome):
            if not is_proof(self._key, answer.proof, nonce, self._run):
                raise ProtocolError("the program on that port does not know this run")
            await send_message(writer, Present(member=self._member, address=who.own_address, port=free_port()))
            return answer
        return answer if isinstance(answer, MemberRefused) else None

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome
    ) -> GroupReport | ProbeFailure:
        beating = asyncio.ensure_future(self._beat(writer, welcome.heartbeat_s))
        working: asyncio.Task[Any] | None = None
        try:
            while True:
                try:
                    message = await asyncio.wait_for(receive_message(reader), welcome.silent_s)
                except TimeoutError:
                    return self._lost(f"no message for {welcome.silent_s:g} s")
                except ProtocolError as error:
                    return self._lost(str(error))
                match message:
                    case None:
                        return self._lost("it closed the connection")
                    case Over():
                        return message.report
                    case Order():
                        working = asyncio.create_task(self._work(message, writer))
                    case Stop() if self._ranks is not None and message.job == self._job:
                        self._ranks.stop(message.why, hang=message.hang)
        finally:
            beating.cancel()
            if self._ranks is not None:
                self._ranks.stop("the run has ended")
            if working is not None:
                with suppress(asyncio.CancelledError):
                    await working
            await asyncio.gather(beating, return_exceptions=True)

    def _lost(self, why: str) -> ProbeFailure:
        words = (
            f"the node with index 0 ({self._who.address}), which coordinates the run, was lost: {why}. This node ended"
            " its ranks"
        )
        return ProbeFailure(kind="crashed", words=words)

    async def _beat(self, writer: asyncio.StreamWriter, every_s: float) -> None:
        while True:
            quiet = self._ranks.quiet_s() if self._ranks is not None else 0.0
            if not await send_message(writer, Alive(job=self._job, quiet_s=quiet)):
                return
            await asyncio.sleep(every_s)

    async def _work(self, order: Order, writer: asyncio.StreamWriter) -> None:
        job = order.job
        ranks = LocalRanks(self._bench, self._member.index, self._member.devices, job, order.first, order.world)
        self._ranks, self._job = ranks, job.number
        results, ended, logs = await ranks.result(order.address, order.port)
        self._ranks, self._job = None, 0
        for one in results:
            record: dict[str, Any] = {"check": f"group_{job.probe}", "who": str(one.rank), "params": job.params}
            record |= {"again": job.attempt > 1, "answer": msgspec.to_builtins(one.reply), "members": list(job.members)}
            self._records.append(record)
        self._logs |= {f"group-{job.number}-{job.attempt}-{job.probe}/{name}": words for name, words in logs.items()}
        await send_message(writer, Done(job=job.number, ranks=results, ended=ended, port=free_port()))
