"""The synthetic trace: same seed, same bytes; and its truth is what its minutes show."""

from __future__ import annotations

from math import isnan

import pytest

from gpukeeper.model.errors import UsageError
from gpukeeper.model.series import MINUTE, RecordedRun, Signal
from gpukeeper.traces.synthetic import CLASSES, LEVELS, USING, SyntheticTrace

TRACE = SyntheticTrace(7, workloads=60, days=5)


def as_bytes(run: RecordedRun) -> tuple[object, ...]:
    series = tuple((one.signal, one.device, one.start, one.minutes.tobytes()) for one in run.series)
    return run.name, run.started, run.ended, run.owner, run.class_, run.devices, run.holds, series


def test_the_same_seed_gives_the_same_bytes_in_any_order() -> None:
    first = [as_bytes(run) for run in TRACE.runs()]
    again = SyntheticTrace(7, workloads=60, days=5)
    assert [as_bytes(again.run(index)) for index in reversed(range(60))] == first[::-1]
    assert [as_bytes(run) for run in SyntheticTrace(8, workloads=60, days=5).runs()] != first


def test_every_kind_class_and_end_occurs() -> None:
    runs, truths = {run.name: run for run in TRACE.runs()}, TRACE.truths()
    assert list(truths) == list(runs)
    assert {truth.kind for truth in truths.values()} == set(CLASSES)
    assert {one.signal for run in runs.values() for one in run.series} == set(Signal)
    assert {run.ended is None for run in runs.values()} == {True, False}
    assert any(isnan(value) for run in runs.values() for one in run.series for value in one.minutes)
    assert any(run.started < TRACE.begin for run in runs.values())
    assert any(run.holds for run in runs.values())
    assert len({run.owner for run in runs.values()}) > 3
    assert TRACE.rows == sum(len(one.minutes) for run in runs.values() for one in run.series)


def test_minutes_lie_between_start_and_end() -> None:
    for run in TRACE.runs():
        over = run.ended or TRACE.end
        assert over <= TRACE.end
        for one in run.series:
            assert one.minutes.typecode == "f"
            assert one.start == max(run.started, TRACE.begin)
            assert one.start + len(one.minutes) * MINUTE == over


def test_after_the_last_use_no_minute_shows_use() -> None:
    idle_max = max(high for name, levels in LEVELS.items() if name not in USING for high in levels[Signal.GPU][:2])
    seen = 0
    for index, run in enumerate(TRACE.runs()):
        last = TRACE.truth(index).last_use
        for one in run.series:
            if one.signal is not Signal.GPU:
                continue
            after = 0 if last is None else max(0, (last - one.start) // MINUTE)
            assert all(isnan(value) or value <= idle_max for value in one.minutes[after:])
            shown = after and after <= len(one.minutes) and not isnan(one.minutes[after - 1])
            if shown and one.device.endswith("/0"):
                assert one.minutes[after - 1] > idle_max
                seen += 1
    assert seen > 30


def test_a_trace_without_work_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 workload"):
        SyntheticTrace(1, workloads=0)
