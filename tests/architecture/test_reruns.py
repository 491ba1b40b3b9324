"""The list of tests that may be rerun names files that exist, and none that kills, races or deletes."""

from __future__ import annotations

from pathlib import Path

from tests.real.conftest import RERUN
from tests.stages import NEVER_AGAIN

REAL = Path(__file__).parents[1] / "real"


def test_what_may_be_rerun_exists_and_deletes_nothing() -> None:
    assert [name for name in sorted(RERUN) if not (REAL / name).is_file()] == []
    assert [name for name in RERUN if any(word in name for word in NEVER_AGAIN)] == []
    acting = [name for name in RERUN if '"apply"' in (REAL / name).read_text()]
    assert acting == [], "a test that acts runs once"
