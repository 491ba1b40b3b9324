"""Answers of ranks, as the probes write them: healthy unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpukeeper.acceptance.check import CheckContext, CheckRun, CheckSize, RunRequest
from gpukeeper.acceptance.record import ProbeFailure, ProbeReply, ProbeResult
from tests.unit.acceptance import machines

SERVING = CheckSize(depth=0, seconds=1, worth=1, what="")


def node(count: int = 8, name: str = machines.H200, **more: Any) -> CheckContext:
    return machines.context(machines.gpus(count, name), **more)


def cpu(count: int = 2, **wish: Any) -> CheckContext:
    return machines.context(machines.gpus(count, "CPU"), wish=RunRequest(device="cpu", **wish))


def trial(results: Sequence[dict[str, Any]] | dict[int, ProbeReply]) -> CheckRun:
    if isinstance(results, dict):
        return CheckRun(SERVING, {str(rank): answer for rank, answer in results.items()})
    who = {"world": len(results), "backend": "nccl", "local_rank": 0, "host": "node-1"}
    return CheckRun(
        SERVING, {str(rank): ProbeResult(result={"rank": rank, **who, **one}) for rank, one in enumerate(results)}
    )


def done(**result: Any) -> ProbeResult:
    return ProbeResult(result=result)


def broken(kind: str, words: str = "") -> ProbeFailure:
    return ProbeFailure(kind=kind, words=words or kind)


def collectives(count: int = 8, *, busbw: float = 478.0, latency_us: float = 22.0, **more: Any) -> list[dict[str, Any]]:
    """All-reduce of 1 GiB and a small one, the same on all ranks."""
    said = {
        "results": [row(2**13, 0.4), row(2**30, busbw)],
        "latency_us": [latency_us] * 5,
        "latency_bytes": 8,
        "variant": "default",
        "dtype": "fp32",
        "algorithm": "NVLS/SIMPLE",
        "algorithms": {"all_reduce": "NVLS/SIMPLE"},
        "transports": {"P2P/CUMEM": 48},
        "nvls": True,
    } | more
    return [dict(said) for _ in range(count)]


def row(size: int, busbw: float, op: str = "all_reduce", wrong: int = 0, rounds: int = 16) -> dict[str, Any]:
    where = [{"index": 7, "got": 3.0, "want": 2.0, "round": 1}] if wrong else []
    return {"op": op, "bytes": size, "rounds": rounds, "busbw": [busbw] * rounds, "wrong": wrong, "where": where}


def ddp(count: int = 8, **more: Any) -> list[dict[str, Any]]:
    said = {"steps": 30, "loss_start": 1.4, "loss_end": 0.2, "fall": 0.857, "min_fall": 0.2, "digest": "0a"}
    said |= {"hashes_equal": True, "differing": [], "first_step": None, "majority": True} | more
    return [dict(said) for _ in range(count)]


def throughput(
    count: int = 8, *, step_ms: float = 25.0, alone: float | None = 1320.0, **more: Any
) -> list[dict[str, Any]]:
    said = {
        "method": "train/resnet50/synthetic/b32/fp32/iown",
        "world_size": count,
        "global_batch_size": 32 * count,
        "throughput_samples_per_second": 32e3 * count / step_ms,
        "alone_samples_per_second": alone,
        "nccl_overhead_ms": 1.0,
        "avg_step_time_ms": step_ms,
        "step_ms": [step_ms] * 100,
        "local_step_ms": [step_ms - 1] * 20,
        "loss": 6.9,
    } | more
    return [dict(said) for _ in range(count)]


def links(
    count: int = 8, gbps: float = 390.0, slow: dict[tuple[int, int], float] | None = None
) -> list[dict[str, Any]]:
    slow = slow or {}
    pairs = [
        {"from": i, "to": j, "gbps": [slow.get((i, j), gbps)] * 5, "p2p": True, "wrong": 0, "where": []}
        for i in range(count)
        for j in range(count)
        if i != j
    ]
    return [{"pairs": pairs}, *({"by": 0} for _ in range(1, count))]
