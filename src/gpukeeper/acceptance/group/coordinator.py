"""On the node with index 0: admits the members, orders jobs over some of them, notices who is lost or hangs.

A stranger on the port is refused before it can send more than 4 KiB. Everything has a deadline: members that do not
come, jobs that do not end, members that fall silent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpukeeper.acceptance.fleet.group_jobs import Job, JobResult, Member, RankResult, ranks_of
from gpukeeper.acceptance.group.members import (
    BEFORE_PROOF,
    NONCE,
    Alive,
    Challenge,
    Done,
    MemberRefused,
    Membership,
    Message,
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
from gpukeeper.acceptance.record import GroupReport, ProbeFailure

HEARTBEAT_S = 1.0
SILENT_S = 20.0
GREETING_S = 10.0
STRANGERS = 64  # connections at a time without a proof
TO_START_S = 90.0  # beside a job's own deadline
GRACE_S = 20.0  # for a member to report after it was asked to stop
LOOK_S = 0.1


@dataclass
class Seat:
    """A member that is connected."""

    member: Member
    address: str
    port: int
    writer: asyncio.StreamWriter
    heard: float = field(default_factory=time.monotonic)
    alive: Alive = field(default_factory=Alive)
    done: dict[int, Done] = field(default_factory=dict)
    lost: str = ""


class Coordinator:
    """Used with `async with`. `silent_s`: after so long without a message a member is lost."""

    def __init__(
        self, run: str, who: Membership, *, silent_s: float = SILENT_S, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._run, self._who = run, who
        self._key = key_of(run, who.secret)
        self._silent_s, self._heartbeat_s = silent_s, heartbeat_s
        self._seats: dict[int, Seat] = {}
        self._strangers = 0
        self.refused: list[str] = []
        self._changed = asyncio.Event()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Coordinator:
        """OSError if the port is taken."""
        self._server = await asyncio.start_server(self._connected, None, self._who.port)
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._beating is not None
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._server.close()
        for one in self._handlers:
            one.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def members(self) -> dict[int, Member]:
        return {index: seat.member for index, seat in sorted(self._seats.items())}

    @property
    def lost(self) -> dict[int, str]:
        return {index: seat.lost for index, seat in self._seats.items() if seat.lost}

    async def gather(self, within_s: float, stop: asyncio.Event) -> tuple[int, ...]:
        """Waits until all members are here. The indexes of those that did not come."""
        until = time.monotonic() + within_s
        while len(self._seats) < self._who.size and time.monotonic() < until and not stop.is_set():
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(0.5, max(0.01, until - time.monotonic())))
        return tuple(index for index in range(self._who.size) if index not in self._seats)

    async def run_job(self, job: Job, stop: asyncio.Event) -> JobResult:
        """The job's result, whatever happens. A member that is lost ends it on the others."""
        began = time.monotonic()
        seats = {index: self._seats[index] for index in job.members}
        places = ranks_of(job, self.members)
        first = 0
        head = seats[job.members[0]]
        for seat in seats.values():
            order = Order(job=job, first=first, world=len(places), address=head.address, port=head.port)
            await send_message(seat.writer, order)
            first += len(seat.member.devices)
        ended = await self._watch(job, seats, began, stop)
        results = {
            one.rank: one for seat in seats.values() if job.number in seat.done for one in seat.done[job.number].ranks
        }
        for seat in seats.values():
            if job.number in seat.done:
                seat.port = seat.done[job.number].port
        gone = {str(index): seat.lost for index, seat in seats.items() if seat.lost}
        ranks = tuple(
            results.get(rank)
            or RankResult(
                rank=rank,
                member=index,
                device=device.uuid,
                reply=ProbeFailure(kind="failed", words=f"rank {rank} has no result: its node did not report"),
            )
            for rank, (index, device) in enumerate(places)
        )
        return JobResult(
            job=job, ranks=ranks, ended="lost" if gone else ended, lost=gone, seconds=time.monotonic() - began
        )

    async def _watch(self, job: Job, seats: Mapping[int, Seat], began: float, stop: asyncio.Event) -> str:
        """Until every member has reported. What ends it early is sent to all; they have a moment to report."""
        ended, until = "", began + job.deadline_s + TO_START_S + GRACE_S
        while any(job.number not in seat.done and not seat.lost for seat in seats.values()):
            if not ended:
                ended = self._early(job, seats, stop)
                if ended:
                    until = time.monotonic() + GRACE_S
                    await self._stop_all(job, seats, ended)
            if time.monotonic() > until:
                for seat in seats.values():
                    if job.number not in seat.done and not seat.lost:
                        seat.lost = "it did not report the end of its ranks"
                break
            await asyncio.sleep(LOOK_S)
        by_member = {seat.done[job.number].ended for seat in seats.values() if job.number in seat.done}
        return ended if ended in ("stalled", "lost", "interrupted") else "deadline" if "deadline" in by_member else ""

    def _early(self, job: Job, seats: Mapping[int, Seat], stop: asyncio.Event) -> str:
        if any(seat.lost for seat in seats.values()):
            return "lost"
        if stop.is_set():
            return "interrupted"
        if any(job.number in seat.done and seat.done[job.number].ended for seat in seats.values()):
            return "failed"
        waiting = [seat for seat in seats.values() if job.number not in seat.done]
        quiet = [seat.alive.quiet_s if seat.alive.job == job.number else 0.0 for seat in waiting]
        return "stalled" if quiet and min(quiet) > job.stall_s else ""

    async def _stop_all(self, job: Job, seats: Mapping[int, Seat], ended: str) -> None:
        words = {
            "stalled": "no rank began a step",
            "lost": f"a node was lost ({', '.join(seat.member.node for seat in seats.values() if seat.lost)})",
            "interrupted": "the run was interrupted",
            "failed": self._failed_rank(job, seats),
        }[ended]
        for seat in seats.values():
            if job.number not in seat.done and not seat.lost:
                await send_message(seat.writer, Stop(job=job.number, why=words, hang=ended == "stalled"))

    @staticmethod
    def _failed_rank(job: Job, seats: Mapping[int, Seat]) -> str:
        done = [seat.done[job.number] for seat in seats.values() if job.number in seat.done]
        failed = [
            one.rank
            for each in done
            for one in each.ranks
            if isinstance(one.reply, ProbeFailure) and "was stopped because" not in one.reply.words
        ]
        return f"rank {failed[0] if failed else '?'} failed"

    async def finish(self, report: GroupReport) -> None:
        """All members get the result and end."""
        for seat in self._seats.values():
            if not seat.lost:
                await send_message(seat.writer, Over(report=report))

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            for seat in list(self._seats.values()):
                if not seat.lost and now - seat.heard > self._silent_s:
                    seat.lost = f"no message for {self._silent_s:g} s"
                if not seat.lost:
                    await send_message(seat.writer, Alive())
            await asyncio.sleep(self._heartbeat_s)

    # Admission

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._admit(reader, writer))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seat: Seat | None = None
        self._strangers += 1
        try:
            if self._strangers <= STRANGERS:
                async with asyncio.timeout(GREETING_S):
                    seat = await self._greeted(reader, writer)
        except (TimeoutError, ProtocolError) as error:
            self.refused.append(str(error) or "it sent nothing")
        finally:
            self._strangers -= 1
        try:
            if seat is not None:
                await self._listen(seat, reader)
        finally:
            writer.close()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seat | None:
        nonce = secrets.token_hex(NONCE // 2)
        await send_message(writer, Challenge(nonce=nonce))
        proof = await receive_message(reader, BEFORE_PROOF)
        why = self._why_not(proof, nonce)
        if why or not isinstance(proof, Proof):
            self.refused.append(why or "it closed the connection")
            await send_message(writer, MemberRefused(why=why or "a proof is expected"))
            return None
        answer = proof_of(self._key, proof.nonce, self._run)
        await send_message(writer, Welcome(proof=answer, heartbeat_s=self._heartbeat_s, silent_s=self._silent_s))
        present = await receive_message(reader)
        if not isinstance(present, Present) or present.member.index != proof.index:
            raise ProtocolError("a member that does not describe itself")
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        address = self._who.address if proof.index == 0 else present.address or peer
        seat = Seat(present.member, address, present.port, writer)
        self._seats[proof.index] = seat
        self._changed.set()
        return seat

    def _why_not(self, proof: Message | None, nonce: str) -> str:
        """A stranger learns nothing but that it is refused."""
        if not isinstance(proof, Proof):
            return "a proof is expected"
        words = (nonce, proof.run, str(proof.index), str(proof.size))
        if not is_proof(self._key, proof.proof, *words) or proof.run != self._run:
            return "it does not know this run"
        if proof.size != self._who.size:
            return f"it was started for {proof.size} nodes, this run has {self._who.size}"
        if not 0 <= proof.index < self._who.size:
            return f"index {proof.index} of {self._who.size} nodes"
        return f"index {proof.index} is taken by another node" if proof.index in self._seats else ""

    async def _listen(self, seat: Seat, reader: asyncio.StreamReader) -> None:
        why = "its connection was closed"
        try:
            while (message := await receive_message(reader)) is not None:
                seat.heard = time.monotonic()
                match message:
                    case Alive():
                        seat.alive = message
                    case Done():
                        seat.done[message.job] = message
        except ProtocolError as error:
            why = str(error)
        seat.lost = seat.lost or why
