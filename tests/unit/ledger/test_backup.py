"""A backup of a ledger: of one moment, verified, and restored only whole, with all actions paused."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.ledger import backup as module
from gpukeeper.ledger.backup import Manifest, back_up, read_back, restore
from gpukeeper.ledger.database import LEDGER, Schema, open_for_reading, open_for_writing
from gpukeeper.ledger.journal import DAEMON, open_ledger, take_lease
from gpukeeper.model.errors import KeeperError, LeaseHeld, LedgerError, UsageError
from gpukeeper.model.event import Event, Paused, Resumed

NOW = datetime(2026, 11, 17, 5, tzinfo=UTC)


def add(state: Path, *lines: Event) -> None:
    ledger = open_ledger(state / "ledger.db", write=True)
    try:
        asyncio.run(ledger.append(list(lines)))
    finally:
        ledger.close()


def lines_of(state: Path) -> list[Event]:
    ledger = open_ledger(state / "ledger.db", write=False)
    try:
        return [line for _, line in asyncio.run(ledger.lines())]
    finally:
        ledger.close()


def save(state: Path, target: Path) -> Manifest:
    return back_up(state, target, now=NOW, machine="node-3", version="1.0")


def is_paused(state: Path) -> str | None:
    ledger = open_ledger(state / "ledger.db", write=False)
    try:
        return asyncio.run(ledger.paused())
    finally:
        ledger.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    add(made, Paused(at=NOW, by="eve", reason="maintenance"), Resumed(at=NOW, by="eve"))
    (made / "archive").mkdir(mode=0o700)
    (made / "archive" / "journal-1.gz").write_bytes(b"an archive")
    return made


def test_what_was_backed_up_comes_back_and_everything_is_paused(state: Path, tmp_path: Path) -> None:
    before = lines_of(state)
    made = save(state, tmp_path / "b.tar")
    assert set(made.files) == {"ledger.db", "archive/journal-1.gz"}
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600
    add(state, Paused(at=NOW, by="ann", reason="later"))
    (state / "archive" / "journal-1.gz").write_bytes(b"changed")

    _, aside = restore(tmp_path / "b.tar", state, now=NOW + timedelta(days=1), who="eve")

    assert lines_of(state)[:-1] == before
    assert "restored from the backup of 2026-11-17 05:00 UTC" in (is_paused(state) or "")
    assert (state / "archive" / "journal-1.gz").read_bytes() == b"an archive"
    assert aside is not None
    assert [line.by for line in lines_of(aside) if isinstance(line, Paused)] == ["eve", "ann"]
    assert (aside / "archive" / "journal-1.gz").read_bytes() == b"changed"
    assert not list(state.glob(".restore-*"))


def test_a_backup_while_another_process_writes_is_of_one_moment(state: Path, tmp_path: Path) -> None:
    ledger = open_ledger(state / "ledger.db", write=True)
    try:
        asyncio.run(ledger.append([Paused(at=NOW, by="bob", reason="in the WAL")]))
        save(state, tmp_path / "b.tar")
    finally:
        ledger.close()
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    restore(tmp_path / "b.tar", other, now=NOW, who="eve")
    assert lines_of(other)[:-1] == lines_of(state)


def test_nothing_of_the_old_databases_stays_beside_the_restored_ones(state: Path, tmp_path: Path) -> None:
    """SQLite would apply an old WAL to the restored database."""
    save(state, tmp_path / "b.tar")
    old = [f"{name}{end}" for name in ("ledger.db", "usage.db") for end in ("-wal", "-shm")]
    for name in old:
        (state / name).write_bytes(b"of the old database")
    _, aside = restore(tmp_path / "b.tar", state, now=NOW, who="eve")
    assert aside is not None
    assert [(aside / name).read_bytes() for name in old] == [b"of the old database"] * 4
    assert [name for name in old if (state / name).exists()] == []
    assert is_paused(state)


def _killed_at(operation: int, backup: Path, state: Path) -> bool:
    """Restore in a process that ends without any cleanup before this file operation; False: it had fewer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = operation

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            return call(*values, **named)

        return run

    for name in ("mkdir", "rename", "touch", "unlink"):
        setattr(Path, name, counted(getattr(Path, name)))
    try:
        restore(backup, state, now=NOW, who="eve")
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.slow
def test_a_restore_killed_at_any_moment_leaves_no_ledger_that_would_act(state: Path, tmp_path: Path) -> None:
    """Either the old one is complete, or every command refuses until the restore is repeated."""
    save(state, tmp_path / "b.tar")
    add(state, Paused(at=NOW, by="ann", reason="later"))
    before, seen = lines_of(state), set()
    for operation in range(1, 100):
        copy = tmp_path / f"state-{operation}"
        shutil.copytree(state, copy)
        killed = _killed_at(operation, tmp_path / "b.tar", copy)
        try:
            found = "old" if lines_of(copy) == before else "restored"
        except LedgerError:
            with pytest.raises(LedgerError, match="Repeat `gpukeeper ledger restore FILE`"):
                open_ledger(copy / "ledger.db", write=True)
            with pytest.raises((LedgerError, UsageError), match=r"interrupted|no ledger"):
                save(copy, tmp_path / "half.tar")
            found = "refused"
        seen.add(found)
        if found == "restored":
            assert is_paused(copy)
        restore(tmp_path / "b.tar", copy, now=NOW + timedelta(days=1), who="eve")
        assert is_paused(copy)
        assert not list(copy.glob(".restore-*"))
        if not killed:
            break
    assert (killed, seen) == (False, {"old", "refused", "restored"})


