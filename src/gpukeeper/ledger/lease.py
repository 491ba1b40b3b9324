"""One pass at a time on one place, across processes. The kernel lets go when the holder dies, however it dies."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

from gpukeeper.model.errors import LeaseHeld

NAME_BYTES = 200
DAEMON = "daemon"  # the lease of `serve` itself, held as long as it runs


class Lease:
    """A lock that is held until `release`. The file stays: deleting a lock file lets two hold it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take_lease(directory: Path, platform: str, place: str) -> Lease:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _take(directory / lease_name(platform, place), platform, place)


@contextmanager
def no_pass(directory: Path) -> Iterator[None]:
    """No daemon and no pass runs meanwhile: the lease of every place that ever had one is held. Raises LeaseHeld."""
    with ExitStack() as held:
        held.callback(take_lease(directory, DAEMON, "serve").release)
        own = lease_name(DAEMON, "serve")
        for path in sorted(directory.glob("*.lock")):
            if path.name != own:
                platform, _, place = (unquote(part) for part in path.name.removesuffix(".lock").partition("~"))
                held.callback(_take(path, platform, place).release)
        yield


def _take(path: Path, platform: str, place: str) -> Lease:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(fd)
    except BlockingIOError as error:
        holder = _holder(fd)
        os.close(fd)
        if platform == DAEMON:
            raise LeaseHeld(f"gpukeeper serve is already running: {holder}. Nothing was touched.") from error
        raise LeaseHeld(
            f"Another pass is running on {platform}/{place}: {holder}. Nothing was touched there. "
            "Wait until it is done, or end that program."
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return Lease(fd)


def lease_name(platform: str, place: str) -> str:
    """A file name for any two names: slashes, dots and ~ of theirs are escaped, so that two places never share one."""
    name = "~".join(quote(part, safe="", errors="surrogatepass").replace("~", "%7E") for part in (platform, place))
    if len(name) > NAME_BYTES:
        name = name[:NAME_BYTES] + "~" + hashlib.sha256(name.encode()).hexdigest()[:16]
    return name + ".lock"


def _sign(fd: int) -> None:
    """The holder, for messages to others. Only text: the lock itself is the kernel's."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} ({command})".encode("utf-8", "backslashreplace"), 0)


def _holder(fd: int) -> str:
    words = os.pread(fd, 400, 0).decode("utf-8", "replace")
    since = datetime.fromtimestamp(os.fstat(fd).st_mtime, UTC)
    shown = "".join(ch if ch.isprintable() else "?" for ch in words)
    return f"{shown} since {since:%Y-%m-%d %H:%M:%S} UTC" if shown else "an unknown program"
