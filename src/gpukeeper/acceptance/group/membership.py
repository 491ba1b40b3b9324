"""Which node of how many this one is, and where the first one listens: read from the environment. Pure.

Our own variables first, then those of launchers: GPUKEEPER_GROUP_*, PET_* (TrainJob, torchrun), RANK and WORLD_SIZE
(training-operator), JOB_COMPLETION_INDEX (Indexed Job), the ordinal in the host name (StatefulSet). The number of nodes
is never guessed. Variables that contradict each other are an error: a node that guesses waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gpukeeper.model.errors import UsageError

PORT = 29500
MOST = 4096  # nodes
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
    if size is not None and not 2 <= size <= MOST:
        read.problems.append(f"{size} nodes: a group has 2 to {MOST}")
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
