"""The promises hold in a moving, failing world. A seed repeats any failure: make simulate SEED=n."""

from __future__ import annotations

import pytest

from gpukeeper.model.event import Closed, Decided, Intended
from tests.simulation.harness import USED_WHILE_DOWN, Run, simulate
from tests.simulation.promises import broken_promises

FIRST, SEEDS, CHUNK = 90, 300, 30  # CI runs the first 2,000 by itself: make simulate SEEDS=2000


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [simulate(seed) for seed in range(FIRST)]


def test_every_promise_holds_for_the_first_seeds(runs: list[Run]) -> None:
    for run in runs:
        _keeps_every_promise(run)


def test_the_simulation_is_not_a_calm_sea(runs: list[Run]) -> None:
    """Seeds crash, lose commands, change things at the last moment and reclaim by every rule; else it proves little."""
    assert sum(run.crashes for run in runs) > 30
    assert sum(h.effect == USED_WHILE_DOWN for run in runs for h in run.world.log) > 5
    assert sum(entry.kind == "bug" for run in runs for entry in run.world.log) > 5
    effects = {(act.action, act.effect) for run in runs for _, act in run.acts()}
    assert {
        ("stop", "done"),
        ("remove", "done"),
        ("trim", "done"),
        ("remove", "nothing"),
        ("remove", "halfway"),
    } <= effects
    assert {("stop", "nothing"), ("trim", "nothing")} & effects, "an order on running work that is lost"
    rules = {intent.rule for run in runs for _, act in run.acts() if (intent := run.intent(act.step)) is not None}
    assert rules == {
        "idle",
        "max_runtime",
        "never_started",
        "retention",
        "own_ttl",
        "live_children",
        "restart_loop",
        "orphan",
        "temporary_tree",
        "leftover_tree",
    }
    lines = [line.reason for run in runs for line in run.lines if isinstance(line, Decided | Intended | Closed)]
    for words in (
        *("a dead session", "logs of processes that ended", "a report", "left by an interrupted removal of gpukeeper"),
        *("while the disk is too full", "it was opened, or work began beside it", "work runs beside it"),
    ):
        assert any(words in reason for reason in lines), f"nothing happened that says: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, SEEDS, CHUNK))
def test_every_promise_holds_for_each_seed(first: int) -> None:
    for seed in range(first, first + CHUNK):
        _keeps_every_promise(simulate(seed))


def _keeps_every_promise(run: Run) -> None:
    broken = broken_promises(run)
    assert not broken, f"seed {run.seed}: " + "\n".join(broken) + f"\nRepeat it: make simulate SEED={run.seed}"


def test_the_same_seed_gives_the_same_story() -> None:
    one, two = simulate(4), simulate(4)
    assert [(h.kind, h.at, h.uid, h.effect) for h in one.world.log] == [
        (h.kind, h.at, h.uid, h.effect) for h in two.world.log
    ]
