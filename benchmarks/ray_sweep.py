"""500 small trees on a Ray node: a whole `gpukeeper apply`, against one look at open files and `rm -rf` of the same.

Beside a real Ray where one is installed (`make ray`), so that its dashboard is asked as well. The command as people run
it: start, looks, ledger, every tree moved away, looked at again and deleted, and the look afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.needs import need
from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized
from gpukeeper.disk import open_files
from tests.engines import has_ray
from tests.real.ray.clusters import NEWEST, ray_cluster

TREES, BYTES = sized(500, tiny=5), 8 * 1024
GOAL = 20.0  # trees a second


def run() -> None:
    need("root", os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="gpukeeper-benchmark-") as made, _ray() as beside:
        home = Path(made)
        root = home / "root"
        (root / "ray").mkdir(parents=True)  # so that this machine is a node without a raylet, too
        # What an apply costs that has nothing to remove: its start, and the window over which use is measured.
        idle, _ = timed(lambda: _apply(home))
        _fill(root)
        time.sleep(1.1)  # so that they are old enough
        before = _cpu()
        whole, said = timed(lambda: _apply(home))
        cpu = _cpu() - before
        left = len(list(root.glob("tmp*")))
        assert not left, f"{left} trees are left: run as root, on a machine without other work of Ray. {said}"
        _fill(root)
        rm, _ = timed(lambda: _checked_once(root))
    pace, other = TREES / (whole - idle), TREES / rm
    rows = [
        ("apply with nothing due", f"{idle:.2f} s", ""),
        (f"apply, {TREES} trees of 8 KiB, {beside}", f"{whole:.2f} s", ""),
        ("trees a second", f"{pace:.0f}", f"at least {GOAL:g}, {met(pace, GOAL, least=True)}"),
        ("processor time of it, for each tree", f"{1000 * cpu / TREES:.0f} ms", ""),
        ("one look at open files, then rm -rf", f"{other:.0f}", ""),
    ]
    print_table(("", "seen", "target"), rows)
    print_figure(Figure("ray-sweep", round(pace, 1), "trees/s", round(pace / other, 3), "one look and rm -rf"))


@contextmanager
def _ray() -> Iterator[str]:
    if not has_ray(NEWEST):
        yield "without a Ray"
        return
    with ray_cluster(NEWEST):
        yield f"beside Ray {NEWEST}"


def _cpu() -> float:
    """Of children, since the command is one. On a crowded machine this tells more than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fill(root: Path) -> None:
    for number in range(TREES):
        tree = root / f"tmp{number}"
        tree.mkdir()
        (tree / "file").write_bytes(b"x" * BYTES)
    os.sync()


def _checked_once(root: Path) -> None:
    open_files.scan()
    subprocess.run(["rm", "-rf", *root.glob("tmp*")], check=True)


def _apply(home: Path) -> str:
    policy = {
        "mode": "enforce",
        "scope": {"ray": {}},
        "ray": {"roots": [str(home / "root")], "above": "1B", "older_than": "1s", "window": "1s", "workers": []},
        # The first program of a rented machine may be hidden even from root, and has nothing in our folder.
        "disk": {"unreadable": [Path("/proc/1/comm").read_text().strip()], "high": "99%", "low": "98%"},
        "budget": {"trees": 2 * TREES},
    }
    (home / "policy.yaml").write_text(json.dumps(policy))
    command = [sys.executable, "-m", "gpukeeper", "apply", "--yes", "--policy", str(home / "policy.yaml")]
    environ = {**os.environ, "GPUKEEPER_STATE": str(home / "state")}
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    assert done.returncode in {0, 3}, done.stderr
    return done.stdout + done.stderr
