"""What the machine says of a container, and what a hostile user must not make it say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.docker import Engine, Inspected
from gpukeeper.devices.holders import Holder
from gpukeeper.model.policy import WITHOUT_GPU
from gpukeeper.platforms.docker import host_facts, owners
from gpukeeper.platforms.docker.host_facts import HostInspector, HostSnapshot, holders_of
from gpukeeper.platforms.docker.owners import UserDirectory
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import class_of
from tests.unit.platforms.docker.examples import ID, OTHER_ID, WHOLE, StillClock, container, ended

A_MOMENT = timedelta(milliseconds=50)
FIRST = 4242  # the pid of the example's first process
THEIRS = f"0::/user.slice/user-1001.slice/user@1001.service/docker-{ID}.scope\n"
IN_IT = f"0::/system.slice/docker-{ID}.scope\n"


def holder(pid: int, uid: int = 1001) -> Holder:
    return Holder(pid=pid, starttime=7, uid=uid, comm="python", stopped=False, minors=(0,), container=ID)


def add(proc: Path, pid: int, cgroup: str) -> Holder:
    (proc / str(pid) / "root").mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(cgroup)
    return holder(pid)


def around(*found: Holder) -> HostSnapshot:
    return HostSnapshot((WHOLE,), {ID: found})


def machine(proc: Path) -> HostInspector:
    async def gpus() -> tuple[()]:
        return ()

    records = Records(Engine("unix:///nowhere"))
    return HostInspector(records, gpus, local=True, directory=UserDirectory(StillClock()), proc=str(proc))


def test_processes_in_its_own_group_and_below_are_its_own(tmp_path: Path) -> None:
    add(tmp_path, FIRST, IN_IT)
    mine = add(tmp_path, 20, IN_IT), add(tmp_path, 21, IN_IT.replace(".scope", ".scope/init.scope"))
    assert holders_of(container(), around(*mine), str(tmp_path)) == mine


def test_a_group_that_a_user_gave_the_id_of_a_container_is_not_the_containers(tmp_path: Path) -> None:
    """Anybody may make groups below their own login. It must bring the container neither a GPU nor an owner."""
    add(tmp_path, FIRST, IN_IT)
    theirs = around(add(tmp_path, 20, THEIRS))
    assert holders_of(container(), theirs, str(tmp_path)) == ()
    facts = asyncio.run(machine(tmp_path).facts(container(), theirs))
    assert facts.devices == ()
    assert facts.owned.owner is None
    assert class_of(container(), facts) == WITHOUT_GPU


def test_one_tree_of_groups_is_enough_to_give_a_user_away(tmp_path: Path) -> None:
    add(tmp_path, FIRST, f"5:cpu:/docker/{ID}\n1:name=systemd:/docker/{ID}\n")
    theirs = add(tmp_path, 20, f"5:cpu:/user.slice\n1:name=systemd:/user.slice/{ID}\n")
    assert holders_of(container(), around(theirs), str(tmp_path)) == ()


def test_what_does_not_run_is_given_no_gpu_by_a_process_that_names_it(tmp_path: Path) -> None:
    assert holders_of(container(state=ended()), around(add(tmp_path, 20, THEIRS)), str(tmp_path)) == ()


def test_where_its_first_process_is_not_seen_those_that_name_it_count(tmp_path: Path) -> None:
    """An engine in a pid namespace of its own."""
    theirs = add(tmp_path, 20, f"0::/docker/{OTHER_ID}/docker/{ID}\n")
    assert holders_of(container(), around(theirs), str(tmp_path)) == (theirs,)


def on_gpu(id_: str) -> Inspected:
    return container(id=id_, host={"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, state={"Pid": int(id_[:2])})


def test_a_file_that_never_answers_costs_one_thread_not_one_at_every_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ["10" * 32, "11" * 32, "12" * 32]
    for id_ in ids:
        add(tmp_path, int(id_[:2]), f"0::/docker/{id_}\n")
    dead, asked, over = f"{tmp_path}/11/root", [], threading.Event()

    def hangs(root: str, _path: str, _created: datetime) -> bool:
        asked.append(root)
        if root == dead:
            over.wait()
        return True

    monkeypatch.setattr(host_facts, "has_keepalive", hangs)
    monkeypatch.setattr(host_facts, "PEEK", A_MOMENT)
    here, containers = machine(tmp_path), [on_gpu(id_) for id_ in ids]

    async def looks() -> list[Any]:
        for _ in range(5):
            await here.peek(containers, around())
            kept = [(await here.facts(one, around())).keep_alive for one in containers]
        return kept

    first, second, third = asyncio.run(looks())
    over.set()
    assert (first, third) == (True, True)
    assert "did not answer" in second.why
    assert asked.count(dead) == 1


class Hanging:
    """A question that is never answered."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.over = threading.Event()

    def __call__(self, what: Any) -> None:
        self.asked.append(what)
        self.over.wait()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Any:
    one = Hanging()
    monkeypatch.setattr(owners, "LOOKUP_DEADLINE", A_MOMENT)
    yield one
    one.over.set()


def known(directory: UserDirectory, one: Inspected) -> owners.KnownUsers:
    return asyncio.run(directory.people(one, (), (), directories=True))


def binds(*sources: str) -> Inspected:
    return container(mounts=[{"Type": "bind", "Source": one, "Destination": "/x"} for one in sources])


def test_a_dead_disk_is_waited_for_once_not_for_each_directory_on_it(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_home_owner", hanging)
    found = known(UserDirectory(StillClock()), binds(*(f"/mnt/dead/{n}" for n in range(20)))).folders
    assert hanging.asked == ["/mnt/dead/0"]
    assert all("time" in one.why for one in found.values())  # type: ignore[union-attr]


def test_a_directory_of_users_that_is_down_is_queried_a_few_times_only(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_user_name_of", hanging)
    directory = UserDirectory(StillClock())
    for uid in range(1000, 1020):
        assert known(directory, container(config={"User": str(uid)})).silent is not None
    assert len(hanging.asked) == owners.MOST_SILENT


@pytest.mark.parametrize("path", ["/" + "a" * 5000, "/home/" + "b/" * 3000])
def test_a_path_that_no_directory_can_have_is_nobodys_not_unknown(path: str) -> None:
    """Else whoever writes one into a label keeps a container of nobody's for ever."""
    assert known(UserDirectory(StillClock()), binds(path)).folders == {path: None}


def test_forgetting_in_the_middle_of_a_read_harms_it_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = UserDirectory(StillClock())
    forget: Callable[[], None] = directory._expire

    def and_another_look_forgets(_path: str) -> None:
        directory._since = None
        forget()

    monkeypatch.setattr(owners, "_home_owner", and_another_look_forgets)
    assert known(directory, binds("/mnt/a", "/mnt/b")).folders == {"/mnt/a": None, "/mnt/b": None}
