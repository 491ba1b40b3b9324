"""How GPUs were used, in a SQLite file of its own: one row for each hour, device and holder.

Not in the ledger's file: it is neither journal nor a fold over it, is written every few minutes and may be lost
without any decision changing. A row holds one bit a minute, so recording the same minutes again changes nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpukeeper.ledger.database import USAGE, open_for_reading, open_for_writing, shrink_file, transaction, translated
from gpukeeper.ledger.lines import text
from gpukeeper.model.series import DevicePresence, Holder, HourUse, RecordedHour, UsageFold, merged_uses, minute_of

T = TypeVar("T")
KEPT = timedelta(days=400)  # thirteen months: a month can be compared with the same one of the year before
_MASKS = ("active", "idle", "unknown", "free")
_USES = "SELECT device, holder, active, idle, unknown, free FROM hours WHERE hour = ? ORDER BY device, holder"
_EVERY_DEVICE = "SELECT id, place, device, since, until, model, share, listed FROM devices"
_EVERY_HOLDER = "SELECT id, key, path, owner, class, grp FROM holders"


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


class UsageReader:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def hours(self, since: datetime, until: datetime, now: datetime) -> Iterator[RecordedHour]:
        """Every device in every hour in which it was there or was counted; hours that only touch the span included. As
        far as is known, a device that was there at the last look is there `now`."""
        first, end = minute_of(since) // 60, -(-minute_of(until) // 60)
        with _snapshot(self._connection) as c:
            listed = dict(self._devices(first, end, minute_of(now)))
            known = {row[0]: _presence(row[1:]) for row in c.execute(_EVERY_DEVICE)} | listed
            holders = {row[0]: _holder(row[1:]) for row in c.execute(_EVERY_HOLDER)}
            for hour in range(*self._extent(first, end, listed.values())):
                rows = c.execute(_USES, (hour,)).fetchall()
                yield from _recorded(hour, rows, known, holders)
                for number in sorted(listed.keys() - {row[0] for row in rows}):
                    if listed[number].in_hour(hour):
                        yield RecordedHour(hour, listed[number], ())

    def _extent(self, first: int, end: int, listed: Iterable[DevicePresence]) -> tuple[int, int]:
        """The hours between these two of which anything is known."""
        found = self._connection.execute("SELECT min(hour), max(hour) + 1 FROM hours").fetchone()
        spans = [(one.since // 60, -(-one.until // 60)) for one in listed] + ([found] if found[0] is not None else [])
        begin, stop = min((one[0] for one in spans), default=end), max((one[1] for one in spans), default=end)
        return max(first, begin), min(end, stop)

    def models(self, since: datetime, until: datetime) -> dict[str, set[str]]:
        """By place: the models of GPUs that were there."""
        found: dict[str, set[str]] = {}
        for _, device in self._devices(minute_of(since) // 60, -(-minute_of(until) // 60), 0):
            found.setdefault(device.place, set()).add(device.model)
        return found

    def count(self, since: datetime, until: datetime) -> int:
        """Devices that were there."""
        return len(self._devices(minute_of(since) // 60, -(-minute_of(until) // 60), 0))

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


@contextmanager
def _snapshot(c: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All statements read the same state, whatever another process writes."""
    c.execute("BEGIN")
    try:
        yield c
    finally:
        c.execute("ROLLBACK")


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
        shrink_file(c)
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
    whole = use if known is None else merged_uses(_with_masks(use, known), use)
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


def _recorded(
    hour: int, rows: list[tuple[int, ...]], devices: Mapping[int, DevicePresence], holders: Mapping[int, Holder]
) -> Iterator[RecordedHour]:
    """Rows of the same device follow each other. Without calls: a report reads a million of them."""
    if not rows:
        return
    last, uses = rows[0][0], list[HourUse]()
    device = devices[last]
    for number, holder, active, idle, unknown, free in rows:
        if number != last:
            yield RecordedHour(hour, device, tuple(uses))
            last, uses, device = number, [], devices[number]
        uses.append(
            HourUse(
                hour=hour,
                place=device.place,
                device=device.device,
                holder=holders[holder],
                active=active,
                idle=idle,
                unknown=unknown,
                free=free,
            )
        )
    yield RecordedHour(hour, device, tuple(uses))


def _holder(row: tuple[Any, ...]) -> Holder:
    key, path, owner, class_, group = row
    return Holder(key=key, path=path, owner=owner, class_=class_, group=group)
