"""Which tests on engines run on the same worker, so that a run starts each engine once (`pytest --dist loadgroup`).

xdist's own groups have no effect with pytest 9.2 (it ignores the names that xdist gives to tests), hence a scheduler.

The control plane runs twice, because its tests take longer than all others together. Where the files of a folder share
no engine, each file is a group.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from zlib import crc32

from xdist.scheduler import LoadScopeScheduling

BELOW = "tests/real"
PLANES = 2
SPLIT = frozenset({"notify", "package", "prometheus", "ssh"})
# They inspect all processes and mounts of the machine, so no engine may run beside them: see the markers in pyproject.
MARKED = {"disk": "alone", "host": "paired"}


class ByEngine(LoadScopeScheduling):
    """A worker takes a whole group, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.partition("::")[0])
        return group_of(file.relative_to(BELOW)) if file.is_relative_to(BELOW) else str(file)


def group_of(file: PurePosixPath) -> str:
    """`file`: relative to tests/real."""
    folder = file.parts[0]
    if folder == "kube" or file.name.startswith("test_kubernetes"):
        return f"kube-{crc32(file.name.encode()) % PLANES}"
    if folder in {"contract", "docker", "web"}:
        return "docker"
    return f"{folder}-{file.stem}" if folder in SPLIT else folder
