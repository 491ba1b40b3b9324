"""The ledger of this machine, opened for commands that only read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.paths import ledger_path


@contextmanager
def opened_for_reading() -> Iterator[SqliteLedger]:
    ledger = open_ledger(ledger_path(), write=False)
    try:
        yield ledger
    finally:
        ledger.close()
