"""A shipper without a database: it reports what waits, and ends at once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukeeper.ledger.copy.ship import Outbox, Position
from gpukeeper.ledger.copy.shipper import CopySettings, Shipper
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.meta import ensure_identity, remember_shipped
from gpukeeper.model.event import Complaint


def test_what_waits_is_known_without_the_database(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    ledger = open_ledger(tmp_path / "state" / "ledger.db", write=True)
    asyncio.run(ensure_identity(ledger))
    old = datetime.now(UTC) - timedelta(hours=5)
    asyncio.run(ledger.append([Complaint(at=old, what=str(n)) for n in range(10)]))
    asyncio.run(remember_shipped(ledger, 4))
    logged, failed = list[str](), threading.Event()

    def log(words: str) -> None:
        logged.append(words)
        failed.set()

    address = f"postgresql://ann@/fleet?host={tmp_path}"
    shipper = Shipper(CopySettings(address=address, machine="node-1"), ledger.path, log=log)
    shipper.start()
    assert failed.wait(60)
    shipper.stop(60)
    state = shipper.state
    ledger.close()
    assert (state.connected, state.unsent, state.failures >= 1) == (False, 6, True)
    assert state.lag is not None
    assert 5 * 3600 <= state.lag < 6 * 3600
    assert state.last_error is not None
    assert len(logged) == 1, "logged once, however often it is tried"
    assert "Lines are kept and sent later" in logged[0]


def test_the_end_of_an_outage_is_logged_once_and_when_every_line_is_copied(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    ledger = open_ledger(tmp_path / "state" / "ledger.db", write=True)
    asyncio.run(ledger.append([Complaint(at=datetime.now(UTC), what="one")]))
    logged = list[str]()
    shipper = Shipper(CopySettings(address="postgresql://", machine="node-1"), ledger.path, log=logged.append)
    shipper._position = Position(machine="node-1", ledger=1, shipped=0)
    with closing(Outbox(ledger.path)) as outbox:
        shipper._note_progress(outbox, more=False)
        assert logged == [], "nothing had failed"
        shipper._failed(ConnectionError("the server closed the connection"))
        shipper._failed(ConnectionError("the server closed the connection"))
        shipper._note_progress(outbox, more=True)
        assert len(logged) == 1, "lines are still waiting"
        shipper._note_progress(outbox, more=False)
        shipper._note_progress(outbox, more=False)
    ledger.close()
    assert logged[1:] == ["the fleet database is up to date again: every line is copied"]
