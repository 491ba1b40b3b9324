"""Containers as real engines described them, and ways to change one thing about them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.clients.docker import Inspected
from gpukeeper.devices.driver.facts import GpuFacts, SliceFacts
from gpukeeper.platforms.docker.owners import Ownership
from gpukeeper.platforms.docker.translate import ContainerFacts, GpuRequest, PlaceAndTime

RECORDED = Path(__file__).parent / "recorded"
NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
AT = PlaceAndTime("node-3", NOW)
ANN = Ownership("ann", True, (), ())
ID = "0123456789abcdef" * 4
OTHER_ID = "fedcba9876543210" * 4
WHOLE = GpuFacts(uuid="GPU-a", index=0, minor=0)
SECOND = GpuFacts(uuid="GPU-b", index=1, minor=3)
CUT = GpuFacts(
    uuid="GPU-c",
    index=2,
    minor=2,
    slices=(
        SliceFacts(uuid="MIG-1", index=0, gpu_instance=7, compute_instance=0),
        SliceFacts(uuid="MIG-2", index=1, gpu_instance=8, compute_instance=0),
    ),
)


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


DOCKER, PODMAN = recorded("docker_20_10_containers"), recorded("podman_4_3_containers")


def docker(name: str, **changes: Any) -> Inspected:
    return decoded({**DOCKER[name], **changes})


def podman(name: str) -> Inspected:
    return decoded(PODMAN[name])


def decoded(told: dict[str, Any]) -> Inspected:
    return msgspec.json.decode(json.dumps(told), type=Inspected)


def told(**parts: Any) -> dict[str, Any]:
    """A running container in the engine's words. `state`, `host`, `config`: what differs in those parts."""
    return {
        "Id": parts.get("id", ID),
        "Name": parts.get("name", "/eval"),
        "Created": parts.get("created", "2026-11-15T09:00:00.5Z"),
        "Image": parts.get("image", "sha256:" + "1" * 64),
        "State": {
            "Status": "running",
            "Running": True,
            "Pid": 4242,
            "StartedAt": "2026-11-15T09:00:01.123456789Z",
            "FinishedAt": "0001-01-01T00:00:00Z",
            **parts.get("state", {}),
        },
        "HostConfig": {"RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}, **parts.get("host", {})},
        "Mounts": parts.get("mounts"),
        "Config": {"Image": "lab:1", "Labels": parts.get("labels", {}), **parts.get("config", {})},
    }


def ended(**state: Any) -> dict[str, Any]:
    return {"Status": "exited", "Running": False, "Pid": 0, "FinishedAt": "2026-11-15T10:00:00.25Z", **state}


def container(**parts: Any) -> Inspected:
    return decoded(told(**parts))


def facts(**known: Any) -> ContainerFacts:
    """Of a container of ann's with one GPU, unless `known` says otherwise."""
    whole: dict[str, Any] = {
        "asks": GpuRequest(("0",), (), ("--gpus 0",)),
        "devices": ("GPU-a",),
        "slices": (),
        "owned": ANN,
        "image_labels": {},
        "stopped_at": None,
        "keep_alive": None,
    }
    return ContainerFacts(**{**whole, **known})


class StillClock:
    def now(self) -> datetime:
        return NOW
