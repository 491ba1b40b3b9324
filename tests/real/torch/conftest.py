"""One worker for all tests of a process: it takes longer to start than most probes take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import engines
from tests.real.torch import installation


@pytest.fixture(autouse=True, scope="session")
def _torch() -> None:
    engines.require("torch", engines.has_torch())


@pytest.fixture(scope="session")
def worker(_torch: None) -> Iterator[installation.Worker]:
    with installation.worker() as started:
        yield started
