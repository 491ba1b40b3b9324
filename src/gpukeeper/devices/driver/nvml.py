"""The facts of a GPU that every request needs, and those of its condition, read by NVML calls. For the child only.

A call that fails makes that one fact Unknown: the driver may be older than its bindings, or the GPU may have fallen off
the bus after its uuid was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, GpuFacts, Listed, SliceFacts
from gpukeeper.model.condition import Advice
from gpukeeper.model.unknown import Unknown

T = TypeVar("T")
More: TypeAlias = Callable[[Any, Any], Mapping[str, Any]]  # NVML and a handle → further fields of GpuFacts

MIB = 1024 * 1024
ADVICE = (  # in the order of the driver's numbers
    *(Advice.NONE, Advice.RESET, Advice.REBOOT, Advice.DRAIN_P2P, Advice.DRAIN_AND_RESET),
    *(Advice.RECOVER_IMEX, Advice.BUS_RESET, Advice.SYSTEM_REBOOT),
)
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older bindings do not name it


def gpus(nvml: Any, more: More) -> tuple[GpuFacts, ...]:
    return tuple(with_more(nvml, handle, gpu, more) for handle, gpu in every_gpu(nvml))


def with_more(nvml: Any, handle: Any, gpu: GpuFacts, more: More) -> GpuFacts:
    return gpu if handle is None else msgspec.structs.replace(gpu, **more(nvml, handle))


def every_gpu(nvml: Any) -> list[tuple[Any, GpuFacts]]:
    """With its handle; None for a GPU that does not answer."""
    return [one_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def one_gpu(nvml: Any, index: int) -> tuple[Any, GpuFacts]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(nvml.nvmlDeviceGetUUID(handle))
    except errors(nvml) as error:
        return None, GpuFacts(index=index, uuid=Unknown(words(error)))
    total, used = memory(nvml, handle)
    sliced = is_sliced(nvml, handle)
    return handle, GpuFacts(
        index=index,
        uuid=uuid,
        name=fact(nvml, lambda: text(nvml.nvmlDeviceGetName(handle))),
        minor=fact(nvml, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        pci=fact(nvml, lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        memory_total_mib=total,
        memory_used_mib=used,
        listed=listed(nvml, handle),
        sliced=sliced,
        slices=slices(nvml, handle) if sliced is True else (sliced if isinstance(sliced, Unknown) else ()),
    )


def is_sliced(nvml: Any, handle: Any) -> bool | Unknown:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except errors(nvml) as error:
        # Most models cannot be split at all and answer "not supported": that is a known fact.
        unsupported = getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED
        return False if unsupported else Unknown(words(error))
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def slices(nvml: Any, handle: Any) -> tuple[SliceFacts, ...] | Unknown:
    try:
        return tuple(one_slice(nvml, index, part) for index, part in _slice_handles(nvml, handle))
    except errors(nvml) as error:
        return Unknown(words(error))


def _slice_handles(nvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:  # an index without a slice is not an error
                raise
        else:
            yield index, part


def one_slice(nvml: Any, index: int, part: Any) -> SliceFacts:
    total, used = memory(nvml, part)
    return SliceFacts(
        uuid=text(nvml.nvmlDeviceGetUUID(part)),
        index=index,
        name=fact(nvml, lambda: text(nvml.nvmlDeviceGetName(part))),
        gpu_instance=fact(nvml, lambda: int(nvml.nvmlDeviceGetGpuInstanceId(part))),
        compute_instance=fact(nvml, lambda: int(nvml.nvmlDeviceGetComputeInstanceId(part))),
        memory_total_mib=total,
        memory_used_mib=used,
        listed=listed(nvml, part),
        sms=fact(nvml, lambda: int(nvml.nvmlDeviceGetAttributes(part).multiprocessorCount)),
    )


def memory(nvml: Any, handle: Any) -> tuple[int | Unknown, int | Unknown]:
    """Total and used MiB. The first version of the call counts what the driver reserves for itself as used."""
    found = fact(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if isinstance(found, Unknown):
        found = fact(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))  # drivers before 510 have only the first
    return (found, found) if isinstance(found, Unknown) else (found.total // MIB, found.used // MIB)


def listed(nvml: Any, handle: Any) -> Listed:
    """Every pid that the driver lists, for compute, for graphics and through MPS. Without the first list it is Unknown;
    a model may have no graphics, and a slice no MPS.
    """
    pids: set[int] = set()
    for ask, required in (
        (nvml.nvmlDeviceGetComputeRunningProcesses, True),
        (nvml.nvmlDeviceGetGraphicsRunningProcesses, False),
        (nvml.nvmlDeviceGetMPSComputeRunningProcesses, False),
    ):
        try:
            pids.update(int(one.pid) for one in ask(handle))
        except errors(nvml) as error:
            if required or getattr(error, "value", None) not in no_such_list(nvml):
                return refused(nvml, error)
    return tuple(sorted(pids))


def utilisation(nvml: Any, handle: Any) -> float | Unknown:
    if is_sliced(nvml, handle) is True:
        return NO_SLICE_UTILISATION
    return fact(nvml, lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))


def energy(nvml: Any, handle: Any) -> int | Unknown:
    return fact(nvml, lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)), never(nvml))


# The condition of a GPU.


def condition(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        **faults(nvml, handle),
        "reset_alone": fact(nvml, lambda: resets_alone(nvml, handle)),
    }


def faults(nvml: Any, handle: Any) -> dict[str, Any]:
    rows = remapped_rows(nvml, handle)
    return {
        "advice": fact(nvml, lambda: advice(nvml, handle)),
        "remap_pending": rows if isinstance(rows, Unknown) else bool(rows[2]),
        "remap_failed": rows if isinstance(rows, Unknown) else bool(rows[3]),
    }


def remapped_rows(nvml: Any, handle: Any) -> tuple[int, int, int, int] | Unknown:
    """Correctable, uncorrectable, whether some are pending, whether some failed."""
    return fact(nvml, lambda: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))


def advice(nvml: Any, handle: Any) -> Advice:
    number = field_value(nvml, handle, RECOVERY_ACTION)
    return ADVICE[number] if 0 <= number < len(ADVICE) else Advice.OTHER


def resets_alone(nvml: Any, handle: Any) -> bool:
    """GPUs before Ampere that are linked are reset together or not at all."""
    if nvml.nvmlDeviceGetArchitecture(handle) >= nvml.NVML_DEVICE_ARCH_AMPERE:
        return True
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                return False
        except nvml.NVMLError as error:
            if not refused(nvml, error).by_design:
                raise
            return True  # no links, or no more of them
    return True


def field_value(nvml: Any, handle: Any, number: int, scope: int = 0) -> int:
    value = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(number_in(nvml, value.valueType, value.value))


def number_in(nvml: Any, kind: int, value: Any) -> float:
    """Of NVML's union of numbers."""
    names = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    }
    return getattr(value, names.get(kind, "uiVal"))  # type: ignore[no-any-return]


