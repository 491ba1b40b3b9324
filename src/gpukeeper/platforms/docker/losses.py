"""What is lost with a container: files written inside it, packages installed since its start. Pure.

Read from the engine's list of changes, so that nothing has to be run inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpukeeper.model.durations import size_in_words
from gpukeeper.platforms.docker.translate import anonymous_volumes
from gpukeeper.platforms.docker.wire import Inspected, PathChange

ADDED = 1
SHOWN = 8
_PYTHON = re.compile(r".*/(?:site|dist)-packages/(?P<name>[^/]+?)-(?P<version>[^/-]+)\.(?:dist|egg)-info")
_CONDA = re.compile(r".*/conda-meta/(?P<name>[^/]+?)-(?P<version>[^/-]+)-[^/-]+\.json")
_DEBIAN = re.compile(r"/var/lib/dpkg/info/(?P<name>[^/:]+)(?::[^/]+)?\.list")


def packages(changes: Iterable[PathChange]) -> tuple[str, ...]:
    """Installed since the start, with versions where the path contains them."""
    found: dict[str, None] = {}
    for change in changes:
        if change.kind != ADDED:
            continue
        for pattern in (_PYTHON, _CONDA, _DEBIAN):
            if match := pattern.fullmatch(change.path):
                version = match.groupdict().get("version")
                found[f"{match['name']} {version}" if version else match["name"]] = None
    return tuple(sorted(found))


def losses(container: Inspected, changes: Sequence[PathChange]) -> tuple[str, ...]:
    """Sentences for a warning."""
    lost = []
    if container.size_rw:
        lost.append(f"{size_in_words(container.size_rw)} written inside it (files in mounted directories stay)")
    installed = packages(changes)
    if installed:
        more = f" and {len(installed) - SHOWN} more" if len(installed) > SHOWN else ""
        lost.append(f"{len(installed)} packages installed since its start: {', '.join(installed[:SHOWN])}{more}")
    volumes = anonymous_volumes(container)
    if volumes and container.host_config.auto_remove:
        # The engine itself removes them with a container that was started with --rm.
        lost.append(f"the anonymous volume{'s' if len(volumes) > 1 else ''} at {', '.join(volumes)}")
    return tuple(lost)
