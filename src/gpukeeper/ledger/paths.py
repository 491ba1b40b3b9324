"""Where the ledger is stored: one directory for journal, state, signals, leases, archive and reserve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.model.errors import UsageError

LEDGER_FILE = "ledger.db"
RESTORING_FILE = "restore-not-finished"  # beside it, from the first file that a restore moves to the last
ROOT_SOCKET = Path("/run/gpukeeper/socket")  # of root's daemon
ROOT_STATE = Path("/var/lib/gpukeeper")
LONGEST_SOCKET_PATH = 107  # bytes; the kernel has no room for more


def state_folder(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """`$GPUKEEPER_STATE`; else the XDG state directory. For root it is /var/lib/gpukeeper, unless root has set
    XDG_STATE_HOME and this machine has no such directory: what root's daemon has recorded is always found."""
    if configured := environ.get("GPUKEEPER_STATE"):
        return _expanded(Path(configured)).absolute()
    # According to the XDG specification a relative path there is ignored.
    xdg = environ.get("XDG_STATE_HOME", "")
    given = Path(xdg) if xdg.startswith("/") else None
    if (os.geteuid() if uid is None else uid) == 0 and (given is None or may_exist(ROOT_STATE)):
        return ROOT_STATE
    return (given or Path(environ.get("HOME") or _expanded(Path("~"))) / ".local" / "state") / "gpukeeper"


def service_state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Of a service that root sets up: it has root's environment only in part."""
    return state_folder({name: value for name, value in environ.items() if name == "GPUKEEPER_STATE"}, 0)


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


def socket_path() -> Path:
    """Where the daemon listens: `$GPUKEEPER_SOCKET`; /run/gpukeeper for root's, which every user may query; else below
    the state directory."""
    if configured := os.environ.get("GPUKEEPER_SOCKET"):
        return Path(configured)
    if not os.environ.get("GPUKEEPER_STATE") and (may_exist(ROOT_SOCKET) or os.geteuid() == 0):
        return ROOT_SOCKET
    return state_folder() / "socket"


def may_exist(path: Path) -> bool:
    """Also if its directory is closed to us: using it reports that."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True
