"""Metrics as a file: whole at any moment, readable by everybody, and with counters that go on."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpukeeper.interfaces.cli import apply
from gpukeeper.interfaces.cli.apply import Progress
from gpukeeper.interfaces.telemetry import metrics
from gpukeeper.lifecycle.settings import Narrow
from gpukeeper.model.errors import UsageError
from tests.unit.interfaces.workers import GIB, Workers, node, passed, session, tree

RETURNED = 'gpukeeper_bytes_returned_total{rule="leftover_tree"}'


def place() -> Workers:
    return Workers(node("worker-1", GIB), tree("/tmp/ray/session_1", "worker-1", GIB))


def written(path: Path, *, act: bool = True) -> dict[str, float]:
    here = place() if act else Workers(node("worker-1", GIB))
    metrics.write_textfile(path, session(here), [passed(here)])
    return told(path)


def told(path: Path) -> dict[str, float]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_everything_is_in_it_but_what_its_reader_has_itself(tmp_path: Path) -> None:
    seen = written(tmp_path / "gpukeeper.prom")
    assert seen[RETURNED] == GIB
    assert "gpukeeper_last_pass_timestamp_seconds" in seen
    assert "gpukeeper_leader" not in seen
    assert not [name for name in seen if not name.startswith("gpukeeper_")]


def test_counters_go_on_and_gauges_do_not(tmp_path: Path) -> None:
    """Without a daemon every pass is a new process; a counter that begins at 0 each time counts nothing."""
    path = tmp_path / "gpukeeper.prom"
    written(path)
    seen = written(path)
    assert seen[RETURNED] == 2 * GIB
    assert seen['gpukeeper_reclaimed_total{action="remove",kind="session",rule="leftover_tree"}'] == 2
    assert seen['gpukeeper_trees{category="dead-session"}'] == 1
    assert written(path, act=False)[RETURNED] == 2 * GIB


def test_apply_writes_gauges_of_what_is_there_after_it(tmp_path: Path) -> None:
    here = Workers(node("worker-1", 3 * GIB, 0.5), tree("/tmp/ray/session_1", "worker-1", GIB))
    one, path = session(here), tmp_path / "gpukeeper.prom"
    run = Progress(one.keeper, quiet=True)
    (done,) = asyncio.run(apply._apply(one, Narrow(), None, run, ask=False, again=True))
    metrics.write_textfile(path, one, [done.after])
    seen = told(path)
    assert seen[RETURNED] == GIB
    assert seen['gpukeeper_node_temporary_bytes{node="worker-1",place="lab",platform="ray"}'] == 2 * GIB
    assert seen['gpukeeper_disk_used_ratio{disk="/",node="worker-1",place="lab",platform="ray"}'] == 0.49
    assert 'gpukeeper_trees{category="dead-session"}' not in seen
    assert (seen["gpukeeper_overdue"], seen["gpukeeper_acting"]) == (0, 1)


@pytest.mark.parametrize("before", ["", "{", "gpukeeper_bytes_returned_total{rule=\n", "\xe4" * 9, "a b c d e\n"])
def test_a_file_that_cannot_be_read_is_a_start_at_nothing(tmp_path: Path, before: str) -> None:
    path = tmp_path / "gpukeeper.prom"
    path.write_bytes(before.encode("latin-1"))
    assert written(path)[RETURNED] == GIB


def test_labels_that_are_not_ours_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "gpukeeper.prom"
    path.write_text('gpukeeper_bytes_returned_total{rule="a",x="b"} 7\ngpukeeper_bytes_returned_total{rule="a"} 5\n')
    seen = written(path)
    assert seen['gpukeeper_bytes_returned_total{rule="a"}'] == 5


def test_everybody_may_read_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "gpukeeper.prom"
    before = os.umask(0o077)
    try:
        written(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "gpukeeper.prom"
    written(path)
    over = threading.Event()
    seen: list[bool] = []

    def read() -> None:
        while not over.is_set():
            names = {family.name for family in text_string_to_metric_families(path.read_text())}
            seen.append({"gpukeeper_info", "gpukeeper_not_measured"} <= names)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        written(path)
    over.set()
    reader.join()
    assert seen
    assert all(seen)


def test_a_directory_that_cannot_be_written_is_reported_and_leaves_the_old_file(tmp_path: Path) -> None:
    """A folder in the file's place, so that it holds for root, too."""
    path = tmp_path / "gpukeeper.prom"
    path.mkdir()
    with pytest.raises(UsageError, match=r"could not be written: .*The pass itself was completed"):
        written(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_nobody_would_read_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"only files with the suffix \.prom\. Nothing was done"):
        metrics.check_textfile(tmp_path / "gpukeeper.txt")
    with pytest.raises(UsageError, match=r"the directory .* does not exist"):
        metrics.check_textfile(tmp_path / "nowhere" / "gpukeeper.prom")
    metrics.check_textfile(tmp_path / "gpukeeper.prom")
