"""The directories that the policy names, with the facts that all entries of one have in common. Reads only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk import measure, mounts, unresponsive
from gpukeeper.disk.unresponsive import Responsiveness
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import DiskMarks
from gpukeeper.model.subject import Disk
from gpukeeper.platforms.host import disks, errors, roots
from gpukeeper.platforms.host.roots import TreeEntry, TreeRoot


class TreeScope(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy names, and what must not be removed with any of it."""

    roots: tuple[TreeRoot, ...] = ()
    silent: tuple[str, ...] = ()  # roots of the policy whose filesystem does not answer; they are skipped for now
    folders: tuple[str, ...] = ()  # of gpukeeper itself
    marks: DiskMarks = DiskMarks()
    keep_last: int = 0  # reports of each root
    archive: bool = True  # reports are saved before they are removed

    def untouched(self) -> tuple[str, ...]:
        """Links resolved. A root may be inside an entry of another root, and so may our own ledger."""
        paths = (*(root.path for root in self.roots), *self.silent, *self.folders)
        known = mounts.own_mounts()
        return tuple(unresponsive.real_path(path, known) for path in paths)


class RootDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """One directory with its entries."""

    path: str  # links resolved
    entries: tuple[TreeEntry, ...]
    roots: tuple[TreeRoot, ...]
    disk: Disk | None  # None: unknown
    kept: dict[str, str]  # by name: why it is kept
    marks: DiskMarks

    @property
    def above(self) -> int:
        return min((root.above for root in self.roots), default=0)

    @property
    def may_be_too_full(self) -> bool:
        """Whether the shorter ages may apply."""
        return self.disk is None or self.disk.full >= self.marks.low

    @property
    def least_age(self) -> timedelta | None:
        """The age at which any of its entries could be due. None: never."""
        ages = [root.older_than for root in self.roots]
        ages += [root.under_pressure for root in self.roots] if self.may_be_too_full else []
        return min((age for age in ages if age is not None), default=None)


def spellings(named: TreeScope, directory: str) -> tuple[str, ...]:
    """The paths by which users may write that directory."""
    return (directory, *(os.path.normpath(root.path) for root in named.roots if root.is_at(directory)))


async def answering(named: TreeScope, ask: Responsiveness, deadline: timedelta) -> tuple[TreeScope, tuple[Unseen, ...]]:
    """Without the roots whose filesystem does not answer."""
    whys: dict[str, str] = {}

    def work() -> None:
        known = mounts.own_mounts()
        for root in named.roots:
            why = ask.why_not(root.path, known)
            if why is not None:
                whys[root.path] = why

    try:
        await in_thread(work, deadline)
    except (OSError, TimeoutError):
        return named, ()  # each of them reports it
    answer = tuple(root for root in named.roots if root.path not in whys)
    unseen = tuple(Unseen(path, why) for path, why in whys.items())
    return msgspec.structs.replace(named, roots=answer, silent=tuple(whys)), unseen


async def list_all(named: TreeScope, deadline: timedelta) -> tuple[dict[str, list[TreeEntry]], tuple[Unseen, ...]]:
    """By directory. An entry that two roots or patterns name is listed once."""
    directories: dict[str, dict[str, TreeEntry]] = {}
    unseen = []
    for root in named.roots:
        entries = await list_one(root, deadline)
        if isinstance(entries, Unseen):
            unseen.append(entries)
            continue
        for entry in entries:
            directories.setdefault(entry.folder, {}).setdefault(entry.real_path, entry)
    return {directory: list(entries.values()) for directory, entries in directories.items()}, tuple(unseen)


async def list_one(root: TreeRoot, deadline: timedelta) -> tuple[TreeEntry, ...] | Unseen:
    try:
        return await in_thread(lambda: roots.entries_of(root), deadline)
    except TimeoutError:
        return errors.too_slow(root.path, deadline)
    except FileNotFoundError:
        return ()  # a root that does not exist has no trees
    except OSError as error:
        return errors.unreadable(root.path, error)


async def learn(
    named: TreeScope, path: str, entries: Sequence[TreeEntry], deadline: timedelta
) -> RootDirectory | Unseen:
    try:
        return await in_thread(lambda: _learn(named, path, entries), deadline)
    except TimeoutError:
        return errors.too_slow(measure.printable(path), deadline)
    except OSError as error:
        return errors.unreadable(measure.printable(path), error)


def _learn(named: TreeScope, path: str, entries: Sequence[TreeEntry]) -> RootDirectory:
    here = tuple(root for root in named.roots if root.is_at(path))
    untouched, links = named.untouched(), roots.links_in(path)
    whys = {entry.name: roots.why_kept(entry, here, untouched, links) for entry in entries if entry.taken is None}
    kept = {name: why for name, why in whys.items() if why is not None}
    disk = disks.disk_of(path)
    return RootDirectory(path=path, entries=tuple(entries), roots=here, disk=disk, kept=kept, marks=named.marks)
