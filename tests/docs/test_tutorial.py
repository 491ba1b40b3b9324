"""The tutorial does what it says: its commands run, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import generate
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Nobody is at the terminal here, so the answer to "apply?" is given in the policy.
_CONFIRMED = "sed -i 's/^mode: plan$/mode: enforce/' policy.yaml && gpukeeper apply --yes"


def test_the_demo_prints_what_the_tutorial_shows() -> None:
    advice = "the demo's output in the tutorial is stale. Write it anew: python -m tests.docs.generate"
    assert generate.TUTORIAL.read_text() == generate.tutorial_page(), advice


def test_every_command_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    script, shown = ["set -eu", "exec 2>&1"], []
    for kind, text in _BLOCK.findall(generate.TUTORIAL.read_text().partition("## 2.")[2]):
        if kind == "sh":
            confirmed = re.sub(r"^gpukeeper apply$", _CONFIRMED, text, flags=re.MULTILINE)
            script.append(re.sub(r"^(gpukeeper workload stop \S+)$", r"\1 --yes", confirmed, flags=re.MULTILINE))
        else:
            shown += [_plain(line) for line in text.splitlines()]
    printed = _run("\n".join(script), tmp_path)
    missing = [line for line in shown if line not in printed]
    assert shown
    assert re.search(r"lab/notebook-eve .*running", printed), printed  # stopped, and restored
    assert not missing, f"not printed: {missing}\n\n{printed}"


def _run(script: str, folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUKEEPER_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**kept, "PATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _plain(done.stdout)


def _plain(text: str) -> str:
    """Columns may be wider or narrower; words and their order count."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines())
