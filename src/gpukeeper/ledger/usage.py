"""How GPUs were used, in a SQLite file of its own: one row for each hour, device and holder.

Not in the ledger's file: it is neither journal nor a fold over it, is written every few minutes and may be lost
without any decision changing. A row holds one bit a minute, so recording the same minutes again changes nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpukeeper.ledger.database import open_for_reading, open_for_writing, open_in_memory, transaction, translated
from gpukeeper.ledger.lines import text
from gpukeeper.ledger.schema import USAGE
from gpukeeper.model.usage import DevicePresence, Holder, HourUse, RecordedHour, UsageFold, merged, minute_of

T = TypeVar("T")
KEPT = timedelta(days=400)  # thirteen months: a month can be compared with the same one of the year before
_MASKS = ("active", "idle", "unknown", "free")
_PRESENCE = "d.place, d.device, d.since, d.until, d.model, d.share, d.listed"
_USES = f"""
SELECT h.hour, d.id, {_PRESENCE}, o.key, o.path, o.owner, o.class, o.grp, h.active, h.idle, h.unknown, h.free
FROM hours h JOIN devices d ON d.id = h.device JOIN holders o ON o.id = h.holder
WHERE h.hour >= ? AND h.hour < ? ORDER BY h.hour, d.id
"""  # noqa: S608 - constants only


def open_usage(path: Path, *, write: bool) -> SqliteUsage:
    """For reading nothing is created or changed; a file that is missing reads as an empty one."""
    return SqliteUsage(path, open_for_writing(path, "NORMAL", USAGE) if write else open_for_reading(path, USAGE))


class SqliteUsage:
    """Made by `open_usage`. Its own connection and thread: no pass waits for it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="usage")

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def record(self, found: UsageFold) -> None:
        await self._do(lambda c: record(c, found))

    async def prune(self, before: datetime) -> int:
        """How many rows went."""
        return await self._do(lambda c: prune(c, before))

    async def read(self, work: Callable[[UsageReader], T]) -> T:
        """In the thread of this file: a long sum must not stop the event loop."""
        return await self._do(lambda c: work(UsageReader(c)))

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def do() -> T:
            with translated(self.path):
                return work(self._connection)

        return await asyncio.wrap_future(self._thread.submit(do))


class InMemoryUsage:
    """The same for simulations: no file, no thread."""

    def __init__(self) -> None:
        self._connection = open_in_memory(USAGE)

    async def record(self, found: UsageFold) -> None:
        record(self._connection, found)

    def reader(self) -> UsageReader:
        return UsageReader(self._connection)


