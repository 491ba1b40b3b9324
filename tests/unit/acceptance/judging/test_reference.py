"""The table of figures and its linter (C2.2, C2.3). Others' were wrong by units and digits; ours is checked."""

from __future__ import annotations

import re

import msgspec
import pytest

from gpukeeper.acceptance.judging import reference
from gpukeeper.acceptance.judging.reference import ROWS, Origin, ReferenceRow, lint
from gpukeeper.model.gpu import Gpu
from gpukeeper.model.unknown import Unknown

NAMES = (
    *("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA B200"),
    *("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
    *("NVIDIA A100-PCIE-40GB", "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA A10", "NVIDIA A10G", "Tesla T4"),
    *("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", "NVIDIA RTX A6000", "CPU", "Tesla V100-SXM2-16GB"),
    *("Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090 Ti"),
)
GOOD = ReferenceRow(
    gpu="NVIDIA H200",
    check="gemm",
    metric="bf16",
    unit="TFLOP/s",
    method="gemm/*",
    floor=690,
    warn=740,
    reference=780,
    ceiling=1009,
    source="measured",
    origin=Origin.MEASURED,
)
BAND = {"check": "memory_bandwidth", "metric": "copy", "unit": "GB/s", "method": "copy/read+write"}


def gpu(name: str, **more: object) -> Gpu:
    return Gpu(uuid="GPU-0", index=0, name=name, **more)


def changed(**values: object) -> ReferenceRow:
    return msgspec.structs.replace(GOOD, **values)


def test_the_table_has_nothing_that_the_linter_complains_about() -> None:
    assert lint(ROWS, NAMES) == []


def test_a_good_row_is_left_alone() -> None:
    assert lint([GOOD], NAMES) == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        # DCGM: 2,333 where 2,333,000 MB/s was meant. It cannot fail.
        (changed(**BAND, floor=2.333, warn=None, reference=None, ceiling=4896), "0.048 % of the ceiling"),
        # DCGM's L40, a tenth of what was meant.
        (changed(**BAND, gpu="NVIDIA L40", floor=49.05, warn=None, reference=None, ceiling=881), "detects nothing"),
        # DCGM's A100: from a "measured" 1,830 GB/s, above the card's 1,555.
        (changed(**BAND, floor=1372, warn=None, reference=1830, ceiling=1586), "reference 1830 is better than ceiling"),
        # The AWS suite asks for 800 GB/s of a machine whose wires carry 700.
        (changed(metric="all_reduce", unit="GB/s", floor=800, warn=None, reference=None, ceiling=700), "check units"),
        # AzNHC's MI300X: a floor above a published healthy result.
        (changed(metric="all_reduce", unit="GB/s", floor=314, warn=None, reference=313, ceiling=448), "check units"),
        (changed(unit="MB/s"), "unit 'MB/s' is unknown"),
        (changed(source=" "), "has no source"),
        (changed(warn=650), "floor 690 is better than warn 650"),
        (changed(floor=None, warn=None, reference=None, ceiling=None), "it has no value"),
        (changed(floor=-1), "floor is -1, which is not a number"),
        (changed(ceiling=float("nan")), "which is not a number"),
        (changed(ceiling=None), "floor without a ceiling"),
        (changed(origin=Origin.ESTIMATE), "may only warn"),
        (changed(origin=Origin.LEGACY), "may only warn"),
        (changed(unit="us", lower_is_better=True, floor=10, warn=30, reference=None, ceiling=None), "check units"),
    ],
)  # fmt: skip
def test_the_linter_finds(row: ReferenceRow, complaint: str) -> None:
    found = lint([row])
    assert len(found) == 1, found
    assert complaint in found[0]


def test_a_waiver_lets_a_low_floor_pass() -> None:
    assert lint([changed(floor=100, waiver="nobody has measured this model")]) == []


def test_two_rows_about_one_gpu_are_one_too_many() -> None:
    found = lint([GOOD, changed(gpu="NVIDIA H.*")], NAMES)
    assert len(found) == 1
    assert "duplicate of another row for NVIDIA H200" in found[0]


def test_a_pattern_is_matched_against_the_whole_name() -> None:
    assert reference.limits(gpu("NVIDIA H200"), "gemm", "bf16", "gemm/mm/n8192/normal/burst").floor == 690
    for other in ("NVIDIA H200 NVL", "NVIDIA L40G", "NVIDIA A10G", "NVIDIA H200 MIG 1g.18gb"):
        assert reference.limits(gpu(other), "gemm", "bf16", "gemm/mm/n8192/normal/burst").floor is None, other


def test_a_slice_and_a_gpu_without_a_name_have_no_floors() -> None:
    sliced = gpu("NVIDIA H200", part_of="GPU-9", profile="1g.18gb")
    assert reference.limits(sliced, "gemm", "bf16", "gemm/mm/n8192/normal/burst").floor is None
    nameless = Gpu(uuid="GPU-0", index=0, name=Unknown("silence"))
    assert reference.limits(nameless, "gemm", "bf16", "gemm/mm/n8192/normal/burst").floor is None


def test_ones_own_rows_come_first() -> None:
    own = [changed(floor=700, source="our own fleet")]
    found = reference.limits(gpu("NVIDIA H200"), "gemm", "bf16", "gemm/mm/n8192/normal/burst", own)
    assert (found.floor, found.source) == (700, "our own fleet (measured)")
    assert reference.limits(gpu("NVIDIA H200"), "copies", "h2d", "copy/pinned", own).floor == pytest.approx(47.25)


