"""What a run leaves: outcomes, reruns with their reason, and no second run of what passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.results import VARIABLE, outcomes
from tests.touched import ROOT

FILE = """
import os
import pathlib
import pytest

def test_good():
    with pathlib.Path(os.environ["RAN"]).open("a") as file:
        file.write("good ")

def test_bad():
    assert False, "always"

@pytest.mark.flaky(reruns=1)
def test_late():
    mark = pathlib.Path(os.environ["RAN"] + ".late")
    assert mark.exists() or mark.write_text("") == 1, "the engine was late"
"""
CONFTEST = """
from tests.results import add_to

def pytest_configure(config):
    add_to(config)
"""


def run(folder: Path) -> int:
    environment = {**os.environ, VARIABLE: str(folder / "tree" / "stage"), "RAN": str(folder / "ran")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode


def test_what_passed_is_not_run_again_and_a_rerun_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "tree" / "stage").mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_file.py").write_text(FILE)
    assert [run(tmp_path), run(tmp_path)] == [1, 1]
    assert (tmp_path / "ran").read_text() == "good "
    found = {line["test"].partition("::")[2]: line["outcome"] for line in outcomes(tmp_path / "tree" / "stage")}
    assert found == {"test_good": "passed", "test_bad": "failed", "test_late": "passed"}
    (rerun,) = map(json.loads, (tmp_path / "reruns.jsonl").read_text().splitlines())
    assert rerun["test"].endswith("test_late")
    assert "the engine was late" in rerun["why"]
    assert len(list((tmp_path / "tree" / "stage").glob("junit-*.xml"))) == 2
