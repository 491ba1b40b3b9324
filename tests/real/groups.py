"""Which tests on engines run on the same worker, so that a run starts each engine once (`pytest --dist loadgroup`).

The control plane runs twice, because its tests take longer than all others together. Where the files of a folder share
no engine, each file is a group.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

PLANES = 2
SPLIT = frozenset({"notify", "package", "prometheus", "ssh"})
# They inspect all processes and mounts of the machine, so no engine may run beside them: see the markers in pyproject.
MARKED = {"disk": "alone", "host": "paired"}


def group_of(file: Path) -> str:
    """`file`: relative to tests/real."""
    folder = file.parts[0]
    if folder == "kube" or file.name.startswith("test_kubernetes"):
        return f"kube-{crc32(file.name.encode()) % PLANES}"
    if folder in {"contract", "docker", "web"}:
        return "docker"
    return f"{folder}-{file.stem}" if folder in SPLIT else folder
