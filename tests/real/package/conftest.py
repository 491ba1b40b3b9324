"""The offline bundle of this working tree, for all tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.package.fixtures import OWN_PYTHON


@pytest.fixture(scope="session")
def bundle(bundle_for: Callable[[str], Path]) -> Path:
    return bundle_for(OWN_PYTHON)
