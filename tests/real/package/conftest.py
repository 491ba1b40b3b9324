"""The offline bundle of this working tree, for all tests here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import require
from tests.package.test_build import ROOT, build

BUILD = ROOT / "deploy" / "bundle" / "build.py"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    build(ROOT, dist)
    made = subprocess.run([sys.executable, BUILD, dist], capture_output=True, text=True, check=False)
    require("pypi", made.returncode == 0)
    return Path(made.stdout.strip())
