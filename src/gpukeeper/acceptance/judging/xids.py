"""What the GPU errors of the kernel's log (Xids) mean for acceptance: by tier, and what to do. Data and one function.

A number that is not listed is new or rare: it warns, since its meaning is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.condition import Xid
from gpukeeper.model.grade import Grade


@dataclass(frozen=True)
class Meaning:
    grade: Grade
    words: str
    remedy: Remedy


def _of(grade: Grade, remedy: Remedy, words: Mapping[int, str]) -> dict[int, Meaning]:
    return {number: Meaning(grade, text, remedy) for number, text in words.items()}


# Isolate, or replace.
_BROKEN = _of(
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
_CABLES = _of(Grade.FAIL, Remedy.RESEAT_OR_CABLE, {54: "auxiliary power is not connected", 74: "an NVLink error"})
# Reset or reboot and test again; a second time: isolate.
_RESETS = _of(
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
_REBOOTS = _of(Grade.FAIL, Remedy.REBOOT, {151: "key rotation failed; restart the virtual machine"})
_FOLLOW = _of(
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
PROGRAMS = frozenset({13, 31, 32, 43, 45, 68, 69, 137})
_PROGRAM = _of(
    Grade.WARN,
    Remedy.RETEST,
    dict.fromkeys(PROGRAMS, "usually caused by a program; if it recurs on the same GPU, by the GPU"),
)
NVLINK5 = range(144, 151)  # "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 …": the text has the severity
ADVICE = 154  # no fault of its own: the action that the driver recommends

MEANINGS: Mapping[int, Meaning] = {**_BROKEN, **_CABLES, **_RESETS, **_REBOOTS, **_FOLLOW, **_PROGRAM}
_UNLISTED = Meaning(Grade.WARN, "an unknown error", Remedy.CONTACT_VENDOR)
# The text: GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required).
_ACTION = re.compile(r"recovery action changed from .* to 0x([0-9a-f]+)", re.IGNORECASE)


def meaning(xid: Xid) -> Meaning:
    if xid.number == ADVICE:
        return _advised(xid.words)
    if xid.number in NVLINK5:
        mild = re.search(r"non-?fatal", xid.words, re.IGNORECASE) is not None
        return Meaning(Grade.WARN if mild else Grade.FAIL, "an NVLink error", Remedy.RESEAT_OR_CABLE)
    return MEANINGS.get(xid.number, _UNLISTED)


def _advised(words: str) -> Meaning:
    """It repeats what the driver advises. Back to none is good news."""
    found = _ACTION.search(words)
    if not found:
        return Meaning(Grade.WARN, "the driver recommends an action for this GPU", Remedy.CONTACT_VENDOR)
    action = int(found[1], 16)
    if action == 0:
        return Meaning(Grade.PASS, "the driver no longer recommends an action", Remedy.NONE)
    remedy = {1: Remedy.RESET_GPU, 4: Remedy.RESET_GPU, 6: Remedy.RESET_GPU}.get(action, Remedy.REBOOT)
    return Meaning(Grade.FAIL, "the driver recommends a reset or reboot", remedy)
