"""A GPU: what it is, how it is and how it was used by its driver; its condition after its work has ended (open
handles, reports of driver and kernel); the verdict of its acceptance tests. Facts, no judgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

import msgspec

from gpukeeper.model.reading import Moment
from gpukeeper.model.unknown import Unknown, direct


@direct
class Grade(StrEnum):
    """The verdict on a measurement, a GPU, a node or a run."""

    PASS = "PASS"  # noqa: S105 - no secret
    WARN = "WARN"  # degraded, usable
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"  # could not test, too noisy, or too good to be true
    SKIPPED = "SKIPPED"  # does not apply here, by rule; counts for nothing


_RANK = {Grade.SKIPPED: 0, Grade.PASS: 1, Grade.WARN: 2, Grade.INCONCLUSIVE: 3, Grade.FAIL: 4}


def worst(grades: Iterable[Grade]) -> Grade:
    """Of nothing, or of nothing but what was skipped: inconclusive, since nothing was tested."""
    found = max(grades, key=_RANK.__getitem__, default=Grade.SKIPPED)
    return Grade.INCONCLUSIVE if found is Grade.SKIPPED else found


def rank(grade: Grade) -> int:
    """Worse is more."""
    return _RANK[grade]


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger remembers of a GPU's figures: one earlier run."""

    at: datetime
    run: str
    identity: str
    verdict: Grade
    values: Mapping[str, float]  # by "check.metric method"


NOT_QUERIED = Unknown("the driver was not queried")
FIRST_BASELINE_MIB = 1024  # a first baseline is never above this
# Only of root: any user can name a program nvidia-persistenced. A kernel name has at most 15 characters.
INFRASTRUCTURE = tuple(
    name[:15]
    for name in (
        *("nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nv-fabricmanager", "nvidia-smi"),
        *("Xorg", "Xwayland", "gnome-shell", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    )
)
IN_A_WORKLOAD = frozenset({"nv-hostengine", "dcgm-exporter"})  # these watch GPUs, often from a workload of their own
OF_A_SESSION = frozenset({"Xorg", "Xwayland", "gnome-shell"})  # these run as the user who is logged in


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has the GPU open, by its descriptors. pid and starttime together name it."""

    pid: int
    starttime: int
    uid: int
    comm: str
    state: str = ""  # the kernel's letter; D cannot be ended by any signal
    workload_id: str | Unknown | None = None  # the id in its cgroup; None: on the bare host
    ours: bool = False  # gpukeeper itself or its child


@direct
class Advice(StrEnum):
    """What the driver itself advises to do about a GPU."""

    NONE = "none"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN_P2P = "drain P2P"
    DRAIN_AND_RESET = "drain and reset"
    RECOVER_IMEX = "recover the IMEX domain"
    BUS_RESET = "bus reset"
    SYSTEM_REBOOT = "system reboot"
    OTHER = "something this version does not know"


class Xid(msgspec.Struct, frozen=True):
    """An error of the GPU that the kernel logged."""

    number: int
    words: str


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU or slice as of one read."""

    uuid: str
    at: Moment
    holders: tuple[GpuHolder, ...] = ()
    unread: int = 0  # processes whose descriptors could not be read: any of them may hold it
    listed: tuple[int, ...] | Unknown = ()  # pids that the driver lists; dead or reused ones among them
    memory_used_mib: int | Unknown = NOT_QUERIED
    advice: Advice | Unknown = NOT_QUERIED
    remap_pending: bool | Unknown = NOT_QUERIED  # memory rows wait for a reset to be replaced
    remap_failed: bool | Unknown = NOT_QUERIED
    xids: tuple[Xid, ...] | Unknown = ()  # since the work ended
    sliced: bool | Unknown = NOT_QUERIED  # the GPU (or the one this is a part of) is cut into slices
    reset_alone: bool | Unknown = NOT_QUERIED  # the hardware lets it be reset without its peers


@direct
class CheckResult(StrEnum):
    """How a check after the end came out."""

    CLEANED = "cleaned"  # nothing of what ended is left
    ORPHANED_SHARED = "orphaned_shared"  # something is left, and others use the GPU
    DIRTY = "dirty"
    UNKNOWN = "unknown"
    RESET_FAILED = "reset_failed"


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger remembers of a GPU. Rebuilt by folding the journal."""

    baseline_mib: int | None = None  # the lowest memory use measured while nothing held it
    checked: Moment | None = None
    result: CheckResult | None = None
    reason: str = ""
    quarantined: Moment | None = None
    quarantine_reason: str = ""
    quarantined_by: str = ""
    last_reset: Moment | None = None


NO_SERIALS = ("", "N/A", "[N/A]")  # without zeros: what boards without a serial number have in its place
Fact: TypeAlias = bool | int | float | str | Unknown | None  # None: does not exist here


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a slice of one, that is to be tested. In CPU mode: the CPU in its place."""

    uuid: str
    index: int
    name: str | Unknown = NOT_QUERIED
    serial: str | Unknown = NOT_QUERIED  # what its history is kept by; the uuid where it has none
    pci: str | Unknown = NOT_QUERIED
    memory_mib: int | Unknown = NOT_QUERIED
    part_of: str | None = None  # the uuid of the whole GPU, of a slice
    profile: str | None = None  # of a slice: 1g.18gb
    facts: Mapping[str, Fact] = {}  # vbios, numa, power limits, links, … whatever is worth a line

    @property
    def identity(self) -> str:
        """What stays the same when it is moved to another machine."""
        if isinstance(self.serial, Unknown) or self.serial.strip("0") in NO_SERIALS:
            return self.uuid
        return self.serial


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as of one read. `counters` only rise, and are judged by their change; `states` are as of now."""

    uuid: str
    at: datetime
    counters: Mapping[str, int | Unknown | None] = {}
    states: Mapping[str, Fact] = {}
    xids: tuple[Xid, ...] | Unknown = ()
    foreign: tuple[int, ...] | Unknown = ()  # pids that are not ours and were on it since the previous read
    named: Mapping[int, str] = {}  # by pid of `foreign`: whose process it is, and its command


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU at one moment of the run. None: not measured."""

    uuid: str
    at: float  # seconds since the run began
    check: str = ""  # what ran then
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilisation: float | None = None  # percent
    reasons: int | None = None  # why its clocks are held back: the driver's bits
    pcie_generation: int | None = None
    pcie_width: int | None = None
