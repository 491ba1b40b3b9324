"""The owner of a container, and what this machine knows about users and directories. Every hint is kept as evidence,
each with its trust; conflicts are reported. A label is a claim: any user who may start containers can set it, and
so can the author of an image. It counts if other evidence confirms it, or if the policy states that only a wrapper
can set it and it did not come with the image. A directory of this machine that belongs to a user is better
evidence.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TypeVar

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.clients.docker import Inspected
from gpukeeper.devices.holders import FIRST_PERSON_UID
from gpukeeper.model.ports import Clock
from gpukeeper.model.unknown import Unknown

OWNER_LABELS = ("ds01.user", "aime.mlc.USER", "aime.mlc")
FOLDER_LABELS = (
    "devcontainer.local_folder",
    "devcontainer.config_file",
    "vsch.local.folder",
    "com.docker.compose.project.working_dir",
    "com.docker.compose.project.config_files",
)
NAMED = re.compile(r".+\._\.([0-9]+)")
_UID = re.compile(r"[0-9]{1,10}")
MOST_FOLDERS = 64  # users may list any number; each may require a read of a slow disk
SHOWN = 80  # characters of a user's text in a message of ours


class Trust(IntEnum):
    CLAIM = 0
    WEAK = 1
    GOOD = 2


class Hint(msgspec.Struct, frozen=True):
    who: str | None  # None: not a known user of this machine
    trust: Trust
    text: str


class KnownUsers(msgspec.Struct, frozen=True):
    """What this machine knows about its users and about the directories that a container mentions."""

    by_uid: Mapping[int, str]
    names: frozenset[str]
    folders: Mapping[str, int | Unknown | None]  # whose home it is in; None: in no home, or not on this machine
    processes: tuple[int, ...] = ()  # uids of its processes
    silent: Unknown | None = None  # a user it mentions could not be looked up


class Ownership(msgspec.Struct, frozen=True):
    owner: str | Unknown | None
    verified: bool
    evidence: tuple[str, ...]
    findings: tuple[str, ...]
    only_claimed: bool = False


def folders_of(container: Inspected) -> tuple[str, ...]:
    r"""Paths on this machine that may show the owner. Paths of other machines (c:\…) are skipped."""
    named = [container.labels[key] for key in FOLDER_LABELS if key in container.labels]
    named = [path for text in named for path in text.split(",")]
    named += [mount.source for mount in container.mounts or () if mount.type == "bind"]
    here = dict.fromkeys(path for path in named if path.startswith("/") and "\0" not in path)
    return tuple(here)[:MOST_FOLDERS]


def _is_mounted(path: str, container: Inspected, *, writable: bool) -> bool:
    """Whether the directory that a label names is really mounted."""
    binds = [mount for mount in container.mounts or () if mount.type == "bind" and (mount.writable or not writable)]
    return any(_overlap(path, mount.source) for mount in binds)


def _overlap(path: str, source: str) -> bool:
    """Whether one contains the other."""
    return PurePosixPath(path).is_relative_to(source) or PurePosixPath(source).is_relative_to(path)


def candidates(container: Inspected, trusted_labels: Sequence[str] = ()) -> tuple[set[str], set[int]]:
    """Names and uids it mentions; whether this machine knows them has to be looked up."""
    values = {container.labels[key] for key in (*trusted_labels, *OWNER_LABELS) if key in container.labels}
    names = {value for value in values if _number(value) is None}
    named = NAMED.fullmatch(container.plain_name)
    numbers = [*values, named.group(1) if named else "", container.config.user.partition(":")[0]]
    return names, {uid for text in numbers if (uid := _number(text)) is not None}


def owned(
    container: Inspected,
    people: KnownUsers,
    trusted_labels: Sequence[str] = (),
    image_labels: Mapping[str, str] | Unknown = MappingProxyType({}),
) -> Ownership:
    """`image_labels`: labels inherited from the image, set by its author and not by the user who started it."""
    own = {} if isinstance(image_labels, Unknown) else dict(container.labels.items() - image_labels.items())
    hints = list(_hints(container, people, trusted_labels, own))
    evidence = tuple(hint.text for hint in hints)
    findings = [hint.text for hint in hints if hint.who is None]
    known = [hint for hint in hints if hint.who is not None]
    sure = _surest(known)
    # Whether a trusted label came with the image. A running container has an image; that of an ended one may be gone.
    trusts = not container.labels.keys().isdisjoint(trusted_labels)
    unsure = image_labels if isinstance(image_labels, Unknown) and trusts else None
    if unsure is not None and container.state.running and (sure is None or sure.trust is not Trust.GOOD):
        return Ownership(unsure, False, evidence, tuple(findings))
    if sure is not None:
        others = {hint.who for hint in known if hint.who != sure.who and hint.trust is not Trust.WEAK}
        if others:
            findings.append(f"its owner is ambiguous: {sure.text}, but {_texts(known, others)}")
        split = any(hint.who != sure.who and hint.trust is Trust.GOOD for hint in known)
        # Users can choose a uid, a name and a label, even together: enough to report the owner, not to be kept longer.
        return Ownership(sure.who, sure.trust is Trust.GOOD and not split, evidence, tuple(findings))
    silent = [one for one in (*people.folders.values(), people.silent) if isinstance(one, Unknown)]
    if silent:
        return Ownership(Unknown(silent[0].why), False, evidence, tuple(findings))
    claim = next(iter(known), None)
    if claim is None:
        return Ownership(None, False, evidence, tuple(findings))
    findings.append(f"its owner is only claimed: {claim.text}; no other evidence confirms it")
    return Ownership(claim.who, False, evidence, tuple(findings), only_claimed=unsure is None)


def _surest(known: Sequence[Hint]) -> Hint | None:
    """Good evidence with confirmation, then good evidence, a confirmed claim, a weak sign."""
    good = [hint for hint in known if hint.trust is Trust.GOOD]
    rest = {hint.who for hint in known if hint.trust is not Trust.GOOD}
    weak = {hint.who for hint in known if hint.trust is Trust.WEAK}
    orders = (
        (hint for hint in good if hint.who in rest),
        good,
        (hint for hint in known if hint.trust is Trust.CLAIM and hint.who in weak),
        (hint for hint in known if hint.trust is Trust.WEAK),
    )
    return next((hint for order in orders for hint in order), None)


def _texts(known: Iterable[Hint], others: Iterable[str | None]) -> str:
    wanted = set(others)
    return "; ".join(hint.text for hint in known if hint.who in wanted)


def _hints(
    container: Inspected, people: KnownUsers, trusted_labels: Sequence[str], own: Mapping[str, str]
) -> Iterable[Hint]:
    """`own`: labels that did not come with the image; the policy's trust applies only to those."""
    labels = container.labels
    for key in (*trusted_labels, *(one for one in OWNER_LABELS if one not in trusted_labels)):
        if key in labels:
            yield _label(key, labels[key], people, key in trusted_labels and key in own)
    for path in folders_of(container):
        uid = people.folders.get(path)
        if isinstance(uid, int) and uid in people.by_uid and uid >= FIRST_PERSON_UID:
            # Many containers may read a dataset from one home directory; its owner does not own their work.
            trust, how = Trust.WEAK, ", which only a label names"
            if _is_mounted(path, container, writable=True):
                trust, how = Trust.GOOD, ""
            elif _is_mounted(path, container, writable=False):
                how = ", mounted read-only"
            yield Hint(people.by_uid[uid], trust, f"{_shown(path)} belongs to {people.by_uid[uid]}{how}")
    named = NAMED.fullmatch(container.plain_name)
    if named and (number := _number(named.group(1))) is not None:
        yield _uid(number, people, "its name ends in the uid")
    user = _number(container.config.user.partition(":")[0])
    if user is not None and user >= FIRST_PERSON_UID:
        yield _uid(user, people, "it runs as uid")
    for uid in sorted(set(people.processes)):
        if uid >= FIRST_PERSON_UID and uid in people.by_uid:
            yield _uid(uid, people, "its processes run as uid")


