"""Real connections: slow and idle ones, too many of them, TLS, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpukeeper.interfaces.link import TlsPair
from gpukeeper.interfaces.web import connections, peers
from gpukeeper.interfaces.web.connections import HttpServer
from gpukeeper.interfaces.web.peers import Owner, Peers, is_here
from tests.patience import PATIENCE

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = 30_000_000
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


SHORT = 0.2


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None that a busy machine could reach; a test makes the one short that it is about."""
    for name in ("REQUEST", "RESPONSE", "HANDSHAKE"):
        monkeypatch.setattr(connections, name, PATIENCE)
    return monkeypatch


class Running:
    def __init__(self, server: HttpServer, port: int) -> None:
        self.server, self.port = server, port

    async def connect(self, context: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if context is None else "localhost"
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=name)

    async def ask(self, context: ssl.SSLContext | None = None) -> bytes:
        reader, writer = await self.connect(context)
        writer.write(GET)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), PATIENCE)
        writer.close()
        return head


@asynccontextmanager
async def running(tls: TlsPair | None = None, most: int | None = None) -> AsyncIterator[Running]:
    async def page(request: Request) -> Response:
        await request.body()
        return PlainTextResponse("ok")

    async def large(request: Request) -> Response:
        return Response(b"x" * LARGE)

    app = Starlette(routes=[Route("/", page, methods=["GET", "POST"]), Route("/large", large)])
    server = HttpServer(app, tls)
    server.connections.most = most or server.connections.most
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = asyncio.Event()
        serving = asyncio.create_task(server.serve(listener, _until(end)))
        try:
            yield Running(server, listener.getsockname()[1])
        finally:
            end.set()
            await asyncio.wait_for(serving, PATIENCE)


async def _until(end: asyncio.Event) -> None:
    await end.wait()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():  # noqa: ASYNC110 - of whatever the test asks
            await asyncio.sleep(0.01)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def do() -> None:
        async with asyncio.timeout(PATIENCE):
            await work()

    asyncio.run(do())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nx",
    ],
)
def test_a_request_that_does_not_arrive_in_time_is_given_up(sent: bytes, deadlines: pytest.MonkeyPatch) -> None:
    deadlines.setattr(connections, "REQUEST", SHORT)

    async def work() -> None:
        async with running() as here:
            reader, writer = await here.connect()
            writer.write(sent)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), PATIENCE)
            writer.close()

    run(work)


def test_bytes_that_trickle_do_not_extend_the_deadline(deadlines: pytest.MonkeyPatch) -> None:
    deadlines.setattr(connections, "REQUEST", SHORT)

    async def work() -> None:
        async with running() as here:
            reader, writer = await here.connect()
            writer.write(b"GET / HTTP/1.1\r\n")

            def trickle() -> bool:
                writer.write(b"x: y\r\n")
                return reader.at_eof() or writer.transport.is_closing()

            await until(trickle)
            writer.close()

    run(work)


def test_an_answer_that_nobody_reads_is_given_up(deadlines: pytest.MonkeyPatch) -> None:
    deadlines.setattr(connections, "RESPONSE", SHORT)

    async def work() -> None:
        async with running() as here:
            _, writer = await here.connect()
            writer.transport.pause_reading()
            writer.write(GET.replace(b" / ", b" /large "))
            await until(lambda: bool(here.server.connections.open))
            await until(lambda: not here.server.connections.open)
            writer.close()

    run(work)


def test_idle_connections_make_room_for_new_ones() -> None:
    async def work() -> None:
        async with running(most=10) as here:
            idle = [await here.connect() for _ in range(50)]
            assert await here.ask() == b"HTTP/1.1 200 OK\r\n"
            assert len(here.server.connections.open) <= 10
            assert here.server.connections.closed >= 40
            for _, writer in idle:
                writer.close()

    run(work)


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def work() -> None:
        async with running() as here:
            reader, writer = await here.connect()
            for _ in range(3):
                writer.write(GET)
                assert await reader.readuntil(b"\r\n\r\nok")
            assert len(here.server.connections.open) == len(here.server.connections.waiting) == 1
            writer.close()

    run(work)


