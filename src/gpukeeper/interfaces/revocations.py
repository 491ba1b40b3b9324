"""How many times logins were revoked: a number in memory that the daemon shares with its web process.

The web process remembers for a few seconds whose login it is. It reads this number each time, which takes no message:
what it remembered before a login was revoked does not count any more.
"""

from __future__ import annotations

import mmap
import os

_SIZE = 8


class Revocations:
    """`descriptor`: of the shared memory, for a child. Written by one process only."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._number = memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")

    @property
    def count(self) -> int:
        return int(self._number[0])

    def increase(self) -> None:
        self._number[0] += 1

    def close(self) -> None:
        """The memory stays as long as it is used."""
        os.close(self.descriptor)


def new_revocations() -> Revocations:
    descriptor = os.memfd_create("gpukeeper-revocations")
    os.ftruncate(descriptor, _SIZE)
    return Revocations(descriptor)
