"""Temporary trees of a node: entries below the roots that the policy names, as that node sees them. Reads only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpukeeper.disk.naming import is_named
from gpukeeper.disk.open_files import DirectoryUse
from gpukeeper.model.policy import Temporary
from gpukeeper.model.subject import Subject
from gpukeeper.platforms.ray import translate
from gpukeeper.platforms.ray.sessions import NAME
from gpukeeper.platforms.ray.visit import NodeDirectory, Visit

KEEP = ".keep"  # a file of this name at the top of a tree keeps it
KEPT = f"it contains a file named {KEEP}"


def names(directory: NodeDirectory, temporary: Temporary) -> list[str]:
    """What is kept by name is listed, too: the rule reports it. A session is never a mere temporary tree."""
    with os.scandir(directory.fd) as listing:
        named = [entry for entry in listing if is_named(entry.name, temporary.names) and not NAME.fullmatch(entry.name)]
        return sorted(entry.name for entry in named if _counts(directory, entry))


def _counts(directory: NodeDirectory, entry: os.DirEntry[str]) -> bool:
    try:
        return directory.counts(entry.stat(follow_symlinks=False).st_uid)
    except FileNotFoundError:
        return False


def subject_of(directory: NodeDirectory, name: str, visit: Visit, below: DirectoryUse) -> Subject | None:
    """None: it is gone since it was listed."""
    found = visit.measure(directory.fd, name)
    if found is None:
        return None
    found = visit.with_mounts(directory, name, found)
    in_use, keeps = visit.in_use(directory, name, found, below)
    return translate.tree_subject(
        str(Path(directory.path, name)),
        found,
        visit.at,
        in_use=in_use,
        keeps=keeps,
        kept=why_kept(directory, name, (found.device, found.inode), visit),
        owner=visit.owner(found.uid),
        disk=directory.disk,
        root=directory.path,
        uids=visit.uids(found),
        last_use=visit.last_use(directory, found),
    )


def why_kept(directory: NodeDirectory, name: str, identity: tuple[int, int], visit: Visit) -> str | None:
    return KEPT if has_keep(directory.fd, name) else visit.holds(identity)


def has_keep(directory: int, name: str) -> bool:
    try:
        os.stat(f"{name}/{KEEP}", dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def named_by(name: str, path: str, temporary: Sequence[Temporary]) -> bool:
    """Whether the policy matches an entry of that name of that root."""
    return any(os.path.normpath(one.root) == path and is_named(name, one.names) for one in temporary)
