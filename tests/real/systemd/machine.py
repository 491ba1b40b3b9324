"""A Debian machine of its own, booted with systemd, with its own files, processes, mounts and network.

What is written in it is in memory, and gone when it ends.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RELEASE = "bookworm"
PYTHON = "3.11"  # of that release


def _folder() -> Path:
    """As build.sh has it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("GPUKEEPER_SYSTEMD_CACHE") or caches / "gpukeeper/systemd") / f"{RELEASE}-ssh"


def is_bootable() -> bool:
    return (_folder() / ".bootable").exists() and os.geteuid() == 0


class Machine:
    def __init__(self, leader: int) -> None:
        self.leader = leader  # its first process, by its number here
        self._enter = ["nsenter", f"--target={leader}", "--all", "--", "/usr/bin/env", "-i"]
        self._enter += ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME=/root", "LANG=C.UTF-8"]

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        values = [f"{name}={value}" for name, value in environment.items()]
        done = subprocess.run(
            [*self._enter, *values, *command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def shell(self, script: str) -> str:
        return self.run("/bin/sh", "-ec", script).stdout

    def until(self, script: str, what: str, deadline: float = 120) -> None:
        end = time.monotonic() + deadline
        while self.run("/bin/sh", "-ec", script, check=False).returncode != 0:
            assert time.monotonic() < end, f"not within {deadline:.0f} s: {what}\n{self.journal()}"
            time.sleep(0.2)

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "-n", "40", check=False).stdout


@contextmanager
def machine(files: Mapping[Path, str]) -> Iterator[Machine]:
    """`files`: of the host, read-only at these paths."""
    binds = [f"--bind-ro={path}:{inside}" for path, inside in files.items()]
    command = ["setpriv", "--pdeathsig", "KILL"]  # it ends with us, also if we are killed
    command += ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--volatile=overlay"]
    command += ["--kill-signal=SIGRTMIN+3", "--console=pipe", f"--directory={_folder() / 'root'}", *binds, "--boot"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as nspawn:
        try:
            yield _booted(nspawn)
        finally:
            nspawn.terminate()
            try:
                nspawn.wait(timeout=30)
            except subprocess.TimeoutExpired:
                nspawn.kill()


def _booted(nspawn: subprocess.Popen[bytes], deadline: float = 120) -> Machine:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        assert nspawn.poll() is None, "the machine ended while it booted"
        found = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children").read_text().split()
        for leader in found:
            made = Machine(int(leader))
            if made.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded"):
                return made
        time.sleep(0.2)
    raise AssertionError(f"the machine did not boot within {deadline:.0f} s")
