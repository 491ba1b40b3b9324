"""Telling people on real pseudo-terminals: who gets the message, and who never does."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import pwd
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gpukeeper.model.ports import Delivered, Message, MessageKind
from gpukeeper.notify.terminals import Terminals, notify_inside
from tests.patience import PATIENCE

WARNING = "docker/node-3/eval: idle for 24m, allowed 30m"
SCREEN_SIDE = 4095  # bytes that the kernel keeps for who reads


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """What its person sees (reads never block), and the end a program has open."""
    screen, device = pty.openpty()
    tty.setraw(device)
    os.set_blocking(screen, False)
    try:
        yield screen, device
    finally:
        os.close(screen)
        os.close(device)


@contextmanager
def sitting_at(device: int | IO[Any], errors: int | IO[Any] | None = None) -> Iterator[int]:
    """A process with that as input, output and errors; it ends when we are done."""
    ours, theirs = os.pipe()
    ready, begun = os.pipe()
    wait = f"import os; os.write({begun}, b'.'); os.read({ours}, 1)"
    child = subprocess.Popen(
        [sys.executable, "-c", wait],
        stdin=device,
        stdout=device,
        stderr=device if errors is None else errors,
        pass_fds=(ours, begun),
    )
    try:
        assert os.read(ready, 1) == b"."
        yield child.pid
    finally:
        os.write(theirs, b".")
        child.wait(timeout=PATIENCE)
        for end in (ours, theirs, ready, begun):
            os.close(end)


def shown(screen: int) -> str:
    try:
        return os.read(screen, 65536).decode()
    except BlockingIOError:
        return ""


def test_whoever_sits_inside_is_told_once_for_each_terminal() -> None:
    """C14.1: input, output and errors are one terminal, and two processes may share it."""
    with terminal() as (screen, device), sitting_at(device) as one, sitting_at(device) as two:
        assert notify_inside([one, two], WARNING) == 1
        assert shown(screen).count(WARNING) == 1


def test_every_terminal_is_reported() -> None:
    with terminal() as (first, a), terminal() as (second, b), sitting_at(a) as one, sitting_at(b) as two:
        assert notify_inside([one, two], WARNING) == 2
        assert WARNING in shown(first)
        assert WARNING in shown(second)


def test_a_terminal_at_one_of_the_three_is_enough() -> None:
    with Path(os.devnull).open("r+b") as nothing, terminal() as (screen, device), sitting_at(nothing, device) as pid:
        assert notify_inside([pid], WARNING) == 1
        assert WARNING in shown(screen)


def test_a_file_and_other_devices_are_never_written(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("epoch 1\n")
    with log.open("a") as file, sitting_at(file) as pid:
        assert notify_inside([pid], WARNING) == 0
    assert log.read_text() == "epoch 1\n"
    with Path(os.devnull).open("r+b") as nothing, sitting_at(nothing) as pid:
        assert notify_inside([pid], WARNING) == 0


def test_a_name_planted_inside_the_workload_leads_nowhere(tmp_path: Path) -> None:
    """Only what the process has open counts; its own view of /dev/pts may be a link to a terminal of the host."""
    with terminal() as (screen, device), Path(os.devnull).open("r+b") as nothing, sitting_at(nothing) as pid:
        inside = tmp_path / str(pid) / "root" / "dev" / "pts"
        inside.mkdir(parents=True)
        (inside / "0").symlink_to(os.ttyname(device))
        (tmp_path / str(pid) / "fd").symlink_to(f"/proc/{pid}/fd")
        assert notify_inside([pid], WARNING, str(tmp_path)) == 0
        assert shown(screen) == ""


def test_a_full_terminal_is_not_waited_for_and_not_told() -> None:
    with terminal() as (screen, device), sitting_at(device) as pid:
        os.set_blocking(device, False)
        _fill(device, screen)
        assert notify_inside([pid], WARNING) == 0
        assert WARNING not in shown(screen)


def test_a_stopped_terminal_is_not_waited_for_and_not_told() -> None:
    """Ctrl-S."""
    with terminal() as (screen, device), sitting_at(device) as pid:
        termios.tcflow(device, termios.TCOOFF)
        assert notify_inside([pid], WARNING) == 0
        termios.tcflow(device, termios.TCOON)
        assert shown(screen) == ""


def test_a_process_that_is_gone_is_nobody() -> None:
    with Path(os.devnull).open("r+b") as nothing, sitting_at(nothing) as pid:
        pass
    assert notify_inside([pid], WARNING) == 0


def test_names_cannot_drive_a_terminal() -> None:
    """C14.1"""
    with terminal() as (screen, device), sitting_at(device) as pid:
        assert notify_inside([pid], "\x1b]0;owned\x07eval\x9b2J\nroot: give me your password") == 1
        words = shown(screen)
        assert words.removeprefix("\r\n\a").removesuffix("\r\n").isprintable()
        assert "eval" in words


def test_the_other_end_of_a_terminal_is_not_a_users_screen() -> None:
    """A program that drives terminals has that end open. To open it makes a new terminal, at which nobody sits."""
    with terminal() as (screen, _), sitting_at(screen) as pid:
        assert notify_inside([pid], WARNING) == 0


def test_half_a_message_is_not_a_message() -> None:
    with terminal() as (screen, device), sitting_at(device) as pid:
        os.set_blocking(device, False)
        _fill(device, screen)
        os.read(screen, 4096)
        _, writable, _ = select.select([], [device], [], PATIENCE)
        assert writable, "there is room for some of it, as soon as the kernel has moved what waits"
        long = WARNING * 2000
        assert notify_inside([pid], long) == 0
        assert "[gpukeeper]" in _everything(screen)


def test_the_owner_is_told_on_the_host_and_nobody_else(tmp_path: Path) -> None:
    """C14.1"""
    with terminal() as (screen, device):
        number = Path(os.ttyname(device)).name
        me = pwd.getpwuid(os.fstat(device).st_uid).pw_name
        other = next(one.pw_name for one in pwd.getpwall() if one.pw_name != me)
        devices = tmp_path / "pts"
        devices.mkdir()
        assert not delivered(Terminals(devices), me)  # nobody is logged in
        (devices / number).symlink_to(os.ttyname(device))
        assert not delivered(Terminals(devices), me)  # a link is not a terminal
        assert shown(screen) == ""
        only = OneTerminal(Path(os.ttyname(device)))
        assert not delivered(only, other)
        assert not delivered(only, None)
        assert not delivered(only, "no-such-user")
        assert shown(screen) == ""
        assert delivered(only, me)
        assert WARNING in shown(screen)


def delivered(terminals: Terminals, owner: str | None) -> bool:
    message = Message(
        kind=MessageKind.WARNING, about="", text=WARNING, at=datetime(2026, 5, 1, tzinfo=UTC), owner=owner
    )
    return isinstance(asyncio.run(terminals.send(message)), Delivered)


class OneTerminal(Terminals):
    """Whoever runs the tests has terminals too, and they are left in peace."""

    def _terminals(self) -> Iterator[Path]:
        yield self._devices


def _everything(screen: int) -> str:
    words = ""
    while more := shown(screen):
        words += more
    return words


def _fill(device: int, screen: int) -> None:
    """Until not one byte more goes in. The kernel moves what was written to the screen's side a moment later, which
    makes room: so again, when that side is full."""
    assert fcntl.fcntl(device, fcntl.F_GETFL) & os.O_NONBLOCK
    _write_until_blocked(device)
    end = time.monotonic() + PATIENCE
    while struct.unpack("i", fcntl.ioctl(screen, termios.FIONREAD, bytes(4)))[0] < SCREEN_SIDE:
        assert time.monotonic() < end
        time.sleep(0.01)
    _write_until_blocked(device)


def _write_until_blocked(device: int) -> None:
    for size in (4096, 1):
        try:
            while True:
                os.write(device, b"x" * size)
        except BlockingIOError:
            continue
