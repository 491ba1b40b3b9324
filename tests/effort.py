"""How many examples of a property are tried.

The profile of Hypothesis decides, see tests/conftest.py: a test has no number of its own. Where one example is
expensive, or is many in one, the test takes a share of them.
"""

from __future__ import annotations

from hypothesis import settings


def how_many(share: float = 1.0) -> int:
    """That share of the examples of the profile, at least one. It may be above 1 if they are cheap."""
    return max(1, round(settings().max_examples * share))


def examples(share: float) -> settings:
    """A decorator for a property."""
    return settings(max_examples=how_many(share))
