"""Stands between gpukeeper and an API server: writes down what is asked, and answers some of it wrongly, late, in part
or not at all. What it invents has the shape of the server's own answers (Status objects).

    with proxy(plane) as between:
        between.rule = lambda asked: Say(503) if asked.path == "/apis/batch" else None
        harness = Harness(plane.kubeconfig(server=between.address), namespace)

A rule is asked once for each question. None: the question goes through, and so does its answer.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import parse_qsl, urlsplit

from tests.real.kube.control_plane import ControlPlane

REASONS = {
    200: "",  # an answer without a word: of a watch, one that ended properly
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass
class Asked:
    """One question. `status` is what gpukeeper was told; None: it got no whole answer."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""
    number: int = 0  # in the order of asking
    at: float = field(default_factory=time.monotonic)
    status: int | None = None

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def is_list(self) -> bool:
        """Of objects; not one of them, and not what the server serves."""
        return self.method == "GET" and "limit" in self.query and not self.is_watch


# What a rule may do to a question.


@dataclass(frozen=True)
class Say:
    """This refusal, and the server never hears of it."""

    status: int
    words: str = "injected"
    retry_after: int | None = None
    token: str = ""  # a 410 may offer one, to go on with


@dataclass(frozen=True)
class Swallow:
    """The server never hears of it, and 200 is said: a lie."""


@dataclass(frozen=True)
class Lose:
    """The server does it; its answer is lost and the connection breaks. Not `delivered`: the question is lost, too."""

    delivered: bool = True


@dataclass(frozen=True)
class Cut:
    """The answer breaks off in the middle: of a list after half of it, of a watch after so many events."""

    events: int = 1


@dataclass(frozen=True)
class Late:
    seconds: float


@dataclass(frozen=True)
class Jumble:
    """The events of a watch come twice, or two neighbours in the wrong order."""

    twice: bool = False
    swapped: bool = False


@dataclass(frozen=True)
class First:
    """Something happens in the cluster just before the question arrives: the race that cannot be hit by luck."""

    happens: Callable[[], object]


class Held:
    """A question that waits in the proxy until `go`: what happens meanwhile is in the middle of it, not by luck. As a
    rule, `Held(which)` holds the first question for which `which` is true, once.
    """

    def __init__(self, which: Callable[[Asked], object]) -> None:
        self._which, self._came, self._may_go = which, threading.Event(), threading.Event()
        self._lock, self._taken = threading.Lock(), False

    def __call__(self, asked: Asked) -> Fault | None:
        with self._lock:
            if self._taken or not self._which(asked):
                return None
            self._taken = True
        return First(self._wait)

    def wait(self, deadline: float = 120) -> None:
        """Until it is held."""
        assert self._came.wait(deadline), f"not asked within {deadline:.0f} s"

    def go(self) -> None:
        self._may_go.set()

    def _wait(self) -> None:
        self._came.set()
        self._may_go.wait(300)


Fault: TypeAlias = Say | Swallow | Lose | Cut | Late | Jumble | First
Rule: TypeAlias = Callable[[Asked], Fault | None]


@dataclass
class Answer:
    status: int
    head: list[tuple[str, str]]
    body: bytes = b""


