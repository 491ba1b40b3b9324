"""What the NVIDIA driver reports about a GPU, the lines that carry it between a client and the child, and which GPU or
slice a name refers to. Values only. Every request fills the identity, the memory, the processes and the slices;
each adds the facts of its subject (see `child`), and the others stay NOT_QUERIED. A fact that the driver refused is
Unknown with the reason. A name that matches nothing, or is ambiguous, is Unknown: numbers change when a GPU is
split anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import msgspec

from gpukeeper.model.gpu import NOT_QUERIED, Advice, Fact, Reading
from gpukeeper.model.unknown import Unknown

Listed: TypeAlias = tuple[int, ...] | Unknown  # pids that the driver lists; dead ones among them

NO_SLICE_UTILISATION = Unknown("the driver reports no utilisation of a GPU that is split into slices", by_design=True)


class ActivityFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How busy a GPU or slice was since the previous request. Percentages are means."""

    window_s: float = 0.0
    gpm: float | Unknown = NOT_QUERIED
    gpm_s: float = 0.0  # seconds that `gpm` is the mean of
    utilisation: float | Unknown = NOT_QUERIED
    utilisation_peak: float = 0.0
    utilisation_covered_s: float = 0.0
    energy_before_mj: int | Unknown = NOT_QUERIED  # when the window began


NOT_MEASURED = ActivityFacts()


class SliceFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a GPU (MIG) with memory and cores of its own."""

    uuid: str
    index: int
    name: str | Unknown = NOT_QUERIED
    gpu_instance: int | Unknown = NOT_QUERIED
    compute_instance: int | Unknown = NOT_QUERIED
    memory_total_mib: int | Unknown = NOT_QUERIED
    memory_used_mib: int | Unknown = NOT_QUERIED
    listed: Listed = NOT_QUERIED
    sms: int | Unknown = NOT_QUERIED
    activity: ActivityFacts = NOT_MEASURED


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU without a known uuid is present and does not answer (it fell off the bus, for example)."""

    index: int
    uuid: str | Unknown
    name: str | Unknown = NOT_QUERIED
    minor: int | Unknown = NOT_QUERIED  # of /dev/nvidia<minor>; not always the index
    pci: str | Unknown = NOT_QUERIED
    memory_total_mib: int | Unknown = NOT_QUERIED
    memory_used_mib: int | Unknown = NOT_QUERIED
    listed: Listed = NOT_QUERIED
    sliced: bool | Unknown = NOT_QUERIED
    slices: tuple[SliceFacts, ...] | Unknown = ()
    utilisation: float | Unknown = NOT_QUERIED  # inventory: percent of the last second or less; for display only
    advice: Advice | Unknown = NOT_QUERIED  # condition, health
    remap_pending: bool | Unknown = NOT_QUERIED  # condition, health
    remap_failed: bool | Unknown = NOT_QUERIED  # condition, health
    reset_alone: bool | Unknown = NOT_QUERIED  # condition
    energy_mj: int | Unknown = NOT_QUERIED  # usage, health: since the driver was loaded
    activity: ActivityFacts = NOT_MEASURED  # usage
    serial: str | Unknown = NOT_QUERIED  # identity
    facts: Mapping[str, Fact] = {}  # identity: what does not change
    counters: Mapping[str, int | Unknown | None] = {}  # health: they only rise
    states: Mapping[str, Fact] = {}  # health: as of now


FactGroup: TypeAlias = Literal["inventory", "condition", "usage", "identity", "health", "readings"]
SUBJECTS: tuple[str, ...] = get_args(FactGroup)
State: TypeAlias = Literal["answered", "no driver", "failed"]  # no driver: the library or the kernel module is missing
NO_ID = 0  # of a reply to an invalid line


class DriverRequest(msgspec.Struct, frozen=True):
    id: int
    about: str  # a Subject; a newer client may request another one


class DriverReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    state: State
    why: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    readings: tuple[Reading, ...] = ()  # of `readings`: sampled since the previous request
    topology: Mapping[str, Mapping[str, str]] = {}  # of `identity`
    driver: str | Unknown = NOT_QUERIED  # of `identity`
    cuda_driver: str | Unknown = NOT_QUERIED  # of `identity`


_CDI_NAME = re.compile(r"(?:runtime\.)?nvidia\.com/gpu=")
_REPLICA = re.compile(r"::[0-9]+$")  # a time-shared copy, as Kubernetes numbers them
_INDEX = re.compile(r"(?:gpu)?([0-9]{1,9})")
_MIG_INDEX = re.compile(r"(?:mig)?([0-9]{1,9}):([0-9]{1,9})")  # GPU and index of the slice
_INSTANCE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")  # GPU and GPU instance: not the same numbers as the index
_NODE_NAME = re.compile(r"(?:/dev/)?nvidia([0-9]{1,9})(?:/gi([0-9]{1,9}))?")
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/([0-9]{1,9})/([0-9]{1,9})")


