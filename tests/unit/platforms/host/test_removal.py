"""Removing trees: exactly what was looked at, and nothing that anybody uses or wants."""

from __future__ import annotations

import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk import kernel, trash
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Changed, Refused
from gpukeeper.model.policy import Policy, Temporary
from gpukeeper.model.subject import Category, Gone, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.connect import Timeouts
from tests.unit.platforms.host.machine import Machine, a_tick, everything_seen, held_open


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_tree_is_removed_and_the_answer_shows_what_came_back(machine: Machine) -> None:
    machine.tree("tmp-a"), machine.tree("tmp-b")
    seen = machine.observe()
    answer = machine.remove(seen["tmp-a"])
    assert answer == Accepted(seen["tmp-a"].size)
    assert machine.names() == ["tmp-b"]
    assert isinstance(machine.read(seen["tmp-a"]), Gone)


def test_a_plain_file_and_a_link_are_trees_too(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    (tmp_path / "tmp-file").write_text("x")
    (tmp_path / "tmp-link").symlink_to("kept")
    for one in machine.observe().values():
        assert isinstance(machine.remove(one), Accepted)
    assert machine.names() == ["kept"]


def test_what_is_opened_after_the_read_is_kept(machine: Machine) -> None:
    path = machine.tree()
    seen = machine.observe()["tmp-a"]
    with held_open(path / "below" / "f0") as pid:
        assert machine.remove(seen) == Changed(f"it is in use by pid {pid}")
    assert (path / "below" / "f0").exists()


@pytest.mark.parametrize("how", ["write", "chmod", "add", "rename"])
def test_what_changes_after_the_read_is_kept(machine: Machine, how: str) -> None:
    path = machine.tree()
    seen = machine.observe()["tmp-a"]
    a_tick()
    match how:
        case "write":
            (path / "below" / "f0").write_bytes(b"y" * 5000)
        case "chmod":
            (path / "below" / "f0").chmod(0o600)
        case "add":
            (path / "new").touch()
        case "rename":
            path = path.rename(path.with_name("tmp-b"))
    assert isinstance(machine.remove(seen), Changed)
    assert len(list((path / "below").iterdir())) == 3


def test_a_name_that_the_policy_no_longer_names_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    path = machine.tree()
    seen = machine.observe()["tmp-a"]
    path.rename(tmp_path / "mine")
    answer = machine.remove(seen)
    assert isinstance(answer, Changed)
    assert "does not match" in answer.why
    machine.platform.follow(Policy())
    (tmp_path / "mine").rename(path)
    assert isinstance(machine.remove(seen), Changed)
    assert path.exists()


def test_a_policy_of_another_platform_names_nothing_here(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tree()
    elsewhere = Temporary(root=str(tmp_path), names=("tmp*",), platform="ray")
    machine.platform.follow(Policy(temporary=(elsewhere,)))
    assert machine.observe() == {}


def test_what_was_not_measured_is_refused(machine: Machine) -> None:
    machine.tree()
    seen = machine.observe()["tmp-a"]
    unmeasured = msgspec.structs.replace(seen.seen, incarnation="7:not measured")
    assert isinstance(machine.remove(msgspec.structs.replace(seen, seen=unmeasured)), Refused)
    assert machine.names() == ["tmp-a"]


def test_when_not_everybody_could_be_read_it_is_kept(tmp_path: Path) -> None:
    def partly() -> OpenFiles:
        return msgspec.structs.replace(everything_seen(), hidden="the open files of 3 processes could not be read")

    machine = Machine(tmp_path, scan=partly)
    machine.tree()
    seen = machine.observe()["tmp-a"]
    assert isinstance(seen.in_use, Unknown)
    answer = machine.remove(seen)
    assert isinstance(answer, Refused)
    assert "3 processes" in answer.why
    assert machine.names() == ["tmp-a"]


def test_a_removal_that_hangs_is_not_begun_a_second_time(tmp_path: Path) -> None:
    hang, let_go = threading.Event(), threading.Event()

    def hanging() -> OpenFiles:
        if hang.is_set():
            let_go.wait()
        return everything_seen()

    machine = Machine(tmp_path, scan=hanging, timeouts=Timeouts(removal=timedelta(seconds=-9)))
    machine.tree()
    seen = machine.observe()["tmp-a"]
    hang.set()
    assert isinstance(machine.remove(seen), Unknown)
    second = machine.remove(seen)
    assert isinstance(second, Refused)
    assert "earlier removal" in second.why
    let_go.set()


# What stays


def test_a_keep_file_keeps_a_tree_and_reports_it(machine: Machine) -> None:
    path = machine.tree()
    seen = machine.observe()["tmp-a"]
    (path / ".keep").touch()
    kept = machine.read(seen)
    assert kept.kept == "it contains a file named .keep"
    assert isinstance(machine.remove(kept), Changed)
    (path / ".keep").unlink()
    assert machine.read(seen).kept is None


def test_a_name_that_the_policy_keeps_is_shown_and_not_even_walked(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tree("tmp-a"), machine.tree("tmp-model")
    entry = Temporary(root=str(tmp_path), names=("tmp*",), keep=("*model",), above=0)
    machine.platform.follow(Policy(temporary=(entry,)))
    seen = machine.observe()
    assert seen["tmp-model"].kept == "the policy keeps entries with its name"
    assert isinstance(seen["tmp-model"].size, Unknown)
    assert seen["tmp-a"].together == seen["tmp-a"].size, "what stays anyway is not held against the others"
    assert isinstance(machine.remove(machine.read(seen["tmp-model"])), Changed)
    assert machine.names() == ["tmp-a", "tmp-model"]


def test_a_tree_that_holds_a_directory_of_gpukeeper_or_another_root_stays(tmp_path: Path) -> None:
    ledger = tmp_path / "tmp-state" / "gpukeeper"
    ledger.mkdir(parents=True)
    (tmp_path / "tmp-disk" / "scratch").mkdir(parents=True)
    (tmp_path / "short").symlink_to(tmp_path / "tmp-disk" / "scratch")
    machine = Machine(tmp_path, directories=[str(ledger)])
    entries = [Temporary(root=str(tmp_path / name), names=("tmp*",), above=0) for name in ("", "short")]
    machine.platform.follow(Policy(temporary=tuple(entries)))
    seen = machine.observe()
    assert "gpukeeper needs" in str(seen["tmp-state"].kept)
    assert "the policy names" in str(seen["tmp-disk"].kept)
    for one in seen.values():
        assert isinstance(machine.remove(machine.read(one)), Changed)
    assert ledger.is_dir()


@pytest.mark.parametrize(
    "name", ["ray", "systemd-private-1", "lost+found", ".X11-unix", ".gpukeeper-trash-" + "0" * 16]
)
def test_well_known_names_are_never_offered_whatever_the_policy_says(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, "*", ".*")
    machine.tree(name)
    assert machine.observe() == {}


# Interrupted removals


def interrupted(machine: Machine, seen: Subject, *, deleting: bool) -> Path:
    """As a crash leaves it: in the trash, whole, or with its deletion begun."""
    parent = os.open(machine.root, os.O_RDONLY)
    device, inode = (int(number) for number in seen.ref.uid.split(":"))
    taken = trash.take(parent, Path(seen.ref.name).name, (device, inode))
    assert isinstance(taken, trash.TrashedTree)
    if deleting:
        folder = os.open(machine.root / taken.trash, os.O_RDONLY)
        kernel.rename_inside(folder, trash.TAKEN, folder, trash.DELETING)
        os.close(folder)
        (machine.root / taken.trash / taken.name / "below" / "f0").unlink()
    os.close(parent)
    return machine.root / taken.trash / taken.name


def test_what_an_interrupted_removal_left_is_shown_found_and_finished(machine: Machine) -> None:
    machine.tree()
    before = machine.observe()["tmp-a"]
    path = interrupted(machine, before, deleting=True)
    left = machine.observe()["tmp-a"]
    assert left.ref.name == str(path)
    assert (left.ref.uid, left.ref.kind, left.category) == (before.ref.uid, "tree", Category.UNFINISHED)
    assert left.together is None
    found = machine.read(before)
    assert isinstance(found, Subject)
    assert (found.state, found.category) == (State.ENDED, Category.UNFINISHED)
    assert isinstance(machine.remove(found), Accepted)
    assert machine.names() == []
    assert isinstance(machine.read(before), Gone)


def test_what_was_only_taken_is_put_back_and_decided_again(machine: Machine) -> None:
    machine.tree()
    before = machine.observe()["tmp-a"]
    interrupted(machine, before, deleting=False)
    answer = machine.remove(machine.observe()["tmp-a"])
    assert isinstance(answer, Changed)
    assert "put back" in answer.why
    assert machine.names() == ["tmp-a"]
    assert machine.observe()["tmp-a"].category is Category.TEMPORARY


def test_an_empty_trash_of_a_crash_goes_with_the_next_removal(machine: Machine) -> None:
    machine.tree()
    (machine.root / f"{trash.TRASH}{'0' * 16}").mkdir(mode=0o700)
    assert isinstance(machine.remove(machine.observe()["tmp-a"]), Accepted)
    assert machine.names() == []


def test_a_forged_trash_is_nobodys(machine: Machine) -> None:
    machine.tree(f"{trash.TRASH}{'0' * 16}/tmp-a")
    assert machine.observe() == {}
    assert len(machine.names()) == 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("chattr") is None, reason="needs root and chattr")
def test_what_could_not_be_deleted_is_reported_and_waits_in_the_trash(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    path = machine.tree() / "below" / "f1"
    if os.system(f"chattr +i {path} 2>/dev/null") != 0:
        pytest.skip("this filesystem has no immutable files")
    try:
        answer = machine.remove(machine.observe()["tmp-a"])
        assert isinstance(answer, Refused)
        assert "not all" in answer.why
        assert "f1" in answer.why
        left = machine.observe()["tmp-a"]
        assert left.category is Category.UNFINISHED
    finally:
        os.system(f"chattr -i {tmp_path}/.gpukeeper-trash-*/tmp-a/below/f1")
    assert isinstance(machine.remove(machine.read(left)), Accepted)
    assert machine.names() == []


# What stopped containers need


def test_a_directory_that_a_stopped_container_has_mounted_stays(tmp_path: Path) -> None:
    async def needed() -> dict[str, str]:
        return {str(tmp_path / "tmp-a/below"): "the stopped container x has it mounted", str(tmp_path): "all of it"}

    on = Machine(tmp_path, needed=needed)
    on.tree()
    on.tree("tmp-b")
    found = on.observe()
    assert (found["tmp-a"].in_use, found["tmp-a"].kept) == (True, "the stopped container x has it mounted")
    assert (found["tmp-b"].in_use, found["tmp-b"].kept) == (False, None)
    assert on.read(found["tmp-a"]).kept is not None


def test_when_the_engine_does_not_say_what_its_containers_need_nothing_goes(tmp_path: Path) -> None:
    async def needed() -> Unknown:
        return Unknown("the engine did not answer")

    on = Machine(tmp_path, needed=needed)
    on.tree()
    found = on.observe()["tmp-a"]
    assert found.in_use == Unknown("whether a stopped container needs it is unknown: the engine did not answer")
    assert isinstance(on.remove(found), Refused)
    assert on.names() == ["tmp-a"]
