"""Restoring a report that was saved: under its old name, complete or not at all.

It is unpacked in a private directory beside its destination and moved there in one step; an existing entry is never
replaced. The archive is ours, but its content is not trusted: no path and no link may lead out of the report.
"""

from __future__ import annotations

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

from gpukeeper.blocking import in_thread
from gpukeeper.disk import kernel, measure, naming
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.model.decision import Accepted, Refused
from gpukeeper.model.identity import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import errors, translate
from gpukeeper.platforms.host.connect import Timeouts
from gpukeeper.platforms.host.directories import TreeScope
from gpukeeper.platforms.host.resolve import ForeignLink, opened
from gpukeeper.platforms.host.roots import ANY, TreeRoot

PRIVATE = ".gpukeeper-restore-"
CLEANUP = 60  # seconds


async def restore(ref: Ref, saved: bytes, named: TreeScope, timeouts: Timeouts) -> Accepted | Refused | Unknown:
    deadline = timeouts.tree
    root = next((one for one in named.roots if one.kind == translate.REPORT and _is_below(ref, one)), None)
    if root is None:
        return Refused(f"{Path(ref.name).parent} is no longer a root of reports in the policy")
    try:
        return await in_thread(lambda: _restore(ref, saved, root), deadline)
    except TimeoutError:
        return Unknown(errors.too_slow(root.path, deadline).why)
    except ForeignLink as link:
        return Refused(f"nothing was written: {root.path} {link.strerror}")
    except OSError as error:
        return Refused(f"it could not be written below {root.path}: {error.strerror or error}")


def _is_below(ref: Ref, root: TreeRoot) -> bool:
    return str(Path(ref.name).parent) == measure.printable(os.path.normpath(root.path))


def _restore(ref: Ref, saved: bytes, root: TreeRoot) -> Accepted | Refused:
    try:
        with tarfile.open(fileobj=io.BytesIO(saved), mode="r:gz", errorlevel=2) as tar:
            members = tar.getmembers()
            name = members[0].name.partition("/")[0] if members else ""
            why = _why_not(ref, name, members, root)
            if why is not None:
                return Refused(why)
            with opened(root.folder) as directory, private_folder(directory) as private:
                tar.extraction_filter = _unchanged
                tar.extractall(f"/proc/self/fd/{private}", list(map(_plain, members)), numeric_owner=True)  # noqa: S202
                kernel.rename_inside(private, name, directory, name)
    except FileExistsError:
        return Refused(f"{ref.name} exists; move it away first")
    except tarfile.TarError as error:
        return Refused(f"its archive cannot be unpacked: {error}; it is kept as evidence, unpack it by hand")
    return Accepted()


def _why_not(ref: Ref, name: str, members: list[tarfile.TarInfo], root: TreeRoot) -> str | None:
    if not naming.is_named(name, ANY) or measure.printable(str(Path(os.path.normpath(root.path), name))) != ref.name:
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


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """No more permissions than files need."""
    plain = copy(member)
    plain.mode = stat.S_IMODE(member.mode) & 0o1777
    return plain


def _unchanged(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """The filter of newer Pythons: every member was checked before."""
    return member


@contextmanager
def private_folder(directory: int) -> Iterator[int]:
    """A directory that no other user may enter, removed afterwards with its remaining content. Emptied by descriptor:
    where all users may rename, another entry may have its name by then.
    """
    name = PRIVATE + secrets.token_hex(8)
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
