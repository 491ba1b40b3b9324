"""Deleting a tree by descriptors, and counting the bytes returned. Called only for trees in our own trash.

It follows no link and enters no mount. An entry that cannot be removed is reported and does not end the work. Imports
little: the processes of `worker` start with it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from gpukeeper.disk import kernel
from gpukeeper.disk.walk import BLOCK, CHUNK, OUT_OF_TIME, Descent, Identity, OpenDirectory, Pending, pending, printable

LEFT_NAMED = 20


class _OutOfTime(Exception):
    pass


class TreeDeleter:
    """`back`: the blocks of files whose last link was removed by us. Concurrent writes of others do not affect that
    figure.
    """

    def __init__(self, until: float) -> None:
        self.until = until  # of the monotonic clock, which all processes of a machine share
        self.entries = self.blocks = self.left_count = 0
        self.left: list[str] = []
        self.links: dict[Identity, list[int]] = {}  # of files with several links: links it had, links removed, blocks
        self.stopped: str | None = None  # why it was not finished
        self._again: set[Identity] = set()

    def back(self) -> int:
        gone = sum(blocks for links, removed, blocks in self.links.values() if removed >= links)
        return (self.blocks + gone) * BLOCK

    def empty(self, top: int, path: bytes = b"", quantum: int | None = None) -> tuple[list[Pending], list[bytes]]:
        """Empties the open directory. After `quantum` entries it returns the directories left to do, and those to be
        removed when these are done.
        """
        way = Descent(top, path)
        enough = None if quantum is None else self.entries + quantum
        try:
            self._files(way.here)
            while True:
                if enough is not None and self.entries >= enough and (left := pending(way, 0)) is not None:
                    return left, _paths(way)
                if way.here.todo:
                    self._enter(way, way.here.todo.pop()[0])
                elif len(way.folders) > 1:
                    self._remove_folder(way)
                else:
                    return [], []
        except _OutOfTime:
            self.stopped = OUT_OF_TIME
            return [], []
        finally:
            way.close()

    def remove(self, top: int, path: bytes, quantum: int | None = None) -> tuple[list[Pending], list[bytes]]:
        """The directory at that path below the top, with all its content."""
        try:
            fd = kernel.open_inside(top, path)
        except OSError as error:
            self._keep(os.fsdecode(os.path.basename(path)), error)  # noqa: PTH119 - bytes
            return [], []
        try:
            left, later = self.empty(fd, path, quantum)
        finally:
            os.close(fd)
        if not left and not later and self.stopped is None:
            self.remove_empty(top, path)
        return left, later

    def remove_empty(self, top: int, path: bytes) -> None:
        above, name = os.path.split(path)
        fd = -1
        try:
            fd = kernel.open_inside(top, above or b".")
            blocks = os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks
            os.rmdir(name, dir_fd=fd)
            self._count(blocks)
        except OSError as error:
            self._keep_folder(os.fsdecode(name), error)
        finally:
            if fd >= 0:
                os.close(fd)

    def remove_file(self, directory: int, name: str) -> None:
        try:
            self._unlink(directory, name, os.stat(name, dir_fd=directory, follow_symlinks=False))
        except OSError as error:
            self._keep(name, error)

    def record(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "blocks": self.blocks,
            "left": self.left,
            "left_count": self.left_count,
            "links": [[*identity, *counted] for identity, counted in self.links.items()],
            "stopped": self.stopped,
        }

    def merge(self, other: Mapping[str, Any]) -> None:
        self.entries += other["entries"]
        self.blocks += other["blocks"]
        self.left += other["left"][: LEFT_NAMED - len(self.left)]
        self.left_count += other["left_count"]
        self.stopped = self.stopped or other["stopped"]
        for device, inode, links, removed, blocks in other["links"]:
            known = self.links.setdefault((device, inode), [0, 0, blocks])
            known[0], known[1] = max(known[0], links), known[1] + removed

    def _enter(self, way: Descent, name: str) -> None:
        try:
            directory, _ = way.enter(name)
        except OSError as error:
            self._keep(name, error)
            return
        self._files(directory)

    def _files(self, directory: OpenDirectory) -> None:
        """Removes everything except directories, and notes the directories."""
        try:
            with os.scandir(directory.fd) as entries:
                while chunk := list(islice(entries, CHUNK)):
                    if time.monotonic() > self.until:
                        raise _OutOfTime
                    self._chunk(directory, chunk)
        except OSError as error:
            self._keep(directory.name, error)

    def _chunk(self, directory: OpenDirectory, chunk: list[os.DirEntry[str]]) -> None:
        for entry in chunk:
            if entry.is_dir(follow_symlinks=False):
                directory.todo.append((entry.name, None))
                continue
            try:
                self._unlink(directory.fd, entry.name, entry.stat(follow_symlinks=False))
            except OSError as error:
                self._make_writable(directory, entry, error)

    def _unlink(self, directory: int, name: str, found: os.stat_result) -> None:
        os.unlink(name, dir_fd=directory)
        if found.st_nlink == 1:
            self.blocks += found.st_blocks
        else:
            known = self.links.setdefault((found.st_dev, found.st_ino), [found.st_nlink, 0, found.st_blocks])
            known[1] += 1
        self.entries += 1

    def _make_writable(self, directory: OpenDirectory, entry: os.DirEntry[str], error: OSError) -> None:
        """A directory of ours that is read-only (package caches create such) may be made writable."""
        found = os.fstat(directory.fd)
        if error.errno != errno.EACCES or found.st_uid != os.geteuid() or found.st_mode & 0o700 == 0o700:
            self._keep(entry.name, error)
            return
        os.fchmod(directory.fd, 0o700)
        self.remove_file(directory.fd, entry.name)

    def _remove_folder(self, way: Descent) -> None:
        left = way.leave()
        try:
            os.rmdir(left.name, dir_fd=way.here.fd)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and left.identity not in self._again:
                # Some network filesystems skip entries of a directory that shrinks while it is listed.
                self._again.add(left.identity)
                if not self.left_count:
                    way.here.todo.append((left.name, None))
                    return
            self._keep_folder(left.name, error)
        else:
            self._count(left.blocks)

    def _count(self, blocks: int) -> None:
        self.entries += 1
        self.blocks += blocks

    def _keep_folder(self, name: str, error: OSError) -> None:
        """Not empty: its entries have been reported already."""
        if error.errno == errno.ENOTEMPTY and self.left_count:
            self.left_count += 1
        else:
            self._keep(name, error)

    def _keep(self, name: str, error: OSError) -> None:
        if error.errno == errno.ENOENT:
            return  # gone is the goal: a process of an interrupted run may still be working on it
        self.left_count += 1
        if len(self.left) < LEFT_NAMED:
            self.left.append(f"{printable(name)} could not be removed: {error.strerror}")


def _paths(way: Descent) -> list[bytes]:
    """Of the directories on the path, without the top of the whole tree, which has no path."""
    paths, path = [], way.prefix
    for directory in way.folders:
        path = os.path.join(path, os.fsencode(directory.name)) if directory.name else path  # noqa: PTH118 - bytes
        paths.append(path)
    return [path for path in paths if path]
