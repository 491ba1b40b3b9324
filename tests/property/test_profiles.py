"""The examples of a run: the same ones each time, whatever else was imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def tried() -> list[tuple[list[int], str]]:
    found = []

    @given(st.lists(st.integers(), max_size=5), st.text(max_size=20))
    def example(numbers: list[int], text: str) -> None:
        found.append((numbers, text))

    example()
    return found


def test_examples_do_not_depend_on_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not settings().derandomize:
        pytest.skip("this profile searches for new examples")
    before = tried()
    (tmp_path / "just_imported.py").write_text("NUMBERS = 123456789, 'a word of it', 987654321\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("just_imported")
    try:
        after = tried()
    finally:
        del sys.modules["just_imported"]
    assert after == before
