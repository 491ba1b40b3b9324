"""The table of figures: a row for each model, check and metric. Written down once, by model; see reference.py.

Vendor peaks are dense figures; links count one direction. What only others measured, or by another method, may warn
and not fail. Training speed has no rows: no figure of it is known that was not multiplied by the number of GPUs twice,
so it is held against peers and history alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gpukeeper.acceptance.record import Thresholds
from gpukeeper.model.unknown import direct

replace = msgspec.structs.replace


@direct
class Origin(StrEnum):
    """Where a value comes from. An estimate, and a legacy value that was not measured again, may only warn."""

    MEASURED = "measured"
    VENDOR = "vendor"
    DERIVED = "derived"
    ESTIMATE = "estimate"
    LEGACY = "legacy"


MAY_FAIL = frozenset({Origin.MEASURED, Origin.VENDOR, Origin.DERIVED})


class ReferenceRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the table. `gpu` is matched against the whole name; `method` may hold `*`, empty is any."""

    gpu: str
    check: str
    metric: str
    unit: str
    source: str
    origin: Origin
    method: str = ""
    floor: float | None = None
    warn: float | None = None
    reference: float | None = None
    ceiling: float | None = None
    may_fail: bool = True
    lower_is_better: bool = False
    waiver: str = ""  # why a floor outside of what the linter allows is right
    superseded: str = ""  # why it is kept for the record only

    def limits(self) -> Thresholds:
        return Thresholds(
            floor=self.floor,
            warn=self.warn,
            reference=self.reference,
            ceiling=self.ceiling,
            method=self.method,
            source=f"{self.source} ({self.origin})",
            may_fail=self.may_fail and self.origin in MAY_FAIL,
        )


@dataclass(frozen=True)
class GpuModel:
    """A GPU as its maker describes it. TFLOP/s by dtype; GB/s of memory and of its PCIe link in one direction."""

    name: str  # a regular expression for the whole of it
    peaks: Mapping[str, float]
    memory: float
    link: float
    stacked: bool = True  # HBM; else GDDR
    boost: float = 1.02  # how far above its rated peak it can go: consumer cards clock higher than rated
    floors: Mapping[str, float] = field(default_factory=dict)  # TFLOP/s, of our own kernel
    measured: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # TFLOP/s by dtype, and the source
    only_warns: bool = False  # no measurement by our methods exists


HOPPER = {"fp32": 67.0, "tf32": 495.0, "bf16": 989.0, "fp16": 989.0, "fp8": 1979.0, "int8": 1979.0}
AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0, "int8": 624.0}
GEN3, GEN4, GEN5 = 15.8, 31.5, 63.0
OURS = "measured on three H200s, torch 2.11, CUDA 13, in bursts"
MAMF = "ml-engineering's best shape (MAMF)"
QUICKSCAN = "Microsoft's quickscan baseline"
_A100_MEASURED = {"bf16": (265.9, QUICKSCAN), "fp16": (280.4, QUICKSCAN), "tf32": (128.2, QUICKSCAN)} | {
    "fp32": (18.35, QUICKSCAN),
    "int8": (473.0, QUICKSCAN),
}