class UsageReader:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def hours(self, since: datetime, until: datetime, now: datetime) -> Iterator[RecordedHour]:
        """Every device in every hour in which it was there or was counted; hours that only touch the span included. As
        far as is known, a device that was there at the last look is there `now`."""
        first, end = minute_of(since) // 60, -(-minute_of(until) // 60)
        present = dict(self._devices(first, end, minute_of(now)))
        mentioned: set[tuple[int, int]] = set()
        rows = self._connection.execute(_USES, (first, end))
        for (hour, number), group in groupby(rows, key=lambda row: (row[0], row[1])):
            found = list(group)
            mentioned.add((hour, number))
            device = present.get(number) or _presence(found[0][2:9])
            yield RecordedHour(hour, device, tuple(_use(row) for row in found))
        for number, device in present.items():
            for hour in range(max(device.since // 60, first), min(-(-device.until // 60), end)):
                if (hour, number) not in mentioned:
                    yield RecordedHour(hour, device, ())

    def models(self, since: datetime, until: datetime) -> dict[str, set[str]]:
        """By place: the models of GPUs that were there."""
        found: dict[str, set[str]] = {}
        for _, device in self._devices(minute_of(since) // 60, -(-minute_of(until) // 60), 0):
            found.setdefault(device.place, set()).add(device.model)
        return found

    def oldest(self) -> int | None:
        """The first hour that is recorded."""
        found = self._connection.execute("SELECT min(hour) FROM hours").fetchone()[0]
        return None if found is None else int(found)

    def _devices(self, first: int, end: int, now: int) -> list[tuple[int, DevicePresence]]:
        until = "max(d.until, d.open * ?)"
        rows = self._connection.execute(
            f"SELECT id, place, device, since, {until}, model, share, listed FROM devices d "  # noqa: S608
            f"WHERE listed = 1 AND {until} > ? AND since < ?",
            (now, now, first * 60, end * 60),
        )
        return [(row[0], _presence(row[1:])) for row in rows]


def record(c: sqlite3.Connection, found: UsageFold) -> None:
    """Of a device that is not known nothing is recorded, nor of minutes before it was first there."""
    with transaction(c):
        for one in found.devices:
            _see_device(c, one)
        for use in found.hours:
            device = c.execute(
                "SELECT id, since, listed FROM devices WHERE place = ? AND device = ? AND open = 1",
                (text(use.place), text(use.device)),
            ).fetchone()
            if device is not None:
                known = use if not device[2] else _from(use, device[1])
                if known.minutes:
                    _merge(c, known, device[0], _holder_id(c, use.holder))
        for place, name in found.absent:
            c.execute(
                "UPDATE devices SET open = 0 WHERE place = ? AND device = ? AND open = 1", (text(place), text(name))
            )


def prune(c: sqlite3.Connection, before: datetime) -> int:
    hour = minute_of(before) // 60
    with transaction(c):
        gone = c.execute("DELETE FROM hours WHERE hour < ?", (hour,)).rowcount
        c.execute("DELETE FROM devices WHERE until < ? AND id NOT IN (SELECT device FROM hours)", (hour * 60,))
        c.execute("UPDATE devices SET since = ? WHERE since < ?", (hour * 60, hour * 60))
        c.execute("DELETE FROM holders WHERE id NOT IN (SELECT holder FROM hours)")
        c.execute("PRAGMA incremental_vacuum").fetchall()
    return gone


def _see_device(c: sqlite3.Connection, one: DevicePresence) -> None:
    """A device that nobody looked at for a while was there all the time, as far as is known: it is not measured."""
    names = (text(one.place), text(one.device))
    facts = (text(one.model), one.share, int(one.listed))
    known = c.execute("SELECT id, listed FROM devices WHERE place = ? AND device = ? AND open = 1", names).fetchone()
    if known is None:
        c.execute(
            "INSERT INTO devices (place, device, model, share, listed, since, until, open) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 1)",
            (*names, *facts, one.since, one.until),
        )
        return
    c.execute(
        "UPDATE devices SET since = min(since, ?), until = max(until, ?) WHERE id = ?", (one.since, one.until, known[0])
    )
    if one.listed or not known[1]:
        c.execute("UPDATE devices SET model = ?, share = ?, listed = ? WHERE id = ?", (*facts, known[0]))


def _from(use: HourUse, minute: int) -> HourUse:
    """Without what was before that minute."""
    mask = -1 << max(minute - use.hour * 60, 0)
    return _with_masks(use, (use.active & mask, use.idle & mask, use.unknown & mask, use.free & mask))


def _holder_id(c: sqlite3.Connection, one: Holder) -> int:
    names = (text(one.key), text(one.owner), text(one.class_), text(one.group))
    known = c.execute("SELECT id FROM holders WHERE key = ? AND owner = ? AND class = ? AND grp = ?", names).fetchone()
    if known is not None:
        return int(known[0])
    made = c.execute(
        "INSERT INTO holders (key, owner, class, grp, path) VALUES (?, ?, ?, ?, ?)", (*names, text(one.path))
    )
    return int(made.lastrowid or 0)


def _merge(c: sqlite3.Connection, use: HourUse, device: int, holder: int) -> None:
    where = (use.hour, device, holder)
    known = c.execute(
        "SELECT active, idle, unknown, free FROM hours WHERE hour = ? AND device = ? AND holder = ?", where
    ).fetchone()
    whole = use if known is None else merged(_with_masks(use, known), use)
    masks = (whole.active, whole.idle, whole.unknown, whole.free)
    if known != masks:
        c.execute("INSERT OR REPLACE INTO hours VALUES (?, ?, ?, ?, ?, ?, ?)", (*where, *masks))


def _with_masks(use: HourUse, masks: Iterable[int]) -> HourUse:
    return msgspec.structs.replace(use, **dict(zip(_MASKS, masks, strict=True)))


def _presence(row: tuple[Any, ...]) -> DevicePresence:
    place, device, since, until, model, share, listed = row
    return DevicePresence(
        place=place, device=device, since=since, until=until, model=model, share=share, listed=bool(listed)
    )


def _use(row: tuple[Any, ...]) -> HourUse:
    key, path, owner, class_, group = row[9:14]
    holder = Holder(key=key, path=path, owner=owner, class_=class_, group=group)
    return _with_masks(HourUse(hour=row[0], place=row[2], device=row[3], holder=holder), row[14:18])
