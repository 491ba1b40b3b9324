"""A machine with GPUs that exist only here: every probe answers with the figures of a real one, faults included.

For the detector's own test and for ours. Seeded: the same seed gives the same GPUs and the same noise. Time is virtual
and passes only while something runs; `now` is the engine's clock. The judge cannot tell it from a real machine, and the
report says that it was none.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeAlias

from gpukeeper.acceptance.record import Machine, ProbeFailure, ProbeReply, ProbeRequest, ProbeResult
from gpukeeper.model.condition import Xid
from gpukeeper.model.gpu import Fact, Gpu, Health, Reading
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

Params: TypeAlias = Mapping[str, Any]
Result: TypeAlias = dict[str, Any]

SPREAD, NOISE = 0.008, 0.004  # of healthy GPUs of one model, and of one GPU from run to run
BEGIN = datetime(2026, 1, 5, 8, tzinfo=UTC)
EVERY_S = 0.5
THERMAL = 0x40 | 0x8  # clocks held back by the hardware because it is hot
POWER_CAP = 0x4  # normal under load
IDLE = 0x1
ANY = "any"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True)
class MetricProfile:
    """`spread`: how much of the silicon's spread shows in it. `slows`: whether a slow GPU is slow in it."""

    spread: float
    slows: bool


CORE, MEMORY, LINK = MetricProfile(1.0, True), MetricProfile(0.2, True), MetricProfile(0.1, False)


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


@dataclass(frozen=True)
class SimulatedModel:
    """What a healthy one shows. GEMM in TFLOP/s, the rest in GB/s as the probes count."""

    gemm: Mapping[str, float]
    copy: float
    link: float  # to the host, one way
    bus: float  # of a ring over NVLink
    switched: float  # all-reduce with the switch's own reduction, from six GPUs on
    memory_mib: int
    watts: float
    sm_mhz: int
    nvlinks: int
    sms: int
    pcie: int


MODELS: Mapping[str, SimulatedModel] = {
    "NVIDIA H200": SimulatedModel(
        gemm={"fp32": 50.5, "tf32": 392.0, "bf16": 775.0, "fp16": 772.0, "fp8": 1465.0, "int8": 906.0},
        copy=4265.0,
        link=55.3,
        bus=363.0,
        switched=478.0,
        memory_mib=143_771,
        watts=700.0,
        sm_mhz=1980,
        nvlinks=18,
        sms=132,
        pcie=5,
    ),
    "NVIDIA A100-SXM4-80GB": SimulatedModel(
        gemm={"fp32": 18.4, "tf32": 127.0, "bf16": 264.0, "fp16": 275.0, "int8": 470.0},
        copy=1790.0,
        link=25.5,
        bus=235.0,
        switched=235.0,
        memory_mib=81_920,
        watts=400.0,
        sm_mhz=1410,
        nvlinks=12,
        sms=108,
        pcie=4,
    ),
}


@dataclass(frozen=True)
class SimulatedFaults:
    """By the index of the GPU, which is also its rank."""

    slow: Mapping[int, float] = field(default_factory=dict)  # the share that it lost, everywhere
    flip: Mapping[int, str] = field(default_factory=dict)  # one bit of its results in that kind of number
    training: frozenset[int] = frozenset()  # its training ends with other weights than everybody else's
    memory: frozenset[int] = frozenset()  # a cell that does not keep what is written
    missing: int = 0  # GPUs that the bus shows and the driver does not
    throttle: frozenset[int] = frozenset()  # too hot: it slows down while it runs
    wrong_collective: int | None = None  # the rank that gets a wrong element
    hang: Mapping[int, str] = field(default_factory=dict)  # in that probe it never answers
    broken: Mapping[int, str] = field(default_factory=dict)  # every probe fails with these words
    xid: Mapping[int, int] = field(default_factory=dict)  # logged when the first probe ran
    ecc: Mapping[int, int] = field(default_factory=dict)  # uncorrected errors, counted when the first probe ran
    foreign: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # pids of others on it
    links_down: Mapping[int, int] = field(default_factory=dict)  # NVLinks that are not up
    slow_link: Mapping[int, float] = field(default_factory=dict)  # share that its link to the host lost

    @classmethod
    def plant(cls, **given: Any) -> Self:
        """Just the GPUs will do where the rest is plain: ecc=(1,) is one error, hang=(4,) any probe of its own."""
        plain = {"ecc": 1, "hang": ANY, "flip": "bf16", "slow": 0.1, "slow_link": 0.5, "links_down": 1, "xid": 79}
        plain |= {"foreign": (4242,), "broken": "RuntimeError: simulated"}
        for name, fault in given.items():
            if name in plain and not isinstance(fault, Mapping):
                given[name] = dict.fromkeys(fault, plain[name])
            elif name in ("training", "memory", "throttle"):
                given[name] = frozenset(fault)
        if given.get("wrong_collective") is True:
            given["wrong_collective"] = 1
        return cls(**given)


