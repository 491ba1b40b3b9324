"""Hours of GPUs in the fleet database: what is read there is what the machine recorded."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from gpukeeper.ledger.copy.ship import recorded_hours, usage_rows
from gpukeeper.ledger.usage import UsageReader
from gpukeeper.model.series import DevicePresence, Holder, HourUse, RecordedHour, UsageFold, minute_of
from tests.usage_in_memory import InMemoryUsage

NINE = datetime(2026, 11, 16, 9, tzinfo=UTC)
HOUR = minute_of(NINE) // 60
NOW = NINE + timedelta(hours=100)
ANN = Holder(key="k1", path="docker/node-1/train", owner="ann", class_="docker", group="lab")
BOB = Holder(key="k1", path="docker/node-1/train", owner="bob", class_="docker", group="lab")


def recorded() -> UsageReader:
    usage = InMemoryUsage()
    device = DevicePresence(place="node-1", device="GPU-0", since=HOUR * 60, until=(HOUR + 40) * 60, model="H100")
    hours = [
        HourUse(hour=HOUR + number, place="node-1", device="GPU-0", holder=holder, active=0b11 << number % 50)
        for number in range(0, 40, 2)
        for holder in (ANN, BOB)
    ]
    asyncio.run(usage.record(UsageFold(devices=(device,), hours=tuple(hours))))
    return usage.reader()


def shipped(reader: UsageReader, most: int) -> tuple[dict[tuple[datetime, str, str], str], int]:
    """All rows as a database keeps them, and the number of calls that this took."""
    table: dict[tuple[datetime, str, str], str] = {}
    since, calls = None, 0
    while True:
        rows = list(usage_rows(reader, since, NOW, most))
        calls += 1
        table |= {(row.hour, row.device, row.holder): row.body.decode() for row in rows}
        until = max(row.hour for row in rows)
        if since is not None and until - timedelta(hours=3) <= since:
            return table, calls
        since = until - timedelta(hours=3)


def key(one: RecordedHour) -> tuple[int, str]:
    return one.hour, one.device.device


def test_all_hours_arrive_in_pieces_and_are_the_same() -> None:
    reader = recorded()
    wanted = sorted(reader.hours(NINE, NOW, NOW), key=key)
    for most in (1, 10, 100_000):
        table, calls = shipped(reader, most)
        found = sorted(
            recorded_hours((hour, device, body) for (hour, device, _), body in sorted(table.items())), key=key
        )
        assert [(one.hour, set(one.uses)) for one in found] == [(one.hour, set(one.uses)) for one in wanted]
        assert calls > 5 if most == 1 else calls >= 2


def test_nothing_is_sent_where_nothing_is_recorded() -> None:
    assert list(usage_rows(InMemoryUsage().reader(), None, NOW, 10)) == []


def test_rows_that_are_not_ours_are_left_out() -> None:
    assert list(recorded_hours([(NINE, "GPU-0", "{}"), (NINE, "GPU-1", "null")])) == []
