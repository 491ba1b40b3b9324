"""Which value is believed. Whole GPUs: values as an H200 gave them; slices: made by hand, none was at hand."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.clients.prometheus import ExportedGpu
from gpukeeper.devices.busy import GpuUse, UsageJudge, of_sources
from gpukeeper.devices.driver.facts import ActivityFacts, GpuFacts, SliceFacts
from gpukeeper.model.unknown import Unknown

START = datetime(2026, 3, 2, 12, tzinfo=UTC)
TICK = timedelta(seconds=30)
NEVER = Unknown("not supported", by_design=True)
FAILED = Unknown("the driver returned an error: unknown error")
MIG = (
    SliceFacts(uuid="MIG-1", index=0, gpu_instance=7, compute_instance=0),
    SliceFacts(uuid="MIG-2", index=1, gpu_instance=9, compute_instance=0),
)


def whole(uuid: str = "GPU-1", **facts: Any) -> GpuFacts:
    """An idle H200 with a client: GPM 0.006 %, utilisation 0, about 120 W."""
    given_: dict[str, Any] = {
        "index": 0,
        "uuid": uuid,
        "window_s": 30.0,
        "gpm": 0.006,
        "utilisation": 0.0,
        "utilisation_covered_s": 29.8,
        "energy_before_mj": 1_000_000,
        "energy_mj": 4_600_000,
        "memory_used_mib": 1700,
        "listed": (4711,),
        "sliced": False,
        **facts,
    }
    measured = {name: given_.pop(name) for name in ActivityFacts.__struct_fields__ if name in given_}
    return GpuFacts(**given_, activity=ActivityFacts(**measured))


def cut(parts: tuple[SliceFacts, ...] | Unknown = MIG, **facts: Any) -> GpuFacts:
    given_ = {"sliced": True, "slices": parts, "gpm": NEVER, "utilisation": NEVER}
    return whole(**(given_ | facts))


def part(gpm: float | Unknown, uuid: str = "MIG-1", gi: int = 7) -> SliceFacts:
    return SliceFacts(
        uuid=uuid,
        index=0,
        gpu_instance=gi,
        compute_instance=0,
        memory_used_mib=500,
        listed=(1,),
        activity=ActivityFacts(gpm=gpm),
    )


def busy(gpu: GpuFacts, exported: Any = None, uuid: str = "GPU-1") -> float | Unknown:
    return UsageJudge().judge([gpu], START, exported)[uuid].busy


def why(value: float | Unknown) -> str:
    assert isinstance(value, Unknown), value
    assert not value.by_design, "a GPU that is not measured must never be passed over"
    return value.why


# Whole GPUs.


def test_the_largest_source_counts() -> None:
    assert busy(whole(gpm=8.7, utilisation=8.2)) == 8.7
    assert busy(whole(gpm=0.0, utilisation=12.0)) == 12.0


@pytest.mark.parametrize(("gpm", "utilisation"), [(FAILED, 0.0), (0.0, FAILED), (float("nan"), 0.0), (200.0, 0.0)])
def test_one_source_that_failed_leaves_the_other_alone_and_that_is_not_enough(gpm: Any, utilisation: Any) -> None:
    assert "only one source answered" in why(busy(whole(gpm=gpm, utilisation=utilisation)))


@pytest.mark.parametrize("blank", [9223372036854775794.0, 9223372036854775794, float("inf"), -3.0])
def test_a_blank_is_no_value(blank: float) -> None:
    assert "cannot be true" in why(busy(whole(gpm=blank, utilisation=FAILED)))


def test_one_source_is_enough_where_there_is_no_other_and_energy_grows() -> None:
    assert busy(whole(gpm=NEVER, utilisation=3.0)) == 3.0
    stands = whole(gpm=NEVER, utilisation=3.0, energy_before_mj=5, energy_mj=5)
    assert "the only source" in why(busy(stands))
    assert "the only source" in why(busy(whole(gpm=NEVER, energy_mj=NEVER, energy_before_mj=NEVER)))


def test_without_any_source_it_is_unknown_and_never_by_design() -> None:
    assert "not supported" in why(busy(whole(gpm=NEVER, utilisation=NEVER)))


def test_samples_with_a_hole_are_no_source() -> None:
    """The driver's buffer holds 14 s; a mean of those says nothing about the 16 before."""
    assert "14 of 30 seconds" in why(busy(whole(gpm=FAILED, utilisation=0.0, utilisation_covered_s=14.0)))
    assert "14 of 30 seconds" in why(busy(whole(utilisation_covered_s=14.0)))


def test_a_short_window_is_covered_by_a_single_sample() -> None:
    assert busy(whole(window_s=1.0, utilisation_covered_s=0.2)) == 0.006
    assert busy(whole(utilisation_covered_s=23.0)) == 0.006
    assert isinstance(busy(whole(utilisation_covered_s=22.9)), Unknown)


