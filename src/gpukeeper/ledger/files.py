"""Files: where ours are; whether others could change what we trust; secrets, which come from files that only we can
read.

As ssh does with its files: each must belong to root or to us and be writable by no other user, and so must every
directory and link on the way to it. A directory that every user may write to is safe if it is sticky, as /tmp is.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.model.errors import LedgerError, UsageError

LEDGER_FILE = "ledger.db"
RESTORING_FILE = "restore-not-finished"  # beside it, from the first file that a restore moves to the last
ROOT_SOCKET = Path("/run/gpukeeper/socket")  # of root's daemon
ROOT_STATE = Path("/var/lib/gpukeeper")
LONGEST_SOCKET_PATH = 107  # bytes; the kernel has no room for more


def state_folder(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """`$GPUKEEPER_STATE`; else the XDG state directory. For root it is /var/lib/gpukeeper, unless root has set
    XDG_STATE_HOME and this machine has no such directory: what root's daemon has recorded is always found."""
    if configured := environ.get("GPUKEEPER_STATE"):
        return _expanded(Path(configured)).absolute()
    # According to the XDG specification a relative path there is ignored.
    xdg = environ.get("XDG_STATE_HOME", "")
    given = Path(xdg) if xdg.startswith("/") else None
    if (os.geteuid() if uid is None else uid) == 0 and (given is None or may_exist(ROOT_STATE)):
        return ROOT_STATE
    return (given or Path(environ.get("HOME") or _expanded(Path("~"))) / ".local" / "state") / "gpukeeper"


def service_state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Of a service that root sets up: it has root's environment only in part."""
    return state_folder({name: value for name, value in environ.items() if name == "GPUKEEPER_STATE"}, 0)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"uid {os.getuid()} has no home directory (HOME is not set, and the user database has no entry). "
            "Nothing was done. Set a directory for the ledger: GPUKEEPER_STATE=/path"
        ) from error


def ledger_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    return state_folder(environ, uid) / LEDGER_FILE


def archive_folder(ledger: Path) -> Path:
    return ledger.parent / "archive"


def evidence_folder(ledger: Path) -> Path:
    return ledger.parent / "evidence"


def reports_folder(ledger: Path) -> Path:
    """Of acceptance runs."""
    return ledger.parent / "reports"


def usage_path(ledger: Path) -> Path:
    """How GPUs were used, hour by hour."""
    return ledger.parent / "usage.db"


def socket_path() -> Path:
    """Where the daemon listens: `$GPUKEEPER_SOCKET`; /run/gpukeeper for root's, which every user may query; else below
    the state directory."""
    if configured := os.environ.get("GPUKEEPER_SOCKET"):
        return Path(configured)
    if not os.environ.get("GPUKEEPER_STATE") and (may_exist(ROOT_SOCKET) or os.geteuid() == 0):
        return ROOT_SOCKET
    return state_folder() / "socket"


def may_exist(path: Path) -> bool:
    """Also if its directory is closed to us: using it reports that."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


LINKS = 40  # as many as the kernel follows
_OTHERS, _GROUP = 0o002, 0o020


def why_untrusted(path: Path, *, holds_entry: bool = False) -> str | None:
    """Why another user could change it, and the command that fixes that. None: it is trusted, or does not exist.

    `holds_entry`: it is a directory in which we create an entry of our own; a sticky one suffices."""
    at, left, links = Path("/"), _path_steps(path.absolute()), 0
    try:
        while left:
            step = left.pop()
            if step == "..":
                at = at.parent
                continue
            here = at / step
            found = here.lstat()
            why = _trust_problem(here, found, sticky_will_do=bool(left) or holds_entry)
            if why is not None:
                return why
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS:
                    return None  # it cannot be opened either
                target = here.readlink()
                at = Path("/") if target.is_absolute() else at
                left += _path_steps(target)
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
    check_trusted(directory)
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


def check_trusted(directory: Path) -> None:
    """Of state that is there. Raises LedgerError."""
    why = why_untrusted(directory)
    if why is not None:
        raise LedgerError(f"The state in {directory} is not trusted: {why}. Nothing was done.")


def _path_steps(path: Path) -> list[str]:
    """The next one last."""
    return [step for step in reversed(path.parts) if step != "/"]


def _trust_problem(here: Path, found: os.stat_result, *, sticky_will_do: bool) -> str | None:
    quoted = shlex.quote(str(here))
    if found.st_uid not in {0, os.geteuid()}:
        link = "-h " if stat.S_ISLNK(found.st_mode) else ""
        return f"{here} belongs to {name_or_uid(found.st_uid)}. Fix: chown {link}{name_or_uid(os.geteuid())} {quoted}"
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
    me = name_or_uid(os.geteuid())
    return group.gr_name == me and set(group.gr_mem) <= {me}


def _is_read_only(here: Path) -> bool:
    """On a read-only mount, such as the policy of a pod, the mode does not matter."""
    return bool(os.statvfs(here).f_flag & os.ST_RDONLY)


def name_or_uid(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


LONGEST_SECRET = 4096  # bytes


def read_secret(path: Path) -> str:
    """The first line of a file that only we can read and no other user can change."""
    try:
        secret = read_secret_file(path, LONGEST_SECRET).partition(b"\n")[0].strip().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The secret in {path} could not be read: it is not UTF-8 text.") from error
    if not secret:
        raise UsageError(f"The file {path} contains no secret: its first line is empty.")
    return secret


def read_secret_file(path: Path, longest: int) -> bytes:
    """The first bytes of a file that only we can read and no other user can change."""
    why = why_untrusted(path)
    try:
        if why is None and path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
            why = f"{path} can be read by others (mode {path.stat().st_mode & 0o777:04o}). Fix: chmod 600 {path}"
        if why is not None:
            raise UsageError(f"The secret in {path} is not used: {why}.")
        with path.open("rb") as file:
            return file.read(longest)
    except OSError as error:
        raise UsageError(f"The secret in {path} could not be read: {error.strerror}.") from error
