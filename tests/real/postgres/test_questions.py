"""What is read from the fleet database is what the machine itself would reply: lines with every filter, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.engine.requests import DataReply, Request
from gpukeeper.interfaces.daemon.fleet_web import FleetQueries
from gpukeeper.interfaces.link import Person
from gpukeeper.interfaces.terminal.usage import read_report
from gpukeeper.ledger.copy.reader import CopyReader, CopyUnavailable, copied_ledger, copied_lines
from gpukeeper.ledger.copy.ship import UsageRow, usage_rows
from gpukeeper.ledger.copy.shipper import View
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.ledger.usage import open_usage
from gpukeeper.model import reading
from gpukeeper.model.decision import Action, Result
from gpukeeper.model.event import Closed, Complaint, Event
from gpukeeper.model.policy import Prices
from gpukeeper.model.series import DevicePresence, Holder, HourUse, UsageFold, minute_of
from gpukeeper.model.subject import Ref
from gpukeeper.views.usage_report import ReportQuery, UsageReport
from tests.real.postgres.fleet import FleetDatabase, Machine, a_shipper, noticed, wait_for

NOW = datetime.now(UTC)
NAMES = ("train", "Train", "t%in", "t_ain", 'with "quotes"', "back\\slash", "Größe", "nul\0", "a/b")
ADMIN, ANN = Person(name="eve", admin=True), Person(name="ann", admin=False)


def closed(number: int, owner: str = "ann") -> Closed:
    ref = Ref("docker", "node-1", "container", f"w{number}", f"uid-w{number}")
    return Closed(
        at=NOW - timedelta(hours=2, minutes=number),
        ref=ref,
        owner=owner,
        rule="idle",
        reason="not used",
        step=f"{number}.1",
        action=Action.STOP,
        result=Result.RECLAIMED if number % 3 else Result.REFUSED,
        gpus_back=1,
        gpu_hours=1.5,
        bytes_back=10,
    )


def some_lines() -> list[Event]:
    found: list[Event] = [noticed(name, owner) for name in NAMES for owner in ("ann", "bob")]
    found += [Complaint(at=NOW - timedelta(days=2), what=f"something about {name}") for name in NAMES]
    return [*found, *(closed(number) for number in range(9)), *(closed(number, "bob") for number in range(9, 12))]


class Usage:
    """Implements Sources."""

    def __init__(self, path: Path) -> None:
        self.usage = open_usage(path, write=True)
        first = minute_of(NOW - timedelta(hours=30)) // 60
        device = DevicePresence(
            place="node-1", device="GPU-0", since=first * 60, until=minute_of(NOW), model="H100", share=1.0
        )
        hours = tuple(
            HourUse(
                hour=first + number,
                place="node-1",
                device="GPU-0",
                holder=Holder(key=f"k{number % 3}", owner=("ann", "bob", "")[number % 3], class_="docker"),
                active=0xFF,
                idle=0xFF00,
            )
            for number in range(0, 29, 2)
        )
        asyncio.run(self.usage.record(UsageFold(devices=(device,), hours=hours)))

    def view(self) -> View | None:
        return None

    def usage_rows(self, since: datetime | None) -> list[UsageRow]:
        return asyncio.run(self.usage.read(lambda reader: list(usage_rows(reader, since, NOW, 100))))


class Sources:
    def __init__(self, usage: Usage) -> None:
        self.view, self.usage = usage.view, usage.usage_rows


@pytest.fixture
def machine(database: FleetDatabase, tmp_path: Path) -> Any:
    made = Machine.create(tmp_path, "node-1")
    made.append(*some_lines())
    usage = Usage(made.path.parent / "usage.db")
    shipper = a_shipper(database.add("node-1"), made, sources=Sources(usage))
    count = "SELECT count(*) FROM gpukeeper.lines"
    hours = "SELECT count(DISTINCT hour) FROM gpukeeper.usage"
    wait_for(lambda: database.sql(count)[0][0] == len(some_lines()), "all lines")
    wait_for(lambda: database.sql(hours)[0][0] >= 30, "all hours")
    shipper.stop()
    made.usage = usage.usage  # type: ignore[attr-defined]
    yield made
    usage.usage.close()
    made.close()


FILTERS = [
    LineFilter(),
    LineFilter(last=3),
    LineFilter(types=("outcome", "noticed"), owner="ann"),
    LineFilter(errors_only=True),
    LineFilter(since=NOW - timedelta(hours=3)),
    LineFilter(before=12, last=5),
    LineFilter(before=2**70),
    *(LineFilter(workload=name, last=1000) for name in (*NAMES[:7], "uid-train", "docker/node-1/train", "b", "", "%")),
    *(LineFilter(search=words, last=1000) for words in ("train", "%", "_", '"', "\\", "größe", "SOMETHING", "x'; --")),
    LineFilter(search="something", last=2),
    LineFilter(search="type", last=1000),
]


def test_lines_are_those_of_the_ledger(database: FleetDatabase, machine: Any) -> None:
    with database.connect("gpukeeper_web") as connection:
        for wanted in FILTERS:
            given = {name: getattr(wanted, name) for name in LineFilter.__struct_fields__}
            there = asyncio.run(machine.ledger.lines(LineFilter(**given)))
            found = copied_lines(connection, "node-1", wanted)
            assert [number for number, _ in found] == [number for number, _ in there], wanted
            if "\0" not in repr(there):
                assert [one for one in found if "nul" not in str(one)] == [
                    one for one in there if "nul" not in str(one)
                ]
        assert copied_lines(connection, "node-2", LineFilter()) == []
        assert copied_ledger(connection, "node-1").lines == len(some_lines())
        assert copied_ledger(connection, "node-9").lines == 0


def asked(database: FleetDatabase, work: Callable[[CopyReader], Any]) -> Any:
    async def do() -> Any:
        address = database.server.address("gpukeeper_web", database.name)
        reader = CopyReader(address, str(database.secrets["gpukeeper_web"]), "test")
        try:
            return await work(reader)
        finally:
            reader.close()

    return asyncio.run(do())


@pytest.mark.parametrize(("who", "person"), [(ADMIN, None), (ANN, "ann")])
def test_a_report_is_that_of_the_machine(
    database: FleetDatabase, machine: Any, who: Person, person: str | None
) -> None:
    since, until = NOW - timedelta(days=2), NOW
    request = Request(verb="report", since=since, until=until, zone="UTC")

    async def from_copy(reader: CopyReader) -> UsageReport:
        queries = FleetQueries(reader, lambda: {"node-1": None}, Prices())  # type: ignore[dict-item, return-value]
        reply = await queries.answer(who, "", request)
        assert isinstance(reply, DataReply), reply
        return reading.decode(bytes(reply.body), type=UsageReport)

    query = ReportQuery(since=since, until=until, zone="UTC", person=person)
    there = asyncio.run(read_report(machine.ledger, machine.usage, query, Prices(), NOW))
    found = asked(database, from_copy)
    assert found.total == there.total
    assert found.total.active > 0
    assert found.savings.total == there.savings.total
    assert found.savings.total.steps > 0
    for name in ("owner", "class", "model", "day"):
        assert found.by(name) == there.by(name)
    assert found.waste == there.waste


def test_steps_of_two_machines_with_the_same_number_both_count(database: FleetDatabase, tmp_path: Path) -> None:
    machines = [Machine.create(tmp_path, name) for name in ("node-1", "node-2")]
    shippers = []
    for one in machines:
        one.append(closed(1))
        shippers.append(a_shipper(database.add(one.name), one))
    wait_for(lambda: database.sql("SELECT count(*) FROM gpukeeper.lines") == [(2,)], "both lines")
    for shipper in shippers:
        shipper.stop()
    request = Request(verb="report", since=NOW - timedelta(days=1), until=NOW, zone="UTC")

    async def report(reader: CopyReader, machine: str) -> UsageReport:
        views: Any = {"node-1": None, "node-2": None}
        reply = await FleetQueries(reader, lambda: views, Prices()).answer(ADMIN, machine, request)
        assert isinstance(reply, DataReply), reply
        return reading.decode(bytes(reply.body), type=UsageReport)

    assert asked(database, lambda reader: report(reader, "")).savings.total.steps == 2
    assert asked(database, lambda reader: report(reader, "node-2")).savings.total.steps == 1
    for one in machines:
        one.close()


def test_a_reader_survives_a_restart_of_the_database(own_database: FleetDatabase) -> None:
    async def story(reader: CopyReader) -> None:
        def one(connection: Any) -> Any:
            return connection.execute("SELECT 1").fetchone()

        assert await reader.ask(one) == (1,)
        own_database.server.stop("immediate")
        with pytest.raises(CopyUnavailable) as refused:
            await reader.ask(one)
        assert str(refused.value)
        with pytest.raises(CopyUnavailable) as refused:
            await reader.ask(one)
        assert not refused.value.begun
        own_database.server.start()
        assert await reader.ask(one) == (1,)

    asked(own_database, story)
