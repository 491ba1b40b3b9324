"""The HTTP client against a server that sends exactly the bytes of the test: framing, limits, kept connections."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from gpukeeper import http_client
from gpukeeper.http_client import (
    CannotConnect,
    Client,
    ConnectionBroken,
    HttpError,
    NotHttp,
    Response,
    TooLarge,
    get,
    read_chunk_size,
    read_head,
)
from tests.patience import PATIENCE

T = TypeVar("T")
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024


class Server:
    """Answers each request with the next bytes of its script; an empty entry closes the connection."""

    def __init__(self, *script: bytes) -> None:
        self.script = list(script)
        self.asked: list[bytes] = []
        self.connections = 0
        self.path = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while self.script:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or b"0")
                self.asked.append(head + await reader.readexactly(size))
                sent = self.script.pop(0)
                if not sent:
                    break
                writer.write(sent)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def served(server: Server, folder: Path) -> AsyncIterator[Client]:
    server.path = str(folder / "socket")
    listener = await asyncio.start_unix_server(server.serve, server.path)
    try:
        async with asyncio.timeout(PATIENCE), Client("http://engine/prefix", unix_socket=server.path) as client:
            yield client
    finally:
        server.hang_up()
        listener.close()


def ask(server: Server, folder: Path, what: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        async with served(server, folder) as client:
            return await what(client)

    return asyncio.run(run())


async def read(client: Client) -> Response:
    return await client.request("GET", "/x", size_max=MIB)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (HELLO, b"hello"),
        (OK + b"content-length:5\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (CHUNKED + b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", b"hello"),
        (OK + b"\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b""),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_a_body_ends_where_http_ends_it(sent: bytes, body: bytes, tmp_path: Path) -> None:
    assert ask(Server(sent), tmp_path, read).body == body


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (OK + b"Content-Length: 9\r\n\r\nhello", ConnectionBroken, "was cut off after 5 of 9 bytes"),
        (CHUNKED + b"9\r\nhello", ConnectionBroken, "was cut off after 5 of 9 bytes"),
        (CHUNKED + b"5\r\nhello\r\n", ConnectionBroken, "was cut off between two chunks"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", ConnectionBroken, "was cut off"),
        (CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", NotHttp, "longer than announced"),
        (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", NotHttp, "size of a chunk"),
        (CHUNKED + b"1" * 70_000, NotHttp, "size of a chunk"),
        (CHUNKED + b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", NotHttp, "trailer of its response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", NotHttp, "not HTTP"),
        (b"HTTP/2 200\r\n\r\n", NotHttp, "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", NotHttp, "another protocol"),
        (OK + b"X: " + b"y" * 200_000, NotHttp, "larger than 64 KiB"),
        (OK + b"no colon\r\n\r\n", NotHttp, "cannot be read"),
        (OK + b" folded: x\r\n\r\n", NotHttp, "cannot be read"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", NotHttp, "length"),
        (OK + b"Content-Length: +5\r\n\r\nhello", NotHttp, "length"),
        (OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello", NotHttp, "length"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", NotHttp, "not requested"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", NotHttp, "compressed"),
        (b"", ConnectionBroken, "without a response"),
    ],
)
def test_what_is_no_whole_answer_is_none(sent: bytes, error: type[HttpError], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        ask(Server(sent), tmp_path, read)


def test_every_status_is_an_answer_and_no_redirect_is_followed(tmp_path: Path) -> None:
    server = Server(b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n")
    answer = ask(server, tmp_path, read)
    assert (answer.status, answer.reason, answer.headers["location"]) == (302, "Found", "http://elsewhere/")
    assert len(server.asked) == 1


def test_what_is_sent(tmp_path: Path) -> None:
    server = Server(HELLO, HELLO)

    async def write(client: Client) -> None:
        await client.request("POST", "/a?b=c", headers={"Content-Type": "text/plain"}, body=b"abc", size_max=MIB)
        await client.request("POST", "/empty", size_max=MIB)

    ask(server, tmp_path, write)
    assert server.asked[0].startswith(b"POST /prefix/a?b=c HTTP/1.1\r\nHost: engine\r\n")
    assert server.asked[0].endswith(b"Content-Type: text/plain\r\nContent-Length: 3\r\n\r\nabc")
    assert server.asked[1].endswith(b"Content-Length: 0\r\n\r\n")


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\0", "schlüssel"])
def test_a_header_that_none_may_be_is_not_sent_and_not_repeated(value: str, tmp_path: Path) -> None:
    server = Server(HELLO)
    with pytest.raises(ValueError, match="the header Authorization") as caught:
        ask(server, tmp_path, lambda client: client.request("GET", "/", headers={"Authorization": value}, size_max=1))
    assert value not in str(caught.value)
    assert not server.connections


@pytest.mark.parametrize("target", ["/a b", "/a\r\n", "/ü"])
def test_a_path_stays_one_line(target: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path"):
        ask(Server(HELLO), tmp_path, lambda client: client.request("GET", target, size_max=1))


def test_a_large_answer_is_refused_or_cut(tmp_path: Path) -> None:
    large = OK + b"Content-Length: 100000\r\n\r\n" + b"a" * 100_000

    async def both(client: Client) -> bytes:
        with pytest.raises(TooLarge, match="larger than"):
            await client.request("GET", "/", size_max=70_000)
        return (await client.request("GET", "/", size_max=70_000, cut=True)).body

    server = Server(large, large)
    assert ask(server, tmp_path, both) == b"a" * 70_000
    assert server.connections == 2  # what was not read to its end costs the connection


def test_an_answer_of_exactly_the_limit_is_whole(tmp_path: Path) -> None:
    assert ask(Server(HELLO), tmp_path, lambda client: client.request("GET", "/", size_max=5)).body == b"hello"


async def thrice(client: Client) -> None:
    for _ in range(3):
        assert (await read(client)).body == b"hello"


@pytest.mark.parametrize(
    ("sent", "connections"),
    [
        (HELLO, 1),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", 1),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", 3),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 3),
    ],
)
def test_a_connection_is_kept_where_the_server_keeps_it(sent: bytes, connections: int, tmp_path: Path) -> None:
    server = Server(sent, sent, sent)
    ask(server, tmp_path, thrice)
    assert server.connections == connections


def test_a_connection_that_was_unused_for_long_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "IDLE", 0.0)
    server = Server(HELLO, HELLO, HELLO)
    ask(server, tmp_path, thrice)
    assert server.connections == 3


def test_a_read_is_retried_where_the_server_closed_the_kept_connection(tmp_path: Path) -> None:
    server = Server(HELLO, b"", HELLO)

    async def twice(client: Client) -> bytes:
        await read(client)
        return (await read(client)).body

    assert ask(server, tmp_path, twice) == b"hello"
    assert (server.connections, len(server.asked)) == (2, 3)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_write_is_not_asked_again(method: str, tmp_path: Path) -> None:
    server = Server(HELLO, b"", HELLO)

    async def write(client: Client) -> None:
        await read(client)
        await client.request(method, "/", size_max=MIB)

    with pytest.raises(ConnectionBroken):
        ask(server, tmp_path, write)
    assert len(server.asked) == 2


def test_requests_at_the_same_time_have_connections_of_their_own(tmp_path: Path) -> None:
    server = Server(*[HELLO] * 8)

    async def many(client: Client) -> list[Response]:
        return await asyncio.gather(*(read(client) for _ in range(8)))

    assert [one.body for one in ask(server, tmp_path, many)] == [b"hello"] * 8
    assert server.connections == 8


def test_lines_come_as_they_are_sent(tmp_path: Path) -> None:
    server = Server(CHUNKED + b"4\r\na\n\nb\r\n4\r\nc\nde\r\n0\r\n\r\n")

    async def lines(client: Client) -> list[bytes]:
        async with client.stream("GET", "/") as answer:
            return [line async for line in answer.lines(MIB)]

    assert ask(server, tmp_path, lines) == [b"a", b"", b"bc", b"de"]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    server = Server(OK + b"\r\n" + b"x" * 300_000)

    async def lines(client: Client) -> list[bytes]:
        async with client.stream("GET", "/") as answer:
            return [line async for line in answer.lines(200_000)]

    with pytest.raises(TooLarge, match="line"):
        ask(server, tmp_path, lines)


def test_a_deadline_is_the_callers_and_costs_the_connection(tmp_path: Path) -> None:
    server = Server(OK + b"Content-Length: 9\r\n\r\nhel", HELLO)

    async def late(client: Client) -> bytes:
        reading = asyncio.create_task(read(client))
        while not server.asked:  # noqa: ASYNC110 - it is at the next turns of the loop
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reading
        return (await read(client)).body

    assert ask(server, tmp_path, late) == b"hello"


def test_nobody_listens(tmp_path: Path) -> None:
    async def run(client: Client) -> None:
        async with client:
            await read(client)

    with pytest.raises(CannotConnect, match=os.strerror(2)):
        asyncio.run(run(Client("http://engine", unix_socket=str(tmp_path / "none"))))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(CannotConnect, match=os.strerror(111)):
        asyncio.run(run(Client(f"http://127.0.0.1:{port}")))
    with pytest.raises(CannotConnect, match=r"Name or service|No address|name resolution"):
        asyncio.run(run(Client("http://nowhere.invalid")))


def test_a_network_that_cannot_be_entered_is_reported() -> None:
    def enter() -> None:
        raise ProcessLookupError("the raylet has ended")

    with pytest.raises(CannotConnect, match="the raylet has ended"):
        asyncio.run(get("http://127.0.0.1:9/", size_max=1, purpose="test", enter=enter))


@pytest.mark.parametrize("url", ["engine:2375", "file:///etc/passwd", "http://", "http://[", "http://a:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"of the form|IPv6|Port"):
        Client(url)


async def over_tcp(script: bytes, ask: Callable[[int], Awaitable[T]], tls: ssl.SSLContext | None = None) -> T:
    server = Server(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    try:
        return await ask(listener.sockets[0].getsockname()[1])
    finally:
        server.hang_up()
        listener.close()


def test_one_question_over_tcp_with_a_login_in_its_address() -> None:
    server = Server(HELLO)

    async def run() -> Response:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        try:
            return await get(f"http://ann:se%40cret@127.0.0.1:{port}/m?a=b#c", size_max=MIB, purpose="test")
        finally:
            listener.close()

    assert asyncio.run(run()).body == b"hello"
    assert server.asked[0].startswith(b"GET /m?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Basic " + base64.b64encode(b"ann:se@cret") in server.asked[0]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority and what it signed for 127.0.0.1: for the server and, the same, for its client."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    own = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*new, *own], cwd=folder, check=True, capture_output=True)
    return folder


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server that wants a certificate of its clients, and of such a client."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(cert))
    theirs.verify_mode = ssl.CERT_REQUIRED
    ours = ssl.create_default_context(cafile=str(cert))
    for context in (theirs, ours):
        context.load_cert_chain(str(cert), str(key))
    return theirs, ours


def test_both_sides_show_their_certificates(certificates: Path) -> None:
    theirs, ours = contexts(certificates)

    async def ask(port: int) -> Response:
        async with Client(f"https://127.0.0.1:{port}", tls=ours) as client:
            return await read(client)

    assert asyncio.run(over_tcp(HELLO, ask, theirs)).body == b"hello"


def test_a_certificate_of_nobody_we_trust_is_refused(certificates: Path) -> None:
    theirs, _ = contexts(certificates)
    with pytest.raises(CannotConnect, match="certificate verify failed"):
        asyncio.run(
            over_tcp(HELLO, lambda port: get(f"https://127.0.0.1:{port}/", size_max=MIB, purpose="test"), theirs)
        )


def test_a_certificate_for_another_name_is_refused(certificates: Path) -> None:
    theirs, ours = contexts(certificates)

    async def ask(port: int) -> Response:
        async with Client(f"https://localhost:{port}", tls=ours) as client:
            return await read(client)

    with pytest.raises(CannotConnect, match="certificate verify failed"):
        asyncio.run(over_tcp(HELLO, ask, theirs))


def test_a_server_that_does_not_connect_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECT", timedelta(milliseconds=50))

    async def ask(port: int) -> Response:
        return await get(f"https://127.0.0.1:{port}/", size_max=MIB, purpose="test")

    async def silent() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and begins no handshake
            await ask(server.getsockname()[1])

    with pytest.raises(CannotConnect, match="could not be reached within"):
        asyncio.run(silent())


def test_the_head_is_read() -> None:
    head = read_head(b"HTTP/1.1 200 All good\r\nA: 1 \r\na:2\r\nContent-Length: 3\r\n\r\n")
    assert (head.status, head.reason, head.fields, head.size, head.keeps) == (
        200,
        "All good",
        {"a": "1, 2", "content-length": "3"},
        3,
        True,
    )
    assert read_chunk_size(b"1f; name=value\r\n") == 31
