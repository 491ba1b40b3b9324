"""One node of the run: connects to the coordinator, runs the ranks that it orders, and ends when the run is over.

Whatever happens there is a result in bounded time: a coordinator that is not there, refuses, or is lost is a finding.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.fleet.group_jobs import Member
from gpukeeper.acceptance.group import messages
from gpukeeper.acceptance.group.local_ranks import LocalRanks, free_port
from gpukeeper.acceptance.group.membership import Membership
from gpukeeper.acceptance.group.messages import Alive, Done, Order, Over, Present, Proof, Refused, Stop, Welcome
from gpukeeper.acceptance.record import GroupReport, ProbeFailure, Values

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
        self._key = messages.key_of(run, who.secret)
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
            except (OSError, TimeoutError, messages.ProtocolError) as error:
                last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if isinstance(greeted, Welcome):
                    return reader, writer, greeted
                writer.close()
                if isinstance(greeted, Refused):
                    words = f"the node with index 0 ({host}, port {self._who.port}) refused this node: {greeted.why}"
                    return ProbeFailure(kind="bad_setting", words=words)
                last = "it closed the connection"
            await asyncio.sleep(RETRY_S)
        kind = "dns" if "gaierror" in last else "rendezvous"
        words = f"no connection to {host} port {self._who.port} within {self._rendezvous_s:g} s; last: {last}"
        return ProbeFailure(kind=kind, words=words)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome | Refused | None:
        challenge = await messages.receive(reader, messages.BEFORE_PROOF)
        if not isinstance(challenge, messages.Challenge):
            return None
        nonce = secrets.token_hex(messages.NONCE // 2)
        who = self._who
        words = (challenge.nonce, self._run, str(who.index), str(who.size))
        proof = Proof(
            run=self._run, index=who.index, size=who.size, nonce=nonce, proof=messages.proof_of(self._key, *words)
        )
        await messages.send(writer, proof)
        answer = await messages.receive(reader, messages.BEFORE_PROOF)
        if isinstance(answer, Welcome):
            if not messages.is_proof(self._key, answer.proof, nonce, self._run):
                raise messages.ProtocolError("the program on that port does not know this run")
            await messages.send(writer, Present(member=self._member, address=who.own_address, port=free_port()))
            return answer
        return answer if isinstance(answer, Refused) else None

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome
    ) -> GroupReport | ProbeFailure:
        beating = asyncio.ensure_future(self._beat(writer, welcome.heartbeat_s))
        working: asyncio.Task[Any] | None = None
        try:
            while True:
                try:
                    message = await asyncio.wait_for(messages.receive(reader), welcome.silent_s)
                except TimeoutError:
                    return self._lost(f"no message for {welcome.silent_s:g} s")
                except messages.ProtocolError as error:
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
            if not await messages.send(writer, Alive(job=self._job, quiet_s=quiet)):
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
        await messages.send(writer, Done(job=job.number, ranks=results, ended=ended, port=free_port()))
