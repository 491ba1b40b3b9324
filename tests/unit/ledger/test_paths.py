"""Where the ledger lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.ledger import files
from gpukeeper.ledger.files import (
    archive_folder,
    evidence_folder,
    ledger_path,
    may_exist,
    service_state_folder,
    state_folder,
)
from gpukeeper.model.errors import UsageError


@pytest.mark.parametrize(
    ("environ", "uid", "folder"),
    [
        ({}, 0, "/var/lib/gpukeeper"),
        ({"HOME": "/home/ann"}, 1000, "/home/ann/.local/state/gpukeeper"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "/data/ann"}, 1000, "/data/ann/gpukeeper"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "relative"}, 1000, "/home/ann/.local/state/gpukeeper"),
        ({"HOME": "/root"}, 0, "/var/lib/gpukeeper"),
        ({"HOME": "/root", "XDG_STATE_HOME": "/data/state"}, 0, "/data/state/gpukeeper"),
        ({"HOME": "/root", "XDG_STATE_HOME": "relative"}, 0, "/var/lib/gpukeeper"),
        ({"GPUKEEPER_STATE": "/srv/keeper", "XDG_STATE_HOME": "/data/ann"}, 1000, "/srv/keeper"),
        ({"GPUKEEPER_STATE": "/srv/keeper"}, 0, "/srv/keeper"),
    ],
)
def test_the_state_directory(environ: dict[str, str], uid: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if environ.get("XDG_STATE_HOME"):
        monkeypatch.setattr(files, "may_exist", lambda path: False)  # no daemon of root was ever here
    assert state_folder(environ, uid) == Path(folder)
    assert ledger_path(environ, uid) == Path(folder) / "ledger.db"


def test_what_roots_daemon_recorded_is_found_whatever_a_shell_of_root_has_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = {"HOME": "/root", "XDG_STATE_HOME": "/data/state"}
    monkeypatch.setattr(files, "ROOT_STATE", tmp_path / "gpukeeper")
    assert state_folder(environ, 0) == Path("/data/state/gpukeeper")
    assert service_state_folder(environ) == tmp_path / "gpukeeper"
    assert service_state_folder({**environ, "GPUKEEPER_STATE": "/srv/keeper"}) == Path("/srv/keeper")
    (tmp_path / "gpukeeper").mkdir()
    assert state_folder(environ, 0) == tmp_path / "gpukeeper"
    assert state_folder({**environ, "GPUKEEPER_STATE": "/srv/keeper"}, 0) == Path("/srv/keeper")


@pytest.mark.parametrize("environ", [{}, {"GPUKEEPER_STATE": "~/keeper"}])
def test_a_uid_without_a_home_directory_is_told_what_to_set(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as any uid."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(UsageError, match=r"uid 54321 has no home directory.*GPUKEEPER_STATE=/path"):
        state_folder(environ, 54321)
    assert state_folder({"GPUKEEPER_STATE": "/srv/keeper"}, 54321) == Path("/srv/keeper")


def test_archive_and_evidence_lie_beside_the_ledger() -> None:
    assert archive_folder(Path("/s/ledger.db")) == Path("/s/archive")
    assert evidence_folder(Path("/s/ledger.db")) == Path("/s/evidence")


def test_a_file_in_a_closed_directory_may_exist(tmp_path: Path) -> None:
    """Root may read everything, so the kernel's answer is played."""

    class Closed(type(tmp_path)):  # type: ignore[misc]
        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            raise PermissionError(13, "Permission denied")

    assert may_exist(Closed(tmp_path / "socket"))
    assert not may_exist(tmp_path / "socket")
    assert not may_exist(tmp_path / "file" / "socket")
    assert may_exist(tmp_path)
