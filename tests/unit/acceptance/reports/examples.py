"""Reports made by hand: one good GPU, eight with a slow and a corrupt one, an interrupted run, the CPU, nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.acceptance.record import Delta, Finding, GpuSummary, Machine, NotTested, Power, Remedy, Report
from gpukeeper.model.gpu import Gpu, Grade, Reading, worst
from gpukeeper.model.unknown import Unknown

START = datetime(2026, 3, 14, 9, 30, tzinfo=UTC)
EVIL = '<script>alert("GPU")</script> & \u202e[RESULT] SUCCESS\n[RESULT] SUCCESS'
ENVIRONMENT = {
    "driver": "575.57.08",
    "cuda_driver": "12.9",
    "cuda": "12.8",
    "torch": "2.11.0",
    "nccl": "2.28.3",
    "python": "3.11.9",
    "kernel": "6.8.0",
    "shm_bytes": 68719476736,
    "fabric_manager": Unknown("the service manager cannot be asked in here"),
    "nccl_tests": None,
}
# check, metric, unit, typical figure, floor, reference, ceiling, method
FIGURES = (
    ("gemm", "bf16", "TFLOP/s", 782.0, 690.0, 780.0, 1009.0, "gemm/mm/n8192/normal/burst"),
    ("gemm", "fp32", "TFLOP/s", 51.2, None, 50.0, 68.0, "gemm/mm/n8192/normal/burst"),
    ("gemm", "fp8", "TFLOP/s", 1388.0, None, 1453.0, 2018.0, "gemm/scaled_mm/n8192/normal/burst"),
    ("memory_bandwidth", "copy", "GB/s", 4271.0, 3936.0, 4300.0, 4896.0, "copy/read+write"),
    ("copies", "h2d", "GB/s", 55.1, 47.3, 55.0, 64.0, "pinned"),
    ("copies", "d2h", "GB/s", 54.6, 47.3, 55.0, 64.0, "pinned"),
)


def gpu(index: int, **more: Any) -> Gpu:
    known: dict[str, Any] = {
        "uuid": f"GPU-{index:08d}-aaaa",
        "index": index,
        "name": "NVIDIA H200",
        "serial": f"16520230{index:05d}",
        "pci": f"0000:{0x18 + index:02X}:00.0",
        "memory_mib": 143771,
        "facts": {"vbios": "96.00.BC.00.01", "numa": index // 4, "power_limit_w": 700.0},
    }
    return Gpu(**{**known, **more})


def report(
    gpus: Sequence[Gpu],
    findings: Sequence[Finding],
    *,
    node: str = "node-07",
    run: str = "20260314-093000-1a2b",
    started: datetime = START,
    **more: Any,
) -> Report:
    """The verdict is the worst of its findings unless another one is given."""
    grades = {one.uuid: worst(f.verdict for f in findings if f.gpu == one.uuid) for one in gpus}
    known: dict[str, Any] = {
        "run": run,
        "node": node,
        "version": "0.1.0",
        "device": "cuda",
        "started": started,
        "ended": started + timedelta(seconds=56),
        "profile": "quick",
        "within_s": 60.0,
        "verdict": worst(f.verdict for f in findings),
        "reason": next((f.message for f in findings if f.verdict is worst(g.verdict for g in findings)), "Nothing."),
        "machine": Machine(
            node=node, gpus=tuple(gpus), on_bus=len(gpus), environment=ENVIRONMENT, topology=_links(gpus)
        ),
        "expected": len(gpus),
        "tallies": tuple(_tally(uuid, grade, findings) for uuid, grade in grades.items()),
        "findings": tuple(findings),
        "programme": tuple(dict.fromkeys(one.check for one in findings)),
    }
    told = {**known, **more}
    wish = {"device": told["device"], "expected": told["expected"]}
    return Report(**{"settings": {"wish": wish}, **told})


def finding(check: str, uuid: str | None, verdict: Grade = Grade.PASS, **more: Any) -> Finding:
    known: dict[str, Any] = {"code": f"{check}-ok", "message": f"{check} is as it should be."}
    return Finding(check=check, gpu=uuid, verdict=verdict, **{**known, **more})


def measured(one: Gpu, share: float = 1.0, seed: int = 1) -> list[Finding]:
    """All figures of a good GPU; with a share below 1 those of a slow one, judged as such."""
    rng = random.Random(seed * 1000 + one.index)
    found = []
    for check, metric, unit, typical, floor, reference, ceiling, method in FIGURES:
        own = typical * share * rng.gauss(1, 0.006)
        samples = tuple(own * rng.gauss(1, 0.003) for _ in range(5))
        value = sorted(samples)[2]
        failed = floor is not None and value < floor
        peers_tell = share < 0.95
        verdict = Grade.FAIL if failed or peers_tell else Grade.PASS
        reason = "-below-floor" if failed else "-slower-than-peers" if peers_tell else "-ok"
        words = f"{metric} {value:.4g} {unit}"
        message = f"{words}, {1 - share:.0%} below the median of its peers." if peers_tell else f"{words} is good."
        found.append(
            Finding(
                check=check,
                metric=metric,
                gpu=one.uuid,
                verdict=verdict,
                code=f"{check}{reason}",
                message=message,
                action=Remedy.REPLACE_GPU if verdict is Grade.FAIL else Remedy.NONE,
                value=value,
                unit=unit,
                method=method,
                samples=samples,
                repeatability=0.003,
                floor=floor,
                reference=reference,
                ceiling=ceiling,
                source="measured on an H200, 8192³, random normal",
                peer_median=typical,
                peer_z=(value - typical) / (0.008 * typical),
                peer_n=8,
                baseline=typical * 1.002,
                seconds=1.2,
            )
        )
    return found


def one_good_gpu(**more: Any) -> Report:
    only = gpu(0)
    findings = [
        finding("environment", None, message="1 GPU of 1 expected, driver 575.57.08."),
        finding("health", only.uuid, message="No error was counted, no clock was held back."),
        *measured(only),
        finding("exact", only.uuid, metric="bf16", message="0 of 2.7e9 elements differ."),
        finding("training", only.uuid, metric="loss", message="The loss fell by 71 %; two runs are equal bit by bit."),
    ]
    coverage = (
        NotTested(check="collectives", why="it needs 2 GPUs, 1 is here"),
        NotTested(check="stress", what="60 s hot", why="no time was left", within="5m"),
    )
    known: dict[str, Any] = {
        "reason": "All 10 findings passed.",
        "coverage": coverage,
        "power": _power(),
        "timeline": tuple(readings(only.uuid)),
        "records": (record("training", only.uuid, _training()), record("throughput", "0", throughput(1))),
    }
    return report([only], findings, **{**known, **more})


def eight_gpus(**more: Any) -> Report:
    """GPU 3 is 12 % slow, GPU 5 computes wrong, GPU 6 has no persistence."""
    gpus = [gpu(index) for index in range(8)]
    findings = [finding("environment", None, message="8 GPUs of 8 expected.")]
    for one in gpus:
        findings += measured(one, 0.88 if one.index == 3 else 1.0)
        findings.append(_exact(one))
        findings.append(_health(one))
    findings.append(
        finding(
            "collectives",
            None,
            metric="all_reduce",
            value=478.2,
            unit="GB/s",
            floor=420.0,
            samples=(477.0, 478.2, 479.1),
        )
    )
    findings.append(finding("throughput", None, metric="resnet50", value=10666.0, unit="samples/s", samples=(10666.0,)))
    findings.append(finding("ddp", None, metric="loss", message="The loss fell by 57 %, the same on all ranks."))
    findings.append(finding("links", None, message="Every pair of GPUs reaches the other."))
    known: dict[str, Any] = {
        "reason": "GPU 5 computes wrong: 3 of 2.7e9 elements differ in bf16 (5 more findings fail).",
        "coverage": (NotTested(check="stress", what="10 min burn", why="no time was left", within="30m"),),
        "power": _power(),
        "deltas": (Delta(gpu=gpus[5].uuid, check="exact", counter="ecc_corrected_volatile", before=0, after=12),),
        "timeline": tuple(one for each in gpus for one in readings(each.uuid, hot=each.index == 3)),
        "records": tuple(_ranks(8)),
        "run": "20260314-094500-8c8c",
    }
    return report(gpus, findings, **{**known, **more})


def interrupted() -> Report:
    only = gpu(0)
    return report(
        [only],
        measured(only)[:2],
        verdict=Grade.INCONCLUSIVE,
        reason="The run was interrupted; result until then: All 2 findings passed.",
        interrupted=True,
        coverage=(NotTested(check="exact", why="the run was interrupted"),),
        run="20260314-100000-int0",
    )


def on_the_cpu() -> Report:
    only = Gpu(uuid="cpu-0", index=0, name="CPU", serial=Unknown("a CPU has none", by_design=True))
    findings = [
        finding(
            "gemm",
            only.uuid,
            Grade.INCONCLUSIVE,
            metric="fp32",
            code="gemm-no-yardstick",
            value=0.081,
            unit="TFLOP/s",
            samples=(0.08, 0.081, 0.082),
            method="gemm/mm/n512/normal",
            action=Remedy.NONE,
            message="fp32 0.081 TFLOP/s cannot be judged: nothing is known of a CPU.",
        ),
        finding("exact", only.uuid, metric="fp32", message="0 of 1,048,576 elements differ."),
        finding("training", only.uuid, metric="loss", message="The loss fell by 64 %."),
    ]
    return report(
        [only],
        findings,
        device="cpu",
        verdict=Grade.INCONCLUSIVE,
        reason="This ran on the CPU, so no GPU was tested. Result of the checks: INCONCLUSIVE.",
        run="20260314-101500-c0c0",
        expected=None,
    )


def empty() -> Report:
    return report(
        [],
        [],
        reason="Nothing was tested.",
        machine=Machine(node="node-07", gpus=Unknown("the driver did not respond within 10 s")),
        run="20260314-103000-0000",
        expected=8,
    )


def hostile() -> Report:
    """Names and messages from outside that try to be markup, log lines and formulas."""
    only = gpu(0, name=EVIL, serial=EVIL)
    found = finding("gemm", only.uuid, Grade.FAIL, metric=EVIL, code=EVIL, message=f"={EVIL}", value=math.pi, unit=EVIL)
    return report([only], [found], node=f"node{EVIL}", run="20260314-104500-e011", reason=EVIL)


EXAMPLES = {
    "one good GPU": one_good_gpu,
    "eight GPUs": eight_gpus,
    "interrupted": interrupted,
    "on the CPU": on_the_cpu,
    "empty": empty,
    "hostile": hostile,
}


def record(check: str, who: str, result: Mapping[str, Any]) -> dict[str, Any]:
    answer = {"type": "done", "result": dict(result), "seconds": 1.0, "busy_s": 0.9}
    return {"check": check, "who": who, "params": {}, "again": False, "answer": answer}


def broken_record(check: str, who: str, words: str) -> dict[str, Any]:
    answer = {"type": "broken", "kind": "failed", "words": words, "seconds": 1.0}
    return {"check": check, "who": who, "params": {}, "again": False, "answer": answer}


def throughput(world: int) -> dict[str, Any]:
    return {
        "model": "resnet50",
        "world_size": world,
        "batch_size_per_gpu": 32,
        "global_batch_size": 32 * world,
        "total_time_seconds": 2.4,
        "average_step_time_seconds": 0.024,
        "throughput_samples_per_second": 1333.3 * world,
        "total_samples": 3200 * world,
        "device": "cuda",
        "backend": "nccl",
        "nccl_overhead_ms": None,
        "gpu_utilization_pct": None,
        "avg_step_time_ms": 24.0,
        "parameters": 25557032,
        "data": "synthetic",
        "step_ms": [24.0 + 0.2 * math.sin(step) for step in range(100)],
    }


def readings(uuid: str, *, hot: bool = False) -> list[Reading]:
    checks = ("gemm", "memory_bandwidth", "copies", "exact", "training")
    found = []
    for place in range(112):
        at = place / 2
        busy = math.sin(at / 9) ** 2
        slowed = hot and 30 < at < 46
        found.append(
            Reading(
                uuid=uuid,
                at=at,
                check=checks[min(int(at / 12), 4)],
                sm_mhz=1980 - 240 * busy - (500 if slowed else 0),
                memory_mhz=3201,
                power_w=140 + 540 * busy,
                temperature_c=36 + 30 * busy + (18 if hot else 0),
                utilisation=100 * busy,
                reasons=0x40 if slowed else 0x4 if busy > 0.9 else 0,
                pcie_generation=5,
                pcie_width=16,
            )
        )
    return found


def replace(one: Report, **more: Any) -> Report:
    return msgspec.structs.replace(one, **more)


def _exact(one: Gpu) -> Finding:
    if one.index != 5:
        return finding("exact", one.uuid, metric="bf16", message="0 of 2.7e9 elements differ.")
    return finding(
        "exact",
        one.uuid,
        Grade.FAIL,
        metric="bf16",
        code="exact-mismatch",
        message="GPU 5 computes wrong: 3 of 2.7e9 elements differ in bf16, the first at row 4711, column 42.",
        action=Remedy.REPLACE_GPU,
        evidence={"where": [{"row": 4711, "col": 42, "got": 96.0, "want": 97.0}]},
    )


def _health(one: Gpu) -> Finding:
    if one.index != 6:
        return finding("health", one.uuid, message="No error was counted.")
    return finding(
        "health",
        one.uuid,
        Grade.WARN,
        code="health-persistence-off",
        message="Persistence is off, so the driver unloads between uses. Switch it on: nvidia-smi -pm 1.",
        action=Remedy.CHECK_CONFIG,
    )


def _tally(uuid: str, grade: Grade, findings: Sequence[Finding]) -> GpuSummary:
    first = next((f.message for f in findings if f.gpu == uuid and f.verdict is grade), "Nothing was tested.")
    return GpuSummary(gpu=uuid, verdict=grade, reason=first, busy=0.83)


def _links(gpus: Sequence[Gpu]) -> dict[str, dict[str, str]]:
    return {one.uuid: {other.uuid: "nvlink" for other in gpus if other is not one} for one in gpus}


def _power() -> tuple[Power, ...]:
    return (
        Power(check="gemm", metric="bf16", fails_at=0.05, warns_at=0.03, by="peers"),
        Power(check="gemm", metric="fp32", fails_at=None, warns_at=0.05, by="history"),
    )


def _training() -> dict[str, Any]:
    run = {"loss_start": 1.44, "loss_end": 0.41, "fall": 0.71, "hash": "00ff", "steps": 32, "seconds": 0.2}
    return {"runs": [run, run], "equal": True, "deterministic": True}


def _ranks(world: int) -> list[dict[str, Any]]:
    found = []
    rng = random.Random(5)
    for rank in range(world):
        results = [
            {
                "op": op,
                "bytes": 2**power,
                "rounds": 2 * world,
                "busbw": [top * 2**power / (2**power + 2**25) * rng.gauss(1, 0.01) for _ in range(3)],
                "seconds": [0.01, 0.01, 0.01],
                "wrong": 0,
                "where": [],
            }
            for op, top in (("all_reduce", 480), ("all_gather", 362), ("all_to_all", 330))
            for power in range(13, 34)
        ]
        whole = {"rank": rank, "world": world, "backend": "nccl", "results": results, "variant": "default"}
        found.append(record("collectives", str(rank), whole))
        late = 3.1 if rank == 3 else 0
        steps = [24 + late * (step > 20) + rng.gauss(0, 0.15) for step in range(100)]
        found.append(record("throughput", str(rank), {**throughput(world), "step_ms": steps}))
        ddp = {
            "rank": rank,
            "world": world,
            "epochs": 2,
            "batch_size": 256,
            "steps": 32,
            "loss_start": 1.4,
            "loss_end": 0.6,
        }
        found.append(record("ddp", str(rank), {**ddp, "hashes_equal": True}))
    pairs = [
        {"from": a, "to": b, "gbps": [390 * rng.gauss(1, 0.01) * (0.5 if {a, b} == {1, 4} else 1)], "wrong": 0}
        for a in range(world)
        for b in range(world)
        if a != b
    ]
    return [*found, record("links", "0", {"pairs": pairs})]


def replace_reading(one: Reading, **more: Any) -> Reading:
    return msgspec.structs.replace(one, **more)
