"""The supervisor of another program: when its parent is gone, or closes the pipe, everything below it ends. Run it:
python -I -S supervisor.py FD SECONDS PROGRAM ARGUMENT…. FD is the end of a pipe that closes with its owner, SECONDS
the time between SIGTERM and SIGKILL. It adopts orphans (torchrun gives each rank a session of its own, and dies
without them), so that no process below it escapes. It ends with the program's own exit code; it knows nothing about
gpukeeper.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # of prctl(2)
NOT_STARTED = 127
UNKILLABLE_S = 2.0  # a process inside a driver may not even die by SIGKILL: no longer wait
GLANCE_S = 0.05  # at what dies


def main(arguments: list[str]) -> int:
    owner_pipe, patience = int(arguments[0]), float(arguments[1])
    kernel = ctypes.CDLL(None, use_errno=True)
    kernel.prctl(SET_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the pipe wakes us
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def die_with_supervisor() -> None:
        """If even this program is killed, the one it supervises is killed with it."""
        kernel.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    try:
        child = subprocess.Popen(arguments[2:], preexec_fn=die_with_supervisor)  # noqa: PLW1509 - there is one thread only
    except OSError as error:
        sys.stderr.write(f"{arguments[2]} could not be started: {error.strerror}\n")
        return NOT_STARTED
    nowhere = os.open(os.devnull, os.O_RDWR)
    for inherited in (0, 1):  # readers of the program's output must see its end, and it the end of its input
        os.dup2(nowhere, inherited)
    while child.poll() is None:
        ready = select.select([owner_pipe, woken], [], [])[0]
        if woken in ready and any(number != signal.SIGCHLD for number in os.read(woken, 4096)):
            break
        if owner_pipe in ready:
            break
        _reap(but=child.pid)
    code = child.poll()
    _end_all(child, patience if code is None else 0.0)
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _end_all(child: subprocess.Popen[bytes], patience: float) -> None:
    """Twice: SIGTERM, then SIGKILL. Processes created in the meantime are found by the next scan."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, UNKILLABLE_S)):
        until, signalled = time.monotonic() + seconds, set[int]()
        while below := descendants(os.getpid()):
            for pid in below if number == signal.SIGKILL else below - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled |= below
            child.poll()
            _reap(but=child.pid)
            if time.monotonic() >= until:
                break
            time.sleep(GLANCE_S)
    with suppress(subprocess.TimeoutExpired):
        child.wait(0)


def _reap(but: int) -> None:
    """Orphans that were adopted. The program itself is left to the caller that waits for it."""
    for pid in descendants(os.getpid(), ended=True) - {but}:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def descendants(root: int, *, ended: bool = False) -> set[int]:
    """All processes below that one, without it. Zombies only if requested."""
    parents: dict[int, int] = {}
    gone: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - this is called often
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        parents[int(name)] = int(parent)
        if state in "ZX":
            gone.add(int(name))
    found, edge = set[int](), {root}
    while edge:
        edge = {pid for pid, parent in parents.items() if parent in edge}
        found |= edge
    return found & gone if ended else found - gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
