"""A folder of this machine under a policy, and the real command run on it as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukeeper.disk import open_files
from tests import forked
from tests.halt import PYTHONPATH

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
NEVER_TOO_FULL = "high: 100%, low: 99%"  # however full the disk of this machine is
A_WHILE = 120.0
# Told by its input: what a process names in its command line would stay for that alone.
HOLDS = "import sys; file = open(sys.stdin.readline()[:-1]); print(flush=True); sys.stdin.read()"


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """By the last name of what was acted on."""
        (place,) = self.json()["places"]
        return {Path(line["ref"]["name"]).name: line for line in place["outcomes"]}


class Host:
    def __init__(self, folder: Path, policy: str, root: Path | None = None) -> None:
        """`policy`: with ROOT for the folder below which everything happens."""
        self.root = folder / "scratch" if root is None else root
        self.root.mkdir(exist_ok=True)
        self.state, self.policy = folder / "state", folder / "policy.yaml"
        self.write_policy(policy)

    def write_policy(self, policy: str) -> None:
        disk = "" if "disk:" in policy else f"disk: {{{NEVER_TOO_FULL}, UNREADABLE}}\n"
        head = f"mode: enforce\nscope: {{host: {{}}}}\n{disk}"
        text = (head + policy).replace("ROOT", str(self.root))
        self.policy.write_text(text.replace("UNREADABLE", f"unreadable: [{first_program()}]"))

    def tree(self, name: str, files: int = 3, size: int = 5000) -> Path:
        path = self.root / name / "below"
        path.mkdir(parents=True)
        for number in range(files):
            (path / f"f{number}").write_bytes(b"x" * size)
        return path.parent

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())

    def run(self, *words: str, before: Sequence[str] = (), halt: tuple[str, str] | None = None) -> Ran:
        """`halt`: a point and a name, where it kills itself (`tests/halt.py`)."""
        if not before:
            program, *first = ("gpukeeper",) if halt is None else ("tests.halt", *halt)
            return Ran(*forked.run(program, [*first, *words], self.env(), "", A_WHILE))
        with self.start(*words, before=before, halt=halt) as child:
            out, err = child.communicate(timeout=A_WHILE)
        return Ran(child.returncode, out, err)

    def env(self) -> dict[str, str]:
        return forked.environment() | {"GPUKEEPER_STATE": str(self.state), "GPUKEEPER_POLICY": str(self.policy)}

    def start(
        self, *words: str, before: Sequence[str] = (), halt: tuple[str, str] | None = None
    ) -> subprocess.Popen[str]:
        program = ("gpukeeper",) if halt is None else ("tests.halt", *halt)
        command = [*before, sys.executable, "-m", *program, *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = self.env() | {"PYTHONPATH": PYTHONPATH}
        return subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def apply(self, *words: str, before: Sequence[str] = (), halt: tuple[str, str] | None = None) -> Ran:
        return self.run("apply", "--yes", "--json", "--platform", "host", *words, before=before, halt=halt)

    def plan(self, *words: str, before: Sequence[str] = ()) -> list[dict[str, Any]]:
        ran = self.run("plan", "--json", "--platform", "host", *words, before=before)
        assert ran.code == 0, ran.err
        (place,) = ran.json()["places"]
        decisions: list[dict[str, Any]] = place["decisions"]
        return decisions

    def lines(self, *types: str) -> list[dict[str, Any]]:
        wanted = [word for kind in types for word in ("--type", kind)]
        end = time.monotonic() + A_WHILE
        while not (ran := self.run("ledger", "list", "--last", "1000", "--json", *wanted)).out:
            assert time.monotonic() < end, ran  # for a moment only: a daemon is just making the ledger
        found: list[dict[str, Any]] = ran.json()["lines"]
        return found


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + A_WHILE
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {A_WHILE} s"


@contextmanager
def held_open(path: Path) -> Iterator[int]:
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdin.write(os.fsencode(path) + b"\n")
        child.stdin.flush()
        child.stdout.readline()
        yield child.pid
        child.stdin.close()


@contextmanager
def small_disk(point: Path, options: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "gpukeeper-test", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


def can_be_nobody() -> bool:
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


def first_program() -> str:
    """The one that started this machine: where that is a supervisor that may do more than root, even root may not look
    into it, and the tests vouch for it."""
    return Path("/proc/1/comm").read_text().strip()


SCANS = 30


def sees_everybody() -> bool:
    """As root does; the command then acts, and else it keeps. Programs of other tests may be restless for a while."""
    return any(open_files.scan(unreadable=(first_program(),)).hidden is None for _ in range(SCANS))
