"""Machines, settings and measurements for the tests of the judge. Plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.acceptance.check import CheckContext, RunRequest
from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.record import Machine, Measurement, Thresholds
from gpukeeper.model.gpu import Fact, Gpu, Grade, Health, Past
from gpukeeper.model.unknown import Unknown

T0 = datetime(2026, 3, 10, 12, tzinfo=UTC)
H200 = "NVIDIA H200"
METHOD = "gemm/mm/n8192/normal/burst"


def gpus(n: int, name: str | Unknown = H200, **more: Any) -> tuple[Gpu, ...]:
    return tuple(Gpu(uuid=f"GPU-{i}", index=i, name=name, serial=f"S{i}", **more) for i in range(n))


def context(
    machine_gpus: Sequence[Gpu],
    *,
    limits: Thresholds | None = None,
    history: Mapping[str, tuple[Past, ...]] | None = None,
    environment: Mapping[str, Fact] | None = None,
    wish: RunRequest | None = None,
    **more: Any,
) -> CheckContext:
    """`limits`: of everything; None: the table's."""
    told = more.pop("machine", {})
    machine = Machine(node="node-1", gpus=tuple(machine_gpus), environment=environment or {}, **told)
    given = reference.limits if limits is None else lambda *_: limits
    return CheckContext(
        wish=wish or RunRequest(),
        machine=machine,
        gpus=tuple(machine_gpus),
        limits=given,
        history=history or {},
        **more,
    )


def measured(*values: Sequence[float] | float, **more: Any) -> list[Measurement]:
    """Of each GPU its samples; a single figure is five equal ones."""
    about = {"check": "gemm", "metric": "bf16", "unit": "TFLOP/s", "method": METHOD} | more
    return [
        Measurement(gpu=f"GPU-{i}", samples=(value,) * 5 if isinstance(value, int | float) else tuple(value), **about)
        for i, value in enumerate(values)
    ]


def past(value: float, days: int = 1, verdict: Grade = Grade.PASS, key: str = f"gemm.bf16 {METHOD}") -> Past:
    at = T0 - timedelta(days=days)
    return Past(at=at, run=f"run-{days}", identity="S0", verdict=verdict, values={key: value})


def health(uuid: str = "GPU-0", seconds: float = 0, **facts: Any) -> Health:
    """Of a healthy H200; `facts` replace counters and states by their names."""
    counters = {name: facts.pop(name, value) for name, value in COUNTERS.items()}
    xids, foreign = facts.pop("xids", ()), facts.pop("foreign", ())
    return Health(
        uuid=uuid,
        at=T0 + timedelta(seconds=seconds),
        counters=counters,
        states=STATES | facts,
        xids=xids,
        foreign=foreign,
    )


def fleet(
    n: int, seed: int, *, spread: float, noise: float = 0.004, repeats: int = 5, slow: int = 0, by: float = 0.05
) -> list[tuple[float, ...]]:
    """Samples of n GPUs: silicon differs by `spread`, runs by `noise`; the first `slow` of them are slower."""
    dice = random.Random(seed)
    found = []
    for i in range(n):
        true = 780 * (1 + dice.gauss(0, spread)) * (1 - by if i < slow else 1)
        found.append(tuple(true * (1 + dice.gauss(0, noise)) for _ in range(repeats)))
    return found


NONE_HERE = Unknown("this model has none", by_design=True)
COUNTERS: dict[str, int | Unknown | None] = {
    **dict.fromkeys(("ecc_corrected_volatile", "ecc_uncorrected_volatile", "ecc_corrected_aggregate"), 0),
    **dict.fromkeys(("ecc_uncorrected_aggregate", "sram_uncorrected_aggregate", "remapped_correctable"), 0),
    **dict.fromkeys(("remapped_uncorrectable", "pcie_replays", "pcie_correctable", "pcie_nonfatal", "pcie_fatal"), 0),
    **dict.fromkeys(("nvlink_replay", "nvlink_recovery", "nvlink_crc_flit", "nvlink_crc_data"), 0),
    **dict.fromkeys(("nvlink_recovery_failed", "violation_thermal_ns", "violation_power_ns"), 0),
    "violation_reliability_ns": 0,
    "energy_mj": 1000,
    "retired_pages": NONE_HERE,
}
STATES: dict[str, Fact] = {
    "persistence": True,
    "ecc_enabled": True,
    "ecc_pending": True,
    "remap_pending": False,
    "remap_failed": False,
    "retire_pending": NONE_HERE,
    "sram_threshold": False,
    "repair_needed": False,
    "advice": "none",
    "inforom_ok": True,
    "mig": False,
    "compute_mode": "default",
    "nvlinks_active": 18,
    "nvlinks_total": 18,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_generation_gpu_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "power_limit_w": 700.0,
    "power_default_w": 700.0,
    "slowdown_c": 87,
    "sm_mhz_max": 1980,
    "memory_mhz_max": 3201,
    "fabric_state": NONE_HERE,
    "fabric_status": NONE_HERE,
}
