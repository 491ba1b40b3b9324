"""Trees on a real filesystem, from plan to outcome, by the real command in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.disk.trash import DELETING, TRASH
from gpukeeper.platforms.host.acts import ARCHIVE_LIMIT
from tests.engines import require
from tests.real.host.machine import AS_NOBODY, NOBODY, Host, can_be_nobody, held_open, sees_everybody, until

TREES = """
temporary: [{root: ROOT, names: ["tmp*", "pip-*"], above: 1B, older_than: 0s, under_pressure: 0s, keep: ["*model*"]}]
"""
REPORTS = """
reports: {roots: [ROOT], older_than: 0s, keep_last: 1}
"""


@pytest.fixture(autouse=True)
def everybody_is_seen() -> None:
    require("root", sees_everybody())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path, TREES)


@pytest.mark.smoke
def test_what_is_due_goes_and_everything_else_stays(host: Host) -> None:
    for name in ("tmp-old", "pip-build", "data", "tmp-model"):
        host.tree(name)
    (host.tree("tmp-wanted") / ".keep").touch()
    used = host.tree("tmp-used") / "below" / "f0"
    with held_open(used):
        planned = {Path(d["seen"]["ref"]["name"]).name: d for d in host.plan("--kind", "tree")}
        assert {name for name, d in planned.items() if d["action"] == "remove"} == {"tmp-old", "pip-build"}
        assert planned["tmp-wanted"]["reason"] == "it stays: it contains a file named .keep"
        assert planned["tmp-used"]["reason"].startswith("in use")
        ran = host.apply()
    assert ran.code == 0, ran.err
    outcomes = ran.outcomes()
    assert {name: line["result"] for name, line in outcomes.items()} == {
        "tmp-old": "reclaimed",
        "pip-build": "reclaimed",
    }
    assert all(line["bytes_back"] >= 15_000 for line in outcomes.values())
    assert host.names() == ["data", "tmp-model", "tmp-used", "tmp-wanted"]


def test_the_capabilities_of_the_unit_are_enough(host: Host) -> None:
    """For trees that only their owner may enter; what a process has open is still noticed."""
    unit = (Path(__file__).resolve().parents[3] / "deploy/systemd/gpukeeper.service").read_text()
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")]
    names = [name.removeprefix("CAP_").lower() for line in lines for name in line.split()]
    assert names
    allowed = ",".join(["-all", *(f"+{name}" for name in names)])
    as_service = ("setpriv", f"--bounding-set={allowed}", "--no-new-privs")
    for name in ("tmp-old", "tmp-used"):
        for one in (path := host.tree(name), *path.rglob("*")):
            os.chown(one, NOBODY, NOBODY)
        path.chmod(0o700)
    with held_open(host.root / "tmp-used" / "below" / "f0"):
        ran = host.apply(before=as_service)
    assert ran.code == 0, ran.err
    assert {name: line["result"] for name, line in ran.outcomes().items()} == {"tmp-old": "reclaimed"}
    assert host.names() == ["tmp-used"]
    # Without them the same command does not know what is in use, and keeps everything.
    few = host.apply(before=("setpriv", "--bounding-set=-all", "--no-new-privs"))
    assert few.outcomes() == {}
    assert host.names() == ["tmp-used"]


def test_a_plan_changes_nothing(host: Host) -> None:
    path = host.tree("tmp-old")
    before = {one: one.lstat() for one in (path, *path.rglob("*"))}
    host.plan()
    after = {one: one.lstat() for one in (path, *path.rglob("*"))}
    assert {p: (s.st_ctime_ns, s.st_atime_ns) for p, s in before.items()} == {
        p: (s.st_ctime_ns, s.st_atime_ns) for p, s in after.items()
    }


def test_what_is_opened_between_plan_and_apply_is_kept(host: Host) -> None:
    path = host.tree("tmp-old")
    assert [d["action"] for d in host.plan("--kind", "tree")] == ["remove"]
    with held_open(path / "below" / "f1"):
        ran = host.apply()
    assert (ran.code, ran.outcomes()) == (0, {}), ran.err
    assert path.exists()
    assert host.apply().outcomes()["tmp-old"]["result"] == "reclaimed"


@pytest.mark.parametrize("moment", [TRASH, DELETING])
def test_killed_in_the_middle_the_next_apply_finishes_it(host: Host, moment: str) -> None:
    """As soon as the tree is taken, or its deletion has begun."""
    host.tree("tmp-old", files=20_000, size=1)
    with host.start("apply", "--yes", "--json", "--platform", "host") as child:
        until(lambda: _is_there(host, moment) or child.poll() is not None, "the removal is under way")
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, "it was done before it could be killed: make the tree larger"
    assert host.names() != ["tmp-old"]
    for _ in range(20):
        ran = host.apply()
        assert ran.code in (0, 3), ran.err
        if not host.names():
            break
    assert host.names() == []
    (intent, *_), outcomes = host.lines("intent"), host.lines("outcome")
    first = next(line for line in outcomes if line["step"] == intent["step"])
    assert (first["result"], "in a later pass" in first["reason"]) in {("still there", True), ("reclaimed", True)}
    assert outcomes[-1]["result"] == "reclaimed"


def _is_there(host: Host, moment: str) -> bool:
    trashes = list(host.root.glob(f"{TRASH}*"))
    return any((one / DELETING).is_symlink() for one in trashes) if moment == DELETING else bool(trashes)


def test_a_person_may_remove_a_tree_that_is_not_due(host: Host) -> None:
    host.write_policy(TREES.replace("above: 1B", "above: 1TB"))
    path = host.tree("tmp-old")
    assert [d["action"] for d in host.plan("--kind", "tree")] == ["keep"]
    with held_open(path / "below" / "f0"):
        refused = host.run("workload", "remove", str(path), "--yes")
        assert (refused.code, path.exists()) == (3, True), refused
    ran = host.run("workload", "remove", str(path), "--yes")
    assert ran.code == 0, ran.err
    assert host.names() == []


# Reports


@pytest.mark.smoke
def test_an_old_report_is_saved_goes_and_comes_back(tmp_path: Path) -> None:
    host = Host(tmp_path, REPORTS)
    (host.tree("run-1") / "summary").write_text("it went well")
    until(lambda: host.tree("run-2").exists(), "a newer one")
    planned = {Path(d["seen"]["ref"]["name"]).name: d for d in host.plan("--kind", "report")}
    assert planned["run-2"]["reason"] == "it stays: it is the newest of its root"
    assert planned["run-1"]["action"] == "remove"
    assert planned["run-1"]["reason"].startswith("a report of ")
    assert planned["run-1"]["size"] > 15_000
    assert host.apply().outcomes()["run-1"]["result"] == "reclaimed"
    assert host.names() == ["run-2"]
    ran = host.run("restore", str(host.root / "run-1"))
    assert ran.code == 0, ran.err
    assert (host.root / "run-1" / "summary").read_text() == "it went well"
    again = host.run("restore", str(host.root / "run-1"))
    assert (again.code, "move it away" in again.err) == (2, True)


def test_a_report_that_cannot_be_saved_stays(tmp_path: Path) -> None:
    host = Host(tmp_path, REPORTS)
    with (host.tree("run-1") / "huge").open("wb") as file:
        file.truncate(ARCHIVE_LIMIT)  # a hole: no room is needed for it
    host.tree("run-2")
    ran = host.apply()
    assert ran.outcomes()["run-1"]["result"] == "not captured"
    assert host.names() == ["run-1", "run-2"]


# Rights


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where somebody else may write."""
    require("root", can_be_nobody())
    folder = Path("/tmp") / f"gpukeeper-test-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def test_an_ordinary_user_cannot_see_everybody_and_so_keeps(open_folder: Path) -> None:
    host = Host(open_folder, TREES)
    path = host.tree("tmp-old")
    for one in (host.root, host.policy, path, *path.rglob("*")):
        os.chown(one, NOBODY, NOBODY)
    host.tree("tmp-roots").chmod(0o700)
    mine, roots = host.plan("--kind", "tree", before=AS_NOBODY)
    assert (mine["action"], mine["verdict"], roots["action"]) == ("keep", "unknown", "keep")
    assert "needs root" in mine["reason"]
    assert host.apply(before=AS_NOBODY).outcomes() == {}
    assert host.names() == ["tmp-old", "tmp-roots"]
