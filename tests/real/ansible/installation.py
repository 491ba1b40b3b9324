"""Where ansible-core is, for the Python of the Debian machine, and ansible-lint, for this one."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VERSIONS = re.findall(r"^[a-z-]+==(\S+)$", (Path(__file__).parent / "versions.txt").read_text(), re.MULTILINE)


def _folder() -> Path:
    """As build.sh has it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("GPUKEEPER_ANSIBLE_CACHE") or caches / "gpukeeper/ansible") / "-".join(_VERSIONS)


def core() -> Path:
    return _folder() / "core"


def lint() -> Path:
    return _folder() / "lint/bin/ansible-lint"


def is_installed() -> bool:
    return (_folder() / ".installed").exists()