@dataclass
class Proxy:
    """`done`: what was done to which question, in words, in its order."""

    plane: ControlPlane
    rule: Rule | None = None
    asked: list[Asked] = field(default_factory=list)
    done: list[tuple[str, Asked]] = field(default_factory=list)
    port: int = 0
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """For a kubeconfig's server."""
        return f"https://127.0.0.1:{self.port}"

    def lists(self) -> list[Asked]:
        return [one for one in list(self.asked) if one.is_list]

    def count(self, method: str) -> int:
        return sum(one.method == method for one in list(self.asked))

    def forget(self) -> None:
        self.asked.clear()
        self.done.clear()

    # Below here: how. All of it runs in the loop of the proxy's own thread.

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        keys = self.plane.certificates
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys.certificate, keys.key)
        self._upstream = ssl.create_default_context(cafile=str(keys.authority))
        tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()

        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self._open.add(writer)
            try:
                await self._talk(reader, writer)
            except asyncio.CancelledError:
                pass  # the proxy is closed; nobody waits for this connection
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(come, "127.0.0.1", 0, ssl=context, limit=2**26)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._open:
            with suppress(AttributeError):  # Python 3.11.2 (Debian 12), of a TLS connection that has ended
                writer.transport.abort()
        await asyncio.sleep(0.05)  # their ends are told in the next turns of the loop

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; its questions come one after the other."""
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                while True:
                    asked, head = await _question(reader)
                    asked.number = len(self.asked)
                    self.asked.append(asked)
                    fault = self.rule(asked) if self.rule is not None else None
                    if fault is not None:
                        self.done.append((type(fault).__name__, asked))
                    if isinstance(fault, Late):
                        await asyncio.sleep(fault.seconds)
                    if isinstance(fault, First):
                        await asyncio.to_thread(fault.happens)
                    if isinstance(fault, Say | Swallow):
                        await _send(writer, asked, _invented(fault))
                        continue
                    if fault == Lose(delivered=False):
                        return
                    if server is None:
                        server = await asyncio.open_connection(
                            self.plane.host, self.plane.port, ssl=self._upstream, limit=2**26
                        )
                        self._open.add(server[1])
                    await _ask(server[1], asked, head)
                    answer = await _head(server[0])
                    if asked.is_watch and answer.status == 200:
                        asked.status = 200
                        await self._stream(server[0], reader, writer, answer, fault)
                        return
                    answer.body = await _body(server[0], answer)
                    if isinstance(fault, Lose):
                        return
                    if isinstance(fault, Cut):
                        writer.write(_as_bytes(answer)[: -max(1, len(answer.body) // 2)])
                        await writer.drain()
                        return
                    await _send(writer, asked, answer)
            finally:
                if server is not None:
                    server[1].close()

    async def _stream(
        self,
        server: asyncio.StreamReader,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        fault: Fault | None,
    ) -> None:
        """Event by event, until either side ends it."""
        writer.write(_head_bytes(answer, [("Transfer-Encoding", "chunked")]))

        async def pass_on() -> None:
            count, kept = 0, b""
            async for line in _events(server):
                count += 1
                out = [line]
                if isinstance(fault, Jumble) and fault.twice:
                    out = [line, line]
                if isinstance(fault, Jumble) and fault.swapped:
                    if not kept:
                        kept = line
                        continue
                    out, kept = [line, kept], b""
                for one in out:
                    writer.write(b"%x\r\n%s\r\n" % (len(one), one))
                await writer.drain()
                if isinstance(fault, Cut) and count >= fault.events:
                    return  # without the last chunk: the connection broke
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        work, end = asyncio.create_task(pass_on()), asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, end):
                task.cancel()
            await asyncio.gather(work, end, return_exceptions=True)


@contextmanager
def proxy(plane: ControlPlane, rule: Rule | None = None) -> Iterator[Proxy]:
    made, ready = Proxy(plane, rule), threading.Event()
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set) and None)
        await made.serve(ready, ended)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30), "the proxy did not start"
    try:
        yield made
    finally:
        stop[0]()
        thread.join(30)
        assert not thread.is_alive(), "the proxy does not end"


# Messages


async def _question(reader: asyncio.StreamReader) -> tuple[Asked, list[tuple[str, str]]]:
    first, head = await _lines(reader)
    method, target, _ = first.split(" ")
    parts = urlsplit(target)
    body = await reader.readexactly(int(dict(_lower(head)).get("content-length", "0")))
    return Asked(method, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)), body), [("", target), *head]


async def _ask(writer: asyncio.StreamWriter, asked: Asked, head: list[tuple[str, str]]) -> None:
    """As it came, but for compression: what is cut must be readable."""
    target, rest = head[0][1], [(name, value) for name, value in head[1:] if name.lower() != "accept-encoding"]
    lines = [f"{asked.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in rest)]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + asked.body)
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> Answer:
    first, head = await _lines(reader)
    return Answer(int(first.split(" ")[1]), head)


async def _lines(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    read = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    return read[0], [(name, value.strip()) for name, _, value in (line.partition(":") for line in read[1:] if line)]


async def _body(reader: asyncio.StreamReader, answer: Answer) -> bytes:
    head = dict(_lower(answer.head))
    if head.get("transfer-encoding") == "chunked":
        return b"".join([chunk async for chunk in _chunks(reader)])
    return await reader.readexactly(int(head.get("content-length", "0")))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return
        yield chunk[:-2]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines, each with its end."""
    rest = b""
    async for chunk in _chunks(reader):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"


async def _send(writer: asyncio.StreamWriter, asked: Asked, answer: Answer) -> None:
    writer.write(_as_bytes(answer))
    await writer.drain()
    asked.status = answer.status


def _as_bytes(answer: Answer) -> bytes:
    return _head_bytes(answer, [("Content-Length", str(len(answer.body)))]) + answer.body


def _head_bytes(answer: Answer, more: list[tuple[str, str]]) -> bytes:
    kept = [one for one in answer.head if one[0].lower() not in {"content-length", "transfer-encoding"}]
    lines = [f"HTTP/1.1 {answer.status} Said", *(f"{name}: {value}" for name, value in [*kept, *more])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _lower(head: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in head]


def _invented(fault: Say | Swallow) -> Answer:
    head = [("Content-Type", "application/json")]
    if isinstance(fault, Swallow):
        said: dict[str, object] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return Answer(200, head, json.dumps(said).encode())
    if fault.status == 200:
        return Answer(200, head)
    if fault.retry_after is not None:
        head.append(("Retry-After", str(fault.retry_after)))
    said = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {"continue": fault.token} if fault.token else {},
        "status": "Failure",
        "message": fault.words,
        "reason": REASONS[fault.status],
        "code": fault.status,
    }
    return Answer(fault.status, head, json.dumps(said).encode())
