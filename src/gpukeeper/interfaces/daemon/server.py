"""The unix socket of `serve`. One JSON request a connection; the kernel says who asks (SO_PEERCRED)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.requests import Reply, Request, fulfil
from gpukeeper.ledger.paths import LONGEST_SOCKET_PATH
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.wiring import Session, user_name

LARGEST = 64 * 1024
PATIENCE = 10.0  # seconds for a request to arrive
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@asynccontextmanager
async def listening(path: Path, session: Session) -> AsyncIterator[None]:
    """Listens while the block runs. Everybody may connect; rights are decided per request."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise KeeperError(f"{path} is too long for a socket. Name a shorter one with GPUKEEPER_SOCKET.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _forget(path)  # of a daemon that died; a living one holds the serve lease, which we have

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await _answer(reader, writer, session.keeper, session.book)
        with contextlib.suppress(ConnectionError):
            writer.write(msgspec.json.encode(reply))
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path=path, limit=LARGEST)
    _open_to_everyone(path)
    try:
        yield
    finally:
        server.close()
        _forget(path)


def _forget(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _open_to_everyone(path: Path) -> None:
    """Everybody may ask; what they get depends on who they are."""
    path.chmod(0o666)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keeper: Keeper, book: Rulebook) -> Reply:
    who = user_name(_peer_uid(writer))
    try:
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        request = reading.decode(line, type=Request)
    except (TimeoutError, ValueError, ConnectionError) as problem:
        return Reply(done=False, words=f"that is not a request: {problem}", exit_code=2)
    return await fulfil(keeper, book, who, request)


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def tell_systemd(words: str) -> None:
    """READY=1, STOPPING=1: only where systemd asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, contextlib.suppress(OSError):
            notify.connect("\0" + address[1:] if address.startswith("@") else address)
            notify.send(words.encode())