@needs_openssl
def test_https_and_a_renewed_certificate(tmp_path: Path) -> None:
    first, second = make_pair(tmp_path / "1"), make_pair(tmp_path / "2")

    async def work() -> None:
        async with running(first) as here:
            old, new = (trusting(one) for one in (first, second))
            assert await here.ask(old) == b"HTTP/1.1 200 OK\r\n"
            reader, writer = await here.connect(old)
            here.server.renew(second)
            with pytest.raises(ssl.SSLCertVerificationError):
                await here.ask(old)
            assert await here.ask(new) == b"HTTP/1.1 200 OK\r\n"
            writer.write(GET)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"  # what is open goes on
            writer.close()

    run(work)


@needs_openssl
def test_what_is_no_tls_gets_nothing_and_a_slow_handshake_is_given_up(
    tmp_path: Path, deadlines: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path / "1")

    async def work() -> None:
        async with running(pair, most=10) as here:
            reader, writer = await here.connect()
            writer.write(GET)
            assert b"200" not in await asyncio.wait_for(reader.read(), PATIENCE)
            idle = [await here.connect() for _ in range(30)]
            assert await here.ask(trusting(pair)) == b"HTTP/1.1 200 OK\r\n"
            for _, one in (*idle, (reader, writer)):
                one.close()
            deadlines.setattr(connections, "HANDSHAKE", SHORT)
            reader, writer = await here.connect()
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            await until(lambda: not here.server.connections.open)
            writer.close()

    run(work)


@pytest.mark.parametrize("find", [peers._asked, peers._looked_up, peers.socket_owner])
@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.9"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "mapped"),
    ],
)
def test_the_kernel_reports_whose_connection_it_is(family: socket.AddressFamily, address: str, find: Owner) -> None:
    """`mapped`: over IPv4, from an IPv6 socket."""
    mapped = address == "mapped"
    try:
        listener = socket.create_server(
            ("127.0.0.1" if mapped else address, 0), family=socket.AF_INET if mapped else family
        )
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, socket.socket(family) as client:
        host, port = listener.getsockname()[:2]
        client.connect((f"::ffff:{host}" if mapped else host, port))
        accepted, peer = listener.accept()
        own = accepted.getsockname()[:2]
        assert find(peer[:2], own) == os.getuid()
        for other in (("10.255.255.1", 1), (peer[0], 1), (host, port), ("no address", 1)):
            assert find(other, own) is None
        client.close()  # then the kernel reports root, or nobody
        assert find(peer[:2], own) is None
        accepted.close()


def test_a_user_whom_a_container_does_not_know_is_unknown() -> None:
    """There all of them have the same uid."""
    program = (
        "import socket; from gpukeeper.interfaces.web.peers import socket_owner, _asked, _looked_up\n"
        "listener = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(listener.getsockname())\n"
        "ends = client.getsockname(), listener.getsockname()\n"
        "print(socket_owner(*ends), _asked(*ends), _looked_up(*ends))"
    )
    ran = subprocess.run(
        ["unshare", "--user", sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    if "unshare" in ran.stderr:
        pytest.skip("no user namespaces here")
    assert ran.stdout == "None 65534 65534\n", ran.stderr


def test_asking_costs_the_same_however_many_connections_there_are() -> None:
    """Otherwise thousands of them make each new one slow."""
    assert peers.is_quick()
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener, ExitStack() as stack:
        ends = listener.getsockname()
        few = _seconds_to_ask(ends)
        for _ in range(900):
            stack.enter_context(socket.create_connection(ends))
        assert _seconds_to_ask(ends) < 5 * few


def _seconds_to_ask(ends: tuple[str, int]) -> float:
    """The best of many, so that a busy machine does not matter."""

    def once(client: socket.socket) -> float:
        begun = time.process_time()
        assert peers.socket_owner(client.getsockname(), ends) == os.getuid()
        return time.process_time() - begun

    with socket.create_connection(ends) as client:
        return min(once(client) for _ in range(200))


def test_which_addresses_are_of_this_machine() -> None:
    assert is_here("127.0.0.1")
    assert is_here("::ffff:127.0.0.1")
    assert not is_here("203.0.113.7")
    assert Peers(None).proxy is None


def trusting(pair: TlsPair) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=pair.certificate.decode())


def make_pair(folder: Path) -> TlsPair:
    folder.mkdir()
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(folder / "key"), "-out", str(folder / "crt"), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return TlsPair((folder / "crt").read_bytes(), (folder / "key").read_bytes())
