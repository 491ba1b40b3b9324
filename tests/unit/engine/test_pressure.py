"""What is scarce, and how much of it is remembered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gpukeeper.engine.pressure import Pressure
from gpukeeper.model.identity import Ref, Seen
from gpukeeper.model.policy import Demand, DiskMarks
from gpukeeper.model.subject import Disk, Shape, State, Subject

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
HERE, THERE = ("ray", "lab"), ("docker", "node-3")
MARKS = DiskMarks()


def lying_on(name: str, used: float) -> Subject:
    seen = Seen(Ref(*HERE, "tree", "/tmp/tmp1", "8:77"), "i", "v", NOW)
    return Subject(seen=seen, shape=Shape.TREE, state=State.ENDED, created=NOW, disk=Disk(name, used))


def test_a_disk_that_a_complete_list_does_not_show_is_forgotten() -> None:
    pressure = Pressure()
    for number in range(100):
        assert pressure.is_too_full(lying_on(f"/disk{number}", 0.9), MARKS)
    pressure.keep_disks(HERE, {"/disk7"})
    assert [n for n in range(100) if pressure.is_full(HERE, f"/disk{n}")] == [7]
    assert not pressure.is_full(THERE, "/disk7")


def test_gpus_that_were_not_read_stay_as_they_were() -> None:
    pressure = Pressure()
    pressure.set_held(HERE, {"GPU-0", "GPU-1"})
    pressure.set_held(HERE, set(), among={"GPU-0"})
    assert pressure.claimed_share((), {"GPU-0", "GPU-1"}, None) == 0.5
    pressure.set_held(HERE, set())
    assert pressure.claimed_share((), {"GPU-0", "GPU-1"}, None) == 0.0


def test_without_gpus_no_share_is_known() -> None:
    assert Pressure().claimed_share((), (), None) is None
    assert Pressure().claimed_share((), (), {}) is None


def test_a_share_between_the_marks_changes_nothing_but_the_time_it_is_counted_from() -> None:
    pressure, marks = Pressure(), Demand(above=0.8, below=0.7, settle=timedelta(minutes=5))
    for minutes, share, scarce in (
        (0, 0.9, False),
        (4, 0.75, False),
        (6, 0.9, False),
        (11, 0.9, True),
        (12, 0.75, True),
    ):
        pressure.update_demand(HERE, share, marks, NOW + timedelta(minutes=minutes))
        assert pressure.gpus_are_scarce(HERE) is scarce, minutes
    assert pressure.scarce_places() == (HERE,)
    pressure.update_demand(HERE, 0.6, marks, NOW + timedelta(minutes=13))
    assert pressure.scarce_places() == ()
