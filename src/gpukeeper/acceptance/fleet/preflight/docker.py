"""What a Docker or Podman engine reports of itself, and what would prevent a run on it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpukeeper.acceptance.fleet.preflight.finding import Finding, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.quantity import gibibytes, quantity
from gpukeeper.model.unknown import Unknown

CONFIGURE = "sudo nvidia-ctk runtime configure --runtime=docker"
RESTART = "sudo systemctl restart docker"
CDI = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`devices`: of CDI, as the engine lists them; older engines list none. `gpus`: of this machine, by its driver."""

    address: str
    version: str = ""
    runtimes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    memory: int = 0  # bytes
    rootless: bool = False
    image: bool | Unknown = False  # whether it is there
    gpus: int | Unknown = 0


def judge_engine(facts: EngineFacts, image: str, shm: str) -> tuple[Finding, ...]:
    return (
        passed("engine", f"{facts.address} is reachable: version {facts.version}"),
        *_gpus(facts),
        *_image(facts, image),
        *_memory(facts, shm),
    )


def _gpus(facts: EngineFacts) -> Iterator[Finding]:
    if isinstance(facts.gpus, Unknown):
        yield unchecked("engine-gpus", facts.gpus, (), ["nvidia-smi -L"])
    elif facts.gpus == 0:
        yield failed("engine-gpus", "this machine has no GPU that the driver shows", (), ["nvidia-smi -L"])
    else:
        yield passed("engine-gpus", f"{facts.gpus} GPUs by the driver of this machine")
    listed = [one for one in facts.devices if one.startswith("nvidia.com/gpu")]
    if "nvidia" in facts.runtimes:
        yield passed("engine-runtime", "the nvidia runtime is registered")
    elif listed:
        yield passed("engine-runtime", f"CDI devices: {named(listed)}", listed)
    else:
        words = f"neither the nvidia runtime nor a CDI device of NVIDIA; runtimes: {named(facts.runtimes) or 'none'}"
        yield failed("engine-runtime", f"{words}. --gpus all fails", facts.runtimes, [CONFIGURE, RESTART, CDI])


def _image(facts: EngineFacts, image: str) -> Iterator[Finding]:
    if not image:
        yield unchecked("engine-image", "no image was given", (), ["repeat with --image IMAGE"])
    elif isinstance(facts.image, Unknown):
        yield unchecked("engine-image", facts.image, [image], [f"docker image inspect {image}"])
    elif facts.image:
        yield passed("engine-image", f"{image} is there", [image])
    else:
        yield failed("engine-image", f"{image} is not there", [image], [f"docker pull {image}"])


def _memory(facts: EngineFacts, shm: str) -> Iterator[Finding]:
    size = quantity(shm)
    have = quantity(str(facts.memory))
    if size is None or not have:
        why = f"{shm} is not a size such as 16Gi" if size is None else "the engine does not report its memory"
        yield unchecked("engine-shm", why, (), ["repeat with --shm 16Gi"])
    elif size * 2 > have:
        words = f"--shm-size of {gibibytes(size)} is more than half of {gibibytes(have)}"
        yield warning("engine-shm", words, (), ["repeat with --shm 8Gi"])
    else:
        yield passed("engine-shm", f"--shm-size of {gibibytes(size)} fits into {gibibytes(have)}")
    if facts.rootless:
        words = "the engine is rootless: it cannot raise the limit of locked memory, which RDMA needs"
        line = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf"
        yield warning("engine-memlock", words, (), [line])
    else:
        yield passed("engine-memlock", "the engine runs as root: --ulimit memlock=-1 is possible")
