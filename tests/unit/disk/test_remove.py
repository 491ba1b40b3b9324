"""Removing a tree: only what was looked at, only when nobody uses it, and what came back is counted honestly."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk import measure, remove, worker_pool
from gpukeeper.disk.kernel import KERNEL
from gpukeeper.disk.measure import open_directory
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.remove import ExpectedTree, TreeRemoval
from gpukeeper.disk.trash import DELETING, TAKEN, TrashedTree, take
from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.unknown import Unknown
from tests.unit.disk.trees import (
    HOLD_FOLDER,
    HOLD_MAPPED,
    HOLD_OPEN,
    LOCK,
    SIT_INSIDE,
    before_the_look,
    child,
    everything_seen,
    expected,
    finished,
    read,
    removed,
    trash_in,
    tree,
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is shared out at once: nothing is done alone until the other programs have started."""
    monkeypatch.setattr(measure, "ALONE", 5)
    monkeypatch.setattr(remove, "ALONE", 5)
    monkeypatch.setattr(worker_pool, "MEANWHILE", 1)
    monkeypatch.setattr(worker_pool.WorkerPool, "is_ready", lambda self: True)


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def kept(path: Path) -> bool:
    """Under its own name, whole, and without a trace of having been away."""
    return len([one for one in path.rglob("*") if one.is_file()]) >= 12 and trash_in(path.parent) == []


def test_a_tree_that_nobody_uses_is_removed_and_its_bytes_are_counted(tmp_path: Path) -> None:
    path = tree(tmp_path)
    os.sync()
    found = read(path)
    answer = removed(path)
    assert isinstance(answer, TreeRemoval), answer
    assert (answer.entries, answer.bytes_back, answer.left) == (16, found.size, ())
    assert list(tmp_path.iterdir()) == []


