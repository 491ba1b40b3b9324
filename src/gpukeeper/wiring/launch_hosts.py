"""Acceptance runs on hosts without a cluster: the launchers, each from the options of a run, over OpenSSH or on a
Docker engine, which is reached over the same connection as the platform.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path

import msgspec

from gpukeeper.acceptance.fleet.launcher import Launcher
from gpukeeper.acceptance.fleet.preflight.facts import quantity
from gpukeeper.acceptance.launchers.docker import SHM, Container, DockerLauncher
from gpukeeper.acceptance.launchers.ssh import RETENTION, SshClient, SshLauncher
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.platforms.docker.connect import CONFLICT, NOT_FOUND, NOT_MODIFIED, SLOW, Engine, EngineError, find, part
from gpukeeper.platforms.docker.wire import ContainerSummary, Info, Inspected
from gpukeeper.ssh import CONNECT, Host, Settings, read_hosts

LOG = timedelta(seconds=60)


class DockerEngineApi:
    """The connection opens at the first request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opened: AsyncExitStack | None = None

    async def open(self) -> Engine:
        if self._opened is None:
            opened = AsyncExitStack()
            await opened.enter_async_context(self._engine.opened())
            self._opened = opened
        return self._engine

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def node(self) -> str:
        return (await (await self.open()).get("/info", Info)).name or self._engine.host

    async def has_image(self, image: str) -> bool:
        try:
            await (await self.open()).raw(f"/images/{image}/json")
        except EngineError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def containers(self, label: str) -> tuple[Container, ...]:
        engine = await self.open()
        filters = msgspec.json.encode({"label": [label]}).decode()
        listed = await engine.get("/containers/json", list[ContainerSummary], all=True, filters=filters)
        found = []
        for one in listed:
            try:
                inspected = await engine.get(f"/containers/{part(one.id)}/json", Inspected)
            except EngineError as error:
                if error.is_gone:
                    continue
                raise
            found.append(_container(inspected))
        return tuple(found)

    async def create(self, name: str, body: Mapping[str, object]) -> None:
        try:
            await (await self.open()).post("/containers/create", body, deadline=SLOW, name=name)
        except EngineError as error:
            if error.status != CONFLICT:
                raise

    async def start(self, uid: str) -> None:
        try:
            await (await self.open()).post(f"/containers/{part(uid)}/start", deadline=SLOW)
        except EngineError as error:
            if error.status != NOT_MODIFIED:
                raise

    async def log(self, uid: str) -> bytes | None:
        try:
            return await (await self.open()).raw(
                f"/containers/{part(uid)}/logs", deadline=LOG, stdout=True, stderr=True
            )
        except EngineError as error:
            if error.is_gone:
                return None
            raise

    async def remove(self, uid: str) -> None:
        try:
            await (await self.open()).delete(f"/containers/{part(uid)}", force=True, v=True)
        except EngineError as error:
            if not error.is_gone and error.status != CONFLICT:  # another request removes it; it is read again
                raise


def _container(one: Inspected) -> Container:
    return Container(
        id=one.id,
        name=one.plain_name,
        state=one.state.status,
        labels=one.labels,
        exit_code=one.state.exit_code,
        error=one.state.error,
        oom=one.state.oom_killed,
        lasted_s=_lasted(one),
    )


def _lasted(one: Inspected) -> float | None:
    try:
        return (reading.moment(one.state.finished_at) - reading.moment(one.state.started_at)).total_seconds()
    except ValueError:
        return None


SSH = (
    "hosts",
    "nodes",
    "user",
    "identity",
    "config",
    "connect",
    "multiplex",
    "python",
    "program",
    "master",
    "retention",
)
PROGRAM = "gpukeeper"
DOCKER = ("engine", "gpus", "memlock", "shm")


def ssh(options: Mapping[str, str]) -> Launcher:
    return SshLauncher(
        ssh_client(options),
        known_hosts(options),
        program=options.get("program", PROGRAM),
        master=options.get("master", ""),
        retention=span_option(options, "retention", RETENTION),
    )


def ssh_client(options: Mapping[str, str]) -> SshClient:
    check_options("ssh", options, SSH)
    settings = Settings(
        python=options.get("python", "python3"),
        config=options.get("config", ""),
        identity=options.get("identity", ""),
        user=options.get("user", ""),
        connect=span_option(options, "connect", CONNECT),
        multiplex=options.get("multiplex", ""),
    )
    return SshClient(settings)


def docker(options: Mapping[str, str]) -> Launcher:
    """`engine`: its address; without it DOCKER_HOST, then the usual socket."""
    check_options("docker", options, DOCKER)
    address = options.get("engine") or find(os.environ)
    if address is None:
        raise UsageError("no Docker engine: no socket at /var/run/docker.sock, and DOCKER_HOST is not set")
    shm = quantity(options["shm"]) if "shm" in options else SHM
    if shm is None or shm <= 0:
        raise UsageError(f'option shm="{options["shm"]}" is not a size such as 16Gi')
    if options.get("memlock", "unlimited") != "unlimited":
        raise UsageError(f'option memlock="{options["memlock"]}" can only be "unlimited"')
    if options.get("gpus", "none") != "none":
        raise UsageError(f'option gpus="{options["gpus"]}" can only be "none"; without it the container gets all GPUs')
    api = DockerEngineApi(Engine(address))
    return DockerLauncher(api, shm=int(shm), memlock="memlock" in options, gpus="gpus" not in options)


def known_hosts(options: Mapping[str, str]) -> tuple[Host, ...]:
    """`hosts`: a file; `nodes`: names with commas. Neither: the run itself names its hosts."""
    if "hosts" not in options:
        return read_hosts(options.get("nodes", "").split(","), "option nodes")
    path = Path(options["hosts"]).expanduser()
    try:
        return read_hosts(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the list of hosts {path} cannot be read: {error}. Nothing was started.") from error


def check_options(engine: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Options: {', '.join(known)}."
            raise UsageError(f'{engine} has no option "{name}". {hint}')


def span_option(options: Mapping[str, str], name: str, default: timedelta) -> timedelta:
    try:
        return reading.span(options[name]) if name in options else default
    except ValueError as error:
        raise UsageError(f'option {name}="{options[name]}" {error}; write it like 30s, 2h or 7d') from error
