"""What is wanted on each server, from the file of hosts. Pure."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Final

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.ssh.hosts import Host

DIRECTORY: Final = "/opt/gpukeeper"
PYTHON: Final = "python3"
EVERY: Final = "1h"
TIMEOUT: Final = timedelta(minutes=10)
COPIES: Final = 6  # of the bundle: the file, its wheels, the environment; wheels are compressed


@direct
class Unit(StrEnum):
    SYSTEMD = "systemd"
    TIMER = "timer"
    CRON = "cron"


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `make bundle`. `pythons`: versions that it has wheels for."""

    path: str
    version: str
    sha256: str
    size: int
    pythons: tuple[str, ...]
    machine: str

    @property
    def space(self) -> int:
        """Bytes that an installation needs at most, as far as is known before."""
        return COPIES * self.size


class PolicyText(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    text: str
    mode: str


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """`policy` None: the one that is there stays; without one, the first policy of `setup host`. `bundle` None: nothing
    is installed."""

    host: Host
    unit: Unit = Unit.SYSTEMD
    every: str = EVERY
    directory: str = DIRECTORY
    python: str = PYTHON
    timeout: timedelta = TIMEOUT
    metrics: str = ""
    policy: PolicyText | None = None
    bundle: Bundle | None = None

    @property
    def name(self) -> str:
        return self.host.node

    def answers(self) -> list[str]:
        """Arguments of `setup host` on the server."""
        words = [] if self.unit is Unit.SYSTEMD else ["--every", self.every]
        words += ["--cron"] if self.unit is Unit.CRON else []
        return words + (["--metrics", self.metrics] if self.metrics else [])
