"""The temporary trees of this machine: entries below the roots that the policy names. Looks only, deletes nothing.

A root may itself be a link, since people link a short name to a big disk; below it none is followed.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from gpukeeper.disk import measure, mounts, open_files
from gpukeeper.disk.measure import Limits, Measured
from gpukeeper.engine.blocking import in_thread
from gpukeeper.model.decision import Unseen
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Temporary
from gpukeeper.model.subject import Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, translate
from gpukeeper.platforms.host.connect import A_MOMENT, PAGE, Page, Patience, user_name

NOT_SUMMED = Unknown("the other trees of its root were not measured yet")


class Entry(msgspec.Struct, frozen=True):
    """A name below a root of the policy. `folder`: the root with its own links resolved."""

    root: str
    folder: str
    name: str

    @property
    def path(self) -> str:
        """As the policy writes it."""
        return str(Path(os.path.normpath(self.root), self.name))

    @property
    def real_path(self) -> str:
        return str(Path(self.folder, self.name))


class Trees:
    def __init__(
        self,
        at: Callable[[], translate.At],
        temporary: Sequence[Temporary],
        proc: str,
        limits: Limits,
        patience: Patience,
    ) -> None:
        self._at, self._temporary, self._proc, self._limits, self._patience = at, temporary, proc, limits, patience
        self._together: dict[str, int] = {}  # by folder, of the last observe; a look measures one tree only

    async def observe(self) -> AsyncIterator[Page]:
        """Root by root: how much its trees hold together is known only when all of them were measured."""
        folders, unseen = await self._list()
        if unseen:
            yield (), unseen
        until = time.monotonic() + self._patience.trees.total_seconds()
        for folder, entries in folders.items():
            trees, missed = await self._measure_all(folder, entries, until)
            together = self._together[folder] = translate.all_together(trees)
            for start in range(0, len(trees), PAGE):
                page = trees[start : start + PAGE]
                yield tuple(msgspec.structs.replace(tree, together=together) for tree in page), ()
            if missed:
                yield (), missed

    async def look(self, ref: Ref) -> Subject | Gone | Unknown:
        wanted = translate.two_numbers(ref.uid, ":")
        if wanted is None:
            return Unknown(f"{ref.uid!r} names no tree")
        deadline = self._patience.tree
        try:
            entry = await in_thread(lambda: find(self._temporary, *wanted), deadline)
        except TimeoutError:
            return Unknown(errors.too_slow(ref.name, deadline).why)
        except OSError as error:
            return Unknown(f"its root {errors.unreadable(ref.name, error).why}")
        if entry is None:
            return Gone(ref, self._at().now)
        return entry if isinstance(entry, Unknown) else await self._look_inside(entry, ref)

    async def _look_inside(self, entry: Entry, ref: Ref) -> Subject | Unknown:
        until = time.monotonic() + self._patience.tree.total_seconds()
        found = await self._measure(entry, await self._in_use(entry.folder), until)
        if isinstance(found, Unseen):
            return Unknown(found.why)
        if found is None or found.ref.uid != ref.uid:
            return Unknown(f"it {measure.CHANGED}")  # the next look tells what became of it
        return msgspec.structs.replace(found, together=self._together.get(entry.folder, NOT_SUMMED))

    async def _list(self) -> tuple[dict[str, list[Entry]], tuple[Unseen, ...]]:
        """By folder. An entry that two roots or patterns name is listed once."""
        folders: dict[str, dict[str, Entry]] = {}
        unseen = []
        for temporary in self._temporary:
            entries = await self._entries(temporary)
            if isinstance(entries, Unseen):
                unseen.append(entries)
                continue
            for entry in entries:
                folders.setdefault(entry.folder, {}).setdefault(entry.name, entry)
        return {folder: list(entries.values()) for folder, entries in folders.items()}, tuple(unseen)

    async def _entries(self, temporary: Temporary) -> tuple[Entry, ...] | Unseen:
        deadline = self._patience.tree
        try:
            return await in_thread(lambda: entries_of(temporary), deadline)
        except TimeoutError:
            return errors.too_slow(temporary.root, deadline)
        except FileNotFoundError:
            return ()  # a root that is not there has no trees
        except OSError as error:
            return errors.unreadable(temporary.root, error)

    async def _in_use(self, folder: str) -> open_files.Below | Unknown:
        what, deadline = "the list of open files", self._patience.processes
        try:
            return await in_thread(lambda: open_files.below(folder, open_files.scan(self._proc)), deadline)
        except TimeoutError:
            return Unknown(f"{what} {errors.too_slow(what, deadline).why}")
        except OSError as error:
            return Unknown(f"{what} {errors.unreadable(what, error).why}")

    async def _measure_all(self, folder: str, entries: Sequence[Entry], until: float) -> Page:
        found: list[Subject | Unseen | None] = []
        for start in range(0, len(entries), PAGE):
            in_use = await self._in_use(folder)  # anew, since measuring takes its time
            found += [await self._measure(entry, in_use, until) for entry in entries[start : start + PAGE]]
        trees = tuple(one for one in found if isinstance(one, Subject))
        return trees, tuple(one for one in found if isinstance(one, Unseen))

    async def _measure(self, entry: Entry, in_use: open_files.Below | Unknown, until: float) -> Subject | Unseen | None:
        """None: it went away since it was listed."""
        deadline = self._patience.tree
        try:
            return await in_thread(lambda: self._walk(entry, in_use, until), deadline + A_MOMENT)
        except TimeoutError:
            return errors.too_slow(measure.printable(entry.path), deadline)
        except OSError as error:
            return errors.unreadable(measure.printable(entry.path), error)

    def _walk(self, entry: Entry, in_use: open_files.Below | Unknown, until: float) -> Subject | None:
        end = min(until, time.monotonic() + self._patience.tree.total_seconds())
        files = {} if isinstance(in_use, Unknown) else in_use.open_files.files
        with measure.open_directory(entry.folder) as folder:
            found = measure.measure(entry.name, folder, files, self._limits, lambda: time.monotonic() > end)
        return None if found is None else self._subject(entry, found, in_use)

    def _subject(self, entry: Entry, found: Measured, in_use: open_files.Below | Unknown) -> Subject:
        owner, user = user_name(found.uid), None
        used: bool | Unknown
        if isinstance(in_use, Unknown):
            used = in_use
        else:
            found = with_mounts(entry, found, in_use)
            user = open_files.user_of(entry.name, found, in_use)
            used = open_files.is_in_use(entry.name, found, in_use)
        return translate.tree_subject(entry.path, entry.root, found, used, user, owner, self._at())


def entries_of(temporary: Temporary) -> tuple[Entry, ...]:
    folder = os.path.realpath(temporary.root)
    with measure.open_directory(folder) as fd, os.scandir(fd) as listing:
        names = sorted(entry.name for entry in listing if translate.is_named(entry.name, temporary.names))
    return tuple(Entry(temporary.root, folder, name) for name in names)


def find(temporary: Sequence[Temporary], device: int, inode: int) -> Entry | Unknown | None:
    """By identity, whatever it is called now. None only when its filesystem was looked at and it is not there."""
    renamed: str | None = None
    disk_is_here = False
    for one in temporary:
        folder = os.path.realpath(one.root)
        if nearest_device(folder) != device:
            continue
        disk_is_here = True
        for name in names_of(folder, device, inode):
            entry = Entry(one.root, folder, name)
            if translate.is_named(name, one.names):
                return entry
            renamed = measure.printable(entry.path)
    if renamed is not None:
        return Unknown(f"it is called {renamed} now, which the policy does not name")
    return None if disk_is_here else Unknown("no root that the policy names is on its filesystem now")


def names_of(folder: str, device: int, inode: int) -> Iterator[str]:
    try:
        with measure.open_directory(folder) as fd, os.scandir(fd) as listing:
            for entry in listing:
                if entry.inode() == inode and is_still(entry, device, inode):
                    yield entry.name
    except FileNotFoundError:
        return


def is_still(entry: os.DirEntry[str], device: int, inode: int) -> bool:
    """A listing tells the inode below a mount point; only a stat tells what is there now."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (device, inode)


def nearest_device(folder: str) -> int:
    """A root that is gone was on the filesystem of the nearest folder above it that is still there."""
    path = Path(folder)
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def with_mounts(entry: Entry, found: Measured, in_use: open_files.Below) -> Measured:
    """A single file mounted inside escapes the walk; the list of mounts knows it."""
    if not mounts.has_mount_inside(entry.real_path, in_use.open_files.own_mounts):
        return found
    why = Unknown(measure.MOUNT_POINT)
    problems = (*found.problems, measure.MOUNT_POINT)
    return msgspec.structs.replace(found, size=why, newest=why, ctime_ns=why, problems=problems)
