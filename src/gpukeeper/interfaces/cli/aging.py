"""Whether the machine's own cleaner (systemd-tmpfiles, tmpreaper) would delete files of a directory in use. Reads
their settings only.

What is quiet is not dead: unpacked code and spilled objects of a running cluster are not touched for days, and their
loss hangs it. tmpfiles.d(5): the line of the nearest directory counts, `x` excludes a directory and all below it, `X`
only the directory itself, and a line with `!` is for the boot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FOLDERS = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")  # the first wins
AGING = frozenset("dDevqQC")
SPECIFIERS = {"%T": "/tmp", "%V": "/var/tmp", "%t": "/run", "%S": "/var/lib", "%C": "/var/cache"}  # noqa: S108
NO_AGE = frozenset({"", "-"})


class TmpfilesLine(NamedTuple):
    file: str
    type: str
    path: str
    age: str


def aged_by(folder: str, root: Path = Path("/")) -> list[str]:
    """One sentence for each cleaner that would delete old files below this directory, and how to exclude it."""
    return [*_by_tmpfiles(folder, root), *_by_tmpreaper(folder, root)]


def _by_tmpfiles(folder: str, root: Path) -> Iterator[str]:
    lines = list(_lines(root))
    for path in (folder, *map(str, PurePosixPath(folder).parents)):
        here = [line for line in lines if fnmatchcase(path, line.path)]
        if any(line.type == "x" for line in here):
            return
        aging = [line for line in here if line.type in AGING]
        if not aging:
            continue
        first = aging[0]  # of two lines for one path the first counts
        if first.age not in NO_AGE:
            yield (
                f"systemd-tmpfiles deletes files below {path} that were unused for {first.age} ({first.file}), also "
                f"in {folder} while it is in use. To exclude it: `x {folder}*` in /etc/tmpfiles.d/gpukeeper.conf"
            )
        return


def _lines(root: Path) -> Iterator[TmpfilesLine]:
    """In the order in which they count. A file hides those of its name in later directories; a link to /dev/null,
    too."""
    files: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*.conf")):
            files.setdefault(path.name, path)
    for _, path in sorted(files.items()):
        for words in map(str.split, _text(path).splitlines()):
            if len(words) >= 2 and not words[0].startswith("#") and "!" not in words[0]:
                where = words[1].strip("\"'")
                for short, long in SPECIFIERS.items():
                    where = where.replace(short, long)
                age = words[5].lstrip("~") if len(words) > 5 else ""
                yield TmpfilesLine(f"/{path.relative_to(root)}", words[0].strip("+-=~^"), where.rstrip("/") or "/", age)


def _by_tmpreaper(folder: str, root: Path) -> Iterator[str]:
    settings = _text(root / "etc/tmpreaper.conf")
    if not settings or not (root / "etc/cron.daily/tmpreaper").exists():
        return
    told = dict(re.findall(r"^\s*(\w+)=[\"']?([^\"'\n]*)", settings, re.MULTILINE))
    below = [str(PurePosixPath(one)) for one in told.get("TMPREAPER_DIRS", "/tmp/.").split()]  # noqa: S108
    kept = told.get("TMPREAPER_PROTECT_EXTRA", "").split()
    reached = [one for one in below if PurePosixPath(folder).is_relative_to(one)]
    protected = any(fnmatchcase(folder, f"{one.rstrip('/*')}*") for one in kept)
    if reached and not protected and told.get("SHOWWARNING") != "true":
        yield (
            f"tmpreaper deletes files below {reached[0]} that were not read for {told.get('TMPREAPER_TIME', '7d')} "
            f"(/etc/tmpreaper.conf), also in {folder} while it is in use. To exclude it: "
            f"TMPREAPER_PROTECT_EXTRA='{folder}*'"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
