"""Whether and when old days of measurements are packed never changes what is read, added, deleted or counted."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger.database import open_in_memory, transaction
from gpukeeper.ledger.signals import SqliteSignals, pack_days
from gpukeeper.model.series import Sample, Series, Signal
from gpukeeper.model.unknown import Unknown

MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
KEYS = ("docker/a/1", "docker/a/2")

_times = st.builds(
    lambda day, minute, second: MIDNIGHT + timedelta(days=day, minutes=minute, seconds=second),
    st.integers(0, 5),
    st.sampled_from((0, 1, 2, 720, 1438, 1439)),
    st.sampled_from((0, 30, 59)),
)
_values = st.one_of(
    st.sampled_from((0.0, -0.0, 0.1, 0.2, 0.3, 0.7, 1e16, 1.0, -1e16, math.nan, math.inf, -math.inf)),
    st.floats(0, 100),
    st.just(Unknown("slices have none", by_design=True)),
    st.just(Unknown("driver did not answer")),
)


class Packed(NamedTuple):
    now: datetime
    most: int


class Pruned(NamedTuple):
    before: datetime


_samples = st.lists(
    st.builds(
        Sample,
        key=st.sampled_from(KEYS),
        signal=st.sampled_from((Signal.GPU, Signal.CPU)),
        device=st.sampled_from(("", "GPU-0")),
        at=_times,
        value=_values,
        slice=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
_story = st.lists(
    st.one_of(
        _samples,
        _samples,
        st.builds(Packed, _times.map(lambda at: at + timedelta(days=3)), st.integers(1, 6)),
        st.builds(Pruned, _times),
    ),
    max_size=12,
)


def bits(found: Mapping[str, tuple[Series, ...]]) -> list[object]:
    return [
        (
            key,
            s.signal,
            s.device,
            s.slice,
            s.start,
            s.missing,
            s.since,
            s.until,
            struct.pack(f"{len(s.minutes)}d", *s.minutes),
        )
        for key, series in found.items()
        for s in series
    ]


async def tell(story: list[list[Sample] | Packed | Pruned], windows: list[tuple[datetime, datetime]]) -> int:
    """How many days were packed."""
    connection, days = open_in_memory(), 0
    packing = SqliteSignals(Path("packing"), connection)
    plain = SqliteSignals(Path("plain"), open_in_memory())
    for step in story:
        match step:
            case Packed(now, most):
                with transaction(connection):
                    pack_days(connection, now, most=most)
                days += connection.execute("SELECT count(*) FROM days").fetchone()[0]
            case Pruned(before):
                assert await packing.prune(before) == await plain.prune(before)
            case _:
                await packing.add(step)
                await plain.add(step)
        for since, until in windows:
            found = await packing.series(KEYS, min(since, until), max(since, until))
            assert bits(found) == bits(await plain.series(KEYS, min(since, until), max(since, until)))
    packing.close()
    plain.close()
    return int(days)


@given(_story, st.lists(st.tuples(_times, _times), min_size=1, max_size=2))
def test_packing_never_changes_what_is_read(
    story: list[list[Sample] | Packed | Pruned], windows: list[tuple[datetime, datetime]]
) -> None:
    asyncio.run(tell(story, windows))


def test_the_story_packs() -> None:
    """Otherwise the property above would hold for nothing."""
    samples = [Sample(KEYS[0], Signal.GPU, "", MIDNIGHT, 1.0)]
    assert asyncio.run(tell([samples, Packed(MIDNIGHT + timedelta(days=3), 1), samples], [(MIDNIGHT, MIDNIGHT)])) == 1
