"""Whether a user could remove a tree without our help. Reads only.

A request of an ordinary user is carried out by root, so root checks first what the kernel would have checked. In doubt
it refuses: write access through a group or an ACL is not counted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

_CLIMB = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL = "system.posix_acl_access"
_WRITE, _SEARCH = 0o3, 0o1  # as the last digit of a mode: removing an entry requires write and search permission
DEEPEST = 4096  # nested directories; a path of the kernel cannot have more
SHOWN = 3


def others_in(uids: Iterable[int], uid: int) -> str | None:
    """Why a tree with entries of these users may not be removed by that user. None: all of it is theirs."""
    foreign = sorted(set(uids) - {uid})
    if not foreign:
        return None
    named = ", ".join(map(str, foreign[:SHOWN])) + (f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else "")
    return f"not everything in it belongs to uid {uid}: entries of uid {named}. Ask an admin"


def why_not_removable(directory: int, entry_uid: int, uid: int) -> str | None:
    """Why that user may not remove an entry of the open directory that belongs to `entry_uid`. None: they may. They
    must own the entry, which a sticky directory requires as well, and must be able to write to the directory and reach
    it.
    """
    if entry_uid != uid:
        return f"it belongs to uid {entry_uid}, and the request is from uid {uid}. Ask an admin"
    if not _may(directory, uid, _WRITE):
        return f"uid {uid} may not write to its directory, and so may not remove it. Ask an admin"
    return None if _may_reach(directory, uid) else f"uid {uid} may not enter a directory above it. Ask an admin"


def _may_reach(directory: int, uid: int) -> bool:
    """Search permission on every parent directory, by descriptor up to the root."""
    at = os.dup(directory)
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


def _may(directory: int, uid: int, wanted: int) -> bool:
    found = os.fstat(directory)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == uid:
        return mode >> 6 & wanted == wanted
    # As one of the others. A member of its group gets only the group's permissions, so both must allow it.
    return mode & wanted == wanted and mode >> 3 & wanted == wanted and not _has_acl(directory)


def _has_acl(directory: int) -> bool:
    """An ACL may deny one user what all others have."""
    try:
        os.getxattr(f"/proc/self/fd/{directory}", _ACL)
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}
    return True
