"""Hours of GPUs as rows of the fleet database, and back. Pure but for the reader it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby

import msgspec

from gpukeeper.ledger.copy.ship import UsageRow
from gpukeeper.ledger.usage import UsageReader
from gpukeeper.model import reading
from gpukeeper.model.usage import DevicePresence, HourUse, RecordedHour

HOUR = timedelta(hours=1)
SHORTEST = 6 * HOUR  # longer than what is computed again, so that each call gets further


class UsageBody(msgspec.Struct, frozen=True):
    """`use` is None: the device was there, and nothing was recorded about that hour."""

    device: DevicePresence
    use: HourUse | None = None


_DECODER = reading.Decoder(UsageBody)


def usage_rows(reader: UsageReader, since: datetime | None, now: datetime, most: int) -> Iterator[UsageRow]:
    """The first hours since then of which something is recorded; about `most` rows."""
    oldest = reader.oldest()
    if oldest is None:
        return
    first = _moment(oldest)
    begin = first if since is None else max(since, first)
    span = min(max(SHORTEST, most // max(reader.count(begin, now), 1) * HOUR), timedelta(days=31))
    while begin < now:
        end = min(begin + span, now)
        found = False
        for hour in reader.hours(begin, end, now):
            yield from _rows(hour)
            found = True
        if found:
            return
        begin = end


def _rows(recorded: RecordedHour) -> Iterator[UsageRow]:
    hour, device = _moment(recorded.hour), recorded.device
    name = f"{device.place}/{device.device}/{device.since}"
    if not recorded.uses:
        yield UsageRow(hour, name, "", msgspec.json.encode(UsageBody(device)))
    for use in recorded.uses:
        one = use.holder
        holder = "\n".join((one.key, one.owner, one.class_, one.group))
        yield UsageRow(hour, name, holder, msgspec.json.encode(UsageBody(device, use)))


def recorded_hours(rows: Iterable[tuple[datetime, str, str]]) -> Iterator[RecordedHour]:
    """From hour, device and body of rows in order of hour and device. What is not ours is left out."""
    for (hour, _), group in groupby(rows, key=lambda row: (row[0], row[1])):
        found = [body for _, _, text in group if (body := _body(text)) is not None]
        if found:
            device = max((one.device for one in found), key=lambda one: one.until)
            uses = tuple(one.use for one in found if one.use is not None)
            yield RecordedHour(int(hour.timestamp()) // 3600, device, uses)


def _body(text: str) -> UsageBody | None:
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return None


def _moment(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * 3600, UTC)
