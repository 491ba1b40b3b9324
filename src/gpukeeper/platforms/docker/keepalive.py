"""The keep-alive file of a container, read from outside: nothing is ever run in the container.

Only its existence counts, and that it was created for this container: by its ctime, which users cannot set. How long
the file holds the container is decided by its lease, on our own clock.
"""

from __future__ import annotations

import os
import stat
from datetime import datetime
from pathlib import PurePosixPath

FILE = "/workspace/.keep-alive"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_there(root: str, path: str, not_before: datetime) -> bool:
    """`root`: /proc/PID/root, or a directory of this machine that is mounted there. No link below it is followed.
    OSError if it could not be read.
    """
    *directories, name = PurePosixPath(path).relative_to("/").parts
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            try:
                below = os.open(directory, _FOLDER, dir_fd=here)
            except (FileNotFoundError, NotADirectoryError):
                return False  # a link does not count either
            os.close(here)
            here = below
        try:
            facts = os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
    finally:
        os.close(here)
    # As numbers: a user's own filesystem may return a time that no calendar has.
    return stat.S_ISREG(facts.st_mode) and facts.st_ctime >= not_before.timestamp()
