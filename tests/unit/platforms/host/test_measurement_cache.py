"""What need not be walked again, and what always is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk import measure
from gpukeeper.disk.mounts import MountEntry
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.policy import DiskMarks, Policy, Temporary
from gpukeeper.model.subject import Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host import trees
from tests.unit.platforms.host.machine import Machine, a_tick, everything_seen, held_open

HOUR = timedelta(hours=1)
NEVER_FULL, ALWAYS_FULL = DiskMarks(high=1.1, low=1.1), DiskMarks(high=0.0, low=0.0)


class Walks:
    """The real walk, counted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._measure = measure.measure

    def __call__(self, name: str, *given: Any) -> Any:
        self.names.append(name)
        return self._measure(name, *given)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    counted = Walks()
    monkeypatch.setattr(measure, "measure", counted)
    return counted


@contextmanager
def nothing_walked(walks: Walks, *but: str) -> Iterator[None]:
    walks.names.clear()
    yield
    assert sorted(walks.names) == sorted(but)


def machine(root: Path, *, above: int = 1, marks: DiskMarks = NEVER_FULL) -> Machine:
    made = Machine(root)
    entry = Temporary(root=str(root), names=("tmp*",), above=above, older_than=HOUR, under_pressure=HOUR / 6)
    made.platform.follow(Policy(temporary=(entry,), disk=marks))
    return made


def test_a_young_tree_is_not_walked_again_and_an_old_one_is(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    on.tree()
    (before,) = on.observe().values()
    on.clock.by = HOUR / 3
    with nothing_walked(walks):
        (again,) = on.observe().values()
    assert (again.size, again.last_used, again.seen.incarnation) == (
        before.size,
        before.last_used,
        before.seen.incarnation,
    )
    on.clock.by = HOUR
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_the_age_that_counts_is_the_shorter_one_when_the_disk_may_be_too_full(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path, marks=ALWAYS_FULL)
    on.tree()
    on.observe()
    on.clock.by = HOUR / 6
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_a_measurement_is_remembered_for_half_an_hour_at_most(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    on.tree()
    on.observe()
    on.clock.by = HOUR / 2
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_a_clock_that_went_back_remembers_nothing(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    on.tree()
    on.observe()
    on.clock.by = -HOUR
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_an_old_tree_that_is_in_use_is_not_walked_again(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    path = on.tree()
    on.clock.by = 2 * HOUR
    on.observe()
    with held_open(path / "below" / "f0"):
        with nothing_walked(walks):
            (again,) = on.observe().values()
        assert again.in_use is True
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_use_at_the_top_is_noticed_without_a_walk(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    path = on.tree()
    (before,) = on.observe().values()
    a_tick()
    (path / "new").touch()
    with nothing_walked(walks):
        (again,) = on.observe().values()
    assert again.last_used > before.last_used  # type: ignore[operator]


def test_a_read_always_walks(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    on.tree()
    (seen,) = on.observe().values()
    with nothing_walked(walks, "tmp-a"):
        on.read(seen)


def test_another_thing_of_the_same_name_is_walked(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    path = on.tree()
    on.observe()
    path.rename(tmp_path / "mine")
    on.tree()
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_what_the_policy_changes_is_read_again(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path)
    on.tree()
    on.observe()
    on.platform.follow(Policy(temporary=(Temporary(root=str(tmp_path), names=("tmp*",)),), disk=NEVER_FULL))
    with nothing_walked(walks, "tmp-a"):
        on.observe()


# Far below the threshold


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with more than two entries is heavy."""
    monkeypatch.setattr(trees, "LIGHT", 2)


@pytest.mark.usefixtures("light")
def test_heavy_trees_far_below_the_threshold_are_not_walked(tmp_path: Path) -> None:
    on = machine(tmp_path, above=1_000_000_000)
    on.tree(files=50)
    (tmp_path / "tmp-light").write_bytes(b"x" * 5000)
    on.clock.by = 2 * HOUR
    for _ in range(2):
        found = on.observe()
        heavy, small = found["tmp-a"], found["tmp-light"]
        assert isinstance(heavy.size, Unknown)
        assert "far below the threshold" in heavy.size.why
        assert isinstance(small.size, int)
        assert isinstance(heavy.together, int)
        assert 250_000 < heavy.together < 1_000_000
        assert heavy.together == small.together
    fresh = on.read(heavy)
    assert isinstance(fresh, Subject)
    assert isinstance(fresh.size, int), "a look measures"


@pytest.mark.usefixtures("light")
def test_an_estimate_is_made_once_in_half_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate, asked = measure.estimate, []

    def counted(paths: list[str], deadline: timedelta) -> int | Unknown:
        asked.append(paths)
        return estimate(paths, deadline)

    monkeypatch.setattr(measure, "estimate", counted)
    on = machine(tmp_path, above=1_000_000_000)
    on.tree()
    for ahead, times in ((timedelta(), 1), (HOUR / 3, 1), (HOUR / 2, 2)):
        on.clock.by = ahead
        on.observe()
        assert len(asked) == times


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(("above", "marks"), [(1, NEVER_FULL), (400_000, NEVER_FULL), (10**9, ALWAYS_FULL)])
def test_heavy_trees_are_walked_when_anything_could_be_due(tmp_path: Path, above: int, marks: DiskMarks) -> None:
    on = machine(tmp_path, above=above, marks=marks)
    on.tree(files=50)
    (heavy,) = on.observe().values()
    assert isinstance(heavy.size, int)
    assert heavy.together == heavy.size


@pytest.mark.usefixtures("light")
def test_without_an_estimate_heavy_trees_are_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    on = machine(tmp_path, above=1_000_000_000)
    on.tree(files=50)
    (heavy,) = on.observe().values()
    assert isinstance(heavy.size, int)


def test_small_trees_far_below_the_threshold_are_not_walked_again_however_old(tmp_path: Path, walks: Walks) -> None:
    on = machine(tmp_path, above=1_000_000_000)
    on.tree()
    on.clock.by = 10 * HOUR
    on.observe()
    on.clock.by = 10 * HOUR + HOUR / 3
    with nothing_walked(walks):
        (found,) = on.observe().values()
    assert isinstance(found.together, int)
    on.clock.by = 10 * HOUR + HOUR / 2
    with nothing_walked(walks, "tmp-a"):
        on.observe()


def test_a_tree_that_stays_because_reads_leave_no_trace_is_not_walked_again_at_once(
    tmp_path: Path, walks: Walks
) -> None:
    def scan() -> OpenFiles:
        there = MountEntry("0:99", "/", str(tmp_path), "ext4", options=("rw", "noatime"))
        return msgspec.structs.replace(everything_seen(), own_mounts=(there,))

    on = Machine(tmp_path, scan=scan)
    on.tree()
    on.clock.by = 2 * HOUR
    (found,) = on.observe().values()
    assert isinstance(found.last_used, Unknown)
    assert "(noatime)" in found.last_used.why
    on.clock.by = 2 * HOUR + HOUR / 3
    with nothing_walked(walks):
        on.observe()
    on.clock.by = 3 * HOUR
    with nothing_walked(walks, "tmp-a"):
        on.observe()
