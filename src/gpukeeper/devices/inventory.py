"""Which GPUs exist here. Reads only.

No driver is a valid result (no GPUs); a driver that is loaded and does not answer is Unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from gpukeeper.devices.driver.client import CHILD, query_once
from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.driver.protocol import DriverReply
from gpukeeper.model.unknown import Unknown

NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
LOADED = "/proc/driver/nvidia"


def inventory(
    deadline: timedelta, child: Sequence[str] = CHILD, driver: str = LOADED
) -> tuple[GpuFacts, ...] | Unknown:
    """Blocks, for no longer than the deadline and a moment."""
    return gpus_in(query_once("inventory", deadline, child), Path(driver).exists())


def gpus_in(answer: DriverReply | Unknown, driver_loaded: bool) -> tuple[GpuFacts, ...] | Unknown:
    if isinstance(answer, Unknown):
        return answer
    if answer.state == "answered" or (answer.state == "no driver" and not driver_loaded):
        return answer.gpus
    return Unknown(answer.why)


def gpu_note(driver: str = LOADED, pci: str = "/sys/bus/pci/devices") -> str | None:
    """A sentence for users if no GPU will be shown, or None. Never queries the driver, so it never hangs."""
    if Path(driver).exists():
        return None
    if any(is_nvidia_gpu(device) for device in Path(pci).glob("*")):
        return "An NVIDIA GPU is on the PCI bus, but no NVIDIA driver is loaded: GPUs are not shown."
    return "No NVIDIA driver found: no GPUs to show."


def is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, class_ = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA_VENDOR and class_.startswith(DISPLAY_CLASS)
