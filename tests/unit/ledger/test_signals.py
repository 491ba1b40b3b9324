"""Signals in SQLite and in memory give the same series."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.ledger.in_memory import InMemorySignals
from gpukeeper.ledger.signals import open_signals
from gpukeeper.model.series import Sample, Series, Signal
from gpukeeper.model.unknown import Unknown
from tests.unit.ledger.examples import NOW, run

KEYS = ("docker/a/1", "docker/a/2")

_samples = st.lists(
    st.builds(
        Sample,
        key=st.sampled_from(KEYS),
        signal=st.sampled_from((Signal.GPU, Signal.CPU)),
        device=st.sampled_from(("", "GPU-0", "GPU-1")),
        at=st.integers(-600, 600).map(lambda s: NOW + timedelta(seconds=s)),
        value=st.one_of(
            st.floats(0, 100),
            st.just(math.nan),
            st.just(Unknown("slices have none", by_design=True)),
            st.just(Unknown("driver did not answer")),
        ),
        slice=st.booleans(),
        since=st.one_of(st.none(), st.integers(-700, 600).map(lambda s: NOW + timedelta(seconds=s))),
    ),
    max_size=40,
)


Shown = dict[str, list[tuple[object, ...]]]


def shown(found: Mapping[str, tuple[Series, ...]]) -> Shown:
    """NaN is not equal to itself, and sums may differ in the last bit."""
    return {
        key: [
            (
                s.signal,
                s.device,
                s.slice,
                s.start,
                s.missing,
                ["-" if math.isnan(m) else round(m, 6) for m in s.minutes],
                s.since,
                s.until,
            )
            for s in series
        ]
        for key, series in found.items()
    }


async def compare(folder: str, samples: list[Sample]) -> None:
    memory, disk = InMemorySignals(), open_signals(Path(folder) / "ledger.db", write=True)
    half = len(samples) // 2
    for batch in (samples[:half], samples[half:]):
        await memory.add(batch)
        await disk.add(batch)
    for since, until in ((NOW - timedelta(minutes=5), NOW), (NOW, NOW + timedelta(minutes=30))):
        wanted = [*KEYS, "docker/a/never"]
        expected = shown(await memory.series(wanted, since, until))
        assert shown(await disk.series(wanted, since, until)) == expected
    disk.close()


@given(_samples)
def test_sqlite_and_memory_give_the_same_series(samples: list[Sample]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(compare(folder, sorted(samples, key=lambda sample: sample.at)))


@given(_samples)
def test_they_do_when_the_clock_goes_back(samples: list[Sample]) -> None:
    """A reading that is dropped, yet counted as measured, would look like quiet."""
    with tempfile.TemporaryDirectory() as folder:
        run(compare(folder, samples))


def test_a_device_that_was_read_once_stays_in_the_answer_as_not_measured(tmp_path: Path) -> None:
    """Otherwise the devices that still answer would speak for it, and busy could look idle."""

    async def story() -> None:
        signals = open_signals(tmp_path / "ledger.db", write=True)
        await signals.add([Sample(KEYS[0], Signal.GPU, "GPU-1", NOW - timedelta(hours=2), 80.0)])
        (series,) = (await signals.series(KEYS, NOW - timedelta(minutes=30), NOW))[KEYS[0]]
        assert len(series.minutes) == 31
        assert all(math.isnan(minute) for minute in series.minutes)
        signals.close()

    run(story())


def test_pruning_forgets_what_was_not_measured_since(tmp_path: Path) -> None:
    """C15.7"""

    async def story() -> None:
        signals = open_signals(tmp_path / "ledger.db", write=True)
        old = NOW - timedelta(days=8)
        await signals.add([Sample(KEYS[0], Signal.GPU, "0", old, 1.0), Sample(KEYS[0], Signal.GPU, "0", NOW, 1.0)])
        await signals.add([Sample(KEYS[1], Signal.GPU, "0", old, Unknown("none here", by_design=True))])
        assert await signals.prune(NOW - timedelta(days=7)) == 1
        assert list(await signals.series(KEYS, NOW, NOW)) == [KEYS[0]]
        signals.close()

    run(story())


def test_signals_that_are_not_there_read_as_none(tmp_path: Path) -> None:
    signals = open_signals(tmp_path / "no" / "ledger.db", write=False)
    assert run(signals.series(KEYS, NOW, NOW)) == {}
    signals.close()
    assert not (tmp_path / "no").exists()


# Without a gap


def gpu(at: float, since: float | None = None, value: float = 0.0) -> Sample:
    """In seconds from NOW on."""
    begin = None if since is None else NOW + timedelta(seconds=since)
    return Sample(KEYS[0], Signal.GPU, "GPU-0", NOW + timedelta(seconds=at), value, since=begin)


def stored(folder: Path, *lives: list[Sample]) -> Series:
    """What a reader finds after one daemon after the other wrote its samples."""
    for samples in lives:
        signals = open_signals(folder / "ledger.db", write=True)
        run(signals.add(samples))
        signals.close()
    signals = open_signals(folder / "ledger.db", write=False)
    found = run(signals.series(KEYS, NOW - timedelta(hours=1), NOW + timedelta(hours=1)))
    signals.close()
    (one,) = found[KEYS[0]]
    return one


def seconds(one: Series) -> tuple[float, float]:
    assert one.since is not None
    assert one.until is not None
    return (one.since - NOW).total_seconds(), (one.until - NOW).total_seconds()


def test_readings_that_go_on_where_the_one_before_ended_have_no_gap(tmp_path: Path) -> None:
    assert seconds(stored(tmp_path, [gpu(0, -2), gpu(30, 0), gpu(60, 30)])) == (-2, 60)


def test_a_gap_of_eighty_seconds_is_seen_although_every_minute_has_a_reading(tmp_path: Path) -> None:
    """NOW is the begin of a minute: readings at 0:05 and 1:26, of which the second speaks for one second."""
    one = stored(tmp_path, [gpu(-25, -55), gpu(5, -25)], [gpu(86, 85), gpu(116, 86)])
    assert not any(math.isnan(one.minutes[60 + minute]) for minute in (0, 1))
    assert seconds(one) == (85, 116)


def test_counters_bridge_a_lost_tick_and_may_have_counted_all_in_one_minute(tmp_path: Path) -> None:
    one = stored(tmp_path, [gpu(0, -30), gpu(90, 0, 4.0)])
    assert seconds(one) == (-30, 90)
    assert one.minutes[61] == 6.0, "a mean of 4 % over 90 s may be a minute at 6 %"


def test_no_counter_bridges_more_than_two_minutes(tmp_path: Path) -> None:
    assert seconds(stored(tmp_path, [gpu(0, -30), gpu(121, 0)])) == (121, 121)


def test_a_clock_that_was_set_begins_again(tmp_path: Path) -> None:
    assert seconds(stored(tmp_path, [gpu(0, -30), gpu(3600, 0)])) == (3600, 3600)
    assert seconds(stored(tmp_path / "back", [gpu(0, -30), gpu(-600, 0), gpu(-570, -600)])) == (-600, -570)


def test_history_that_is_read_again_has_the_gaps_that_it_has(tmp_path: Path) -> None:
    told = [gpu(minute * 60, minute * 60 - 60) for minute in range(10)]
    assert seconds(stored(tmp_path, told, told)) == (-60, 540)
    assert seconds(stored(tmp_path / "hole", told, [*told[:4], *told[6:]])) == (300, 540)


def test_what_an_older_version_measured_does_not_count(tmp_path: Path) -> None:
    """It did not write down how much of a minute it had measured."""
    import sqlite3

    from gpukeeper.ledger.database import APPLICATION_ID, MIGRATIONS

    c = sqlite3.connect(tmp_path / "ledger.db")
    for statement in MIGRATIONS[0]:
        c.execute(statement)
    c.execute("INSERT INTO series (key, signal, device, slice, newest) VALUES (?, 'gpu', 'GPU-0', 0, 1)", KEYS[:1])
    c.execute("INSERT INTO buckets VALUES (1, 1, 0, 2)")
    c.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    c.execute("PRAGMA user_version = 1")
    c.commit()
    c.close()
    assert seconds(stored(tmp_path, [gpu(0, -30)])) == (-30, 0)
    with sqlite3.connect(tmp_path / "ledger.db") as found:
        assert found.execute("SELECT count(*) FROM buckets").fetchone() == (1,)
