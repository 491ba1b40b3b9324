"""A tree as a subject: what it is known by, found again by, and how its removal is described. On any platform."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk import kernel, trash
from gpukeeper.disk.access_times import LastUse
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.remove import ExpectedTree, RemovalResult, TreeRemoval
from gpukeeper.disk.tree import (
    PlaceAndTime,
    Stat,
    TreeFacts,
    UnderWay,
    answered,
    change_of,
    expected,
    names_of,
    stat_entry,
    taken_in,
    together,
    tree_subject,
    two_numbers,
)
from gpukeeper.disk.walk import Identity
from gpukeeper.model.decision import Accepted, ActResult, Changed, Refused
from gpukeeper.model.subject import Category, Shape, State
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOST = PlaceAndTime("host", "node-1", NOW)
NODE = PlaceAndTime("ray", "lab", NOW, "worker-1")
WHY = Unknown("contains a mount point")
MEASURED = TreeMeasurement(
    device=8, inode=42, uid=0, size=10, entries=1, newest=NOW, ctime_ns=5, problems=(), uids=frozenset({1000})
)
UNMEASURED = msgspec.structs.replace(MEASURED, size=WHY, newest=WHY, ctime_ns=WHY, problems=(WHY.why,))


def facts(**more: Any) -> TreeFacts:
    return TreeFacts(**({"path": "/tmp/pip-\n", "root": "/tmp", "owner": "ann", "in_use": False} | more))


def test_a_tree_is_named_by_its_path_and_known_by_its_identity() -> None:
    used = LastUse(NOW, "a clause")
    tree = tree_subject(facts(last_use=used, labels={"held_by": "pid 77"}), MEASURED, HOST)
    assert (tree.shape, tree.state, tree.category) == (Shape.TREE, State.ENDED, Category.TEMPORARY)
    assert (tree.ref.path, tree.ref.kind, tree.ref.uid) == ("host/node-1/tmp/pip-\\x0a", "tree", "8:42")
    assert (tree.seen.incarnation, tree.seen.version, change_of(tree)) == ("42:5", "42:5", 5)
    assert (tree.size, tree.last_used, tree.use_evidence, tree.in_use) == (10, NOW, "a clause", False)
    assert tree.labels == {"root": "/tmp", "held_by": "pid 77"}


def test_a_tree_of_a_node_is_named_by_that_node_too() -> None:
    tree = tree_subject(facts(labels={"kept_by": "pid 7 has files of it open"}), MEASURED, NODE)
    assert tree.ref.path == "ray/lab/worker-1/tree/tmp/pip-\\x0a"
    assert tree.labels == {"node": "worker-1", "root": "/tmp", "kept_by": "pid 7 has files of it open"}
    assert tree.last_used == NOW


def test_a_tree_that_was_not_measured_keeps_its_unknowns_and_nothing_is_done_to_it() -> None:
    tree = tree_subject(facts(in_use=WHY), UNMEASURED, HOST)
    assert (tree.size, tree.in_use, tree.seen.incarnation) == (WHY, WHY, "42:not measured")
    assert change_of(tree) is None
    assert expected(tree, None) is None


def test_a_removal_must_find_what_was_read_and_for_whom() -> None:
    assert expected(tree_subject(facts(), MEASURED, HOST), 1000) == ExpectedTree((8, 42), 5, 1000)


@pytest.mark.parametrize(
    ("given", "measured", "uids"),
    [
        ({"of_users": True}, MEASURED, frozenset({1000})),
        ({}, MEASURED, None),
        ({"of_users": True}, UNMEASURED, None),
        ({"of_users": True, "category": Category.UNFINISHED}, MEASURED, None),
    ],
)
def test_owners_are_known_only_of_a_whole_tree_that_users_can_reach(
    given: dict[str, Any], measured: TreeMeasurement, uids: frozenset[int] | None
) -> None:
    assert tree_subject(facts(**given), measured, HOST).uids == uids


def test_trees_together_have_at_least_what_was_measured() -> None:
    assert together(tree_subject(facts(), one, HOST) for one in (MEASURED, UNMEASURED, MEASURED)) == 20


@pytest.mark.parametrize("uid", ["", "7", "7@", "@7", "a@b", "7@-1", "7@1@2"])
def test_a_garbled_uid_names_nothing(uid: str) -> None:
    assert two_numbers(uid, "@") is None


def identity_of(path: Path) -> Identity:
    found = path.lstat()
    return found.st_dev, found.st_ino


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pip-a").mkdir()
    (tmp_path / "pip-b").mkdir()
    return tmp_path


def within(root: Path, ask: Callable[[int], object]) -> object:
    fd = os.open(root, kernel.FOLDER)
    try:
        return ask(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("stat", [stat_entry, kernel.stat_inside])
def test_a_tree_is_found_by_identity_whatever_its_name_is_now(root: Path, stat: Stat) -> None:
    wanted = identity_of(root / "pip-a")
    (root / "pip-a").rename(root / "mine")
    (root / "pip-a").mkdir()
    assert within(root, lambda fd: names_of(fd, wanted, stat)) == ["mine"]
    assert within(root, lambda fd: names_of(fd, wanted, stat, lambda owner: False)) == []
    assert within(root, lambda fd: names_of(fd, (wanted[0] + 1, wanted[1]), stat)) == []


def test_what_a_removal_in_progress_creates_is_no_tree(root: Path) -> None:
    place = root / "pip-c"
    place.touch(mode=0)
    place.chmod(0)
    assert within(root, lambda fd: names_of(fd, identity_of(place), stat_entry)) == []
    bin_ = root / f"{trash.TRASH}{'0' * 16}"
    bin_.mkdir(0o700)
    assert within(root, lambda fd: names_of(fd, identity_of(bin_), stat_entry)) == []


def test_a_tree_that_cannot_be_read_now_is_not_taken_for_gone(root: Path) -> None:
    def fails(directory: int, name: str) -> os.stat_result:
        raise PermissionError(13, "no", name)

    with pytest.raises(PermissionError):
        within(root, lambda fd: names_of(fd, identity_of(root / "pip-a"), fails))


def test_a_tree_is_found_in_the_trash_if_its_owner_counts(root: Path) -> None:
    wanted = identity_of(root / "pip-a")
    taken = within(root, lambda fd: trash.take(fd, "pip-a", wanted))
    assert isinstance(taken, trash.TrashedTree)
    assert within(root, lambda fd: taken_in(fd, wanted)) == taken
    assert within(root, lambda fd: taken_in(fd, wanted, lambda owner: owner == os.geteuid())) == taken
    assert within(root, lambda fd: taken_in(fd, wanted, lambda owner: False)) is None
    assert within(root, lambda fd: taken_in(fd, identity_of(root / "pip-b"))) is None


def test_a_tree_is_removed_once_at_a_time_and_again_after_a_failure() -> None:
    removals = UnderWay()
    assert removals.claim("8:42")
    assert not removals.claim("8:42")
    assert removals.claim("8:43")
    with pytest.raises(OSError, match="broken"), removals.ending("8:42"):
        raise OSError(5, "broken")
    assert removals.claim("8:42")


REST = Refused("a part is left")


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (TreeRemoval(entries=3, bytes_back=7), Accepted(7)),
        (TreeRemoval(entries=3, bytes_back=7, left=("a",)), REST),
        (Changed("it is gone already"), Changed("it is gone already")),
        (Refused("no"), Refused("no")),
        (WHY, Refused("it was not removed: contains a mount point")),
    ],
)
def test_the_result_of_a_removal_is_an_answer(result: RemovalResult, answer: ActResult) -> None:
    assert answered(result, lambda removal: REST) == answer
