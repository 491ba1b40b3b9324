"""Whether other machines may use a tree, so that its users cannot be known here: shared filesystems, and NFS exports.

Reads only. What is not known to be local to this machine counts as shared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from gpukeeper.disk.mounts import MountEntry, covering, is_at_or_below, source_of
from gpukeeper.disk.walk import printable
from gpukeeper.model.unknown import Unknown

# Local filesystems, as mount(8) names them. An overlay cannot have an upper layer on a shared one.
LOCAL = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "ntfs3"),
        *("tmpfs", "ramfs", "overlay", "vfat", "exfat"),
    )
)
EXPORTS = ("/etc/exports", "/etc/exports.d", "/var/lib/nfs/etab", "/proc/fs/nfsd/exports")
_FOLDER = re.compile(r'"([^"]+)"|(/\S*)')
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Export(msgspec.Struct, frozen=True):
    """A directory that the NFS server of this machine exports, or will when it starts."""

    path: str  # links resolved
    by: str  # the file that defines it
    device: str
    source: str  # where it is inside that filesystem
    crosses: bool  # filesystems mounted below it are exported, too


def why_unseen(path: str, mounts: Sequence[MountEntry], exports: Iterable[Export]) -> Unknown | None:
    """Why users of a path without links may be invisible. `mounts`: of the namespace of the path."""
    mount = covering(path, mounts)
    if mount is None or mount.kind not in LOCAL:
        kind = "an unknown filesystem" if mount is None or not mount.kind else f"a filesystem of type {mount.kind}"
        return Unknown(f"it is on {kind}, which other machines may use, too; their use cannot be seen from here")
    one = next((one for one in exports if _offers(one, path, mounts)), None)
    if one is None:
        return None
    words = f"{printable(one.path)} is exported over NFS ({one.by})"
    return Unknown(f"{words}, and its use by other machines cannot be seen from here")


def exported(mounts: Sequence[MountEntry], files: Iterable[str] = EXPORTS) -> tuple[Export, ...]:
    """`mounts`: of this machine."""
    found = {}
    for file in _each(files):
        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            continue  # for non-root users; they cannot see the open files of others either
        for directory, crosses in parse_exports(text):
            path = os.path.realpath(directory)
            device, source = source_of(path, mounts) or ("", "/")
            found[path, crosses] = Export(path, str(file), device, source, crosses)
    return tuple(found.values())


def parse_exports(text: str) -> Iterator[tuple[str, bool]]:
    """Each directory, and whether what is mounted below it is exported, too. Lines that begin otherwise are
    continuations.
    """
    for line in text.replace("\\\n", " ").split("\n"):
        match = _FOLDER.match(line)
        if match is not None:
            directory = _ESCAPED.sub(lambda code: chr(int(code.group(1), 8)), match.group(1) or match.group(2))
            yield directory, "crossmnt" in line or "nohide" in line


def _each(files: Iterable[str]) -> Iterator[Path]:
    for file in map(Path, files):
        if file.is_dir():
            yield from sorted(file.glob("*.exports"))
        else:
            yield file


def _offers(export: Export, path: str, mounts: Sequence[MountEntry]) -> bool:
    """At the path, above or below it, by whatever name: an export is often a bind mount of the directory that is
    meant.
    """
    here = source_of(path, mounts)
    if here is not None and here[0] == export.device:
        inside = here[1]
        return is_at_or_below(inside, export.source) or is_at_or_below(export.source, inside)
    return export.crosses and is_at_or_below(path, export.path)
