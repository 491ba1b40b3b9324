"""`gpukeeper setup remove` where the units of an older setup are left and systemd does not run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import require

UNIT = "[Service]\nExecStart=/opt/gpukeeper/bin/gpukeeper serve\n"
# In mounts of its own: /run and the units of this machine are neither seen nor changed.
SCRIPT = """
set -eu
mount -t tmpfs none /run
mount -t tmpfs none /etc/systemd
mkdir -p /etc/systemd/system/multi-user.target.wants
printf %s "$UNIT" > /etc/systemd/system/gpukeeper.service
ln -s /etc/systemd/system/gpukeeper.service /etc/systemd/system/multi-user.target.wants/
"$PYTHON" -m gpukeeper setup remove --yes
find /etc/systemd ! -type d
"""


@pytest.mark.smoke
def test_files_and_links_are_removed_without_systemctl(tmp_path: Path) -> None:
    require("tmpfs", os.geteuid() == 0)
    path = "/etc/systemd/system/gpukeeper.service"
    tmp_path.chmod(0o700)
    record = {"files": {path: hashlib.sha256(UNIT.encode()).hexdigest()}, "unit": "gpukeeper.service"}
    (tmp_path / "setup.json").write_text(json.dumps(record))
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", SCRIPT],
        env={**os.environ, "GPUKEEPER_STATE": str(tmp_path), "UNIT": UNIT, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "systemd does not run on this machine, so there was no gpukeeper.service to stop" in done.stderr
    assert "remove" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1].startswith("The program is still installed"), "find found nothing"
    assert not (tmp_path / "setup.json").exists()
