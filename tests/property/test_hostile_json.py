"""JSON that is valid and hostile: nested 100,000 levels deep, numbers with 100,000 digits, the same key twice.

In whatever gpukeeper reads of files that others may have written: reports, backups, archives, results for `--resume`.
"""

from __future__ import annotations

import gzip
import re
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gpukeeper.acceptance.reports import legacy
from gpukeeper.acceptance.reports.formats import read_report, read_samples
from gpukeeper.backtest.comparison import KeptResults
from gpukeeper.ledger import archive, backup
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, LedgerError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DEEP, DIGITS = 100_000, 100_000
HOSTILE = {
    "lists": b"[" * DEEP + b"]" * DEEP,
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a number": b"9" * DIGITS,
    "an exponent": b"1e" + b"9" * DIGITS,
    "a fraction": b"0." + b"1" * DIGITS,
}
KEYS = ("schema", "run", "unknown", "files", "made", "started", "findings", "timeline", "seq", "line")


def documents() -> list[bytes]:
    """Each value alone, and as each field; every key twice."""
    found = list(HOSTILE.values())
    found += [b'{"%s":%s}' % (key.encode(), value) for key in KEYS for value in HOSTILE.values()]
    schemas = (b"gpukeeper/acceptance-report/v1", b"gpukeeper/ledger-backup/v1")
    found += [b'{"schema":"%s","unknown":%s}' % (schema, value) for schema in schemas for value in HOSTILE.values()]
    return [*found, b"{" + b",".join(b'"%s":1,"%s":{}' % (key.encode(), key.encode()) for key in KEYS) + b"}"]


READERS: dict[str, Callable[[bytes], object]] = {
    "a value": reading.decode,
    "a report": lambda text: read_report(text, "report.json"),
    "samples": lambda text: read_samples(text, "samples.json"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_declares_what_it_cannot_read(name: str) -> None:
    """Any other exception, RecursionError among them, ends the command in a traceback."""
    refused = 0
    for text in documents():
        try:
            READERS[name](text)
        except (KeeperError, ValueError):
            refused += 1
    assert refused
    assert reading.decode(b'{"a":1,"a":2}') == {"a": 2}
    assert not any(legacy.is_ours("results.json", text) for text in documents())


@pytest.mark.parametrize("number", range(len(documents())))
def test_a_backup_and_an_archive_with_it_are_refused(tmp_path: Path, number: int) -> None:
    """In `ledger restore` with nothing changed."""
    text = documents()[number]
    made = tarred(tmp_path / "backup.tar", [entry(backup.MANIFEST, text)])
    packed = tmp_path / "journal-20260101.jsonl.gz"
    packed.write_bytes(gzip.compress(text + b"\n" + text))
    for read in (lambda: backup.read_back(made), lambda: archive.verify(packed)):
        with pytest.raises(LedgerError, match=re.escape(str(tmp_path))):
            read()


def long_names() -> bytes:
    """Each entry says the name of the next: tarfile follows them by recursion."""
    return entry("././@LongLink", b"name\0", tarfile.GNUTYPE_LONGNAME) * 5000


def huge_header() -> bytes:
    """Its values have the size that it says: a terabyte, of which the file has nothing."""
    return entry("head", b"", tarfile.XHDTYPE, size=2**40)


def bad_number() -> bytes:
    return entry("head", b"12 size=abc\n", tarfile.XHDTYPE) + entry(backup.MANIFEST, b"{}")


@pytest.mark.parametrize("make", [long_names, huge_header, bad_number])
@pytest.mark.parametrize("first", [True, False], ids=["at the beginning", "after the description"])
def test_headers_of_a_backup_that_python_cannot_read_are_an_error_that_names_it(
    tmp_path: Path, make: Callable[[], bytes], first: bool
) -> None:
    about = msgspec.json.encode(
        backup.Manifest(machine="m", version="1", made=NOW, files={"ledger.db": backup.Stored(size=1, sha256="x")})
    )
    made = tarred(tmp_path / "backup.tar", [make()] if first else [entry(backup.MANIFEST, about), make()])
    with made.open("r+b") as file:
        file.truncate(made.stat().st_size + 2**30)  # sparse
    with pytest.raises(LedgerError, match=re.escape(str(made))):
        backup.read_back(made)


def entry(name: str, content: bytes, kind: bytes = tarfile.REGTYPE, size: int | None = None) -> bytes:
    head = tarfile.TarInfo(name)
    head.size, head.type = len(content) if size is None else size, kind
    return head.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def tarred(path: Path, entries: list[bytes]) -> Path:
    path.write_bytes(b"".join(entries) + bytes(1024))
    return path


@pytest.mark.parametrize(
    "results",
    [b"\x91" * DEEP + b"\x90", b"\x91\x91\x81\xa1x" + b"\x91" * DEEP + b"\xc0", b"\xc1", b"\xa1\xff"],
    ids=["deep", "deep in an unknown field", "not msgpack", "not UTF-8"],
)
def test_results_for_resume_that_cannot_be_read_are_computed_again(tmp_path: Path, results: bytes) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "resume.db"
    with KeptResults(path, "about") as kept:
        kept.or_else((), lambda _: list)()
    with closing(sqlite3.connect(path)) as file, file:
        assert file.execute("UPDATE parts SET results = ?", (results,)).rowcount == 1
    with KeptResults(path, "about") as kept:
        assert kept.or_else((), lambda _: lambda: [()])() == [()]
        assert kept.taken == 0
