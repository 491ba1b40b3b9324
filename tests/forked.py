"""Runs `python -m PROGRAM WORDS…` without the imports: as a fork of a process that has imported gpukeeper.

Every command still is a process of its own, with its own arguments, environment, directory, standard streams, signals
and exit status. Only the imports are shared, which take five times as long as most commands; there is one such process
per process of pytest. Every JSON document in tests/docs is made with the imports of its command alone (tests/cold.py);
commands that start from nothing are those of the tutorial, and wherever a test starts sys.executable itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import gpukeeper
from tests import small_reserve
from tests.patience import PATIENCE

_ROOT = Path(__file__).parents[1]
_STATUS = struct.Struct("i")
_REQUEST_MAX = 1 << 17
# What an interpreter reads when it starts: a command that sets one of these is not forked.
_OF_THE_INTERPRETER = ("PYTHON", "LC_", "MALLOC", "LD_")
_NEEDS_TORCH = "gpukeeper.acceptance.probes"
# Imported by libraries when they are first used.
_LATE = ("typer._adapters", "pydantic.plugin._loader", "importlib.metadata", "encodings.idna", "sqlite3", "rich.live")


class Forked:
    """A command that runs."""

    def __init__(self, replies: socket.socket) -> None:
        self._replies = replies
        self.pid: int = self._next(None)

    def wait(self, timeout: float) -> int:
        """Its exit status, negative if a signal ended it. It is killed if it takes longer."""
        try:
            status = self._next(timeout)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            self._next(None)
            raise
        finally:
            self._replies.close()
        return status

    def _next(self, timeout: float | None) -> int:
        self._replies.settimeout(timeout)
        reply = self._replies.recv(_STATUS.size)
        assert reply, "the process that forks commands has ended"
        number: int = _STATUS.unpack(reply)[0]
        return number


def start(
    program: str,
    words: Sequence[str],
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    *,
    folder: Path | None = None,
    executable: str = sys.executable,
) -> Forked:
    """`streams`: what its stdin, stdout and stderr are. `executable`: what gpukeeper finds as sys.executable."""
    assert _can_fork(env), env
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = json.dumps([program, list(words), dict(env), str(folder or Path.cwd())]).encode()
    with theirs:
        socket.send_fds(_server(executable), [request], [*streams, theirs.fileno()])
    return Forked(ours)


def run(
    program: str,
    words: Sequence[str],
    env: Mapping[str, str],
    stdin: str | None = None,
    timeout: float = PATIENCE,
    *,
    folder: Path | None = None,
    executable: str = sys.executable,
) -> tuple[int, str, str]:
    """Exit status, output and messages. Without `stdin` it has that of the tests."""
    if executable == sys.executable and not _can_fork(env):
        command = [sys.executable, "-m", program, *words]
        done = subprocess.run(
            command, env=env, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder
        )
        return done.returncode, done.stdout, done.stderr
    pipes = [os.pipe(), os.pipe(), *([] if stdin is None else [os.pipe()])]
    (out, their_out), (err, their_err), *given = pipes
    streams = given[0][0] if given else 0, their_out, their_err
    child = start(program, words, env, streams, folder=folder, executable=executable)
    for fd in (their_out, their_err, *(pipe[0] for pipe in given)):
        os.close(fd)
    with ThreadPoolExecutor(2) as readers:
        printed = [readers.submit(_read, fd) for fd in (out, err)]
        if given:
            _write(given[0][1], stdin or "")
        code = child.wait(timeout)
        return code, printed[0].result(), printed[1].result()


def _can_fork(env: Mapping[str, str]) -> bool:
    started = environment()
    return env.get("LANG") == started.get("LANG") and not any(map(is_of_the_interpreter, env))


def is_of_the_interpreter(name: str) -> bool:
    """Of an environment variable."""
    return name.startswith(_OF_THE_INTERPRETER)


def _read(fd: int) -> str:
    with open(fd, encoding="utf-8") as pipe:
        return pipe.read()


def _write(fd: int, text: str) -> None:
    with suppress(BrokenPipeError), open(fd, "w", encoding="utf-8") as pipe:  # as subprocess.run: it need not read all
        pipe.write(text)


def environment() -> dict[str, str]:
    """What a command needs of the tests' own environment."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


@functools.cache
def _server(executable: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_MAX)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), executable],
            cwd=_ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return ours


def _preload() -> None:
    for found in pkgutil.walk_packages(gpukeeper.__path__, "gpukeeper."):
        if not found.name.endswith("__main__") and not found.name.startswith(_NEEDS_TORCH):
            importlib.import_module(found.name)
    for name in _LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _serve(requests: socket.socket) -> tuple[str, list[str]] | None:
    """Forks until nobody sends any more. In a child: what it is to run."""
    running = selectors.DefaultSelector()
    running.register(requests, selectors.EVENT_READ)
    replies: dict[int, tuple[int, socket.socket]] = {}  # by the file descriptor of a child
    while True:
        for key, _ in running.select():
            if key.fileobj is not requests:
                pid, reply = replies.pop(key.fd)
                running.unregister(key.fd)
                os.close(key.fd)
                _answer(reply, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                reply.close()
                continue
            request, fds, _, _ = socket.recv_fds(requests, _REQUEST_MAX, 4)
            if not request:
                return None
            pid = os.fork()
            if pid == 0:
                running.close()
                for one in (requests, *(reply for _, reply in replies.values())):
                    one.close()
                return _become(request, fds)
            for fd in fds[:3]:
                os.close(fd)
            child, reply = os.pidfd_open(pid), socket.socket(fileno=fds[3])
            replies[child] = (pid, reply)
            running.register(child, selectors.EVENT_READ)
            _answer(reply, pid)


def _answer(reply: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # the test has ended
        reply.send(_STATUS.pack(number))


def _become(request: bytes, fds: list[int]) -> tuple[str, list[str]]:
    program, words, env, folder = json.loads(request)
    for fd, number in zip(fds, range(3), strict=False):
        os.dup2(fd, number)
    os.closerange(3, 1024)
    sys.stdin = sys.__stdin__ = _stream(0, sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[0] = folder
    return program, words


def _stream(fd: int, old: object) -> io.TextIOWrapper:
    """As the interpreter opens it at its start."""
    assert isinstance(old, io.TextIOWrapper)
    encoding, errors = old.encoding, old.errors
    old.detach()
    newline = None if fd == 0 else "\n"
    stream = os.fdopen(fd, "r" if fd == 0 else "w", -1, encoding, errors, newline, closefd=False)
    stream.reconfigure(line_buffering=fd == 2 or os.isatty(fd))
    return stream


def main(fd: int, executable: str) -> None:
    sys.executable = executable  # before anything of gpukeeper keeps it
    _preload()
    small_reserve.install()
    with socket.socket(fileno=fd) as requests:
        wanted = _serve(requests)
    if wanted is not None:
        program, words = wanted
        sys.argv[1:] = words
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
