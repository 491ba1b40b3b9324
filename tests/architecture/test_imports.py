"""Imports point inwards, as the contracts in pyproject.toml say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.architecture.tree import ROOT


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    assert lint.exists(), "import-linter is not installed beside this Python; install requirements-dev.txt"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
