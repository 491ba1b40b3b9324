"""Checks on hosts before a run, over ssh: what each host has, and whether all reach the first one. Leaves nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

import msgspec

from gpukeeper.acceptance.launchers.programs import host_checks
from gpukeeper.acceptance.launchers.ssh_client import SshClient
from gpukeeper.ssh.client import HostError
from gpukeeper.ssh.hosts import Host

REACH_S = 20.0  # until the first host listens; its connection may take longer than that of the others
LISTEN_S, LISTEN_MAX_S, EACH_S = 40.0, 80.0, 0.5


class HostReply(msgspec.Struct, frozen=True):
    """Of one host, as it reports it. None: not known."""

    python: str
    folder: str
    time: float
    gpus: int
    driver: str
    program: str | None
    version: str
    broken: str
    shm: int | None
    free: int | None
    refused: str


class MetReply(msgspec.Struct, frozen=True):
    problem: str


async def facts(client: SshClient, host: Host, program: str) -> tuple[HostReply, float] | HostError:
    """And by how many seconds its clock differs at least: what the request itself took is not known better."""
    before = time()
    try:
        found = await client.request(host, HostReply, "checks", check="facts", program=program, source=checks_source())
    except HostError as error:
        return error
    after = time()
    return found, found.time - after if found.time > after else min(0.0, found.time - before)


async def unmet(client: SshClient, hosts: Sequence[Host], master: str, port: int) -> dict[str, str]:
    """By host: why it does not reach the first one at `master`. The first one itself: why it cannot listen. Empty: all
    meet."""
    first, *others = hosts
    if not others:
        return {}
    given = {"source": checks_source(), "token": secrets.token_hex(8), "port": port}
    listening = asyncio.create_task(_asked(client, first, check="listen", **given, **_patience(len(others))))
    reaching = [
        asyncio.create_task(_asked(client, one, check="reach", **given, address=master, within_s=REACH_S))
        for one in others
    ]
    try:
        done = asyncio.gather(*reaching)
        first_of: set[asyncio.Future[Any]] = {done, listening}
        await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
        if listening.done() and (problem := listening.result()):
            return {first.node: problem}
        found = dict(zip((one.node for one in others), await done, strict=True))
    finally:
        for task in (listening, *reaching):
            task.cancel()
        await asyncio.gather(listening, *reaching, return_exceptions=True)
    return {node: problem for node, problem in found.items() if problem}


def _patience(peers: int) -> dict[str, float]:
    return {"peers": peers, "within_s": min(LISTEN_MAX_S, LISTEN_S + EACH_S * peers)}


async def _asked(client: SshClient, host: Host, **what: object) -> str:
    try:
        return (await client.request(host, MetReply, "checks", **what)).problem
    except HostError as error:
        return str(error)


def checks_source() -> str:
    return Path(host_checks.__file__).read_text(encoding="utf-8")
