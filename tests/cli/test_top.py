"""`gpukeeper top` in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import POLICY, Fleet, ago, hear_ctrl_c
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

SHOW_CURSOR, LEAVE_SCREEN = b"\x1b[?25h", b"\x1b[?1049l"


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, fleet: Fleet, *words: str, columns: int = 80, lines: int = 24) -> None:
        self._screen, self._device = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._device)
        self.written = b""
        self.program = subprocess.Popen(
            [sys.executable, "-m", "gpukeeper", "top", *words],
            env=fleet.env(TERM="xterm"),
            stdin=self._device,
            stdout=self._device,
            stderr=self._device,
            start_new_session=True,
            preexec_fn=self._control,  # noqa: PLW1509 - two calls, which take no lock
        )

    def _control(self) -> None:
        hear_ctrl_c()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._device, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def read_until(self, words: bytes) -> bytes:
        """Everything written since the last call, up to these words."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.written:
            assert time.monotonic() < deadline, self.written[-2000:]
            assert self.program.poll() is None or self._is_ready(), self.written[-2000:]
            if self._is_ready():
                self.written += os.read(self._screen, 65536)
        found, _, self.written = self.written.partition(words)
        return found

    def ended(self) -> int:
        """Its exit code, with the terminal as it was before."""
        while self.program.poll() is None or self._is_ready():
            if self._is_ready():
                self.written += os.read(self._screen, 65536)
        assert SHOW_CURSOR in self.written
        assert LEAVE_SCREEN in self.written
        assert termios.tcgetattr(self._device) == self.before
        return self.program.returncode

    def _is_ready(self) -> bool:
        return bool(select.select([self._screen], [], [], 0.1)[0])

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        os.close(self._screen)
        os.close(self._device)


@contextmanager
def terminal(fleet: Fleet, *words: str, columns: int = 80) -> Iterator[Terminal]:
    found = Terminal(fleet, *words, columns=columns)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def busy(fleet: Fleet) -> Fleet:
    fleet.write_policy(POLICY + "classes: {docker: {on_max_runtime: stop}}\n")
    fleet.add("eval", state=State.RUNNING, started=ago(hours=3), devices=("GPU-0",))
    fleet.add("train", state=State.RUNNING, started=ago(hours=5), devices=("GPU-1",), owner="bob")
    return fleet


def test_it_shows_the_gpus_and_q_quits(busy: Fleet) -> None:
    with terminal(busy, columns=140) as one:
        one.read_until(b"GPU-0")
        row = one.read_until(b"eval")
        assert b"?" in row, "use and memory that nobody measured are no zeros"
        assert b"ann" in row
        one.read_until(b"max_runtime")
        one.press(b"q")
        assert one.ended() == 0


def test_ctrl_c_quits_too(busy: Fleet) -> None:
    with terminal(busy) as one:
        one.read_until(b"GPU-1")
        one.press(b"\x03")
        assert one.ended() == 0
        assert b"Traceback" not in one.written


def test_a_signal_restores_the_terminal(busy: Fleet) -> None:
    with terminal(busy) as one:
        one.read_until(b"GPU-1")
        one.program.send_signal(signal.SIGTERM)
        assert one.ended() == 1
        assert b"Traceback" not in one.written


def test_it_follows_the_world_the_size_and_the_keys(busy: Fleet) -> None:
    with terminal(busy, "--every", "500ms", columns=100) as one:
        one.read_until(b"(gpu)")
        one.press(b"s")
        one.read_until(b"sort (use)")
        busy.add("late", state=State.RUNNING, started=ago(hours=1), devices=("GPU-2",), owner="eve")
        one.read_until(b"late")
        one.resize(60, 24)
        os.kill(one.program.pid, signal.SIGWINCH)
        one.read_until(b"late")
        one.press(b"q")
        assert one.ended() == 0


def test_only_one_persons_gpus(busy: Fleet) -> None:
    with terminal(busy, "--owner", "bob") as one:
        assert b"GPU-0" not in one.read_until(b"GPU-1")
        one.press(b"q")
        assert one.ended() == 0


def test_an_error_is_printed_after_the_screen_is_left(busy: Fleet) -> None:
    busy.write_policy("mode: sometimes\n")
    with terminal(busy) as one:
        assert one.ended() == 10
        assert b"sometimes" in one.written.rpartition(LEAVE_SCREEN)[2]


def test_the_demo_needs_no_fleet(fleet: Fleet) -> None:
    with terminal(fleet, "--demo") as one:
        one.read_until(b"GPU-0")
        one.press(b"q")
        assert one.ended() == 0


def test_without_a_terminal_it_shows_what_to_use_instead(fleet: Fleet) -> None:
    ran = fleet.run("top")
    assert ran.code == 2
    assert "gpukeeper observe --gpus" in ran.err
    assert "--json" in ran.err
    assert ran.out == ""


def test_an_order_that_does_not_exist_is_refused(fleet: Fleet) -> None:
    ran = fleet.run("top", "--sort", "colour")
    assert ran.code == 2
    assert "gpu, use, memory, owner, next" in ran.err


def test_a_platform_that_hangs_freezes_neither_the_keys_nor_the_end(busy: Fleet) -> None:
    """A workload's file that never ends: the thread that gathers hangs in it."""
    with terminal(busy, "--every", "500ms") as one:
        one.read_until(b"GPU-1")
        with hanging(busy):
            one.press(b"s")
            one.read_until(b"sort (use)")
            one.press(b"q")
            assert one.ended() == 0


@contextmanager
def hanging(fleet: Fleet) -> Iterator[None]:
    """From when something reads from it."""
    pipe = fleet.folder / "stuck.json"
    os.mkfifo(pipe)
    deadline = time.monotonic() + PATIENCE
    while (end := _opened(pipe)) is None:
        assert time.monotonic() < deadline, "nothing reads the workloads"
    try:
        yield
    finally:
        os.close(end)


def _opened(pipe: Path) -> int | None:
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads from it yet
        return None
