"""The program that keeps the NVIDIA driver open while GPUs are tested, and says how they are.

Run it: python -m gpukeeper.devices.health_child. It reads words, one a line, and prints one JSON record for each:
`facts` (what is here), `look` (counters and states now), `readings` (what a thread sampled twice a second since the
last question). It ends with its input. It judges nothing. A fact that the driver would not give is {"why": …} with
`by_design` when it never will.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from gpukeeper.devices.condition_child import advice
from gpukeeper.devices.nvml_child import each_slice, fact_or_absent, is_sliced, listed, memory, text, words
from gpukeeper.devices.usage_child import say

Record: TypeAlias = dict[str, Any]
Ask: TypeAlias = Callable[[Any, Any], Any]  # NVML and the handle of a GPU

EVERY_S = 0.5
MOST_ROUNDS = 20_000  # nearly three hours; who asks less often gets every second one, then every fourth
MOST_READINGS = 160_000  # of all GPUs or slices together: one line of output
ONLY_WHOLE = {"why": "the driver has no utilisation of a GPU that is cut into slices", "by_design": True}
NO_FABRIC = {"why": "this GPU is on no NVLink fabric", "by_design": True}
NO_LINKS = {"why": "this GPU has no NVLinks, or none of them is up", "by_design": True}
AGREE = {0: "board", 10: "switch", 20: "switch", 30: "bridge", 40: "node", 50: "system"}  # common ancestor, in words
NOT_KNOWN = "not known"
MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
ARCHITECTURES = {5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper", 10: "Blackwell", 13: "Rubin"}


def main() -> None:
    import pynvml

    watch = Watch(pynvml)
    for line in sys.stdin:
        say(watch.answer(line.strip()))


class Watch:
    """The open driver. Whatever goes wrong as a whole is told as a state; a new program begins anew."""

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._opened = False
        self._sampler: Sampler | None = None

    def answer(self, question: str) -> Record:
        """`state`: answered, no driver (library or kernel module is missing), failed."""
        nvml = self._nvml
        try:
            if not self._opened:
                nvml.nvmlInit()
                self._opened = True
            return {"state": "answered", **self._tell(question)}
        except nvml.NVMLError as error:
            missing = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            return {"state": "no driver" if error.value in missing else "failed", "why": words(error)}

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        if self._opened:
            self._opened = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _tell(self, question: str) -> Record:
        match question:
            case "facts":
                return facts(self._nvml)
            case "look":
                self._sample()
                return {"gpus": [look(self._nvml, *one) for one in handles(self._nvml)]}
            case "readings":
                return {"readings": self._sample().take()}
            case _:
                return {"why": f"{question!r} is no question"}

    def _sample(self) -> Sampler:
        if self._sampler is None:
            self._sampler = Sampler(self._nvml, self._clock)
            self._sampler.start()
        return self._sampler


def handles(nvml: Any) -> list[tuple[int, Any]]:
    """Index and handle of each whole GPU; in the place of a handle that cannot be had, why."""
    found: list[tuple[int, Any]] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            found.append((index, {"why": words(error)}))
    return found


# What is here, and stays.


def facts(nvml: Any) -> Record:
    here = handles(nvml)
    named = [(uuid, handle) for _, handle in here if isinstance(uuid := uuid_of(nvml, handle), str)]
    return {
        "gpus": [gpu(nvml, *one) for one in here],
        "topology": {a: {b: between(nvml, one, two) for b, two in named if b != a} for a, one in named},
        "driver": fact_or_absent(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion())),
        "cuda_driver": fact_or_absent(nvml, lambda: cuda_version(nvml)),
    }


def uuid_of(nvml: Any, handle: Any) -> Any:
    return handle if isinstance(handle, dict) else fact_or_absent(nvml, lambda: text(nvml.nvmlDeviceGetUUID(handle)))


def gpu(nvml: Any, index: int, handle: Any) -> Record:
    uuid = uuid_of(nvml, handle)
    if isinstance(uuid, dict):
        return {"index": index, "uuid": uuid}
    sliced = is_sliced(nvml, handle)
    return {
        "index": index,
        "uuid": uuid,
        **told(IDENTITY, nvml, handle),
        "memory_mib": memory(nvml, handle)["memory_total_mib"],
        "facts": told(FACTS, nvml, handle),
        "sliced": sliced,
        "slices": slices(nvml, handle) if sliced is True else [],
    }


def slices(nvml: Any, handle: Any) -> list[Record] | Record:
    try:
        return [slice_of(nvml, part) for _, part in each_slice(nvml, handle)]
    except nvml.NVMLError as error:
        return {"why": words(error)}


def slice_of(nvml: Any, part: Any) -> Record:
    return {
        "uuid": text(nvml.nvmlDeviceGetUUID(part)),
        "name": fact_or_absent(nvml, lambda: text(nvml.nvmlDeviceGetName(part))),
        "gpu_instance": fact_or_absent(nvml, lambda: int(nvml.nvmlDeviceGetGpuInstanceId(part))),
        "compute_instance": fact_or_absent(nvml, lambda: int(nvml.nvmlDeviceGetComputeInstanceId(part))),
        "memory_mib": memory(nvml, part)["memory_total_mib"],
        "sms": fact_or_absent(nvml, lambda: int(nvml.nvmlDeviceGetAttributes(part).multiprocessorCount)),
    }


def between(nvml: Any, one: Any, two: Any) -> str:
    """How two GPUs reach each other. NVLink comes first: the way over the bus is then not used."""
    linked = answered(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(one, two, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    if linked == nvml.NVML_P2P_STATUS_OK:
        return "nvlink"
    if isinstance(linked, dict) and not linked.get("by_design"):
        return NOT_KNOWN
    try:
        return AGREE.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, two)), "other")
    except nvml.NVMLError:
        return NOT_KNOWN


def cuda_version(nvml: Any) -> str:
    number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    return f"{number // 1000}.{number % 1000 // 10}"


def architecture(nvml: Any, handle: Any) -> str:
    number = int(nvml.nvmlDeviceGetArchitecture(handle))
    return ARCHITECTURES.get(number, f"architecture {number}")


def affinity(nvml: Any, handle: Any) -> str:
    """The CPUs near it, as the kernel writes sets: 0-51,104-155."""
    masks = nvml.nvmlDeviceGetCpuAffinity(handle, 32)
    cpus = [64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if int(mask) >> bit & 1]
    return spans(cpus)


def spans(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{low}-{high}" if low != high else str(low) for low, high in found)


IDENTITY: dict[str, Ask] = {
    "name": lambda nvml, h: text(nvml.nvmlDeviceGetName(h)),
    "serial": lambda nvml, h: text(nvml.nvmlDeviceGetSerial(h)),
    "pci": lambda nvml, h: text(nvml.nvmlDeviceGetPciInfo(h).busId),
    "minor": lambda nvml, h: int(nvml.nvmlDeviceGetMinorNumber(h)),
}
FACTS: dict[str, Ask] = {
    "vbios": lambda nvml, h: text(nvml.nvmlDeviceGetVbiosVersion(h)),
    "firmware": lambda nvml, h: text(nvml.nvmlDeviceGetGspFirmwareVersion(h)),
    "inforom": lambda nvml, h: text(nvml.nvmlDeviceGetInforomImageVersion(h)),
    "cpu_affinity": affinity,
    "architecture": architecture,
    "cores": lambda nvml, h: int(nvml.nvmlDeviceGetNumGpuCores(h)),
    "bus_width": lambda nvml, h: int(nvml.nvmlDeviceGetMemoryBusWidth(h)),
    "module": lambda nvml, h: int(nvml.nvmlDeviceGetModuleId(h)),
    "power_limit_w": lambda nvml, h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "power_default_w": lambda nvml, h: nvml.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
    "nvlink_version": lambda nvml, h: int(nvml.nvmlDeviceGetNvLinkVersion(h, 0)),
}


# How it is now.


def look(nvml: Any, index: int, handle: Any) -> Record:
    uuid = uuid_of(nvml, handle)
    if isinstance(uuid, dict):
        return {"index": index, "uuid": uuid}
    links = nvlinks(nvml, handle)
    sliced = is_sliced(nvml, handle)
    return {
        "index": index,
        "uuid": uuid,
        "counters": {**told(COUNTERS, nvml, handle), **remapped(nvml, handle)[0], **link_errors(nvml, handle, links)},
        "states": {
            **told(STATES, nvml, handle),
            **remapped(nvml, handle)[1],
            **fabric(nvml, handle),
            "mig": sliced,
            "nvlinks_active": len(links) if isinstance(links, list) else links,
            "memory_used_mib": memory(nvml, handle)["memory_used_mib"],
        },
        "listed": answered(nvml, partial(listed, nvml, handle)),
        "slices": slices_now(nvml, handle) if sliced is True else [],
    }


def slices_now(nvml: Any, handle: Any) -> list[Record] | Record:
    try:
        return [
            {
                "uuid": text(nvml.nvmlDeviceGetUUID(part)),
                "states": {"memory_used_mib": memory(nvml, part)["memory_used_mib"], "utilisation": ONLY_WHOLE},
                "listed": answered(nvml, partial(listed, nvml, part)),
            }
            for _, part in each_slice(nvml, handle)
        ]
    except nvml.NVMLError as error:
        return {"why": words(error)}


def told(asks: dict[str, Ask], nvml: Any, handle: Any) -> Record:
    return {key: answered(nvml, partial(ask, nvml, handle)) for key, ask in asks.items()}


def answered(nvml: Any, ask: Callable[[], Any]) -> Any:
    """As fact_or_absent. A driver that is older than our structures or calls does not have the fact, either."""
    try:
        return ask()
    except nvml.NVMLLibraryMismatchError as error:  # the binding's own, and none of NVML's errors
        return {"why": words(error), "by_design": True}
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvml.NVML_ERROR_DEPRECATED):
            return {"why": words(error), "by_design": True}
        failed = error
    return fact_or_absent(nvml, lambda: _again(failed))


def _again(error: Exception) -> Any:
    raise error


def ecc(kind: str, since: str) -> Ask:
    return lambda nvml, h: int(
        nvml.nvmlDeviceGetTotalEccErrors(
            h, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(nvml, f"NVML_{since}_ECC")
        )
    )


def field(name: str) -> Ask:
    return lambda nvml, h: field_value(nvml, h, getattr(nvml, f"NVML_FI_DEV_{name}"))


def field_value(nvml: Any, handle: Any, number: int, scope: int = 0) -> int:
    value = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    names = {nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal", nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal"}
    names |= {nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal", nvml.NVML_VALUE_TYPE_DOUBLE: "dVal"}
    return int(getattr(value.value, names.get(value.valueType, "uiVal")))


def violation(policy: str) -> Ask:
    return lambda nvml, h: int(
        nvml.nvmlDeviceGetViolationStatus(h, getattr(nvml, f"NVML_PERF_POLICY_{policy}")).violationTime
    )


def sram(nvml: Any, handle: Any) -> Any:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, nvml.byref(status))  # the binding does not do it
    return status


def sram_uncorrected(nvml: Any, handle: Any) -> int:
    status = sram(nvml, handle)
    return int(status.aggregateUncParity) + int(status.aggregateUncSecDed)


def retired(nvml: Any, handle: Any) -> int:
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def remapped(nvml: Any, handle: Any) -> tuple[Record, Record]:
    """Counters and states, of one call."""
    rows = answered(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    counters, states = ("remapped_correctable", "remapped_uncorrectable"), ("remap_pending", "remap_failed")
    if isinstance(rows, dict):
        return dict.fromkeys(counters, rows), dict.fromkeys(states, rows)
    return (
        {key: int(rows[place]) for place, key in enumerate(counters)},
        {key: bool(rows[place + 2]) for place, key in enumerate(states)},
    )


def nvlinks(nvml: Any, handle: Any) -> list[int] | Record:
    """The numbers of those that are up."""
    found, first = [], None
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                found.append(link)
        except nvml.NVMLError as error:
            first = error
            break  # no links, or no more of them
    if first is not None and not found and link == 0:
        failed = first
        return dict(answered(nvml, lambda: _again(failed)))
    return found


def links_total(nvml: Any, handle: Any) -> int:
    return field_value(nvml, handle, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


def link_errors(nvml: Any, handle: Any, links: list[int] | Record) -> Record:
    """Summed over the links that are up."""
    if isinstance(links, dict) or not links:
        why = links if isinstance(links, dict) else NO_LINKS
        return dict.fromkeys((*LINK_ERRORS, "nvlink_recovery_failed"), why)

    def summed(ask: Callable[[int], int]) -> Any:
        return answered(nvml, lambda: sum(ask(link) for link in links))

    def counted(number: int) -> Any:
        return summed(lambda link: int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number)))

    def by_field(name: str) -> Any:
        return summed(lambda link: field_value(nvml, handle, getattr(nvml, f"NVML_FI_DEV_{name}"), link))

    found = {key: counted(getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}")) for key, name in LINK_ERRORS.items()}
    if isinstance(found["nvlink_recovery"], dict):  # NVLink 5 counts otherwise
        found["nvlink_recovery"] = by_field("NVLINK_COUNT_LINK_RECOVERY_EVENTS")
    return {**found, "nvlink_recovery_failed": by_field("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS")}


LINK_ERRORS = {
    "nvlink_replay": "REPLAY",
    "nvlink_recovery": "RECOVERY",
    "nvlink_crc_flit": "CRC_FLIT",
    "nvlink_crc_data": "CRC_DATA",
}


def fabric(nvml: Any, handle: Any) -> Record:
    """`fabric_state` as NVML numbers it (3: completed), `fabric_status` its return code (0: fine), and the health that
    newer drivers tell: 1 healthy, 2 unhealthy, 3 limited capacity."""
    keys = ("fabric_state", "fabric_status", "fabric_health")
    told_ = answered(nvml, lambda: fabric_info(nvml, handle))
    if isinstance(told_, dict):
        return dict.fromkeys(keys, told_)
    if told_[0] == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return dict.fromkeys(keys, NO_FABRIC)
    return dict(zip(keys, told_, strict=True))


def fabric_info(nvml: Any, handle: Any) -> tuple[int, int, Any]:
    info = nvml.c_nvmlGpuFabricInfo_v3_t()
    info.version = nvml.nvmlGpuFabricInfo_v3
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(info))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            raise
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        info.version = nvml.nvmlGpuFabricInfo_v2
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(info))
    health = int(getattr(info, "healthSummary", 0))
    return int(info.state), int(info.status), health or {"why": "the driver does not tell it", "by_design": True}


def inforom_ok(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_CORRUPTED_INFOROM:
            raise
        return False
    return True


def repair_needed(nvml: Any, handle: Any) -> Any:
    """The driver's two words about it: repairs that wait, and memory beyond repair. One that is due settles it."""
    found = [
        answered(nvml, lambda: any(nvml.nvmlDeviceGetRepairStatus(handle))),
        answered(nvml, lambda: bool(nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(handle))),
    ]
    if True in found:
        return True
    silent = sorted((one for one in found if isinstance(one, dict)), key=lambda one: one.get("by_design", False))
    return silent[0] if silent and (len(silent) == len(found) or not silent[0].get("by_design")) else False


def reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # drivers before 535


def compute_mode(nvml: Any, handle: Any) -> str:
    number = int(nvml.nvmlDeviceGetComputeMode(handle))
    return MODES[number] if number < len(MODES) else f"mode {number}"


def utilisation(nvml: Any, handle: Any) -> Any:
    if is_sliced(nvml, handle) is True:
        return ONLY_WHOLE
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def threshold(name: str) -> Ask:
    return lambda nvml, h: int(
        nvml.nvmlDeviceGetTemperatureThreshold(h, getattr(nvml, f"NVML_TEMPERATURE_THRESHOLD_{name}"))
    )


def clock(name: str, call: str = "ClockInfo") -> Ask:
    return lambda nvml, h: int(getattr(nvml, f"nvmlDeviceGet{call}")(h, getattr(nvml, f"NVML_CLOCK_{name}")))


COUNTERS: dict[str, Ask] = {
    "ecc_corrected_volatile": ecc("CORRECTED", "VOLATILE"),
    "ecc_uncorrected_volatile": ecc("UNCORRECTED", "VOLATILE"),
    "ecc_corrected_aggregate": ecc("CORRECTED", "AGGREGATE"),
    "ecc_uncorrected_aggregate": ecc("UNCORRECTED", "AGGREGATE"),
    "sram_uncorrected_aggregate": sram_uncorrected,
    "retired_pages": retired,
    "pcie_replays": lambda nvml, h: int(nvml.nvmlDeviceGetPcieReplayCounter(h)),
    "pcie_correctable": field("PCIE_COUNT_CORRECTABLE_ERRORS"),
    "pcie_nonfatal": field("PCIE_COUNT_NON_FATAL_ERROR"),
    "pcie_fatal": field("PCIE_COUNT_FATAL_ERROR"),
    "violation_thermal_ns": violation("THERMAL"),
    "violation_power_ns": violation("POWER"),
    "violation_reliability_ns": violation("RELIABILITY"),
    "energy_mj": lambda nvml, h: int(nvml.nvmlDeviceGetTotalEnergyConsumption(h)),
}
NOW: dict[str, Ask] = {  # sampled all the time, so each must be cheap
    "sm_mhz": clock("SM"),
    "memory_mhz": clock("MEM"),
    "power_w": lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
    "temperature_c": lambda nvml, h: int(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
    "utilisation": utilisation,
    "reasons": reasons,
    "pcie_generation": lambda nvml, h: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_width": lambda nvml, h: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(h)),
}
STATES: dict[str, Ask] = {
    **NOW,
    "persistence": lambda nvml, h: bool(nvml.nvmlDeviceGetPersistenceMode(h)),
    "ecc_enabled": lambda nvml, h: bool(nvml.nvmlDeviceGetEccMode(h)[0]),
    "ecc_pending": lambda nvml, h: bool(nvml.nvmlDeviceGetEccMode(h)[1]),
    "retire_pending": lambda nvml, h: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(h)),
    "sram_threshold": lambda nvml, h: bool(sram(nvml, h).bThresholdExceeded),
    "repair_needed": repair_needed,
    "advice": advice,
    "inforom_ok": inforom_ok,
    "compute_mode": compute_mode,
    "nvlinks_total": links_total,
    "pcie_generation_max": lambda nvml, h: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),
    "pcie_generation_gpu_max": lambda nvml, h: int(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(h)),
    "pcie_width_max": lambda nvml, h: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(h)),
    "power_limit_w": FACTS["power_limit_w"],
    "power_default_w": FACTS["power_default_w"],
    "slowdown_c": threshold("SLOWDOWN"),
    "shutdown_c": threshold("SHUTDOWN"),
    "sm_mhz_max": clock("SM", "MaxClockInfo"),
    "memory_mhz_max": clock("MEM", "MaxClockInfo"),
    "app_sm_mhz": clock("SM", "ApplicationsClock"),
    "performance_state": lambda nvml, h: int(nvml.nvmlDeviceGetPerformanceState(h)),
}


