"""The daemon's socket, as a client: one request, one answer. Users who may not read its ledger use it; they get
their own work in full, and of the work of others what `observe` shows."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpukeeper.config.machine import FLEET
from gpukeeper.devices.holders import user_name
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.outlook import DaemonState
from gpukeeper.engine.requests import DataReply, Reply, Request
from gpukeeper.ledger.files import LONGEST_SOCKET_PATH, socket_path
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError

SECONDS = 180.0  # a stop may take its grace and the reads afterwards
SOON = 3.0  # for what one can do without
R = TypeVar("R", bound=Reply)
T = TypeVar("T")


def query_daemon(kind: type[T], verb: str, policy: Path | None, **asked: Any) -> T | None:
    """What the daemon tells. None: none of somebody else's listens here, or another policy or fleet was asked for, so
    that one looks oneself."""
    if policy is not None or os.environ.get(FLEET) or not _is_anothers():
        return None
    return _query(kind, Request(verb=verb, **asked))


def load_daemon_state(keeper: Keeper) -> None:
    """What only the daemon whose ledger this is knows: without it idle times would be forecast too long while GPUs are
    scarce, and warnings that do not count any more would."""
    try:
        found = _query(DaemonState, Request(verb="standing"), SOON)
    except KeeperError:
        return
    if found is not None:
        keeper.uptime.watched_from = found.watched_from
        for place in found.scarce:
            keeper.pressure.set_scarce(place)


def _is_anothers() -> bool:
    try:
        return os.geteuid() not in (0, socket_path().stat().st_uid)
    except PermissionError:
        return True  # closed to us; the query reports that
    except OSError:
        return False


def _query(kind: type[T], request: Request, seconds: float = SECONDS) -> T | None:
    answer = exchange(request, seconds)
    if answer is None:
        return None
    reply = read_reply(answer, DataReply)
    if not reply.done:
        raise failed(reply)
    try:
        return reading.decode(bytes(reply.body), type=kind)
    except msgspec.MsgspecError as error:
        raise KeeperError(
            f"the daemon's reply cannot be decoded; it may be another version of gpukeeper ({error})"
        ) from error


def exchange(request: Request, seconds: float = SECONDS) -> bytes | None:
    """The daemon's answer. None when no daemon listens."""
    if len(os.fsencode(socket_path())) > LONGEST_SOCKET_PATH:
        return None  # no daemon can listen there
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            # Blocking until there is room in its queue; a socket with a timeout of Python's would be refused at once.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))
            connection.connect(str(socket_path()))
            connection.settimeout(seconds)
            return _exchanged(connection, msgspec.json.encode(request) + b"\n")
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UsageError(f"The daemon's socket {closed(socket_path())} Nothing was done.") from error
    except OSError as error:
        raise KeeperError(
            f"the daemon did not answer ({error}). To see whether the request was executed: gpukeeper ledger list"
        ) from error


def closed(path: Path) -> str:
    """Everybody may connect, so a socket that refuses somebody is a mistake of the machine's setup."""
    return (
        f"{path} cannot be used by {user_name(os.geteuid())} (permission denied). "
        f"An admin opens it to all users: chmod 755 {path.parent} && chmod 666 {path}"
    )


def read_reply(answer: bytes, kind: type[R]) -> R:
    try:
        return reading.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise KeeperError(
            "the daemon's reply cannot be decoded. To see whether the request was executed: gpukeeper ledger list"
        ) from error


def _exchanged(connection: socket.socket, words: bytes) -> bytes:
    """A daemon that has too much to do answers and closes before it reads; that answer counts."""
    answer = b""
    try:
        with suppress(BrokenPipeError):
            connection.sendall(words)
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        if not answer:
            raise
    return answer


def failed(reply: Reply) -> KeeperError:
    if reply.exit_code == UsageError.exit_code:
        return UsageError(reply.words)
    error = KeeperError(reply.words)
    error.exit_code = reply.exit_code
    return error
