"""CI runs what a change needs, stops at the first failure, and never says passed for what it did not run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.stages import LIMIT, Run, Stage, stages, to_run_again
from tests.touched import select

YES, NO = ["true"], ["false"]


def names(paths: list[str]) -> list[str]:
    return [stage.name for stage in stages(select(paths))]


def test_a_change_of_docs_runs_the_smoke_set_of_the_engines() -> None:
    assert names(["docs/index.md"]) == ["check", "test", "slow", "smoke"]


def test_a_change_of_the_core_adds_crash_tests_and_seeds() -> None:
    assert names(["src/gpukeeper/lifecycle/decide.py"]) == ["check", "test", "slow", "smoke", "engines", "seeds"]


def test_the_first_failure_ends_the_run_and_names_what_was_not_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, time.time())
    assert run.all([Stage("one", YES, 1), Stage("two", NO, 1), Stage("three", ["touch", str(tmp_path / "x")], 1)]) == 1
    assert not (tmp_path / "x").exists()
    assert "three: not run" in capfd.readouterr().out


def test_what_cannot_finish_in_time_is_not_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, time.time() - LIMIT + 5 * 60)
    long = Stage("long", ["touch", str(tmp_path / "x")], 6)
    assert run.all([long, Stage("short", YES, 1)]) == 1, "what was not run is not passed"
    assert "long: NOT RUN (required)" in capfd.readouterr().out
    assert not (tmp_path / "x").exists()


def test_what_is_not_required_may_be_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, time.time() - LIMIT + 5 * 60)
    assert run.all([Stage("short", YES, 1), Stage("long", NO, 6, required=False)]) == 0


def test_what_is_not_required_may_run_out_of_time_but_not_fail(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sleeps = ["sleep", "600"]
    assert Run(tmp_path, time.time() - LIMIT + 1).all([Stage("long", sleeps, 0, required=False)]) == 0
    assert "long: NOT FINISHED (not required)" in capfd.readouterr().out
    assert Run(tmp_path, time.time() - LIMIT + 1).all([Stage("long", sleeps, 0)]) == 1
    assert Run(tmp_path, time.time()).all([Stage("long", NO, 0, required=False)]) == 1


def test_the_names_of_failed_tests_come_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"test": "tests/a.py::test_b", "outcome": "failed", "seconds": 1})
    write = ["sh", "-c", f"echo '{line}' >> {tmp_path}/one/outcomes.jsonl; exit 1"]
    assert Run(tmp_path, time.time()).all([Stage("one", write, 1)]) == 1
    assert "  FAILED tests/a.py::test_b\n" in capfd.readouterr().out[-200:]


def test_few_failed_tests_are_run_again_but_none_of_crashes(tmp_path: Path) -> None:
    def failed(*tests: str) -> Path:
        lines = (json.dumps({"test": f"tests/real/{test}::test_x", "outcome": "failed"}) for test in tests)
        (tmp_path / "outcomes.jsonl").write_text("\n".join(lines))
        return tmp_path

    assert to_run_again(failed("kube/test_advice.py")) == ["tests/real/kube/test_advice.py::test_x"]
    assert to_run_again(failed("kube/test_advice.py", "kube/test_crashes.py")) == []
    assert to_run_again(failed(*(f"kube/test_{number}.py" for number in range(6)))) == []
