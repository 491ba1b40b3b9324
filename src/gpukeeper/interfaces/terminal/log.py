"""Log lines of long-running commands: each begins with its time in UTC, unless the systemd journal adds one itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from gpukeeper.interfaces.terminal.messages import print_message


def log(words: str) -> None:
    """On stderr."""
    stamp = stamped(sys.stderr, datetime.now(UTC))
    print_message("\n".join(stamp + line for line in words.split("\n")))


def stamped(stream: TextIO, at: datetime, environ: Mapping[str, str] = os.environ) -> str:
    """The prefix of a line of that time on that stream."""
    return "" if goes_to_journal(stream, environ) else f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} "


def goes_to_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """systemd names the socket of its journal in JOURNAL_STREAM, which is inherited: only the stream that is this
    socket goes there, and one that was redirected does not."""
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"
