"""Facts of this machine for the report: versions, limits, the PCI bus. Only reads.

Nothing here queries the driver. A figure that could not be read is Unknown; None is what does not exist here.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gpukeeper.devices import holders
from gpukeeper.devices.driver.client import is_nvidia_gpu
from gpukeeper.model.gpu import Fact, Gpu
from gpukeeper.model.unknown import Unknown

NCCL_TESTS = "all_reduce_perf"
FOLDERS = ("/opt/nccl-tests/build", "/opt/nccl_tests/build", "/usr/local/nccl-tests/build", "/usr/local/bin")
PREFIXES = ("NCCL_", "UCX_", "FI_")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)
FABRIC_MANAGER = "nv-fabricmanager"[:15]  # as the kernel cuts a name
INSIDE_MARKS = ("/.dockerenv", "/run/.containerenv")
INSIDE_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
NARROWS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_ID")
_NODE = re.compile(r"nvidia(\d+)")


def node_name() -> str:
    return written(os.environ.get("GPUKEEPER_NODE") or os.environ.get("NODE_NAME") or socket.gethostname())


def written(words: str) -> str:
    """As a report can be written: variables and paths may hold bytes that are no text."""
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def environment(variables: Mapping[str, str] = os.environ, proc: str = "/proc", root: str = "/") -> dict[str, Fact]:
    inside = is_inside(variables, proc, root)
    found: dict[str, Fact] = {
        "kernel": platform.release(),
        "os": _os(root),
        "hostname": socket.gethostname(),
        "containerized": inside,
        "shm_bytes": _shm(root),
        "memlock": _memlock(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": _memory(proc),
        "nccl_env": nccl_env(variables),
        "taint": _taint(proc),
        "fabric_manager": _fabric_manager(inside, proc),
        "nccl_tests": nccl_tests(variables.get("PATH", "")),
        "visible_devices": variables.get("CUDA_VISIBLE_DEVICES"),
    }
    return {key: written(fact) if isinstance(fact, str) else fact for key, fact in found.items()}


def is_inside(variables: Mapping[str, str] = os.environ, proc: str = "/proc", root: str = "/") -> bool:
    """Whether we run in a workload that may show less than the machine has. In doubt yes: it makes us careful."""
    if any(variables.get(name) for name in INSIDE_VARIABLES) or holders.is_walled(proc):
        return True
    if any(Path(root, mark.lstrip("/")).exists() for mark in INSIDE_MARKS):
        return True
    try:
        cgroup = holders.text_of(Path(proc, "self/cgroup"))
        mounts = holders.text_of(Path(proc, "self/mountinfo"))
    except OSError:
        return True
    return holders.parse_container(cgroup) is not None or _root_is_layered(mounts)


def _root_is_layered(mounts: str) -> bool:
    for line in mounts.split("\n"):
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[4:5] == ["/"] and rest.split(" ")[:1] == ["overlay"]:
            return True
    return False


def on_bus(
    known: Collection[int],
    variables: Mapping[str, str] = os.environ,
    *,
    inside: bool,
    pci: str = "/sys/bus/pci/devices",
    dev: str = "/dev",
) -> int | Unknown:
    """GPUs that the PCI bus shows and that are ours to use. `known`: minors of those the driver names.

    A number only if the visible GPUs cannot have been restricted, since a GPU too few is taken for a broken machine:
    not inside a workload (the bus is the whole machine's there), not under variables or a device cgroup that narrow. A
    device that another driver has (a virtual machine's) or that is a part of another (a virtual function) is not ours.
    """
    if inside:
        return Unknown(
            "inside a container the PCI bus shows the whole machine, and fewer GPUs may be assigned", by_design=True
        )
    narrowed = [name for name in NARROWS if variables.get(name) not in (None, "all")]  # even to nothing
    if narrowed:
        return Unknown(f"{narrowed[0]} may limit the GPUs that the driver shows", by_design=True)
    try:
        found = sum(_is_ours(device) for device in Path(pci).iterdir())
    except OSError as error:
        return Unknown(f"the PCI bus could not be read: {error.strerror}", by_design=True)
    if found > len(known) and any(_is_denied(node) for node in _nodes(dev) if _minor(node) not in known):
        return Unknown("not every GPU of this machine can be opened (device cgroup or permissions)", by_design=True)
    return found


def _is_ours(device: Path) -> bool:
    if not is_nvidia_gpu(device) or (device / "physfn").exists():
        return False
    driver = device / "driver"
    return not driver.is_symlink() or driver.readlink().name == "nvidia"  # none took it: that is worth a finding


def _nodes(dev: str) -> list[Path]:
    return [node for node in Path(dev).glob("nvidia*") if _NODE.fullmatch(node.name)]


def _minor(node: Path) -> int:
    return int(node.name.removeprefix("nvidia"))


def _is_denied(node: Path) -> bool:
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def visible(gpus: Sequence[Gpu], variables: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves us, as CUDA reads it: numbers or beginnings of uuids, up to the first that
    names nothing. A scheduler that sets it assigned the other GPUs to other jobs. The index of a split GPU: its
    slices."""
    shown = variables.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return tuple(gpus)
    found: dict[str, Gpu] = {}
    for name in (one.strip() for one in shown.split(",")):
        meant = [gpu for gpu in gpus if _is_named(gpu, name)]
        if not meant:
            break
        found |= {gpu.uuid: gpu for gpu in meant}
    return tuple(gpu for gpu in gpus if gpu.uuid in found)


def _is_named(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.index == int(name)
    return name.startswith(("GPU-", "MIG-")) and (gpu.uuid.startswith(name) or (gpu.part_of or "").startswith(name))


def numa_of(pci_address: str, pci: str = "/sys/bus/pci/devices") -> int | Unknown | None:
    """Of the CPU that it hangs on. None: the machine has no such nodes. The driver writes 00000000:1B:00.0."""
    domain, _, rest = pci_address.partition(":")
    try:
        node = int(Path(pci, f"{int(domain, 16):04x}:{rest.lower()}", "numa_node").read_text())
    except (OSError, ValueError) as error:
        return Unknown(f"its NUMA node could not be read: {error}", by_design=True)
    return node if node >= 0 else None


def nccl_env(variables: Mapping[str, str]) -> str:
    """What steers NCCL and the transports below it, as one line; nothing that smells of a secret."""
    kept = {k: v for k, v in variables.items() if k.startswith(PREFIXES)}
    return " ".join(f"{k}={'(set)' if SECRET.search(k) else v}" for k, v in sorted(kept.items()))


def nccl_tests(path: str) -> str | None:
    return shutil.which(NCCL_TESTS, path=os.pathsep.join((path, *FOLDERS)))


def _os(root: str) -> str | Unknown:
    try:
        lines = Path(root, "etc/os-release").read_text("utf-8", "replace").splitlines()
    except OSError as error:
        return Unknown(f"os-release could not be read: {error.strerror}")
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "unknown")


def _shm(root: str) -> int | Unknown | None:
    try:
        found = os.statvfs(Path(root, "dev/shm"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Unknown(f"the size of shared memory could not be read: {error.strerror}")
    return found.f_blocks * found.f_frsize


def _memlock() -> int | str:
    """Bytes that may be locked; NCCL and RDMA pin their buffers."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _memory(proc: str) -> int | Unknown:
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path(proc, "meminfo").read_text(), re.MULTILINE)
    except OSError as error:
        return Unknown(f"the memory size of the machine could not be read: {error.strerror}")
    return int(found[1]) // 1024 if found else Unknown("the memory size of the machine could not be read")


def _taint(proc: str) -> int | Unknown:
    try:
        return int(Path(proc, "sys/kernel/tainted").read_text())
    except (OSError, ValueError):
        return Unknown("whether the kernel is tainted could not be read", by_design=True)


def _fabric_manager(inside: bool, proc: str) -> bool | Unknown:
    """Whether the program that NVSwitch machines need is running; a machine without a switch needs none."""
    running = any(_comm(pid, proc) == FABRIC_MANAGER for pid in holders.pids(proc))
    if running or not inside:
        return running
    return Unknown("services of the machine are not visible inside a container", by_design=True)


def _comm(pid: int, proc: str) -> str:
    try:
        return Path(proc, str(pid), "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""