def test_a_name_that_is_no_pattern_is_reported() -> None:
    """Else the run ends with a traceback when the first figure is judged."""
    for gpu_name in ("NVIDIA (", "a{99999999999}"):
        assert "is not a valid regular expression" in reference.lint([changed(gpu=gpu_name)])[0]


@pytest.mark.parametrize(("name", "may"), [("Tesla T4", False), ("NVIDIA L4", False), ("NVIDIA H200", True)])
def test_copies_inside_gddr_only_warn_until_a_user_measured_them(name: str, may: bool) -> None:
    """A healthy T4 reads 244 GB/s by DCGM's method."""
    for check, metric in (("memory_bandwidth", "copy"), ("copies", "d2d")):
        assert reference.limits(gpu(name), check, metric, "copy/read+write").may_fail is may


def test_ones_own_rows_are_read_strictly() -> None:
    plain = msgspec.to_builtins(GOOD)
    assert reference.read([plain]) == (GOOD,)
    with pytest.raises(msgspec.ValidationError, match="floors"):
        reference.read([plain | {"floors": 1}])
    with pytest.raises(msgspec.ValidationError, match="guess"):
        reference.read([plain | {"origin": "guess"}])


def test_another_method_gives_limits_that_name_theirs() -> None:
    found = reference.limits(gpu("NVIDIA H200"), "gemm", "bf16", "gemm/mm/n4096/normal/burst")
    assert found.method == "gemm/*/n8192/*/burst"


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "sgemm", "batched"])
def test_every_figure_of_a_quick_run_on_an_h200_has_a_yardstick(dtype: str) -> None:
    """Alone on a machine and for the first time, only the table can tell."""
    method = {"sgemm": "gemm/sgemm/memory/normal", "batched": "gemm/bmm/n1024/normal"}.get(
        dtype, "gemm/mm/n8192/normal/burst"
    )
    found = reference.limits(gpu("NVIDIA H200"), "gemm", dtype, method)
    assert found.floor is not None
    assert found.ceiling is not None
    copies = ("memory_bandwidth", "copy", "copy/read+write"), ("copies", "d2d", "copy/read+write")
    for check, metric, how in (*copies, ("copies", "h2d", "copy/pinned"), ("copies", "d2h", "copy/pinned")):
        assert reference.limits(gpu("NVIDIA H200"), check, metric, how).floor is not None


@pytest.mark.parametrize(
    ("metric", "figure"),
    [("bf16", 765), ("bf16", 792), ("tf32", 392), ("fp8", 1491), ("int8", 906)],
)
def test_what_was_measured_on_a_healthy_h200_passes(metric: str, figure: float) -> None:
    found = reference.limits(gpu("NVIDIA H200"), "gemm", metric, "gemm/mm/n8192/normal/burst")
    assert found.warn is not None
    assert found.ceiling is not None
    assert found.warn < figure < found.ceiling
    copy = reference.limits(gpu("NVIDIA H200"), "memory_bandwidth", "copy", "copy/read+write")
    assert copy.warn is not None
    assert copy.warn < 4260


def figures(check: str, metric: str) -> set[float]:
    rows = [row for row in ROWS if (row.check, row.metric) == (check, metric)]
    values = {getattr(row, name) for row in rows for name in ("floor", "warn", "reference", "ceiling")}
    return {value for value in values if value is not None}


def test_every_old_figure_is_a_row() -> None:
    """C2.2: H100 > 400, fail < 350; A100 280–330; HDR 150 (200 claimed); 100G > 10; 30 / 50 / 100 µs.
    C2.3: scaling floors. What turned out to be wrong is kept, and says why it is not used."""
    assert {400, 350, 280, 330, 150, 200, 10} <= figures("collectives", "all_reduce")
    assert {30, 50, 100} <= figures("collectives", "latency")
    assert {0.95, 0.90, 0.85, 0.80} <= figures("throughput", "scaling")
    shelved = [row for row in ROWS if row.superseded]
    assert {row.reference for row in shelved} == {330, 200}
    assert all(len(row.superseded) > 20 for row in shelved)


def test_old_and_estimated_figures_only_warn() -> None:
    for row in ROWS:
        if row.origin in (Origin.LEGACY, Origin.ESTIMATE):
            assert row.limits().may_fail is False, row
    assert not any(row.check == "throughput" and row.metric != "scaling" for row in ROWS), "training: peers and history"


@pytest.mark.parametrize(
    ("name", "fp32", "memory"),
    [
        ("Tesla V100-SXM2-16GB", 15.7, 900),
        ("Tesla V100-SXM2-32GB", 15.7, 900),
        ("Tesla V100-PCIE-32GB", 14.0, 900),
        ("NVIDIA GeForce RTX 3090", 35.6, 936),
        ("NVIDIA L40", 90.5, 864),
    ],
)
def test_models_of_older_documents_have_figures_that_only_warn(name: str, fp32: float, memory: float) -> None:
    """C2.3: nobody measured one by our methods; a figure below its floor says so and fails nobody."""
    mine = [row for row in ROWS if re.fullmatch(row.gpu, name) and row.gpu != ".*"]
    assert {row.check for row in mine} >= {"gemm", "memory_bandwidth", "copies"}
    assert not any(row.limits().may_fail for row in mine)
    product = reference.limits(gpu(name), "gemm", "fp32", "gemm/mm/n8192/normal/burst")
    assert (product.floor, product.may_fail) == (pytest.approx(0.45 * fp32), False)
    copy = reference.limits(gpu(name), "memory_bandwidth", "copy", "copy/read+write")
    assert copy.ceiling is not None
    assert memory <= copy.ceiling <= 1.15 * memory
