"""Which names may be offered for deletion at all. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from gpukeeper.disk.trash import is_trash

# Names that others rely on, with root's trust: a user who could create them again after a removal would gain that
# trust.
WELL_KNOWN = (
    *("lost+found", "ray", "_ray_lockfiles", "session_latest", "ray_current_cluster"),
    *(".X11-unix", ".XIM-unix", ".ICE-unix", ".font-unix", ".Test-unix"),
    *(".snap", "snap-private-tmp", "systemd-private-*"),
)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """As in a shell: a hidden name needs a pattern that begins with a dot. A well-known name is never matched, nor is
    the trash of a removal in progress.
    """
    if is_trash(name) or any(fnmatch.fnmatchcase(name, known) for known in WELL_KNOWN):
        return False
    return any(
        fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
        for pattern in patterns
    )
