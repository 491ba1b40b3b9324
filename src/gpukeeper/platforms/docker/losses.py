"""What goes when a container goes: files written inside it, packages installed since its start. Pure.

Learned from the engine's own list of changes, so that nothing inside has to be run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpukeeper.model.durations import size_in_words
from gpukeeper.platforms.docker.translate import anonymous_volumes
from gpukeeper.platforms.docker.wire import Change, Inspected

ADDED = 1
SHOWN = 8
_PYTHON = re.compile(r".*/(?:site|dist)-packages/(?P<name>[^/]+?)-(?P<version>[^/-]+)\.(?:dist|egg)-info")
_CONDA = re.compile(r".*/conda-meta/(?P<name>[^/]+?)-(?P<version>[^/-]+)-[^/-]+\.json")
_DEBIAN = re.compile(r"/var/lib/dpkg/info/(?P<name>[^/:]+)(?::[^/]+)?\.list")


def packages(changes: Iterable[Change]) -> tuple[str, ...]:
    """Installed since the start, with versions where the path tells."""
    found: dict[str, None] = {}
    for change in changes:
        if change.kind != ADDED:
            continue
        for pattern in (_PYTHON, _CONDA, _DEBIAN):
            if match := pattern.fullmatch(change.path):
                version = match.groupdict().get("version")
                found[f"{match['name']} {version}" if version else match["name"]] = None
    return tuple(sorted(found))


def losses(container: Inspected, changes: Sequence[Change]) -> tuple[str, ...]:
    """Sentences for a warning."""
    lost = []
    if container.size_rw:
        lost.append(f"{size_in_words(container.size_rw)} written inside it (what lies in mounted folders stays)")
    installed = packages(changes)
    if installed:
        more = f" and {len(installed) - SHOWN} more" if len(installed) > SHOWN else ""
        lost.append(f"{len(installed)} packages installed since its start: {', '.join(installed[:SHOWN])}{more}")
    volumes = anonymous_volumes(container)
    if volumes and container.host_config.auto_remove:
        # The engine itself removes them with a container that was started to vanish.
        lost.append(f"the unnamed volume{'s' if len(volumes) > 1 else ''} at {', '.join(volumes)}")
    return tuple(lost)
