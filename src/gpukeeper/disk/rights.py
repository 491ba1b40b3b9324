"""Whether a person could remove a tree without our help. Looks only.

A request of an ordinary user is carried out by root, so root checks first what the kernel would have checked. It says
no where it is not sure: write access through a group or an access list is not counted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

_CLIMB = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL = "system.posix_acl_access"
_WRITE, _SEARCH = 0o3, 0o1  # as the last digit of a mode: to remove an entry one must write and search
DEEPEST = 4096  # folders above one another; a path of the kernel has no room for more
SHOWN = 3


def others_in(uids: Iterable[int], uid: int) -> str | None:
    """Why a tree with entries of these users is not that person's to remove. None: all of it is theirs."""
    foreign = sorted(set(uids) - {uid})
    if not foreign:
        return None
    named = ", ".join(map(str, foreign[:SHOWN])) + (f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else "")
    return f"not everything in it belongs to uid {uid}: entries of uid {named}. Ask an admin"


def why_not_removable(folder: int, entry_uid: int, uid: int) -> str | None:
    """Why that person may not remove an entry of the open folder that belongs to `entry_uid`. None: they may.

    They must own the entry, which is also what a sticky folder asks for, and may write to the folder and reach it.
    """
    if entry_uid != uid:
        return f"it belongs to uid {entry_uid}, and uid {uid} asked. Ask an admin"
    if not _may(folder, uid, _WRITE):
        return f"uid {uid} may not write to its folder, and so may not remove it. Ask an admin"
    return None if _may_reach(folder, uid) else f"uid {uid} may not enter a folder above it. Ask an admin"


def _may_reach(folder: int, uid: int) -> bool:
    """Search permission on every folder above, by descriptor up to the root."""
    at = os.dup(folder)
    try:
        for _ in range(DEEPEST):
            above = os.open("..", _CLIMB, dir_fd=at)
            here, there = os.fstat(at), os.fstat(above)
            os.close(at)
            at = above
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return True
            if not _may(at, uid, _SEARCH):
                return False
        return False
    finally:
        os.close(at)


def _may(folder: int, uid: int, wanted: int) -> bool:
    found = os.fstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == uid:
        return mode >> 6 & wanted == wanted
    # As one of the others. A member of its group gets the group's rights alone, so both must allow it.
    return mode & wanted == wanted and mode >> 3 & wanted == wanted and not _has_acl(folder)


def _has_acl(folder: int) -> bool:
    """An access list may take away from one person what all others have."""
    try:
        os.getxattr(f"/proc/self/fd/{folder}", _ACL)
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}
    return True
