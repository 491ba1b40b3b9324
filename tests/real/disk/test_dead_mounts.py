"""A filesystem that never answers, in use by a process, below a root, or as a root: everything else is seen."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpukeeper.disk import mounts, open_files
from gpukeeper.disk.mounts import Responsiveness
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import PlaceScope, Policy, Temporary
from gpukeeper.model.subject import Shape
from gpukeeper.platforms.host.adapter import HostPlatform
from tests.engines import require
from tests.real.disk.dead_mount import dead_mount
from tests.real.disk.filesystems import need_root
from tests.real.host.machine import until
from tests.unit.disk.trees import READY, child
from tests.unit.platforms.host.machine import Ahead, Machine, read_with

PASSES = 10
# Neither asks the filesystem anything, so they do not hang themselves.
HOLD = f"import os, sys; os.open(sys.argv[1], os.O_PATH); {READY}"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _fuse() -> None:
    need_root()
    require("tmpfs", os.access("/dev/fuse", os.R_OK | os.W_OK))


def children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split())


def test_a_process_that_has_it_open_stalls_no_read_and_leaves_no_thread(tmp_path: Path) -> None:
    machine = Machine(tmp_path, scan=open_files.scan)
    machine.tree("tmp-a")
    with dead_mount(tmp_path / "dead"), child(HOLD, tmp_path / "dead"):
        assert set(machine.observe()) == {"tmp-a"}
        threads, started = threading.active_count(), children()
        for _ in range(PASSES - 1):
            assert set(machine.observe()) == {"tmp-a"}
        until(lambda: threading.active_count() <= threads and children() <= started, "nothing is left of the passes")


@pytest.mark.parametrize("where", ["tmp-dead", "tmp-a/below/inside"])
def test_below_a_root_it_is_reported_and_the_others_are_measured(tmp_path: Path, where: str) -> None:
    machine = Machine(tmp_path)
    machine.tree("tmp-a")
    machine.tree("tmp-b")
    with dead_mount(tmp_path / where):
        threads, started = threading.active_count(), children()
        for _ in range(PASSES):
            found = machine.observe()
            assert isinstance(found["tmp-b"].size, int)
            assert "tmp-a" in found
        until(lambda: threading.active_count() <= threads and children() <= started, "nothing is left of the passes")


def test_as_a_root_it_is_skipped_reported_and_queried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "PATIENCE_SECONDS", 0.5)
    machine = Machine(tmp_path)
    machine.tree("tmp-a")
    roots = tuple(Temporary(root=str(one), names=("tmp*",), above=0) for one in (tmp_path / "dead", tmp_path))
    platform = HostPlatform("node-1", Policy(temporary=roots), Ahead(), **read_with(scan=open_files.scan))

    async def read() -> tuple[set[str], list[Unseen]]:
        names, unseen = set(), list[Unseen]()
        async for page in platform.observe(PlaceScope()):
            names |= {Path(one.ref.name).name for one in page.subjects if one.shape is Shape.TREE}
            unseen += page.unseen
        return names, unseen

    started = children()  # of earlier tests
    with dead_mount(tmp_path / "dead"):
        for _ in range(PASSES):
            names, unseen = machine.run(read())
            assert names == {"tmp-a"}
            assert [one.what for one in unseen] == [str(tmp_path / "dead")]
            assert f"fuse.dead at {tmp_path}/dead hangs" in unseen[0].why
        assert children() == started
    assert machine.run(read())[1] == []


def test_what_did_not_answer_is_queried_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "PATIENCE_SECONDS", 0.2)
    now, asked = [0.0], list[float]()
    answering = Responsiveness(lambda: now[0])
    answers = answering._answers
    monkeypatch.setattr(answering, "_answers", lambda path: (asked.append(now[0]), answers(path))[1])
    with dead_mount(tmp_path / "dead"):
        for minute in range(16):
            now[0] = 60.0 * minute
            assert answering.why_not(str(tmp_path / "dead"), open_files.own_mounts()) is not None
    assert asked == [0.0, 60.0, 180.0, 420.0, 900.0]
