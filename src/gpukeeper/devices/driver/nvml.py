"""The facts of a GPU that the driver's process reads by NVML calls: those of every request, those of its condition,
and how busy it was since the previous query (GPM, utilisation samples, energy). For the child only; no judgement.

A call that fails makes that one fact Unknown: the driver may be older than its bindings, or the GPU may have fallen
off the bus after its uuid was read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, ActivityFacts, GpuFacts, Listed, SliceFacts
from gpukeeper.model.gpu import NOT_QUERIED, Advice
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


SHORTEST_WINDOW_S = 1.0  # the slowest product takes one utilisation sample per second
GAP_US = 2_000_000  # a longer gap between two samples was not measured
NO_GPM = Unknown("this model has no performance monitoring (GPM)", by_design=True)
ONLY_SLICES = Unknown("the GPU is split into slices, and each is measured separately", by_design=True)


class UtilisationSamples:
    """What the driver's buffer of utilisation samples returned since the last query."""

    def __init__(self) -> None:
        self.newest_us = 0
        self.failure: Unknown | None = None
        self.reset()

    def reset(self) -> None:
        self.count, self.total, self.peak, self.covered_us = 0, 0.0, 0.0, 0

    def add(self, at_us: int, value: float) -> None:
        """The buffer repeats itself and has empty slots: only newer and plausible samples count."""
        if at_us <= self.newest_us or not 0 <= value <= 100:
            return
        if self.newest_us:
            self.covered_us += min(at_us - self.newest_us, GAP_US)
        self.newest_us = at_us
        self.count, self.total, self.peak = self.count + 1, self.total + value, max(self.peak, value)

    def take(self) -> dict[str, Any]:
        """As fields of Activity; then starts again."""
        mean: float | Unknown = Unknown("the driver has no new utilisation samples")
        if self.failure is not None:
            mean = self.failure
        elif self.count:
            mean = self.total / self.count
        taken = {
            "utilisation": mean,
            "utilisation_peak": self.peak,
            "utilisation_covered_s": self.covered_us / 1e6,
        }
        self.reset()
        return taken


