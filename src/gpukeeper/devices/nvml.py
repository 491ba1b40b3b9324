"""Which GPUs are here, as the NVIDIA driver tells it. Looks only.

The driver is asked by a child (nvml_child) that is given up after a deadline: a stuck driver stops nobody.
No driver is an answer (no GPUs); a driver that is there and does not answer is Unknown.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown

NOT_ASKED = Unknown("the driver was not asked")
# -P: the folder we were started in is nobody we trust, and -m would import from it first.
CHILD = (sys.executable, "-P", "-m", "gpukeeper.devices.nvml_child")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"


class SliceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a GPU (MIG) with memory and cores of its own."""

    uuid: str
    index: int
    name: str | Unknown = NOT_ASKED
    gpu_instance: int | Unknown = NOT_ASKED
    compute_instance: int | Unknown = NOT_ASKED
    memory_total_mib: int | Unknown = NOT_ASKED
    memory_used_mib: int | Unknown = NOT_ASKED
    listed: tuple[int, ...] | Unknown = NOT_ASKED  # pids that the driver lists; dead ones among them


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU without a known uuid is there and does not answer (it fell off the bus, say)."""

    uuid: str | Unknown
    index: int
    name: str | Unknown = NOT_ASKED
    minor: int | Unknown = NOT_ASKED  # of /dev/nvidia<minor>; not always the index
    memory_total_mib: int | Unknown = NOT_ASKED
    memory_used_mib: int | Unknown = NOT_ASKED
    utilisation: float | Unknown = NOT_ASKED  # percent of the last second or less: a glimpse, no judgement
    listed: tuple[int, ...] | Unknown = NOT_ASKED  # pids that the driver lists; dead ones among them
    slices: tuple[SliceFacts, ...] | Unknown = ()


class Answer(msgspec.Struct, frozen=True):
    """What the child prints."""

    state: Literal["answered", "no driver", "failed"]
    gpus: tuple[GpuFacts, ...] = ()
    why: str = ""


def inventory(
    deadline: timedelta, child: Sequence[str] = CHILD, driver: str = "/proc/driver/nvidia"
) -> tuple[GpuFacts, ...] | Unknown:
    """Blocks, for no longer than the deadline and a moment."""
    printed = run_child(child, deadline)
    return printed if isinstance(printed, Unknown) else read(printed, Path(driver).exists())


def read(printed: bytes, driver_loaded: bool) -> tuple[GpuFacts, ...] | Unknown:
    try:
        answer = reading.decode(printed, type=Answer)
    except msgspec.DecodeError as error:
        return Unknown(f"the program that asks the NVIDIA driver gave no record: {error}")
    if answer.state == "answered":
        return answer.gpus
    if answer.state == "no driver" and not driver_loaded:
        return ()
    return Unknown(answer.why)


def gpu_note(driver: str = "/proc/driver/nvidia", pci: str = "/sys/bus/pci/devices") -> str | None:
    """A sentence for people when no GPU will be shown, or None. Never asks the driver, so it never hangs."""
    if Path(driver).exists():
        return None
    if any(is_nvidia_gpu(device) for device in Path(pci).glob("*")):
        return "An NVIDIA GPU is on the PCI bus, but no NVIDIA driver is loaded here: GPUs are not shown."
    return "There is no NVIDIA driver here: no GPUs to show."


def run_child(child: Sequence[str], deadline: timedelta) -> bytes | Unknown:
    try:
        asked = subprocess.Popen(child, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return Unknown(f"the program that asks the NVIDIA driver could not be started: {error.strerror}")
    try:
        printed, complaint = asked.communicate(timeout=deadline.total_seconds())
    except subprocess.TimeoutExpired:
        _give_up(asked)
        return Unknown(f"the NVIDIA driver did not answer within {in_words(deadline)}")
    if asked.returncode != 0:
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Unknown(f"asking the NVIDIA driver failed (exit {asked.returncode}): {''.join(last) or 'no word'}")
    return printed


def _give_up(asked: subprocess.Popen[bytes]) -> None:
    """A call inside the driver may not even die by SIGKILL, so nobody waits long for the end."""
    asked.kill()
    with suppress(subprocess.TimeoutExpired):
        asked.wait(timeout=1)
    for pipe in (asked.stdout, asked.stderr):
        if pipe is not None:
            pipe.close()


def is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, class_ = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA_VENDOR and class_.startswith(DISPLAY_CLASS)
