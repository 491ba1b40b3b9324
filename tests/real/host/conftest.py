"""What all tests of a host need: to see which processes have files open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.process_lock import seeing_processes


@pytest.fixture(autouse=True)
def seeing() -> Iterator[None]:
    with seeing_processes():
        yield
