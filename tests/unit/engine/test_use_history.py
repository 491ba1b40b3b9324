"""Use of a GPU over the last hours: what was recorded before a restart, and what is measured since."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gpukeeper.engine.live import STEP, STEPS, LiveState
from gpukeeper.model.series import Sample, Series, Signal

NOW = datetime(2026, 3, 2, 8, tzinfo=UTC)


def test_what_was_recorded_comes_before_what_was_measured_meanwhile() -> None:
    live = LiveState(enabled=True)
    live.measured([Sample("key", Signal.GPU, "GPU-0", NOW, 40.0)])
    before = Series(Signal.GPU, "GPU-0", NOW - timedelta(minutes=20), (80.0,) * 20)
    live.recall("key", [before])
    live.measured([Sample("key", Signal.GPU, "GPU-0", NOW + STEP, 60.0)])
    assert live.history["key", "GPU-0"].means() == (80.0, 80.0, 80.0, 80.0, 40.0, 60.0)


def test_a_gap_is_not_measured_and_only_the_last_hours_are_kept() -> None:
    live = LiveState(enabled=True)
    live.measured([Sample("key", Signal.GPU, "GPU-0", NOW, 40.0)])
    live.recall("key", [Series(Signal.GPU, "GPU-0", NOW - 2 * STEPS * STEP, (80.0,) * 5)])
    found = live.history["key", "GPU-0"].means()
    assert len(found) == STEPS
    assert found == (None,) * (STEPS - 1) + (40.0,)
