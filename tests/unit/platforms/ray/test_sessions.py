"""Is a session alive? Each sign alone keeps it, and what could not be learned keeps it, too."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.model.decision import Accepted, Changed, Evidence, NothingToCapture, Refused
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Category, Gone, Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray.adapter import RayPlatform
from gpukeeper.platforms.ray.sessions import listener_of, paths_in
from tests.unit.platforms.ray.nodes_here import (
    SESSION,
    child,
    everything_seen,
    observed,
    one_of,
    platform,
    process,
    raylet,
    real,
    run,
    session,
    step,
)

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
LISTEN = """
import os, socket, sys
os.chdir(os.path.dirname(sys.argv[1]))
listening = socket.socket(socket.AF_UNIX)
listening.bind(os.path.basename(sys.argv[1])); listening.listen()
os.chdir("/")
print("ready", flush=True); sys.stdin.read()
"""
OPEN = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


def stale(folder: Path, name: str = "raylet") -> None:
    """A socket that nobody listens to any more."""
    here = Path.cwd()
    os.chdir(folder / "sockets")  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(name)
    finally:
        os.chdir(here)


def test_what_a_crash_left_is_dead_and_goes_after_an_hour(tmp_path: Path) -> None:
    stale(folder := session(tmp_path))
    young = platform(tmp_path, ahead=timedelta(minutes=55))
    found = one_of(young, tmp_path, SESSION)
    assert (found.in_use, found.state, found.category) == (False, State.ENDED, Category.DEAD_SESSION)
    assert isinstance(answer := run(young.act(step(found), found)), Changed)
    assert "younger than an hour" in answer.why
    assert folder.is_dir()

    ray = platform(tmp_path, ahead=timedelta(minutes=65))
    found = one_of(ray, tmp_path, SESSION)
    answer = run(ray.act(step(found), found))
    assert isinstance(answer, Accepted)
    assert isinstance(answer.bytes_back, int)
    assert answer.bytes_back > 0
    assert isinstance(run(ray.read(found.ref)), Gone)
    assert list((tmp_path / "ray").iterdir()) == []


def test_who_names_it_keeps_it(tmp_path: Path) -> None:
    folder = session(tmp_path)
    with child(WAIT, f"--session-dir={folder}/") as pid:
        found = one_of(platform(tmp_path, here=real(pid)), tmp_path, SESSION)
        assert (found.in_use, found.state) == (True, State.RUNNING)
        assert f"pid {pid}" in found.labels["kept_by"]
    assert one_of(platform(tmp_path, here=real(pid)), tmp_path, SESSION).in_use is False


def test_a_session_of_that_name_elsewhere_is_another_one(tmp_path: Path) -> None:
    """Each node of a cluster has a session of the same name."""
    session(tmp_path)
    other = session(tmp_path / "elsewhere")
    with child(WAIT, f"--session_dir={other}", f"--session-name={SESSION}") as pid:
        assert one_of(platform(tmp_path, here=real(pid)), tmp_path / "ray", SESSION).in_use is False


def test_a_name_without_a_way_is_meant_for_its_own_node(tmp_path: Path) -> None:
    session(tmp_path)
    with child(WAIT, f"--session-name={SESSION}") as pid:
        assert one_of(platform(tmp_path, here=real(pid)), tmp_path / "ray", SESSION).in_use is True


def test_a_way_that_cannot_be_followed_may_lead_there(tmp_path: Path) -> None:
    session(tmp_path)
    gone = process(2**22, "x", f"--session-dir=/nowhere/{SESSION}")
    assert one_of(platform(tmp_path, here=lambda: (gone,)), tmp_path, SESSION).in_use is True


@pytest.mark.parametrize("inside", ["logs/raylet.out", "runtime_resources", "."])
def test_who_has_something_of_it_open_keeps_it(tmp_path: Path, inside: str) -> None:
    folder = session(tmp_path)
    program = OPEN if inside.endswith("out") else "import os, sys; os.chdir(sys.argv[1]); " + WAIT
    hidden = ("sh", "-c", 'cd "$1"; shift; exec "$@"', "sh", str(folder / inside))
    before = () if inside.endswith("out") else hidden
    with child(program if before == () else WAIT, *([folder / inside] if before == () else []), before=before):
        found = one_of(platform(tmp_path), tmp_path, SESSION)
        assert found.in_use is True
        assert "has files of it open" in found.labels["kept_by"]


@ROOT
def test_a_socket_answers_from_another_network(tmp_path: Path) -> None:
    folder = session(tmp_path)
    with child(LISTEN, folder / "sockets/raylet", before=("unshare", "--net")) as pid:
        ray = platform(tmp_path)
        found = one_of(ray, tmp_path, SESSION)
        assert found.in_use is True
        assert f"pid {pid} listens on its socket raylet" in found.labels["kept_by"]
    assert one_of(platform(tmp_path), tmp_path, SESSION).in_use is False


@ROOT
@pytest.mark.parametrize("how", ["argv", "open"])
def test_ray_that_has_it_mounted_under_another_name_keeps_it(tmp_path: Path, how: str) -> None:
    """Its paths are its own; what counts is what they lead to."""
    folder, other = session(tmp_path), tmp_path / "other"
    (other / SESSION).mkdir(parents=True)
    mount = f'mount --bind "{folder.parent}" "{other}" && exec "$@"'
    away = ("unshare", "--mount", "sh", "-c", mount, "sh")
    inside = other / SESSION
    arguments = [f"--session-dir={inside}"] if how == "argv" else [inside / "logs/raylet.out"]
    with child(WAIT if how == "argv" else OPEN, *arguments, before=away) as pid:
        ray = platform(tmp_path, here=real(pid))
        found = one_of(ray, tmp_path / "ray", SESSION)
        assert found.in_use is True
        assert str(pid) in found.labels["kept_by"]


@ROOT
def test_a_session_that_is_mounted_somewhere_is_not_known_to_be_free(tmp_path: Path) -> None:
    folder, other = session(tmp_path), tmp_path / "other"
    other.mkdir()
    away = ("unshare", "--mount", "sh", "-c", f'mount --bind "{folder}" "{other}" && exec "$@"', "sh")
    with child(WAIT, before=away):
        ray = platform(tmp_path)
        found = one_of(ray, tmp_path / "ray", SESSION)
        assert found.in_use is not False
        assert not isinstance(run(ray.act(step(found), found)), Accepted)
    assert folder.is_dir()


def test_a_long_root_is_no_obstacle_and_a_socket_that_cannot_be_queried_keeps(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100) / ("y" * 100)
    folder = session(long)
    with child(LISTEN, folder / "sockets/raylet"):
        assert one_of(platform(long), long, SESSION).in_use is True
    assert one_of(platform(long), long, SESSION).in_use is False
    stale(folder, "plasma_store" + "z" * 90)
    found = one_of(platform(long), long, SESSION)
    assert isinstance(found.in_use, Unknown)
    assert "plasma_store" in found.in_use.why


def test_a_session_that_a_user_starts_to_use_during_the_removal_is_put_back(tmp_path: Path) -> None:
    folder = session(tmp_path)
    stale(folder)
    looks = []

    def scan() -> OpenFiles:
        """The second one comes after it was taken away."""
        looks.append(1)
        return everything_seen()

    class Late:
        def __init__(self) -> None:
            self.came = False

        def __call__(self) -> tuple:  # type: ignore[type-arg]
            if not folder.is_dir():  # it was taken a moment ago; a file of ours has its name
                self.came = True
                alive = os.getppid()  # so that what it finds at that path can be looked at
                began = int(Path(f"/proc/{alive}/stat").read_text().rpartition(")")[2].split()[19])
                return (process(alive, "raylet-to-be", f"--session-dir={folder}", starttime=began),)
            return ()

    late = Late()
    ray = platform(tmp_path, here=late, scan=scan)
    found = one_of(ray, tmp_path, SESSION)
    answer = run(ray.act(step(found), found))
    assert late.came
    assert isinstance(answer, Changed)
    assert "names it" in answer.why
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "runtime_resources", "sockets"]
    assert len(list((tmp_path / "ray").iterdir())) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("artifacts/2026-01-01/run/result.json", "artifacts"),
        ("logs/nsight/profile.nsys-rep", "nsight"),
        ("gcs_storage/CURRENT", "meant to survive"),
    ],
)
def test_what_people_made_is_theirs_to_remove(tmp_path: Path, made: str, words: str) -> None:
    file = session(tmp_path) / made
    file.parent.mkdir(parents=True)
    file.write_text("x")
    (file.parent / "MANIFEST-000001").write_text("x")
    ray = platform(tmp_path)
    found = one_of(ray, tmp_path, SESSION)
    assert isinstance(found.in_use, Unknown)
    assert words in found.in_use.why
    assert found.findings == (found.in_use.why,)
    assert not isinstance(run(ray.act(step(found), found)), Accepted)
    assert file.exists()


@pytest.mark.parametrize("name", ["session_latest", "session_of_bob", "ray_current_cluster", SESSION + "x"])
def test_only_what_ray_names_so_is_a_session(tmp_path: Path, name: str) -> None:
    (tmp_path / "ray" / name).mkdir(parents=True)
    assert [one for one in run(observed(platform(tmp_path), tmp_path)) if one.ref.kind != "node"] == []


def test_a_link_is_no_session(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / SESSION).symlink_to(precious)
    assert [one for one in run(observed(platform(tmp_path), tmp_path)) if one.ref.kind != "node"] == []


@ROOT
def test_nobody_gets_others_sessions_removed_by_what_he_says_in_his_argv(tmp_path: Path) -> None:
    """A program may call itself raylet and name any folder as its root."""
    home = tmp_path / "home"
    folder = session(home)
    os.chown(folder, 1001, 1001)
    liar = raylet(2**22, str(home / "ray"), uid=1002, mounts=None)
    here = platform(tmp_path / "scratch", here=lambda: (liar,))
    assert [one for one in run(observed(here, home)) if one.ref.kind != "node"] == []
    honest = raylet(2**22, str(home / "ray"), uid=1001, mounts=None)
    here = platform(tmp_path / "scratch", here=lambda: (honest,))
    assert [one.ref.kind for one in run(observed(here, home)) if one.ref.kind != "node"] == ["session"]


def test_what_could_not_be_seen_keeps(tmp_path: Path) -> None:
    session(tmp_path)
    why = "the open files of 2 other processes could not be read"
    ray = platform(tmp_path, scan=lambda: msgspec.structs.replace(everything_seen(), hidden=why))
    found = one_of(ray, tmp_path, SESSION)
    assert found.in_use == Unknown(why)
    assert isinstance(run(ray.act(step(found), found)), Refused)


def test_a_filesystem_that_other_machines_share_is_never_known_to_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this one is: it plays the part of one on the network."""
    session(tmp_path)
    (tmp_path / "tmpone").mkdir()
    monkeypatch.setattr("gpukeeper.disk.open_files.LOCAL", frozenset())
    ray = platform(tmp_path)
    for name in (SESSION, "tmpone"):
        found = one_of(ray, tmp_path, name)
        assert isinstance(found.in_use, Unknown)
        assert "other machines" in found.in_use.why


