"""What is read of processes: recorded command lines of three releases, and this machine's own /proc."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpukeeper.platforms.ray.nodes import (
    ancestors,
    descendants,
    flags_of,
    is_still,
    parse_inside,
    raylet_of,
    read,
    read_processes,
)
from tests.unit.platforms.ray.nodes_here import child, process, until

RECORDED = sorted(Path(__file__).with_name("recorded").glob("ray-*.json"))
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_raylet_names_who_it_is_in_every_release(file: Path) -> None:
    for argv in json.loads(file.read_text())["raylets"]:
        found = raylet_of(process(1, *argv))
        assert found is not None
        assert len(found.node_id) == 56
        assert found.session_name.startswith("session_2026")


def test_whoever_is_called_otherwise_is_no_raylet() -> None:
    assert raylet_of(process(1, "python", "raylet", "--session_dir=/tmp/x")) is None
    assert raylet_of(process(1)) is None


def test_only_arguments_that_begin_with_a_flag_count() -> None:
    argv = ("--session-dir=/a", "--python_worker_command=python --temp-dir=/evil", "-v", "--head", "temp_dir=/evil")
    assert flags_of(argv) == {"session_dir": "/a", "python_worker_command": "python --temp-dir=/evil"}


def test_a_process_of_this_machine_is_read_whole() -> None:
    me = read(os.getpid())
    assert me is not None
    assert (me.pid, me.uid, me.inside) == (os.getpid(), os.getuid(), me.inside)
    assert me.mounts == str(Path("/proc/self/ns/mnt").readlink())
    assert me in read_processes() or me.ticks <= next(one.ticks for one in read_processes() if one.pid == me.pid)
    assert is_still(me.pid, me.starttime)
    assert not is_still(me.pid, me.starttime + 1)


def test_who_ended_is_not_there_and_a_zombie_neither() -> None:
    with child(WAIT) as pid:
        before = read(pid)
        assert before is not None
    assert read(pid) is None
    assert not is_still(pid, before.starttime)


def test_the_pid_of_its_own_namespace_is_the_last() -> None:
    assert parse_inside("Name:\tx\nNSpid:\t4242\t17\n", 4242) == 17
    assert parse_inside("Name:\tNSpid:\t1\n", 4242) == 4242


def test_descendants_are_found_however_deep() -> None:
    everyone = [process(2, parent=1), process(3, parent=2), process(4, parent=3), process(5, parent=1)]
    assert {one.pid for one in descendants([2], everyone)} == {3, 4}


def test_a_title_is_the_whole_command_line() -> None:
    program = (
        "import os, sys; os.execv(sys.executable, ['ray::train step', '-c', \"print('ready', flush=True); input()\"])"
    )
    with child(program) as pid:
        assert until(lambda: read(pid)).title.startswith("ray::train step -c ")  # type: ignore[union-attr]


def test_ancestors_are_told_up_to_whoever_is_unknown_and_in_no_circle() -> None:
    everyone = [process(4, parent=3), process(3, parent=2), process(2, parent=1), process(9, parent=2)]
    assert ancestors(4, everyone) == {4, 3, 2}
    assert ancestors(77, everyone) == frozenset()
    assert ancestors(6, [process(5, parent=6), process(6, parent=5)]) == {5, 6}
