"""What the kernel reports about an engine, and the removal of what it left there: processes, cgroups, mounts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def mounted_below(folder: Path) -> list[str]:
    """The innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)


def remove_all_of(folder: Path) -> None:
    """Processes, cgroups, mounts, files. Shims outlive a killed engine, with their containers; ours name our folder."""
    ours = os.fsencode(folder) + b"/"
    for _ in range(200):
        left = [pid for pid in all_pids() if ours in read_bytes(pid, "cmdline") and _is_of_an_engine(pid)]
        if not left:
            break
        for pid in left:
            for below in children(pid):
                kill(below)
            kill(pid)
        time.sleep(0.05)
    for identity in [path.name for path in (folder / "data/containers").glob("*")]:
        for root in cgroup_roots():
            remove_cgroup(root / "docker" / identity)
    for point in mounted_below(folder):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    # Never through a mount: what is mounted there would be emptied.
    if still := mounted_below(folder):
        raise RuntimeError(f"still mounted, so {folder} was not removed: {still}")
    shutil.rmtree(folder, ignore_errors=True)


def _is_of_an_engine(pid: int) -> bool:
    """Not an editor that has the log open."""
    return read(pid, "comm").startswith(("dockerd", "docker-proxy", "containerd", "podman", "conmon"))


def cgroup_roots() -> list[Path]:
    """One for each controller in version 1, one for all in version 2."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in root.iterdir() if (path / "cgroup.procs").exists()]


def remove_cgroup(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)  # the process that was in it is just leaving
        else:
            return


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 (names only)


def read_bytes(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def read(pid: int, name: str) -> str:
    return read_bytes(pid, name).decode("utf-8", "replace")


def state(pid: int) -> str:
    """R, S, D, Z …; empty when it is gone."""
    return read(pid, "stat").rpartition(")")[2].strip()[:1]


def open_files(pid: int) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115 (a Path would tidy the name)
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in read(pid, f"task/{pid}/children").split()]


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
