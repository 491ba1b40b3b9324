"""Stands between gpukeeper and an engine: counts what is asked, and can leave a question without an answer."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ASKED = re.compile(rb"(GET|POST|DELETE|PUT|HEAD) (?:/v[\d.]+)?(/[^ ?]*)[^ ]* HTTP/1\.1\r\n")


class Proxy:
    """`asked`: paths in their order, without version and query. `stuck`: paths that are never answered. `meanwhile`:
    done when the first removal was asked for, before the engine hears of it. `hold`: gets each method and path; the
    first for which it is true waits in `held` until `go`."""

    def __init__(self, path: Path, engine: Path) -> None:
        self.path, self._engine = path, engine
        self.asked: list[str] = []
        self.stuck: set[str] = set()
        self.meanwhile: Callable[[], None] | None = None
        self.hold: Callable[[str, str], object] | None = None
        self.held, self._may_go = threading.Event(), threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(64)

    @property
    def host(self) -> str:
        """For DOCKER_HOST."""
        return f"unix://{self.path}"

    def serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                guest, _ = self._socket.accept()
                engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    engine.connect(str(self._engine))
                except OSError:
                    guest.close()
                    engine.close()
                    continue
                _start(self._talk, guest, engine)

    def go(self) -> None:
        """What is held goes on."""
        self._may_go.set()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _talk(self, guest: socket.socket, engine: socket.socket) -> None:
        with guest, engine:
            answers = _start(_copy, engine, guest)
            self._questions(guest, engine)
            answers.join()

    def _questions(self, guest: socket.socket, engine: socket.socket) -> None:
        """One at a time on each connection, each in one piece: that is how gpukeeper asks."""
        with suppress(OSError):
            while read := guest.recv(65536):
                asked = [(method.decode(), path.decode()) for method, path in ASKED.findall(read)]
                paths = [path for _, path in asked]
                self.asked += paths
                if self.hold is not None and any(self.hold(*one) for one in asked):
                    self.hold = None
                    self.held.set()
                    self._may_go.wait(300)
                if self.meanwhile is not None and read.startswith(b"DELETE "):
                    do, self.meanwhile = self.meanwhile, None
                    do()
                if not self.stuck.intersection(paths):
                    engine.sendall(read)
        _end(engine)


@contextmanager
def proxy(path: Path, engine: Path) -> Iterator[Proxy]:
    made = Proxy(path, engine)
    _start(made.serve)
    try:
        yield made
    finally:
        made.close()


def _copy(engine: socket.socket, guest: socket.socket) -> None:
    with suppress(OSError):
        while read := engine.recv(65536):
            guest.sendall(read)
    _end(guest)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
