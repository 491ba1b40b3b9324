"""On a real GPU: the inventory and the host adapter say what the driver says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.devices.driver.client import inventory
from gpukeeper.model.policy import PlaceScope, Policy
from gpukeeper.model.subject import Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.adapter import HostPlatform
from tests.engines import has_gpu, require


class Now:
    def now(self) -> datetime:
        return datetime.now(UTC)


@pytest.mark.smoke
def test_every_gpu_of_the_driver_is_in_the_inventory() -> None:
    require("gpu", has_gpu())
    found = inventory(timedelta(seconds=30))
    assert not isinstance(found, Unknown), found
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert len(found) == sum(line.startswith("GPU ") for line in listed.splitlines())
    for gpu in found:
        assert str(gpu.uuid) in listed


def test_the_host_shows_its_gpus_while_one_is_in_use() -> None:
    """Who holds it is shown only for ordinary users and after a minute, which unit tests cover."""
    require("gpu", has_gpu())
    held = "import torch, sys; x = torch.ones(1, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        subjects = asyncio.run(_observe())
        shown = {s.ref.uid for s in subjects if s.shape is Shape.DEVICE}
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        assert shown
        assert all(uid in listed for uid in shown)
    finally:
        child.kill()
        child.communicate()


async def _observe() -> list:  # type: ignore[type-arg]
    host = HostPlatform("here", Policy(), Now())
    return [s async for page in host.observe(PlaceScope()) for s in page.subjects]
