"""Which policy was in effect last, and what the last change of it changed.

The values are one row of the table `meta`, so that a change is noticed that was made while no daemon ran; the change
itself is a line of the journal, written in the same transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import datetime
from functools import partial

import msgspec

from gpukeeper.ledger import state
from gpukeeper.ledger.journal import SqliteLedger, append
from gpukeeper.model import reading
from gpukeeper.model.event import PolicyChange, PolicyChanged

_NAME = "policy"


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`values`: every setting in words. `last`: None: it has not changed since recording began."""

    digest: str
    since: datetime
    values: Mapping[str, str]
    last: PolicyChanged | None = None


async def policy_record(ledger: SqliteLedger) -> PolicyRecord | None:
    """None: no daemon has run on this ledger, or only one that did not record it."""
    return await ledger.read(_read)


async def record_policy(
    ledger: SqliteLedger, digest: str, source: str, values: Mapping[str, str], now: datetime
) -> PolicyChanged | None:
    """Writes a line if it is another policy than the last one. The first one that is recorded is no change."""
    line = await ledger.change(partial(_record, digest=digest, source=source, values=values, now=now))
    if line is not None:
        ledger.on_append((line,))
    return line


def _record(
    c: sqlite3.Connection, *, digest: str, source: str, values: Mapping[str, str], now: datetime
) -> PolicyChanged | None:
    before = _read(c)
    if before is not None and before.digest == digest:
        return None
    line = None
    if before is not None:
        line = PolicyChanged(
            at=now, digest=digest, before=before.digest, source=source, changes=differences(before.values, values)
        )
        append(c, [line])
    record = PolicyRecord(digest=digest, since=now, values=values, last=line)
    state.set_meta(c, _NAME, msgspec.json.encode(record).decode())
    return line


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[PolicyChange, ...]:
    """In the order of the policy's reference; what was taken out comes last."""
    names = dict.fromkeys((*after, *before))
    return tuple(
        PolicyChange(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def _read(c: sqlite3.Connection) -> PolicyRecord | None:
    found = state.meta(c, _NAME)
    if found is None:
        return None
    try:
        return reading.decode(str(found).encode(), type=PolicyRecord)
    except (msgspec.MsgspecError, ValueError):
        return None  # of another version: recording begins again
