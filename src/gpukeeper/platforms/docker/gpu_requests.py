"""Which GPUs a container requests, in every form that exists. Pure.

A request is a claim on a device. The devices that its processes have open are decisive where a request is silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from gpukeeper.devices.driver.facts import GpuFacts
from gpukeeper.devices.naming import resolve
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.platforms.docker.wire import DeviceRequest, Inspected

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICE = frozenset({"", "none", "void"})
MOST_GPUS = 256  # of one request; users may write any number, and no machine has more
LONGEST = 200  # characters of a name
_NODE = re.compile(r"/dev/nvidia([0-9]{1,6})")
_CDI = re.compile(r"(?:runtime\.)?nvidia\.com/(?:gpu|mig)=.+")


class GpuRequest(msgspec.Struct, frozen=True):
    """`names` as the user wrote them; `minors` of device nodes; `how`: the requests, as text."""

    names: tuple[str, ...] = ()
    minors: tuple[int, ...] = ()
    how: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.minors)


def requested_gpus(container: Inspected, default_runtime: str = "") -> GpuRequest:
    host = container.host_config
    names: list[str] = []
    how: list[str] = []
    for request in host.device_requests or ():
        if wanted := _requested(request):
            names += wanted
            how.append(f"{'--device' if request.driver == 'cdi' else '--gpus'} {','.join(wanted)}")
    paths = [device.path_on_host for device in host.devices or ()]
    for path in paths:
        if _CDI.fullmatch(path):
            names.append(path)
            how.append(f"--device {path}")
    minors = tuple(int(found.group(1)) for path in paths if (found := _NODE.fullmatch(path)))
    how += (f"--device /dev/nvidia{minor}" for minor in minors)
    runtime = host.runtime or default_runtime
    if not names and "nvidia" in runtime:
        names += _visible(container.config.env or ())
        how += [f"{VISIBLE}={','.join(names)}"] if names else []
    return GpuRequest(tuple(names), minors, tuple(how))


def devices_of(
    container: Inspected, asks: GpuRequest, held: Iterable[str], inventory: Sequence[GpuFacts] | Unknown
) -> tuple[str, ...] | Unknown:
    """Uuids of what it requested and what it has open. () only if it certainly uses no GPU."""
    open_ = tuple(held)
    if not asks:
        return _sorted(open_)
    if isinstance(inventory, Unknown):
        return Unknown(f"it requests GPUs ({', '.join(asks.how)}), but they could not be resolved: {inventory.why}")
    if not inventory:
        return Unknown(f"it requests GPUs ({', '.join(asks.how)}), but this machine has none")
    found = list(open_)
    for name in dict.fromkeys(asks.names):
        if len(name) > LONGEST:
            return Unknown(f"{name[:40]!r}... is not the name of a GPU")
        uuids = resolve(name, inventory)
        if isinstance(uuids, Unknown):
            return uuids
        found += uuids
    by_minor = {gpu.minor: gpu for gpu in inventory if is_known(gpu.minor)}
    for minor in asks.minors:
        gpu = by_minor.get(minor)
        if gpu is None or isinstance(gpu.uuid, Unknown):
            return Unknown(f"it was given /dev/nvidia{minor}, but the driver reports no GPU with that number")
        if isinstance(gpu.slices, Unknown):
            return Unknown(f"it was given /dev/nvidia{minor}, but its slices could not be read: {gpu.slices.why}")
        found += [part.uuid for part in gpu.slices] or [gpu.uuid]
    return _sorted(found)


def _requested(request: DeviceRequest) -> list[str]:
    """A count means the first n GPUs, not any n; -1 means all."""
    if request.driver == "cdi":
        return [one for one in request.device_ids or () if _CDI.fullmatch(one)]
    wants_gpu = any("gpu" in group for group in request.capabilities or ()) or request.driver == "nvidia"
    if not wants_gpu:
        return []
    if request.device_ids:
        return list(request.device_ids)
    return ["all"] if request.count < 0 else [str(index) for index in range(min(request.count, MOST_GPUS))]


def _visible(env: Iterable[str]) -> list[str]:
    """The last value counts, as in any environment; "void" anywhere in it means none. An old CUDA image sets no
    variable and gets all.
    """
    given = dict(one.partition("=")[::2] for one in env)
    if VISIBLE not in given:
        return ["all"] if "CUDA_VERSION" in given and "NVIDIA_REQUIRE_CUDA" not in given else []
    names = [name.strip() for name in given[VISIBLE].split(",")]
    return [] if "void" in names else [name for name in names if name.lower() not in NO_DEVICE]


def _sorted(uuids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(uuids)))
