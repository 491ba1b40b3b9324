"""What a run of tests leaves outside the repository, if GPUKEEPER_TEST_RESULTS names a directory. A plugin of pytest.

    junit-PID.xml    the report of pytest itself
    outcomes.jsonl   each test with its outcome and seconds; a test in it that passed is not run again in this directory
    reruns.jsonl     two directories up, over all runs: each test that was run again, when and why

tests/stages.py gives every stage and every version of the source tree a directory of its own.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GPUKEEPER_TEST_RESULTS"
ENOUGH = 5000  # characters of a reason


def outcomes(directory: Path) -> list[dict[str, Any]]:
    """The last outcome of each test."""
    file = directory / "outcomes.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return list({line["test"]: line for line in lines}.values())


class Results:
    """Written by the process that started the workers; what passed before is left out by all of them."""

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self._directory = directory
        self._writes = writes
        self._passed = {line["test"] for line in outcomes(directory) if line["outcome"] == "passed"}
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcome: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        again = {item for item in items if item.nodeid in self._passed}
        config.hook.pytest_deselected(items=list(again))
        items[:] = [item for item in items if item not in again]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK  # all of them passed before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes:
            return
        test = report.nodeid
        self._seconds[test] += report.duration
        if report.when == "setup" or not report.passed:
            self._outcome[test] = report.outcome
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # of pytest-rerunfailures
            now = datetime.now(UTC).isoformat(timespec="seconds")
            _append(self._directory.parents[1] / "reruns.jsonl", {"test": test, "at": now, "why": _why(report)})
        if report.when not in {"setup", "call"}:  # its end, or the end of its worker
            self._ended(test)

    def _ended(self, test: str) -> None:
        if (outcome := self._outcome.pop(test)) != "rerun":
            line = {"test": test, "outcome": outcome, "seconds": round(self._seconds.pop(test), 2)}
            _append(self._directory / "outcomes.jsonl", line)


def _why(report: pytest.TestReport) -> str:
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " ".join(line[1:].strip() for line in lines)[:ENOUGH]


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def add_to(config: pytest.Config) -> None:
    if directory := os.environ.get(VARIABLE):
        config.option.xmlpath = str(Path(directory, f"junit-{os.getpid()}.xml"))
        config.pluginmanager.register(Results(Path(directory), writes=not hasattr(config, "workerinput")))
