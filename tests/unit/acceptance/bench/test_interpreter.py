"""Which Python is taken for probes. The Pythons here are small programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpukeeper.acceptance.bench.probing import find_python, importlib, why_not_python
from gpukeeper.model.unknown import Unknown


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_torch_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_the_one_that_is_requested_is_taken(tmp_path: Path) -> None:
    named = program(tmp_path / "mine", "exit 0")
    assert find_python(str(named), {"GPUKEEPER_PYTHON": "/nowhere", "PATH": ""}) == str(named)
    assert find_python(None, {"GPUKEEPER_PYTHON": str(named), "PATH": ""}) == str(named)


def test_it_is_found_from_where_we_are_and_meant_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are started in another folder; the link of an environment stays one."""
    (tmp_path / "env").symlink_to(program(tmp_path / "mine", "exit 0"))
    monkeypatch.chdir(tmp_path)
    assert find_python("./env", {"PATH": ""}) == str(tmp_path / "env")


def test_another_one_than_requested_is_never_taken(tmp_path: Path) -> None:
    program(tmp_path / "python3", "exit 0")
    named = program(tmp_path / "mine", "exit 9")
    for wanted, why in ((str(named), "No module named 'torch'"), ("/nowhere/python", "program not found")):
        found = find_python(wanted, {"PATH": str(tmp_path)})
        assert isinstance(found, Unknown)
        assert why in found.why
        assert "--python" in found.why


def test_without_a_wish_ours_comes_first_and_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "a/python3", "exit 9")
    second = program(tmp_path / "a/python", "exit 0")
    variables = {"PATH": str(tmp_path / "a")}
    assert find_python(None, variables) == str(second)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert find_python(None, variables) == sys.executable


def test_none_at_all_shows_where_to_get_one(tmp_path: Path) -> None:
    """C17.2"""
    program(tmp_path / "python3", "echo broken >&2; exit 1")
    found = find_python(None, {"PATH": str(tmp_path)})
    assert isinstance(found, Unknown)
    assert "No module named 'torch' in any of" in found.why
    assert str(tmp_path / "python3") in found.why
    assert ".[accept]" in found.why


def test_what_is_no_python_reports_it(tmp_path: Path) -> None:
    assert "broken" in str(why_not_python(str(program(tmp_path / "p", "echo broken >&2; exit 1"))))
    assert "could not be started" in str(why_not_python(str(tmp_path / "nothing")))


def test_a_real_interpreter_is_queried_without_importing_anything(tmp_path: Path) -> None:
    """A folder called torch where we are started is not PyTorch."""
    (tmp_path / "torch").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert "No module named 'torch'" in str(why_not_python(sys.executable))
    finally:
        os.chdir(before)
