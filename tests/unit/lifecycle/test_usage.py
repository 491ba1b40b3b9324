"""Minutes of GPUs: calculated by hand, from looks and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpukeeper.lifecycle.usage import (
    DeviceSeen,
    Handover,
    Holding,
    Sight,
    Tenure,
    Vacancy,
    VacantSpan,
    advance,
    advance_vacancy,
    fold,
)
from gpukeeper.model.policy import Activity
from gpukeeper.model.series import NOT_MEASURED, Holder, HourUse, Series, Signal, minute_of
from gpukeeper.model.unknown import Unknown

NINE = datetime(2026, 11, 16, 9, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ANN = Holder(key="docker/node-1/u1", path="docker/node-1/train", owner="ann", class_="docker")


def at(minutes: float) -> datetime:
    return NINE + minutes * MINUTE


def holding(since: float | None = 0, *, kept: bool = False, device: str = "GPU-0") -> Holding:
    return Holding(place="node-1", device=device, holder=ANN, since=None if since is None else at(since), kept=kept)


def sight(minutes: float, *holdings: Holding, ended: Mapping[str, datetime] = {}, **more: bool) -> Sight:
    return Sight(at=at(minutes), holdings=holdings, ended=ended, **more)


def use(values: Mapping[int, float], device: str = "GPU-0") -> dict[str, list[Series]]:
    minutes = tuple(values.get(n, NOT_MEASURED) for n in range(120))
    return {ANN.key: [Series(Signal.GPU, device, NINE, minutes)]}


def seen(sights: list[Sight]) -> list[Tenure]:
    """All of them, after these looks."""
    lasting, over, before = {}, [], None
    for one in sights:
        lasting, ended = advance(lasting, one, before)
        over += ended
        before = one.at if one.whole else before
    return [*over, *lasting.values()]


def counted(tenures: list[Tenure], series: Mapping[str, list[Series]], until: int = 60) -> HourUse:
    found = fold(tenures, [], series, Activity(), (minute_of(NINE), minute_of(NINE) + until))
    assert len(found) <= 1
    return found[0] if found else HourUse(hour=0, place="", device="")


def bits(*spans: tuple[int, int]) -> int:
    return sum((1 << end) - (1 << first) for first, end in spans)


def test_a_measured_minute_is_active_or_idle_by_the_threshold_of_the_policy() -> None:
    found = counted(
        seen([sight(0, holding()), sight(10, holding())]), use({0: 80.0, 1: 5.0, 2: 4.9, 3: 0.0, 4: 100.0}), 10
    )
    assert found.active == bits((0, 2), (4, 5))
    assert found.idle == bits((2, 4))
    assert found.unknown == bits((5, 10)), "held, and not measured"
    assert (found.holder, found.place, found.device) == (ANN, "node-1", "GPU-0")


def test_a_slice_has_its_own_threshold() -> None:
    part = Holding(place="node-1", device="MIG-1", holder=ANN, since=NINE, slice=True)
    found = counted(seen([sight(0, part), sight(2, part)]), use({0: 0.4, 1: 0.6}, "MIG-1"), 2)
    assert (found.idle, found.active) == (bits((0, 1)), bits((1, 2)))


def test_a_run_that_began_between_two_looks_counts_from_its_start() -> None:
    found = counted(seen([sight(0), sight(10, holding(3)), sight(20, holding(3))]), {})
    assert found.unknown == bits((3, 20))


def test_what_was_before_the_first_look_counts_only_where_it_was_measured() -> None:
    found = counted(seen([sight(10, holding(2)), sight(20, holding(2))]), use({1: 90.0, 2: 90.0, 3: 0.0, 12: 90.0}))
    assert found.active == bits((2, 3), (12, 13)), "minute 1 was before it started"
    assert found.idle == bits((3, 4))
    assert found.unknown == bits((10, 12), (13, 20))


def test_minutes_after_the_last_look_wait_for_the_next_one() -> None:
    """It may have ended: what is measured of something that ended is zero."""
    measured = use({4: 90.0, 5: 90.0, 6: 0.0})
    found = counted(seen([sight(0, holding()), sight(5, holding())]), measured, 9)
    assert (found.active, found.idle, found.unknown) == (bits((4, 5)), 0, bits((0, 4)))
    found = counted(seen([sight(0, holding()), sight(5, holding()), sight(8, holding())]), measured, 9)
    assert (found.active, found.idle, found.unknown) == (bits((4, 6)), bits((6, 7)), bits((0, 4), (7, 8)))


def test_a_known_end_ends_it_to_the_minute() -> None:
    looks = [sight(0, holding()), sight(10, holding()), sight(20, ended={ANN.key: at(14)})]
    assert counted(seen(looks), use({13: 90.0, 14: 90.0, 15: 90.0})).minutes == bits((0, 14))


def test_the_end_of_a_workload_whose_children_run_on_is_not_the_end() -> None:
    looks = [sight(0, holding()), sight(10, holding()), sight(20, ended={ANN.key: at(4)})]
    assert counted(seen(looks), {}).minutes == bits((0, 10))


def test_an_unknown_end_counts_what_was_measured() -> None:
    looks = [sight(0, holding()), sight(10, holding()), sight(20)]
    found = counted(seen(looks), use({10: 90.0, 11: 90.0, 25: 90.0}))
    assert (found.active, found.unknown) == (bits((10, 12)), bits((0, 10)))


def test_a_look_that_missed_something_ends_nothing() -> None:
    looks = [sight(0, holding()), sight(10, complete=False), sight(20, holding())]
    assert counted(seen(looks), {}).minutes == bits((0, 20))


def test_a_narrow_look_ends_only_what_it_read() -> None:
    looks = [sight(0, holding()), sight(5, whole=False), sight(10, holding())]
    assert counted(seen(looks), {}).minutes == bits((0, 10))
    looks = [
        sight(0, holding()),
        Sight(at=at(5), whole=False, read=frozenset({ANN.key}), ended={ANN.key: at(4)}),
        sight(10),
    ]
    assert counted(seen(looks), {}).minutes == bits((0, 4))


def test_a_restart_does_not_count_the_pause() -> None:
    looks = [sight(0, holding(0)), sight(10, holding(0)), sight(20, holding(15)), sight(30, holding(15))]
    assert counted(seen(looks), {}).minutes == bits((0, 10), (15, 30))


def test_a_restart_with_a_known_end_before_it_counts_to_that_end() -> None:
    again = msgspec.structs.replace(holding(15), previous_end=at(12))
    looks = [sight(0, holding(0)), sight(10, holding(0)), sight(20, again)]
    found = counted(seen(looks), use({11: 90.0, 12: 0.0, 13: 0.0, 14: 0.0}))
    assert found.minutes == bits((0, 12), (15, 20))


def test_a_gpu_that_is_kept_after_a_stop_is_held_and_idle() -> None:
    looks = [sight(0, holding(0)), sight(10, holding(0)), sight(20, holding(12, kept=True)), sight(30)]
    found = counted(seen(looks), use(dict.fromkeys(range(12), 90.0)))
    assert (found.active, found.idle) == (bits((0, 12)), bits((12, 20)))


def test_half_a_minute_and_more_counts_as_a_minute() -> None:
    looks = [sight(0), sight(5, holding(1.4)), sight(10, ended={ANN.key: at(7.6)})]
    assert counted(seen(looks), {}).minutes == bits((1, 8))
    looks = [sight(0), sight(5, holding(1.6)), sight(10, ended={ANN.key: at(7.4)})]
    assert counted(seen(looks), {}).minutes == bits((2, 7))


# Free.

DEVICE = ("node-1", "GPU-0")
NOTHING_KNOWN = Handover()


def vacant(looks: list[tuple[float, Vacancy]], between: Handover = NOTHING_KNOWN) -> list[VacantSpan]:
    lasting, over = {}, []
    last = looks[-1][0]
    for minutes, vacancy in looks:
        known = {DEVICE: between} if minutes == last else {}
        one = DeviceSeen(place="node-1", device="GPU-0", vacancy=vacancy)
        lasting, ended = advance_vacancy(lasting, [one], at(minutes), timedelta(minutes=15), known)
        over += [span for _, span in ended]
    return [*over, *lasting.values()]


def free(spans: list[VacantSpan]) -> dict[str, int]:
    found = fold([], [(DEVICE, one) for one in spans], {}, Activity(), (minute_of(NINE), minute_of(NINE) + 60))
    return {one.holder.class_ or "free": one.minutes for one in found}


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, Vacancy.VACANT), (10, Vacancy.VACANT)], {"free": bits((0, 10))}),
        ([(0, Vacancy.VACANT), (20, Vacancy.VACANT)], {}),  # too far apart
        ([(0, Vacancy.VACANT), (10, Vacancy.UNSURE), (20, Vacancy.VACANT)], {}),
        ([(0, Vacancy.TAKEN), (10, Vacancy.TAKEN)], {"outside": bits((0, 10))}),
        ([(0, Vacancy.QUARANTINE), (10, Vacancy.QUARANTINE)], {"quarantine": bits((0, 10))}),
    ],
)
def test_a_gpu_is_free_between_two_looks_that_agree(
    looks: list[tuple[float, Vacancy]], expected: dict[str, int]
) -> None:
    assert free(vacant(looks)) == expected


def test_a_gpu_is_free_until_the_known_start_of_what_took_it() -> None:
    looks = [(0.0, Vacancy.VACANT), (10.0, Vacancy.VACANT), (20.0, Vacancy.TAKEN)]
    assert free(vacant(looks)) == {"free": bits((0, 10))}
    assert free(vacant(looks, Handover(begun=at(16)))) == {"free": bits((0, 16))}


def test_a_gpu_that_a_workload_claims_is_not_free_though_no_process_has_it_open() -> None:
    assert free(vacant([(0.0, Vacancy.VACANT), (10.0, Vacancy.VACANT)], Handover(begun=at(4)))) == {
        "free": bits((0, 4))
    }


def test_a_gpu_is_free_from_the_known_end_of_what_had_it() -> None:
    looks = [(0.0, Vacancy.HELD), (10.0, Vacancy.VACANT)]
    assert free(vacant(looks)) == {}
    assert free(vacant(looks, Handover(ended=at(7)))) == {"free": bits((7, 10))}
    assert free(vacant(looks, Handover(ended=Unknown("?")))) == {}


def test_a_gpu_is_not_free_between_two_looks_if_something_came_and_went_unseen() -> None:
    looks = [(0.0, Vacancy.VACANT), (10.0, Vacancy.VACANT)]
    assert free(vacant(looks, Handover(ended=at(7)))) == {"free": bits((0, 10))}, "what had it is counted first"
    assert free(vacant(looks, Handover(ended=Unknown("?")))) == {}