MODELS = (
    GpuModel(
        name="NVIDIA H200",
        peaks=HOPPER,
        memory=4800,
        link=GEN5,
        floors={"bf16": 690},
        measured={"bf16": (780, OURS), "fp16": (755, OURS), "tf32": (409, OURS), "fp32": (51.2, OURS)}
        | {"fp8": (1450, OURS), "int8": (955, OURS)},
    ),
    GpuModel(
        name="NVIDIA H100( SXM5)? 80GB HBM3",
        peaks=HOPPER,
        memory=3350,
        link=GEN5,
        floors={"bf16": 690},
        measured={"bf16": (794.5, MAMF), "fp8": (1402, MAMF)},
    ),
    GpuModel(
        name="NVIDIA H100 PCIe",
        peaks={"fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0},
        memory=2000,
        link=GEN5,
    ),
    GpuModel(
        name="(NVIDIA )?A100-SXM4-40GB",
        peaks=AMPERE,
        memory=1555,
        link=GEN4,
        floors={"bf16": 235},
        measured=_A100_MEASURED,
    ),
    GpuModel(
        name="(NVIDIA )?A100-SXM4-80GB",
        peaks=AMPERE,
        memory=2039,
        link=GEN4,
        floors={"bf16": 235},
        measured=_A100_MEASURED,
    ),
    GpuModel(
        name="(NVIDIA )?A100-PCIE-40GB",
        peaks=AMPERE,
        memory=1555,
        link=GEN4,
        floors={"bf16": 205},
        measured={"bf16": (252.9, MAMF)},
    ),
    GpuModel(
        name="NVIDIA A100 80GB PCIe",
        peaks=AMPERE,
        memory=1935,
        link=GEN4,
        floors={"bf16": 205},
        measured={"bf16": (252.9, MAMF)},
    ),
    GpuModel(
        name="NVIDIA B200",
        peaks={"fp32": 80.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        memory=8000,
        link=GEN5,
        boost=1.03,  # its memory clock gives 8.18 TB/s
        floors={"bf16": 1500},
        measured={"bf16": (1745, MAMF), "fp8": (3432, MAMF)},
    ),
    GpuModel(
        name="NVIDIA L4",
        peaks={"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.0},
        memory=300,
        link=GEN4,
        stacked=False,
    ),
    GpuModel(
        name="NVIDIA L40S",
        peaks={"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0},
        memory=864,
        link=GEN4,
        stacked=False,
    ),
    GpuModel(
        name="NVIDIA A10",
        peaks={"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0},
        memory=600,
        link=GEN4,
        stacked=False,
    ),
    GpuModel(name="Tesla T4|NVIDIA T4", peaks={"fp32": 8.1, "fp16": 65.0}, memory=320, link=GEN3, stacked=False),
    GpuModel(
        name="NVIDIA GeForce RTX 4090",
        peaks={"fp32": 82.6, "tf32": 82.6, "bf16": 165.0, "fp16": 165.0, "fp8": 330.0},
        memory=1008,
        link=GEN4,
        stacked=False,
        boost=1.15,
    ),
    # Models of older documents. Their figures there were counted twice, so these are the makers' peaks.
    GpuModel(
        name="(NVIDIA |Tesla )V100-SXM2-(16|32)GB(-LS)?",
        peaks={"fp32": 15.7, "fp16": 125.0},
        memory=900,
        link=GEN3,
        only_warns=True,
    ),
    GpuModel(
        name="(NVIDIA |Tesla )V100-PCIE-(16|32)GB",
        peaks={"fp32": 14.0, "fp16": 112.0},
        memory=900,
        link=GEN3,
        only_warns=True,
    ),
    GpuModel(
        name="NVIDIA GeForce RTX 3090",
        peaks={"fp32": 35.6, "tf32": 35.6, "bf16": 71.2, "fp16": 71.2},
        memory=936,
        link=GEN4,
        stacked=False,
        boost=1.15,
        only_warns=True,
    ),
    GpuModel(
        name="NVIDIA L40",
        peaks={"fp32": 90.5, "tf32": 90.5, "bf16": 181.0, "fp16": 181.0, "fp8": 362.0},
        memory=864,
        link=GEN4,
        stacked=False,
        only_warns=True,
    ),
)

NORMAL = "gemm/*/n8192/*/burst"  # the size; kernel and data are fixed for each dtype
SANITY = 0.45  # of the peak, without a measurement
OTHERS = 0.85  # of what others measured, or one card of ours: a floor that only warns
OTHERS_WARN = 0.90
POINTS = 0.05  # of the peak, from failing to warning
COPY = {True: 0.82, False: 0.78}  # of the memory's peak: HBM, GDDR
H200_COPY = 4280  # GB/s, read and written, measured
LINK = 0.75  # of the link's line rate
SOME = 0.4  # of a wire: what a ring of few GPUs should still reach
LINK_USUAL = 0.87  # 55 of 63 GB/s on an H200


def gemm(model: GpuModel, dtype: str, metric: str = "", method: str = NORMAL) -> ReferenceRow:
    """`metric`: another product of that dtype, with another method; not measured yet."""
    peak = model.peaks[dtype]
    bare = ReferenceRow(
        gpu=model.name,
        check="gemm",
        metric=metric or dtype,
        unit="TFLOP/s",
        method=method,
        ceiling=model.boost * peak,
        source="vendor peak; not measured with this method",
        origin=Origin.ESTIMATE,
        may_fail=False,
    )
    usual, who = (None, "") if metric else model.measured.get(dtype, (None, ""))
    if not metric and dtype in model.floors:
        return replace(
            bare,
            floor=model.floors[dtype],
            warn=model.floors[dtype] + POINTS * peak,
            reference=usual,
            source=f"default floor for GEMM 8192³ on normal data; reference: {who}",
            origin=Origin.MEASURED,
            may_fail=True,
        )
    if usual is not None:
        why = "one source, so the floor is derived from its value and not from the peak"
        return replace(bare, floor=OTHERS * usual, warn=OTHERS_WARN * usual, reference=usual, source=who, waiver=why)
    return replace(bare, floor=SANITY * peak, waiver="a sanity floor until this model is measured")


def memory(model: GpuModel, check: str, metric: str) -> ReferenceRow:
    share = COPY[model.stacked]
    sure = check == "memory_bandwidth"  # the copies are small ones; only the large copy is known to the per cent
    return ReferenceRow(
        gpu=model.name,
        check=check,
        metric=metric,
        unit="GB/s",
        method="copy/read+write",
        floor=share * model.memory,
        warn=(share + POINTS) * model.memory if sure else None,
        reference=H200_COPY if sure and model.name == "NVIDIA H200" else None,
        ceiling=model.boost * model.memory,
        source=f"{share} of the vendor's peak; copies reach 0.88 to 0.92 of it",
        origin=Origin.DERIVED,
        may_fail=model.stacked
        and not model.only_warns,  # no measurement of GDDR by this method exists; a healthy T4 reads 0.76 by DCGM's
    )


def link(model: GpuModel, way: str) -> ReferenceRow:
    return ReferenceRow(
        gpu=model.name,
        check="copies",
        metric=way,
        unit="GB/s",
        method="copy/pinned",
        floor=LINK * model.link,
        reference=LINK_USUAL * model.link,
        ceiling=1.02 * model.link,
        source=f"{LINK} of the link's line rate in one direction",
        origin=Origin.DERIVED,
        may_fail=model.stacked and not model.only_warns,  # small cards often sit in a slot with fewer lanes, by design
    )


def _of_one_gpu(model: GpuModel) -> tuple[ReferenceRow, ...]:
    return (
        *(gemm(model, dtype) for dtype in model.peaks),
        gemm(model, "fp32", "sgemm", "gemm/sgemm/*"),
        gemm(model, "fp32", "batched", "gemm/bmm/*"),
        memory(model, "memory_bandwidth", "copy"),
        memory(model, "copies", "d2d"),
        link(model, "h2d"),
        link(model, "d2h"),
    )


# At the power limit each card is a little different.
_LOADED = ReferenceRow(
    gpu="NVIDIA H200",
    check="stress",
    metric="speed",
    unit="TFLOP/s",
    method="stress/bf16/n8192/integers",
    floor=OTHERS * 730,
    warn=OTHERS_WARN * 730,
    reference=730,
    ceiling=1.02 * HOPPER["bf16"],
    source="four H200s showed 711 to 749, torch 2.11, CUDA 13, at their power limit of 700 W",
    origin=Origin.MEASURED,
    may_fail=False,
)

# Over several GPUs. NVSwitch machines of 8; a wire carries 300, 450 and 900 GB/s in one direction.
A100_SXM = "(NVIDIA )?A100-SXM4-(40|80)GB"
HOPPER_SXM = "NVIDIA H200|NVIDIA H100( SXM5)? 80GB HBM3"
B200 = "NVIDIA B200"
ANY = ".*"
ML_ENGINEERING = "ml-engineering, nccl-tests"


def busbw(gpu: str, op: str, count: int, usual: float, ceiling: float, **other: object) -> ReferenceRow:
    """Measured with other programs: it only warns, unless `other` overrides that."""
    bare = ReferenceRow(
        gpu=gpu,
        check="collectives",
        metric=op,
        unit="GB/s",
        method=f"busbw/nccl/n{count}/*/default/plateau",
        floor=OTHERS * usual,
        warn=OTHERS_WARN * usual,
        reference=usual,
        ceiling=ceiling,
        source=ML_ENGINEERING,
        origin=Origin.MEASURED,
        may_fail=False,
    )
    return replace(bare, **other)


def some(gpu: str, wire: float) -> ReferenceRow:
    """Of a machine with a number of GPUs that was never measured: a warning bound, from the link speed of one GPU."""
    return ReferenceRow(
        gpu=gpu,
        check="collectives",
        metric="all_reduce",
        unit="GB/s",
        method="busbw/nccl/n*/default/plateau",
        floor=SOME * wire,
        ceiling=2 * wire,
        source=f"{SOME} of the wire of {wire:g} GB/s; not measured with that many GPUs",
        origin=Origin.ESTIMATE,
        may_fail=False,
        waiver="an estimate that only warns; NVLink bridges and switches may double the wire",
    )


def over_fabric(fabric: str, **other: object) -> ReferenceRow:
    """Several machines: the method then names what is between them."""
    bare = ReferenceRow(
        gpu=ANY,
        check="collectives",
        metric="all_reduce",
        unit="GB/s",
        method=f"busbw/nccl/*/{fabric}/plateau",
        source="limit of the legacy kit",
        origin=Origin.LEGACY,
        may_fail=False,
        waiver="not measured with this method, so there is no ceiling",
    )
    return replace(bare, **other)


def latency(gpu: str, way: str, most_us: float) -> ReferenceRow:
    return ReferenceRow(
        gpu=gpu,
        check="collectives",
        metric="latency",
        unit="us",
        method=f"latency/nccl/*/{way}/*",
        warn=most_us,
        source="limit of the legacy kit",
        origin=Origin.LEGACY,
        may_fail=False,
        lower_is_better=True,
    )


def scaling(count: int, share: float) -> ReferenceRow:
    """Of what one GPU does, times their number. More than all of it was measured wrong."""
    return ReferenceRow(
        gpu=ANY,
        check="throughput",
        metric="scaling",
        unit="share",
        method=f"*/n{count}",
        floor=share,
        ceiling=1.05,
        source="limit of the legacy kit",
        origin=Origin.LEGACY,
        may_fail=False,
    )


def p2p(gpu: str, floor: float, usual: float | None, ceiling: float, source: str) -> ReferenceRow:
    return ReferenceRow(
        gpu=gpu,
        check="links",
        metric="p2p",
        unit="GB/s",
        method="p2p/copy",
        floor=floor,
        reference=usual,
        ceiling=ceiling,
        source=source,
        origin=Origin.MEASURED,
        may_fail=False,
    )


def _switched(model: GpuModel) -> bool:
    return any(word in model.name for word in ("SXM", "H200", "HBM3", "B200"))


_TOGETHER = (
    # 480 with the switch's help, 370 without: below 440 it is usually the fabric manager and not a link.
    busbw(
        HOPPER_SXM,
        "all_reduce",
        8,
        478,
        700,
        floor=350,
        warn=400,
        source="ml-engineering and AzNHC; fails below 350, warns below 400, the limits of the legacy kit",
        may_fail=True,
    ),
    busbw(HOPPER_SXM, "all_reduce", 4, 363, 540),
    busbw(HOPPER_SXM, "all_gather", 8, 361, 459),
    busbw(HOPPER_SXM, "reduce_scatter", 8, 363, 459),
    busbw(A100_SXM, "all_reduce", 8, 235, 306, warn=228, source="Microsoft's baseline; AzNHC requires 228"),
    busbw(
        A100_SXM,
        "all_reduce",
        8,
        330,
        340,
        floor=None,
        warn=280,
        source="280 to 330 in the legacy kit",
        origin=Origin.LEGACY,
        superseded="other sources measured 235 on such machines; 280 would warn about every healthy one",
    ),
    busbw(B200, "all_reduce", 8, 842, 1400),
    some(A100_SXM, 300),
    some(HOPPER_SXM, 450),
    some(B200, 900),
    *(some(model.name, model.link) for model in MODELS if not _switched(model)),
    over_fabric("ib-hdr", floor=150, reference=165, source="150 in the legacy kit; NVSentinel measured 164 to 169"),
    over_fabric(
        "ib-hdr",
        reference=200,
        source="claimed by the legacy kit",
        superseded="two machines with one HDR port for each GPU reach 165",
    ),
    over_fabric("ib-ndr400", floor=OTHERS * 386, reference=386, source="CoreWeave, 8 machines of 8 H100"),
    over_fabric("ethernet-100g", floor=10),
    latency(f"{A100_SXM}|{HOPPER_SXM}|{B200}", "default", 30),
    latency(ANY, "ib-*", 50),
    latency(ANY, "ethernet-*", 100),
    scaling(8, 0.95),
    scaling(16, 0.90),
    scaling(32, 0.85),
    scaling(64, 0.80),
    p2p(A100_SXM, OTHERS * 276, 276, 306, "nvbandwidth"),
    p2p(HOPPER_SXM, 335, None, 459, "AzNHC's floor"),
)

ROWS: tuple[ReferenceRow, ...] = (*(row for model in MODELS for row in _of_one_gpu(model)), _LOADED, *_TOGETHER)
