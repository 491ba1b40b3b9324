"""Modules of gpukeeper in processes of their own, started by the Python that runs this one.

Each is started with `module_command`, in DIRECTORY and with `environment()`, and gets nothing else of ours. Not for the
Python that has PyTorch, which may be another one and needs the variables of its libraries, and not for multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

DIRECTORY = "/"  # of such a process: the caller's may be any
# Where this process has found programs, modules and libraries: GPUs in containers are often found by LD_LIBRARY_PATH.
_LISTS = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_DIRECTORIES = ("HOME", "PYTHONUSERBASE", "TMPDIR")
_WORDS = ("LANG", "LANGUAGE", "TZ")
_SWITCHES = ("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONUNBUFFERED", "PYTHONUTF8")


def module_command(module: str, *words: str) -> tuple[str, ...]:
    """`-P`: modules are never searched for in the current directory. Root may work in a directory where any user can
    write, and `json.py` there would run as root."""
    return (sys.executable, "-P", "-m", module, *words)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What such a process gets of it: what it needs to start and to write as this one. No secrets, and nothing else
    that makes Python or a library run or write something (PYTHONPYCACHEPREFIX, LD_PRELOAD, SSLKEYLOGFILE).

    A process that ignores the variables of Python (-I, -E), or packages in the home directory (-s), has children that
    do, too.
    """
    found = {name: _absolute(environ[name].split(":")) for name in _LISTS if name in environ}
    found |= {name: _absolute([environ[name]]) for name in _DIRECTORIES if name in environ}
    found |= {name: environ[name] for name in (*_WORDS, *_SWITCHES) if name in environ}
    found |= {name: value for name, value in environ.items() if name.startswith("LC_")}
    if sys.flags.ignore_environment:
        found = {name: value for name, value in found.items() if not name.startswith("PYTHON")}
    if sys.flags.no_user_site:
        found["PYTHONNOUSERSITE"] = "1"
    return {name: value for name, value in found.items() if value}


def _absolute(directories: list[str]) -> str:
    """An empty or relative one means the current directory, which is not trusted. In DIRECTORY it would be another."""
    return ":".join(one for one in directories if one.startswith("/"))
