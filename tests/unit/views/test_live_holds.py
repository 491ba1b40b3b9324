"""A hold as rows show it: until when, and whether the maximum runtime still counts."""

from __future__ import annotations

import pytest

from gpukeeper.engine.live import LiveFact
from gpukeeper.lifecycle.claims import ClaimState, Inventory, claim_on
from gpukeeper.lifecycle.decide import decide
from gpukeeper.model.decision import View
from gpukeeper.model.subject import EMPTY, RESTORE, Hold, Memory, Warned
from gpukeeper.views.live import GpuTile, ShownHold, WorkloadLine
from gpukeeper.views.live_rows import NOTHING, gpu_tile, live_tile, tile_moments, workload_line
from tests.unit.lifecycle.examples import BOOK, DAY, HOUR, MINUTE, NOW, quiet, subject

HELD = Hold("ann", NOW - HOUR, NOW + 3 * HOUR)


def fact(*holds: Hold, rule: str = "idle", limited: bool = True) -> LiveFact:
    """A stop by that rule was announced for in five minutes."""
    sent = Warned(rule, 2, NOW - MINUTE, True, "run-1", 30 * MINUTE, NOW + 5 * MINUTE)
    view = View(subject(), quiet(), Memory(holds=holds, warnings=(sent,)))
    return LiveFact(view, decide(view, BOOK, NOW), max_runtime=DAY if limited else None)


def tile(one: LiveFact) -> GpuTile:
    claim = claim_on("GPU-0", one.view, ClaimState.RUNNING, Inventory([]), "", None, NOW)
    return live_tile(gpu_tile(claim, None, NOTHING, EMPTY, NOW, "m"), one, None, NOW)


def line(one: LiveFact) -> WorkloadLine:
    return workload_line(one, "m", NOW)


@pytest.mark.parametrize("limited", [True, False])
def test_tile_and_line_show_the_hold_and_that_the_maximum_runtime_still_counts(limited: bool) -> None:
    held = fact(HELD, limited=limited)
    assert tile(held).hold == ShownHold("ann", HELD.until, limited)
    row = line(held)
    assert (row.held_by, row.hold_until, row.hold_but_max_runtime) == ("ann", HELD.until, limited)


def test_an_admin_may_suspend_the_maximum_runtime_too() -> None:
    granted = Hold("root", NOW, NOW + HOUR, admin=True, suspends=("max_runtime",))
    assert tile(fact(HELD, granted)).hold == ShownHold("ann", HELD.until)


def test_a_hold_that_suspends_only_some_rules_says_so() -> None:
    """A restore suspends the maximum runtime for an hour; pages said that the work is held, and it was stopped."""
    restored = Hold(RESTORE, NOW, NOW + 9 * HOUR, "restored by ann", admin=True, suspends=("max_runtime",))
    assert tile(fact(restored)).hold == ShownHold(RESTORE, restored.until, only=("max_runtime",))
    assert line(fact(restored)).hold_only == ("max_runtime",)
    assert tile(fact(restored, HELD)).hold == ShownHold("ann", HELD.until), "what suspends more is shown first"
    everything = Hold("root", NOW, NOW + HOUR, admin=True, suspends=("*",))
    assert line(fact(everything)).hold_only == ()


def test_without_a_hold_none_is_shown() -> None:
    over = Hold("ann", NOW - 3 * HOUR, NOW)
    assert tile(fact(over)).hold is None
    assert line(fact(over)).hold_until is None


def test_a_tile_is_built_again_when_its_hold_ends() -> None:
    claim = claim_on("GPU-0", fact(HELD).view, ClaimState.RUNNING, Inventory([]), "", None, NOW)
    assert HELD.until in tile_moments(claim, fact(HELD), None, NOW)


def test_what_was_announced_is_not_repeated_while_a_hold_suspends_it() -> None:
    assert line(fact()).stop_announced == NOW + 5 * MINUTE
    assert line(fact(HELD)).stop_announced is None
    assert line(fact(HELD, rule="max_runtime")).stop_announced == NOW + 5 * MINUTE, "that still comes"
