"""What driver and kernel may report about a GPU, and its severity: data for checks/health.py, Xids included.

Where the figures come from: DCGM (replays, corrected errors), NVIDIA's limits for row remapping and page retirement,
gpud and AzNHC. An Xid that is not listed is new or rare: it warns, since its meaning is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.gpu import Grade, Xid


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


@dataclass(frozen=True)
class XidMeaning:
    grade: Grade
    words: str
    remedy: Remedy


def _xids(grade: Grade, remedy: Remedy, words: Mapping[int, str]) -> dict[int, XidMeaning]:
    return {number: XidMeaning(grade, text, remedy) for number, text in words.items()}


# Isolate, or replace.
_BROKEN = _xids(
    Grade.FAIL,
    Remedy.REPLACE_GPU,
    {
        48: "an uncorrected memory error",
        64: "a bad memory row could not be replaced",
        79: "it fell off the bus",
        95: "an uncontained memory error, so other workloads may be corrupted",
        140: "an unrecoverable memory error",
        143: "its initialization failed",
        157: "a faulty unit could not be retired, since there are no spares",
        158: "a fatal timeout",
        167: "a fatal PCIe timeout",
        168: "less memory than expected",
        169: "its security micro-controller halted",
        171: "an uncorrectable memory error in DRAM (detail of Xid 48)",
        172: "an uncorrectable memory error in SRAM (detail of Xid 48)",
        173: "a fatal error",
    },
)
_CABLES = _xids(Grade.FAIL, Remedy.RESEAT_OR_CABLE, {54: "auxiliary power is not connected", 74: "an NVLink error"})
# Reset or reboot and test again; a second time: isolate.
_RESETS = _xids(
    Grade.FAIL,
    Remedy.RESET_GPU,
    {
        62: "its power micro-controller halted",
        109: "a context switch timed out",
        110: "a security fault",
        119: "timeout of its firmware (GSP)",
        120: "an error of its firmware (GSP)",
        136: "NVLink training failed",
        155: "an NVLink went down",
        156: "a unit is to be retired, which needs a reset",
    },
)
_REBOOTS = _xids(Grade.FAIL, Remedy.REBOOT, {151: "key rotation failed; restart the virtual machine"})
_FOLLOW = _xids(
    Grade.WARN,
    Remedy.RESET_GPU,
    {
        63: "a bad memory row is replaced at the next reset",
        92: "many memory errors were corrected",
        94: "a contained memory error: only the affected process was ended",
        121: "an error between its chips was corrected",
        160: "a memory channel was retired",
        161: "a memory channel could not be retired",
        162: "power smoothing was enabled",
        163: "power smoothing was disabled",
        164: "power smoothing wears out",
        165: "power smoothing is worn out",
    },
)
# Usually a program's fault. Ours are known to be right, so the same GPU twice is a broken GPU.
XIDS_OF_PROGRAMS = frozenset({13, 31, 32, 43, 45, 68, 69, 137})
_PROGRAM = _xids(
    Grade.WARN,
    Remedy.RETEST,
    dict.fromkeys(XIDS_OF_PROGRAMS, "usually caused by a program; if it recurs on the same GPU, by the GPU"),
)
NVLINK5_XIDS = range(144, 151)  # "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 …": the text has the severity
ADVICE_XID = 154  # no fault of its own: the action that the driver recommends

XIDS: Mapping[int, XidMeaning] = {**_BROKEN, **_CABLES, **_RESETS, **_REBOOTS, **_FOLLOW, **_PROGRAM}
_UNLISTED = XidMeaning(Grade.WARN, "an unknown error", Remedy.CONTACT_VENDOR)
# The text: GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required).
_ACTION = re.compile(r"recovery action changed from .* to 0x([0-9a-f]+)", re.IGNORECASE)


def meaning_of_xid(xid: Xid) -> XidMeaning:
    if xid.number == ADVICE_XID:
        return _advised(xid.words)
    if xid.number in NVLINK5_XIDS:
        mild = re.search(r"non-?fatal", xid.words, re.IGNORECASE) is not None
        return XidMeaning(Grade.WARN if mild else Grade.FAIL, "an NVLink error", Remedy.RESEAT_OR_CABLE)
    return XIDS.get(xid.number, _UNLISTED)


def _advised(words: str) -> XidMeaning:
    """It repeats what the driver advises. Back to none is good news."""
    found = _ACTION.search(words)
    if not found:
        return XidMeaning(Grade.WARN, "the driver recommends an action for this GPU", Remedy.CONTACT_VENDOR)
    action = int(found[1], 16)
    if action == 0:
        return XidMeaning(Grade.PASS, "the driver no longer recommends an action", Remedy.NONE)
    remedy = {1: Remedy.RESET_GPU, 4: Remedy.RESET_GPU, 6: Remedy.RESET_GPU}.get(action, Remedy.REBOOT)
    return XidMeaning(Grade.FAIL, "the driver recommends a reset or reboot", remedy)
