"""A report as one compressed archive, before its removal: content, owner, mode and times.

By descriptors, like every walk here: the owner of the report could swap a directory for a link while it is read, and
root would save a copy of other files. Entries that are neither a file, a directory nor a link are not saved; then the
report is kept.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
import time

from gpukeeper.blocking import in_thread
from gpukeeper.disk import kernel, measure
from gpukeeper.disk.walk import Identity
from gpukeeper.model.decision import Evidence
from gpukeeper.model.durations import size_in_words
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, roots, translate
from gpukeeper.platforms.host.connect import A_MOMENT, Timeouts
from gpukeeper.platforms.host.directories import TreeScope
from gpukeeper.platforms.host.resolve import opened

FILE = "report.tar.gz"
LIMIT = 256 * 1024 * 1024  # bytes of content; the archive is made in memory
ENTRY = 512  # bytes of overhead for each entry
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
TYPES = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}


class CannotSave(Exception):
    """Why the report is kept."""


async def report(subject: Subject, named: TreeScope, timeouts: Timeouts) -> Evidence | Unknown:
    identity, deadline = translate.two_numbers(subject.ref.uid, ":"), timeouts.tree
    if identity is None:
        return Unknown(f"{subject.ref.uid!r} does not identify a report")
    try:
        saved = await in_thread(
            lambda: _save(identity, named, time.monotonic() + deadline.total_seconds()), deadline + A_MOMENT
        )
    except TimeoutError:
        return Unknown(errors.too_slow(subject.ref.name, deadline).why)
    except OSError as error:
        return Unknown(errors.unreadable(subject.ref.name, error).why)
    except CannotSave as problem:
        return Unknown(str(problem))
    return Evidence({FILE: saved})


def _save(identity: Identity, named: TreeScope, until: float) -> bytes:
    entry = roots.find(named.roots, *identity)
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
        if kind not in TYPES:
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
        self.size += size + ENTRY
        if self.size > LIMIT:
            raise CannotSave(
                f"it has more than {size_in_words(LIMIT)}, too much to be saved as evidence; archive it by "
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
