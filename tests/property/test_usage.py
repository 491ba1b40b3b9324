"""Minutes of GPUs, for any looks, measurements and restarts: every minute counts once, and recording again changes
nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.engine.usage import UsageTracker
from gpukeeper.lifecycle.usage import DeviceSeen, Holding, Sight, Vacancy, fold
from gpukeeper.model.policy import Activity
from gpukeeper.model.series import NOT_MEASURED, WHOLE_HOUR, Holder, RecordedHour, Series, Signal, UsageFold, minute_of
from gpukeeper.views.usage import UsageSums, portions, total
from tests.effort import examples
from tests.usage_in_memory import InMemoryUsage

NINE = datetime(2026, 11, 16, 9, 30, tzinfo=UTC)
WINDOW = (minute_of(NINE), minute_of(NINE) + 120)
EVERY = timedelta(minutes=5)
DEVICES = ("GPU-0", "GPU-1")
minutes = st.floats(0, 120, allow_nan=False)
holdings = st.builds(
    lambda owner, device, since, kept: Holding(
        place="node-1",
        device=device,
        holder=Holder(key=f"k-{owner}", owner=owner, class_="docker"),
        since=None if since is None else NINE + timedelta(minutes=since),
        kept=kept,
    ),
    st.sampled_from(["ann", "bob", "eve"]),
    st.sampled_from(DEVICES),
    st.none() | minutes,
    st.booleans(),
)
looks = st.lists(
    st.tuples(
        minutes,
        st.lists(holdings, max_size=3, unique_by=lambda one: one.id),
        st.lists(st.sampled_from(list(Vacancy)), min_size=2, max_size=2),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
values = st.lists(st.sampled_from([0.0, 90.0, NOT_MEASURED]), min_size=120, max_size=120)
shares = st.sampled_from([1.0, 1 / 7, 0.5])


def tracked(found: list[tuple[float, list[Holding], list[Vacancy], bool, bool]], share: float) -> UsageTracker:
    tracker = UsageTracker(enabled=True)
    for at, held, vacancies, whole, complete in sorted(found, key=lambda look: look[0]):
        devices = tuple(
            DeviceSeen(place="node-1", device=device, share=share, vacancy=vacancy)
            for device, vacancy in zip(DEVICES, vacancies, strict=True)
        )
        sight = Sight(
            at=NINE + timedelta(minutes=at),
            whole=whole,
            complete=complete,
            holdings=tuple(held),
            devices=devices if whole else (),
            read=frozenset(one.holder.key for one in held),
        )
        tracker.see(("docker", "node-1"), sight, EVERY)
    return tracker


def folded(tracker: UsageTracker, use: list[float]) -> UsageFold:
    series = {
        f"k-{owner}": [Series(Signal.GPU, device, NINE, tuple(use)) for device in DEVICES]
        for owner in ("ann", "bob", "eve")
    }
    hours = fold(tracker.tenures(), tracker.vacancies(), series, Activity(), WINDOW)
    return UsageFold(devices=tracker.presences(hours), hours=tuple(hours))


def recorded(*folds: UsageFold) -> list[RecordedHour]:
    store = InMemoryUsage()
    for one in folds:
        asyncio.run(store.record(one))
    return list(store.reader().hours(NINE - EVERY, NINE + timedelta(hours=3), NINE))


@examples(0.5)
@given(looks, values, shares)
def test_the_minutes_of_an_hour_of_a_gpu_are_sixty_by_its_share(
    found: list[tuple[float, list[Holding], list[Vacancy], bool, bool]], use: list[float], share: float
) -> None:
    hours = recorded(folded(tracked(found, share), use))
    for one in hours:
        present = one.device.in_hour(one.hour)
        for row in one.uses:
            assert not row.minutes & ~present, "nothing is counted of a GPU that was not there"
            assert row.active & row.idle == row.unknown & (row.active | row.idle) == 0
        counted = sum(part.hours(WHOLE_HOUR).all for part in portions(one)) * 60
        assert counted == pytest.approx(present.bit_count() * (one.device.share or 0.0))
    sums = UsageSums(NINE - EVERY, NINE + timedelta(hours=3), UTC)
    for one in hours:
        sums.add(one)
    assert total(sums.cells()).all * 60 == pytest.approx(
        sum(one.device.in_hour(one.hour).bit_count() * (one.device.share or 0.0) for one in hours)
    )


@examples(0.5)
@given(looks, looks, values)
def test_recording_twice_is_recording_once(
    first: list[tuple[float, list[Holding], list[Vacancy], bool, bool]],
    second: list[tuple[float, list[Holding], list[Vacancy], bool, bool]],
    use: list[float],
) -> None:
    one, other = folded(tracked(first, 1.0), use), folded(tracked(second, 1.0), use)
    assert recorded(one, one) == recorded(one)
    assert recorded(one, other, other) == recorded(one, other)
