"""Fixtures of the command line tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)
