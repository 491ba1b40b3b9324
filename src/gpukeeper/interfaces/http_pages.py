"""A small HTTP server for health probes and Prometheus. Without authentication; it is read-only.

One request a connection, a short patience, few at once: whoever reaches the port cannot wear the program out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

from gpukeeper.model.errors import UsageError

PATIENCE = 5.0  # seconds for a request to arrive, and for its answer to be taken
LONGEST = 16 * 1024  # bytes of a request
AT_ONCE = 32
PORTS = 65536
TEXT = "text/plain; charset=utf-8"


class PageResponse(NamedTuple):
    status: int
    body: bytes
    type: str = TEXT


Page = Callable[[], Awaitable[PageResponse]]


class Endpoint(NamedTuple):
    """Where to listen. An empty address means all. `flag`: the option to change in an error message."""

    port: int
    address: str = ""
    flag: str = "--health"


def words(problem: str | None) -> PageResponse:
    """The response to a probe: ok, or the problem."""
    return PageResponse(200, b"ok\n") if problem is None else PageResponse(503, f"{problem}\n".encode())


def read_endpoint(words: str, flag: str, address: str) -> Endpoint:
    """[ADDRESS:]PORT. `address` is the default; `0.0.0.0` and `[::]` mean all."""
    given, colon, port = words.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < PORTS) or (colon and not given):
        raise UsageError(f'{flag} "{words}" is not PORT or ADDRESS:PORT. Write it like 9101 or 10.0.0.7:9101.')
    return Endpoint(int(port), given.removeprefix("[").removesuffix("]") or address, flag)


@asynccontextmanager
async def listening(where: Endpoint, pages: Mapping[str, Page], patience: float = PATIENCE) -> AsyncIterator[int]:
    """Serves while the block runs. Yields the port: for 0 the kernel chooses a free one."""
    at_once = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once
        at_once += 1
        try:
            if at_once <= AT_ONCE:
                async with asyncio.timeout(2 * patience):
                    await _serve(reader, writer, pages, patience)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client closed the connection, or requests no page that exists
        finally:
            at_once -= 1
            writer.close()

    server = await asyncio.start_server(serve, sock=_socket(where), limit=LONGEST)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Mapping[str, Page], patience: float
) -> None:
    async with asyncio.timeout(patience):
        head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    page = pages.get(path)
    if method not in {"GET", "HEAD"}:
        answer = PageResponse(405, b"only GET\n")
    else:
        answer = (
            await page()
            if page is not None
            else PageResponse(404, f"not found; available: {', '.join(pages)}\n".encode())
        )
    writer.write(_head(answer) + (b"" if method == "HEAD" else answer.body))
    await writer.drain()


def _head(answer: PageResponse) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _socket(where: Endpoint) -> socket.socket:
    """On the given address; without one on all, IPv4 and IPv6, or IPv4 alone if there is no IPv6."""
    if not where.address:
        with contextlib.suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", where.port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
    try:
        return socket.create_server((where.address, where.port), family=family)
    except (OSError, OverflowError) as error:
        place = f"port {where.port}" + (f" of {where.address}" if where.address else "")
        raise UsageError(f"cannot listen on {place}: {error}. Use another one with {where.flag}.") from error
