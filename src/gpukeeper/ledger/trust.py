"""Whether others could change what gpukeeper trusts: its policy, its state, the directory of its socket. Reads only.

As ssh does with its files: each must belong to root or to us and be writable by no other user, and so must every
directory and link on the way to it. A directory that every user may write to is safe if it is sticky, as /tmp is.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from gpukeeper.model.errors import LedgerError

LINKS = 40  # as many as the kernel follows
_OTHERS, _GROUP = 0o002, 0o020


def why_untrusted(path: Path, *, holds_entry: bool = False) -> str | None:
    """Why another user could change it, and the command that fixes that. None: it is trusted, or does not exist.

    `holds_entry`: it is a directory in which we create an entry of our own; a sticky one suffices."""
    at, left, links = Path("/"), _steps(path.absolute()), 0
    try:
        while left:
            step = left.pop()
            if step == "..":
                at = at.parent
                continue
            here = at / step
            found = here.lstat()
            why = _problem(here, found, sticky_will_do=bool(left) or holds_entry)
            if why is not None:
                return why
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS:
                    return None  # it cannot be opened either
                target = here.readlink()
                at = Path("/") if target.is_absolute() else at
                left += _steps(target)
            else:
                at = here
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # opening it will report that
    return None


def make_private(directory: Path) -> None:
    """Creates a private directory, or checks that it is one. Raises LedgerError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise LedgerError(
            f"The directory {directory} for the ledger cannot be created: {error.strerror or error}. Nothing was "
            "changed. Create it yourself, or use another directory with GPUKEEPER_STATE."
        ) from error
    check(directory)
    if not found.st_mode & 0o077 or found.st_uid != os.geteuid():
        return  # of a volume that root prepared for us we cannot change the mode
    if not found.st_mode & 0o007 and _is_our_group(found.st_gid):
        directory.chmod(0o700)  # as earlier versions made it
        return
    raise LedgerError(
        f"The directory {directory} is open to others (mode {found.st_mode & 0o777:04o}): "
        "they could read what is in it and lock it forever. Nothing was done. "
        f"Fix: chmod 700 {shlex.quote(str(directory))}"
    )


def check(directory: Path) -> None:
    """Of state that is there. Raises LedgerError."""
    why = why_untrusted(directory)
    if why is not None:
        raise LedgerError(f"The state in {directory} is not trusted: {why}. Nothing was done.")


def _steps(path: Path) -> list[str]:
    """The next one last."""
    return [step for step in reversed(path.parts) if step != "/"]


def _problem(here: Path, found: os.stat_result, *, sticky_will_do: bool) -> str | None:
    quoted = shlex.quote(str(here))
    if found.st_uid not in {0, os.geteuid()}:
        link = "-h " if stat.S_ISLNK(found.st_mode) else ""
        return f"{here} belongs to {_name(found.st_uid)}. Fix: chown {link}{_name(os.geteuid())} {quoted}"
    if stat.S_ISLNK(found.st_mode):
        return None
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX and sticky_will_do
    by_group = found.st_mode & _GROUP and not _is_our_group(found.st_gid)
    if not (found.st_mode & _OTHERS or by_group) or sticky or _is_read_only(here):
        return None
    return f"{here} may be written to by others (mode {found.st_mode & 0o7777:04o}). Fix: chmod go-w {quoted}"


def _is_our_group(gid: int) -> bool:
    """A private group: our user is its only member."""
    if gid != os.getegid():
        return False
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return True
    me = _name(os.geteuid())
    return group.gr_name == me and set(group.gr_mem) <= {me}


def _is_read_only(here: Path) -> bool:
    """On a read-only mount, such as the policy of a pod, the mode does not matter."""
    return bool(os.statvfs(here).f_flag & os.ST_RDONLY)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
