"""The small HTTP server of operator and daemon, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from gpukeeper.interfaces import http_pages
from gpukeeper.interfaces.http_pages import Endpoint, PageResponse, listening, read_endpoint, words
from gpukeeper.model.errors import UsageError


def a_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def served(story: Callable[[int], Awaitable[None]], patience: float = http_pages.PATIENCE) -> None:
    async def fine() -> PageResponse:
        return words(None)

    async def bad() -> PageResponse:
        return words("no pass finished for 40m")

    async def tell() -> None:
        port = a_port()
        async with listening(Endpoint(port), {"/healthz": fine, "/readyz": bad}, patience):
            await story(port)

    asyncio.run(tell())


async def ask(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Head and body, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        answer = await reader.read()
    except ConnectionResetError:  # hung up on before it was heard out
        answer = b""
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def test_a_probe_gets_ok_or_the_sentence() -> None:
    async def story(port: int) -> None:
        head, body = await ask(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b"ok\n"
        assert b"Content-Length: 3" in head
        head, body = await ask(port, b"GET /readyz?verbose HTTP/1.0\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert body == b"no pass finished for 40m\n"

    served(story)


def test_what_is_not_here_is_reported_and_nothing_can_be_changed() -> None:
    async def story(port: int) -> None:
        head, body = await ask(port, b"GET /secrets HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert body == b"not found; available: /healthz, /readyz\n"
        head, _ = await ask(port, b"POST /healthz HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 ")
        head, body = await ask(port, b"HEAD /healthz HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body == b""

    served(story)


def test_garbage_and_endless_requests_are_hung_up_on() -> None:
    async def story(port: int) -> None:
        assert await ask(port, b"\x00\xff\r\n\r\n") != (b"", b"ok\n")
        assert await ask(port, b"GET /healthz HTTP/1.1\r\n" + b"x" * 40_000 + b"\r\n\r\n") == (b"", b"")
        assert (await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == b"ok\n"

    served(story)


def test_who_says_nothing_is_not_waited_for() -> None:
    async def story(port: int) -> None:
        assert await ask(port, b"GET /hea") == (b"", b"")

    served(story, patience=0.05)


def test_too_many_at_once_are_turned_away_and_room_comes_back() -> None:
    async def story(port: int) -> None:
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(http_pages.AT_ONCE)]
        assert await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n") == (b"", b"")
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
        for _ in range(100):
            if (await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == b"ok\n":
                return
        pytest.fail("no room came back")

    served(story)


def test_it_listens_on_all_addresses() -> None:
    async def story(port: int) -> None:
        for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port)} | {"127.0.0.1"}:
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await reader.read()).endswith(b"ok\n")
            writer.close()

    served(story)


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    async def twice() -> None:
        port = a_port()
        async with listening(Endpoint(port), {}):
            with pytest.raises(UsageError, match=f"cannot listen on port {port}: .*--health"):
                async with listening(Endpoint(port), {}):
                    pass

    asyncio.run(twice())


def test_a_daemon_listens_on_loopback_unless_told_otherwise() -> None:
    assert read_endpoint("9101", "--metrics", "127.0.0.1") == Endpoint(9101, "127.0.0.1", "--metrics")
    assert read_endpoint("10.0.0.7:9101", "--metrics", "127.0.0.1") == Endpoint(9101, "10.0.0.7", "--metrics")
    assert read_endpoint("[::1]:0", "--metrics", "127.0.0.1") == Endpoint(0, "::1", "--metrics")
    assert read_endpoint("node-3:9101", "--metrics", "127.0.0.1").address == "node-3"


@pytest.mark.parametrize("words", ["", "yes", ":9101", "node-3:", "65536", "-1", "9101/metrics", "١"])
def test_what_is_no_address_is_the_users_to_mend(words: str) -> None:
    with pytest.raises(UsageError, match=r"--metrics .* is not PORT or ADDRESS:PORT"):
        read_endpoint(words, "--metrics", "127.0.0.1")


def test_it_listens_only_on_the_address_it_was_given() -> None:
    async def story() -> None:
        async with listening(Endpoint(0, "127.0.0.1"), {}) as port:
            assert (await ask(port, b"GET / HTTP/1.1\r\n\r\n"))[0].startswith(b"HTTP/1.1 404")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", port)

    asyncio.run(story())


def test_an_address_that_is_not_ours_is_the_users_to_mend() -> None:
    async def story() -> None:
        with pytest.raises(UsageError, match=r"cannot listen on port 9101 of 192\.0\.2\.1: .*--metrics"):
            async with listening(Endpoint(9101, "192.0.2.1", "--metrics"), {}):
                pass

    asyncio.run(story())
