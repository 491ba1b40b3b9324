"""Logs of processes that ended, of a session that lives: only those, and only closed ones."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Changed, Evidence
from gpukeeper.model.policy import DiskMarks
from gpukeeper.model.subject import Category, Gone, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.sessions import pid_in
from tests.unit.platforms.ray.nodes_here import (
    SESSION,
    child,
    everything_seen,
    observed,
    platform,
    process,
    raylet,
    run,
    session,
    step,
)

DEAD, ALIVE = 40_001, 40_002
ID = "54ccda45b163ea40fea7d3d01c9cf06651b2db2250f7276215387b8a"
OF_THE_DEAD = (
    f"worker-{ID}-01000000-{DEAD}.out",
    f"worker-{ID}-ffffffff-{DEAD}.err",
    f"io_worker-{ID}-ffffffff-{DEAD}.out",
    f"python-core-worker-{ID}_{DEAD}.log",
    f"python-core-driver-01{ID[2:]}_{DEAD}.log",
    f"events/event_CORE_WORKER_{DEAD}.log",
    f"export_events/event_EXPORT_TASK_{DEAD}.log",
    "old/anything.log",
)
LEFT = (
    *("raylet.out", "gcs_server.err", "dashboard_agent.log", "events/event_RAYLET.log", "log_monitor.log"),
    *(f"worker-{ID}-01000000-{ALIVE}.out", f"python-core-worker-{ID}_{ALIVE}.log", "my-notes-40001.out"),
    *(f"old/worker-{ID}-01000000-{ALIVE}.out", f"nsight/worker-{ID}-01000000-{DEAD}.out"),
)


def a_session(scratch: Path, *names: str) -> Path:
    folder = session(scratch)
    for name in names:
        (folder / "logs" / name).parent.mkdir(exist_ok=True)
        (folder / "logs" / name).write_text(f"of {name}\n")
    return folder / "logs"


def alive(scratch: Path, days: float = 8, **how: object) -> RayPlatform:
    """A raylet and one worker live."""
    here = (raylet(2**22, str(scratch / "ray"), mounts=None), process(ALIVE, "ray::IDLE", mounts=None))
    return platform(scratch, here=lambda: here, ahead=timedelta(days=days), **how)  # type: ignore[arg-type]


def logs_in(ray: RayPlatform, scratch: Path) -> Subject | None:
    return next((one for one in run(observed(ray, scratch)) if one.ref.kind == "logs"), None)


def entries(logs: Path) -> set[str]:
    return {str(path.relative_to(logs)) for path in logs.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("name", OF_THE_DEAD[:-1])
def test_the_pid_is_read_from_the_name(name: str) -> None:
    assert pid_in(Path(name).name) == DEAD
    assert pid_in(Path(name).name + "x") is None


@pytest.mark.parametrize("name", ["raylet.out", "worker-1.out", "event_RAYLET.log", f"worker-{ID}-1-2-3.out", "7.log"])
def test_other_names_have_none(name: str) -> None:
    assert pid_in(name) is None


def test_logs_of_the_dead_go_and_all_others_stay(tmp_path: Path) -> None:
    logs = a_session(tmp_path, *OF_THE_DEAD, *LEFT)
    ray = alive(tmp_path)
    found = logs_in(ray, tmp_path)
    assert found is not None
    assert (found.category, found.in_use) == (Category.DEAD_LOGS, False)
    assert found.labels["files"] == str(len(OF_THE_DEAD))
    assert found.ref.name == str(logs)
    taken = run(ray.capture(found, ("logs",)))
    assert isinstance(taken, Evidence)
    assert set(taken.files) == {f"logs/{name}" for name in OF_THE_DEAD}
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Accepted)
    assert answer.bytes_back == found.size
    assert entries(logs) == set(LEFT)
    assert isinstance(run(ray.read(found.ref)), Gone)


def test_they_wait_until_they_are_old_enough(tmp_path: Path) -> None:
    a_session(tmp_path, *OF_THE_DEAD)
    assert logs_in(alive(tmp_path, days=6.9), tmp_path) is None
    assert logs_in(alive(tmp_path, days=7.1), tmp_path) is not None
    assert logs_in(alive(tmp_path, days=99, settings={"logs": None}), tmp_path) is None


def test_a_disk_that_is_surely_too_full_does_not_wait_as_long(tmp_path: Path) -> None:
    a_session(tmp_path, *OF_THE_DEAD)
    full = {"disk": DiskMarks(high=0.0, low=0.0)}
    assert logs_in(alive(tmp_path, days=0.9, policy=full), tmp_path) is None
    assert logs_in(alive(tmp_path, days=1.1, policy=full), tmp_path) is not None


def test_what_a_user_has_open_stays(tmp_path: Path) -> None:
    logs = a_session(tmp_path, *OF_THE_DEAD)
    program = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    with child(program, logs / OF_THE_DEAD[0]):
        ray = alive(tmp_path)
        found = logs_in(ray, tmp_path)
        assert found is not None
        assert found.labels["files"] == str(len(OF_THE_DEAD) - 1)
        assert isinstance(run(ray.act(step(found), found)), Accepted)
        assert entries(logs) == {"raylet.out", OF_THE_DEAD[0]}


def test_another_set_of_files_is_another_incarnation(tmp_path: Path) -> None:
    logs = a_session(tmp_path, *OF_THE_DEAD)
    ray = alive(tmp_path)
    found = logs_in(ray, tmp_path)
    assert found is not None
    (logs / OF_THE_DEAD[0]).write_text("one more word")
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Changed)
    assert len(entries(logs)) == len(OF_THE_DEAD) + 1


def test_of_setups_the_newest_stays(tmp_path: Path) -> None:
    logs = a_session(tmp_path, "runtime_env_setup-01000000.log", "runtime_env_setup-02000000.log")
    os.utime(logs / "runtime_env_setup-01000000.log", (1, 1))
    ray = alive(tmp_path)
    found = logs_in(ray, tmp_path)
    assert found is not None
    assert isinstance(run(ray.act(step(found), found)), Accepted)
    assert entries(logs) == {"raylet.out", "runtime_env_setup-02000000.log"}


def test_a_file_with_another_name_elsewhere_or_a_link_is_nobodys_log(tmp_path: Path) -> None:
    logs = a_session(tmp_path)
    (tmp_path / "mine").write_text("precious")
    (logs / OF_THE_DEAD[0]).hardlink_to(tmp_path / "mine")
    (logs / OF_THE_DEAD[1]).symlink_to(tmp_path / "mine")
    assert logs_in(alive(tmp_path), tmp_path) is None


def test_a_dead_session_has_no_logs_of_its_own(tmp_path: Path) -> None:
    a_session(tmp_path, *OF_THE_DEAD)
    kinds = [one.ref.kind for one in run(observed(platform(tmp_path, ahead=timedelta(days=8)), tmp_path))]
    assert kinds == ["node", "session"]


def test_a_log_that_grows_without_bound_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_session(tmp_path, "worker-of-somebody.out")
    monkeypatch.setattr("gpukeeper.platforms.ray.sessions.LONG_LOG", 1000)
    node = next(one for one in run(observed(alive(tmp_path), tmp_path)) if one.ref.kind == "node")
    assert any("RAY_ROTATION_MAX_BYTES" in words and SESSION in words for words in node.findings)


class Still:
    """A clock that somebody sets."""

    def __init__(self, now: datetime) -> None:
        self.at = now

    def now(self) -> datetime:
        return self.at


def test_one_more_that_grows_old_meanwhile_waits_for_the_next_hour(tmp_path: Path) -> None:
    logs = a_session(tmp_path, *OF_THE_DEAD)
    ray = alive(tmp_path)
    newest = max((logs / name).stat().st_ctime for name in OF_THE_DEAD)
    old = datetime.fromtimestamp(newest, UTC) + timedelta(days=7)
    clock = Still(old.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1))
    ray._clock = clock
    late = (clock.at - timedelta(days=7, minutes=-10)).timestamp()  # old enough in ten minutes
    os.utime(logs / OF_THE_DEAD[0], (late, late))
    found = logs_in(ray, tmp_path)
    assert found is not None
    assert found.labels["files"] == str(len(OF_THE_DEAD) - 1)
    clock.at += timedelta(minutes=59)
    again = run(ray.read(found.ref))
    assert isinstance(again, Subject)
    assert again.seen.incarnation == found.seen.incarnation


def test_empty_logs_go_too_and_that_counts(tmp_path: Path) -> None:
    logs = a_session(tmp_path, *OF_THE_DEAD[:2])
    for name in OF_THE_DEAD[:2]:
        (logs / name).write_text("")
    ray = alive(tmp_path)
    found = logs_in(ray, tmp_path)
    assert found is not None
    program = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    with ExitStack() as held:
        scans = iter(range(9))

        def scan() -> OpenFiles:
            if next(scans) == 1:  # the look after they were taken
                taken = next(logs.glob(f".*/{OF_THE_DEAD[0]}"))
                held.enter_context(child(program, taken))
            return everything_seen()

        ray = alive(tmp_path, scan=scan)
        answer = run(ray.act(step(found), found))
    assert answer == Accepted(0)
    assert entries(logs) == {"raylet.out", OF_THE_DEAD[0]}


def test_while_a_user_is_hidden_nobody_knows_whether_they_are_in_use(tmp_path: Path) -> None:
    a_session(tmp_path, *OF_THE_DEAD)
    hidden = msgspec.structs.replace(everything_seen(), hidden="the open files of 1 other process could not be read")
    found = logs_in(alive(tmp_path, scan=lambda: hidden), tmp_path)
    assert found is not None
    assert found.in_use == Unknown("the open files of 1 other process could not be read")
