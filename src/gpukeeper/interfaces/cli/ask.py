"""A request of a person: to the daemon when one runs (it sees who asks), else directly, with one's own rights."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import typer

from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.ledger.paths import LONGEST_SOCKET_PATH, ledger_path, socket_path
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError

SECONDS = 180.0  # a stop may take its grace and the looks afterwards


def ask(verb: str, *, policy: Path | None, json: bool, **asked: Any) -> None:
    from gpukeeper.interfaces.terminal import show
    from gpukeeper.notify.terminals import plain

    request = Request(verb=verb, **asked)
    show.progress_line(f"{verb} {request.workload} …".replace("  ", " "))  # a stop gives its programs time to save
    try:
        reply = _through_daemon(request) or _directly(request, policy)
    finally:
        show.progress_line("")
    if not reply.done:
        raise UsageError(reply.words) if reply.exit_code == UsageError.exit_code else _failed(reply)
    if json:
        show.as_json("request", {"verb": verb, "reply": reply})
    else:
        typer.echo(plain(reply.words))


def _through_daemon(request: Request) -> Reply | None:
    """None when no daemon listens."""
    if len(os.fsencode(socket_path())) > LONGEST_SOCKET_PATH:
        return None  # nobody can listen there
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(socket_path()))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UsageError(f"the daemon's socket {socket_path()} may not be used by you ({error.strerror})") from error
    except OSError as error:
        raise KeeperError(f"the daemon did not answer ({error}). Whether it was done: gpukeeper ledger list") from error
    try:
        return reading.decode(answer, type=Reply)
    except msgspec.MsgspecError as error:
        raise KeeperError("the daemon's answer cannot be read. Whether it was done: gpukeeper ledger list") from error


def _directly(request: Request, policy: Path | None) -> Reply:
    from gpukeeper.interfaces.terminal.session import opened, say, say_out_of_reach

    with opened(policy, write=True) as session:
        if os.geteuid() != 0:
            # Root's passes read root's ledger; nobody must believe that a hold in another one protects from them.
            say(f"No daemon runs here, so this counts only for passes that use your own ledger, {ledger_path()}.")
        reply = asyncio.run(fulfil(session.keeper, session.book, session.user, request))
        if not reply.done and reply.exit_code == UsageError.exit_code:  # what was asked for may be out of reach
            say_out_of_reach(session)
        return reply


def _failed(reply: Reply) -> KeeperError:
    error = KeeperError(reply.words)
    error.exit_code = reply.exit_code
    return error
