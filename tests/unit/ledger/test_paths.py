"""Where the ledger lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.ledger.paths import archive_folder, evidence_folder, ledger_path, state_folder


@pytest.mark.parametrize(
    ("environ", "uid", "folder"),
    [
        ({}, 0, "/var/lib/gpukeeper"),
        ({"HOME": "/home/ann"}, 1000, "/home/ann/.local/state/gpukeeper"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "/data/ann"}, 1000, "/data/ann/gpukeeper"),
        ({"HOME": "/home/ann", "XDG_STATE_HOME": "relative"}, 1000, "/home/ann/.local/state/gpukeeper"),
        ({"HOME": "/root", "XDG_STATE_HOME": "/data/root"}, 0, "/var/lib/gpukeeper"),
        ({"GPUKEEPER_STATE": "/srv/keeper", "XDG_STATE_HOME": "/data/ann"}, 1000, "/srv/keeper"),
        ({"GPUKEEPER_STATE": "/srv/keeper"}, 0, "/srv/keeper"),
    ],
)
def test_the_state_folder(environ: dict[str, str], uid: int, folder: str) -> None:
    assert state_folder(environ, uid) == Path(folder)
    assert ledger_path(environ, uid) == Path(folder) / "ledger.db"


def test_archive_and_evidence_lie_beside_the_ledger() -> None:
    assert archive_folder(Path("/s/ledger.db")) == Path("/s/archive")
    assert evidence_folder(Path("/s/ledger.db")) == Path("/s/evidence")
