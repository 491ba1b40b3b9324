"""A neighbour that has something of a tree in use all the time, and never in the same place. Run as a program.

`python -m tests.real.disk.holder HOW TREE`: opens TREE/d0/f0 (or TREE/d0), becomes an ordinary user, prints a line,
and goes on until its input ends.
"""

from __future__ import annotations

import array
import itertools
import os
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

LOW, HIGH = 40, 700


def _asked_to_end() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def moving(fd: int) -> None:
    """From one number to another: at any moment it has one of them."""
    os.dup2(fd, LOW)
    os.close(fd)
    for turn in itertools.count():
        os.dup2(LOW, HIGH)
        os.close(LOW)
        os.dup2(HIGH, LOW)
        os.close(HIGH)
        if turn % 4096 == 0 and _asked_to_end():
            return


def disguised(fd: int) -> None:
    """The same, between numbers that are always taken: nothing ever vanishes."""
    decoy = os.open("/", os.O_RDONLY)
    os.dup2(fd, LOW)
    os.dup2(decoy, HIGH)
    os.close(fd)
    for turn in itertools.count():
        os.dup2(LOW, HIGH)
        os.dup2(decoy, LOW)
        os.dup2(HIGH, LOW)
        os.dup2(decoy, HIGH)
        if turn % 4096 == 0 and _asked_to_end():
            return


def relayed(fd: int) -> None:
    """From parent to child, which outlives it. The input, too, so that somebody always hears of the end."""
    while not _asked_to_end():
        with suppress(BlockingIOError):  # nobody has reaped those before it yet
            if os.fork():
                os._exit(0)


def passed(fd: int) -> None:
    """Between two processes, through a socket: on its way it is in no process at all."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    mine = there if child == 0 else here
    (here if child == 0 else there).close()
    if child == 0:
        os.close(fd)
    else:
        socket.send_fds(mine, [b"x"], [fd])
        os.close(fd)
    for turn in itertools.count():
        words, ancillary, _, _ = mine.recvmsg(1, socket.CMSG_LEN(4))
        if not words:
            return
        (got,) = array.array("i", ancillary[0][2][:4])
        if child and turn % 512 == 0 and _asked_to_end():
            return
        socket.send_fds(mine, [b"x"], [got])
        os.close(got)


HOW: dict[str, Callable[[int], None]] = {"moving": moving, "disguised": disguised, "relayed": relayed, "passed": passed}


def main(how: str, tree: str) -> None:
    name, _, of = how.partition("-")
    fd = os.open(f"{tree}/d0" if of == "folder" else f"{tree}/d0/f0", os.O_RDONLY)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    print(flush=True)
    HOW[name](fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