class Sampler:
    """A thread that samples what changes by the second. None: not measured.

    What nobody asks for stays bounded: every second round is dropped, and the next ones come half as often. A question
    begins anew.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._rounds: list[list[Record]] = []
        self._every_s = EVERY_S
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def take(self) -> list[Record]:
        """Since the last time."""
        with self._writing:
            taken, self._rounds, self._every_s = self._rounds, [], EVERY_S
        return [one for each in taken for one in each]

    def once(self, gpus: list[tuple[tuple[str, ...], Any]]) -> None:
        found: list[Record] = []
        for uuids, handle in gpus:
            at = self._clock()
            values = {key: self._value(ask, handle) for key, ask in NOW.items()}
            found += [{"uuid": uuid, "at": at, **values} for uuid in uuids]
        with self._writing:
            self._rounds.append(found)
            if len(self._rounds) >= min(MOST_ROUNDS, MOST_READINGS // max(1, len(found))):
                self._rounds, self._every_s = self._rounds[::2], 2 * self._every_s

    def gpus(self) -> list[tuple[tuple[str, ...], Any]]:
        """The uuids that a GPU's readings are for: its own, or those of its slices."""
        nvml, found = self._nvml, []
        for _, handle in handles(nvml):
            uuid = uuid_of(nvml, handle)
            if isinstance(uuid, dict):
                continue
            parts = slices(nvml, handle) if is_sliced(nvml, handle) is True else []
            uuids = tuple(part["uuid"] for part in parts) if isinstance(parts, list) else ()
            found.append((uuids or (uuid,), handle))
        return found

    def _run(self) -> None:
        gpus: list[tuple[tuple[str, ...], Any]] = []
        due = self._clock()
        while not self._over.wait(max(due - self._clock(), 0.0)):
            due = max(due + self._every_s, self._clock())  # what was missed is not made up for
            with suppress(self._nvml.NVMLError):
                gpus = gpus or self.gpus()
            self.once(gpus)

    def _value(self, ask: Ask, handle: Any) -> Any:
        try:
            value = ask(self._nvml, handle)
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError):
            return None
        return None if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
