"""GPUs that exist only here: what a healthy one of a model shows, faults that can be planted, and the passing of time.

Seeded: the same seed gives the same GPUs and the same noise. Time is virtual and passes only while something runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from gpukeeper.model.gpu import Fact, Gpu, Health, Reading, Xid
from gpukeeper.model.unknown import Unknown

SPREAD, NOISE = 0.008, 0.004  # of healthy GPUs of one model, and of one GPU from run to run
BEGIN = datetime(2026, 1, 5, 8, tzinfo=UTC)
EVERY_S = 0.5
THERMAL = 0x40 | 0x8  # clocks held back by the hardware because it is hot
POWER_CAP = 0x4  # normal under load
IDLE = 0x1
ANY = "any"


@dataclass(frozen=True)
class MetricProfile:
    """`spread`: how much of the silicon's spread shows in it. `slows`: whether a slow GPU is slow in it."""

    spread: float
    slows: bool


CORE, MEMORY, LINK = MetricProfile(1.0, True), MetricProfile(0.2, True), MetricProfile(0.1, False)


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


class SimulatedGpus:
    def __init__(
        self, count: int, *, seed: int, model: str, spread: float, noise: float, faults: SimulatedFaults
    ) -> None:
        self.count, self.seed = count, seed
        self.model_name, self.model, self.faults, self._noise = model, MODELS[model], faults, noise
        self._rng = random.Random(seed)  # noqa: S311 - seeded randomness is the point
        self._silicon = [self._rng.gauss(1.0, spread) for _ in range(count)]
        self._at = 0.0
        self._ran = 0
        self._hot_s: dict[int, float] = {}
        self._readings: list[Reading] = []
        self.gpus = tuple(self._gpu(index) for index in range(count - faults.missing))
        self.index = {gpu.uuid: gpu.index for gpu in self.gpus}

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self._at)

    def health(self) -> dict[str, Health]:
        return {gpu.uuid: self._health(gpu) for gpu in self.gpus}

    def take_readings(self) -> list[Reading]:
        """Those since the last call."""
        taken, self._readings = self._readings, []
        return taken

    def pass_time(self, seconds: float, running: Sequence[int]) -> None:
        self._ran += 1
        for turn in range(math.ceil(seconds / EVERY_S)):
            at = self._at + turn * EVERY_S
            self._readings += [self._reading(gpu, at, gpu.index in running) for gpu in self.gpus]
        for index in self.faults.throttle.intersection(running):
            self._hot_s[index] = self._hot_s.get(index, 0.0) + seconds * 0.6
        self._at += seconds

    # Figures

    def samples(self, index: int, speed: float, count: int, part: MetricProfile = CORE) -> list[float]:
        """Of one part of it: heat holds back the core alone, and a slow one's link to the host is not slow."""
        whole = 1 + (self._silicon[index] - 1) * part.spread
        lost = 1 - self.faults.slow.get(index, 0.0) * part.slows
        falling = 0.35 if part is CORE and index in self.faults.throttle else 0.0
        return [
            speed * whole * lost * (1 - falling * (turn + 1) / count) * self.noise_factor() for turn in range(count)
        ]

    def speed_factor(self, index: int) -> float:
        hot = 0.75 if index in self.faults.throttle else 1.0
        return self._silicon[index] * (1 - self.faults.slow.get(index, 0.0)) * hot

    def link_share(self, index: int) -> float:
        return 1 - self.faults.links_down.get(index, 0) / self.model.nvlinks

    def noise_factor(self) -> float:
        return self._rng.gauss(1.0, self._noise)

    # The machine

    def _gpu(self, index: int) -> Gpu:
        return Gpu(
            uuid=f"GPU-{self.seed:08x}-0000-4000-8000-{index:012x}",
            index=index,
            name=self.model_name,
            serial=f"16{self.seed:05d}{index:06d}",
            pci=f"00000000:{0x1B + 0x10 * index:02X}:00.0",
            memory_mib=self.model.memory_mib,
            facts={
                "vbios": "96.00.A5.00.01",
                "numa": int(index >= self.count / 2),
                "sms": self.model.sms,
                "architecture": "Hopper" if self.model.pcie == 5 else "Ampere",
                "power_limit_w": self.model.watts,
                "power_default_w": self.model.watts,
            },
        )

    def _health(self, gpu: Gpu) -> Health:
        faults, index = self.faults, gpu.index
        counters: dict[str, int | Unknown | None] = dict.fromkeys(COUNTERS, 0)
        counters["energy_mj"] = int(1000 * self.model.watts * self._at)
        counters["violation_thermal_ns"] = int(1e9 * self._hot_s.get(index, 0.0))
        xids: tuple[Xid, ...] = ()
        if self._ran:
            counters["ecc_uncorrected_volatile"] = counters["ecc_uncorrected_aggregate"] = faults.ecc.get(index, 0)
            xids = tuple(Xid(number, "simulated") for number in (faults.xid.get(index),) if number is not None)
        model = self.model
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

    def _reading(self, gpu: Gpu, at: float, loaded: bool) -> Reading:
        model, hot = self.model, loaded and gpu.index in self.faults.throttle
        clock = 0.6 if hot else 0.93
        return Reading(
            uuid=gpu.uuid,
            at=at,
            sm_mhz=round(model.sm_mhz * clock * self.noise_factor()) if loaded else 345,
            memory_mhz=float(STATES["memory_mhz_max"]),  # type: ignore[arg-type]
            power_w=model.watts * (0.7 if hot else 0.97) * self.noise_factor() if loaded else model.watts * 0.12,
            temperature_c=(91.0 if hot else 63.0) + self.noise_factor() if loaded else 34.0,
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