def test_the_ends_of_its_newest_logs_are_evidence_and_reading_them_is_no_use(tmp_path: Path) -> None:
    folder = session(tmp_path)
    (folder / "logs/worker.out").write_bytes(b"begin" + b"x" * 100_000 + b"end")
    (folder / "logs/old/gone.err").write_text("why it ended")
    (folder / "logs/link").symlink_to("/etc/passwd")
    ray = platform(tmp_path)
    found = one_of(ray, tmp_path, SESSION)
    taken = run(ray.capture(found, ("logs",)))
    assert isinstance(taken, Evidence)
    assert sorted(taken.files) == ["logs/old/gone.err", "logs/raylet.out", "logs/worker.out"]
    assert len(taken.files["logs/worker.out"]) == 64 * 1024
    assert taken.files["logs/worker.out"].endswith(b"xend")
    again = run(ray.read(found.ref))
    assert isinstance(again, Subject)
    assert (again.seen.incarnation, again.last_used) == (found.seen.incarnation, found.last_used)
    assert isinstance(run(ray.capture(found, ("manifest",))), NothingToCapture)


def test_without_sockets_nobody_listens(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    assert listener_of(fd) is None
    (tmp_path / "sockets").symlink_to("/run")
    assert isinstance(listener_of(fd), Unknown)
    os.close(fd)


@pytest.mark.parametrize(
    ("word", "ways"),
    [
        ("/a/NAME", ["/a/NAME"]),
        ("--dir=/a/NAME/logs", ["/a/NAME"]),
        ("x --dir='/a/NAME' /b/NAME,/c/NAME;", ["/a/NAME", "/b/NAME", "/c/NAME"]),
        ("unix:/a/NAME:0", ["/a/NAME"]),
        ("--name=NAME", []),
        ("a/NAME", ["/NAME"]),
        ("/a/NAME1", []),
        ("/a/NAME1/NAME", ["/a/NAME1/NAME"]),
    ],
)
def test_ways_to_a_session_are_read_from_an_argument(word: str, ways: list[str]) -> None:
    assert list(paths_in(word.replace("NAME", SESSION), SESSION)) == [one.replace("NAME", SESSION) for one in ways]


@pytest.mark.parametrize("word", ["/" * 2_000_000 + SESSION, f"/{SESSION}" * 40_000, "/" * 2_000_000 + SESSION + "1"])
def test_an_argument_as_long_as_any_does_not_stop_us(tmp_path: Path, word: str) -> None:
    """Two minutes and more when each slash is tried as a beginning; whoever waits for that is stopped by the suite."""
    session(tmp_path)
    long = process(2**22, "x", word)
    assert one_of(platform(tmp_path, here=lambda: (long,)), tmp_path, SESSION).in_use is (word[-1] != "1")


@pytest.mark.parametrize("program", ["log_monitor.py", "autoscaler/_private/monitor.py"])
def test_what_outlives_a_crash_is_named_to_whoever_asks(tmp_path: Path, program: str) -> None:
    folder = session(tmp_path)
    with child(WAIT, f"/venv/ray/_private/{program}", f"--logs-dir={folder}/logs") as pid:
        ray = platform(tmp_path, here=real(pid))
        found = one_of(ray, tmp_path, SESSION)
        (cause,) = run(ray.diagnose(found.ref)).causes
        assert f"pid {pid} (" in cause.words


def latest(scratch: Path) -> None:
    (scratch / "session_latest").symlink_to(scratch / SESSION)


def test_a_root_that_is_itself_a_temp_dir_of_ray_is_searched(tmp_path: Path) -> None:
    """As `ray start --temp-dir=ROOT` leaves it, long after its raylet has gone."""
    session(tmp_path)
    (tmp_path / "ray" / SESSION).rename(tmp_path / SESSION)
    latest(tmp_path)
    ray = platform(tmp_path)
    (tmp_path / "ray").rmdir()
    found = one_of(ray, tmp_path, SESSION)
    assert (found.category, found.in_use) == (Category.DEAD_SESSION, False)
    assert isinstance(run(ray.act(step(found), found)), Accepted)
    assert isinstance(run(ray.read(found.ref)), Gone)
    assert not (tmp_path / SESSION).exists()


def test_a_directory_that_is_only_called_like_a_session_is_none(tmp_path: Path) -> None:
    session(tmp_path)
    (tmp_path / "ray" / SESSION).rename(tmp_path / SESSION)
    ray = platform(tmp_path, settings={"names": ("*",)})
    assert [one for one in run(observed(ray, tmp_path)) if one.shape is Shape.TREE] == []


def test_what_was_searched_and_not_found_is_reported(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ray = platform(tmp_path, settings={"roots": (str(tmp_path), str(missing))})
    (node,) = [one for one in run(everything(ray)) if one.shape is Shape.NODE]
    assert f"{missing}, set in ray.roots, does not exist" in node.findings
    empty = tmp_path / "empty"
    empty.mkdir()
    ray = platform(tmp_path, settings={"roots": (str(tmp_path), str(empty))})
    (node,) = [one for one in run(everything(ray)) if one.shape is Shape.NODE]
    assert (
        f"no Ray session was found for ray.roots {empty}: there is no {empty}/ray, and no session in {empty} itself"
        in node.findings
    )


async def everything(ray: RayPlatform) -> list[Subject]:
    return [one async for page in ray.observe(PlaceScope()) for one in page.subjects]
