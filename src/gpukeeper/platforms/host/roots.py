"""What the policy names on this machine: roots, the entries directly below them, what all entries of one directory have
in common, what need not be walked again; and how full the filesystems are. Reads only.

A root may be a link, since users link a short name to a big disk, but not another user's (see `connect`); below it
no link is followed. Whatever is removed was found here, by its identity, whatever its name is at that moment.

A tree is not walked again while it cannot be due: times only move forward, so one that was used recently stays young
for as long as the policy's age; and if all trees of a directory are far below the threshold, none of them is due.
Never a reason to act: the re-check before a step measures again.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.disk import kernel, mounts, trash, tree
from gpukeeper.disk.access_times import LastUse
from gpukeeper.disk.measure import KEEP, TreeMeasurement, instant, printable, tree_uid
from gpukeeper.disk.mounts import Responsiveness, Usage, real_path_of, silent_mount, usage
from gpukeeper.disk.open_files import DirectoryUse, OpenFiles
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.disk.tree import PlaceAndTime
from gpukeeper.disk.walk import Identity
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import DiskMarks, Reports, Temporary
from gpukeeper.model.subject import Disk, Gone, Ref, Subject
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.host import translate
from gpukeeper.platforms.host.connect import (
    ForeignLink,
    Page,
    Scan,
    Timeouts,
    in_time,
    opened,
    resolved_path,
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
    kind: str = tree.TREE
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
        kind=tree.TREE,
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
    return (*found, *(TreeEntry(root.path, directory, one.name, tree.TREE, one) for one in left))


def find(roots: Sequence[TreeRoot], identity: Identity) -> TreeEntry | Unknown | None:
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
        if nearest_device(directory) != identity[0]:
            continue
        disk_is_here = True
        with suppress(FileNotFoundError), opened(directory) as fd:
            for name in tree.names_of(fd, identity, kernel.stat_inside):
                entry = TreeEntry(root.path, directory, name, root.kind)
                if trash.is_named(name, root.names):
                    return entry
                renamed = printable(entry.path)
            if (taken := tree.taken_in(fd, identity)) is not None:
                return TreeEntry(root.path, directory, taken.name, tree.TREE, taken)
    if renamed is not None:
        return Unknown(f"its name is {renamed} now, which the policy does not match")
    if foreign is not None:
        return Unknown(f"{foreign.filename}, where it may be, {foreign.strerror}")
    return None if disk_is_here else Unknown("no root of the policy is on its filesystem now")


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
    if any(_fits(entry.name, root.keep) for root in roots if root.is_at(entry.folder)):
        return "the policy keeps entries with its name"
    inside = next((directory for directory in directories if mounts.is_at_or_below(directory, entry.real_path)), None)
    if inside is not None:
        return tree.contains(inside)
    if has_keep_file(entry):
        return f"it contains a file named {KEEP}"
    link = next((link for link in links if link.leads_to(entry)), None) if entry.kind == translate.REPORT else None
    return None if link is None else f"the link {printable(link.name)} points to it"


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def has_keep_file(entry: TreeEntry) -> bool:
    """If it cannot be opened this is unknown, and need not be known: it cannot be measured either, so it is kept."""
    with opened(entry.folder) as directory, suppress(OSError):
        fd = kernel.open_inside(directory, entry.name)
        try:
            os.stat(KEEP, dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)
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
        return tuple(real_path_of(path, known) for path in paths)


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
    def entries() -> tuple[TreeEntry, ...]:
        with suppress(FileNotFoundError):  # a root that does not exist has no trees
            return entries_of(root)
        return ()

    return await in_time(entries, root.path, deadline)


async def learn(
    named: TreeScope, path: str, entries: Sequence[TreeEntry], deadline: timedelta
) -> RootDirectory | Unseen:
    return await in_time(lambda: _learn(named, path, entries), printable(path), deadline)


def _learn(named: TreeScope, path: str, entries: Sequence[TreeEntry]) -> RootDirectory:
    here = tuple(root for root in named.roots if root.is_at(path))
    untouched, links = named.untouched(), links_in(path)
    whys = {entry.name: why_kept(entry, here, untouched, links) for entry in entries if entry.taken is None}
    kept = {name: why for name, why in whys.items() if why is not None}
    disk = disk_of(path)
    return RootDirectory(path=path, entries=tuple(entries), roots=here, disk=disk, kept=kept, marks=named.marks)


CACHE_LASTS = timedelta(minutes=30)
FAR_BELOW = 0.5  # of the threshold


class CachedMeasurement(msgspec.Struct, frozen=True):
    measured: TreeMeasurement
    at: datetime


class MeasurementCache:
    def __init__(self) -> None:
        self._trees: dict[str, CachedMeasurement] = {}  # by uid
        self._totals: dict[str, tuple[int, datetime]] = {}  # by directory: bytes of all trees together

    def learn(self, measured: TreeMeasurement, now: datetime) -> None:
        if is_known(measured.size):
            self._trees[measured.tree_uid] = CachedMeasurement(measured, now)

    def learn_total(self, directory: RootDirectory, total: int, now: datetime) -> None:
        self._totals[directory.path] = (total, now)

    def total(self, directory: RootDirectory) -> int:
        return self._totals.get(directory.path, (0, None))[0]

    def forget_all_but(self, uids: set[str], directories: Collection[str]) -> None:
        self._trees = {uid: known for uid, known in self._trees.items() if uid in uids}
        self._totals = {path: total for path, total in self._totals.items() if path in directories}

    def is_far_below(self, directory: RootDirectory, now: datetime) -> bool:
        """All of its trees together, according to a recent observe, and its disk is not too full."""
        total, at = self._totals.get(directory.path, (0, None))
        fresh = at is not None and timedelta() <= now - at < CACHE_LASTS
        return fresh and not directory.may_be_too_full and total < directory.above * FAR_BELOW

    def recall(
        self,
        entry: TreeEntry,
        top: os.stat_result,
        directory: RootDirectory,
        in_use: DirectoryUse | Unknown,
        now: datetime,
        last_use: Callable[[TreeMeasurement], LastUse],
    ) -> TreeMeasurement | None:
        """The last measurement if it is still valid. None: measure it again. `last_use`: what follows from a
        measurement.
        """
        known = self._trees.get(tree_uid(top.st_dev, top.st_ino))
        if known is None or entry.taken is not None or not timedelta() <= now - known.at < CACHE_LASTS:
            return None
        used_since = instant(max(_times(top)))
        newest = max(known.measured.newest, used_since) if is_known(known.measured.newest) else used_since
        held = not isinstance(in_use, Unknown) and entry.name in in_use.users
        again = msgspec.structs.replace(known.measured, newest=newest)
        least, used = directory.least_age, last_use(again).at
        young = least is None or isinstance(used, Unknown) or used + least > now
        return again if held or young or self.is_far_below(directory, now) else None


def _times(top: os.stat_result) -> tuple[int, ...]:
    """As a walk counts them: listing a directory is no use of it."""
    changed = (top.st_mtime_ns, top.st_ctime_ns)
    return changed if stat.S_ISDIR(top.st_mode) else (*changed, top.st_atime_ns)


NOTABLE = 1_000_000_000  # bytes of deleted files that one process holds open
UNREADABLE = OpenFiles({}, {}, (), frozenset(), "the list of open files could not be read")


class Disks:
    def __init__(
        self,
        at: Callable[[], PlaceAndTime],
        directories: Callable[[], Sequence[str]],
        scan: Scan,
        proc: str,
        timeouts: Timeouts,
    ) -> None:
        self._at, self._folders, self._scan, self._proc, self._timeouts = at, directories, scan, proc, timeouts

    async def observe(self) -> Page:
        facts: dict[int, Usage] = {}
        unseen = []
        for directory in self._folders():  # one by one: a hanging network disk must not hide the others
            one = await self._usage_of(directory)
            if isinstance(one, Unseen):
                unseen.append(one)
            else:
                facts.setdefault(one.device, one)
        used = await self._open_files() if facts else UNREADABLE
        return tuple(self._subject(one, used) for one in facts.values()), tuple(unseen)

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found, unseen = await self.observe()
        for one in found:
            if one.ref.uid == ref.uid:
                return one
        return Unknown(f"{unseen[0].what} {unseen[0].why}") if unseen else Gone(ref, self._at().now)

    async def _usage_of(self, directory: str) -> Usage | Unseen:
        return await in_time(lambda: usage_of(directory), f"the disk of {directory}", self._timeouts.disk)

    async def _open_files(self) -> OpenFiles:
        found = await in_time(self._scan, "the list of open files", self._timeouts.processes)
        return UNREADABLE if isinstance(found, Unseen) else found

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
