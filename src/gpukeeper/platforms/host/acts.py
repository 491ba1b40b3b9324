"""Removing a tree: exactly the one that was read, by descriptor, through the trash; and of a report, saving it before
as one archive, and restoring it under its old name, complete or not at all.

By descriptors, since the owner could swap a directory for a link meanwhile. What cannot be saved keeps the report.
The content of an archive is not trusted: no path and no link may lead out of the report.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from itertools import starmap
from pathlib import Path, PurePosixPath

from gpukeeper.blocking import A_MOMENT, in_thread
from gpukeeper.disk import kernel, measure, trash, tree
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.remove import UNDER_WAY, ExpectedTree, finish, remove
from gpukeeper.disk.walk import Identity
from gpukeeper.model.decision import Accepted, ActResult, Changed, Evidence, Refused, Unseen, too_slow
from gpukeeper.model.subject import Category, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words
from gpukeeper.platforms.host import roots, translate
from gpukeeper.platforms.host.connect import (
    CANNOT_MEASURE,
    ForeignLink,
    Scan,
    Timeouts,
    in_time,
    not_all_removed,
    opened,
    unreadable,
)
from gpukeeper.platforms.host.roots import ANY, TreeRoot, TreeScope, spellings
from gpukeeper.platforms.host.trees import Mentioned, mentioned_below

UNFINISHED = Refused(
    "an interrupted removal has moved it to the trash; the next pass finishes that, and nothing was done"
)


class TreeRemover:
    def __init__(self, scan: Scan, timeouts: Timeouts, mentioned: Mentioned = mentioned_below) -> None:
        self._scan, self._timeouts, self._mentioned = scan, timeouts, mentioned
        self._under_way = tree.UnderWay()

    async def remove(self, fresh: Subject, named: TreeScope, uid: int | None = None) -> ActResult:
        """`uid`: of the user who requests it, if not an admin."""
        expected = tree.expected(fresh, uid)
        if expected is None:
            return CANNOT_MEASURE
        if isinstance(fresh.in_use, Unknown) and fresh.category is not Category.UNFINISHED:
            return Refused(f"it was not removed: {fresh.in_use.why}")
        if not self._under_way.claim(fresh.ref.uid):
            return UNDER_WAY
        deadline = self._timeouts.removal

        def work() -> ActResult:
            with self._under_way.ending(fresh.ref.uid):
                return self._remove(expected, named, time.monotonic() + deadline.total_seconds())

        try:
            return await in_thread(work, deadline + 2 * A_MOMENT)
        except TimeoutError:
            return Unknown(too_slow("its disk", deadline).why)
        except OSError as error:
            return Unknown(f"its root {unreadable(fresh.ref.name, error).why}")

    def _remove(self, expected: ExpectedTree, named: TreeScope, until: float) -> ActResult:
        entry = roots.find(named.roots, expected.identity)
        if entry is None:
            return Changed("it is gone already")
        if isinstance(entry, Unknown):
            return Changed(entry.why)
        if expected.uid is not None and entry.taken is not None:
            return UNFINISHED
        kept = roots.why_kept(entry, named.roots, named.untouched(), roots.links_in(entry.folder))
        if kept is not None:
            return Changed(f"it is kept: {kept}")
        named_by = self._mentioned(spellings(named, entry.inside)).who(entry.name)
        if named_by is not None:
            return Changed(f"it is in use: {named_by}")
        with opened(entry.folder) as directory:
            trash.sweep(directory)
            if entry.taken is not None:
                result = finish(directory, entry.taken, scan=self._scan, until=until)
            else:
                result = remove(directory, entry.name, expected, scan=self._scan, until=until)
        rest = f"{entry.folder}/{trash.TRASH}*" if entry.taken is None else entry.inside
        return tree.answered(result, lambda removal: not_all_removed(removal, rest))


REPORT_FILE = "report.tar.gz"
ARCHIVE_LIMIT = 256 * 1024 * 1024  # bytes of content; the archive is made in memory
ENTRY_BYTES = 512  # bytes of overhead for each entry
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
ENTRY_TYPES = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}


class CannotSave(Exception):
    """Why the report is kept."""


async def save_report(subject: Subject, named: TreeScope, timeouts: Timeouts) -> Evidence | Unknown:
    identity, deadline = tree.two_numbers(subject.ref.uid), timeouts.tree
    if identity is None:
        return Unknown(f"{subject.ref.uid!r} does not identify a report")

    def work() -> bytes:
        return _save_report(identity, named, time.monotonic() + deadline.total_seconds())

    try:
        saved = await in_time(work, subject.ref.name, deadline, A_MOMENT)
    except CannotSave as problem:
        return Unknown(str(problem))
    return Unknown(saved.why) if isinstance(saved, Unseen) else Evidence({REPORT_FILE: saved})


def _save_report(identity: Identity, named: TreeScope, until: float) -> bytes:
    entry = roots.find(named.roots, identity)
    if isinstance(entry, Unknown):
        raise CannotSave(entry.why)
    if entry is None or entry.taken is not None:
        raise CannotSave("it does not exist at its path any more")
    with opened(entry.folder) as directory:
        writer = _Writer(identity, until)
        writer.add(directory, entry.name, entry.name)
        return writer.done()


class _Writer:
    def __init__(self, identity: Identity, until: float) -> None:
        self.identity, self.until = identity, until
        self.content = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.content, mode="w:gz", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self.size = 0
        self.links: dict[Identity, str] = {}

    def done(self) -> bytes:
        self.tar.close()
        return self.content.getvalue()

    def add(self, directory: int, name: str, path: str) -> None:
        """The entry `name` of that open directory, with everything below it; the deepest directories come last."""
        pending = [(path, name)]
        top = os.dup(directory)
        try:
            if _identity(kernel.stat_inside(top, name)) != self.identity:
                raise CannotSave("another entry has its name now")
            while pending:
                path, inside = pending.pop()
                pending += self._add_one(top, path, inside)
        finally:
            os.close(top)

    def _add_one(self, top: int, path: str, inside: str) -> list[tuple[str, str]]:
        """`inside`: the same path, relative to the root. Returns what is below it."""
        found = kernel.stat_inside(top, inside)
        kind = stat.S_IFMT(found.st_mode)
        if kind not in ENTRY_TYPES:
            raise CannotSave(f"{measure.printable(path)} is a socket, a pipe or a device, which cannot be saved")
        self._count(found.st_size if kind == stat.S_IFREG else 0)
        if kind == stat.S_IFDIR:
            return self._add_folder(top, path, inside)
        if kind == stat.S_IFREG:
            self._add_file(top, path, inside)
        else:
            self._add_link(top, path, inside, found)
        return []

    def _add_folder(self, top: int, path: str, inside: str) -> list[tuple[str, str]]:
        fd = kernel.open_inside(top, inside)
        try:
            self.tar.addfile(_member(path, os.fstat(fd), tarfile.DIRTYPE))
            with os.scandir(fd) as listing:
                names = sorted((entry.name for entry in listing), reverse=True)
        finally:
            os.close(fd)
        return [(f"{path}/{name}", f"{inside}/{name}") for name in names]

    def _add_file(self, top: int, path: str, inside: str) -> None:
        fd = kernel.open_inside(top, inside, FILE_FLAGS)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            member = _member(path, found, tarfile.REGTYPE)
            first = self.links.setdefault(_identity(found), path)
            if found.st_nlink > 1 and first != path:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, first, 0
                self.tar.addfile(member)
                return
            try:
                self.tar.addfile(member, file)
            except OSError as error:
                if error.errno is not None:
                    raise
                # The archive needs exactly the announced number of bytes.
                raise CannotSave(f"{measure.printable(path)} changed while it was saved") from error

    def _add_link(self, top: int, path: str, inside: str, found: os.stat_result) -> None:
        above, _, name = inside.rpartition("/")
        fd = kernel.open_inside(top, above) if above else os.dup(top)
        try:
            member = _member(path, found, tarfile.SYMTYPE)
            member.linkname = os.readlink(name, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise CannotSave(f"{measure.printable(path)} changed while it was saved") from error
            raise
        finally:
            os.close(fd)
        self.tar.addfile(member)

    def _count(self, size: int) -> None:
        self.size += size + ENTRY_BYTES
        if self.size > ARCHIVE_LIMIT:
            raise CannotSave(
                f"it has more than {size_in_words(ARCHIVE_LIMIT)}, too much to be saved as evidence; archive it by "
                "hand, or set reports.archive: false to remove such reports without a copy"
            )
        if time.monotonic() > self.until:
            raise CannotSave("it could not be saved in the available time")


def _member(path: str, found: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type, member.mode = kind, stat.S_IMODE(found.st_mode)
    member.uid, member.gid = found.st_uid, found.st_gid
    member.mtime = found.st_mtime_ns / 1e9
    member.size = found.st_size if kind == tarfile.REGTYPE else 0
    return member


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


PRIVATE_FOLDER = ".gpukeeper-restore-"
CLEANUP = 60  # seconds


async def restore_report(ref: Ref, saved: bytes, named: TreeScope, timeouts: Timeouts) -> Accepted | Refused | Unknown:
    deadline = timeouts.tree
    root = next((one for one in named.roots if one.kind == translate.REPORT and _is_below(ref, one)), None)
    if root is None:
        return Refused(f"{Path(ref.name).parent} is no longer a root of reports in the policy")
    try:
        return await in_thread(lambda: _restore_report(ref, saved, root), deadline)
    except TimeoutError:
        return Unknown(too_slow(root.path, deadline).why)
    except ForeignLink as link:
        return Refused(f"nothing was written: {root.path} {link.strerror}")
    except OSError as error:
        return Refused(f"it could not be written below {root.path}: {error.strerror or error}")


def _is_below(ref: Ref, root: TreeRoot) -> bool:
    return str(Path(ref.name).parent) == measure.printable(os.path.normpath(root.path))


def _restore_report(ref: Ref, saved: bytes, root: TreeRoot) -> Accepted | Refused:
    try:
        with tarfile.open(fileobj=io.BytesIO(saved), mode="r:gz", errorlevel=2) as tar:
            members = tar.getmembers()
            name = members[0].name.partition("/")[0] if members else ""
            why = _why_not_restored(ref, name, members, root)
            if why is not None:
                return Refused(why)
            with opened(root.folder) as directory, private_folder(directory) as private:
                tar.extraction_filter = _unfiltered
                tar.extractall(f"/proc/self/fd/{private}", list(map(_plain_member, members)), numeric_owner=True)  # noqa: S202
                kernel.rename_inside(private, name, directory, name)
    except FileExistsError:
        return Refused(f"{ref.name} exists; move it away first")
    except tarfile.TarError as error:
        return Refused(f"its archive cannot be unpacked: {error}; it is kept as evidence, unpack it by hand")
    return Accepted()


def _why_not_restored(ref: Ref, name: str, members: list[tarfile.TarInfo], root: TreeRoot) -> str | None:
    if not trash.is_named(name, ANY) or measure.printable(str(Path(os.path.normpath(root.path), name))) != ref.name:
        return "its archive belongs to another report"
    if any(member.name != name and not member.name.startswith(f"{name}/") for member in members):
        return "its archive contains more than the report"
    if os.path.lexists(Path(root.folder, name)):
        return f"{ref.name} exists; move it away first"
    if not _stays_inside(members):
        return "its archive leads out of the report; it is kept as evidence, unpack it by hand"
    return None


def _stays_inside(members: list[tarfile.TarInfo]) -> bool:
    """Checked here, because the filters of tarfile are missing in Python 3.11.2, the one of Debian 12.

    Each name occurs once, nothing is below a link, and a link goes up first, then down: it leads where it seems to.
    """
    named = {PurePosixPath(member.name): member for member in members}
    links = {path for path, member in named.items() if member.issym()}

    def is_fine(path: PurePosixPath, member: tarfile.TarInfo) -> bool:
        if member.islnk():
            other = named.get(PurePosixPath(member.linkname))
            return other is not None and other.isreg()
        return member.isreg() or member.isdir() or (member.issym() and _leads_inside(path, member.linkname))

    where_they_seem = all(".." not in path.parts and links.isdisjoint(path.parents) for path in named)
    return len(named) == len(members) and where_they_seem and all(starmap(is_fine, named.items()))


def _leads_inside(path: PurePosixPath, target: str) -> bool:
    steps = PurePosixPath(target).parts
    up = steps.count("..")
    return ".." not in steps[up:] and not target.startswith("/") and up < len(path.parts) - 1


def _plain_member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """No more permissions than files need."""
    plain = copy(member)
    plain.mode = stat.S_IMODE(member.mode) & 0o1777
    return plain


def _unfiltered(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """The filter of newer Pythons: every member was checked before."""
    return member


@contextmanager
def private_folder(directory: int) -> Iterator[int]:
    """A directory that no other user may enter, removed afterwards with its remaining content. Emptied by descriptor:
    where all users may rename, another entry may have its name by then.
    """
    name = PRIVATE_FOLDER + secrets.token_hex(8)
    os.mkdir(name, 0o700, dir_fd=directory)
    fd = kernel.open_inside(directory, name)
    try:
        yield fd
    finally:
        TreeDeleter(time.monotonic() + CLEANUP).empty(fd)
        with suppress(OSError):
            if os.path.samestat(os.fstat(fd), kernel.stat_inside(directory, name)):
                os.rmdir(name, dir_fd=directory)
        os.close(fd)
