"""Lines of programs that stay carry their time, where nobody else adds it."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from gpukeeper.interfaces.terminal.watching import goes_to_journal, stamped

AT = datetime.fromisoformat("2026-03-02T09:00:00+01:00")


def test_a_line_begins_with_its_time_in_utc(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert stamped(file, AT, {}) == "2026-03-02T08:00:00Z "


def test_only_the_stream_that_is_the_journal_has_no_time(tmp_path: Path) -> None:
    """A unit with StandardOutput=append:/var/log/… inherits the variable as well."""
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "log").open("w") as file:
        facts = os.fstat(journal.fileno())
        environ = {"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}", "INVOCATION_ID": "1"}
        assert goes_to_journal(journal, environ)
        assert stamped(journal, AT, environ) == ""
        assert stamped(file, AT, environ) == "2026-03-02T08:00:00Z "


def test_a_closed_stream_is_no_journal(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("w")
    file.close()
    assert not goes_to_journal(file, {"JOURNAL_STREAM": "1:2"})
