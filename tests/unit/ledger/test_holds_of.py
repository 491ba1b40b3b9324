"""An owner's holds over all workloads, gone ones included: the same from the file and from memory."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.ledger.in_memory import InMemoryLedger
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Event, Held, Released
from gpukeeper.model.subject import Hold, Ref

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
ONE, OTHER = (Ref("docker", "node-3", "container", name, name) for name in ("one", "other"))


def held(ref: Ref, ago: timedelta, owner: str = "ann") -> Held:
    at = NOW - ago
    return Held(at=at, ref=ref, owner=owner, by=owner, hold=Hold(owner, at, at + 9 * HOUR, devices=("GPU-0",)))


LINES: list[Event] = [
    held(ONE, 99 * HOUR),
    held(ONE, 10 * HOUR),
    Released(at=NOW - 5 * HOUR, ref=ONE, owner="ann", by="ann"),
    held(OTHER, 3 * HOUR),
    held(OTHER, 2 * HOUR, owner="bob"),
    # Removed by us, so nothing else remembers it; the count must.
    Closed(
        at=NOW - HOUR, ref=ONE, step="1.1", action=Action.REMOVE, rule="retention", result=Result.RECLAIMED, reason=""
    ),
]


def test_holds_of_an_owner_survive_what_was_held(tmp_path: Path) -> None:
    async def ask() -> None:
        on_disk, in_memory = open_ledger(tmp_path / "ledger.db", write=True), InMemoryLedger()
        for ledger in (on_disk, in_memory):
            await ledger.append(LINES)
            found = await ledger.holds_of("ann", NOW - 96 * HOUR)
            spans = {key: [(hold.at, hold.until) for hold in holds] for key, holds in found.items()}
            assert spans == {
                ONE.key: [(NOW - 10 * HOUR, NOW - 5 * HOUR)],
                OTHER.key: [(NOW - 3 * HOUR, NOW + 6 * HOUR)],
            }
            assert await ledger.holds_of("eve", NOW - 96 * HOUR) == {}
        on_disk.close()

    asyncio.run(ask())
