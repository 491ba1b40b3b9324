"""How many times logins were revoked: a number in memory that the daemon shares with its web process.

The web process remembers for a few seconds whose login it is. It reads this number each time, which takes no message:
what it remembered before a login was revoked does not count any more. It can neither change the number nor the size of
the memory: a mapping that became shorter than it was would end the daemon by a signal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

_SIZE = 8
_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1; the fcntl module does not have it


class Revocations:
    """`descriptor`: of the shared memory, to read, for a child."""

    def __init__(self, descriptor: int, memory: mmap.mmap | None = None) -> None:
        self.descriptor = descriptor
        memory = memory or mmap.mmap(descriptor, _SIZE, access=mmap.ACCESS_READ)
        self._number = memoryview(memory).cast("Q")

    @property
    def count(self) -> int:
        return int(self._number[0])

    def increase(self) -> None:
        self._number[0] += 1

    def close(self) -> None:
        """The memory stays as long as it is used."""
        os.close(self.descriptor)


def new_revocations() -> Revocations:
    """The only one that can be increased."""
    writing = os.memfd_create("gpukeeper-revocations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(writing, _SIZE)
        memory = mmap.mmap(writing, _SIZE)
        os.fchmod(writing, 0o400)  # or its reader could open it again, to write
        with suppress(OSError):  # an older kernel
            fcntl.fcntl(writing, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(writing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Revocations(os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC), memory)
    finally:
        os.close(writing)
