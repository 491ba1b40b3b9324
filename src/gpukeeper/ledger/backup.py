"""A backup of the ledger: one tar file, made while a daemon writes, verified after it was written; and the way back.

It has the journal with its state, the measured use, and the archives. Saved evidence and reports are ordinary files,
often large, and are not in it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import sqlite3
import tarfile
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from gpukeeper.ledger.database import LEDGER, USAGE, check_restored, copy_to, open_for_writing, transaction
from gpukeeper.ledger.files import LEDGER_FILE, RESTORING_FILE, archive_folder, make_private, usage_path, why_untrusted
from gpukeeper.ledger.journal import append, no_pass
from gpukeeper.model import reading
from gpukeeper.model.errors import LedgerError, UsageError
from gpukeeper.model.event import Paused

MANIFEST: Final = "backup.json"
SCHEMA: Final = "gpukeeper/ledger-backup/v1"
_NAMES = re.compile(r"ledger\.db|usage\.db|archive/journal-[A-Za-z0-9._-]{1,120}\.gz")
_CHUNK = 1 << 20
# tarfile follows headers by recursion, and reads of each as much as it says; only some of it becomes a TarError.
_UNREADABLE = (tarfile.TarError, RecursionError, MemoryError, OverflowError, ValueError)


class Stored(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    made: datetime
    machine: str
    version: str
    files: Mapping[str, Stored]
    schema: str = SCHEMA


def back_up(state: Path, target: Path, *, now: datetime, machine: str, version: str) -> Manifest:
    """`target` must not exist: a backup is never overwritten. Complete or not there at all."""
    ledger = state / LEDGER_FILE
    if not ledger.exists():
        raise UsageError(f"There is no ledger in {state}, so there is nothing to back up.")
    check_restored(ledger)
    if target.exists():
        raise UsageError(f"{target} exists. Nothing was written. Name a file that does not exist.")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a directory. Nothing was written. Create it first.")
    work = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        work.mkdir(mode=0o700)
        try:
            files = _collected(ledger, work)
            stored = {name: Stored(path.stat().st_size, _digest(path)) for name, path in files.items()}
            manifest = Manifest(made=now, machine=machine, version=version, files=stored)
            made = work / "backup.tar"
            _write(made, manifest, files)
            read_back(made)
            os.link(made, target)  # fails if it exists by now
        finally:
            shutil.rmtree(work)
        _sync(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"The backup {target} could not be written: {error}. The ledger was not changed.") from error
    return manifest


def read_back(backup: Path) -> Manifest:
    """Its manifest, after every file in it was read and has its checksum."""
    try:
        with tarfile.open(backup, "r:") as tar:
            manifest = _manifest(tar, backup)
            for name in manifest.files:
                _verify(tar, name, manifest, backup, None)
            return manifest
    except (OSError, *_UNREADABLE) as error:
        raise _unreadable(backup, error) from error


def restore(backup: Path, state: Path, *, now: datetime, who: str) -> tuple[Manifest, Path | None]:
    """Put a backup in the place of the ledger. All actions are paused afterwards: what happened since is not in it.

    The ledger that was there is moved into a directory beside it; its path is the second result, None: there was none.
    """
    why = why_untrusted(backup)
    if why is not None:
        raise LedgerError(f"The backup {backup} is not trusted: {why}. Nothing was changed.")
    make_private(state)
    work = state / f".restore-{secrets.token_hex(4)}"
    with no_pass(state / "leases"):
        try:
            for left in state.glob(".restore-*"):  # by a restore that was killed
                shutil.rmtree(left, ignore_errors=True)
            work.mkdir(mode=0o700)
            manifest = _unpacked(backup, work)
            _pause(work / LEDGER_FILE, manifest, now, who)
            (state / RESTORING_FILE).touch(mode=0o600)  # without it, a kill from here on would leave an empty ledger
            _sync(state)
            aside = _put_aside(state, now)
            for name in manifest.files:
                place = state / name
                place.parent.mkdir(mode=0o700, exist_ok=True)
                (work / name).rename(place)
            _sync(state)
            (state / RESTORING_FILE).unlink()
            _sync(state)
        except OSError as error:
            raise LedgerError(f"{backup} could not be restored: {error}. What was there is in {state}.") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return manifest, aside


def _collected(ledger: Path, work: Path) -> dict[str, Path]:
    """Databases as copies of one moment; archives as they are: nothing changes a finished one."""
    found = {}
    for path in (ledger, usage_path(ledger)):
        if path.exists():
            found[path.name] = work / path.name
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as source:
                copy_to(source, found[path.name])
    archives = archive_folder(ledger)
    for path in sorted(archives.glob("journal-*.gz")) if archives.is_dir() else ():
        found[f"{archives.name}/{path.name}"] = path
    return found


def _write(made: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
    with made.open("xb") as out:
        os.fchmod(out.fileno(), 0o600)
        with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as tar:
            text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            head = tarfile.TarInfo(MANIFEST)
            head.size, head.mode = len(text), 0o600
            tar.addfile(head, io.BytesIO(text))
            for name, path in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = manifest.files[name].size, 0o600
                with path.open("rb") as content:
                    tar.addfile(entry, content)
        out.flush()
        os.fsync(out.fileno())


def _manifest(tar: tarfile.TarFile, backup: Path) -> Manifest:
    try:
        first = tar.next()
        content = tar.extractfile(first) if first is not None and first.name == MANIFEST and first.isfile() else None
        if content is None:
            raise LedgerError(f"{backup} is not a backup of a ledger. Nothing was changed.")
        manifest = reading.decode(content.read(_CHUNK), type=Manifest)
    except ValueError as error:
        raise LedgerError(f"The description in {backup} is damaged: {error}. Nothing was changed.") from error
    if manifest.schema != SCHEMA:
        raise LedgerError(
            f"{backup} has the format {manifest.schema}; this version reads {SCHEMA}. Nothing was changed."
        )
    if LEDGER_FILE not in manifest.files or not all(_NAMES.fullmatch(name) for name in manifest.files):
        raise LedgerError(f"{backup} names files that are not those of a ledger. Nothing was changed.")
    return manifest


def _verify(tar: tarfile.TarFile, name: str, manifest: Manifest, backup: Path, place: Path | None) -> None:
    """Read a file of the backup, and write it to `place` where one is given."""
    try:
        entry = tar.getmember(name)
    except KeyError:
        raise LedgerError(f"{backup} is damaged: {name} is missing. Nothing was changed.") from None
    content = tar.extractfile(entry) if entry.isfile() and not entry.issparse() else None
    wanted, digest, size = manifest.files[name], hashlib.sha256(), 0
    if content is not None:
        with open(os.devnull if place is None else place, "wb") as out:  # noqa: PTH123
            while part := content.read(_CHUNK):
                digest.update(part)
                size += len(part)
                out.write(part)
            out.flush()
            os.fsync(out.fileno()) if place is not None else None
    if (size, digest.hexdigest()) != (wanted.size, wanted.sha256):
        raise LedgerError(f"{backup} is damaged: {name} is not what was backed up. Nothing was changed.")


def _unpacked(backup: Path, work: Path) -> Manifest:
    """Verified, and of a version that this program reads."""
    try:
        with tarfile.open(backup, "r:") as tar:
            manifest = _manifest(tar, backup)
            for name in manifest.files:
                (work / name).parent.mkdir(mode=0o700, exist_ok=True)
                _verify(tar, name, manifest, backup, work / name)
    except _UNREADABLE as error:
        raise _unreadable(backup, error) from error
    for name, schema in ((LEDGER_FILE, LEDGER), (usage_path(work / LEDGER_FILE).name, USAGE)):
        if name in manifest.files:
            open_for_writing(work / name, schema=schema).close()  # refuses a newer version, migrates an older one
    return manifest


def _unreadable(backup: Path, error: Exception) -> LedgerError:
    return LedgerError(
        f"{backup} cannot be read: {error or 'a header in it is impossibly large'}. It is damaged or forged. "
        "Nothing was changed. Use another backup."
    )


def _pause(ledger: Path, manifest: Manifest, now: datetime, who: str) -> None:
    """Warnings, holds and use since the backup are unknown, so nothing may act by it yet."""
    reason = f"restored from the backup of {manifest.made:%Y-%m-%d %H:%M} UTC; read `gpukeeper plan` before you resume"
    with closing(open_for_writing(ledger)) as connection, transaction(connection):
        append(connection, [Paused(at=now, by=who, reason=reason)])


def _put_aside(state: Path, now: datetime) -> Path | None:
    names = [path.name for pattern in ("ledger.db*", "usage.db*", "archive") for path in state.glob(pattern)]
    if not names:
        return None
    aside = state / f"before-restore-{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    aside.mkdir(mode=0o700)
    for name in sorted(names):
        (state / name).rename(aside / name)
    _sync(state)
    return aside


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
