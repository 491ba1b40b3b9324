"""A driver that works like NVML and is not one. It uses NVML's own constants and structures, which need no driver."""

from __future__ import annotations

from typing import Any

import pynvml

MIB = 1024 * 1024
NOT_SUPPORTED, LOST, MISMATCH = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)


class Values:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Nvml:
    """Healthy H200s by their answers. `says`: other answers by the name of the call; Refuses is an error. `lost`: GPUs
    that answer no call any more, by handle. `mig`: the slices of a GPU by their handles, None for an empty place.

    A call that is not scripted is one that the model does not support.
    """

    def __init__(
        self,
        gpus: int = 1,
        says: dict[str, Any] | None = None,
        mig: dict[str, list[str | None]] | None = None,
        lost: set[str] | None = None,
    ) -> None:
        self.gpus, self.mig, self.lost, self.opened = gpus, mig or {}, lost or set(), 0
        self.says: dict[str, Any] = {
            "System_GetDriverVersion": "580.95.05",
            "System_GetCudaDriverVersion_v2": 13000,
            "Name": b"NVIDIA H200",
            "Serial": "1650924011229",
            "PciInfo": Values(busId="00000000:1B:00.0"),
            "MinorNumber": 3,
            "VbiosVersion": "96.00.B9.00.01",
            "CpuAffinity": [0b1111, 0, 0b1],
            "Architecture": 9,
            "TotalEccErrors": lambda handle, kind, since: 10 * kind + since,
            "RemappedRows": (1, 2, 0, 1),
            "PcieReplayCounter": 5,
            "ViolationStatus": lambda handle, policy: Values(violationTime=1000 + policy),
            "TotalEnergyConsumption": 77,
            "NvLinkState": lambda handle, link: 1 if link < 18 else refuse(NOT_SUPPORTED),
            "NvLinkErrorCounter": lambda handle, link, counter: counter,
            "FieldValues": self.fields,
            "ClockInfo": lambda handle, kind: 1980 if kind == pynvml.NVML_CLOCK_SM else 3201,
            "MaxClockInfo": lambda handle, kind: 1980,
            "PowerUsage": 123_400,
            "EnforcedPowerLimit": 700_000,
            "Temperature": 31,
            "TemperatureThreshold": lambda handle, which: 90 + which,
            "UtilizationRates": Values(gpu=42),
            "CurrentClocksEventReasons": 0x4,
            "CurrPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "PersistenceMode": 1,
            "EccMode": [1, 0],
            "ComputeMode": 3,
            "SramEccErrorStatus": sram,
            "GpuFabricInfoV": fabric,
            "RepairStatus": [0, 0],
            "ComputeRunningProcesses": [Values(pid=9)],
            "GraphicsRunningProcesses": [],
            "MPSComputeRunningProcesses": [],
            "TopologyCommonAncestor": 50,
            "P2PStatus": 5,
            **(says or {}),
        }

    def __getattr__(self, name: str) -> Any:
        """NVML's constants and structures need no driver; its calls are ours."""
        if not name.startswith("nvml") or name.startswith(("nvmlMemory_", "nvmlEcc", "nvmlGpuFabricInfo_")):
            return getattr(pynvml, name)
        call = name.removeprefix("nvmlDeviceGet").replace("nvmlSystem", "System_").removeprefix("nvmlDevice")

        def answer(*arguments: Any, **_: Any) -> Any:
            self.reach(*arguments[:1])
            said = self.says.get(call, Refuses(NOT_SUPPORTED))
            if isinstance(said, Refuses):
                raise pynvml.NVMLError(said.number)
            return said(*arguments) if callable(said) else said

        return answer

    def reach(self, handle: Any = None) -> None:
        if isinstance(handle, str) and handle.split("/")[0] in self.lost:
            raise pynvml.NVMLError(LOST)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names
        if isinstance(said := self.says.get("Init"), Refuses):
            raise pynvml.NVMLError(said.number)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if isinstance(said := self.says.get("Count"), Refuses):
            raise pynvml.NVMLError(said.number)
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        self.reach(handle)
        return f"UUID-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> Any:  # noqa: N802
        self.reach(handle)
        if version and "MemoryInfo" in self.says:  # what drivers before 510 answer to the second version
            raise pynvml.NVMLError(self.says["MemoryInfo"].number)
        return Values(total=143_771 * MIB, used=4 * MIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:  # noqa: N802
        self.reach(handle)
        if isinstance(said := self.says.get("MigMode"), Refuses):
            raise pynvml.NVMLError(said.number)
        return (1, 1) if handle in self.mig else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        part = self.mig[handle][index] if index < len(self.mig[handle]) else None
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part

    def fields(self, handle: str, wanted: list[tuple[int, int]]) -> list[Any]:
        """It has the number of links and PCIe's correctable errors, as 64 bits; nothing else."""
        known = {pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: 18, pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS: 2**40}
        number = wanted[0][0] if isinstance(wanted[0], tuple) else wanted[0]
        found = pynvml.c_nvmlFieldValue_t()
        found.nvmlReturn = 0 if number in known else NOT_SUPPORTED
        found.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        found.value.ullVal = known.get(number, 0)
        return [found]


class Refuses:
    def __init__(self, number: int) -> None:
        self.number = number


def refuse(number: int) -> Any:
    raise pynvml.NVMLError(number)


def sram(handle: str, reference: Any) -> None:
    """By reference, as the driver's library needs it: the structure itself would be read as an address."""
    status = reference._obj
    assert status.version == pynvml.nvmlEccSramErrorStatus_v1
    status.aggregateUncParity, status.aggregateUncSecDed, status.bThresholdExceeded = 3, 4, 1


def fabric(handle: str, reference: Any) -> None:
    info = reference._obj
    assert info.version == pynvml.nvmlGpuFabricInfo_v3
    info.state, info.status, info.healthSummary = 3, 0, 1


def older_fabric(handle: str, reference: Any) -> None:
    info = reference._obj
    if info.version != pynvml.nvmlGpuFabricInfo_v2:
        refuse(MISMATCH)
    info.state, info.status = 2, 0
