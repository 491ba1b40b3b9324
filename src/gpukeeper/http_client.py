"""An HTTP/1.1 client over TCP, TLS or a unix socket. Small on purpose: only what our servers need.

No redirects, no proxies, no cookies, no compression: a request goes to the address that was configured and to no other.
A response is parsed as strictly as HTTP allows; an ambiguous one closes the connection. Limits and deadlines are the
caller's: TimeoutError is raised as it is, everything else as an HttpError. Why not a library: ADR 16.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from gpukeeper.blocking import in_thread

CONNECT: Final = timedelta(seconds=10)
IDLE: Final = 15.0  # seconds; a server may be closing connections that were unused for longer
HEAD_MAX: Final = 64 * 1024  # bytes of the head of a response, or of its trailers
PIECE: Final = 64 * 1024  # bytes read at once
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?\r\n")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)\r\n")
_LENGTH = re.compile(r"([0-9]{1,18})(?:, *\1)*")  # some send it twice
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_TARGET = re.compile(r"[!-~]+")


class HttpError(Exception):
    """The server did not send a complete response; the message has the reason."""


class CannotConnect(HttpError):
    """Nothing was sent."""


class ConnectionBroken(HttpError):
    """It ended too early. The request may have been executed."""


class NotHttp(HttpError):
    """The response is not HTTP."""


class TooLarge(HttpError):
    """The response is too large and was discarded."""


class Head(NamedTuple):
    """What comes before the body. Names of fields are in lower case; repeated fields are joined."""

    status: int
    reason: str
    fields: Mapping[str, str]
    keeps: bool  # the connection may be reused

    @property
    def size(self) -> int | None:
        """Of the body; None: it is sent in chunks, or ends with the connection."""
        if self.status in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}:
            return 0
        length = self.fields.get("content-length")
        return None if length is None else int(length)

    @property
    def chunked(self) -> bool:
        return "transfer-encoding" in self.fields


class StreamedResponse:
    """A response whose body is read while it arrives. Valid inside `Client.stream` only."""

    def __init__(self, head: Head, reader: asyncio.StreamReader) -> None:
        self.status, self.reason, self.headers = head.status, head.reason, head.fields
        self.complete = False  # read to its last byte
        self._chunked, self._reader = head.chunked, reader
        self._size = self._left = 0 if head.chunked else head.size  # of the body, or of the chunk; None: to the end

    async def piece(self) -> bytes:
        """The next part of the body; empty at its end."""
        try:
            return b"" if self.complete else await self._piece()
        except OSError as error:
            raise ConnectionBroken(words_of(error)) from error

    async def _piece(self) -> bytes:
        if self._chunked and not self._left:
            self._size = self._left = read_chunk_size(await _line(self._reader))
            if not self._left:
                await _skip_trailers(self._reader)
        piece = b"" if self._left == 0 else await self._reader.read(min(self._left or PIECE, PIECE))
        if self._left is None or self._size is None or self._left == 0:
            self.complete = not piece
            return piece
        if not piece:
            raise ConnectionBroken(f"its response was cut off after {self._size - self._left} of {self._size} bytes")
        self._left -= len(piece)
        if self._chunked and not self._left and await _line(self._reader) != b"\r\n":
            raise NotHttp("a chunk of its response is longer than announced")
        return piece

    async def read(self, size_max: int, *, cut: bool = False) -> bytes:
        """The whole body. If it is larger: TooLarge, or with `cut` its beginning."""
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > size_max:
                if not cut:
                    raise TooLarge(f"its response is larger than {size_max // 1024 // 1024} MiB")
                return bytes(body[:size_max])
        return bytes(body)

    async def lines(self, size_max: int) -> AsyncGenerator[bytes, None]:
        """Of a stream, as they arrive, without line ends."""
        rest = bytearray()
        while piece := await self.piece():
            rest += piece
            if b"\n" in piece:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    yield bytes(line)
            if len(rest) > size_max:
                raise TooLarge(f"a line of its response is longer than {size_max // 1024 // 1024} MiB")
        if rest:
            yield bytes(rest)


class Response(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: float  # when, by the monotonic clock

    def is_fresh(self) -> bool:
        closed = self.reader.at_eof() or self.writer.is_closing()
        return not closed and time.monotonic() - self.used < IDLE

    def drop(self) -> None:
        self.writer.transport.abort()


class Client:
    """One server, in one event loop. Connections are kept for the next request until `close`."""

    def __init__(
        self,
        url: str,
        *,
        unix_socket: str | None = None,
        tls: ssl.SSLContext | None = None,
        enter: Callable[[], None] | None = None,
        purpose: str = "",
    ) -> None:
        """`url` may have a path, which is prepended to every target, and user and password. ValueError: it is no URL.

        `enter` is called in the thread that connects, before it does: to enter another network namespace.
        `purpose`: a name lookup that hangs blocks only servers of the same purpose. An address may come from a user.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("the address is not of the form http://HOST or https://HOST")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._encrypted, self._tls, self._unix_socket = parts.scheme == "https", tls, unix_socket
        self._enter, self._purpose = enter, purpose
        self._prefix = parts.path.rstrip("/")
        self._fields = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": "gpukeeper",
            "Accept": "*/*",
            **_login(parts),
        }
        self._unused: list[_Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        unused, self._unused = self._unused, []
        for connection in unused:
            connection.drop()
        await asyncio.sleep(0)  # the transports close their sockets in the next iteration of the loop

    async def request(
        self,
        method: str,
        target: str,
        *,
        size_max: int,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        cut: bool = False,
    ) -> Response:
        async with self.stream(method, target, headers=headers, body=body) as response:
            read = await response.read(size_max, cut=cut)
            return Response(response.status, response.reason, response.headers, read)

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> AsyncIterator[StreamedResponse]:
        """Every status is returned. The body is read inside; if it is not read to its end, the connection is closed."""
        sent = self._message(method, target, headers or {}, body)
        connection, head = await self._exchange(sent, again=method == "GET")
        response = StreamedResponse(head, connection.reader)
        try:
            yield response
        finally:
            if response.complete and head.keeps:
                self._unused.append(connection._replace(used=time.monotonic()))
            else:
                connection.drop()

    async def _exchange(self, sent: bytes, *, again: bool) -> tuple[_Connection, Head]:
        """A server may close a kept connection at any time: then a read request is sent once more."""
        while self._unused and not self._unused[-1].is_fresh():
            self._unused.pop().drop()
        if self._unused:
            try:
                kept = self._unused.pop()
                return kept, await _exchange(kept, sent)
            except ConnectionBroken:
                if not again:
                    raise
        new = await self._connect()
        return new, await _exchange(new, sent)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT.total_seconds()):
                return _Connection(*await self._open(), time.monotonic())
        except TimeoutError as error:
            raise CannotConnect(f"it could not be reached within {CONNECT.total_seconds():.0f}s") from error
        except OSError as error:
            raise CannotConnect(words_of(error)) from error

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._unix_socket is not None:
            return await asyncio.open_unix_connection(self._unix_socket, limit=HEAD_MAX)
        # In a thread that can be abandoned: a name service may hang, and asyncio would wait for it at the end.
        made = await in_thread(self._dial, CONNECT, purpose=self._purpose)
        if not self._encrypted:
            return await asyncio.open_connection(sock=made, limit=HEAD_MAX)
        self._tls = self._tls or ssl.create_default_context()
        return await asyncio.open_connection(sock=made, limit=HEAD_MAX, ssl=self._tls, server_hostname=self._host)

    def _dial(self) -> socket.socket:
        try:
            if self._enter is not None:
                self._enter()
        except OSError as error:
            raise CannotConnect(str(error)) from error
        return socket.create_connection((self._host, self._port), CONNECT.total_seconds())

    def _message(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
        path = self._prefix + target
        if not _TARGET.fullmatch(path):
            raise ValueError("a request path contains spaces or control characters")
        fields = {**self._fields, **headers}
        if body is not None or method in {"POST", "PUT", "PATCH"}:
            fields["Content-Length"] = str(len(body or b""))
        lines = [f"{method} {path} HTTP/1.1"]
        for name, value in fields.items():
            if not value.isprintable() or not value.isascii():
                raise ValueError(f"the header {name} contains invalid characters")  # it may be a secret
            lines.append(f"{name}: {value}")
        return "\r\n".join([*lines, "\r\n"]).encode("ascii") + (body or b"")


async def get(
    url: str,
    *,
    size_max: int,
    purpose: str,
    headers: Mapping[str, str] | None = None,
    enter: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Response:
    """One request to a server that is not used again soon."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    async with Client(f"{parts.scheme}://{parts.netloc}", enter=enter, tls=tls, purpose=purpose) as client:
        return await client.request("GET", target, headers=headers, size_max=size_max)


def read_head(data: bytes) -> Head:
    """Up to and including the empty line. NotHttp: it cannot be parsed, or is ambiguous about the body."""
    status = _STATUS.match(data)
    if status is None:
        raise NotHttp("its response is not HTTP")
    fields, position = _read_fields(data, status.end())
    if data[position:] != b"\r\n":
        raise NotHttp("the head of its response cannot be read")
    if "content-length" in fields:
        length = _LENGTH.fullmatch(fields["content-length"])
        if length is None or "transfer-encoding" in fields:
            raise NotHttp("the length of its response cannot be read")
        fields["content-length"] = length[1]
    if fields.get("transfer-encoding", "chunked").lower() != "chunked":
        raise NotHttp("its response has an encoding that was not requested")
    if fields.get("content-encoding", "identity").lower() != "identity":
        raise NotHttp("its response is compressed, which was not requested")
    keeps = status[1] == b"1" and "close" not in fields.get("connection", "").lower()
    framed = "content-length" in fields or "transfer-encoding" in fields or int(status[2]) in {204, 304}
    reason = (status[3] or b"").decode("latin-1")
    return Head(int(status[2]), _printable(reason), fields, keeps and framed)


def words_of(error: BaseException) -> str:
    """The kernel's message if there is one: libraries print calls and tuples."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, socket.gaierror | ssl.SSLError):
        return str(error.strerror or error)
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


async def _exchange(connection: _Connection, sent: bytes) -> Head:
    try:
        connection.writer.write(sent)
        await connection.writer.drain()
        while (head := read_head(await connection.reader.readuntil(b"\r\n\r\n"))).status < 200:
            if head.status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise NotHttp("it switched to another protocol, which was not requested")
    except BaseException as error:
        connection.drop()
        if isinstance(error, asyncio.LimitOverrunError):
            raise NotHttp(f"the head of its response is larger than {HEAD_MAX // 1024} KiB") from error
        if isinstance(error, asyncio.IncompleteReadError):
            if error.partial:
                raise NotHttp("its response is not HTTP, or was cut off in its head") from error
            raise ConnectionBroken("it closed the connection without a response") from error
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise ConnectionBroken(words_of(error)) from error
        raise
    return head


async def _skip_trailers(reader: asyncio.StreamReader) -> None:
    size = 0
    while (line := await _line(reader)) != b"\r\n":
        size += len(line)
        if size > HEAD_MAX:
            raise NotHttp(f"the trailer of its response is larger than {HEAD_MAX // 1024} KiB")


def read_chunk_size(line: bytes) -> int:
    found = _SIZE.fullmatch(line)
    if found is None:
        raise NotHttp("the size of a chunk of its response cannot be read")
    return int(found[1], 16)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionBroken("its response was cut off between two chunks") from error
    except asyncio.LimitOverrunError as error:
        raise NotHttp("the size of a chunk of its response cannot be read") from error


def _read_fields(data: bytes, position: int) -> tuple[dict[str, str], int]:
    fields: dict[str, str] = {}
    while (field := _FIELD.match(data, position)) is not None:
        name, value = field[1].decode("ascii").lower(), field[2].decode("latin-1").rstrip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
        position = field.end()
    return fields, position


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:200]


def _login(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(words.encode()).decode()}
