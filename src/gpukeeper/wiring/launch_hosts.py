"""Acceptance runs on hosts without a cluster: the launchers, each from the options of a run, over OpenSSH or on a
Docker engine, which is reached over the same connection as the platform.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path

from gpukeeper.acceptance.fleet.launcher import Launcher
from gpukeeper.acceptance.fleet.preflight.facts import quantity
from gpukeeper.acceptance.launchers.docker import SHM, DockerApi, DockerLauncher
from gpukeeper.acceptance.launchers.ssh import RETENTION, SshClient, SshLauncher
from gpukeeper.clients.docker import Engine, find
from gpukeeper.clients.ssh import CONNECT, Host, Settings, read_hosts
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError

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
    api = DockerApi(Engine(address))
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
