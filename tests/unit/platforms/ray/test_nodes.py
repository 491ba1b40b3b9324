"""Which processes make a node, and whose word it is where sessions are."""

from __future__ import annotations

import os

from gpukeeper.platforms.ray.nodes import (
    MACHINE,
    NodeListing,
    Process,
    RayRoot,
    find,
    read,
    reported_roots,
    sees_our_files,
)
from gpukeeper.platforms.ray.settings import NodeContainer
from tests.unit.platforms.ray.nodes_here import SESSION, process, raylet

ID = "0123456789abcdef" * 4
OURS = {"mounts": "mnt:[1]", "pids": "pid:[1]"}
THEIRS = {"mounts": "mnt:[2]", "pids": "pid:[2]", "container": ID}


def found(*everyone: Process, containers: tuple[NodeContainer, ...] = ()) -> NodeListing:
    return find(everyone, containers, "here", lambda one: one.mounts in ("mnt:[1]", None))


def test_this_machine_is_everybody_who_sees_its_files() -> None:
    here = found(process(1, **OURS), raylet(2, "/tmp/ray", **OURS), process(3, **THEIRS), process(4, mounts=None))
    (machine,) = here.nodes
    assert (machine.name, machine.uid, machine.is_machine) == ("here", MACHINE, True)
    assert [one.pid for one in machine.processes] == [1, 2, 4]
    assert [one.process.pid for one in machine.raylets] == [2]


def test_a_container_is_who_shares_files_or_pids_with_its_first_process() -> None:
    beside = process(12, mounts="mnt:[3]", pids="pid:[2]", container=ID)
    here = found(
        process(1, **OURS),
        process(10, **THEIRS),
        process(11, **THEIRS),
        beside,
        containers=(NodeContainer("w", 10, ID),),
    )
    worker = here.nodes[1]
    assert (worker.name, worker.uid, worker.door.pid) == ("w", ID, 10)
    assert [one.pid for one in worker.processes] == [10, 11, 12]


def test_a_container_in_the_machines_pid_namespace_has_only_its_own_files() -> None:
    inside = {"mounts": "mnt:[2]", "pids": "pid:[1]", "container": ID}
    here = found(
        process(1, **OURS), process(10, **inside), process(2, **OURS), containers=(NodeContainer("w", 10, ID),)
    )
    assert [one.pid for one in here.nodes[1].processes] == [10]


def test_a_raylet_elsewhere_is_a_node_of_its_own_once() -> None:
    here = found(
        process(1, **OURS), raylet(20, "/tmp/ray", **THEIRS, starttime=9), raylet(21, "/tmp/ray", **THEIRS, starttime=5)
    )
    other = here.nodes[1]
    assert (other.name, other.uid, other.door.pid) == (ID[:12], ID, 21)
    assert len(other.raylets) == 2
    assert len(here.nodes) == 2


def test_a_raylet_in_a_container_that_is_known_is_not_counted_twice() -> None:
    here = found(process(1, **OURS), raylet(20, "/tmp/ray", **THEIRS), containers=(NodeContainer("w", 20, ID),))
    assert [one.name for one in here.nodes] == ["here", "w"]


def test_a_container_that_is_called_as_its_machine_is_distinguished() -> None:
    here = found(process(1, **OURS), process(10, **THEIRS), containers=(NodeContainer("here", 10, ID),))
    assert [one.name for one in here.nodes] == ["here", f"here-{ID[:12]}"]


def test_a_container_that_sleeps_or_ended_is_reported() -> None:
    here = found(process(1, **OURS), containers=(NodeContainer("asleep", 0, ID), NodeContainer("ended", 77, ID)))
    assert here.asleep == ("asleep",)
    assert [one.what for one in here.unseen] == ["ended"]


def test_we_see_our_own_files_by_whatever_namespace() -> None:
    me = read(os.getpid())
    assert me is not None
    sees = sees_our_files("/proc", ("/tmp", "/no-such-folder"))
    assert sees(me)
    assert sees(process(os.getpid(), mounts="mnt:[2]"))
    assert sees(process(2**22, mounts=None))
    assert not sees(process(2**22, mounts="mnt:[3]"))


def test_where_sessions_are_is_told_by_rays_own_programs() -> None:
    monitor = ("python", "-u", "/venv/lib/ray/_private/log_monitor.py", f"--session-dir=/data/r/{SESSION}")
    stranger = ("python", "train.py", "--temp-dir=/home/ann", f"--session-dir=/home/ann/{SESSION}")
    relative = ("python", "-u", "/venv/lib/ray/_private/log_monitor.py", "--session-dir=x/y")
    here = found(
        raylet(2, "/tmp/ray/", **OURS, uid=7),
        process(3, *monitor, uid=8),
        process(4, *monitor, uid=9),
        process(5, *stranger),
        process(6, *relative),
    )
    assert reported_roots(here.nodes[0]) == {"/tmp/ray": frozenset({7}), "/data/r": frozenset({8, 9})}


def test_a_session_counts_only_if_it_belongs_to_whom_told_of_it() -> None:
    assert RayRoot("/tmp/ray").holds(1001)
    assert RayRoot("/x", frozenset({1001})).holds(1001)
    assert RayRoot("/x", frozenset({0})).holds(1001)
    assert not RayRoot("/x", frozenset({1002})).holds(1001)


def test_of_a_node_that_was_not_listed_only_its_raylets_own_files_count() -> None:
    own = {"mounts": "mnt:[2]", "pids": "pid:[2]"}
    beside = raylet(21, "/tmp/ray", mounts="mnt:[3]", pids="pid:[2]", uid=0, starttime=5)
    here = {one.door.pid: one for one in found(raylet(20, "/tmp/ray", **own, uid=7), beside).nodes}
    # Root's raylet of the same pid namespace has other files: its word is none about these.
    assert here[20].uids == frozenset({7})
    assert here[None].uids is None
    listed = found(raylet(20, "/tmp/ray", **own, uid=7), containers=(NodeContainer("w", 20, ID),))
    assert listed.nodes[1].uids is None
    assert found(raylet(20, "/tmp/ray", **own, uid=0)).nodes[1].uids is None
