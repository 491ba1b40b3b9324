"""Marks of nodes in the ledger of this machine: written before and after each change, and read for the register."""

from __future__ import annotations

import asyncio
import getpass
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpukeeper.acceptance.fleet.node_marks import MarkPlan
from gpukeeper.acceptance.launchers.archive import stored_runs
from gpukeeper.acceptance.launchers.marks import Marked
from gpukeeper.acceptance.launchers.recording import Cause, lines_after, lines_before
from gpukeeper.interfaces.terminal.local_ledger import opened_for_reading
from gpukeeper.ledger.archive_file import read_archive
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.paths import archive_folder, ledger_path, reports_folder
from gpukeeper.model.errors import KeeperError, LedgerError
from gpukeeper.model.event import Event, NodeMarked, NodeTested
from gpukeeper.model.policy import MarkSettings
from gpukeeper.views.register import TYPES, Register, lines_of_run, register, warnings_about
from gpukeeper.wiring.clock import SystemClock

NOT_BEGUN = "Nothing was changed on the cluster, because the change could not be recorded first."


def cause() -> Cause:
    """This user, now."""
    return Cause(by=getpass.getuser(), step=secrets.token_hex(8))


@dataclass
class MarkRecord:
    """One command that changes marks."""

    ledger: SqliteLedger
    cause: Cause
    place: str = ""
    _begun: list[NodeMarked] = field(default_factory=list)

    async def begin(self, plan: MarkPlan) -> None:
        """Durable when it returns."""
        lines = list(lines_before(plan.changes, self.place, self.cause, SystemClock().now()))
        try:
            await self.ledger.append(lines)
        except LedgerError as problem:
            raise LedgerError(f"{problem} {NOT_BEGUN}") from problem
        self._begun = lines

    def end(self, nodes: Iterable[Marked]) -> tuple[str, ...]:
        """What could not be recorded; what was changed stays changed."""
        lines = list(lines_after(self._begun, nodes, SystemClock().now()))
        try:
            asyncio.run(self.ledger.append(lines))
        except LedgerError as problem:
            names = ", ".join(one.ref.name for one in lines if one.ref is not None and one.result != "unchanged")
            return (f"The nodes were changed ({names}), but the result is not in the ledger: {problem}",)
        return ()


@contextmanager
def recording(why: Cause) -> Iterator[MarkRecord]:
    """A ledger that cannot be written is an error before anything is changed."""
    try:
        ledger = open_ledger(ledger_path(), write=True)
    except LedgerError as problem:
        raise LedgerError(f"{problem} {NOT_BEGUN}") from problem
    try:
        yield MarkRecord(ledger, why)
    finally:
        ledger.close()


def read_register(settings: MarkSettings, report_dir: Path | None = None) -> Register:
    """From the ledger, its archives, and the reports of runs that were collected."""
    unread: list[str] = []
    with opened_for_reading() as ledger:
        lines = [line for _, line in asyncio.run(ledger.lines(last=None, types=TYPES))]
    lines += _archived(archive_folder(ledger.path), unread)
    found = register(
        lines,
        SystemClock().now(),
        repeats=settings.repeats,
        within=settings.repeats_within,
        collected=_collected(report_dir or reports_folder(ledger.path), unread),
    )
    return msgspec.structs.replace(found, unread=tuple(unread))


def _archived(folder: Path, unread: list[str]) -> Iterator[Event]:
    for path in sorted(folder.glob("journal-*.gz")):
        try:
            yield from (line for _, line in read_archive(path, TYPES))
        except LedgerError as problem:
            unread.append(str(problem))


def _collected(folder: Path, unread: list[str]) -> Iterator[NodeTested]:
    for _, found in stored_runs(folder):
        if isinstance(found, KeeperError):
            unread.append(str(found))
        elif found is not None:
            yield from lines_of_run(found)


def repeated(nodes: Collection[str], settings: MarkSettings) -> tuple[str, ...]:
    """In words: what was taken out again and again. A ledger that cannot be read prevents nothing."""
    try:
        found = read_register(settings)
    except KeeperError as problem:
        return (f"How often these nodes were taken out is unknown: {problem}",)
    more = (f"These nodes may have been taken out more often: {problem}" for problem in found.unread)
    return (*warnings_about(found, nodes), *more)
