"""A neighbour that swaps folders for links as fast as it can, where everybody may. Run as a program.

`python -m tests.real.disk.hostile HOW ROOT SWAPS`: prints a line when it begins, and ends after that many swaps.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count, cycle

EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(root: int, one: bytes, other: bytes) -> bool:
    return bool(_libc.renameat2(root, one, root, other, EXCHANGE) == 0)


def inside(root: int) -> Callable[[], bool]:
    """A folder in the tree and a link that leads out, at two depths in turn."""
    pairs = cycle([(b"tree/d0", b"tree/link"), (b"tree/d1/sub", b"tree/d1/link")])
    return lambda: exchange(root, *next(pairs))


def itself(root: int) -> Callable[[], bool]:
    """The tree and a link that leads out, the tree and another tree."""
    pairs = cycle([(b"tree", b"evil"), (b"tree", b"other")])
    return lambda: exchange(root, *next(pairs))


def trash(root: int) -> Callable[[], bool]:
    """The trash folder, for a link that leads out, or for a folder of the neighbour's."""
    others = cycle([b"evil", b"other"])

    def swap() -> bool:
        with os.scandir(root) as listing:
            found = [os.fsencode(entry.name) for entry in listing if entry.name.startswith(".gpukeeper-trash-")]
        return any(exchange(root, name, next(others)) for name in found)

    return swap


def takeover(root: int) -> Callable[[], bool]:
    """Takes the name of the tree while it is elsewhere: what is there without being the tree is moved away first."""
    number = count()

    def swap() -> bool:
        try:
            found = os.stat("tree", dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            with suppress(OSError):
                os.mkdir("tree", 0o777, dir_fd=root)
                return True
            return False
        if found.st_size or stat.S_ISDIR(found.st_mode):
            return False
        with suppress(OSError):
            os.rename("tree", f"gone-{next(number)}", src_dir_fd=root, dst_dir_fd=root)
            os.mkdir("tree", 0o777, dir_fd=root)
            return True
        return False

    return swap


def main(how: str, folder: str, swaps: str) -> None:
    root, done = os.open(folder, os.O_RDONLY), 0
    swap = {"inside": inside, "itself": itself, "trash": trash, "takeover": takeover}[how](root)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    print(flush=True)
    while done < int(swaps):
        done += swap()


if __name__ == "__main__":
    main(*sys.argv[1:])
