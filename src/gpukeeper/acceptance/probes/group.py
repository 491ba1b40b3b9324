"""The group of ranks that a probe over several GPUs runs in: the identity of a rank, how it joins the others, how far
it came.

Started by torchrun, or inside work of another launcher: both define a rank by the environment. The group is
made of all ranks at once, before anything runs. PyTorch is imported only when a rank joins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 600
PORT = 29500
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class BadSetting(ValueError):
    """A request that cannot work, as a sentence."""


class RendezvousError(Exception):
    """Not all ranks connected. Not a finding about GPUs."""


class DataMissing(Exception):
    """A data set that was not found. Synthetic data never replaces it."""


@dataclass(frozen=True)
class RankInfo:
    """The identity of a rank, and where the ranks meet."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    backend: str


@dataclass(frozen=True)
class RankGroup:
    """What a probe knows of the others. `store` is where ranks can wait without keeping a GPU busy."""

    place: RankInfo
    store: Any
    folder: Path
    timeout: timedelta

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world


# Identity of this rank


def read_place(environment: Mapping[str, str], kind: str) -> RankInfo:
    """From torchrun's own variables, or those of the launcher: PET_* and K8S_MASTER_ADDR count only there.

    All contradictions at once, as BadSetting: a rank that guesses waits for others that never come.
    """
    read = _Variables(environment)
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    size = None if by_torchrun else read.launcher_size()
    rank, world = read.number("RANK"), read.number("WORLD_SIZE")
    local_rank = read.number("LOCAL_RANK")
    if size is not None:
        rank, world = read.with_launcher(rank, world, local_rank, size)
    world = world if world is not None else read.missing_world(rank)
    rank = rank if rank is not None else read.missing_rank(world)
    if world < 1:
        read.problems.append(f"WORLD_SIZE={world}: must be 1 or more.")
    elif rank >= world:
        read.problems.append(f"RANK={rank} with WORLD_SIZE={world}: ranks are 0 to {world - 1}.")
    address, port = read.meeting(world, by_torchrun=by_torchrun)
    backend = read.backend(kind)
    if read.problems:
        raise BadSetting(" ".join(read.problems))
    return RankInfo(rank, world, 0 if local_rank is None else local_rank, address, port, backend)


