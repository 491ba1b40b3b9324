"""A whole `gpukeeper apply` over 35 GB in a temporary folder, against `rm -rf`; and a pass with nothing due.

The command as people run it: start, looks, ledger, the removal with every check, the look afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.needs import need
from benchmarks.report import Figure, met, print_figure, print_table, timed
from benchmarks.size import sized

SIZE, ABOVE = sized((1_000_000_000, "5GB"), tiny=(1_000_000, "5MB"))  # of a large file; of a tree that is removed
LARGE, SMALL = sized((35, 20_000), tiny=(6, 20))  # large files, and empty ones beside them
SECONDS, SHARE = 30.0, 1.0  # of a sweep; percent of one core, when nothing is due
EVERY = 15 * 60  # seconds between two passes


def run() -> None:
    need("root", os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="gpukeeper-benchmark-") as made:
        home = Path(made)
        root = home / "root"
        root.mkdir()
        tree = _fill(root)
        quiet = _cpu(lambda: _gpukeeper(home, "apply", "--yes", older_than="1d", tree=tree))
        time.sleep(1.1)  # so that it is old enough
        sweep, _ = timed(lambda: _gpukeeper(home, "apply", "--yes", older_than="1s", tree=tree, goes=True))
        _fill(root)
        rm, _ = timed(lambda: subprocess.run(["rm", "-rf", tree], check=True))
    share = 100 * quiet / EVERY
    rows = [
        ("rm -rf of 35 GB and 20,000 files", f"{rm:.2f} s", ""),
        ("gpukeeper apply, the same", f"{sweep:.2f} s", f"at most {SECONDS:g} s, {met(sweep, SECONDS, least=False)}"),
        ("a pass with nothing due, CPU", f"{quiet:.2f} s", ""),
        ("every 15 minutes, of one core", f"{share:.3f} %", f"below {SHARE:g} %, {met(share, SHARE, least=False)}"),
    ]
    print_table(("", "seen", "target"), rows)
    print_figure(Figure("disk-sweep", round(sweep, 2), "s", round(rm / sweep, 2), "rm -rf"))


def _fill(root: Path) -> Path:
    tree = root / "tmp1"
    tree.mkdir()
    for number in range(LARGE):
        with (tree / f"large-{number}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)
    (tree / "small").mkdir()
    for number in range(SMALL):
        (tree / "small" / str(number)).touch()
    os.sync()
    return tree


def _gpukeeper(home: Path, *words: str, older_than: str, tree: Path, goes: bool = False) -> None:
    policy = {
        "mode": "enforce",
        "scope": {"host": {}},
        "temporary": [{"root": str(tree.parent), "names": ["tmp*"], "above": ABOVE, "older_than": older_than}],
        # The first program of a rented machine may be hidden even from root, and has nothing in our folder.
        "disk": {"unreadable": [Path("/proc/1/comm").read_text().strip()], "high": "99%", "low": "98%"},
    }
    (home / "policy.yaml").write_text(json.dumps(policy))
    command = [sys.executable, "-m", "gpukeeper", *words, "--policy", str(home / "policy.yaml"), "--platform", "host"]
    environ = {**os.environ, "GPUKEEPER_STATE": str(home / "state")}
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert tree.exists() is not goes, "the machine hides processes from us: run as root"


def _cpu(work: Callable[[], object]) -> float:
    """Of children, since the command is one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
