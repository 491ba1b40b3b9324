"""The nodes of one run: which of how many this one is, its network cards, and what they send each other.

Length-framed JSON over TCP, every field checked. A member proves that it knows the run's key, and so does the
coordinator: this keeps strangers and other runs out. It encrypts nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from gpukeeper.acceptance.fleet.group_jobs import Fabric, Job, Member, RankResult
from gpukeeper.acceptance.fleet.launcher import PORT
from gpukeeper.acceptance.record import GroupReport
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError

NODES_MAX = 4096  # nodes
_ORDINAL = re.compile(r".*-(\d{1,5})")
# In order of precedence; all that are set must agree.
SIZES = ("GPUKEEPER_GROUP_SIZE", "PET_NNODES", "WORLD_SIZE")
INDEXES = ("GPUKEEPER_GROUP_INDEX", "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")
ADDRESSES = ("MASTER_ADDR", "K8S_MASTER_ADDR", "PET_MASTER_ADDR")
PORTS = ("MASTER_PORT", "PET_MASTER_PORT")


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    size: int
    address: str
    port: int
    own_address: str = ""  # where others reach this node; empty: as the coordinator sees it
    secret: str = ""
    notes: tuple[str, ...] = ()  # what was read from which variable


def read_membership(environ: Mapping[str, str], host: str) -> Membership:
    """Raises UsageError with all contradictions. `host`: the name of this machine, for the ordinal."""
    read = _Reader(environ)
    per_node = read.count("PET_NPROC_PER_NODE", least=1) if environ.get("PET_NPROC_PER_NODE", "").isdigit() else None
    size, index = read.agreed(SIZES, "nodes", per_node), read.agreed(INDEXES, "index", per_node)
    if size is None:
        read.problems.append(
            "the number of nodes is not set. Set GPUKEEPER_GROUP_SIZE on every node (PET_NNODES and WORLD_SIZE are"
            " understood, too)"
        )
    if index is None:
        index = _ordinal(host) if environ.get("GPUKEEPER_GROUP_SIZE") or environ.get("PET_NNODES") else None
        if index is not None:
            read.notes.append(f"index {index} from the host name {host}")
    if index is None:
        read.problems.append("the index of this node is not set. Set GPUKEEPER_GROUP_INDEX: 0 on the first node")
    address, port = read.meeting()
    if size is not None and not 2 <= size <= NODES_MAX:
        read.problems.append(f"{size} nodes: a group has 2 to {NODES_MAX}")
    elif size is not None and index is not None and index >= size:
        read.problems.append(f"index {index} of {size} nodes: indexes are 0 to {size - 1}")
    if read.problems or size is None or index is None:
        raise UsageError(f"--together: {'; '.join(read.problems)}. Nothing was run.")
    return Membership(
        index=index,
        size=size,
        address=address,
        port=port,
        own_address=environ.get("GPUKEEPER_GROUP_ADDRESS", "").strip() or environ.get("POD_IP", "").strip(),
        secret=environ.get("GPUKEEPER_GROUP_SECRET", ""),
        notes=tuple(read.notes),
    )


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []
        self.notes: list[str] = []

    def count(self, name: str, least: int = 0) -> int | None:
        text = self.environ.get(name, "").strip()
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) >= least):
            self.problems.append(f"{name}={text[:40]!r} is not a number of {least} or more")
            return None
        return int(text)

    def agreed(self, names: tuple[str, ...], what: str, per_node: int | None) -> int | None:
        """One number from all variables that are set. RANK and WORLD_SIZE count nodes, unless torchrun's ranks are
        several on each: then they count ranks."""
        found = {name: number for name in names if (number := self.count(name)) is not None}
        for name in ("WORLD_SIZE", "RANK"):
            if name in found and per_node is not None and per_node > 1:
                found[name] //= per_node
        if len(set(found.values())) > 1:
            pairs = " and ".join(f"{name}={self.environ[name].strip()}" for name in found)
            self.problems.append(f"{pairs} contradict each other ({what}). Unset all but one")
        if not found:
            return None
        name, number = next(iter(found.items()))
        self.notes.append(f"{what} {number} from {name}")
        return number

    def meeting(self) -> tuple[str, int]:
        given = {name: value for name in ADDRESSES if (value := self.environ.get(name, "").strip())}
        if len({self._machine(value) for value in given.values()}) > 1:
            pairs = " and ".join(f"{name}={value}" for name, value in given.items())
            self.problems.append(f"{pairs} name different machines. Keep the one of index 0")
        address, port = next(iter(given.values()), ""), self._port()
        endpoint = self.environ.get("PET_RDZV_ENDPOINT", "").strip()
        if not address and endpoint:
            address, _, text = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
            port = port or (int(text) if text.isdigit() and len(text) < 6 else None)
        if not address:
            self.problems.append("MASTER_ADDR is not set. Set it to the name or address of the node with index 0")
        if port is not None and not 1 <= port <= 65535:
            self.problems.append(f"MASTER_PORT={port} is not a port (1 to 65535)")
        return address.strip("[]"), PORT if port is None else port

    def _port(self) -> int | None:
        found = [number for name in PORTS if (number := self.count(name)) is not None]
        if len(set(found)) > 1:
            self.problems.append(f"{' and '.join(PORTS)} contradict each other. Unset one of them")
        return found[0] if found else None

    def _machine(self, address: str) -> str:
        """svc and svc.<namespace>.svc.cluster.local are the same name."""
        namespace = self.environ.get("POD_NAMESPACE", "").strip() or "default"
        return address.lower().rstrip(".").removesuffix(".cluster.local").removesuffix(f".{namespace}.svc")


def _ordinal(host: str) -> int | None:
    found = _ORDINAL.fullmatch(host.partition(".")[0])
    return int(found[1]) if found else None


SYS = Path("/sys")
_RATE = re.compile(r"(\d{1,5}(?:\.\d)?) Gb/sec")


def read_fabric(sys: Path = SYS) -> Fabric:
    """RDMA ports that are active come first; else Ethernet cards with a link. Of several speeds the most frequent."""
    rdma = list(_rdma(sys))
    if rdma:
        (kind, gbits), cards = Counter(rdma).most_common(1)[0]
        return Fabric(kind=kind, gbits=gbits, cards=cards)
    speeds = list(_ethernet(sys))
    if not speeds:
        return Fabric()
    gbits = max(speeds)
    return Fabric(kind="ethernet", gbits=gbits, cards=speeds.count(gbits))


def _rdma(sys: Path) -> Iterator[tuple[str, float]]:
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        found = _RATE.match(_text_of(port / "rate"))
        if "ACTIVE" in _text_of(port / "state") and found:
            layer = _text_of(port / "link_layer").strip().lower()
            yield ("infiniband" if layer == "infiniband" else "ethernet"), float(found[1])


def _ethernet(sys: Path) -> Iterator[float]:
    """Only real cards: virtual ones report a speed that no wire has."""
    for card in sorted(sys.glob("class/net/*")):
        text = _text_of(card / "speed").strip()
        if (card / "device").exists() and text.isdigit() and int(text) > 0:
            yield int(text) / 1000


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a card without a link reports EINVAL
        return ""


BEFORE_PROOF = 4096  # bytes that are read of a stranger
MESSAGE_MAX = 64 * 1024 * 1024  # results of the ranks of one node, with NCCL's words
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


class MemberRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
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


Message: TypeAlias = Challenge | Proof | Welcome | MemberRefused | Present | Alive | Order | Stop | Done | Over


class ProtocolError(Exception):
    """What arrived is no message of this protocol; a sentence."""


def key_of(run: str, secret: str = "") -> bytes:
    """Of a run. Without a secret the run's id is all that a member must know."""
    return hashlib.sha256(f"gpukeeper/group/{run}/{secret}".encode()).digest()


def proof_of(key: bytes, *words: str) -> str:
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def is_proof(key: bytes, given: str, *words: str) -> bool:
    return hmac.compare_digest(given.encode(), proof_of(key, *words).encode())


def decode_message(data: bytes) -> Message:
    """ProtocolError for everything that is no message."""
    try:
        found: Message = reading.decode(data, type=Message)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"invalid message: {error}") from error
    return found


def encode_message(message: Message) -> bytes:
    data = msgspec.json.encode(message)
    return _HEAD.pack(len(data)) + data


async def receive_message(reader: asyncio.StreamReader, most: int = MESSAGE_MAX) -> Message | None:
    """None: the other side closed the connection. ProtocolError, also for a length beyond the limit."""
    try:
        (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > most:
            raise ProtocolError(f"a message of {length} bytes; at most {most} are read")
        return decode_message(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        return None


async def send_message(writer: asyncio.StreamWriter, message: Message) -> bool:
    """False: the other side is gone. The reader notices that, too."""
    try:
        writer.write(encode_message(message))
        await writer.drain()
    except (ConnectionError, OSError, RuntimeError):
        return False
    return True
