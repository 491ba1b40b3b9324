"""What others could change is not obeyed, and the sentence says how to fix it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from gpukeeper.config.load import load_policy
from gpukeeper.ledger import database
from gpukeeper.ledger.files import make_private, why_untrusted
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.errors import LedgerError, PolicyError
from gpukeeper.wiring.session import open_session

OTHER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away: run the tests as root")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir(mode=0o755)
    path = tmp_path / "folder" / "policy.yaml"
    path.write_text("scope: {host: {}}\n")
    path.chmod(0o644)
    return path


def test_what_only_root_and_we_can_change_is_trusted(file: Path) -> None:
    assert why_untrusted(file) is None
    assert why_untrusted(file.parent / "not there") is None


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_others_may_write_to(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert (why_untrusted(file) or "").endswith(f"Fix: chmod go-w {file}")


def test_a_directory_above_it_that_others_may_write_to_unless_it_is_sticky(file: Path) -> None:
    file.parent.chmod(0o777)
    assert (why_untrusted(file) or "").endswith(f"Fix: chmod go-w {file.parent}")
    file.parent.chmod(0o1777)
    assert why_untrusted(file) is None
    assert why_untrusted(file.parent) is not None
    assert why_untrusted(file.parent, holds_entry=True) is None


@needs_root
def test_what_belongs_to_another_user_itself_or_on_the_way(file: Path, tmp_path: Path) -> None:
    os.chown(file, OTHER, OTHER)
    assert f"{file} belongs to {OTHER}. Fix: chown root {file}" in (why_untrusted(file) or "")
    os.chown(file, 0, 0)
    os.chown(file.parent, OTHER, OTHER)
    assert "chown root" in (why_untrusted(file) or "")
    os.chown(file.parent, 0, 0)
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    assert why_untrusted(link / file.name) is None
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert f"chown -h root {link}" in (why_untrusted(link / file.name) or "")


@needs_root
def test_a_group_that_others_are_in(file: Path) -> None:
    file.chmod(0o664)
    assert why_untrusted(file) is None, "root's own group"
    os.chown(file, 0, OTHER)
    assert "chmod go-w" in (why_untrusted(file) or "")


def test_who_only_looks_is_warned_and_who_acts_is_refused(file: Path, tmp_path: Path) -> None:
    file.chmod(0o666)
    environ = {"GPUKEEPER_STATE": str(tmp_path / "state"), "PATH": os.environ["PATH"]}
    assert any("chmod go-w" in words for words in load_policy(file).warnings)
    open_session(file, write=False, environ=environ).close()
    with pytest.raises(PolicyError, match="chmod go-w") as refused:
        open_session(file, write=True, environ=environ)
    assert refused.value.exit_code == 10
    file.chmod(0o644)
    open_session(file, write=True, environ=environ).close()


def test_exemptions_from_a_file_that_others_can_write_are_not_obeyed_either(file: Path) -> None:
    file.write_text("scope: {host: {}}\nexemptions_from: more.yaml\n")
    more = file.with_name("more.yaml")
    more.write_text("[]\n")
    more.chmod(0o666)
    assert [str(more) in one for one in load_policy(file).untrusted] == [True]


# State


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o777])
def test_a_state_directory_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(LedgerError, match="chmod"):
        open_ledger(folder / "ledger.db", write=True)
    assert list(folder.iterdir()) == []


@needs_root
def test_a_directory_as_earlier_versions_made_it_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o750)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_root
def test_another_users_state_is_not_read_either(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    open_ledger(folder / "ledger.db", write=True).close()
    os.chown(folder, OTHER, OTHER)
    for write in (True, False):
        with pytest.raises(LedgerError, match="chown root"):
            open_ledger(folder / "ledger.db", write=write)


def test_a_lock_on_the_directory_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0)
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="has locked the directory"):
            open_ledger(folder / "ledger.db", write=True)
    finally:
        os.close(fd)
    open_ledger(folder / "ledger.db", write=True).close()
