"""Modules of gpukeeper in processes of their own, started by the Python that runs this one."""

from __future__ import annotations

import sys

DIRECTORY = "/"  # of such a process: the caller's may be any


def module_command(module: str, *words: str) -> tuple[str, ...]:
    """`-P`: modules are never searched for in the current directory. Root may work in a directory where any user can
    write, and `json.py` there would run as root."""
    return (sys.executable, "-P", "-m", module, *words)
