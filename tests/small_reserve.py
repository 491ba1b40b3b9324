"""A small reserve for the ledgers of tests.

Each ledger allocates 8 MiB for a full disk, and most tests make one: a run would leave gigabytes in its temporary
directories. gpukeeper has no switch for it, since no user needs one: the constant is replaced in the process of the
tests and in the one that forks commands. A command with an interpreter of its own has the reserve of a user.
"""

from __future__ import annotations

from gpukeeper.ledger import journal

USUAL = journal.RESERVE_BYTES
SMALL = 4096


def install() -> None:
    journal.RESERVE_BYTES = SMALL