def test_two_sources_need_no_energy_counter_where_there_is_none() -> None:
    judge = UsageJudge()
    reading = whole(energy_mj=NEVER, energy_before_mj=NEVER)
    for tick in range(20):
        assert judge.judge([reading], START + tick * TICK)["GPU-1"].busy == 0.006


@pytest.mark.parametrize("energy", [5, FAILED])
def test_an_energy_counter_that_stands_still_makes_all_stale(energy: Any) -> None:
    judge = UsageJudge()
    assert judge.judge([whole()], START)["GPU-1"].busy == 0.006
    frozen = whole(energy_mj=4_600_000 if energy == 5 else energy, energy_before_mj=4_600_000)
    assert judge.judge([frozen], START + 4 * TICK)["GPU-1"].busy == 0.006
    late = judge.judge([frozen], START + 5 * TICK)["GPU-1"].busy
    assert "does not grow" in why(late)
    growing = whole(energy_mj=9_000_000, energy_before_mj=4_600_000)
    assert judge.judge([growing], START + 6 * TICK)["GPU-1"].busy == 0.006


def test_a_clock_set_back_does_not_keep_a_dead_source_alive() -> None:
    judge = UsageJudge()
    judge.judge([whole()], START)
    frozen = whole(energy_before_mj=4_600_000)
    hour_ago = START - timedelta(hours=1)
    judge.judge([frozen], hour_ago)
    assert "does not grow" in why(judge.judge([frozen], hour_ago + 5 * TICK)["GPU-1"].busy)


def test_the_first_minute_after_a_driver_load_is_discarded() -> None:
    """Memory is scrubbed then. The counter begins anew, also for a child that knows no earlier value."""
    judge = UsageJudge()
    judge.judge([whole()], START)
    loaded = whole(gpm=100.0, utilisation=100.0, energy_before_mj=100, energy_mj=9_000)
    assert "loaded" in why(judge.judge([loaded], START + TICK)["GPU-1"].busy)
    later = whole(energy_before_mj=9_000, energy_mj=90_000)
    assert "loaded" in why(judge.judge([later], START + TICK + timedelta(seconds=59))["GPU-1"].busy)
    later = whole(energy_before_mj=90_000, energy_mj=900_000)
    assert judge.judge([later], START + TICK + timedelta(seconds=60))["GPU-1"].busy == 0.006


# The exporter.


def export(energy: int | Unknown, engine: float | Unknown = 0.0, gi: int | None = None, **facts: Any) -> Any:
    key = ("GPU-1", gi)
    return {key: ExportedGpu(uuid="GPU-1", gpu_instance=gi, engine=engine, energy_mj=energy, **facts)}


def test_the_exporter_is_a_second_source_once_its_own_energy_counter_grew() -> None:
    judge = UsageJudge()
    first = judge.judge([whole(gpm=NEVER, utilisation=1.0)], START, export(10, 7.0))["GPU-1"].busy
    assert "may be stale" in why(first)
    assert judge.judge([whole(gpm=NEVER, utilisation=1.0)], START + TICK, export(20, 7.0))["GPU-1"].busy == 7.0


def test_an_exporter_that_repeats_itself_is_no_source() -> None:
    judge = UsageJudge()
    for tick, energy in enumerate([10, 20, 20, 20, 20, 20, 20]):
        reading = whole(gpm=NEVER, energy_before_mj=tick, energy_mj=tick + 1)
        last = judge.judge([reading], START + tick * TICK, export(energy))["GPU-1"].busy
    assert "may be stale" in why(last)


def test_an_exporter_that_is_down_does_not_matter_where_two_others_answered() -> None:
    assert busy(whole(), Unknown("connection refused")) == 0.006
    assert "connection refused" in why(busy(whole(gpm=NEVER), Unknown("connection refused")))


def test_utilisation_from_driver_and_exporter_is_one_source() -> None:
    judge = UsageJudge()
    reading = whole(gpm=FAILED, utilisation=0.0)
    for energy in (10, 20):
        seen = export(energy, engine=Unknown("blank"), utilisation=40.0)
        last = judge.judge([reading], START, seen)["GPU-1"].busy
    assert "only one source" in why(last)
    assert judge.judge([whole(gpm=1.0)], START, export(30, Unknown("blank"), utilisation=40.0))["GPU-1"].busy == 40.0


# Slices.


def test_a_slice_needs_its_counters_and_the_life_of_the_whole() -> None:
    assert busy(cut((part(33.0),)), uuid="MIG-1") == 33.0
    assert "does not grow" in why(busy(cut((part(0.0),), energy_before_mj=4_600_000), uuid="MIG-1"))
    assert "not supported" in why(busy(cut((part(NEVER),)), uuid="MIG-1"))
    assert "cannot be true" in why(busy(cut((part(float("nan")),)), uuid="MIG-1"))


