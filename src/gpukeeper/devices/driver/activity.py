"""How busy each GPU was since the previous query: GPM, utilisation samples, energy. For the child; no judgement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpukeeper.devices.driver.facts import NO_SLICE_UTILISATION, ActivityFacts, GpuFacts, SliceFacts
from gpukeeper.devices.driver.nvml import energy, errors, every_gpu, fact, never, number_in, refused
from gpukeeper.model.condition import NOT_QUERIED
from gpukeeper.model.unknown import Unknown

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
