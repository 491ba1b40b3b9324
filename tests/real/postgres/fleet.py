"""A fleet database with machines, and ledgers that are written while their shippers run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from gpukeeper.ledger.copy.admin import add_machine, initialize
from gpukeeper.ledger.copy.shipper import CopySettings, Shipper
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.meta import ensure_identity
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.event import Complaint, Event, Noticed
from gpukeeper.model.subject import Ref, State
from tests.real.postgres.server import Server

PATIENCE = 120.0  # seconds; a crowded machine is slow, and a test that waits less finds only that


@dataclass
class FleetDatabase:
    server: Server
    folder: Path
    name: str
    secrets: dict[str, Path] = field(default_factory=dict)

    def initialize(self) -> None:
        with self.connect() as connection:
            initialize(connection, self.folder / "web.password", None)
        self.secrets["gpukeeper_web"] = self.folder / "web.password"

    def add(self, machine: str) -> CopySettings:
        secret = self.folder / f"{machine}.password"
        with self.connect() as connection:
            role = add_machine(connection, machine, secret)
        self.secrets[role] = secret
        return self.settings(machine)

    def settings(self, machine: str, **more: Any) -> CopySettings:
        role = f"gpukeeper_machine_{machine}"
        address = self.server.address(role, self.name)
        return CopySettings(address=address, machine=machine, password_file=str(self.secrets[role]), **more)

    def connect(self, role: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """As a machine's role: with its password."""
        if role == "postgres":
            return self.server.connect(database=self.name)
        return self.server.connect(role, self.name, password=self.secrets[role].read_text().strip())

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self.server.sql(statement, *values, database=self.name)

    def lines(self, machine: str) -> list[tuple[int, str]]:
        """Numbers and words of its complaints, in order; a number that is there twice is in the list twice."""
        found = self.sql(
            "SELECT line, body ->> 'what' FROM gpukeeper.lines WHERE machine = %s AND type = 'complaint' "
            "ORDER BY ledger, line",
            machine,
        )
        return [(int(line), what) for line, what in found]


@dataclass
class Machine:
    """A ledger in a directory, and what was written to it."""

    name: str
    ledger: SqliteLedger

    @classmethod
    def create(cls, folder: Path, name: str) -> Machine:
        state = folder / name
        state.mkdir(mode=0o700)
        made = cls(name, open_ledger(state / "ledger.db", write=True))
        asyncio.run(ensure_identity(made.ledger))
        return made

    @property
    def path(self) -> Path:
        return self.ledger.path

    def write(self, *words: str) -> None:
        asyncio.run(self.ledger.append([complaint(one) for one in words]))

    def append(self, *lines: Event) -> None:
        asyncio.run(self.ledger.append(lines))

    def written(self) -> list[tuple[int, str]]:
        found = asyncio.run(self.ledger.lines(LineFilter(last=None, types=("complaint",))))
        return [(seq, line.what) for seq, line in found if isinstance(line, Complaint)]

    def close(self) -> None:
        self.ledger.close()


def complaint(words: str, ago: timedelta = timedelta()) -> Complaint:
    return Complaint(at=datetime.now(UTC) - ago, what=words)


def noticed(name: str, owner: str = "ann") -> Noticed:
    ref = Ref("docker", "node-1", "container", name, f"uid-{name}")
    return Noticed(at=datetime.now(UTC), ref=ref, owner=owner, incarnation="1", state=State.RUNNING)


def a_shipper(settings: CopySettings, machine: Machine, **more: Any) -> Shipper:
    shipper = Shipper(settings, machine.path, **more)
    shipper.start()
    return shipper


def wait_for(condition: Callable[[], object], words: str, patience: float = PATIENCE) -> None:
    """The programs are real, and so is their time."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"not within {patience:.0f} s: {words}"
        time.sleep(0.05)


def wait_until_shipped(database: FleetDatabase, machine: Machine) -> None:
    written = machine.written()
    question = "SELECT count(*) FROM gpukeeper.lines WHERE machine = %s AND type = 'complaint'"
    wait_for(lambda: database.sql(question, machine.name)[0][0] >= len(written), f"all lines of {machine.name}")
    assert database.lines(machine.name) == written