def test_an_older_slice_is_measured_by_the_exporter_by_its_gpu_instance() -> None:
    judge = UsageJudge()
    for energy in (10, 20):
        exported = export(energy, 50.0, gi=7) | export(energy, 0.0, gi=9)
        uses = judge.judge([cut((part(NEVER), part(NEVER, "MIG-2", 9)))], START, exported)
    assert (uses["MIG-1"].busy, uses["MIG-2"].busy) == (50.0, 0.0)
    assert (uses["MIG-1"].parent, uses["MIG-1"].slice) == ("GPU-1", True)


def test_a_gpu_that_is_cut_is_never_idle_itself() -> None:
    """Tools show utilisation 0 there; it means not supported."""
    assert "split into slices" in why(busy(cut((part(0.0),), utilisation=0.0, gpm=0.0)))
    assert "could not be listed" in why(busy(cut(Unknown("driver"))))
    assert "is unknown" in why(busy(whole(sliced=Unknown("driver"))))


def test_cutting_again_voids_one_reading() -> None:
    judge = UsageJudge()
    judge.judge([cut((part(0.0), part(0.0, "MIG-2", 9))), whole("GPU-2")], START)
    anew = cut((part(0.0), part(0.0, "MIG-3", 9)), energy_mj=5_000_000)
    uses = judge.judge([anew, whole("GPU-2")], START + TICK)
    assert "changed" in why(uses["MIG-1"].busy)
    assert "changed" in why(uses["MIG-3"].busy)
    assert uses["GPU-2"].busy == 0.006
    uses = judge.judge([anew], START + 2 * TICK)
    assert uses["MIG-3"].busy == 0.0
    assert "changed" in why(judge.judge([whole()], START + 3 * TICK)["GPU-1"].busy)


def test_a_listing_that_failed_is_no_change() -> None:
    judge = UsageJudge()
    judge.judge([cut((part(0.0),))], START)
    judge.judge([cut(FAILED)], START + TICK)
    uses = judge.judge([cut((part(0.0),))], START + 2 * TICK)
    assert uses["MIG-1"].busy == 0.0


# Readings that cannot be true.


def latched(**facts: Any) -> GpuFacts:
    return whole(**({"gpm": 100.0, "utilisation": 100.0, "listed": (), "memory_used_mib": 615} | facts))


def test_full_use_with_nobody_there_is_latched() -> None:
    use = UsageJudge().judge([latched()], START)["GPU-1"]
    assert "without a process" in why(use.busy)


@pytest.mark.parametrize(
    "facts",
    [{"listed": (7,)}, {"memory_used_mib": 60_000}, {"listed": FAILED}, {"memory_used_mib": FAILED}, {"gpm": 9.0}],
)
def test_use_with_a_user_there_is_use(facts: dict[str, Any]) -> None:
    use = UsageJudge().judge([latched(utilisation=9.0, **facts)], START)["GPU-1"]
    assert isinstance(use.busy, float)


def test_who_left_during_the_window_was_there() -> None:
    judge = UsageJudge()
    judge.judge([whole(memory_used_mib=60_000)], START)
    assert judge.judge([latched()], START + TICK)["GPU-1"].busy == 100.0
    assert "without a process" in why(judge.judge([latched()], START + 2 * TICK)["GPU-1"].busy)


def test_a_gpu_whose_memory_stays_above_its_floor_is_not_empty() -> None:
    judge = UsageJudge()
    judge.judge([whole(listed=(), memory_used_mib=615)], START)
    assert judge.judge([latched(memory_used_mib=680)], START + TICK)["GPU-1"].busy == 100.0
    assert "without a process" in why(judge.judge([latched(memory_used_mib=679)], START + 2 * TICK)["GPU-1"].busy)


def pair(one: float, other: float | Unknown, energy: int = 4_600_000) -> list[GpuFacts]:
    """Two whole GPUs; the energy of each reading must be larger than before."""
    return [
        whole(uuid, gpm=value, utilisation=0.0, energy_mj=energy, energy_before_mj=energy - 1)
        for uuid, value in (("GPU-1", one), ("GPU-2", other))
    ]


def test_all_turning_idle_at_once_is_doubted_for_five_minutes() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    for tick in range(1, 11):
        uses = judge.judge(pair(0.0, 0.0, 4_600_000 + tick), START + tick * TICK)
        assert "at once" in why(uses["GPU-1"].busy)
        assert "at once" in why(uses["GPU-2"].busy)
    uses = judge.judge(pair(0.0, 0.0, 4_700_000), START + 11 * TICK)
    assert (uses["GPU-1"].busy, uses["GPU-2"].busy) == (0.0, 0.0)


