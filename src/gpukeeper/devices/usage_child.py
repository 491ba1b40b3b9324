"""The program that keeps the NVIDIA driver open and says how busy each GPU was since the last question.

Run it: python -m gpukeeper.devices.usage_child. For each line it reads, it prints one JSON record; it ends with its
input. It is a program of its own because a call into a sick driver may never return; whoever started it can give it up.
It judges nothing. A fact that the driver would not give is {"why": …, "by_design": …} in the place of its value.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpukeeper.devices.nvml_child import NO_SLICE_UTILISATION, each_slice, is_sliced, memory, text, words

SHORTEST_WINDOW_S = 1.0  # the slowest product takes a utilisation sample each second
COLLECT_EVERY_S = 5.0  # the driver's own buffer holds no more than some 10 s
GAP_US = 2_000_000  # a longer gap between two samples was not measured
ONLY_SLICES = {"why": "the GPU is cut into slices, and each is measured by itself", "by_design": True}


def main() -> None:
    import pynvml

    watch = Opening(pynvml, Watch)
    serve(sys.stdin.fileno(), lambda: say(watch.record()), watch.collect)


def serve(fd: int, answer: Callable[[], None], meanwhile: Callable[[], None]) -> None:
    waiting = b""
    while True:
        if not select.select([fd], [], [], COLLECT_EVERY_S)[0]:
            meanwhile()
            continue
        read = os.read(fd, 4096)
        if not read:
            return
        *questions, waiting = (waiting + read).split(b"\n")
        for _question in questions:
            answer()


def say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    sys.stdout.flush()


class Opening:
    """Opens the driver at the first question, and again after a failure: it may have been loaded anew meanwhile."""

    def __init__(self, nvml: Any, watch: Callable[[Any], Watch]) -> None:
        self._nvml, self._make = nvml, watch
        self._watch: Watch | None = None

    def record(self) -> dict[str, Any]:
        """`state`: answered, no driver (library or kernel module is missing), failed."""
        nvml = self._nvml
        try:
            if self._watch is None:
                nvml.nvmlInit()
                self._watch = self._make(nvml)
            return {"state": "answered", "gpus": self._watch.read()}
        except nvml.NVMLError as error:
            self._close()
            missing = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            return {"state": "no driver" if error.value in missing else "failed", "why": words(error)}

    def collect(self) -> None:
        if self._watch is not None:
            self._watch.collect()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class Samples:
    """What the driver's buffer of utilisation samples gave since the last question."""

    def __init__(self) -> None:
        self.newest_us = 0
        self.failure: dict[str, Any] | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        self.count, self.total, self.peak, self.covered_us = 0, 0.0, 0.0, 0

    def add(self, at_us: int, value: float) -> None:
        """The buffer repeats itself and holds empty places: only what is newer and can be true counts."""
        if at_us <= self.newest_us or not 0 <= value <= 100:
            return
        if self.newest_us:
            self.covered_us += min(at_us - self.newest_us, GAP_US)
        self.newest_us = at_us
        self.count, self.total, self.peak = self.count + 1, self.total + value, max(self.peak, value)

    def facts(self) -> dict[str, Any]:
        if self.failure is not None:
            mean: Any = self.failure
        elif not self.count:
            mean = {"why": "the driver has no new utilisation samples"}
        else:
            mean = self.total / self.count
        return {"utilisation": mean, "utilisation_peak": self.peak, "utilisation_covered_s": self.covered_us / 1e6}


