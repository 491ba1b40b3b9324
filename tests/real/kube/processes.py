"""Programs of a control plane, with logs in files and ports of their own. They end when the test process ends."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# A test run that is killed takes its programs with it.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
# Below the range of which the kernel gives ports to clients: nobody takes one between our look and the program's start.
_FIRST_PORT = 21_000
_EACH = 60
_BLOCKS = 64


@dataclass
class Block:
    """A number that no other engine on this machine has now, and its ports."""

    number: int
    _next: int = 0

    def port(self) -> int:
        """One that nobody listens on."""
        while self._next < _EACH:
            port = _FIRST_PORT + self.number * _EACH + self._next
            self._next += 1
            if _is_free(port):
                return port
        raise RuntimeError(f"the {_EACH} ports of this engine are used up")


@contextmanager
def a_block(folder: Path, remove: Callable[[int, Path], None]) -> Iterator[Block]:
    """The lock goes with us, however we end; our folder is written there. `remove` gets number and folder of each one
    that did not get to its own end."""
    with _first_free() as (number, lock):
        for abandoned in range(_BLOCKS):
            with _locked(abandoned, lock if abandoned == number else None) as file:
                if file is not None and (last := _read(file)):
                    remove(abandoned, Path(last))
                    file.truncate(0)
        lock.write(str(folder))
        lock.flush()
        yield Block(number)
        lock.truncate(0)


@contextmanager
def _first_free() -> Iterator[tuple[int, IO[str]]]:
    for number in range(_BLOCKS):
        with _lock_file(number).open("a+") as lock:
            if _lock(lock):
                yield number, lock
                return
    raise RuntimeError(f"{_BLOCKS} beds run on this machine")


@contextmanager
def _locked(number: int, ours: IO[str] | None) -> Iterator[IO[str] | None]:
    """None: nobody ever had this number, or somebody has it now."""
    if ours is not None or not _lock_file(number).exists():
        yield ours
        return
    with _lock_file(number).open("a+") as file:
        yield file if _lock(file) else None


def _lock_file(number: int) -> Path:
    return Path(tempfile.gettempdir(), f"gpukeeper-kube-{number}.lock")


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


class Program:
    """One program with the same command and log at every start."""

    def __init__(
        self, folder: Path, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.command, self.log_file = name, list(command), folder / f"{name}.log"
        self.start_seconds = 0.0
        self._env = dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, ready: Callable[[], object], deadline: float = 120) -> None:
        """And wait until it is ready; when it ends instead, its last words are in the error."""
        assert not self.runs, f"{self.name} runs already"
        began = time.monotonic()
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                [*_ENDS_WITH_US, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment() | self._env,
                start_new_session=True,
            )
        while not ready():
            late = time.monotonic() - began > deadline
            ended = self._child.poll()
            if late or ended is not None:
                what = f"ended with {ended}" if ended is not None else f"was not ready within {deadline:.0f} s"
                self.kill()
                raise RuntimeError(f"{self.name} {what}. The end of its log:\n{self.log[-3000:]}")
            time.sleep(0.03)
        self.start_seconds = time.monotonic() - began

    def kill(self) -> None:
        """As a crash does."""
        self._end(signal.SIGKILL)

    def shut_down(self, deadline: float = 20) -> None:
        """As an administrator does."""
        self._end(signal.SIGTERM, deadline)

    def pause(self) -> None:
        """It hangs: connections open, no answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def runs(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} does not run"
        return self._child.pid

    @property
    def log(self) -> str:
        with suppress(FileNotFoundError):
            return self.log_file.read_text(errors="replace")
        return ""

    @property
    def memory_mib(self) -> int:
        """Resident."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024

    def _end(self, with_signal: signal.Signals, deadline: float = 10) -> None:
        if self._child is None:
            return
        with suppress(ProcessLookupError):
            self._child.send_signal(with_signal)
        try:
            self._child.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(timeout=10)
        self._child = None


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _environment() -> dict[str, str]:
    """Of this machine's own cluster or proxy nothing: all is on loopback."""
    left_out = ("KUBE", "GPUKEEPER_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ETCD_")
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
