"""Which GPU or slice a name refers to. Users, engines and schedulers write them in many ways. Pure.

The name of a GPU that is split means its slices. A name that matches nothing, or is ambiguous, is Unknown: names are
resolved by what exists now, and numbers change when a GPU is split differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.model.unknown import Unknown

_CDI = re.compile(r"(?:runtime\.)?nvidia\.com/gpu=")
_REPLICA = re.compile(r"::[0-9]+$")  # a time-shared copy, as Kubernetes numbers them
_INDEX = re.compile(r"(?:gpu)?([0-9]{1,9})")
_MIG_INDEX = re.compile(r"(?:mig)?([0-9]{1,9}):([0-9]{1,9})")  # GPU and index of the slice
_INSTANCE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")  # GPU and GPU instance: not the same numbers as the index
_NODE = re.compile(r"(?:/dev/)?nvidia([0-9]{1,9})(?:/gi([0-9]{1,9}))?")
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/([0-9]{1,9})/([0-9]{1,9})")


def resolve(request: str, inventory: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    """The uuids that are meant, of whole GPUs and slices. Several names are separated by commas."""
    found: list[str] = []
    for name in request.split(","):
        meant = _resolve_one(name.strip(), inventory)
        if isinstance(meant, Unknown):
            return meant
        found += meant
    return tuple(dict.fromkeys(found))


def _resolve_one(written: str, gpus: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    name = _REPLICA.sub("", _CDI.sub("", written, count=1) if _CDI.match(written) else written)
    if name == "all":
        return _all(gpus)
    if match := _INDEX.fullmatch(name):
        return _parts(_by_index(gpus, int(match[1]), written), _any)
    if match := _MIG_INDEX.fullmatch(name):
        index = int(match[2])
        return _slices(_by_index(gpus, int(match[1]), written), lambda part: part.index == index, written)
    if match := _INSTANCE.fullmatch(name):
        return _slices(_by_index(gpus, int(match[1]), written), _of_instance(int(match[2])), written)
    if match := _NODE.fullmatch(name):
        gpu = _by_minor(gpus, int(match[1]), written)
        return _parts(gpu, _any) if match[2] is None else _slices(gpu, _of_instance(int(match[2])), written)
    if match := _OLD_MIG.fullmatch(name):
        gi, ci = int(match[2]), int(match[3])
        gpu = _by_uuid(gpus, match[1], written)
        return _slices(gpu, lambda part: part.gpu_instance == gi and part.compute_instance == ci, written)
    if name.startswith("MIG-"):
        return _slice_by_uuid(gpus, name, written)
    if name.startswith("GPU-"):
        return _parts(_by_uuid(gpus, name, written), _any)
    return Unknown(f"{written!r} is not the name of a GPU")


def _all(gpus: Sequence[GpuFacts]) -> tuple[str, ...] | Unknown:
    found: list[str] = []
    for gpu in gpus:
        parts = _parts(gpu, _any)
        if isinstance(parts, Unknown):
            return parts
        found += parts
    return tuple(found)


def _parts(gpu: GpuFacts | Unknown, wanted: Callable[[SliceFacts], bool]) -> tuple[str, ...] | Unknown:
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
    found = _parts(gpu, wanted)
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


def _any(_part: SliceFacts) -> bool:
    return True
