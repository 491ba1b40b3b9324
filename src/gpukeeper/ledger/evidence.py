"""Evidence as directories of files: <day>/<name>-<step>/, with an index of the files.

Names come from platforms: they are data in the index and sanitised on disk; no link is ever followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.ledger.lines import text
from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import size_in_words

INDEX = "index.json"
SAVED_WITHIN = timedelta(minutes=2)  # one capture; a mount that hangs must not keep a pass from going on
WALKED_WITHIN = timedelta(minutes=10)  # the whole directory
ROOM_WITHIN = 60.0  # seconds to wait for other captures to be written before the directory is measured
_DAY = re.compile(r"\d{8}")
_NAME = re.compile(r"\d{8}/[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SavedFile(msgspec.Struct, frozen=True):
    file: str  # its name on disk
    size: int
    sha256: str


class Index(msgspec.Struct, frozen=True):
    """Written last: a directory without it was left by a crash, and is no evidence."""

    ref: Ref
    step: str
    at: datetime
    files: Mapping[str, SavedFile]  # by the name the platform gave


_INDEX = reading.Decoder(Index)


class DirectoryEvidence:
    """Several threads save at once: each reserves its bytes before it writes, so that together they stay below the
    quota. What other processes save meanwhile is found when it gets tight."""

    def __init__(self, root: Path, quota: int) -> None:
        self.root = root
        self.quota = quota
        self._used: int | None = None  # bytes that are written; None: to be measured
        self._reserved = 0  # bytes that are being written
        self._turn = threading.Condition()

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        try:
            return await in_thread(lambda: self._save(ref, step, at, evidence), SAVED_WITHIN)
        except TimeoutError:
            return Unknown(f"saving the evidence of {ref.path} below {self.root} timed out; check its disk")

    async def load(self, name: str) -> Evidence | Unknown:
        try:
            return await in_thread(lambda: self._load(name), SAVED_WITHIN)
        except TimeoutError:
            return Unknown(f"reading the evidence {name} from {self.root} timed out; check its disk")

    async def prune(self, keep: timedelta, now: datetime) -> int:
        """Days that lie wholly before `now - keep` are deleted. How many bytes that gave back."""
        return await in_thread(lambda: self._prune(f"{now - keep:%Y%m%d}"), WALKED_WITHIN)

    def _save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        files = _files(ref, step, at, evidence)
        needed = sum(map(len, files.values()))
        try:
            if not self._reserve(needed):
                return Unknown(
                    f"the evidence of {ref.path} ({size_in_words(needed)}) would exceed the quota of "
                    f"{size_in_words(self.quota)} for {self.root}"
                )
            return self._write_reserved(f"{at:%Y%m%d}", f"{safe_name(ref.name)}-{safe_name(step)}", files, needed)
        except OSError as error:
            return Unknown(
                f"the evidence of {ref.path} could not be saved below {self.root}: {error.strerror or error}"
            )

    def _reserve(self, needed: int) -> bool:
        """False: it does not fit. The directory is measured between writes: half of a capture would count twice."""
        deadline = time.monotonic() + ROOM_WITHIN
        with self._turn:
            while self._used is None or self._used + self._reserved + needed > self.quota:
                if not self._reserved:
                    self._used = self._bytes()
                    break
                if not self._turn.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"other captures are still being written after {ROOM_WITHIN:g} s")
            if self._used + self._reserved + needed > self.quota:
                return False
            self._reserved += needed
            return True

    def _write_reserved(self, day: str, name: str, files: Mapping[str, bytes], needed: int) -> str:
        written: int | None = None
        try:
            name = self._write(day, name, files)
            written = needed
        finally:
            with self._turn:
                self._reserved -= needed
                # What a failure left is measured.
                self._used = None if self._used is None or written is None else self._used + written
                self._turn.notify_all()
        return name

    def _write(self, day: str, name: str, files: Mapping[str, bytes]) -> str:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder(self.root) as root:
            with suppress(FileExistsError):
                os.mkdir(day, 0o700, dir_fd=root)
            with _folder(day, root) as days:
                name = _make_folder(days, name)
                try:
                    with _folder(name, days) as directory:
                        for file, content in files.items():
                            _write_file(directory, file, content)
                        os.fsync(directory)
                except BaseException:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=days)
                    raise
                os.fsync(days)
            os.fsync(root)
        return f"{day}/{name}"

    def _load(self, name: str) -> Evidence | Unknown:
        if not _NAME.fullmatch(name):
            return Unknown(f"{name!r} is not the name of any evidence")
        day, _, last = name.partition("/")
        try:
            with _folder(self.root) as root, _folder(day, root) as days, _folder(last, days) as directory:
                index = _INDEX.decode(_read(directory, INDEX))
                files = {given: _read(directory, saved.file) for given, saved in index.files.items()}
        except (OSError, msgspec.MsgspecError) as error:
            return Unknown(f"the evidence {name} cannot be read: {getattr(error, 'strerror', None) or error}")
        for given, saved in index.files.items():
            if hashlib.sha256(files[given]).hexdigest() != saved.sha256:
                return Unknown(f"the evidence {name} is damaged: {given!r} is not what was saved")
        return Evidence(files)

    def _prune(self, before: str) -> int:
        if not self.root.is_dir():
            return 0
        with _folder(self.root) as root:
            used = self._bytes()
            for day in os.listdir(root):  # noqa: PTH208 (a descriptor, not a path)
                # Only days; any other entry here is not ours to delete.
                if _DAY.fullmatch(day) and day < before:
                    _prune_day(root, day)
            os.fsync(root)
        with self._turn:
            self._used = None
        return used - self._bytes()

    def _bytes(self) -> int:
        size = 0
        if not self.root.is_dir():
            return size
        for _, below, files, fd in os.fwalk(self.root, follow_symlinks=False):
            below.sort()
            for file in files:
                with suppress(FileNotFoundError):
                    size += os.stat(file, dir_fd=fd, follow_symlinks=False).st_size
        return size


def _prune_day(root: int, day: str) -> None:
    """Only directories with an index of ours in them; a day with anything else in it stays."""
    with suppress(OSError):
        with _folder(day, root) as days:
            for name in os.listdir(days):  # noqa: PTH208
                with suppress(OSError, msgspec.MsgspecError):
                    with _folder(name, days) as directory:
                        _INDEX.decode(_read(directory, INDEX))
                    shutil.rmtree(name, dir_fd=days)
        os.rmdir(day, dir_fd=root)


def safe_name(name: str) -> str:
    """A file name for any string: never hidden, never a path, never long."""
    return _UNSAFE.sub("_", name).lstrip(".-")[:100] or "_"


def _files(ref: Ref, step: str, at: datetime, evidence: Evidence) -> dict[str, bytes]:
    """What will be written, by name on disk. The index is last."""
    saved: dict[str, SavedFile] = {}
    files: dict[str, bytes] = {}
    for given, content in evidence.files.items():
        file = _unused(safe_name(given), {INDEX, *files})
        files[file] = content
        saved[text(given)] = SavedFile(file, len(content), hashlib.sha256(content).hexdigest())
    plain = Ref(*(text(value) for value in msgspec.structs.astuple(ref)))
    files[INDEX] = msgspec.json.format(msgspec.json.encode(Index(plain, text(step), at, saved)))
    return files


def _unused(name: str, used: set[str]) -> str:
    # Compared without case: evidence may be copied to a disk that does not know case.
    taken = {file.lower() for file in used}
    number, free = 2, name
    while free.lower() in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _make_folder(parent: int, name: str) -> str:
    """A step that is captured again after a crash gets a directory of its own."""
    number, free = 2, name
    while True:
        try:
            os.mkdir(free, 0o700, dir_fd=parent)
        except FileExistsError:
            free, number = f"{name}-{number}", number + 1
        else:
            return free


def _write_file(directory: int, name: str, content: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(directory: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return file.read()


@contextmanager
def _folder(path: str | Path, parent: int | None = None) -> Iterator[int]:
    fd = os.open(path, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)
