"""Signals in SQLite and in memory give the same series."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from hypothesis import given, settings
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


@settings(max_examples=80, deadline=None)
@given(_samples)
def test_sqlite_and_memory_give_the_same_series(samples: list[Sample]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # In the order of time, as meters give them.
        run(compare(folder, sorted(samples, key=lambda sample: sample.at)))


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
