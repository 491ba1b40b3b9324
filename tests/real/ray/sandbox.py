"""gpukeeper as a program that sees the whole machine, also where the machine hides its first process even from root.

There a look at open files is never complete, and so nothing is ever removed: right for a policy, useless for a test.
The program gets a mount namespace of its own, in which pid 1 is a thread of the kernel; everything else is real, this
machine itself included: so a policy must name roots that only the nodes of a test have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpukeeper.devices.holders import KERNEL_THREAD

_STAT = f"1 (init) S 0 0 0 0 -1 {KERNEL_THREAD} {' '.join(['0'] * 12)} 1 0\n"
_HIDE = 'mount --bind "$0" /proc/1 && exec "$@"'


def run(
    folder: Path, *arguments: str, policy: Mapping[str, object], env: Mapping[str, str], deadline: float = 180
) -> subprocess.CompletedProcess[str]:
    """`folder`: for its policy, ledger and evidence."""
    with start(folder, *arguments, policy=policy, env=env) as child:
        try:
            out, err = child.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def start(folder: Path, *arguments: str, policy: Mapping[str, object], env: Mapping[str, str]) -> subprocess.Popen[str]:
    nodes = policy["ray"]
    assert isinstance(nodes, Mapping)
    assert not any(Path(root).exists() for root in nodes["roots"]), "these are this machine's own folders"
    assert nodes["sessions"] == nodes["logs"] == "none", "sessions of others on this machine would go, too"
    home = folder / "init"
    home.mkdir(exist_ok=True)
    (home / "stat").write_text(_STAT)
    file = folder / "policy.yaml"
    file.write_text(json.dumps(policy))
    settings = {"GPUKEEPER_POLICY": str(file), "GPUKEEPER_STATE": str(folder / "state"), "COLUMNS": "200"}
    gpukeeper = [sys.executable, "-P", "-m", "gpukeeper", *arguments]
    return subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _HIDE, str(home), *gpukeeper],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, **settings},
    )
