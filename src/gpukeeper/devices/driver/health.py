"""What an acceptance run reads of a GPU: identity, counters and states, and what a thread samples of them every
second. NVML calls, for the child only.

A table by the key of a fact; each call that fails makes its own fact Unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from gpukeeper.devices.driver.nvml import (
    energy,
    errors,
    every_gpu,
    fact,
    faults,
    field_value,
    refused,
    remapped_rows,
    text,
    utilisation,
    with_more,
)
from gpukeeper.model.gpu import Reading
from gpukeeper.model.unknown import Unknown

Ask: TypeAlias = Callable[[Any, Any], Any]  # NVML and the handle of a GPU

NO_FABRIC = Unknown("this GPU is not on an NVLink fabric", by_design=True)
NO_FABRIC_HEALTH = Unknown("the driver does not report it", by_design=True)
NO_LINKS = Unknown("this GPU has no NVLinks, or none of them is up", by_design=True)
AGREE = {0: "board", 10: "switch", 20: "switch", 30: "bridge", 40: "node", 50: "system"}  # common ancestor, as text
NOT_KNOWN = "not known"
MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
ARCHITECTURES = {5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper", 10: "Blackwell", 13: "Rubin"}


# What exists here, and does not change.


def identity(nvml: Any) -> dict[str, Any]:
    """Fields of a Reply."""
    found = every_gpu(nvml)
    named = [(str(gpu.uuid), handle) for handle, gpu in found if handle is not None]
    return {
        "gpus": tuple(with_more(nvml, handle, gpu, identity_of) for handle, gpu in found),
        "topology": {a: {b: between(nvml, one, two) for b, two in named if b != a} for a, one in named},
        "driver": fact(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion())),
        "cuda_driver": fact(nvml, lambda: cuda_version(nvml)),
    }


def identity_of(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "serial": fact(nvml, lambda: text(nvml.nvmlDeviceGetSerial(handle))),
        "facts": each(FACTS, nvml, handle),
    }


def between(nvml: Any, one: Any, two: Any) -> str:
    """How two GPUs reach each other. NVLink comes first: the path over the bus is then not used."""
    linked = fact(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(one, two, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    if isinstance(linked, Unknown):
        if not linked.by_design:
            return NOT_KNOWN
    elif linked == nvml.NVML_P2P_STATUS_OK:
        return "nvlink"
    ancestor = fact(nvml, lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, two)))
    return NOT_KNOWN if isinstance(ancestor, Unknown) else AGREE.get(ancestor, "other")


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


# The current state.


def health(nvml: Any, handle: Any) -> dict[str, Any]:
    """Fields of GpuFacts."""
    links = nvlinks(nvml, handle)
    return {
        **faults(nvml, handle),
        "energy_mj": energy(nvml, handle),
        "counters": {
            **each(COUNTERS, nvml, handle),
            **remapped(nvml, handle),
            **link_errors(nvml, handle, links),
        },
        "states": {
            **each(STATES, nvml, handle),
            **fabric(nvml, handle),
            "nvlinks_active": links if isinstance(links, Unknown) else len(links),
        },
    }


def each(asks: dict[str, Ask], nvml: Any, handle: Any) -> dict[str, Any]:
    return {key: fact(nvml, partial(ask, nvml, handle)) for key, ask in asks.items()}


def ecc(kind: str, since: str) -> Ask:
    return lambda nvml, h: int(
        nvml.nvmlDeviceGetTotalEccErrors(
            h, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(nvml, f"NVML_{since}_ECC")
        )
    )


def field(name: str) -> Ask:
    return lambda nvml, h: field_value(nvml, h, getattr(nvml, f"NVML_FI_DEV_{name}"))


def violation(policy: str) -> Ask:
    return lambda nvml, h: int(
        nvml.nvmlDeviceGetViolationStatus(h, getattr(nvml, f"NVML_PERF_POLICY_{policy}")).violationTime
    )


def sram(nvml: Any, handle: Any) -> Any:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, nvml.byref(status))  # the binding does not support it
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


def remapped(nvml: Any, handle: Any) -> dict[str, int | Unknown]:
    rows, keys = remapped_rows(nvml, handle), ("remapped_correctable", "remapped_uncorrectable")
    return {key: rows if isinstance(rows, Unknown) else int(rows[place]) for place, key in enumerate(keys)}


def nvlinks(nvml: Any, handle: Any) -> list[int] | Unknown:
    """The numbers of those that are up."""
    found: list[int] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                found.append(link)
        except nvml.NVMLError as error:
            if link == 0 or error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return refused(nvml, error)
            break  # no more of them
    return found


def links_total(nvml: Any, handle: Any) -> int:
    return field_value(nvml, handle, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


def link_errors(nvml: Any, handle: Any, links: list[int] | Unknown) -> dict[str, Any]:
    """Summed over the links that are up."""
    if isinstance(links, Unknown) or not links:
        why = links if isinstance(links, Unknown) else NO_LINKS
        return dict.fromkeys((*LINK_ERRORS, "nvlink_recovery_failed"), why)

    def summed(ask: Callable[[int], int]) -> int | Unknown:
        return fact(nvml, lambda: sum(ask(link) for link in links))

    def counted(number: int) -> int | Unknown:
        return summed(lambda link: int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number)))

    def by_field(name: str) -> int | Unknown:
        return summed(lambda link: field_value(nvml, handle, getattr(nvml, f"NVML_FI_DEV_{name}"), link))

    found = {key: counted(getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}")) for key, name in LINK_ERRORS.items()}
    if isinstance(found["nvlink_recovery"], Unknown):  # NVLink 5 counts differently
        found["nvlink_recovery"] = by_field("NVLINK_COUNT_LINK_RECOVERY_EVENTS")
    return {**found, "nvlink_recovery_failed": by_field("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS")}


LINK_ERRORS = {
    "nvlink_replay": "REPLAY",
    "nvlink_recovery": "RECOVERY",
    "nvlink_crc_flit": "CRC_FLIT",
    "nvlink_crc_data": "CRC_DATA",
}


def fabric(nvml: Any, handle: Any) -> dict[str, Any]:
    """`fabric_state` as NVML numbers it (3: completed), `fabric_status` its return code (0: fine), and the health that
    newer drivers report: 1 healthy, 2 unhealthy, 3 limited capacity."""
    keys = ("fabric_state", "fabric_status", "fabric_health")
    found = fact(nvml, lambda: fabric_info(nvml, handle))
    if isinstance(found, Unknown):
        return dict.fromkeys(keys, found)
    if found[0] == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return dict.fromkeys(keys, NO_FABRIC)
    return dict(zip(keys, found, strict=True))


def fabric_info(nvml: Any, handle: Any) -> tuple[int, int, int | Unknown]:
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
    return int(info.state), int(info.status), health or NO_FABRIC_HEALTH


def inforom_ok(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_CORRUPTED_INFOROM:
            raise
        return False
    return True


def repair_needed(nvml: Any, handle: Any) -> bool | Unknown:
    """Two calls of the driver: repairs that are pending, and memory beyond repair. One is enough."""
    found = [
        fact(nvml, lambda: any(nvml.nvmlDeviceGetRepairStatus(handle))),
        fact(nvml, lambda: bool(nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(handle))),
    ]
    if True in found:
        return True
    silent = sorted((one for one in found if isinstance(one, Unknown)), key=lambda one: one.by_design)
    return silent[0] if silent and (len(silent) == len(found) or not silent[0].by_design) else False


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


SAMPLED_EVERY_S = 0.5
MOST_ROUNDS = 20_000  # nearly three hours; with fewer requests every second one is kept, then every fourth
MOST_READINGS = 160_000  # of all GPUs or slices together: one line of output
Sampled: TypeAlias = tuple[tuple[str, ...], Any]  # the uuids that a GPU's readings are for, and its handle


class Sampler:
    """None in a Reading: not measured. What is not fetched stays bounded: every second round is dropped, and the next
    ones are half as frequent. A request starts again.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._rounds: list[list[Reading]] = []
        self._every_s = SAMPLED_EVERY_S
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

    def take(self) -> tuple[Reading, ...]:
        """Since the last time."""
        with self._writing:
            taken, self._rounds, self._every_s = self._rounds, [], SAMPLED_EVERY_S
        return tuple(one for each in taken for one in each)

    def once(self, gpus: list[Sampled]) -> None:
        found: list[Reading] = []
        for uuids, handle in gpus:
            at = self._clock()
            values = {key: self._value(ask, handle) for key, ask in NOW.items()}
            found += [Reading(uuid=uuid, at=at, **values) for uuid in uuids]
        with self._writing:
            self._rounds.append(found)
            if len(self._rounds) >= min(MOST_ROUNDS, MOST_READINGS // max(1, len(found))):
                self._rounds, self._every_s = self._rounds[::2], 2 * self._every_s

    def gpus(self) -> list[Sampled]:
        """A GPU with its own uuid, or with those of its slices."""
        found: list[Sampled] = []
        for handle, gpu in every_gpu(self._nvml):
            if not isinstance(gpu.uuid, Unknown):
                slices = () if isinstance(gpu.slices, Unknown) else gpu.slices
                found.append((tuple(part.uuid for part in slices) or (gpu.uuid,), handle))
        return found

    def _run(self) -> None:
        gpus: list[Sampled] = []
        due = self._clock()
        while not self._over.wait(max(due - self._clock(), 0.0)):
            due = max(due + self._every_s, self._clock())  # missed samples are not made up for
            with suppress(*errors(self._nvml)):
                gpus = gpus or self.gpus()
            self.once(gpus)

    def _value(self, ask: Ask, handle: Any) -> Any:
        value = fact(self._nvml, lambda: ask(self._nvml, handle))
        return None if isinstance(value, Unknown) else value