class Watch:
    """What is remembered from one question to the next: the sample each window begins with."""

    def __init__(
        self, nvml: Any, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._nvml, self._clock, self._sleep = nvml, clock, sleep
        self._gpm: dict[str, tuple[Any, float]] = {}  # by uuid of a GPU or slice: a sample, and when it was taken
        self._samples: dict[str, Samples] = {}
        self._handles: dict[str, Any] = {}  # of whole GPUs
        self._energy: dict[str, Any] = {}
        self._asked: float | None = None

    def read(self) -> list[dict[str, Any]]:
        gpus = [self._open(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        there = [gpu for gpu in gpus if "handle" in gpu]
        self._wait(self._begin(there))
        window = self._window()
        self.collect()
        found = [self._gpu(gpu, window) if "handle" in gpu else gpu for gpu in gpus]
        self._forget({gpu["uuid"] for gpu in there} | {part["uuid"] for gpu in there for part in parts(gpu)})
        return found

    def collect(self) -> None:
        """Between two questions: the driver's buffer is shorter than the time between them."""
        for uuid, handle in self._handles.items():
            samples = self._samples[uuid]
            try:
                kind, taken = self._nvml.nvmlDeviceGetSamples(
                    handle, self._nvml.NVML_GPU_UTILIZATION_SAMPLES, samples.newest_us
                )
            except self._nvml.NVMLError as error:
                nothing_newer = error.value == self._nvml.NVML_ERROR_NOT_FOUND
                samples.failure = None if nothing_newer else self._refused(error)
                continue
            samples.failure = None
            for one in sorted(taken, key=lambda one: int(one.timeStamp)):
                samples.add(int(one.timeStamp), self._value(kind, one.sampleValue))

    def _open(self, index: int) -> dict[str, Any]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError as error:
            return {"index": index, "uuid": {"why": words(error)}}
        sliced = is_sliced(self._nvml, handle)
        found = self._slices(handle) if sliced is True else []
        return {"index": index, "uuid": uuid, "handle": handle, "sliced": sliced, "slices": found}

    def _slices(self, handle: Any) -> list[dict[str, Any]] | dict[str, Any]:
        nvml, found = self._nvml, []
        try:
            for index, part in each_slice(nvml, handle):
                gi, ci = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
                uuid = text(nvml.nvmlDeviceGetUUID(part))
                found.append({"uuid": uuid, "index": index, "gi": int(gi), "ci": int(ci), "handle": part})
        except nvml.NVMLError as error:
            return self._refused(error)
        return found

    def _begin(self, gpus: list[dict[str, Any]]) -> bool:
        """Whether something is measured for the first time and so needs a window."""
        new = False
        for gpu in gpus:
            uuid = gpu["uuid"]
            if uuid not in self._energy:
                new, self._energy[uuid] = True, self._energy_of(gpu["handle"])
            if gpu["sliced"] is True:
                self._handles.pop(uuid, None)
            else:
                self._handles[uuid] = gpu["handle"]
                self._samples.setdefault(uuid, Samples())
            for key, gi in measured(gpu):
                if key not in self._gpm and self._gpm_support(gpu["handle"]) is True:
                    new = True
                    try:
                        self._gpm[key] = self._sample(gpu["handle"], gi), self._clock()
                    except self._nvml.NVMLError:
                        continue  # the second sample will say why
        return new

    def _wait(self, new: bool) -> None:
        """Who asks only once gets a window too, and who asks twice at once no window that is too short."""
        since = 0.0 if new or self._asked is None else self._clock() - self._asked
        if since < SHORTEST_WINDOW_S:
            self._sleep(SHORTEST_WINDOW_S - since)

    def _window(self) -> float:
        before, self._asked = self._asked, self._clock()
        return SHORTEST_WINDOW_S if before is None else self._asked - before

    def _gpu(self, gpu: dict[str, Any], window: float) -> dict[str, Any]:
        handle, uuid = gpu["handle"], gpu["uuid"]
        before, self._energy[uuid] = self._energy[uuid], self._energy_of(handle)
        return {
            "index": gpu["index"],
            "uuid": uuid,
            "sliced": gpu["sliced"],
            "window_s": window,
            **({"gpm": ONLY_SLICES} if gpu["sliced"] is True else self._busy(handle, uuid, None)),
            **(self._utilisation(uuid) if gpu["sliced"] is not True else {"utilisation": NO_SLICE_UTILISATION}),
            "energy_mj": self._energy[uuid],
            "energy_before_mj": before,
            **self._holding(handle),
            "slices": [self._part(handle, part) for part in parts(gpu)] if is_list(gpu["slices"]) else gpu["slices"],
        }

    def _part(self, parent: Any, part: dict[str, Any]) -> dict[str, Any]:
        kept = {key: part[key] for key in ("uuid", "index", "gi", "ci")}
        return {**kept, **self._busy(parent, part["uuid"], part["gi"]), **self._holding(part["handle"])}

    def _utilisation(self, uuid: str) -> dict[str, Any]:
        samples = self._samples[uuid]
        facts = samples.facts()
        samples.begin_anew()
        return facts

    def _holding(self, handle: Any) -> dict[str, Any]:
        return {"memory_used_mib": memory(self._nvml, handle)["memory_used_mib"], "pids": self._pids(handle)}

    def _pids(self, handle: Any) -> Any:
        nvml = self._nvml
        try:
            found = {int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            try:
                found |= {int(one.pid) for one in nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)}
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:  # a slice may have no graphics
                    raise
        except nvml.NVMLError as error:
            return self._refused(error)
        return sorted(found)

    def _energy_of(self, handle: Any) -> Any:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except self._nvml.NVMLError as error:
            return self._refused(error)

    # GPM: two samples give the true mean of the time between them.

    def _busy(self, handle: Any, key: str, gi: int | None) -> dict[str, Any]:
        """With the time between the samples: one that failed leaves a window that is shorter than the question's."""
        support = self._gpm_support(handle)
        if support is not True:
            return {"gpm": support}
        before, since = self._gpm.pop(key, (None, self._clock()))
        try:
            self._gpm[key] = after, now = self._sample(handle, gi), self._clock()
            if before is None:
                return {"gpm": {"why": "it had no first sample"}}
            return {"gpm": self._between(before, after), "gpm_s": now - since}
        except self._nvml.NVMLError as error:
            return {"gpm": self._refused(error)}
        finally:
            self._free(before)

    def _gpm_support(self, handle: Any) -> Any:
        try:
            supported = bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except self._nvml.NVMLError as error:
            return self._refused(error)
        return supported or {"why": "this model has no performance monitoring (GPM)", "by_design": True}

    def _sample(self, handle: Any, gi: int | None) -> Any:
        """Of a slice its GPU instance: compute instances that share one are measured together."""
        sample = self._nvml.nvmlGpmSampleAlloc()
        try:
            if gi is None:
                self._nvml.nvmlGpmSampleGet(handle, sample)
            else:
                self._nvml.nvmlGpmMigSampleGet(handle, gi, sample)
        except self._nvml.NVMLError:
            self._free(sample)
            raise
        return sample

    def _between(self, before: Any, after: Any) -> Any:
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
        return value if math.isfinite(value) else {"why": "the driver's performance monitoring (GPM) gave no number"}

    def _free(self, sample: Any) -> None:
        if sample is not None:
            self._nvml.nvmlGpmSampleFree(sample)

    def _forget(self, present: set[str]) -> None:
        for key in set(self._gpm) - present:
            self._free(self._gpm.pop(key)[0])
        for kept in (self._samples, self._handles, self._energy):
            for key in set(kept) - present:
                del kept[key]

    def _value(self, kind: int, value: Any) -> float:
        nvml = self._nvml
        names = {nvml.NVML_VALUE_TYPE_DOUBLE: "dVal", nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal"}
        return float(getattr(value, names.get(kind, "uiVal")))

    def _refused(self, error: Any) -> dict[str, Any]:
        never = (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return {"why": words(error), "by_design": error.value in never}


def parts(gpu: dict[str, Any]) -> list[dict[str, Any]]:
    return gpu["slices"] if is_list(gpu["slices"]) else []


def measured(gpu: dict[str, Any]) -> list[tuple[str, int | None]]:
    """What has a window of its own: the slices of a GPU that is cut, else the GPU."""
    return [(part["uuid"], part["gi"]) for part in parts(gpu)] if gpu["sliced"] is True else [(gpu["uuid"], None)]


def is_list(value: Any) -> bool:
    return isinstance(value, list)


if __name__ == "__main__":
    main()