def test_a_single_file_and_a_link_are_trees_too(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("content")
    (tmp_path / "link").symlink_to("outside")
    (tmp_path / "file").write_text("x")
    for name in ("link", "file"):
        assert isinstance(removed(tmp_path / name), TreeRemoval)
    assert [one.name for one in tmp_path.iterdir()] == ["outside"]


def test_links_in_a_tree_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("content")
    path = tree(tmp_path)
    (path / "folder").symlink_to(tmp_path / "outside")
    (path / "d0/up").symlink_to("../..")
    assert isinstance(removed(path), TreeRemoval)
    assert (tmp_path / "outside/file").read_text() == "content"


# Between the look and the act


@pytest.mark.parametrize("program", [HOLD_OPEN, HOLD_MAPPED])
def test_a_file_opened_since_the_read_keeps_the_tree(tmp_path: Path, program: str) -> None:
    path = tree(tmp_path)
    wanted = expected(path)
    with child(program, path / "d1/f1") as pid:
        assert removed(path, wanted) == Changed(f"it is in use by pid {pid}")
        assert kept(path)
    assert isinstance(removed(path, expected(path)), TreeRemoval)


@pytest.mark.parametrize("where", ["", "d1"])
@pytest.mark.parametrize("program", [SIT_INSIDE, HOLD_FOLDER])
def test_a_user_who_sits_in_the_tree_keeps_it(tmp_path: Path, program: str, where: str) -> None:
    path = tree(tmp_path)
    wanted = expected(path)
    with child(program, path / where) as pid:
        assert removed(path, wanted) == Changed(f"it is in use by pid {pid}")
        assert kept(path)


def test_a_deleted_file_of_it_that_is_still_open_keeps_the_tree(tmp_path: Path) -> None:
    path = tree(tmp_path)
    with child(
        "import os, sys; f = open(sys.argv[1], 'w'); os.unlink(f.name); print(flush=True); sys.stdin.read()",
        path / "gone",
    ) as pid:
        assert removed(path, expected(path)) == Changed(f"it is in use by pid {pid}")
        assert kept(path)


def write_and_close(path: Path) -> None:
    (path / "d2/f3").write_text("precious")


def overwrite_with_old_times(path: Path) -> None:
    (path / "d2/f3").write_bytes(b"y" * 5000)
    os.utime(path / "d2/f3", (5, 5))


def make_another(path: Path) -> None:
    (path / "d0/new").mkdir()


def remove_one(path: Path) -> None:
    (path / "d0/extra").unlink()


def change_rights(path: Path) -> None:
    path.chmod(0o711)


def add_at_the_top(path: Path) -> None:
    (path / "new").touch()


@pytest.mark.parametrize(
    "change", [write_and_close, overwrite_with_old_times, make_another, remove_one, change_rights, add_at_the_top]
)
def test_a_tree_that_changed_since_the_read_is_kept(tmp_path: Path, change: object) -> None:
    path = tree(tmp_path)
    (path / "d0/extra").touch()
    wanted = expected(path)
    change(path)  # type: ignore[operator]
    answer = removed(path, wanted)
    assert isinstance(answer, Changed)
    assert "changed since it was read" in answer.why
    assert kept(path)


@pytest.mark.parametrize("change", [write_and_close, make_another])
def test_a_change_by_a_user_who_was_inside_while_it_was_taken_is_seen(tmp_path: Path, change: object) -> None:
    """In and out again before we looked at open files: the times tell."""
    path = tree(tmp_path)

    def act() -> None:
        (folder,) = trash_in(tmp_path)
        change(folder / "tree")  # type: ignore[operator]

    answer = removed(path, scan=before_the_look(act))
    assert answer == Changed("something in it changed since it was read")
    assert kept(path)


@pytest.mark.parametrize("kind", ["LOCK_SH", "LOCK_EX"])
def test_a_lock_keeps_the_tree_even_if_its_holder_cannot_be_seen(tmp_path: Path, kind: str) -> None:
    def nobody() -> OpenFiles:
        return msgspec.structs.replace(everything_seen(), files={}, paths={})

    path = tree(tmp_path)
    for locked in (path, path / "d1"):
        with child(LOCK, locked, kind):
            assert removed(path, scan=nobody) == Changed("a directory in it is locked")
            assert kept(path)
    assert isinstance(removed(path, scan=nobody), TreeRemoval)


def test_what_the_adapter_asks_keeps_the_tree(tmp_path: Path) -> None:
    path = tree(tmp_path)
    asked: list[int] = []

    def still_free(fd: int) -> str:
        asked.append(os.fstat(fd).st_ino)
        return "its socket answers"

    assert removed(path, still_free=still_free) == Changed("its socket answers")
    assert asked == [path.stat().st_ino]
    assert removed(path, still_free=lambda fd: Unknown("path too long")) == Unknown("path too long")
    assert kept(path)
    assert isinstance(removed(path, still_free=lambda fd: None), TreeRemoval)


def test_an_error_in_between_puts_the_tree_back(tmp_path: Path) -> None:
    path = tree(tmp_path)

    def broken() -> OpenFiles:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        removed(path, scan=broken)
    assert kept(path)

    def unreadable() -> OpenFiles:
        raise PermissionError(13, "Permission denied")

    assert removed(path, scan=unreadable) == Unknown("the check before deleting failed: Permission denied")
    assert kept(path)


# Unknown keeps


def test_users_that_could_not_be_seen_keep_the_tree(tmp_path: Path) -> None:
    path = tree(tmp_path)

    def partly() -> OpenFiles:
        return msgspec.structs.replace(everything_seen(), hidden="the open files of 3 processes could not be read")

    answer = removed(path, scan=partly)
    assert isinstance(answer, Unknown)
    assert "3 processes" in answer.why
    assert kept(path)


def test_sockets_and_pipes_keep_the_tree_unless_they_are_known_to_be_dead(tmp_path: Path) -> None:
    path = tree(tmp_path)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path / "d0/socket"))
    os.mkfifo(path / "d0/pipe")
    assert isinstance(removed(path), Unknown)
    assert kept(path)
    assert isinstance(removed(path, sockets=True), TreeRemoval)


def test_without_time_to_check_the_tree_is_kept(tmp_path: Path) -> None:
    path = tree(tmp_path)
    answer = removed(path, until=time.monotonic() - 1)
    assert isinstance(answer, Unknown)
    assert "time" in answer.why
    assert kept(path)


def test_a_mount_of_the_tree_somewhere_keeps_it(tmp_path: Path) -> None:
    path = tree(tmp_path)

    def mounted() -> OpenFiles:
        (folder,) = trash_in(tmp_path)
        return msgspec.structs.replace(everything_seen(), mounted=frozenset({("8:1", f"/x/{folder.name}/tree/d0")}))

    assert removed(path, scan=mounted) == Changed("it is in use: mounted somewhere, or by the kernel itself")
    assert kept(path)
    assert KERNEL == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", f".gpukeeper-trash-{'0' * 16}"])
def test_what_is_no_name_of_a_tree_is_refused(tmp_path: Path, name: str) -> None:
    with open_directory(str(tmp_path)) as parent:
        answer = remove.remove(parent, name, ExpectedTree((1, 2), 3), scan=everything_seen, until=math.inf)
    assert isinstance(answer, Refused)