class ActivityMonitor:
    """What is kept from one query to the next: the sample that each window begins with."""

    def __init__(
        self, nvml: Any, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._nvml, self._clock, self._sleep = nvml, clock, sleep
        self._gpm: dict[str, tuple[Any, float]] = {}  # by uuid of a GPU or slice: a sample, and when it was taken
        self._samples: dict[str, UtilisationSamples] = {}
        self._handles: dict[str, Any] = {}  # of whole GPUs
        self._energy: dict[str, int | Unknown] = {}
        self._asked: float | None = None

    def read(self) -> tuple[GpuFacts, ...]:
        found = every_gpu(self._nvml)
        if self._wait(self._begin(found)):
            found = every_gpu(self._nvml)  # memory and processes as they are at the end of the window
        window = self._window()
        self.collect()
        measured = tuple(gpu if handle is None else self._measured(handle, gpu, window) for handle, gpu in found)
        self._forget({uuid for _, gpu in found for uuid in (gpu.uuid, *(part.uuid for part in parts(gpu)))})
        return measured

    def collect(self) -> None:
        """Between two queries: the driver's buffer is shorter than the time between them."""
        for uuid, handle in self._handles.items():
            samples = self._samples[uuid]
            try:
                kind, taken = self._nvml.nvmlDeviceGetSamples(
                    handle, self._nvml.NVML_GPU_UTILIZATION_SAMPLES, samples.newest_us
                )
            except errors(self._nvml) as error:
                nothing_newer = getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_FOUND
                samples.failure = None if nothing_newer else self._refused(error)
                continue
            samples.failure = None
            for one in sorted(taken, key=lambda one: int(one.timeStamp)):
                samples.add(int(one.timeStamp), float(number_in(self._nvml, kind, one.sampleValue)))

    def _begin(self, found: list[tuple[Any, GpuFacts]]) -> bool:
        """Whether something is measured for the first time and so needs a window."""
        new = False
        for handle, gpu in found:
            uuid = gpu.uuid
            if isinstance(uuid, Unknown):
                continue
            if uuid not in self._energy:
                new, self._energy[uuid] = True, energy(self._nvml, handle)
            if gpu.sliced is True:
                self._handles.pop(uuid, None)
            else:
                self._handles[uuid] = handle
                self._samples.setdefault(uuid, UtilisationSamples())
            for key, instance in measured_by_gpm(gpu):
                if key not in self._gpm and self._gpm_support(handle) is None:
                    new = True
                    try:
                        self._gpm[key] = self._sample(handle, instance), self._clock()
                    except errors(self._nvml):
                        continue  # the second sample will report why
        return new

    def _wait(self, new: bool) -> bool:
        """A single query gets a window as well, and two concurrent queries do not get one that is too short."""
        since = 0.0 if new or self._asked is None else self._clock() - self._asked
        if since >= SHORTEST_WINDOW_S:
            return False
        self._sleep(SHORTEST_WINDOW_S - since)
        return True

    def _window(self) -> float:
        before, self._asked = self._asked, self._clock()
        return SHORTEST_WINDOW_S if before is None else self._asked - before

    def _measured(self, handle: Any, gpu: GpuFacts, window: float) -> GpuFacts:
        uuid = str(gpu.uuid)
        before, self._energy[uuid] = self._energy.get(uuid, NOT_QUERIED), energy(self._nvml, handle)
        if gpu.sliced is True:
            busy: dict[str, Any] = {"gpm": ONLY_SLICES, "utilisation": NO_SLICE_UTILISATION}
        else:
            samples = self._samples.get(uuid)
            busy = {**self._busy(handle, uuid, None), **({} if samples is None else samples.take())}
        cut = gpu.slices
        return msgspec.structs.replace(
            gpu,
            energy_mj=self._energy[uuid],
            activity=ActivityFacts(window_s=window, energy_before_mj=before, **busy),
            slices=cut if isinstance(cut, Unknown) else tuple(self._part(handle, part) for part in cut),
        )

    def _part(self, handle: Any, part: SliceFacts) -> SliceFacts:
        instance = part.gpu_instance
        known = {"gpm": instance} if isinstance(instance, Unknown) else self._busy(handle, part.uuid, instance)
        return msgspec.structs.replace(part, activity=ActivityFacts(**known))

    # GPM: two samples give the exact mean of the time between them.

    def _busy(self, handle: Any, key: str, instance: int | None) -> dict[str, Any]:
        """With the time between the samples: a failed sample leaves a window that is shorter than the query's."""
        unsupported = self._gpm_support(handle)
        if unsupported is not None:
            return {"gpm": unsupported}
        before, since = self._gpm.pop(key, (None, self._clock()))
        try:
            self._gpm[key] = after, now = self._sample(handle, instance), self._clock()
            if before is None:
                return {"gpm": Unknown("it had no first sample")}
            return {"gpm": self._between(before, after), "gpm_s": now - since}
        except errors(self._nvml) as error:
            return {"gpm": self._refused(error)}
        finally:
            self._free(before)

    def _gpm_support(self, handle: Any) -> Unknown | None:
        """None: it has GPM."""
        nvml = self._nvml
        found = fact(nvml, lambda: bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice), never(nvml))
        if isinstance(found, Unknown):
            return found
        return None if found else NO_GPM

    def _sample(self, handle: Any, instance: int | None) -> Any:
        """Of a slice its GPU instance: compute instances that share one are measured together."""
        sample = self._nvml.nvmlGpmSampleAlloc()
        try:
            if instance is None:
                self._nvml.nvmlGpmSampleGet(handle, sample)
            else:
                self._nvml.nvmlGpmMigSampleGet(handle, instance, sample)
        except errors(self._nvml):
            self._free(sample)
            raise
        return sample

    def _between(self, before: Any, after: Any) -> float | Unknown:
        nvml = self._nvml
        ask = nvml.c_nvmlGpmMetricsGet_t()
        ask.version, ask.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        ask.sample1, ask.sample2 = before, after
        ask.metrics[0].metricId = nvml.NVML_GPM_METRIC_GRAPHICS_UTIL
        nvml.nvmlGpmMetricsGet(ask)
        metric = ask.metrics[0]
        if metric.nvmlReturn != nvml.NVML_SUCCESS:
            return self._refused(nvml.NVMLError(metric.nvmlReturn))
        value = float(metric.value)
        return (
            value if math.isfinite(value) else Unknown("the driver's performance monitoring (GPM) returned no number")
        )

    def _free(self, sample: Any) -> None:
        if sample is not None:
            self._nvml.nvmlGpmSampleFree(sample)

    def _forget(self, present: set[str | Unknown]) -> None:
        for key in set(self._gpm) - present:
            self._free(self._gpm.pop(key)[0])
        kept: tuple[dict[str, Any], ...] = (self._samples, self._handles, self._energy)
        for one in kept:
            for key in set(one) - present:
                del one[key]

    def _refused(self, error: Exception) -> Unknown:
        return refused(self._nvml, error, never(self._nvml))


def parts(gpu: GpuFacts) -> tuple[SliceFacts, ...]:
    return () if isinstance(gpu.slices, Unknown) else gpu.slices


def measured_by_gpm(gpu: GpuFacts) -> list[tuple[str, int | None]]:
    """Uuid and GPU instance of what has a window of its own: the slices of a GPU that is split, otherwise the GPU."""
    if gpu.sliced is not True:
        return [(str(gpu.uuid), None)]
    return [(part.uuid, part.gpu_instance) for part in parts(gpu) if isinstance(part.gpu_instance, int)]
