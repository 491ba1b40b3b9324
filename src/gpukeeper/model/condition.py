"""The condition of a GPU after its work has ended: open handles, reports of driver and kernel. Facts, no assessment."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.model.reading import Moment
from gpukeeper.model.unknown import Unknown

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
