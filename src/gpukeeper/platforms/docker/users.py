"""What this machine knows about users and directories. Reads only; a hanging filesystem or directory service is not
waited for.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from gpukeeper.blocking import in_thread
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.owners import KnownUsers, candidates, folders_of
from gpukeeper.platforms.docker.wire import Inspected

T = TypeVar("T")
DEADLINE = timedelta(seconds=5)
REMEMBERED = timedelta(minutes=10)
NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})  # the path does not exist
MOST_SILENT = 3  # lookups without a response; the next ones are skipped for a while: each costs time and a thread


class UserDirectory:
    """Users and directories, cached for a while: both change rarely, and a lookup may be slow."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: datetime | None = None
        self._homes: dict[str, int | Unknown | None] = {}
        self._uids: dict[str, int | Unknown | None] = {}
        self._names: dict[int, str | Unknown | None] = {}
        self._silent: dict[str, int] = {}  # by lookup: how often there was no response

    async def people(
        self, container: Inspected, processes: tuple[int, ...], trusted_labels: Sequence[str], *, directories: bool
    ) -> KnownUsers:
        """About those that a container mentions."""
        self._expire()
        # The caches of this moment: while we wait, another read may expire them.
        homes, uids_of, names_of = self._homes, self._uids, self._names
        paths = folders_of(container) if directories else ()
        for path in paths:
            if path not in homes:
                # By the tree it is in: if one directory of a hanging disk does not answer, the others will not.
                tree = "/".join(path.split("/")[:3])
                homes[path] = await self._lookup(lambda p=path: _home_owner(p), path[:80], tree)  # type: ignore[misc]
        names, uids = candidates(container, trusted_labels)
        uids |= {owner for path in paths if isinstance(owner := homes[path], int)} | set(processes)
        for name in names - uids_of.keys():
            uids_of[name] = await self._lookup(lambda n=name: _uid_of(n), f"{name[:40]!r}")  # type: ignore[misc]
        for uid in uids - names_of.keys():
            names_of[uid] = await self._lookup(lambda u=uid: _name_of(u), f"uid {uid}")  # type: ignore[misc]
        answers = [*(uids_of[name] for name in names), *(names_of[uid] for uid in uids)]
        return KnownUsers(
            by_uid={uid: known for uid in uids if isinstance(known := names_of[uid], str)},
            names=frozenset(name for name in names if isinstance(uids_of[name], int)),
            # Not the same as an unknown user: a directory service that is down must not make every user unknown.
            silent=next((one for one in answers if isinstance(one, Unknown)), None),
            folders={path: homes[path] for path in paths},
            processes=processes,
        )

    async def _lookup(self, work: Callable[[], T], what: str, of: str = "users") -> T | Unknown:
        if self._silent.get(of, 0) >= (MOST_SILENT if of == "users" else 1):
            return Unknown(f"{what} was not looked up: earlier lookups there timed out")
        try:
            return await in_thread(work, DEADLINE)
        except TimeoutError:
            self._silent[of] = self._silent.get(of, 0) + 1
            return Unknown(f"{what} could not be looked up: timeout")
        except OSError as error:
            return Unknown(f"{what} could not be read: {error.strerror}")

    def _expire(self) -> None:
        now = self._clock.now()
        if self._since is None or not timedelta() <= now - self._since < REMEMBERED:
            self._since = now
            self._homes, self._uids, self._names, self._silent = {}, {}, {}, {}


def _home_owner(path: str) -> int | None:
    """The uid that owns it, if it is really in that user's home. Links are resolved first, so that a link that leads
    out of a home proves nothing.
    """
    real = Path(os.path.realpath(path))
    try:
        uid = real.stat().st_uid
    except OSError as error:
        if error.errno in NO_FOLDER:
            return None
        raise
    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        return None
    return uid if home and home != "/" and real.is_relative_to(os.path.realpath(home)) else None


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def _name_of(uid: int) -> str | None:
    """A name that only this uid has: a second uid with the same name is another user."""
    try:
        name = pwd.getpwuid(uid).pw_name
        return name if pwd.getpwnam(name).pw_uid == uid else None
    except (KeyError, OverflowError):
        return None