def _label(key: str, value: str, people: KnownUsers, trusted: bool) -> Hint:
    uid = _number(value)
    who = people.by_uid.get(uid) if uid is not None else (value if value in people.names else None)
    if who is None:
        return Hint(None, Trust.CLAIM, f"label {key} names {value[:SHOWN]!r}, who is not a user of this machine")
    return Hint(who, Trust.GOOD if trusted else Trust.CLAIM, f"label {key} names {who}")


def _number(text: str) -> int | None:
    """A uid. Other text with digits is not one: users write it, and it may have any length."""
    return int(text) if _UID.fullmatch(text) else None


def _shown(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text[:SHOWN])


def _uid(uid: int, people: KnownUsers, words: str) -> Hint:
    who = people.by_uid.get(uid)
    if who is None:
        return Hint(None, Trust.WEAK, f"{words} {uid}, which is not a user of this machine")
    return Hint(who, Trust.WEAK, f"{words} {uid} ({who})")


T = TypeVar("T")
LOOKUP_DEADLINE = timedelta(seconds=5)
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
            names_of[uid] = await self._lookup(lambda u=uid: _user_name_of(u), f"uid {uid}")  # type: ignore[misc]
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
            return await in_thread(work, LOOKUP_DEADLINE)
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


def _user_name_of(uid: int) -> str | None:
    """A name that only this uid has: a second uid with the same name is another user."""
    try:
        name = pwd.getpwuid(uid).pw_name
        return name if pwd.getpwnam(name).pw_uid == uid else None
    except (KeyError, OverflowError):
        return None
