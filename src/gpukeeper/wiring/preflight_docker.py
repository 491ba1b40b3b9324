"""Checks before an acceptance run on a Docker or Podman engine. Read-only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import msgspec

from gpukeeper.acceptance.fleet.preflight.docker import EngineFacts, judge_engine
from gpukeeper.acceptance.fleet.preflight.finding import Finding, unchecked
from gpukeeper.devices.inventory import gpu_note, inventory
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.connect import Engine, find
from gpukeeper.platforms.docker.errors import EngineError

NOT_FOUND = 404
PATIENCE = timedelta(seconds=10)


class _Device(msgspec.Struct):
    id: str = msgspec.field(default="", name="ID")


class _Info(msgspec.Struct, rename="pascal"):
    server_version: str = ""
    runtimes: dict[str, object] | None = None
    mem_total: int = 0
    security_options: tuple[str, ...] | None = None
    discovered_devices: tuple[_Device, ...] | None = None


async def docker(image: str, shm: str, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    address = find(environ)
    if address is None:
        words = "no socket at /var/run/docker.sock and DOCKER_HOST is not set"
        return (unchecked("engine", words, (), ["sudo systemctl start docker"]),)
    try:
        engine = Engine(address, environ)
        async with engine.opened():
            info = await engine.get("/info", _Info)
            there = await _has(engine, image) if image else False
    except (PlatformError, UsageError) as problem:
        return (unchecked("engine", str(problem), (), ["docker info"]),)
    facts = EngineFacts(
        address=address,
        version=info.server_version,
        runtimes=tuple(info.runtimes or ()),
        devices=tuple(one.id for one in info.discovered_devices or ()),
        memory=info.mem_total,
        rootless=any("rootless" in one for one in info.security_options or ()),
        image=there,
        gpus=_gpus() if engine.local else Unknown("the engine is on another machine"),
    )
    return judge_engine(facts, image, shm)


async def _has(engine: Engine, image: str) -> bool | Unknown:
    try:
        await engine.raw(f"/images/{image}/json")
    except EngineError as error:
        return False if error.status == NOT_FOUND else Unknown(str(error))
    return True


def _gpus() -> int | Unknown:
    if gpu_note() is not None:
        return 0
    found = inventory(PATIENCE)
    return found if isinstance(found, Unknown) else len(found)
