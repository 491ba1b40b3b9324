"""Room for the last words: a file that is given up when the disk is full, so that an outcome can still be written.

If it is missing, the disk was full; it is created again as soon as there is room.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 8 * 2**20
# Created again only well above its own size; else it would come and go with every line on a nearly full disk.
ROOM_BYTES = 4 * RESERVE_BYTES


class Reserve:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "reserve"

    def ensure(self) -> bool:
        """Whether it is there, after making it if there is room."""
        return self.is_there() or (self._has_room() and self._make())

    def is_there(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        return found.st_size >= RESERVE_BYTES

    def release(self) -> bool:
        """Give its room to the journal. False: it was not there to be given."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True

    def _has_room(self) -> bool:
        try:
            disk = os.statvfs(self.path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize >= ROOM_BYTES

    def _make(self) -> bool:
        made = self.path.with_name("reserve.new")
        try:
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _allocate(fd)
            finally:
                os.close(fd)
            made.rename(self.path)
        except OSError:  # full after all, over a quota, or another process was faster
            with suppress(OSError):
                made.unlink()
        return self.is_there()


def _allocate(fd: int) -> None:
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise
        # Filesystems without allocation: bytes that do not compress away.
        os.pwrite(fd, os.urandom(RESERVE_BYTES), 0)
