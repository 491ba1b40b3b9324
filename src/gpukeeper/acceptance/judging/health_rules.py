"""What driver and kernel may report about a GPU, and its severity: data for checks/health.py.

Where the figures come from: DCGM (replays, corrected errors), NVIDIA's limits for row remapping and page retirement,
gpud and AzNHC; a state or counter that a model does not have is simply not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.grade import Grade


@dataclass(frozen=True)
class StateRule:
    """A state that is bad by itself. `bad` is called only for known values."""

    state: str
    bad: Callable[[object], bool]
    grade: Grade
    code: str
    words: str
    remedy: Remedy


@dataclass(frozen=True)
class LevelRule:
    """A counter that is bad if it is this high before anything ran. None: there is no such grade."""

    counter: str
    fail: int | None
    warn: int | None
    code: str
    words: str
    remedy: Remedy


@dataclass(frozen=True)
class RiseRule:
    """A counter that is bad when it rises. `per_second`: the limits are of the rise in a second"
    " (None: of the rise)."""

    counter: str
    fail: float | None
    warn: float | None
    code: str
    words: str
    remedy: Remedy
    per_second: bool = False


def _is(wanted: object) -> Callable[[object], bool]:
    return lambda value: value == wanted


STATES = (
    StateRule(
        "remap_failed",
        _is(True),
        Grade.FAIL,
        "remap-failed",
        "a bad memory row could not be replaced. Replace the GPU",
        Remedy.REPLACE_GPU,
    ),
    StateRule(
        "remap_pending",
        _is(True),
        Grade.FAIL,
        "remap-pending",
        "bad memory rows are replaced at the next reset. Reset the GPU, then test again",
        Remedy.RESET_GPU,
    ),
    StateRule(
        "retire_pending",
        _is(True),
        Grade.FAIL,
        "retire-pending",
        "bad memory pages are retired at the next reset. Reset the GPU, then test again",
        Remedy.RESET_GPU,
    ),
    StateRule(
        "sram_threshold",
        _is(True),
        Grade.FAIL,
        "sram-worn",
        "its SRAM has more uncorrectable errors than the vendor allows. Replace the GPU",
        Remedy.REPLACE_GPU,
    ),
    StateRule(
        "repair_needed",
        _is(True),
        Grade.FAIL,
        "repair-needed",
        "the driver reports that its memory needs repair or cannot be repaired. Reset it; if it persists, replace it",
        Remedy.REPLACE_GPU,
    ),
    StateRule(
        "inforom_ok",
        _is(False),
        Grade.FAIL,
        "inforom-corrupt",
        "its InfoROM is corrupt, so its counters cannot be trusted. Contact the vendor",
        Remedy.CONTACT_VENDOR,
    ),
    StateRule(
        "ecc_enabled",
        _is(False),
        Grade.FAIL,
        "ecc-off",
        "memory error correction (ECC) is off. Turn it on: nvidia-smi -e 1, then reset or reboot",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "persistence",
        _is(False),
        Grade.WARN,
        "persistence-off",
        "persistence mode is off, so the first use after idle time is slow. Turn it on: nvidia-smi -pm 1, or start"
        " nvidia-persistenced",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "compute_mode",
        _is("prohibited"),
        Grade.INCONCLUSIVE,
        "compute-prohibited",
        "its compute mode prohibits all processes. To allow them: nvidia-smi -c DEFAULT",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "compute_mode",
        lambda mode: str(mode).startswith("exclusive"),
        Grade.WARN,
        "compute-exclusive",
        "its compute mode allows only one process at a time. Unless this is intended: nvidia-smi -c DEFAULT",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_state",
        lambda state: state in (1, 2),
        Grade.FAIL,
        "fabric-not-ready",
        "it has not joined its NVLink fabric. Start the fabric manager version that matches the driver",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_status",
        lambda status: isinstance(status, int) and status != 0,
        Grade.FAIL,
        "fabric-failed",
        "joining its NVLink fabric failed. Check the fabric manager's log",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_health",
        _is(2),
        Grade.FAIL,
        "fabric-unhealthy",
        "the driver reports its NVLink fabric as unhealthy. Check the fabric manager's log, then the links",
        Remedy.RESEAT_OR_CABLE,
    ),
    StateRule(
        "fabric_health",
        _is(3),
        Grade.WARN,
        "fabric-limited",
        "its NVLink fabric runs with limited capacity",
        Remedy.WATCH,
    ),
)

