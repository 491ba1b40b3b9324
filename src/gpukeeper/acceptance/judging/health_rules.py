"""What driver and kernel may say of a GPU and how bad that is: data for checks/health.py.

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
    """A state that is bad as it is. `bad` is only asked about what is known."""

    state: str
    bad: Callable[[object], bool]
    grade: Grade
    code: str
    words: str
    remedy: Remedy


@dataclass(frozen=True)
class LevelRule:
    """A counter that is bad when it stands this high before anything ran. None: that grade is not given."""

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
        "bad memory rows wait for a reset to be replaced. Reset the GPU, then test again",
        Remedy.RESET_GPU,
    ),
    StateRule(
        "retire_pending",
        _is(True),
        Grade.FAIL,
        "retire-pending",
        "bad memory pages wait for a reset to be retired. Reset the GPU, then test again",
        Remedy.RESET_GPU,
    ),
    StateRule(
        "sram_threshold",
        _is(True),
        Grade.FAIL,
        "sram-worn",
        "its SRAM has more uncorrectable errors than the maker allows. Replace the GPU",
        Remedy.REPLACE_GPU,
    ),
    StateRule(
        "repair_needed",
        _is(True),
        Grade.FAIL,
        "repair-needed",
        "the driver says that its memory is to be repaired, or beyond repair. Reset it; if that stays, replace it",
        Remedy.REPLACE_GPU,
    ),
    StateRule(
        "inforom_ok",
        _is(False),
        Grade.FAIL,
        "inforom-corrupt",
        "its InfoROM is corrupt, so its counters cannot be trusted. Ask the vendor",
        Remedy.CONTACT_VENDOR,
    ),
    StateRule(
        "ecc_enabled",
        _is(False),
        Grade.FAIL,
        "ecc-off",
        "error correction of its memory is off. Turn it on: nvidia-smi -e 1, then reset or reboot",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "persistence",
        _is(False),
        Grade.WARN,
        "persistence-off",
        "persistence mode is off, so every first use is slow. Turn it on: nvidia-smi -pm 1, or start"
        " nvidia-persistenced",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "compute_mode",
        _is("prohibited"),
        Grade.INCONCLUSIVE,
        "compute-prohibited",
        "its compute mode lets nobody in. Set it: nvidia-smi -c DEFAULT",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "compute_mode",
        lambda mode: str(mode).startswith("exclusive"),
        Grade.WARN,
        "compute-exclusive",
        "its compute mode lets in only one process at a time. Set it, unless you mean it: nvidia-smi -c DEFAULT",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_state",
        lambda state: state in (1, 2),
        Grade.FAIL,
        "fabric-not-ready",
        "it has not joined its NVLink fabric. Start the fabric manager of the driver's version",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_status",
        lambda status: isinstance(status, int) and status != 0,
        Grade.FAIL,
        "fabric-failed",
        "joining its NVLink fabric failed. See the fabric manager's log",
        Remedy.CHECK_CONFIG,
    ),
    StateRule(
        "fabric_health",
        _is(2),
        Grade.FAIL,
        "fabric-unhealthy",
        "the driver calls its NVLink fabric unhealthy. See the fabric manager's log, then the links",
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
        "memory errors that could not be corrected since its last reset. Reset it and test again; if"
        " they come back, replace it",
        Remedy.RESET_GPU,
    ),
    LevelRule(
        "ecc_uncorrected_aggregate",
        None,
        1,
        "ecc-uncorrected-ever",
        "memory errors that could not be corrected in its life. On a new GPU ask the vendor",
        Remedy.WATCH,
    ),
    LevelRule(
        "sram_uncorrected_aggregate",
        5,
        1,
        "sram-uncorrected",
        "uncorrectable SRAM errors in its life. More than 4: replace it",
        Remedy.REPLACE_GPU,
    ),
    LevelRule(
        "remapped_uncorrectable",
        512,
        1,
        "rows-replaced",
        "memory rows replaced after errors that could not be corrected. On a new GPU ask the vendor; 512 are its end",
        Remedy.WATCH,
    ),
    LevelRule(
        "retired_pages",
        63,
        15,
        "pages-retired",
        "memory pages retired. From 63 on replace it",
        Remedy.REPLACE_GPU,
    ),
)

RISES = (
    RiseRule(
        "ecc_uncorrected_volatile",
        1,
        None,
        "ecc-uncorrected-rose",
        "memory errors that could not be corrected. Take it out of use, reset it, test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "ecc_uncorrected_aggregate",
        1,
        None,
        "ecc-uncorrected-rose",
        "memory errors that could not be corrected. Take it out of use, reset it, test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "ecc_corrected_volatile",
        None,
        10 / 60,
        "ecc-corrected-often",
        "corrected memory errors, more than 10 in a minute. Compare it with its peers",
        Remedy.WATCH,
        per_second=True,
    ),
    RiseRule(
        "remapped_uncorrectable",
        1,
        None,
        "rows-replaced-rose",
        "memory rows to be replaced. Reset it, test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "remapped_correctable",
        1,
        None,
        "rows-replaced-rose",
        "memory rows to be replaced. Reset it, test again",
        Remedy.RESET_GPU,
    ),
    RiseRule(
        "retired_pages",
        1,
        None,
        "pages-retired-rose",
        "memory pages to be retired. Reset it, test again",
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
        "PCIe packets sent again. More than 80 in a test is a bad contact: reseat it",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_recovery_failed",
        1,
        None,
        "nvlink-recovery",
        "NVLinks that did not come back. Reseat the board",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_recovery",
        1,
        None,
        "nvlink-recovery",
        "NVLinks that broke and came back. Reseat the board",
        Remedy.RESEAT_OR_CABLE,
    ),
    RiseRule(
        "nvlink_replay",
        100,
        1e-9,
        "nvlink-replays",
        "NVLink packets sent again. More than 100 in a second is a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "nvlink_crc_flit",
        100,
        1e-9,
        "nvlink-crc",
        "NVLink checksum errors. More than 100 in a second is a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "nvlink_crc_data",
        100,
        1e-9,
        "nvlink-crc",
        "NVLink checksum errors. More than 100 in a second is a bad link: reseat the board",
        Remedy.RESEAT_OR_CABLE,
        per_second=True,
    ),
    RiseRule(
        "violation_thermal_ns",
        0.05e9,
        0.01e9,
        "thermal-violation",
        "slowed down by heat for more than 1 % of the time. Check its cooling",
        Remedy.CHECK_CONFIG,
        per_second=True,
    ),
    RiseRule(
        "violation_reliability_ns",
        0.05e9,
        0.01e9,
        "reliability-violation",
        "slowed down to protect the chip for more than 1 % of the time. Ask the vendor",
        Remedy.CONTACT_VENDOR,
        per_second=True,
    ),
)
