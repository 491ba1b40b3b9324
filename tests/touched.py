"""Which engine tests a change needs: the table tests/touched.toml, applied to the paths that changed since a commit."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
REAL = ROOT / "tests" / "real"
BASE = ROOT / ".ci" / "base"
CRASHES = ("crash", "halt", "kill", "outage")


@dataclass(frozen=True)
class Table:
    paths: Mapping[str, Sequence[str]]
    core: Sequence[str]

    def folders(self, path: str) -> Sequence[str]:
        """Those of the longest prefix. A path that the table does not know may concern everything."""
        found = [prefix for prefix in self.paths if path.startswith(prefix)]
        return self.paths[max(found, key=len)] if found else ("everything",)

    def is_core(self, path: str) -> bool:
        return path.startswith(tuple(self.core))


@dataclass(frozen=True)
class Selection:
    """`folders`: of tests/real, whole. `crashes`: also the crash tests of the other folders. `core`: run more seeds."""

    folders: Sequence[str]
    crashes: bool
    core: bool

    def files(self) -> list[str]:
        """Paths for pytest, relative to the repository."""
        return sorted({*(f"tests/real/{folder}" for folder in self.folders), *self._crash_tests()})

    def _crash_tests(self) -> Iterator[str]:
        for file in REAL.glob("*/test_*.py") if self.crashes else ():
            if file.parent.name not in self.folders and any(word in file.name for word in CRASHES):
                yield file.relative_to(ROOT).as_posix()


@cache
def table() -> Table:
    found = tomllib.loads((ROOT / "tests" / "touched.toml").read_text())
    return Table(found["paths"], found["core"])


def select(paths: Iterable[str]) -> Selection:
    paths = list(paths)
    wanted = {folder for path in paths for folder in table().folders(path)}
    everything = "everything" in wanted
    folders = engine_folders() if everything else sorted(wanted - {"crashes"})
    crashes = "crashes" in wanted and not everything
    return Selection(folders, crashes, core=everything or any(map(table().is_core, paths)))


def engine_folders() -> list[str]:
    return sorted({file.parent.name for file in REAL.glob("*/test_*.py")})


def changed_since(base: str) -> list[str]:
    """Committed or not. A file that was moved counts with both of its paths."""
    tracked = _git("diff", "--name-only", "--no-renames", base)
    return sorted({*tracked, *_git("ls-files", "--others", "--exclude-standard")})


def base_commit() -> str | None:
    """The commit of main before the change, as `make base` recorded it; None if it is not part of this history."""
    base = BASE.read_text().strip() if BASE.exists() else ""
    command = ["git", "merge-base", "--is-ancestor", base, "HEAD"]
    known = base and subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    return base if known else None


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