LEVELS = (
    LevelRule(
        "ecc_uncorrected_volatile",
        1,
        None,
        "ecc-uncorrected",
        "uncorrected memory errors since its last reset. Reset it and test again; if they recur, replace it",
        Remedy.RESET_GPU,
    ),
    LevelRule(
        "ecc_uncorrected_aggregate",
        None,
        1,
        "ecc-uncorrected-ever",
        "uncorrected memory errors in its lifetime. On a new GPU contact the vendor",
        Remedy.WATCH,
    ),
    LevelRule(
        "sram_uncorrected_aggregate",
        5,
        1,
        "sram-uncorrected",
        "uncorrected SRAM errors in its lifetime. Replace it if there are more than 4",
        Remedy.REPLACE_GPU,
    ),
    LevelRule(
        "remapped_uncorrectable",
        512,
        1,
        "rows-replaced",
        "memory rows replaced after uncorrected errors. On a new GPU contact the vendor; the maximum is 512",
        Remedy.WATCH,
    ),
    LevelRule(
        "retired_pages",
        63,
        15,
        "pages-retired",
        "memory pages retired. Replace it if there are 63 or more",
        Remedy.REPLACE_GPU,
    ),
)

RISES = (
    RiseRule(
        "ecc_uncorrected_volatile",
        1,
        None,
        "ecc-uncorrected-rose",
        "uncorrected memory errors. Take it out of service, reset it, and test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "ecc_uncorrected_aggregate",
        1,
        None,
        "ecc-uncorrected-rose",
        "uncorrected memory errors. Take it out of service, reset it, and test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "ecc_corrected_volatile",
        None,
        10 / 60,
        "ecc-corrected-often",
        "corrected memory errors, more than 10 per minute. Compare it with its peers",
        Remedy.WATCH,
        per_second=True,
    ),
    RiseRule(
        "remapped_uncorrectable",
        1,
        None,
        "rows-replaced-rose",
        "memory rows to be replaced. Reset it, and test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "remapped_correctable",
        1,
        None,
        "rows-replaced-rose",
        "memory rows to be replaced. Reset it, and test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "retired_pages",
        1,
        None,
        "pages-retired-rose",
        "memory pages to be retired. Reset it, and test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "pcie_fatal",
        1,
        None,
        "pcie-errors",
        "fatal PCIe errors. Reseat it, check riser and slot",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "pcie_nonfatal",
        1,
        None,
        "pcie-errors",
        "PCIe errors that lost data. Reseat it, check riser and slot",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "pcie_replays",
        81,
        1,
        "pcie-replays",
        "PCIe replays. More than 80 in a test indicate a bad contact: reseat it",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_recovery_failed",
        1,
        None,
        "nvlink-recovery",
        "NVLinks that failed and did not recover. Reseat the board",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_recovery",
        1,
        None,
        "nvlink-recovery",
        "NVLinks that failed and recovered. Reseat the board",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_replay",
        100,
        1e-9,
        "nvlink-replays",
        "NVLink replays. More than 100 per second indicate a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "nvlink_crc_flit",
        100,
        1e-9,
        "nvlink-crc",
        "NVLink checksum errors. More than 100 per second indicate a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "nvlink_crc_data",
        100,
        1e-9,
        "nvlink-crc",
        "NVLink checksum errors. More than 100 per second indicate a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "violation_thermal_ns",
        0.05e9,
        0.01e9,
        "thermal-violation",
        "thermal throttling for more than 1 % of the time. Check its cooling",
        Remedy.CHECK_CONFIG,
        per_second=True,
    ),
    RiseRule(
        "violation_reliability_ns",
        0.05e9,
        0.01e9,
        "reliability-violation",
        "reliability throttling for more than 1 % of the time. Contact the vendor",
        Remedy.CONTACT_VENDOR,
        per_second=True,
    ),
)
