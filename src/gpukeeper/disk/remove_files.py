"""Removing many closed files of one directory: all are moved to the trash and checked with one read of open files; what
is used or changed is put back. Blocks: call it in a thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gpukeeper.disk import kernel, trash
from gpukeeper.disk.erase import TreeDeleter
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.open_files import OpenFiles, users_of_trash
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval, as_expected, free_bytes, removal_of, used_by
from gpukeeper.disk.trash import Trash, TrashedTree
from gpukeeper.disk.walk import OPEN
from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.unknown import Unknown

_NOTHING = TreeRemoval(entries=0, bytes_back=0)


class FileRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """Of many files: what was removed, and for each of the others why it was not."""

    removal: TreeRemoval
    removed: tuple[str, ...]
    kept: dict[str, Changed | Refused | Unknown]


def remove_files(
    directory: int,
    files: Sequence[tuple[str, ExpectedTree]],
    *,
    scan: Callable[[], OpenFiles],
    until: float,
) -> FileRemoval:
    """Many closed files of one directory, with one read of open files."""
    kept: dict[str, Changed | Refused | Unknown] = {}
    with trash.making(directory, trash.SEVERAL) as bin_:
        if isinstance(bin_, Refused):
            return FileRemoval(removal=_NOTHING, removed=(), kept={name: bin_ for name, _ in files})
        taken: list[tuple[TrashedTree, os.stat_result]] = []
        for name, expected in files:
            before = as_expected(directory, name, expected)
            got = bin_.take(name, expected.identity) if isinstance(before, os.stat_result) else before
            if isinstance(got, TrashedTree) and isinstance(before, os.stat_result):
                taken.append((got, before))
            elif not isinstance(got, TrashedTree):
                kept[name] = got
        try:
            free = _keep_used(bin_, taken, scan, kept)
        except BaseException:
            for one, _ in taken:
                bin_.put_back(one)
            raise
        if not free:
            return FileRemoval(removal=_NOTHING, removed=(), kept=kept)
        before_bytes = free_bytes(bin_.fd)
        bin_.mark_for_deletion()
        eraser = TreeDeleter(until)
        for name in free:
            eraser.remove_file(bin_.fd, name)
        gone = tuple(name for name in free if not _is_there(bin_.fd, name))
        return FileRemoval(removal=removal_of(eraser, before_bytes, bin_), removed=gone, kept=kept)


def _keep_used(
    bin_: Trash,
    taken: list[tuple[TrashedTree, os.stat_result]],
    scan: Callable[[], OpenFiles],
    kept: dict[str, Changed | Refused | Unknown],
) -> list[str]:
    """Puts back what is used or changed, and returns the names of the others."""
    open_files = scan()
    inside = f"/{bin_.name}/"
    used = {path.partition(inside)[2]: pid for path, pid in open_files.paths.items() if inside in path}
    seen_through = users_of_trash(bin_.name, open_files)
    free = []
    for one, before in taken:
        why: Changed | Unknown | None = None
        found = os.stat(one.name, dir_fd=bin_.fd, follow_symlinks=False)
        user = used.get(one.name, open_files.user_of(one.identity))
        if user is not None:
            why = Changed(used_by(user))
        elif seen_through == KERNEL:
            why = Changed(used_by(KERNEL))
        elif open_files.hidden:
            why = Unknown(f"whether it is in use is unknown: {open_files.hidden}")
        elif not stat.S_ISREG(found.st_mode):
            why = Changed("it is not a regular file")
        elif (found.st_mtime_ns, found.st_size) != (before.st_mtime_ns, before.st_size):
            why = Changed("it changed since it was read")
        elif kernel.is_open(bin_.fd, one.name):
            why = Changed(OPEN)
        if why is None:
            free.append(one.name)
        else:
            kept[one.name] = bin_.put_back(one) or why
    return free


def _is_there(directory: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=directory, follow_symlinks=False)
        return True
    return False
