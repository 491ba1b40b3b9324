"""The mounts of a mount namespace without processes: kept by a descriptor or by a mount of its own. Reads only.

Only a process inside can list them, so a separate process enters it, and does nothing else. It has loaded all it needs
before it enters: the files there are not trusted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PATIENCE = 10.0  # seconds
_PROGRAM = """
import ctypes, os, sys
libc, proc = ctypes.CDLL(None, use_errno=True), os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECTORY)
if libc.setns(int(sys.argv[1]), 0x20000) != 0:
    os._exit(1)
fd = os.open("self/mountinfo", os.O_RDONLY, dir_fd=proc)
while part := os.read(fd, 65536):
    os.write(1, part)
os._exit(0)
"""


def mountinfo_of(namespace: str, proc: str = "/proc") -> str | None:
    """`namespace`: a path that leads to it. None: it could not be entered."""
    try:
        fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(fd), str(Path(proc))]
        done = subprocess.run(command, pass_fds=[fd], capture_output=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    finally:
        os.close(fd)
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None
