"""Where the ledger is stored: one directory for journal, state, signals, leases, archive and reserve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.model.errors import UsageError

LEDGER_FILE = "ledger.db"
RESTORING_FILE = "restore-not-finished"  # beside it, from the first file that a restore moves to the last
LONGEST_SOCKET_PATH = 107  # bytes; the kernel has no room for more


def state_folder(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """`$GPUKEEPER_STATE`; else /var/lib/gpukeeper for root, the XDG state directory for other users."""
    if configured := environ.get("GPUKEEPER_STATE"):
        return _expanded(Path(configured)).absolute()
    if (os.geteuid() if uid is None else uid) == 0:
        return Path("/var/lib/gpukeeper")
    # According to the XDG specification a relative path there is ignored.
    xdg = environ.get("XDG_STATE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or _expanded(Path("~"))) / ".local" / "state"
    return base / "gpukeeper"


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"uid {os.getuid()} has no home directory (HOME is not set, and the user database has no entry). "
            "Nothing was done. Set a directory for the ledger: GPUKEEPER_STATE=/path"
        ) from error


def ledger_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    return state_folder(environ, uid) / LEDGER_FILE


def archive_folder(ledger: Path) -> Path:
    return ledger.parent / "archive"


def evidence_folder(ledger: Path) -> Path:
    return ledger.parent / "evidence"


def reports_folder(ledger: Path) -> Path:
    """Of acceptance runs."""
    return ledger.parent / "reports"


def usage_path(ledger: Path) -> Path:
    """How GPUs were used, hour by hour."""
    return ledger.parent / "usage.db"


def socket_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Where the daemon listens: `$GPUKEEPER_SOCKET`; /run/gpukeeper for root's, which every user may query; else below
    the state directory."""
    if configured := environ.get("GPUKEEPER_SOCKET"):
        return Path(configured)
    if environ.get("GPUKEEPER_STATE"):
        return state_folder(environ, uid) / "socket"
    root = Path("/run/gpukeeper/socket")
    if root.exists() or (os.geteuid() if uid is None else uid) == 0:
        return root
    return state_folder(environ, uid) / "socket"