# Calls that fail.


def fact(nvml: Any, ask: Callable[[], T], absent: tuple[int, ...] | None = None) -> T | Unknown:
    """The value, or why there is none; by design, if the model or the driver never has it."""
    try:
        return ask()
    except errors(nvml) as error:
        return refused(nvml, error, absent)


def refused(nvml: Any, error: Exception, absent: tuple[int, ...] | None = None) -> Unknown:
    """An error of the binding itself has no number: the driver is older than the structures of the call."""
    by_design = not isinstance(error, nvml.NVMLError) or error.value in (absent or never_here(nvml))
    return Unknown(words(error), by_design=by_design)


def errors(nvml: Any) -> tuple[type[Exception], ...]:
    return (nvml.NVMLError, nvml.NVMLLibraryMismatchError)


def never(nvml: Any) -> tuple[int, ...]:
    """Errors that any further call on this machine would return."""
    return (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def no_such_list(nvml: Any) -> tuple[int, ...]:
    """Those, and the error of a call that does not fit this GPU or slice."""
    return (*never(nvml), nvml.NVML_ERROR_INVALID_ARGUMENT)


def never_here(nvml: Any) -> tuple[int, ...]:
    """Those, and errors of a structure or a call that does not fit this driver."""
    return (*no_such_list(nvml), nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvml.NVML_ERROR_DEPRECATED)


def text(answer: str | bytes) -> str:
    """Older bindings return bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def words(error: Exception) -> str:
    return f"the NVIDIA driver returned an error: {error}"
