"""The file of GPU hours: recording again changes nothing, gaps stay open, old hours go."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.ledger.usage import KEPT, SqliteUsage, open_usage
from gpukeeper.model.errors import LedgerError
from gpukeeper.model.series import FREE, DevicePresence, Holder, HourUse, RecordedHour, UsageFold, minute_of, moment_of

NINE = datetime(2026, 11, 16, 9, tzinfo=UTC)
HOUR = minute_of(NINE) // 60
ANN = Holder(key="k1", path="docker/node-1/train", owner="ann", class_="docker", group="lab")


@pytest.fixture
def usage(tmp_path: Path) -> Iterator[SqliteUsage]:
    tmp_path.chmod(0o700)
    made = open_usage(tmp_path / "usage.db", write=True)
    yield made
    made.close()


def gpu(since: int = 0, until: int = 60, **more: object) -> DevicePresence:
    first = HOUR * 60
    facts = {"place": "node-1", "device": "GPU-0", "model": "H100", "since": first + since, "until": first + until}
    return DevicePresence(**(facts | more))  # type: ignore[arg-type]


def hour(holder: Holder = ANN, **masks: int) -> HourUse:
    return HourUse(hour=HOUR, place="node-1", device="GPU-0", holder=holder, **masks)


def record(usage: SqliteUsage, *hours: HourUse, devices: tuple[DevicePresence, ...] = (), **more: object) -> None:
    asyncio.run(usage.record(UsageFold(devices=devices or (gpu(),), hours=hours, **more)))  # type: ignore[arg-type]


def read(usage: SqliteUsage, now: datetime = NINE) -> list[RecordedHour]:
    since, until = NINE - timedelta(hours=2), NINE + timedelta(hours=3)
    return asyncio.run(usage.read(lambda reader: list(reader.hours(since, until, now))))


def test_what_was_recorded_is_read(usage: SqliteUsage) -> None:
    record(usage, hour(active=0b11, idle=0b100), hour(FREE, free=0b1000))
    assert read(usage) == [RecordedHour(HOUR, gpu(), (hour(active=0b11, idle=0b100), hour(FREE, free=0b1000)))]


def test_recording_twice_is_recording_once(usage: SqliteUsage) -> None:
    for _ in range(2):
        record(usage, hour(active=0b11, unknown=0b100), hour(FREE, free=0b1000))
    assert read(usage) == [RecordedHour(HOUR, gpu(), (hour(active=0b11, unknown=0b100), hour(FREE, free=0b1000)))]


def test_a_late_measurement_replaces_not_measured_and_never_the_other_way_round(usage: SqliteUsage) -> None:
    record(usage, hour(unknown=0b111))
    record(usage, hour(active=0b001, idle=0b010))
    record(usage, hour(unknown=0b111))
    assert read(usage)[0].uses == (hour(active=0b001, idle=0b010, unknown=0b100),)


def test_hours_without_the_daemon_are_there_and_empty(usage: SqliteUsage) -> None:
    record(usage, hour(active=1))
    record(usage, devices=(gpu(120, 130),))
    assert [(one.hour - HOUR, one.device.in_hour(one.hour).bit_count(), len(one.uses)) for one in read(usage)] == [
        (0, 60, 1),
        (1, 60, 0),
        (2, 10, 0),
    ]


def test_while_no_daemon_runs_the_time_until_now_is_not_measured(usage: SqliteUsage) -> None:
    record(usage, hour(active=1), devices=(gpu(0, 30),))
    found = read(usage, NINE + timedelta(minutes=90))
    assert [one.device.in_hour(one.hour).bit_count() for one in found] == [60, 30]


def test_a_gpu_that_is_gone_is_not_counted_until_it_is_back(usage: SqliteUsage) -> None:
    record(usage, hour(active=1), devices=(gpu(0, 10),))
    record(usage, absent=(("node-1", "GPU-0"),), devices=(gpu(0, 10),))
    record(usage, hour(active=1 << 5 | 1 << 40), devices=(gpu(40, 50),))
    found = read(usage, NINE + timedelta(minutes=50))
    assert [one.device.in_hour(HOUR).bit_count() for one in found] == [10, 10]
    assert [one.uses[0].active for one in found] == [1, 1 << 40], "minute 5 is of the time before"


def test_a_device_that_is_listed_later_stays_the_same_one(usage: SqliteUsage) -> None:
    record(usage, hour(active=1), devices=(gpu(0, 1, listed=False, model="", share=1.0),))
    record(usage, hour(active=3), devices=(gpu(0, 2),))
    assert read(usage) == [RecordedHour(HOUR, gpu(0, 2), (hour(active=3),))]


def test_a_device_that_nobody_lists_has_no_gaps(usage: SqliteUsage) -> None:
    record(usage, hour(active=1), devices=(gpu(0, 1, listed=False),))
    assert [(one.hour, one.device.listed) for one in read(usage, NINE + timedelta(days=1))] == [(HOUR, False)]


def test_old_hours_go_and_what_only_they_named(usage: SqliteUsage) -> None:
    record(usage, hour(active=1), devices=(gpu(0, 60),))
    later = HourUse(
        hour=HOUR + 24 * 500, place="node-1", device="GPU-1", active=1, holder=Holder(key="k2", owner="bob")
    )
    second = DevicePresence(place="node-1", device="GPU-1", since=later.hour * 60, until=later.hour * 60 + 5)
    record(usage, later, devices=(second,))
    assert asyncio.run(usage.prune(moment_of(later.hour * 60) - KEPT)) == 1
    with sqlite3.connect(usage.path) as c:
        assert c.execute("SELECT device FROM devices").fetchall() == [("GPU-1",)]
        assert c.execute("SELECT owner FROM holders").fetchall() == [("bob",)]
    c.close()


def test_a_missing_file_reads_as_empty_and_is_not_created(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    reading = open_usage(tmp_path / "usage.db", write=False)
    assert read(reading) == []
    reading.close()
    assert not (tmp_path / "usage.db").exists()


def test_a_ledger_is_not_taken_for_it(tmp_path: Path) -> None:
    from gpukeeper.ledger.journal import open_ledger

    tmp_path.chmod(0o700)
    open_ledger(tmp_path / "ledger.db", write=True).close()
    with pytest.raises(LedgerError, match="another program"):
        open_usage(tmp_path / "ledger.db", write=True)


def test_what_was_recorded_survives_an_end_without_goodbye(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = open_usage(tmp_path / "usage.db", write=True)
    record(first, hour(active=0b11))
    second = open_usage(tmp_path / "usage.db", write=True)  # the first one was killed: its file is as it is
    record(second, hour(active=0b110))
    assert read(second)[0].uses == (hour(active=0b111),)
    first.close()
    second.close()
