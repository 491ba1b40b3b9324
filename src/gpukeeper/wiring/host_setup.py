"""Writes the files of one server, records what it wrote, and takes exactly that back.

The record has the hash of each file as it was written. A file with another hash was changed by a person: it is neither
overwritten nor removed. Killed in the middle, the next call continues: the record is written before the first file.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from gpukeeper.config.load import SITE_FILE
from gpukeeper.ledger.files import make_private, why_untrusted
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.unknown import direct

RECORD = "setup.json"
UNITS = Path("/etc/systemd/system")
SYSTEMCTL_S = 120.0


@direct
class Change(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    SAME = "unchanged"
    KEEP = "keep"  # a person wrote or changed it
    REMOVE = "remove"
    GONE = "gone"


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    change: Change
    why: str = ""
    diff: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`files`: path and sha256 as written. `before`: as they were, while they are written. `unit`: what was enabled.
    `given`: the policy was named by a person or by `fleet`; False: setup made a first one. None: not recorded."""

    files: Mapping[str, str] = {}
    before: Mapping[str, str] = {}
    unit: str = ""
    given: bool | None = None

    def wrote(self, path: str, text: str) -> bool:
        return _digest(text) in (self.files.get(path), self.before.get(path))


Systemctl = Callable[[Sequence[str]], str]


