"""The link between a daemon and its web process: JSON in frames over one socket pair, and a number in memory that tells
how many times logins were revoked. Requests and replies are those of the unix socket; beside them the daemon sends
what changed.

The web process has no rights of its own. It forwards the secret that a browser or program presented, and the daemon
looks up whose it is; only of a trusted reverse proxy the web process reports a name.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
from contextlib import suppress
from datetime import datetime
from typing import TypeVar

import msgspec

from gpukeeper.engine.requests import DataReply, Request
from gpukeeper.ledger.logins import LoginKind
from gpukeeper.model import reading
from gpukeeper.views.live import Delta

LARGEST = 256 * 1024 * 1024  # bytes of a frame from the daemon
LARGEST_QUESTION = 256 * 1024  # from the web process
# Exit codes of an answer, never of a command: log in first; the copy of a fleet does not hold it; it cannot be read
# now; a bug. 1: it failed, try again.
NOT_LOGGED_IN, NOT_COPIED, NO_COPY, BUG = 13, 14, 15, 16
PERSON = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}")  # a name that a proxy may report
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
UNKNOWN_UID = -1
_LENGTH = 4
T = TypeVar("T")


class Credentials(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What somebody presented. `proxy_user`: the name that a trusted reverse proxy at the address `proxy` reported.
    `uid`: of the process on this machine that has the other end of the connection; UNKNOWN_UID: the kernel does not
    report it; None: it is on another machine."""

    secret: str = ""
    proxy_user: str = ""
    proxy: str = ""
    address: str = ""
    uid: int | None = None


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it is, as the daemon found. An empty name: not logged in."""

    name: str = ""
    admin: bool = False
    login: str = ""  # its id
    kind: LoginKind | None = None  # None: reported by a proxy, or not logged in


# From the web process.


class Question(msgspec.Struct, frozen=True, kw_only=True, tag="question"):
    """`verb` of the request: what people ask for on the socket, or one of daemon/web.VERBS. `machine`: the one it is
    about; empty: all machines, or the only one."""

    id: int
    credentials: Credentials
    request: Request
    machine: str = ""


# From the daemon.


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated fleet whose time is compressed: `pace` seconds pass there in each real one. It was `began` there when
    it was `real` here. `logins`: whom a visitor can log in as, and the path that does it."""

    began: datetime
    real: datetime
    pace: float
    logins: tuple[tuple[str, str], ...] = ()

    def time(self, real: datetime) -> datetime:
        return self.began + (real - self.real) * self.pace


class TrustedProxy(msgspec.Struct, frozen=True):
    """A reverse proxy that logs people in: the header with their name counts only from these addresses and networks,
    and from this machine only from processes of this uid."""

    header: str
    addresses: tuple[str, ...]
    uid: int | None = None


class SiteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How browsers reach the dashboard. `hosts`: names that are accepted in the header Host; empty: all."""

    url: str = ""
    hosts: tuple[str, ...] = ()
    proxy: TrustedProxy | None = None
    only_proxy: bool = False  # other machines than the proxy are refused
    tls: bool = False


class Account(msgspec.Struct, frozen=True):
    """The user that the web process becomes if it was started by root."""

    uid: int
    gid: int


class TlsPair(msgspec.Struct, frozen=True, tag="tls"):
    """Certificate chain and private key (PEM). Sent again when the files were renewed."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "TlsPair()"  # the key must not get into a log


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: of gpukeeper. `key`: signs cookies."""

    version: str
    key: bytes
    anonymous: bool  # reading needs no login
    session_seconds: int
    demo: Demo | None = None
    fleet: bool = False  # of many machines, over their copy
    site: SiteSettings = SiteSettings()


class Welcome(SourceSettings, frozen=True, kw_only=True, tag="welcome"):
    """The first frame."""

    machine: str
    account: Account | None = None
    tls: TlsPair | None = None


class Change(msgspec.Struct, frozen=True, tag="change"):
    """`whole`: what was known of that machine before does not count."""

    delta: Delta
    whole: bool = False


class Condition(msgspec.Struct, frozen=True, kw_only=True, tag="condition"):
    """Of where views come from. `problem`: why they are not renewed; empty: they are. `silent`: machines of which there
    is no view, and why."""

    problem: str = ""
    silent: tuple[tuple[str, str], ...] = ()


class Answer(DataReply, frozen=True, kw_only=True, tag="answer"):
    """The reply to the question `id`, and whose it was."""

    id: int
    person: Person


FromDaemon = Welcome | Change | Condition | Answer | TlsPair


def frame(message: object) -> bytes:
    body = msgspec.json.encode(message)
    return len(body).to_bytes(_LENGTH, "big") + body


async def read_frame(reader: asyncio.StreamReader, kind: type[T], largest: int) -> T | None:
    """None: the other end is closed. Raises ValueError for what is no frame."""
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        if size > largest:
            raise ValueError(f"a frame of {size:,} bytes")
        return reading.decode(await reader.readexactly(size), type=kind)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


_SIZE = 8
_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1; the fcntl module does not have it


class Revocations:
    """`descriptor`: of the shared memory, to read, for a child."""

    def __init__(self, descriptor: int, memory: mmap.mmap | None = None) -> None:
        self.descriptor = descriptor
        memory = memory or mmap.mmap(descriptor, _SIZE, access=mmap.ACCESS_READ)
        self._number = memoryview(memory).cast("Q")

    @property
    def count(self) -> int:
        return int(self._number[0])

    def increase(self) -> None:
        self._number[0] += 1

    def close(self) -> None:
        """The memory stays as long as it is used."""
        os.close(self.descriptor)


def new_revocations() -> Revocations:
    """The only one that can be increased."""
    writing = os.memfd_create("gpukeeper-revocations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(writing, _SIZE)
        memory = mmap.mmap(writing, _SIZE)
        os.fchmod(writing, 0o400)  # or its reader could open it again, to write
        with suppress(OSError):  # an older kernel
            fcntl.fcntl(writing, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(writing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Revocations(os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC), memory)
    finally:
        os.close(writing)
