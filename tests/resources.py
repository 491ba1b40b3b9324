"""Whether this machine has the disk and memory that a run of all tests needs: `python3 -m tests.resources`.

A full disk makes tests fail for reasons that no failure names. Uses the standard library only: it runs first.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

GIB = 1 << 30
DISK, MEMORY = 15 * GIB, 8 * GIB
DISK_TO_BUILD = 45 * GIB  # Kubernetes, Ray and PyTorch are built or installed first
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpukeeper"


def missing() -> list[str]:
    """What it lacks, in sentences."""
    needed = DISK if (CACHE / "kube").is_dir() else DISK_TO_BUILD
    found = (
        (f"disk of {tempfile.gettempdir()}", shutil.disk_usage(tempfile.gettempdir()).free, needed),
        ("memory", _available_memory(), MEMORY),
    )
    return [
        f"{what}: {has / GIB:.1f} GiB are available, the tests need {needs / GIB:.0f} GiB"
        for what, has, needs in found
        if has < needs
    ]


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    sys.exit("\n".join(missing()) or 0)
