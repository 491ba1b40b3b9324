"""Real engines share two cores with everything else, and answer late at times. A test on one that fails is run up to
three times more; the summary names it then (RERUN), and it is a bug to be found: here or in the engine's start. Not so
where nothing but the filesystem is asked: a race that hits once in a hundred runs is what those tests are for."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ONCE = _HERE / "disk"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and _ONCE not in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=3))
