"""Lines of steps over a span: from archives and the journal alike, and what a damaged archive leaves."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from gpukeeper.ledger.archive import outcome_lines, rotate
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.model.event import Closed, Event, Noticed, Restored
from gpukeeper.model.policy import LedgerKeep
from tests.unit.ledger.examples import EVAL, NOW, TRAIN, closed, noticed, passed, run

DAY = timedelta(days=1)
EVER = NOW - 400 * DAY


async def filled(path: Path) -> SqliteLedger:
    ledger = open_ledger(path, write=True)
    await ledger.append(
        [
            noticed(at=NOW - 50 * DAY),
            closed("old", at=NOW - 40 * DAY),
            passed(pass_id=1, at=NOW - 40 * DAY),
            Restored(at=NOW - 39 * DAY, ref=EVAL, evidence="", result="restored"),
            closed("new", TRAIN, at=NOW - DAY),
            noticed(TRAIN, NOW - DAY / 2),
            noticed(EVAL, NOW - DAY / 2),
        ]
    )
    return ledger


async def found(ledger: SqliteLedger, since: datetime = EVER, until: datetime = NOW) -> tuple[list[Event], list[str]]:
    told: list[str] = []
    lines = await ledger.read(lambda c: list(outcome_lines(c, ledger.path, since, until, told.append)))
    return lines, told


def test_archived_lines_count_like_those_of_the_journal(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    async def do() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        before, _ = await found(ledger)
        assert [type(line) for line in before] == [Noticed, Closed, Restored, Closed, Noticed, Noticed]
        assert (await rotate(ledger, LedgerKeep(), NOW)).lines == 4
        assert (await found(ledger))[0] == before
        young, _ = await found(ledger, NOW - 30 * DAY)
        assert [type(line) for line in young] == [Closed, Noticed], "of what no step ended in that time nothing is read"
        ledger.close()

    run(do())


def test_a_damaged_archive_is_reported_and_the_rest_counts(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    async def do() -> None:
        ledger = await filled(tmp_path / "ledger.db")
        await rotate(ledger, LedgerKeep(), NOW)
        (archive,) = (tmp_path / "archive").glob("*.gz")
        archive.write_bytes(archive.read_bytes()[:-40])
        lines, told = await found(ledger)
        assert [type(line) for line in lines][-3:] == [Closed, Noticed, Noticed]
        assert len(told) == 1
        assert archive.name in told[0]
        ledger.close()

    run(do())