def resolve_names(request: str, inventory: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    """The uuids that are meant, of whole GPUs and slices. Several names are separated by commas."""
    found: list[str] = []
    for name in request.split(","):
        meant = _resolve_name(name.strip(), inventory)
        if isinstance(meant, Unknown):
            return meant
        found += meant
    return tuple(dict.fromkeys(found))


def _resolve_name(written: str, gpus: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    name = _REPLICA.sub("", _CDI_NAME.sub("", written, count=1) if _CDI_NAME.match(written) else written)
    if name == "all":
        return _every_one(gpus)
    if match := _INDEX.fullmatch(name):
        return _parts_of(_by_index(gpus, int(match[1]), written), _any_match)
    if match := _MIG_INDEX.fullmatch(name):
        index = int(match[2])
        return _slices(_by_index(gpus, int(match[1]), written), lambda part: part.index == index, written)
    if match := _INSTANCE.fullmatch(name):
        return _slices(_by_index(gpus, int(match[1]), written), _of_instance(int(match[2])), written)
    if match := _NODE_NAME.fullmatch(name):
        gpu = _by_minor(gpus, int(match[1]), written)
        return _parts_of(gpu, _any_match) if match[2] is None else _slices(gpu, _of_instance(int(match[2])), written)
    if match := _OLD_MIG.fullmatch(name):
        gi, ci = int(match[2]), int(match[3])
        gpu = _by_uuid(gpus, match[1], written)
        return _slices(gpu, lambda part: part.gpu_instance == gi and part.compute_instance == ci, written)
    if name.startswith("MIG-"):
        return _slice_by_uuid(gpus, name, written)
    if name.startswith("GPU-"):
        return _parts_of(_by_uuid(gpus, name, written), _any_match)
    return Unknown(f"{written!r} is not the name of a GPU")


def _every_one(gpus: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    found: list[str] = []
    for gpu in gpus:
        parts = _parts_of(gpu, _any_match)
        if isinstance(parts, Unknown):
            return parts
        found += parts
    return tuple(found)


def _parts_of(gpu: GpuFacts | Unknown, wanted: Callable[[SliceFacts], bool]) -> tuple[str, ...] | Unknown:
    """The slices of a GPU that is split, otherwise the GPU."""
    if isinstance(gpu, Unknown):
        return gpu
    if isinstance(gpu.slices, Unknown):
        return Unknown(f"the slices of GPU {gpu.index} are unknown: {gpu.slices.why}")
    if gpu.slices:
        return tuple(part.uuid for part in gpu.slices if wanted(part))
    if isinstance(gpu.uuid, Unknown):
        return Unknown(f"GPU {gpu.index} does not report its uuid: {gpu.uuid.why}")
    return (gpu.uuid,)


def _slices(gpu: GpuFacts | Unknown, wanted: Callable[[SliceFacts], bool], written: str) -> tuple[str, ...] | Unknown:
    if not isinstance(gpu, Unknown) and gpu.slices == ():
        return Unknown(f"{written!r} names a slice, but GPU {gpu.index} is not split")
    found = _parts_of(gpu, wanted)
    return found if found != () else Unknown(f"{written!r} names a slice that does not exist")


def _slice_by_uuid(gpus: Sequence[GpuFacts], name: str, written: str) -> tuple[str, ...] | Unknown:
    parts = [part.uuid for gpu in gpus if not isinstance(gpu.slices, Unknown) for part in gpu.slices]
    return _only([uuid for uuid in parts if uuid == name] or [uuid for uuid in parts if uuid.startswith(name)], written)


def _by_uuid(gpus: Sequence[GpuFacts], name: str, written: str) -> GpuFacts | Unknown:
    known = {gpu.uuid: gpu for gpu in gpus if isinstance(gpu.uuid, str)}
    found = _only([name] if name in known else [uuid for uuid in known if uuid.startswith(name)], written)
    return found if isinstance(found, Unknown) else known[found[0]]


def _by_index(gpus: Sequence[GpuFacts], index: int, written: str) -> GpuFacts | Unknown:
    found = [gpu for gpu in gpus if gpu.index == index]
    return found[0] if found else Unknown(f"{written!r} names GPU {index}, which does not exist")


def _by_minor(gpus: Sequence[GpuFacts], minor: int, written: str) -> GpuFacts | Unknown:
    found = [gpu for gpu in gpus if gpu.minor == minor]
    return found[0] if found else Unknown(f"{written!r} names /dev/nvidia{minor}, but no GPU reports that number")


def _only(found: Sequence[str], written: str) -> tuple[str, ...] | Unknown:
    if not found:
        return Unknown(f"{written!r} matches no GPU or slice")
    return (
        (found[0],) if len(found) == 1 else Unknown(f"{written!r} is ambiguous: it matches {len(found)} GPUs or slices")
    )


def _of_instance(number: int) -> Callable[[SliceFacts], bool]:
    return lambda part: part.gpu_instance == number


def _any_match(_part: SliceFacts) -> bool:
    return True
