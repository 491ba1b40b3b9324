"""Taking a tree into the trash and back: real folders, and trash that only looks like ours."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.disk import kernel
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.disk.trash import (
    DELETING,
    FREED,
    RETURNED,
    TAKEN,
    TRASH,
    Trash,
    TrashedTree,
    is_trash,
    leftovers,
    making,
    opening,
    put_back,
    sweep,
    take,
)
from gpukeeper.model.decision import Changed, Refused
from tests.unit.disk.trees import expected, finished, read, trash_in, tree

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else for a while")


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def taken_from(parent: int, path: Path) -> TrashedTree:
    taken = take(parent, path.name, identity(path))
    assert isinstance(taken, TrashedTree), taken
    return taken


def test_what_is_taken_is_out_of_reach_and_can_be_put_back(tmp_path: Path, parent: int) -> None:
    path = tree(tmp_path)
    inode = path.stat().st_ino
    taken = taken_from(parent, path)
    (folder,) = trash_in(tmp_path)
    assert is_trash(folder.name)
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
    assert (path.is_file(), path.stat().st_mode & 0o777, path.stat().st_size) == (True, 0, 0)  # nobody takes its name
    assert leftovers(parent) == (taken,)
    assert put_back(parent, taken) is None
    assert path.stat().st_ino == inode
    assert trash_in(tmp_path) == []


def test_what_was_taken_and_put_back_has_content_as_old_as_before(tmp_path: Path, parent: int) -> None:
    path = tree(tmp_path)
    before = expected(path)  # waits for the clock of files to move on
    age = read(path).content
    assert put_back(parent, taken_from(parent, path)) is None
    assert read(path).content == age
    assert path.stat().st_ctime_ns > before.ctime_ns


@pytest.mark.parametrize("name", [b"a\nb", b"\xff\xfe", b" ", b"-rf", b".hidden", b"x" * 255])
def test_names_are_bytes(tmp_path: Path, parent: int, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.write_text("content")
    taken = taken_from(parent, path)
    assert leftovers(parent) == (taken,)
    assert put_back(parent, taken) is None
    assert path.read_text() == "content"


def test_another_entry_of_that_name_is_left_alone(tmp_path: Path, parent: int) -> None:
    path, other = tree(tmp_path), tree(tmp_path, "other")
    assert isinstance(take(parent, path.name, identity(other)), Changed)
    assert take(parent, "nothing", identity(other)) == Changed("it is gone already")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other", "tree"]


def returned_in(folder: Path) -> Path:
    (found,) = folder.glob(f"*{RETURNED}*")
    return found


def test_a_name_that_was_given_away_meanwhile_is_not_replaced_and_the_tree_comes_back_beside_it(
    tmp_path: Path, parent: int
) -> None:
    """As where everybody may rename: our file was moved away, and another entry has the name."""
    path = tree(tmp_path)
    taken = taken_from(parent, path)
    path.rename(tmp_path / "moved-away")
    path.mkdir()
    answer = put_back(parent, taken)
    assert isinstance(answer, Refused)
    assert (returned_in(tmp_path) / "d0/f0").exists()
    assert returned_in(tmp_path).name in answer.why
    assert list(path.iterdir()) == []
    assert trash_in(tmp_path) == []


def test_where_names_cannot_be_exchanged_the_tree_comes_back_all_the_same(
    tmp_path: Path, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("gpukeeper.disk.kernel.exchange_inside", cannot)
    path = tree(tmp_path)
    assert put_back(parent, taken_from(parent, path)) is None
    assert (path / "d0/f0").exists()
    taken = taken_from(parent, path)
    assert not path.exists()
    path.mkdir()
    assert isinstance(put_back(parent, taken), Refused)
    assert (returned_in(tmp_path) / "d0/f0").exists()
    assert trash_in(tmp_path) == []


@pytest.mark.parametrize("moment", ["made", "exchanged", "deleting", "freed"])
def test_a_crash_at_any_moment_leaves_no_file_of_ours_at_the_name(tmp_path: Path, parent: int, moment: str) -> None:
    path = tree(tmp_path)
    trash = Trash(parent, f"{TRASH}{'0' * 16}", -1, holds_place=True)
    (tmp_path / trash.name).mkdir(mode=0o700)
    trash.fd = os.open(tmp_path / trash.name, os.O_RDONLY)
    found, about = (tmp_path / trash.name).stat(), path.stat()
    os.symlink(f"1 {found.st_dev}:{found.st_ino} {about.st_dev}:{about.st_ino}", TAKEN, dir_fd=trash.fd)
    if moment == "made":
        assert trash._make_place("tree")
    else:
        trash._move_in("tree")
    if moment in {"deleting", "freed"}:
        kernel.rename_inside(trash.fd, TAKEN, trash.fd, DELETING)
    if moment == "freed":
        kernel.rename_inside(parent, "tree", trash.fd, FREED)
    os.close(trash.fd)
    answers = finished(tmp_path, scan=lambda: OpenFiles({}, {}, (), frozenset(), None))
    sweep(parent)
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == (["tree"] if moment in {"made", "exchanged"} else []), answers
    assert not left or (path / "d0/f0").exists()


KILLED_AFTER = """
import os, sys
from gpukeeper.disk import kernel
from gpukeeper.disk.trash import take
left = int(sys.argv[1]) + 1  # the directory itself is opened first
def counted(call):
    def counting(*given, **named):
        global left
        answer = call(*given, **named)
        left -= 1
        if not left:
            os._exit(9)
        return answer
    return counting
