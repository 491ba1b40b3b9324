"""Secrets come from files that only we can read: passwords, keys, addresses of services with their tokens."""

from __future__ import annotations

import os
from pathlib import Path

from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.model.errors import UsageError

LONGEST_SECRET = 4096  # bytes


def read_secret(path: Path) -> str:
    """The first line of a file that only we can read and no other user can change."""
    try:
        secret = read_secret_file(path, LONGEST_SECRET).partition(b"\n")[0].strip().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The secret in {path} could not be read: it is not UTF-8 text.") from error
    if not secret:
        raise UsageError(f"The file {path} contains no secret: its first line is empty.")
    return secret


def read_secret_file(path: Path, longest: int) -> bytes:
    """The first bytes of a file that only we can read and no other user can change."""
    why = why_untrusted(path)
    try:
        if why is None and path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
            why = f"{path} can be read by others (mode {path.stat().st_mode & 0o777:04o}). Fix: chmod 600 {path}"
        if why is not None:
            raise UsageError(f"The secret in {path} is not used: {why}.")
        with path.open("rb") as file:
            return file.read(longest)
    except OSError as error:
        raise UsageError(f"The secret in {path} could not be read: {error.strerror}.") from error
