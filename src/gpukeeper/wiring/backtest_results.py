"""Results of a backtest in a file, so that one that was interrupted goes on where it stopped.

Each part is found by a hash of all that decides its result: an old file can never give a result of another policy, of
other recorded values or of another version of gpukeeper; it is just not used then.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import msgspec

from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.lifecycle.backtest.outcome import JudgedRun
from gpukeeper.model.errors import UsageError
from gpukeeper.model.trace import RecordedRun

KIND = 0x67706B62  # application_id of such a file
Results = list[tuple[JudgedRun, ...]]  # of some runs, in their order
Wait = Callable[[], Results]


def _bytes_of(values: object) -> bytes:
    assert isinstance(values, array), f"{type(values).__name__} in a recorded run: this is a bug"
    return values.tobytes()


_encode = msgspec.msgpack.Encoder(enc_hook=_bytes_of).encode
_decode = msgspec.msgpack.Decoder(Results).decode


class KeptResults:
    """`about`: identifies the policies, how runs are judged, and the version. Raises UsageError."""

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._about = path, about.encode()
        self.taken = 0  # parts that were not computed again

    def __enter__(self) -> KeptResults:
        self._must_be_own()
        try:
            self._file = sqlite3.connect(self._path, timeout=10)
            (kind,) = self._file.execute("PRAGMA application_id").fetchone()
            (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if kind != KIND and (kind or tables):
                raise UsageError(
                    f"{self._path} is not a file of an interrupted backtest. Name another file. Nothing was changed."
                )
            with self._file:
                self._file.execute(f"PRAGMA application_id = {KIND}")
                self._file.execute("CREATE TABLE IF NOT EXISTS parts (key BLOB PRIMARY KEY, results BLOB NOT NULL)")
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be used for --resume: {error}. Name another file.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _must_be_own(self) -> None:
        """Another user who can write it could put results there that were never computed."""
        # SQLite also reads `FILE-journal`, so other users must not be able to write to the directory.
        why = why_untrusted(self._path.absolute().parent) or why_untrusted(self._path)
        if why is not None:
            raise UsageError(
                f"{self._path} can be changed by other users, so its results are not used: {why}. Name another "
                "file, in a directory that only you can write. Nothing was changed."
            )

    def or_else(self, runs: Sequence[RecordedRun], start: Callable[[Sequence[RecordedRun]], Wait]) -> Wait:
        """The kept results of these runs. Without any, begins the work on them; its results are kept."""
        key = sha256(self._about + _encode(runs)).digest()
        found = self._file.execute("SELECT results FROM parts WHERE key = ?", (key,)).fetchone()
        if found is not None:
            with suppress(ValueError, RecursionError):  # of a damaged file: computed again
                results = _decode(found[0])
                self.taken += 1
                return lambda: results
        wait = start(runs)

        def kept() -> Results:
            computed = wait()
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", (key, _encode(computed)))
            return computed

        return kept