for name in ("mkdir", "open", "symlink"):
    setattr(os, name, counted(getattr(os, name)))
for name in ("rename_inside", "exchange_inside"):
    setattr(kernel, name, counted(getattr(kernel, name)))
parent = os.open(sys.argv[2], os.O_RDONLY)
about = os.stat("tree", dir_fd=parent)
take(parent, "tree", (about.st_dev, about.st_ino))
"""


@pytest.mark.parametrize("call", range(1, 8))
def test_a_kill_after_any_change_leaves_the_tree_and_nothing_of_ours(tmp_path: Path, parent: int, call: int) -> None:
    path = tree(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER, str(call), tmp_path], check=False)
    assert killed.returncode == 9, "it was done before"
    finished(tmp_path, scan=lambda: OpenFiles({}, {}, (), frozenset(), None))
    sweep(parent)
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]
    assert (path / "d0/f0").exists()


def test_an_empty_trash_directory_is_swept_and_a_full_one_is_not(tmp_path: Path, parent: int) -> None:
    taken_from(parent, tree(tmp_path))
    (tmp_path / f"{TRASH}{'0' * 16}").mkdir(mode=0o700)
    assert sweep(parent) == 1
    assert len(leftovers(parent)) == 1


def test_what_another_run_is_at_work_on_is_nothing_left_over(tmp_path: Path, parent: int) -> None:
    """Putting it back would show a tree that is being deleted."""
    path = tree(tmp_path)
    with making(parent, "1:2") as trash:
        assert isinstance(trash, Trash)
        taken = trash.take(path.name, identity(path))
        assert isinstance(taken, TrashedTree)
        assert leftovers(parent) == ()
        assert sweep(parent) == 0
        answer = put_back(parent, taken)
        assert isinstance(answer, Refused)
        assert "another run" in answer.why
        assert trash.put_back(taken) is None


def forged(tmp_path: Path, mode: int = 0o700, proof: str = "1 {dev}:{ino} {dev}:{tree}", link: str = TAKEN) -> Path:
    folder = tmp_path / f"{TRASH}{'ab' * 8}"
    folder.mkdir(mode=mode)
    folder.chmod(mode)
    path = tree(folder)
    found, target = folder.stat(), path.stat()
    (folder / link).symlink_to(proof.format(dev=found.st_dev, ino=found.st_ino, tree=target.st_ino))
    return folder


@pytest.mark.parametrize("link", [TAKEN, DELETING])
def test_a_trash_directory_that_proves_itself_is_ours(tmp_path: Path, parent: int, link: str) -> None:
    """The forger of the next test with nothing wrong: so that it fails there for the reason it names."""
    forged(tmp_path, link=link)
    assert [(one.name, one.deleting) for one in leftovers(parent)] == [("tree", link == DELETING)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": 0o755},
        {"mode": 0o777},
        {"proof": "1 {dev}:{tree} {dev}:{tree}"},
        {"proof": "1 {dev}:{ino} {dev}:{ino}"},
        {"proof": "1 {dev}:{ino}"},
        {"proof": "2 {dev}:{ino} {dev}:{tree}"},
        {"link": "something"},
    ],
    ids=str,
)
def test_forged_trash_is_untouched(tmp_path: Path, parent: int, wrong: dict[str, object]) -> None:
    folder = forged(tmp_path, **wrong)  # type: ignore[arg-type]
    assert leftovers(parent) == ()
    assert sweep(parent) == 0
    assert (folder / "tree/d0/f0").exists()


def test_a_renamed_trash_directory_is_not_ours(tmp_path: Path, parent: int) -> None:
    taken = taken_from(parent, tree(tmp_path))
    (tmp_path / taken.trash).rename(tmp_path / "mine-now")
    assert leftovers(parent) == ()


@ROOT
def test_trash_of_another_user_is_untouched(tmp_path: Path, parent: int) -> None:
    folder = forged(tmp_path)
    for path in (folder, folder / TAKEN):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert leftovers(parent) == ()
    os.chown(folder, 0, 0)
    assert leftovers(parent) == ()  # the link is still theirs
    os.chown(folder / TAKEN, 0, 0, follow_symlinks=False)
    assert len(leftovers(parent)) == 1
    with opening(parent, folder.name) as trash:
        assert not trash.remove()


@ROOT
def test_who_may_not_take_it_is_refused_with_a_reason(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    found = tree(tmp_path).stat()
    program = f"""
import os
from gpukeeper.disk.trash import take
parent = os.open({str(tmp_path)!r}, os.O_RDONLY)
os.setgid(65534); os.setuid(65534)
print(take(parent, "tree", ({found.st_dev}, {found.st_ino})).why)
"""
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "sticky" in printed
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]


def test_a_trash_directory_that_is_not_private_leaves_nothing_behind(tmp_path: Path, parent: int) -> None:
    path = tree(tmp_path)
    before = os.umask(0o277)
    try:
        answer = take(parent, path.name, identity(path))
    finally:
        os.umask(before)
    assert isinstance(answer, Refused)
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_directories_cannot_be_locked_nothing_is_taken_and_nothing_left(
    tmp_path: Path, parent: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on filesystems of the network, which a test machine does not have."""

    def cannot_lock(_: int) -> bool:
        raise OSError(number, os.strerror(number))

    path = tree(tmp_path)
    monkeypatch.setattr("gpukeeper.disk.kernel.lock", cannot_lock)
    answer = take(parent, path.name, identity(path))
    assert isinstance(answer, Refused)
    assert "cannot be locked" in answer.why
    assert [one.name for one in tmp_path.iterdir()] == ["tree"]