def systemctl(arguments: Sequence[str]) -> str:
    """Its output. KeeperError with its own words, if it failed."""
    try:
        done = subprocess.run(
            ["systemctl", "--no-pager", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=SYSTEMCTL_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise UsageError(
            "This machine has no systemctl. Nothing was started. For cron: gpukeeper policy schedule --format crontab"
        ) from None
    except subprocess.TimeoutExpired:
        raise KeeperError(f"systemctl {' '.join(arguments)} did not end within {SYSTEMCTL_S:.0f} s.") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise KeeperError(f"systemctl {' '.join(arguments)} failed: {' '.join(words[:3]) or done.returncode}")
    return done.stdout


def runs_systemd(root: Path = Path("/")) -> bool:
    """Without it every call of systemctl fails, even where the program is installed."""
    return (root / "run/systemd/system").is_dir()  # as sd_booted(3) does


def need_systemd(root: Path = Path("/")) -> None:
    """Before the first file: systemctl would fail after they are written."""
    if not runs_systemd(root):
        raise UsageError(
            "This machine was not started by systemd, which has to start the service. Nothing was written. For single "
            "passes by cron: --every 1h --cron, with a policy in mode enforce. Or let your own init start: gpukeeper "
            "serve"
        )


class HostSetup:
    """`root`: / but in tests. `state`: the directory of the ledger, which has the record."""

    def __init__(self, state: Path, *, root: Path = Path("/"), run: Systemctl = systemctl) -> None:
        self._state, self._root, self._run = state, root, run

    def changes(self, files: Mapping[Path, str]) -> tuple[FileChange, ...]:
        """What `write` would do."""
        record = self.record()
        wanted = [self._change(path, text, record) for path, text in files.items()]
        stale = [self._removal(path, record) for path in record.files if Path(path) not in files]
        return (*wanted, *(one for one in stale if one.change is Change.REMOVE))

    def keeping_policy(self, files: Mapping[Path, str], *, asked: bool) -> Mapping[Path, str]:
        """Of files with a first policy: it replaces no policy that is in force, unless that is a first policy, too, and
        another one was asked for. UsageError: the policy there was named by a person or by `fleet`."""
        [found] = [one for one in self.changes(files) if one.path == str(SITE_FILE)]
        there = self._read(SITE_FILE)
        if found.change is not Change.UPDATE or there is None:
            return files
        if self.record().given is not False:
            raise UsageError(
                f"{found.diff}\n{SITE_FILE} was not made by this command, and a first policy would replace it as above."
                f" Nothing was written. To keep it: --policy {SITE_FILE}. To replace it, name another policy: --policy "
                "FILE"
            )
        return files if asked else {**files, SITE_FILE: there}

    def write(self, files: Mapping[Path, str], unit: str, *, given: bool = False) -> tuple[FileChange, ...]:
        """Write what differs, then start the unit; without one, cron reads its file. What `changes` kept is kept.
        `given`: the policy was named."""
        self.need_trusted(files)
        done = self.changes(files)
        due = {Path(one.path): files[Path(one.path)] for one in done if one.change in (Change.CREATE, Change.UPDATE)}
        old = self.record()
        written = {str(path): _digest(text) for path, text in due.items()}
        there = {str(path): _digest(text) for path in due if (text := self._read(path)) is not None}
        kept = {path: digest for path, digest in old.files.items() if Path(path) in files}
        stale = [Path(one.path) for one in done if one.change is Change.REMOVE]
        if old.unit and old.unit != unit:
            self._disable(old.unit)
        origin = given if SITE_FILE in due else old.given
        # Before the first file: an interrupted call must not leave files that nobody remembers.
        self._remember(Record(files={**old.files, **written}, before=there, unit=unit, given=origin))
        for path, text in due.items():
            self._put(path, text)
        for path in stale:
            self._at(path).unlink(missing_ok=True)
        self._remember(Record(files={**kept, **written}, unit=unit, given=origin))
        if unit or old.unit:
            self._reload()
        if unit:
            self._run(["enable", unit])
            self._run(["restart", unit])
        return done

    def need_trusted(self, files: Mapping[Path, str]) -> None:
        """Before the first file: root's service would run and read what others could put there. KeeperError."""
        for path in map(self._at, {**files, **{Path(one): "" for one in self.record().files}}):
            masked = path.is_symlink() and path.readlink() == Path("/dev/null")  # by systemctl: it stays as it is
            why = why_untrusted(path.parent) or (None if masked else why_untrusted(path))
            if why is not None:
                raise KeeperError(f"Nothing was written, since others could change {path}: {why}")
        why = why_untrusted(self._state)
        if why is not None:
            raise KeeperError(f"Nothing was written, since others could change the ledger in {self._state}: {why}")

    def is_active(self, unit: str) -> bool:
        """Without a unit: the files are what there is."""
        if not unit:
            return True
        try:
            return self._run(["is-active", unit]).strip() == "active"
        except KeeperError:
            return False

    def removals(self) -> tuple[FileChange, ...]:
        """What `remove` would do."""
        record = self.record()
        return tuple(self._removal(path, record) for path in record.files)

    def remove(self) -> tuple[FileChange, ...]:
        """Stop and disable the unit, remove the files that are still as they were written, and read again.

        Where systemd does not run there is nothing to stop: then only files and links are removed."""
        record, done = self.record(), self.removals()
        if record.unit and any(one.change is not Change.GONE and _is_unit(one.path) for one in done):
            self._disable(record.unit)
        for one in done:
            if one.change is Change.REMOVE:
                self._at(Path(one.path)).unlink(missing_ok=True)
                self._tidy(Path(one.path).parent)
        left = {one.path: record.files[one.path] for one in done if one.change is Change.KEEP}
        if left:
            self._remember(Record(files=left, given=record.given))
        else:
            (self._state / RECORD).unlink(missing_ok=True)
        if any(map(_is_unit, record.files)):
            self._reload()
        return done

    def record(self) -> Record:
        path = self._state / RECORD
        try:
            return reading.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return Record()
        except (OSError, ValueError) as error:
            raise KeeperError(
                f"{path} cannot be read ({error}), so it is unknown which files are gpukeeper's. Nothing was changed. "
                "Restore it, or move it away: then files that exist are kept."
            ) from error

    def _change(self, path: Path, text: str, record: Record) -> FileChange:
        there = self._read(path)
        if there is None:
            return FileChange(path=str(path), change=Change.CREATE, diff=_diff(path, "", text))
        if there == text:
            return FileChange(path=str(path), change=Change.SAME)
        if record.wrote(str(path), there):
            return FileChange(path=str(path), change=Change.UPDATE, diff=_diff(path, there, text))
        why = "it exists and was not written by gpukeeper setup, or was changed since"
        return FileChange(path=str(path), change=Change.KEEP, why=why, diff=_diff(path, there, text))

    def _removal(self, path: str, record: Record) -> FileChange:
        there = self._read(Path(path))
        if there is None:
            return FileChange(path=path, change=Change.GONE)
        if not record.wrote(path, there):
            return FileChange(path=path, change=Change.KEEP, why="it was changed since it was written")
        return FileChange(path=path, change=Change.REMOVE)

    def _disable(self, unit: str) -> None:
        if runs_systemd(self._root):
            self._run(["disable", "--now", unit])
            return
        for target in self._at(UNITS).glob("*.wants"):
            link = target / unit  # what `systemctl enable` made; glob would leave out one whose file is gone
            if link.is_symlink() and link.readlink() == UNITS / unit:
                link.unlink(missing_ok=True)

    def _reload(self) -> None:
        if runs_systemd(self._root):
            self._run(["daemon-reload"])

    def _at(self, path: Path) -> Path:
        return self._root / path.relative_to("/")

    def _read(self, path: Path) -> str | None:
        try:
            return self._at(path).read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise KeeperError(f"{path} cannot be read: {error}. Nothing was changed.") from error

    def _put(self, path: Path, text: str) -> None:
        """Complete or not at all."""
        place = self._at(path)
        made = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if (why := why_untrusted(place.parent)) is not None:
                raise KeeperError(f"{path} was not written: {why}")
            with made.open("x") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            made.replace(place)
        except OSError as error:
            made.unlink(missing_ok=True)
            raise KeeperError(
                f"{path} could not be written: {error}. Try again, or take it all back: gpukeeper setup remove"
            ) from error

    def _remember(self, record: Record) -> None:
        make_private(self._state)
        path = self._state / RECORD
        made = path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
        made.write_bytes(msgspec.json.encode(record))
        made.replace(path)

    def _tidy(self, directory: Path) -> None:
        """A directory of gpukeeper's own, if nothing is left in it."""
        if directory.name == "gpukeeper" and self._at(directory).is_dir() and not any(self._at(directory).iterdir()):
            self._at(directory).rmdir()


def _is_unit(path: str) -> bool:
    return path.startswith(f"{UNITS}/")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _diff(path: Path, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"{path}", f"{path} (new)", lineterm="", n=1)
    return "\n".join(lines)