# What comes back


def test_hard_links_give_back_once_and_nothing_with_a_link_outside(tmp_path: Path) -> None:
    path = tree(tmp_path, folders=2, files=0)
    (path / "d0/inside").write_bytes(b"x" * 100_000)
    os.link(path / "d0/inside", path / "d1/inside-too")
    (path / "d0/outside").write_bytes(b"x" * 900_000)
    os.link(path / "d0/outside", tmp_path / "other")
    os.sync()
    found = read(path)
    folders = sum(one.stat().st_blocks for one in (path, path / "d0", path / "d1")) * 512
    back = (path / "d0/inside").stat().st_blocks * 512 + folders
    assert isinstance(found.size, int)
    assert found.size > back + 900_000 - 1
    answer = removed(path)
    assert isinstance(answer, TreeRemoval)
    assert answer.bytes_back == back
    assert (tmp_path / "other").stat().st_size == 900_000


def test_holes_give_nothing_back(tmp_path: Path) -> None:
    path = tree(tmp_path, folders=1, files=0)
    with (path / "d0/sparse").open("wb") as file:
        file.truncate(10**12)
    answer = removed(path)
    assert isinstance(answer, TreeRemoval)
    assert isinstance(answer.bytes_back, int)
    assert answer.bytes_back < 100_000


# Large, deep and odd trees


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_a_large_tree_is_shared_out_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove, "SHARE", 100)
    path = tree(tmp_path, folders=60, files=60)
    os.link(path / "d0/f0", path / "d59/second")
    (path / "d7/deep").mkdir()
    os.sync()
    found, told = read(path), list[int]()
    answer = removed(path, progress=told.append)
    assert isinstance(answer, TreeRemoval)
    assert (answer.entries, answer.bytes_back, answer.left) == (found.entries, found.size, ())
    assert told == sorted(told)
    assert len(told) > 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("shared")
def test_measuring_alone_and_shared_out_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHARE", 50)
    path = tree(tmp_path, folders=40, files=20)
    for folder in range(1, 40):
        os.link(path / "d0/f0", path / f"d{folder}/again")
    os.link(path / "d3/f3", tmp_path / "outside")
    os.utime(path / "d20/f5", (2**31, 2**31))
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path / "d9/s"))
    held = {(path.stat().st_dev, (path / "d30/f1").stat().st_ino): 77}
    with open_directory(str(tmp_path)) as parent:
        alone, shared = (measure.measure("tree", parent, held, alone=alone) for alone in (10**9, 5))
    assert alone == shared
    assert shared is not None
    assert shared.held_by == 77


@pytest.mark.usefixtures("shared")
def test_a_program_that_ends_early_is_a_problem_and_no_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "CHILD", ("false",))
    tree(tmp_path)
    with open_directory(str(tmp_path)) as parent:
        found = measure.measure("tree", parent, alone=1)
    assert found is not None
    assert found.size == Unknown(worker_pool.ENDED)


@pytest.mark.usefixtures("shared")
def test_when_a_program_ends_early_the_rest_waits_in_the_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree(tmp_path)
    wanted = expected(path)
    with monkeypatch.context() as broken:
        broken.setattr(measure, "ALONE", 10**6)
        broken.setattr(worker_pool, "CHILD", ("false",))
        answer = removed(path, wanted)
    assert isinstance(answer, TreeRemoval)
    assert "the next pass continues" in answer.left[0]
    assert not path.exists()
    (again,) = finished(tmp_path)
    assert isinstance(again, TreeRemoval)
    assert (answer.entries + again.entries, list(tmp_path.iterdir())) == (16, [])


def deep(top: Path, levels: int) -> None:
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 20, dir_fd=fd)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """For trees that are too deep for shutil.rmtree of Python 3.11, by which pytest removes its directories: one that
    is left there, by a failure or a kill, breaks every later run of pytest. So it is not in tmp_path.
    """
    folder = tempfile.mkdtemp(prefix="deep-")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


