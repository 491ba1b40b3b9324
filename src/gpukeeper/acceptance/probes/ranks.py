"""A rank of a probe over several GPUs: its identity, the group that it joins, how far it came, its record.

Started by torchrun, or inside work of another launcher: both define a rank by the environment. Every rank writes its
record when it ended, whatever happened, and its stage and steps on the way there, for the process that watches it.
PyTorch is imported in functions: what does not compute needs none.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.probes import worker

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


BEAT_S = 0.5
DUMP = "dump"  # a file of this name in the directory of the ranks requests their position
_FRAMES = 4
_begun = count(1)


def begin(group: RankGroup, what: str) -> None:
    """Called before each step in which ranks wait for each other."""
    text = json.dumps({"step": next(_begun), "what": what, "pid": os.getpid()})
    write(group.folder / f"rank-{group.rank}.step", text)


def watched(directory: Path, rank: int) -> None:
    """From now on a thread of its own shows that this process runs. A process that is stopped has no heartbeat."""
    threading.Thread(target=_beat, args=(directory, rank, threading.main_thread().ident), daemon=True).start()


def _beat(directory: Path, rank: int, main: int | None) -> None:
    dumped = False
    while directory.exists():
        try:
            write(directory / f"rank-{rank}.alive", str(os.getpid()))
            if not dumped and (directory / DUMP).exists():
                dumped = True
                _dump(directory, rank, main)
        except OSError:
            return  # the directory is gone, or the disk is full: there is nothing to report to
        time.sleep(BEAT_S)


def _dump(directory: Path, rank: int, main: int | None) -> None:
    frame = sys._current_frames().get(main or 0)
    lines = traceback.format_stack(frame)[-_FRAMES:] if frame is not None else []
    write(directory / f"rank-{rank}.where", "".join(lines))
    trace = flight_recorder(sys.modules.get("torch"))
    if trace:
        write(directory / f"rank-{rank}.trace", trace)


def flight_recorder(torch: Any) -> str:
    """NCCL's record of its last collectives as JSON, where this PyTorch keeps one; else empty."""
    try:
        found = torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
    except Exception:  # another release, a build without NCCL, no recorder
        return ""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)


BROKEN = 3  # exit status of a rank that could not measure
ALONE = ("links", "nccl_tests")  # the first rank does it for all, and no group is made
_WORDS_MAX = 4000


def main(arguments: Sequence[str]) -> int:
    """`<out-folder> cuda|cpu '<{"probe": …, "params": {…}}>'`."""
    if len(arguments) != 3:
        sys.stderr.write('usage: ranks OUT-DIR cuda|cpu \'{"probe": "collectives", "params": {}}\'\n')
        return 2
    directory, kind, wanted = Path(arguments[0]), arguments[1], json.loads(arguments[2])
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    own_rank = os.environ.get("RANK", "")
    rank = int(own_rank) if own_rank.isdigit() else 0  # for its record, should the rest not fit together
    try:
        place = read_place(os.environ, kind)
        rank = place.rank
        result, busy_s = _run(place, directory, kind, str(wanted["probe"]), dict(wanted.get("params") or {}))
        record = {"done": result, "seconds": time.monotonic() - began, "busy_s": busy_s}
    except Exception as error:  # whatever it is, it belongs into the record
        reached = _stage(directory, rank)
        words = worker.words(error)[-_WORDS_MAX:]
        record = {"broken": {"words": words, "stage": reached, "rank": rank}, "seconds": time.monotonic() - began}
        sys.stderr.write(f"rank {rank}: {words}\n")
    write(directory / f"rank-{rank}.json", json.dumps(worker.strict(record), allow_nan=False))
    return 0 if "done" in record else BROKEN


def _run(
    place: RankInfo, directory: Path, kind: str, name: str, params: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    probes = _probes()
    if name not in probes:
        raise BadSetting(f"Unknown probe {name!r} over several GPUs; valid values: {', '.join(probes)}.")
    _fault(params.get("inject") or {}, place)
    who: dict[str, Any] = {"rank": place.rank, "world": place.world, "backend": place.backend}
    who |= {"local_rank": place.local_rank, "host": socket.gethostname()}
    if name in ALONE and place.rank > 0:
        return {**who, "by": 0}, 0.0  # the first rank reports it for all
    stage(directory, place.rank, "start")
    if params.get("watch"):
        watched(directory, place.rank)
    device = _device(kind, place, alone=name in ALONE)
    with joined(place, directory, device, params, alone=name in ALONE) as group:
        stage(directory, place.rank, name)
        result = probes[name](device, group, params)
    stage(directory, place.rank, "end")
    return {**who, **result}, float(device.busy_s)


def _probes() -> dict[str, Callable[[Any, RankGroup, dict[str, Any]], dict[str, Any]]]:
    from gpukeeper.acceptance.probes import collectives, ddp, links, nccl_tests, throughput

    return {
        "collectives": collectives.run,
        "ddp": ddp.run,
        "throughput": throughput.run,
        "links": lambda device, _, params: links.run(device, params),
        "nccl_tests": lambda device, _, params: nccl_tests.run(device, params),
    }


def _device(kind: str, place: RankInfo, *, alone: bool) -> Any:
    """CUDA that cannot be used stops the rank here, not in the middle of a collective that others wait in."""
    import torch

    from gpukeeper.acceptance.probes.device import Device

    if kind == "cpu":
        torch.set_num_threads(1)  # ranks share the machine
        return Device("cpu")
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise RuntimeError(_why_no_cuda(torch))
    if place.local_rank >= count > 1:
        raise RuntimeError(
            f"LOCAL_RANK={place.local_rank}, but this machine shows {count} GPUs. Start {count} ranks, or show all."
        )
    index = 0 if alone or count == 1 else place.local_rank
    torch.cuda.set_device(index)
    return Device(f"cuda:{index}")


def _why_no_cuda(torch: Any) -> str:
    """The message of the attempt itself: it shows whether it is the driver, the build or the absence of a GPU."""
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        return str(error)
    return "No CUDA GPUs are available"


def _stage(directory: Path, rank: int) -> str:
    path = directory / f"rank-{rank}.stage"
    return path.read_text() if path.exists() else ""


def _fault(inject: Mapping[str, Any], place: RankInfo) -> None:
    """For tests: {"die": n} ends that rank without a word, {"absent": n} keeps it from ever joining."""
    if inject.get("die") == place.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if inject.get("absent") == place.rank:
        signal.pause()
