"""Admission, lost members and bounded ends, over real sockets of this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.fleet.group_jobs import Fabric, Job, Member, RankDevice, RankResult
from gpukeeper.acceptance.group.agent import Agent, read_progress
from gpukeeper.acceptance.group.coordinator import Coordinator
from gpukeeper.acceptance.group.members import (
    Alive,
    Challenge,
    Done,
    MemberRefused,
    Membership,
    Message,
    Order,
    Present,
    Proof,
    ProtocolError,
    Stop,
    Welcome,
    decode_message,
    encode_message,
    is_proof,
    key_of,
    proof_of,
    read_fabric,
    receive_message,
    send_message,
)
from gpukeeper.acceptance.record import ProbeResult
from tests.patience import PATIENCE


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def who(index: int, size: int = 2, port: int = 0) -> Membership:
    return Membership(index=index, size=size, address="127.0.0.1", port=port or free_port())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def member(index: int) -> Member:
    return Member(index=index, node=f"n{index}", devices=(RankDevice(uuid="cpu-0", index=0, name="CPU"),))


async def joined(
    port: int, index: int, *, run: str = "r1", size: int = 2
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Message | None]:
    """A member spoken for by the test: reader, writer and the answer to its proof."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    challenge = await receive_message(reader)
    assert isinstance(challenge, Challenge)
    key = key_of(run)
    proof = proof_of(key, challenge.nonce, run, str(index), str(size))
    await send_message(writer, Proof(run=run, index=index, size=size, nonce="n", proof=proof))
    answer = await receive_message(reader)
    if isinstance(answer, Welcome):
        assert is_proof(key, answer.proof, "n", run)
        await send_message(writer, Present(member=member(index), port=1))
    return reader, writer, answer


@in_loop
async def test_members_are_admitted_and_a_stranger_is_refused() -> None:
    place = who(0)
    async with Coordinator("r1", place) as coordinator:
        _, other, refused = await joined(place.port, 1, run="another")
        assert isinstance(refused, MemberRefused)
        assert refused.why == "it does not know this run"
        reader, stranger = await asyncio.open_connection("127.0.0.1", place.port)
        stranger.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await receive_message(reader)
        assert await reader.read() == b""  # closed
        first = await joined(place.port, 0)
        assert isinstance(first[2], Welcome)
        taken = await joined(place.port, 0)
        assert isinstance(taken[2], MemberRefused)
        larger = await joined(place.port, 1, size=3)
        assert isinstance(larger[2], MemberRefused)
        assert "started for 3 nodes, this run has 2" in larger[2].why
        assert await coordinator.gather(0.2, asyncio.Event()) == (1,)
        second = await joined(place.port, 1)
        assert isinstance(second[2], Welcome)
        assert await coordinator.gather(5.0, asyncio.Event()) == ()
        assert len(coordinator.refused) == 4
        for one in (other, stranger, first[1], taken[1], larger[1], second[1]):
            one.close()


@in_loop
async def test_a_member_that_dies_ends_the_job_on_the_others_and_is_named() -> None:
    place = who(0)
    async with Coordinator("r1", place) as coordinator:
        reader, writer, _ = await joined(place.port, 0)
        _, dying, _ = await joined(place.port, 1)
        await coordinator.gather(5.0, asyncio.Event())
        job = Job(number=1, probe="ddp", members=(0, 1), why="")
        running = asyncio.create_task(coordinator.run_job(job, asyncio.Event()))
        while not isinstance(await receive_message(reader), Order):
            pass
        dying.close()
        while not isinstance(stop := await receive_message(reader), Stop):
            pass
        assert stop.why == "a node was lost (n1)"
        reply = ProbeResult(result={})
        done = Done(job=1, ranks=(RankResult(rank=0, member=0, device="cpu-0", reply=reply),), ended="stopped", port=2)
        await send_message(writer, done)
        result = await asyncio.wait_for(running, PATIENCE)
        assert (result.ended, result.lost) == ("lost", {"1": "its connection was closed"})
        assert [one.rank for one in result.ranks] == [0, 1]
        writer.close()


@in_loop
async def test_a_silent_member_is_lost() -> None:
    place = who(0)
    async with Coordinator("r1", place, silent_s=0.3, heartbeat_s=0.1) as coordinator:
        _, writer, _ = await joined(place.port, 1)
        async with asyncio.timeout(PATIENCE):
            while not coordinator.lost:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        assert coordinator.lost == {1: "no message for 0.3 s"}
        writer.close()


@in_loop
async def test_a_first_node_that_never_answers_is_a_rendezvous_failure_in_bounded_time() -> None:
    agent = Agent("r1", who(1), member(1), ProbeLauncher("python", "cpu"), rendezvous_s=0.6)
    found = await asyncio.wait_for(agent.run(), PATIENCE)
    assert found.report is None
    assert found.failure is not None
    assert found.failure.kind == "rendezvous"
    nowhere = Membership(index=1, size=2, address="no-such-host.invalid", port=29500)
    agent = Agent("r1", nowhere, member(1), ProbeLauncher("python", "cpu"), rendezvous_s=0.6)
    failure = (await asyncio.wait_for(agent.run(), PATIENCE)).failure
    assert failure is not None
    assert failure.kind == "dns"


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"order"}', b"\xff", b"[]", b'{"type":"alive","job":"x"}'])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data)


def test_a_message_survives_the_way() -> None:
    data = encode_message(Alive(job=3, quiet_s=1.5))
    assert decode_message(data[4:]) == Alive(job=3, quiet_s=1.5)


def test_progress_is_read_from_the_files_of_a_rank(tmp_path: Path) -> None:
    assert read_progress(tmp_path, 0).step is None
    (tmp_path / "rank-0.step").write_text('{"step": 4, "what": "training step 3", "pid": 1}')
    (tmp_path / "rank-0.stage").write_text("ddp")
    (tmp_path / "rank-0.trace").write_text('{"entries": [{"collective_seq_id": 7, "state": "started"}]}')
    found = read_progress(tmp_path, 0)
    assert (found.stage, found.step, found.what) == ("ddp", 4, "training step 3")
    assert (found.arrived, found.completed) == (7, 0)
    (tmp_path / "rank-0.step").write_text("[")
    assert read_progress(tmp_path, 0).step is None


def test_network_cards_as_the_kernel_describes_them(tmp_path: Path) -> None:
    assert read_fabric(tmp_path) == Fabric()
    card = tmp_path / "class/net/eth0"
    (card / "device").mkdir(parents=True)
    (card / "speed").write_text("100000\n")
    assert read_fabric(tmp_path) == Fabric(kind="ethernet", gbits=100.0, cards=1)
    for number in range(2):
        port = tmp_path / f"class/infiniband/mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        for name, text in (("rate", "400 Gb/sec (4X NDR)"), ("state", "4: ACTIVE"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{text}\n")
    assert read_fabric(tmp_path) == Fabric(kind="infiniband", gbits=400.0, cards=2)