# More than Python calls deep, than a process usually may have files open, and than fit into a path.
LEVELS = 1_200
assert sys.getrecursionlimit() < LEVELS


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_more_levels_than_calls_or_paths_can_be_deep_are_measured_and_removed(
    own_folder: Path, alone: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not alone:
        request.getfixturevalue("shared")
        for module in (measure, remove):  # both try to return the rest to others where it is too deep for that
            monkeypatch.setattr(module, "SHARE", 300)
    path = tree(own_folder)
    deep(path / "d1", LEVELS)
    answer = removed(path)
    assert isinstance(answer, TreeRemoval)
    assert (answer.entries, answer.left) == (LEVELS + 17, ())
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("alone", [True, False])
def test_names_that_are_no_text_are_removed(tmp_path: Path, alone: bool, request: pytest.FixtureRequest) -> None:
    if not alone:
        request.getfixturevalue("shared")
    path = tree(tmp_path)
    for name in (b"a\nb", b"\xff\xfe", b'"quoted"', b"-rf", b" ", b"\x01\x1b[31m"):
        folder = os.fsencode(path) + b"/d0/" + name
        os.mkdir(folder)  # noqa: PTH102 - bytes
        Path(os.fsdecode(folder + b"/" + name)).write_text("x")
    answer = removed(path)
    assert isinstance(answer, TreeRemoval)
    assert (answer.entries, list(tmp_path.iterdir())) == (28, [])


def test_directories_that_are_only_for_reading_are_removed_by_their_owner(tmp_path: Path) -> None:
    """As package caches make them. Root needs no rights, so a child does it as nobody."""
    program = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.disk.trees import removed, tree
root = os.open(sys.argv[1], os.O_RDONLY); os.fchmod(root, 0o777); os.fchdir(root)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = tree(Path("."))
for folder in path.iterdir(): folder.chmod(0o500)
print(removed(path).left, os.listdir("."))
"""
    repository = Path(__file__).parents[3]
    printed = subprocess.check_output([sys.executable, "-c", program, tmp_path, repository], text=True)
    assert printed.strip() == "() []"


@ROOT
def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path: Path) -> None:
    path = tree(tmp_path, folders=30, files=2)
    for folder in range(25):
        subprocess.run(["chattr", "+i", path / f"d{folder}/f0"], check=True)
    try:
        answer = removed(path)
        assert isinstance(answer, TreeRemoval)
        assert answer.entries == 5 * 3 + 25
        assert answer.left[0].endswith("could not be removed: Operation not permitted")
        assert len(answer.left) == 21
        assert answer.left[-1].startswith("and ")
        (again,) = finished(tmp_path)
        assert isinstance(again, TreeRemoval)
        assert again.entries == 0
    finally:
        subprocess.run(["chattr", "-i", *tmp_path.rglob("f0")], check=True)
    assert isinstance(finished(tmp_path)[0], TreeRemoval)
    assert list(tmp_path.iterdir()) == []


# After an interruption


def test_what_was_only_taken_is_put_back(tmp_path: Path) -> None:
    path = tree(tmp_path)
    with open_directory(str(tmp_path)) as parent:
        taken = take(parent, "tree", expected(path).identity)
    assert isinstance(taken, TrashedTree)
    assert finished(tmp_path) == [Changed("an interrupted run had moved it to the trash; it was put back")]
    assert kept(path)


def half_deleted(tmp_path: Path) -> Path:
    path = tree(tmp_path)
    with open_directory(str(tmp_path)) as parent:
        take(parent, "tree", expected(path).identity)
    (folder,) = trash_in(tmp_path)
    (folder / TAKEN).rename(folder / DELETING)
    (folder / "tree/d0/f0").unlink()
    return folder


def test_what_was_half_deleted_is_finished(tmp_path: Path) -> None:
    half_deleted(tmp_path)
    (answer,) = finished(tmp_path)
    assert isinstance(answer, TreeRemoval)
    assert (answer.entries, list(tmp_path.iterdir())) == (15, [])


def test_what_was_half_deleted_and_is_in_use_stays_in_the_trash(tmp_path: Path) -> None:
    folder = half_deleted(tmp_path)
    with child(HOLD_OPEN, folder / "tree/d1/f1") as pid:
        (answer,) = finished(tmp_path)
        assert isinstance(answer, Unknown)
        assert f"pid {pid}" in answer.why
        assert folder.name in answer.why
        assert (folder / "tree/d1/f1").exists()
    assert not (tmp_path / "tree").exists()


def test_an_interruption_while_deleting_never_puts_the_rest_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name it would be taken for complete."""
    path = tree(tmp_path)

    def interrupted(*_: object, **__: object) -> None:
        (folder,) = trash_in(tmp_path)
        (folder / "tree/d0/f0").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(remove.TreeDeleter, "empty", interrupted)
    with pytest.raises(KeyboardInterrupt):
        removed(path)
    (folder,) = trash_in(tmp_path)
    assert not path.exists()
    assert (folder / "tree/d1/f1").exists()