def test_on_a_machine_without_a_ledger_nothing_is_put_aside(state: Path, tmp_path: Path) -> None:
    save(state, tmp_path / "b.tar")
    assert restore(tmp_path / "b.tar", tmp_path / "new", now=NOW, who="eve")[1] is None


def test_a_file_that_exists_is_not_overwritten(state: Path, tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_text("precious")
    with pytest.raises(UsageError, match="Nothing was written"):
        save(state, tmp_path / "b.tar")
    assert (tmp_path / "b.tar").read_text() == "precious"


def test_nothing_to_back_up_and_nowhere_to_write_are_errors(state: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to back up"):
        save(tmp_path / "none", tmp_path / "b.tar")
    with pytest.raises(UsageError, match="Create it first"):
        save(state, tmp_path / "none" / "b.tar")


def test_a_backup_that_could_not_be_written_leaves_no_file(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(LedgerError, match="The ledger was not changed"):
        save(state, tmp_path / "b.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


@pytest.mark.parametrize("where", [600, 5000, -20000])
def test_a_damaged_backup_changes_nothing(state: Path, tmp_path: Path, where: int) -> None:
    save(state, tmp_path / "b.tar")
    content = bytearray((tmp_path / "b.tar").read_bytes())
    content[where] ^= 0xFF
    (tmp_path / "b.tar").write_bytes(content)
    _refused(tmp_path / "b.tar", state)


def test_a_backup_cut_short_changes_nothing(state: Path, tmp_path: Path) -> None:
    save(state, tmp_path / "b.tar")
    content = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(content[: len(content) // 2])
    _refused(tmp_path / "b.tar", state)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "policy.yaml", "archive/../../x.gz"])
def test_a_file_that_a_ledger_does_not_have_is_refused(state: Path, tmp_path: Path, name: str) -> None:
    save(state, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as tar:
        found = tar.extractfile("backup.json")
        assert found is not None
        text = found.read().replace(b"archive/journal-1.gz", name.encode())
    with tarfile.open(tmp_path / "evil.tar", "w:") as tar:
        entry = tarfile.TarInfo("backup.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    _refused(tmp_path / "evil.tar", state)
    assert not (tmp_path / "evil").exists()


def test_another_file_is_no_backup(state: Path, tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(b"hello")
    _refused(tmp_path / "b.tar", state)


def test_while_a_daemon_or_a_pass_runs_nothing_is_restored(state: Path, tmp_path: Path) -> None:
    save(state, tmp_path / "b.tar")
    for platform, place in ((DAEMON, "serve"), ("docker", "node~3/x")):
        lease = take_lease(state / "leases", platform, place)
        with pytest.raises(LeaseHeld):
            restore(tmp_path / "b.tar", state, now=NOW, who="eve")
        lease.release()
    restore(tmp_path / "b.tar", state, now=NOW, who="eve")


def test_a_backup_of_a_newer_version_is_refused(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state, tmp_path / "b.tar")
    before = lines_of(state)
    monkeypatch.setattr(module, "LEDGER", Schema(LEDGER.application_id, LEDGER.migrations[:-1]))
    with pytest.raises(LedgerError, match="newer gpukeeper"):
        restore(tmp_path / "b.tar", state, now=NOW, who="eve")
    assert lines_of(state) == before


def _refused(backup: Path, state: Path) -> None:
    copy = state.with_name("copy")
    shutil.copytree(state, copy)
    with pytest.raises(LedgerError):
        read_back(backup)
    with pytest.raises(KeeperError, match="Nothing was changed"):
        restore(backup, state, now=NOW, who="eve")
    assert lines_of(state) == lines_of(copy)
    assert not list(state.glob("before-restore-*")) + list(state.glob(".restore-*"))


def test_an_upgrade_keeps_a_copy_that_the_version_before_reads(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    older = Schema(LEDGER.application_id, LEDGER.migrations[:-1])
    path, version = tmp_path / "ledger.db", len(older.migrations)
    open_for_writing(path, schema=older).close()
    open_for_writing(path).close()
    kept = tmp_path / f"ledger-schema-{version}.db"
    open_for_reading(kept, older).close()
    with pytest.raises(LedgerError, match="newer gpukeeper"):
        open_for_writing(path, schema=older)
    assert kept.stat().st_mode & 0o777 == 0o600
    open_for_writing(path).close()
    assert sorted(one.name for one in tmp_path.iterdir()) == [kept.name, "ledger.db"]


def test_a_backup_that_others_can_change_is_not_restored(state: Path, tmp_path: Path) -> None:
    """It would become holds, warnings and owners, and could change between the check and the restore."""
    backup = tmp_path / "b.tar"
    save(state, backup)
    backup.chmod(0o666)
    before = lines_of(state)
    with pytest.raises(LedgerError, match=r"is not trusted: .*may be written to by others"):
        restore(backup, state, now=NOW, who="ann")
    assert lines_of(state) == before


def test_a_sparse_entry_is_refused_before_it_fills_the_disk(state: Path, tmp_path: Path) -> None:
    """A few bytes of a tar file can be a terabyte of zeros, with the right checksum."""
    backup, zeros = tmp_path / "b.tar", 1 << 30
    save(state, backup)
    with tarfile.open(backup) as tar:
        manifest = tar.extractfile(module.MANIFEST)
        assert manifest is not None
        text = manifest.read()
    head, entry = tarfile.TarInfo(module.MANIFEST), tarfile.TarInfo("ledger.db")
    head.size = len(text)
    entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(zeros)}
    with tarfile.open(backup, "w:", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(head, io.BytesIO(text))
        tar.addfile(entry)
    read: list[int] = []
    entry_read = tarfile.ExFileObject.read

    def counted(file: tarfile.ExFileObject, size: int | None = -1) -> bytes:
        read.append(0)
        return entry_read(file, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tarfile.ExFileObject, "read", counted)
        with pytest.raises(LedgerError, match=r"ledger\.db is not what was backed up"):
            restore(backup, state, now=NOW, who="ann")
    assert len(read) == 1  # of the description
