"""What is scarce, and how much of it is remembered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.engine.memory import Pressure
from gpukeeper.model.decision import View
from gpukeeper.model.policy import Demand, DiskMarks, Images
from gpukeeper.model.subject import Disk, Memory, Ref, Seen, Shape, State, Subject
from gpukeeper.model.unknown import Unknown

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


LIMIT = Images(above=1)


def image(name: str, days: int, size: int | Unknown = 10, built: int = 400, **changed: Any) -> View:
    """Unused for so many days."""
    seen = Seen(Ref(*THERE, "image", name, f"sha256:{name}"), "i", "v", NOW)
    facts = {"state": State.ENDED, "created": NOW - timedelta(days=built), "size": size, **changed}
    memory = Memory(first_seen_ended=NOW - timedelta(days=days))
    return View(Subject(seen=seen, shape=Shape.IMAGE, **facts), memory=memory)


def ranked(pressure: Pressure, *views: View, images: Images = LIMIT) -> dict[str, object]:
    return {one.subject.ref.name: one.subject.together for one in pressure.with_images(views, images)}


def test_each_unused_image_is_added_to_those_that_were_used_later() -> None:
    found = ranked(Pressure(), image("old", 9, 100), image("new", 1), image("between", 5, 50))
    assert found == {"new": 10, "between": 60, "old": 160}


def test_of_images_that_were_first_seen_together_the_newer_counts_as_used_later() -> None:
    assert ranked(Pressure(), image("b", 1, built=50), image("a", 1, built=900)) == {"b": 10, "a": 20}


def test_what_is_used_or_kept_or_of_unknown_size_or_use_counts_for_nothing() -> None:
    others = (
        image("used", 1, in_use=True),
        image("base", 1),
        image("unmeasured", 1, Unknown("not yet")),
        image("unclear", 1, last_used=Unknown("garbled")),
    )
    found = ranked(Pressure(), *others, image("old", 9), images=Images(above=1, keep=("base",)))
    assert found == {"old": 10} | dict.fromkeys(("used", "base", "unmeasured", "unclear"))


def test_an_image_that_is_read_again_is_compared_with_the_last_list() -> None:
    pressure = Pressure()
    ranked(pressure, image("old", 9), image("new", 1))
    assert ranked(pressure, image("old", 9)) == {"old": 20}
    assert ranked(pressure, image("new", 1, in_use=True)) == {"new": None}
    assert ranked(pressure, image("old", 9)) == {"old": 10}


def test_an_image_that_a_complete_list_does_not_show_is_forgotten() -> None:
    pressure = Pressure()
    ranked(pressure, image("old", 9), image("new", 1))
    pressure.keep_images(THERE, {image("old", 9).subject.ref.key})
    assert ranked(pressure, image("old", 9)) == {"old": 10}
