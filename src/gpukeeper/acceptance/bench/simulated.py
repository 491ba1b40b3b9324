"""A machine with GPUs that exist only here: every probe answers with the figures of a real one, faults included.

For the detector's own test and for ours. Its time is virtual (see simulated_gpus.py); `now` is the engine's clock. The
judge cannot tell it from a real machine, and the report states that it is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from gpukeeper.acceptance.bench.simulated_gpus import (
    ANY,
    ENVIRONMENT,
    LINK,
    MEMORY,
    NOISE,
    SPREAD,
    SimulatedFaults,
    SimulatedGpus,
)
from gpukeeper.acceptance.checks.stress import RUNS
from gpukeeper.acceptance.record import Machine, ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.model.gpu import Health, Reading
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

Params: TypeAlias = Mapping[str, Any]
Result: TypeAlias = dict[str, Any]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Transport:
    """How ranks reach each other under a variant of the collectives; busbw in GB/s, latency in µs."""

    transport: str
    latency: float
    busbw: float | None = None  # None: as fast as the model's links
    nvls: bool = True


WAYS: Mapping[str, Transport] = {
    "default": Transport("P2P/CUMEM", 19.0),
    "nvlink": Transport("P2P/CUMEM", 19.0),
    "no_nvls": Transport("P2P/CUMEM", 24.0, nvls=False),
    "network": Transport("NET/IB", 41.0, busbw=44.0, nvls=False),
}


class SimulatedProbes:
    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus

    def reply(self, index: int, job: ProbeRequest) -> ProbeReply:
        if self._gpus.faults.hang.get(index) in (job.probe, ANY):
            return late(job, "timeout")
        if index in self._gpus.faults.broken:
            return ProbeFailure(kind="failed", words=self._gpus.faults.broken[index], seconds=1.0)
        probes: Mapping[str, Callable[[int, Params], Result]] = {
            "gemm": self._gemm,
            "memory_bandwidth": self._memory_bandwidth,
            "copies": self._copies,
            "memory_pattern": self._memory_pattern,
            "exact": self._exact,
            "training": self._training,
            "stress": self._stress,
        }
        if job.probe not in probes:
            return ProbeFailure(
                kind="bad_setting", words=f"unknown probe {job.probe!r}; valid values: {', '.join(probes)}"
            )
        seconds = _seconds(job)
        return ProbeResult(result=probes[job.probe](index, job.params), seconds=seconds, busy_s=0.95 * seconds)

    def reply_of_rank(self, rank: int, indexes: Sequence[int], job: ProbeRequest) -> ProbeReply:
        probes: Mapping[str, Callable[[int, Sequence[int], Params], Result]] = {
            "collectives": self._collectives,
            "ddp": self._ddp,
            "throughput": self._throughput,
            "links": self._links,
            "nccl_tests": lambda *_: {"not_run": "nccl-tests is not installed (all_reduce_perf not found)"},
        }
        if job.probe not in probes:
            return ProbeFailure(
                kind="bad_setting", words=f"unknown probe {job.probe!r}; valid values: {', '.join(probes)}"
            )
        who = {"rank": rank, "world": len(indexes), "backend": "nccl", "local_rank": rank, "host": "simulated"}
        seconds = _seconds(job)
        return ProbeResult(
            result={**who, **probes[job.probe](rank, indexes, job.params)}, seconds=seconds, busy_s=0.9 * seconds
        )

    # On one GPU

    def _gemm(self, index: int, params: Params) -> Result:
        n, repeats = int(params.get("n", 8192)), int(params.get("repeats", 5))
        slow = _inject(params, "slow", 0.0)
        wanted = list(params.get("dtypes", self._gpus.model.gemm))
        found: Result = {}
        for dtype in wanted:
            if dtype not in self._gpus.model.gemm:
                found[dtype] = {"unsupported": f"{self._gpus.model_name} does not support {dtype}"}
                continue
            speed = self._gpus.model.gemm[dtype] / (1 + (slow.get(dtype, 0.0) if isinstance(slow, dict) else slow))
            kernel = {"fp8": "scaled_mm", "int8": "int_mm"}.get(dtype, "mm")
            method = f"gemm/{kernel}/n{n}/{'uniform' if dtype == 'int8' else 'normal'}/burst"
            found[dtype] = {"tflops": self._gpus.samples(index, speed, repeats), "n": n, "method": method}
        best = self._gpus.model.gemm["bf16"] * self._gpus.speed_factor(index)
        sweep = {str(size): best * (0.999 if int(size) == n else 0.96) for size in params.get("sweep") or ()}
        return {"dtypes": found, "sweep": {"bf16": sweep} if sweep else {}, **self._old_kit(index, params, repeats)}

    def _old_kit(self, index: int, params: Params, repeats: int) -> Result:
        speed = self._gpus.model.gemm["fp32"]
        found: Result = {}
        if params.get("matmul"):
            found["matmul"] = {
                str(n): {
                    "tflops": self._gpus.samples(index, speed * 0.9, 3),
                    "n": n,
                    "rounds": rounds,
                    "method": f"gemm/mm/n{n}x{rounds}",
                }
                for n, rounds in params["matmul"]
            }
        if params.get("sgemm"):
            method = "gemm/sgemm/memory/normal"
            found["sgemm"] = {"tflops": self._gpus.samples(index, speed, repeats), "n": 32768, "method": method}
        if params.get("batched"):
            n = int(params.get("batched_n", 2048))
            figures = self._gpus.samples(index, speed * 0.95, repeats)
            found["batched"] = {"tflops": figures, "n": n, "count": 512, "method": f"gemm/bmm/n{n}/normal"}
        return found

    def _memory_bandwidth(self, index: int, params: Params) -> Result:
        speed = self._gpus.model.copy / (1 + _inject(params, "slow", 0.0))
        return {
            "gbps": self._gpus.samples(index, speed, int(params.get("repeats", 5)), MEMORY),
            "bytes": int(params.get("bytes", 4 << 30)),
            "method": "copy/read+write",
            "wrong": int(bool(_inject(params, "flip", False))),
        }

    def _copies(self, index: int, params: Params) -> Result:
        repeats = int(params.get("repeats", 5))
        link = (
            self._gpus.model.link
            * (1 - self._gpus.faults.slow_link.get(index, 0.0))
            / (1 + _inject(params, "slow", 0.0))
        )
        wrong = int(bool(_inject(params, "flip", False)))
        return {
            "h2d": self._gpus.samples(index, link, repeats, LINK),
            "d2h": self._gpus.samples(index, link * 0.998, repeats, LINK),
            "d2d": self._gpus.samples(index, self._gpus.model.copy, repeats, MEMORY),
            "bytes": int(params.get("bytes", 512 << 20)),
            "pinned": True,
            "method": "copy/pinned",
            "methods": {"h2d": "copy/pinned", "d2h": "copy/pinned", "d2d": "copy/read+write"},
            "verified": not wrong,
            "wrong": wrong,
            "where": [{"offset": 4096, "got": f"{32:016x}", "want": f"{0:016x}"}] * wrong,
        }

    def _memory_pattern(self, index: int, params: Params) -> Result:
        bad = index in self._gpus.faults.memory or bool(_inject(params, "flip", False))
        total = self._gpus.model.memory_mib << 20
        return {
            "tested_bytes": int(total * float(params.get("share", 0.5))),
            "total_bytes": total,
            "patterns": ["zeros", "ones", "0x55", "0xaa", "address", "random"],
            "passes": int(params.get("passes", 1)),
            "errors": int(bad),
            "where": [{"offset": 7 << 30, "got": "55" * 7 + "45", "want": "55" * 8, "pattern": "0x55"}] * bad,
            "seconds": 3.0,
        }

    def _exact(self, index: int, params: Params) -> Result:
        n, rounds = int(params.get("n", 8192)), int(params.get("rounds", 20))
        dtypes: Result = {}
        for dtype in params.get("dtypes", self._gpus.model.gemm):
            if dtype not in self._gpus.model.gemm:
                dtypes[dtype] = {"unsupported": f"{self._gpus.model_name} does not support {dtype}"}
                continue
            bad = self._gpus.faults.flip.get(index) == dtype or _inject(params, "flip", None) in (True, dtype)
            where = {"row": n // 3, "col": n // 2 + 1, "got": 4097.0, "want": 4096.0, "round": 0}
            dtypes[dtype] = {
                "rounds": rounds,
                "elements": rounds * n * n,
                "mismatches": int(bad),
                "where": [where] * bad,
                "kernel": "mm",
                "digest": _hex("exact", dtype, n, bad),
            }
        return {"dtypes": dtypes, "phase": params.get("phase", "cold")}

    def _training(self, index: int, params: Params) -> Result:
        other = index in self._gpus.faults.training
        flipped = bool(_inject(params, "flip", False))
        runs = [
            self._trained("classifier", other, flipped and turn == 1)
            for turn in range(2 if params.get("twice", True) else 1)
        ]
        small = [self._trained("transformer", other, flipped and turn == 1) for turn in range(len(runs))]
        equal = len({one["hash"] for one in runs}) == 1
        return {
            "runs": runs,
            "equal": equal,
            "deterministic": True,
            "min_fall": float(params.get("min_fall", 0.30)),
            "transformer": {"runs": small, "equal": equal},
        }

    def _trained(self, what: str, other: bool, flipped: bool) -> Result:
        bits = [_hex(what, step, other, flipped)[:8] for step in range(4)]
        return {
            "loss_start": 1.42,
            "loss_end": 0.31,
            "fall": 1 - 0.31 / 1.42,
            "loss_bits": bits,
            "norm_bits": bits,
            "hash": _hex(what, other, flipped),
            "steps": 126,
            "seconds": 0.8,
        }

    def _stress(self, index: int, params: Params) -> Result:
        seconds, n, dtype = (
            float(params.get("seconds", 60.0)),
            int(params.get("n", 8192)),
            str(params.get("dtype", "bf16")),
        )
        speed = self._gpus.model.gemm.get(dtype, self._gpus.model.gemm["bf16"]) * 1.08  # whole numbers draw less power
        count = max(RUNS, min(60, int(seconds)))
        loss = _inject(params, "slow", 0.0)
        windows = [
            {"run": RUNS * turn // count, "at": seconds * turn / count, "tflops": one / (1 + loss * turn / count)}
            for turn, one in enumerate(self._gpus.samples(index, speed, count))
        ]
        flipped = int(self._gpus.faults.flip.get(index) == dtype or bool(_inject(params, "flip", False)))
        step = [2 * n**3 / window["tflops"] / 1e9 for window in windows]
        return {
            "seconds": seconds,
            "windows": windows,
            "step_ms_first": step[0],
            "step_ms_last": step[-1],
            "mismatches": flipped,
            "where": [{"row": 12, "col": 34, "got": 1.0, "want": 0.0, "round": 3}] * flipped,
            "verified": count,
            "products": count * 8,
            "dtype": dtype,
            "n": n,
            "method": f"stress/{dtype}/n{n}/integers",
        }

    # On several GPUs together

    def _collectives(self, rank: int, indexes: Sequence[int], params: Params) -> Result:
        world = len(indexes)
        rounds = int(params.get("rounds") or 2 * world)
        bad = rank in (self._gpus.faults.wrong_collective, _inject(params, "wrong_rank", None))
        way = WAYS[str(params.get("variant") or "default")]
        nvls = way.nvls and world >= 6 and self._gpus.model.switched > self._gpus.model.bus
        slowest = min(self._gpus.link_share(index) for index in indexes)
        reach = {
            op: slowest * (self._gpus.model.switched if nvls and op == "all_reduce" else self._gpus.model.bus)
            for op in OPS
        }
        results = [
            self._collective(op, int(size), world, rounds, bad, way.busbw or reach[op])
            for size in params.get("sizes") or [2**26]
            for op in params.get("ops") or OPS
        ]
        algorithm = "NVLS" if nvls else "RING"
        return {
            "results": results,
            "latency_us": [way.latency * self._gpus.noise_factor() for _ in range(5)],
            "latency_bytes": int(params.get("latency_bytes", 8)),
            "variant": params.get("variant", "default"),
            "switches": {},
            "dtype": params.get("dtype", "fp32"),
            "algorithm": algorithm,
            "algorithms": {"all_reduce": algorithm, "all_gather": "RING"},
            "transports": {way.transport: 2 * world},
            "nvls": nvls,
            "nccl_version": ENVIRONMENT["nccl"],
        }

    def _collective(self, op: str, size: int, world: int, rounds: int, bad: bool, plateau: float) -> Result:
        """Small ones are ruled by latency: half of the plateau at 32 MiB."""
        reached = plateau * size / (size + 2**25)
        busbw = [reached * self._gpus.noise_factor() for _ in range(rounds)]
        factor = {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}.get(op, (world - 1) / world) or 1.0
        algbw = [one / factor for one in busbw]
        return {
            "op": op,
            "bytes": size,
            "elements": size // 4,
            "rounds": rounds,
            "seconds": [size / one / 1e9 for one in algbw],
            "algbw": algbw,
            "busbw": busbw,
            "wrong": int(bad),
            "where": [{"index": 65_536, "got": 8.0, "want": 7.0, "round": 0}] * bad,
        }

    def _ddp(self, rank: int, indexes: Sequence[int], params: Params) -> Result:
        odd = [one for one, index in enumerate(indexes) if index in self._gpus.faults.training]
        odd += [one for one in (_inject(params, "wrong_rank", None),) if isinstance(one, int) and one not in odd]
        majority = 2 * len(odd) < len(indexes)
        return {
            "epochs": int(params.get("epochs", 2)),
            "batch_size": int(params.get("batch", 256)),
            "samples": 4000,
            "steps": 30,
            "loss_start": 1.41,
            "loss_end": 0.22,
            "fall": 1 - 0.22 / 1.41,
            "min_fall": float(params.get("min_fall", 0.20)),
            "digest": _hex("ddp", rank in odd),
            "hashes_equal": not odd,
            "differing": odd if majority or not odd else list(range(len(indexes))),
            "first_step": 15 if odd else None,
            "majority": majority,
            "seconds": 1.4,
        }

    def _throughput(self, rank: int, indexes: Sequence[int], params: Params) -> Result:
        world, batch, steps = len(indexes), int(params.get("batch", 32)), int(params.get("steps", 100))
        model, data = str(params.get("model", "resnet50")), str(params.get("data", "synthetic"))
        one_gpu = 1350.0 * self._gpus.model.gemm["bf16"] / 775.0
        local = batch / one_gpu / self._gpus.speed_factor(indexes[rank])
        step = (
            batch / one_gpu / min(self._gpus.speed_factor(index) for index in indexes) * (1.0 if world == 1 else 1.02)
        )
        return {
            "model": model,
            "world_size": world,
            "batch_size_per_gpu": batch,
            "global_batch_size": batch * world,
            "total_time_seconds": step * steps,
            "average_step_time_seconds": step,
            "throughput_samples_per_second": batch * world / step,
            "total_samples": batch * world * steps,
            "device": self._gpus.model_name,
            "backend": "nccl",
            "nccl_overhead_ms": 0.0 if world == 1 else 20.0 * step,
            "gpu_utilization_pct": 97.0,
            "avg_step_time_ms": 1e3 * step,
            "step_ms": [1e3 * step * self._gpus.noise_factor() for _ in range(steps)],
            "local_step_ms": [1e3 * local * self._gpus.noise_factor() for _ in range(min(20, steps))],
            "alone_samples_per_second": None if world == 1 else one_gpu * self._gpus.speed_factor(indexes[0]),
            "data": data,
            "data_missing": None,
            "dtype": params.get("dtype", "fp32"),
            "classes": int(params.get("classes", 1000)),
            "rate": float(params.get("rate", 0.01)),
            "image": params.get("image"),
            "warmup_steps": int(params.get("warmup", 50)),
            "steps": steps,
            "method": f"train/{model}/{data}/b{batch}/{params.get('dtype', 'fp32')}/i{params.get('image') or 'own'}",
            "parameters": {"resnet50": 25_557_032, "resnet18": 11_689_512}.get(model, 151_000_000),
            "loss": 6.9,
        }

    def _links(self, rank: int, indexes: Sequence[int], params: Params) -> Result:
        if rank:
            return {"pairs": [], "alone": True}
        pairs = [
            {
                "from": one,
                "to": two,
                "gbps": [
                    self._gpus.model.bus
                    * 1.07
                    * min(self._gpus.link_share(a), self._gpus.link_share(b))
                    * self._gpus.noise_factor()
                    for _ in range(5)
                ],
                "p2p": True,
                "wrong": 0,
                "where": [],
            }
            for one, a in enumerate(indexes)
            for two, b in enumerate(indexes)
            if one != two
        ]
        return {"pairs": pairs, "bytes": int(params.get("bytes", 2**28)), "method": "p2p/copy", "devices": len(indexes)}


def late(job: ProbeRequest, kind: str) -> ProbeFailure:
    words = f"timeout: no result within {job.deadline_s:g} s, so it was stopped"
    return ProbeFailure(kind=kind, words=words, seconds=job.deadline_s)


def _seconds(job: ProbeRequest) -> float:
    seconds = float(job.params.get("seconds", 1.0))
    return seconds * max(1, len(job.params.get("dtypes", ()))) if job.probe == "gemm" else max(seconds, 1.0)


def _inject(params: Params, fault: str, otherwise: Any) -> Any:
    return (params.get("inject") or {}).get(fault, otherwise)


def _hex(*words: object) -> str:
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()


class SimulatedWorkbench:
    """The engine's port, and its clock. `faults`: those of SimulatedFaults, by name."""

    def __init__(
        self,
        gpus: int = 8,
        *,
        seed: int = 0,
        model: str = "NVIDIA H200",
        spread: float = SPREAD,
        noise: float = NOISE,
        **faults: Any,
    ) -> None:
        planted = SimulatedFaults.plant(**faults)
        self._gpus = SimulatedGpus(gpus, seed=seed, model=model, spread=spread, noise=noise, faults=planted)
        self._probes = SimulatedProbes(self._gpus)

    @property
    def clock(self) -> Clock:
        """Time passes on it while probes run, and never otherwise."""
        return self

    def now(self) -> datetime:
        return self._gpus.now()

    async def machine(self) -> Machine:
        uuids = [gpu.uuid for gpu in self._gpus.gpus]
        return Machine(
            node=f"simulated-{self._gpus.seed}",
            gpus=self._gpus.gpus,
            on_bus=self._gpus.count,
            environment=dict(ENVIRONMENT),
            topology={one: {two: "nvlink" for two in uuids if two != one} for one in uuids},
        )

    async def health(self) -> Mapping[str, Health] | Unknown:
        return self._gpus.health()

    async def readings(self) -> Sequence[Reading]:
        return self._gpus.take_readings()

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        answers = {uuid: self._probes.reply(self._gpus.index[uuid], job) for uuid, job in jobs.items()}
        self._gpus.pass_time(
            max((one.seconds for one in answers.values()), default=0.0), [self._gpus.index[one] for one in jobs]
        )
        return answers

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        indexes = [self._gpus.index[uuid] for uuid in gpus]
        stuck = [rank for rank, index in enumerate(indexes) if self._gpus.faults.hang.get(index) == job.probe]
        if stuck:
            answers: dict[str, ProbeReply] = {
                str(rank): late(job, "timeout" if rank in stuck else "rendezvous") for rank in range(len(indexes))
            }
        else:
            answers = {str(rank): self._probes.reply_of_rank(rank, indexes, job) for rank in range(len(indexes))}
        self._gpus.pass_time(max(one.seconds for one in answers.values()), indexes)
        return answers

    async def close(self) -> None:
        """Nothing runs."""
