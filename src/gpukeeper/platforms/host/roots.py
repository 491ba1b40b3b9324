"""What the policy names on this machine: roots, the entries directly below them, and how full their filesystems are.
Reads only.

A root may be a link, since users link a short name to a big disk, but not another user's (see `connect`); below it
no link is followed. Whatever is removed was found here, by its identity, whatever its name is at that moment.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk import kernel, measure, mounts, trash
from gpukeeper.disk.measure import KEEP, printable
from gpukeeper.disk.mounts import Usage, real_path_of, silent_mount, usage
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.model.decision import too_slow
from gpukeeper.model.policy import Reports, Temporary
from gpukeeper.model.subject import Disk, Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.host import translate
from gpukeeper.platforms.host.connect import (
    ForeignLink,
    Page,
    Scan,
    Timeouts,
    opened,
    resolved_path,
    unreadable,
)

ANY = ("*",)


class TreeRoot(msgspec.Struct, frozen=True, kw_only=True):
    """A directory whose entries may be removed, by name."""

    path: str  # as the policy writes it
    kind: str
    names: tuple[str, ...]
    keep: tuple[str, ...]
    above: int  # bytes
    older_than: timedelta | None  # None: never
    under_pressure: timedelta | None

    @property
    def folder(self) -> str:
        """With its own links resolved, each time again: users point such links to another disk. Raises ForeignLink."""
        return resolved_path(self.path)

    def is_at(self, directory: str) -> bool:
        try:
            return self.folder == directory
        except ForeignLink:
            return False


class TreeEntry(msgspec.Struct, frozen=True):
    """A name below a root. `taken`: an interrupted removal left it in the trash."""

    root: str
    folder: str
    name: str
    kind: str = translate.TREE
    taken: TrashedTree | None = None

    @property
    def inside(self) -> str:
        """The directory that contains it."""
        return self.folder if self.taken is None else str(Path(self.folder, self.taken.trash))

    @property
    def path(self) -> str:
        """As the policy writes it."""
        below = (self.name,) if self.taken is None else (self.taken.trash, self.name)
        return str(Path(os.path.normpath(self.root), *below))

    @property
    def real_path(self) -> str:
        return str(Path(self.inside, self.name))


class Link(msgspec.Struct, frozen=True):
    """A link beside reports, such as latest or baseline, which shows that a report is still wanted."""

    name: str
    ends: tuple[str, ...]  # its first target and its last: a link to a link counts, too

    def leads_to(self, entry: TreeEntry) -> bool:
        return any(mounts.is_at_or_below(end, entry.real_path) for end in self.ends)


def roots_of(temporary: Iterable[Temporary], reports: Reports) -> tuple[TreeRoot, ...]:
    """Reports first: if both name a directory, its entries are reports."""
    return (*(_of_reports(path, reports) for path in reports.roots), *map(_of_trees, temporary))


def _of_reports(path: str, reports: Reports) -> TreeRoot:
    return TreeRoot(
        path=path,
        kind=translate.REPORT,
        names=ANY,
        keep=reports.keep,
        above=0,
        older_than=reports.older_than,
        under_pressure=None,
    )


def _of_trees(one: Temporary) -> TreeRoot:
    return TreeRoot(
        path=one.root,
        kind=translate.TREE,
        names=one.names,
        keep=one.keep,
        above=one.above,
        older_than=one.older_than,
        under_pressure=one.under_pressure,
    )


def entries_of(root: TreeRoot) -> tuple[TreeEntry, ...]:
    directory = root.folder
    with opened(directory) as fd:
        with os.scandir(fd) as listing:
            names = sorted(entry.name for entry in listing if _is_one(entry, root))
        left = trash.leftovers(fd)
    found = [TreeEntry(root.path, directory, name, root.kind) for name in names]
    return (*found, *(TreeEntry(root.path, directory, one.name, translate.TREE, one) for one in left))


def find(roots: Sequence[TreeRoot], device: int, inode: int) -> TreeEntry | Unknown | None:
    """By identity, whatever its name is now. None only if its filesystem was read and it is not there."""
    renamed: str | None = None
    disk_is_here = False
    foreign: ForeignLink | None = None
    for root in roots:
        try:
            directory = root.folder
        except ForeignLink as link:
            foreign = link
            continue
        if nearest_device(directory) != device:
            continue
        disk_is_here = True
        for name in names_of(directory, device, inode):
            entry = TreeEntry(root.path, directory, name, root.kind)
            if trash.is_named(name, root.names):
                return entry
            renamed = measure.printable(entry.path)
        if (left := _left_in_trash(root, directory, (device, inode))) is not None:
            return left
    if renamed is not None:
        return Unknown(f"its name is {renamed} now, which the policy does not match")
    if foreign is not None:
        return Unknown(f"{foreign.filename}, where it may be, {foreign.strerror}")
    return None if disk_is_here else Unknown("no root of the policy is on its filesystem now")


def names_of(directory: str, device: int, inode: int) -> Iterator[str]:
    try:
        with opened(directory) as fd, os.scandir(fd) as listing:
            for entry in listing:
                if entry.inode() == inode and is_still(fd, entry, device, inode):
                    yield entry.name
    except FileNotFoundError:
        return


def is_still(directory: int, entry: os.DirEntry[str], device: int, inode: int) -> bool:
    """A listing returns the inode below a mount point; only a stat returns what is there now."""
    try:
        found = kernel.stat_inside(directory, entry.name)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.EXDEV}:
            return False
        raise
    ours = trash.is_trash(entry.name) or trash.holds_a_name(found)  # created by removals in progress
    return (found.st_dev, found.st_ino) == (device, inode) and not ours


def nearest(directory: str) -> str:
    """The directory itself, or the part of its path that still exists."""
    path = Path(directory)
    while not path.exists():
        path = path.parent
    return str(path)


def nearest_device(directory: str) -> int:
    """A root that is gone was on the filesystem of the nearest parent directory that still exists."""
    return os.stat(nearest(directory)).st_dev  # noqa: PTH116 - a string all the way


def why_kept(
    entry: TreeEntry, roots: Sequence[TreeRoot], directories: Sequence[str], links: Sequence[Link]
) -> str | None:
    """Why it is kept however old it is; None: it may be removed. `directories`: what must not be removed with it, links
    resolved.
    """
    if entry.taken is not None:
        return None
    if any(translate.fits(entry.name, root.keep) for root in roots if root.is_at(entry.folder)):
        return "the policy keeps entries with its name"
    inside = next((directory for directory in directories if mounts.is_at_or_below(directory, entry.real_path)), None)
    if inside is not None:
        return f"it contains {measure.printable(inside)}, which gpukeeper needs or the policy names"
    if has_keep_file(entry):
        return f"it contains a file named {KEEP}"
    link = next((link for link in links if link.leads_to(entry)), None) if entry.kind == translate.REPORT else None
    return None if link is None else f"the link {measure.printable(link.name)} points to it"


def has_keep_file(entry: TreeEntry) -> bool:
    """If it cannot be opened this is unknown, and need not be known: it cannot be measured either, so it is kept."""
    with opened(entry.folder) as directory, suppress(OSError):
        tree = kernel.open_inside(directory, entry.name)
        try:
            os.stat(KEEP, dir_fd=tree, follow_symlinks=False)
        finally:
            os.close(tree)
        return True
    return False


def links_in(directory: str) -> tuple[Link, ...]:
    with opened(directory) as fd, os.scandir(fd) as listing:
        names = sorted(one.name for one in listing if one.is_symlink())
    return tuple(link for name in names if (link := _read_link(Path(directory, name))) is not None)


def _read_link(path: Path) -> Link | None:
    try:
        first = os.path.normpath(path.parent / path.readlink())
    except OSError:
        return None  # removed since it was listed
    return Link(path.name, (first, real_path_of(str(path), mounts.own_mounts())))


def _is_one(entry: os.DirEntry[str], root: TreeRoot) -> bool:
    """A link is no report; it shows which of them are wanted."""
    is_link = root.kind == translate.REPORT and entry.is_symlink()
    return not is_link and trash.is_named(entry.name, root.names)


def _left_in_trash(root: TreeRoot, directory: str, identity: tuple[int, int]) -> TreeEntry | None:
    with suppress(FileNotFoundError), opened(directory) as fd:
        for one in trash.leftovers(fd):
            if one.identity == identity:
                return TreeEntry(root.path, directory, one.name, translate.TREE, one)
    return None


def top_of(entry: TreeEntry) -> os.stat_result | None:
    """Of the entry itself. None: it is gone. What is mounted on it is not read if it may hang."""
    try:
        with opened(entry.inside) as directory:
            return kernel.stat_inside(directory, entry.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    mount = silent_mount(entry.real_path, mounts.own_mounts())
    if mount is not None:
        why = f"a filesystem of type {mount.kind} is mounted on it, which may hang, so it is not read"
        raise OSError(errno.EXDEV, why)
    return os.lstat(entry.real_path)


NOTABLE = 1_000_000_000  # bytes of deleted files that one process holds open
UNREADABLE = OpenFiles({}, {}, (), frozenset(), "the list of open files could not be read")


class Disks:
    def __init__(
        self,
        at: Callable[[], translate.PlaceAndTime],
        directories: Callable[[], Sequence[str]],
        scan: Scan,
        proc: str,
        timeouts: Timeouts,
    ) -> None:
        self._at, self._folders, self._scan, self._proc, self._timeouts = at, directories, scan, proc, timeouts

    async def observe(self) -> Page:
        deadline = self._timeouts.disk
        facts: dict[int, Usage] = {}
        unseen = []
        for directory in self._folders():  # one by one: a hanging network disk must not hide the others
            try:
                one = await in_thread(lambda: usage_of(directory), deadline)  # noqa: B023
                facts.setdefault(one.device, one)
            except TimeoutError:
                unseen.append(too_slow(f"the disk of {directory}", deadline))
            except OSError as error:
                unseen.append(unreadable(f"the disk of {directory}", error))
        used = await self._open_files() if facts else UNREADABLE
        return tuple(self._subject(one, used) for one in facts.values()), tuple(unseen)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found, unseen = await self.observe()
        for one in found:
            if one.ref.uid == ref.uid:
                return one
        return Unknown(f"{unseen[0].what} {unseen[0].why}") if unseen else Gone(ref, self._at().now)

    async def _open_files(self) -> OpenFiles:
        try:
            return await in_thread(self._scan, self._timeouts.processes)
        except (OSError, TimeoutError):
            return UNREADABLE

    def _subject(self, facts: Usage, used: OpenFiles) -> Subject:
        held: Counter[int] = Counter()
        for one in used.held:
            if one.identity[0] == facts.device:
                held[one.pid] += one.size
        total: int | Unknown = held.total()
        if not held and used.hidden:
            total = Unknown(used.hidden)
        return translate.disk_subject(facts, total, tuple(self._findings(held)), self._at())

    def _findings(self, held: Counter[int]) -> Iterable[str]:
        for pid, size in held.most_common():
            if size >= NOTABLE:
                who = f"pid {pid} ({printable(self._comm(pid))})"
                yield f"{size_in_words(size)} are used by deleted files that {who} still has open"

    def _comm(self, pid: int) -> str:
        with suppress(OSError):
            return Path(self._proc, str(pid), "comm").read_text("utf-8", "replace").rstrip("\n")
        return "ended"


def usage_of(directory: str) -> Usage:
    """Of the filesystem that contains the directory, or would contain it."""
    return usage(nearest(os.path.realpath(directory)))


def disk_of(directory: str) -> Disk | None:
    """None: unknown, so it never counts as too full."""
    try:
        return translate.disk(usage_of(directory))
    except OSError:
        return None