class _Variables:
    """Reads variables and gathers what is wrong with them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[str] = []

    def number(self, name: str, least: int = 0) -> int | None:
        text = self.environment.get(name, "").strip()
        if not text:
            return None
        if not text.isdigit() or int(text) < least:
            self.problems.append(f"{name}={text!r} is not a number of {least} or more.")
            return None
        return int(text)

    def launcher_size(self) -> tuple[int, int] | None:
        """Nodes and ranks on each, where the launcher left both as plain numbers (not 1:4, not auto)."""
        nodes, each = (self.environment.get(name, "").strip() for name in ("PET_NNODES", "PET_NPROC_PER_NODE"))
        return (int(nodes), int(each or 1)) if nodes.isdigit() and (not each or each.isdigit()) else None

    def with_launcher(
        self, rank: int | None, world: int | None, local_rank: int | None, size: tuple[int, int]
    ) -> tuple[int | None, int | None]:
        nodes, each = size
        if world is not None and world != nodes * each:
            self.problems.append(
                f"WORLD_SIZE={world}, but PET_NNODES={nodes} with PET_NPROC_PER_NODE={each} gives {nodes * each}."
                " Unset one of them."
            )
        node = self.number("PET_NODE_RANK")
        if rank is None and node is not None and (each == 1 or local_rank is not None):
            rank = node * each + (local_rank or 0)
        return rank, nodes * each if world is None else world

    def missing_world(self, rank: int | None) -> int:
        if rank is not None and rank > 0:
            self.problems.append(f"RANK={rank} without WORLD_SIZE: set both, or neither for a single rank.")
        return 1 if not rank else rank + 1

    def missing_rank(self, world: int) -> int:
        if world > 1:
            self.problems.append(f"WORLD_SIZE={world} without RANK: set both, or start it with torchrun.")
        return 0

    def meeting(self, world: int, *, by_torchrun: bool) -> tuple[str, int]:
        """Where the first rank listens. Port 29500 unless another is set."""
        names = ["MASTER_ADDR"] if by_torchrun else ["MASTER_ADDR", "K8S_MASTER_ADDR", "PET_MASTER_ADDR"]
        values = {name: self.environment[name].strip() for name in names if self.environment.get(name, "").strip()}
        if len({self._machine(value) for value in values.values()}) > 1:
            pairs = " and ".join(f"{name}={value}" for name, value in values.items())
            self.problems.append(f"{pairs} name different machines. Keep the one of rank 0.")
        address = next(iter(values.values()), "")
        port = self.number("MASTER_PORT", 1)
        if port is None and not by_torchrun:
            port = self.number("PET_MASTER_PORT", 1)
        endpoint = self.environment.get("PET_RDZV_ENDPOINT", "")
        if not address and not by_torchrun and endpoint:
            address, _, text = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
            port = int(text) if port is None and text.isdigit() else port
        if port is not None and port > 65535:
            self.problems.append(f"MASTER_PORT={port}: the maximum is 65535.")
        if not address and world > 1:
            self.problems.append(f"WORLD_SIZE={world} without MASTER_ADDR: set it to the machine of rank 0.")
        return address or "127.0.0.1", PORT if port is None else port

    def _machine(self, address: str) -> str:
        """svc and svc.<namespace>.svc.cluster.local are the same name; POD_NAMESPACE has the namespace."""
        namespace = self.environment.get("POD_NAMESPACE", "").strip() or "default"
        return address.lower().rstrip(".").removesuffix(".cluster.local").removesuffix(f".{namespace}.svc")

    def backend(self, kind: str) -> str:
        if kind not in BACKENDS:
            self.problems.append(f"{kind!r} is not a valid device; use cuda or cpu.")
            return ""
        backend = self.environment.get("BACKEND", "").strip().lower() or BACKENDS[kind]
        if backend not in BACKENDS.values():
            self.problems.append(f"BACKEND={backend} is unknown; use nccl or gloo.")
        elif backend == "nccl" and kind == "cpu":
            self.problems.append(
                "BACKEND=nccl needs GPUs, and this run is on the CPU. Unset BACKEND, or set it to gloo."
            )
        return backend


# Meeting the others


class joined:  # noqa: N801 - used as a statement
    """All ranks connected, or an error with the rendezvous address."""

    def __init__(self, place: RankInfo, directory: Path, device: Any, params: dict[str, Any], *, alone: bool) -> None:
        self._place, self._folder, self._device, self._alone = place, directory, device, alone
        self._timeout = timedelta(seconds=float(params.get("timeout_s") or GROUP_TIMEOUT_S))
        os.environ.update(switches(str(params.get("variant") or "default")))  # NCCL reads them once, at its start

    def __enter__(self) -> RankGroup:
        if self._alone:
            return RankGroup(self._place, None, self._folder, self._timeout)
        stage(self._folder, self._place.rank, "rendezvous")
        try:
            store = self._join()
        except Exception as error:
            place = self._place
            where = f"{place.address}:{place.port} within {self._timeout.total_seconds():g} s"
            raise RendezvousError(
                f"rank {place.rank} of {place.world} could not connect to all other ranks at {where}: {error}"
            ) from error
        return RankGroup(self._place, store, self._folder, self._timeout)

    def _join(self) -> Any:
        import torch.distributed as dist

        place = self._place
        store = meeting_store(place, self._timeout)
        more = (
            {"device_id": self._device.torch} if place.backend == "nccl" else {}
        )  # connects at once, not at first use
        dist.init_process_group(
            place.backend, store=store, rank=place.rank, world_size=place.world, timeout=self._timeout, **more
        )
        dist.barrier()
        return store

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import torch.distributed as dist

        # After an error the others are still inside a collective; leaving properly would wait for them.
        if dist.is_initialized() and kind is None:
            dist.destroy_process_group()


def meeting_store(place: RankInfo, timeout: timedelta) -> Any:
    """torchrun listens itself; elsewhere the first rank does."""
    import torch.distributed as dist

    if place.world == 1:
        return dist.HashStore()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    listens = place.rank == 0 and not agent
    store = dist.TCPStore(place.address, place.port, place.world, listens, timeout, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what an earlier try left there does not count
    return dist.PrefixStore(f"gpukeeper/{attempt}", store)


SWITCHES: Mapping[str, Mapping[str, str]] = {
    "default": {},
    # Peer to peer over NVLink or not at all: no shared memory, no network between GPUs of one machine.
    "nvlink": {"NCCL_P2P_LEVEL": "NVL", "NCCL_SHM_DISABLE": "1", "NCCL_NET_DISABLE_INTRA": "1"},
    # Neither peer to peer, nor shared memory, nor the switch's own reduction: every byte through a network card.
    "network": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_NET_DISABLE_INTRA": "0",
    },
    # The same wires without the reduction in the NVLink switch.
    "no_nvls": {"NCCL_NVLS_ENABLE": "0"},
}


def switches(variant: str) -> dict[str, str]:
    if variant not in SWITCHES:
        raise BadSetting(f"Unknown variant {variant!r}; valid values: {', '.join(SWITCHES)}.")
    return dict(SWITCHES[variant])


# How far it came


def stage(directory: Path, rank: int, name: str) -> None:
    write(directory / f"rank-{rank}.stage", name)


def write(path: Path, text: str) -> None:
    """Written atomically: it may be read at any time."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def delay(inject: Mapping[str, Any], rank: int) -> None:
    """The injected slowness of one rank: {"slow_rank": n, "slow_s": seconds}."""
    if inject.get("slow_rank") == rank:
        time.sleep(float(inject.get("slow_s") or 0))


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each."""
    return ((start, min(start + size, total)) for start in range(0, total, size))