def test_a_failed_reading_between_does_not_hide_that_all_turned_idle() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    judge.judge([whole(uuid, gpm=FAILED, energy_mj=4_600_001) for uuid in ("GPU-1", "GPU-2")], START + TICK)
    uses = judge.judge(pair(0.0, 0.0, 4_600_002), START + 2 * TICK)
    assert "at once" in why(uses["GPU-1"].busy)


def test_doubt_ends_when_one_is_busy_again() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    judge.judge(pair(0.0, 0.0, 4_600_001), START + TICK)
    uses = judge.judge(pair(0.0, 60.0, 4_600_002), START + 2 * TICK)
    assert (uses["GPU-1"].busy, uses["GPU-2"].busy) == (0.0, 60.0)


def test_one_of_two_turning_idle_is_accepted() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    assert judge.judge(pair(0.0, 80.0, 4_600_001), START + TICK)["GPU-1"].busy == 0.0
    assert judge.judge(pair(0.0, 0.0, 4_600_002), START + 2 * TICK)["GPU-2"].busy == 0.0


def test_a_gpu_that_was_busy_and_is_not_listed_any_more_counts_for_the_doubt() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    uses = judge.judge(pair(0.0, 0.0, 4_600_001)[:1], START + TICK)
    assert "at once" in why(uses["GPU-1"].busy)


def test_what_a_gpu_did_before_it_was_cut_is_forgotten() -> None:
    judge = UsageJudge()
    judge.judge(pair(90.0, 80.0), START)
    _one, idle = pair(0.0, 0.0, 4_600_001)
    uses = judge.judge([cut((part(0.0),), energy_mj=4_600_001), idle], START + TICK)
    assert uses["GPU-2"].busy == 0.0  # of those that are still what they were, only one turned idle


def test_a_gpu_without_a_uuid_is_left_out() -> None:
    assert UsageJudge().judge([GpuFacts(index=3, uuid=Unknown("GPU is lost"))], START) == {}


def test_the_childs_record_is_read() -> None:
    record = {
        "index": 0,
        "uuid": "GPU-1",
        "listed": [4],
        "activity": {"gpm": {"why": "no", "by_design": True}, "utilisation": 0},
    }
    reading = msgspec.json.decode(json.dumps(record), type=GpuFacts)
    assert (reading.activity.gpm, reading.activity.utilisation) == (Unknown("no", by_design=True), 0.0)
    assert reading.listed == (4,)


def test_a_slice_that_does_not_say_its_instance_cannot_be_found_at_the_exporter() -> None:
    lost = msgspec.structs.replace(part(FAILED), gpu_instance=Unknown("no permission"))
    assert "no permission" in why(busy(cut((lost,)), export(10, 50.0, gi=7), "MIG-1"))


# For any input.

fact = st.one_of(st.floats(allow_nan=True), st.just(FAILED), st.just(NEVER), st.sampled_from([0.0, 3.0, 99.0]))


def is_number_or_unknown(one: Any) -> bool:
    return isinstance(one, Unknown) or not math.isnan(one)


@given(fact, fact, st.booleans())
def test_a_value_is_a_percentage_and_less_is_never_learned_from_less(gpm: Any, samples: Any, grows: bool) -> None:
    value = busy(whole(gpm=gpm, utilisation=samples, energy_before_mj=1 if grows else 4_600_000))
    if isinstance(value, Unknown):
        assert not value.by_design
    else:
        assert 0.0 <= value <= 100.0
        assert NEVER in (gpm, samples) or FAILED not in (gpm, samples)


@given(st.dictionaries(st.text(max_size=3), fact.filter(is_number_or_unknown), min_size=1), st.booleans())
def test_the_answer_is_never_below_any_source(sources: dict[str, Any], alive: bool) -> None:
    value = of_sources(sources, alive)
    if not isinstance(value, Unknown):
        assert all(isinstance(one, Unknown) or one <= value for one in sources.values())


@given(st.lists(st.tuples(fact, fact, st.integers(0, 300)), max_size=12))
def test_no_sequence_of_readings_breaks_it_or_gives_what_is_no_use(readings: list[tuple[Any, Any, int]]) -> None:
    judge, now, energy = UsageJudge(), START, 0
    for one, other, seconds in readings:
        now, energy = now + timedelta(seconds=seconds), energy + seconds
        gpus = [whole(gpm=one, energy_mj=energy), cut((part(other),), uuid="GPU-2", energy_mj=energy)]
        for use in judge.judge(gpus, now).values():
            assert isinstance(use, GpuUse)
            assert isinstance(use.busy, Unknown) or 0.0 <= use.busy <= 100.0