class SimulatedWorkbench:
    """The engine's port, and its clock. `faults`: those of Faults, by name."""

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
        self._model_name, self._model, self._noise = model, MODELS[model], noise
        self._faults = SimulatedFaults.plant(**faults)
        self._rng = random.Random(seed)  # noqa: S311 - seeded randomness is the point
        self._silicon = [self._rng.gauss(1.0, spread) for _ in range(gpus)]
        self._count, self._seed = gpus, seed
        self._at = 0.0
        self._ran = 0
        self._hot_s: dict[int, float] = {}
        self._readings: list[Reading] = []
        self._gpus = tuple(self._gpu(index) for index in range(gpus - self._faults.missing))
        self._index = {gpu.uuid: gpu.index for gpu in self._gpus}

    @property
    def clock(self) -> Clock:
        """Time passes on it while probes run, and never otherwise."""
        return self

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self._at)

    async def machine(self) -> Machine:
        uuids = [gpu.uuid for gpu in self._gpus]
        return Machine(
            node=f"simulated-{self._seed}",
            gpus=self._gpus,
            on_bus=self._count,
            environment=dict(ENVIRONMENT),
            topology={one: {two: "nvlink" for two in uuids if two != one} for one in uuids},
        )

    async def health(self) -> Mapping[str, Health] | Unknown:
        return {gpu.uuid: self._health(gpu) for gpu in self._gpus}

    async def readings(self) -> Sequence[Reading]:
        taken, self._readings = self._readings, []
        return taken

    async def each(self, jobs: Mapping[str, ProbeRequest]) -> Mapping[str, ProbeReply]:
        answers = {uuid: self._answer(self._index[uuid], job) for uuid, job in jobs.items()}
        self._pass_time(max((one.seconds for one in answers.values()), default=0.0), [self._index[one] for one in jobs])
        return answers

    async def together(self, gpus: Sequence[str], job: ProbeRequest) -> Mapping[str, ProbeReply]:
        indexes = [self._index[uuid] for uuid in gpus]
        stuck = [rank for rank, index in enumerate(indexes) if self._faults.hang.get(index) == job.probe]
        if stuck:
            answers: dict[str, ProbeReply] = {
                str(rank): self._late(job, "timeout" if rank in stuck else "rendezvous") for rank in range(len(indexes))
            }
        else:
            answers = {str(rank): self._rank(rank, indexes, job) for rank in range(len(indexes))}
        self._pass_time(max(one.seconds for one in answers.values()), indexes)
        return answers

    async def close(self) -> None:
        """Nothing runs."""

    # Answers

    def _answer(self, index: int, job: ProbeRequest) -> ProbeReply:
        if self._faults.hang.get(index) in (job.probe, ANY):
            return self._late(job, "timeout")
        if index in self._faults.broken:
            return ProbeFailure(kind="failed", words=self._faults.broken[index], seconds=1.0)
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
        seconds = self._seconds(job)
        return ProbeResult(result=probes[job.probe](index, job.params), seconds=seconds, busy_s=0.95 * seconds)

    def _rank(self, rank: int, indexes: Sequence[int], job: ProbeRequest) -> ProbeReply:
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
        seconds = self._seconds(job)
        return ProbeResult(
            result={**who, **probes[job.probe](rank, indexes, job.params)}, seconds=seconds, busy_s=0.9 * seconds
        )

    def _late(self, job: ProbeRequest, kind: str) -> ProbeFailure:
        words = f"timeout: no result within {job.deadline_s:g} s, so it was stopped"
        return ProbeFailure(kind=kind, words=words, seconds=job.deadline_s)

    def _gemm(self, index: int, params: Params) -> Result:
        n, repeats = int(params.get("n", 8192)), int(params.get("repeats", 5))
        slow = _inject(params, "slow", 0.0)
        wanted = list(params.get("dtypes", self._model.gemm))
        found: Result = {}
        for dtype in wanted:
            if dtype not in self._model.gemm:
                found[dtype] = {"unsupported": f"{self._model_name} does not support {dtype}"}
                continue
            speed = self._model.gemm[dtype] / (1 + (slow.get(dtype, 0.0) if isinstance(slow, dict) else slow))
            kernel = {"fp8": "scaled_mm", "int8": "int_mm"}.get(dtype, "mm")
            method = f"gemm/{kernel}/n{n}/{'uniform' if dtype == 'int8' else 'normal'}/burst"
            found[dtype] = {"tflops": self._samples(index, speed, repeats), "n": n, "method": method}
        best = self._model.gemm["bf16"] * self._factor(index)
        sweep = {str(size): best * (0.999 if int(size) == n else 0.96) for size in params.get("sweep") or ()}
        return {"dtypes": found, "sweep": {"bf16": sweep} if sweep else {}, **self._old_kit(index, params, repeats)}

    def _old_kit(self, index: int, params: Params, repeats: int) -> Result:
        speed = self._model.gemm["fp32"]
        found: Result = {}
        if params.get("matmul"):
            found["matmul"] = {
                str(n): {
                    "tflops": self._samples(index, speed * 0.9, 3),
                    "n": n,
                    "rounds": rounds,
                    "method": f"gemm/mm/n{n}x{rounds}",
                }
                for n, rounds in params["matmul"]
            }
        if params.get("sgemm"):
            method = "gemm/sgemm/memory/normal"
            found["sgemm"] = {"tflops": self._samples(index, speed, repeats), "n": 32768, "method": method}
        if params.get("batched"):
            n = int(params.get("batched_n", 2048))
            figures = self._samples(index, speed * 0.95, repeats)
            found["batched"] = {"tflops": figures, "n": n, "count": 512, "method": f"gemm/bmm/n{n}/normal"}
        return found

    def _memory_bandwidth(self, index: int, params: Params) -> Result:
        speed = self._model.copy / (1 + _inject(params, "slow", 0.0))
        return {
            "gbps": self._samples(index, speed, int(params.get("repeats", 5)), MEMORY),
            "bytes": int(params.get("bytes", 4 << 30)),
            "method": "copy/read+write",
            "wrong": int(bool(_inject(params, "flip", False))),
        }

    def _copies(self, index: int, params: Params) -> Result:
        repeats = int(params.get("repeats", 5))
        link = self._model.link * (1 - self._faults.slow_link.get(index, 0.0)) / (1 + _inject(params, "slow", 0.0))
        wrong = int(bool(_inject(params, "flip", False)))
        return {
            "h2d": self._samples(index, link, repeats, LINK),
            "d2h": self._samples(index, link * 0.998, repeats, LINK),
            "d2d": self._samples(index, self._model.copy, repeats, MEMORY),
            "bytes": int(params.get("bytes", 512 << 20)),
            "pinned": True,
            "method": "copy/pinned",
            "methods": {"h2d": "copy/pinned", "d2h": "copy/pinned", "d2d": "copy/read+write"},
            "verified": not wrong,
            "wrong": wrong,
            "where": [{"offset": 4096, "got": f"{32:016x}", "want": f"{0:016x}"}] * wrong,
        }

    def _memory_pattern(self, index: int, params: Params) -> Result:
        bad = index in self._faults.memory or bool(_inject(params, "flip", False))
        total = self._model.memory_mib << 20
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
        for dtype in params.get("dtypes", self._model.gemm):
            if dtype not in self._model.gemm:
                dtypes[dtype] = {"unsupported": f"{self._model_name} does not support {dtype}"}
                continue
            bad = self._faults.flip.get(index) == dtype or _inject(params, "flip", None) in (True, dtype)
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
        other = index in self._faults.training
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
        speed = self._model.gemm.get(dtype, self._model.gemm["bf16"]) * 1.08  # whole numbers draw less power
        count = max(2, min(60, int(seconds)))
        loss = _inject(params, "slow", 0.0)
        windows = [
            {"at": seconds * turn / count, "tflops": one / (1 + loss * turn / count)}
            for turn, one in enumerate(self._samples(index, speed, count))
        ]
        flipped = int(self._faults.flip.get(index) == dtype or bool(_inject(params, "flip", False)))
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

    def _collectives(self, rank: int, indexes: Sequence[int], params: Params) -> Result:
        world = len(indexes)
        rounds = int(params.get("rounds") or 2 * world)
        bad = rank in (self._faults.wrong_collective, _inject(params, "wrong_rank", None))
        way = WAYS[str(params.get("variant") or "default")]
        nvls = way.nvls and world >= 6 and self._model.switched > self._model.bus
        slowest = min(self._linked(index) for index in indexes)
        reach = {op: slowest * (self._model.switched if nvls and op == "all_reduce" else self._model.bus) for op in OPS}
        results = [
            self._collective(op, int(size), world, rounds, bad, way.busbw or reach[op])
            for size in params.get("sizes") or [2**26]
            for op in params.get("ops") or OPS
        ]
        algorithm = "NVLS" if nvls else "RING"
        return {
            "results": results,
            "latency_us": [way.latency * self._noisy() for _ in range(5)],
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
        busbw = [reached * self._noisy() for _ in range(rounds)]
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
        odd = [one for one, index in enumerate(indexes) if index in self._faults.training]
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
        one_gpu = 1350.0 * self._model.gemm["bf16"] / 775.0
        local = batch / one_gpu / self._factor(indexes[rank])
        step = batch / one_gpu / min(self._factor(index) for index in indexes) * (1.0 if world == 1 else 1.02)
        return {
            "model": model,
            "world_size": world,
            "batch_size_per_gpu": batch,
            "global_batch_size": batch * world,
            "total_time_seconds": step * steps,
            "average_step_time_seconds": step,
            "throughput_samples_per_second": batch * world / step,
            "total_samples": batch * world * steps,
            "device": self._model_name,
            "backend": "nccl",
            "nccl_overhead_ms": 0.0 if world == 1 else 20.0 * step,
            "gpu_utilization_pct": 97.0,
            "avg_step_time_ms": 1e3 * step,
            "step_ms": [1e3 * step * self._noisy() for _ in range(steps)],
            "local_step_ms": [1e3 * local * self._noisy() for _ in range(min(20, steps))],
            "alone_samples_per_second": None if world == 1 else one_gpu * self._factor(indexes[0]),
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
                    self._model.bus * 1.07 * min(self._linked(a), self._linked(b)) * self._noisy() for _ in range(5)
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

    # Figures

    def _samples(self, index: int, speed: float, count: int, part: MetricProfile = CORE) -> list[float]:
        """Of one part of it: heat holds back the core alone, and a slow one's link to the host is not slow."""
        whole = 1 + (self._silicon[index] - 1) * part.spread
        lost = 1 - self._faults.slow.get(index, 0.0) * part.slows
        falling = 0.35 if part is CORE and index in self._faults.throttle else 0.0
        return [speed * whole * lost * (1 - falling * (turn + 1) / count) * self._noisy() for turn in range(count)]

    def _factor(self, index: int) -> float:
        hot = 0.75 if index in self._faults.throttle else 1.0
        return self._silicon[index] * (1 - self._faults.slow.get(index, 0.0)) * hot

    def _linked(self, index: int) -> float:
        return 1 - self._faults.links_down.get(index, 0) / self._model.nvlinks

    def _noisy(self) -> float:
        return self._rng.gauss(1.0, self._noise)

    # The machine

    def _gpu(self, index: int) -> Gpu:
        return Gpu(
            uuid=f"GPU-{self._seed:08x}-0000-4000-8000-{index:012x}",
            index=index,
            name=self._model_name,
            serial=f"16{self._seed:05d}{index:06d}",
            pci=f"00000000:{0x1B + 0x10 * index:02X}:00.0",
            memory_mib=self._model.memory_mib,
            facts={
                "vbios": "96.00.A5.00.01",
                "numa": int(index >= self._count / 2),
                "sms": self._model.sms,
                "architecture": "Hopper" if self._model.pcie == 5 else "Ampere",
                "power_limit_w": self._model.watts,
                "power_default_w": self._model.watts,
            },
        )

    def _health(self, gpu: Gpu) -> Health:
        faults, index = self._faults, gpu.index
        counters: dict[str, int | Unknown | None] = dict.fromkeys(COUNTERS, 0)
        counters["energy_mj"] = int(1000 * self._model.watts * self._at)
        counters["violation_thermal_ns"] = int(1e9 * self._hot_s.get(index, 0.0))
        xids: tuple[Xid, ...] = ()
        if self._ran:
            counters["ecc_uncorrected_volatile"] = counters["ecc_uncorrected_aggregate"] = faults.ecc.get(index, 0)
            xids = tuple(Xid(number, "simulated") for number in (faults.xid.get(index),) if number is not None)
        model = self._model
        states: dict[str, Fact] = {
            **STATES,
            "nvlinks_active": model.nvlinks - faults.links_down.get(index, 0),
            "nvlinks_total": model.nvlinks,
            **dict.fromkeys(("pcie_generation", "pcie_generation_max", "pcie_generation_gpu_max"), model.pcie),
            "power_limit_w": model.watts,
            "power_default_w": model.watts,
            "power_w": model.watts * 0.12,
            "sm_mhz": 345,
            "sm_mhz_max": model.sm_mhz,
            "memory_used_mib": 40_000 if index in faults.foreign else 4,
            "numa": gpu.facts["numa"],
        }
        foreign = faults.foreign.get(index, ())
        named = {pid: f"pid {pid} (simulated: python train.py)" for pid in foreign}
        return Health(
            uuid=gpu.uuid, at=self.now(), counters=counters, states=states, xids=xids, foreign=foreign, named=named
        )

    def _seconds(self, job: ProbeRequest) -> float:
        seconds = float(job.params.get("seconds", 1.0))
        return seconds * max(1, len(job.params.get("dtypes", ()))) if job.probe == "gemm" else max(seconds, 1.0)

    def _pass_time(self, seconds: float, running: Sequence[int]) -> None:
        self._ran += 1
        for turn in range(math.ceil(seconds / EVERY_S)):
            at = self._at + turn * EVERY_S
            self._readings += [self._reading(gpu, at, gpu.index in running) for gpu in self._gpus]
        for index in self._faults.throttle.intersection(running):
            self._hot_s[index] = self._hot_s.get(index, 0.0) + seconds * 0.6
        self._at += seconds

    def _reading(self, gpu: Gpu, at: float, loaded: bool) -> Reading:
        model, hot = self._model, loaded and gpu.index in self._faults.throttle
        clock = 0.6 if hot else 0.93
        return Reading(
            uuid=gpu.uuid,
            at=at,
            sm_mhz=round(model.sm_mhz * clock * self._noisy()) if loaded else 345,
            memory_mhz=float(STATES["memory_mhz_max"]),  # type: ignore[arg-type]
            power_w=model.watts * (0.7 if hot else 0.97) * self._noisy() if loaded else model.watts * 0.12,
            temperature_c=(91.0 if hot else 63.0) + self._noisy() if loaded else 34.0,
            utilisation=100.0 if loaded else 0.0,
            reasons=THERMAL if hot else POWER_CAP if loaded else IDLE,
            pcie_generation=model.pcie,
            pcie_width=16,
        )


COUNTERS = (
    *("ecc_corrected_volatile", "ecc_uncorrected_volatile", "ecc_corrected_aggregate", "ecc_uncorrected_aggregate"),
    *("sram_uncorrected_aggregate", "remapped_correctable", "remapped_uncorrectable", "pcie_replays"),
    *("pcie_correctable", "pcie_nonfatal", "pcie_fatal", "nvlink_replay", "nvlink_recovery", "nvlink_crc_flit"),
    *("nvlink_crc_data", "nvlink_recovery_failed", "violation_thermal_ns", "violation_power_ns"),
    *("violation_reliability_ns", "energy_mj"),
)
STATES: Mapping[str, Fact] = {
    "persistence": True,
    "ecc_enabled": True,
    "ecc_pending": True,
    "remap_pending": False,
    "remap_failed": False,
    "retire_pending": Unknown("this model remaps rows and retires no pages", by_design=True),
    "sram_threshold": False,
    "repair_needed": False,
    "advice": "none",
    "inforom_ok": True,
    "mig": False,
    "compute_mode": "default",
    "pcie_width": 16,
    "pcie_width_max": 16,
    "temperature_c": 34,
    "slowdown_c": 92,
    "shutdown_c": 97,
    "memory_mhz": 3201,
    "memory_mhz_max": 3201,
    "app_sm_mhz": Unknown("this driver has no application clocks", by_design=True),
    "reasons": IDLE,
    "fabric_state": 3,
    "fabric_status": 0,
    "fabric_health": 1,
    "performance_state": 0,
    "utilisation": 0.0,
}
ENVIRONMENT: Mapping[str, Fact] = {
    "driver": "580.95.05",
    "cuda_driver": "13.0",
    "cuda": "13.0",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "cudnn": "9.15.1",
    "python": "3.11.9",
    "kernel": "6.8.0",
    "os": "simulated",
    "hostname": "simulated",
    "containerized": False,
    "shm_bytes": 1 << 40,
    "memlock": "unlimited",
    "cpus": 224,
    "memory_mib": 2_000_000,
    "nccl_env": "",
    "taint": 0,
    "fabric_manager": True,
    "nccl_tests": None,
    "visible_devices": None,
    "torch_why": None,
}


def _inject(params: Params, fault: str, otherwise: Any) -> Any:
    return (params.get("inject") or {}).get(fault, otherwise)


def _hex(*words: object) -> str:
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()
