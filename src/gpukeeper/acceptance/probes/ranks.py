"""One rank of a probe over several GPUs: runs the probe in its group and writes the record.

Every rank writes `rank-<n>.json` when it ended, whatever happened, and `rank-<n>.stage` on the way there, so that one
that never joined the others can be distinguished from one that died among them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpukeeper.acceptance.probes import progress, worker
from gpukeeper.acceptance.probes.group import BadSetting, RankGroup, RankInfo, joined, read_place, stage, write

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
        progress.watched(directory, place.rank)
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
