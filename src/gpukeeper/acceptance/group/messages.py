"""What the nodes of one run send each other: length-framed JSON over TCP, every field checked.

The coordinator opens with a challenge; a member proves that it knows the run's key, and so does the coordinator. This
keeps strangers and other runs out. It encrypts nothing, and does not stop an attacker who can change packets.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.group_jobs import Job, Member, RankResult
from gpukeeper.acceptance.record import GroupReport
from gpukeeper.model import reading

BEFORE_PROOF = 4096  # bytes that are read of a stranger
LARGEST = 64 * 1024 * 1024  # results of the ranks of one node, with NCCL's words
NONCE = 32  # characters
_HEAD = struct.Struct("!I")


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    nonce: str


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    """`proof`: of the coordinator's nonce; `nonce`: for the coordinator to prove the same."""

    run: str
    index: int
    size: int
    nonce: str
    proof: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    proof: str
    heartbeat_s: float
    silent_s: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    why: str


class Present(msgspec.Struct, frozen=True, kw_only=True, tag="present"):
    """A member describes itself. `address`: where the other nodes reach it; empty: as the coordinator sees it."""

    member: Member
    address: str = ""
    port: int = 0


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """The heartbeat, both ways. Of a member with a job: how long none of its ranks has begun a step."""

    job: int = 0
    quiet_s: float = 0.0


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """Run these ranks of a job: `first` is the number of this member's first rank."""

    job: Job
    first: int
    world: int
    address: str
    port: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the ranks of a job now: `hang` if what they were doing is to be kept."""

    job: int
    why: str
    hang: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The ranks of one member have ended. `port`: free for the next job."""

    job: int
    ranks: tuple[RankResult, ...]
    ended: str = ""
    port: int = 0
    logs: Mapping[str, str] = {}


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The run has ended, with this result."""

    report: GroupReport


Message: TypeAlias = Challenge | Proof | Welcome | Refused | Present | Alive | Order | Stop | Done | Over


class ProtocolError(Exception):
    """What arrived is no message of this protocol; a sentence."""


def key_of(run: str, secret: str = "") -> bytes:
    """Of a run. Without a secret the run's id is all that a member must know."""
    return hashlib.sha256(f"gpukeeper/group/{run}/{secret}".encode()).digest()


def proof_of(key: bytes, *words: str) -> str:
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def is_proof(key: bytes, given: str, *words: str) -> bool:
    return hmac.compare_digest(given.encode(), proof_of(key, *words).encode())


def decode(data: bytes) -> Message:
    """ProtocolError for everything that is no message."""
    try:
        found: Message = reading.decode(data, type=Message)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"invalid message: {error}") from error
    return found


def encode(message: Message) -> bytes:
    data = msgspec.json.encode(message)
    return _HEAD.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader, most: int = LARGEST) -> Message | None:
    """None: the other side closed the connection. ProtocolError, also for a length beyond the limit."""
    try:
        (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > most:
            raise ProtocolError(f"a message of {length} bytes; at most {most} are read")
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        return None


async def send(writer: asyncio.StreamWriter, message: Message) -> bool:
    """False: the other side is gone. The reader notices that, too."""
    try:
        writer.write(encode(message))
        await writer.drain()
    except (ConnectionError, OSError, RuntimeError):
        return False
    return True
