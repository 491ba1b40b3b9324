"""The register is the same for any order of the lines, and never loses or invents a machine that was taken out."""

from __future__ import annotations

from datetime import timedelta
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.event import NodeMarked, NodeTested
from gpukeeper.model.gpu import Grade
from gpukeeper.views.nodes import register
from tests.unit.views.test_register import NOW, marked, run_line

DAYS = st.integers(0, 200)
NAMES = st.sampled_from(["n1", "n2", "n3"])
MARKS = st.builds(
    marked,
    DAYS,
    node=NAMES,
    action=st.sampled_from(["quarantine", "taint", "return", "label", "update"]),
    result=st.sampled_from(["begun", "done", "deferred", "failed"]),
    machine=st.sampled_from(["", "m1", "m2"]),
    gpus=st.sampled_from([(), ("S1",), ("S1", "S2")]),
    run=st.sampled_from(["", "r1", "r2"]),
    failed=st.booleans(),
)
RUNS = st.builds(run_line, DAYS, node=NAMES, run=st.sampled_from(["r1", "r2"]), verdict=st.sampled_from(Grade))
LINES: st.SearchStrategy[list[NodeMarked | NodeTested]] = st.lists(st.one_of(MARKS, RUNS), max_size=12)


@given(LINES, st.randoms(use_true_random=False))
def test_the_order_of_the_lines_does_not_matter(lines: list[NodeMarked | NodeTested], random: Random) -> None:
    mixed = list(lines)
    random.shuffle(mixed)
    limits = {"repeats": 2, "within": timedelta(days=90)}
    assert register(mixed, NOW, **limits) == register(lines, NOW, **limits)  # type: ignore[arg-type]


@given(LINES, st.lists(RUNS, max_size=6))
def test_a_collected_run_never_hides_or_adds_what_the_ledger_has(
    lines: list[NodeMarked | NodeTested], collected: list[NodeTested]
) -> None:
    limits = {"repeats": 2, "within": timedelta(days=90)}
    alone = register(lines, NOW, **limits)  # type: ignore[arg-type]
    both = {(one.kind, one.name): one for one in register(lines, NOW, **limits, collected=collected).entries}  # type: ignore[arg-type]
    for one in alone.entries:
        found = both[one.kind, one.name]
        assert (found.taken_out, found.returned, found.lately, found.warning) == (
            *(one.taken_out, one.returned, one.lately),
            one.warning,
        )
        assert found.failed - found.not_marked == one.failed
        assert set(one.events) <= set(found.events)
    every = [*lines, *collected]
    runs = {one.run for one in every if isinstance(one, NodeTested)} | {one.run for one in every}
    assert all(one.failed <= len(runs) for one in both.values())


@given(st.lists(st.tuples(DAYS, NAMES), min_size=1, max_size=8, unique=True))
def test_however_a_machine_is_named_each_time_it_is_taken_out_counts(times: list[tuple[int, str]]) -> None:
    found = register([marked(*one) for one in times], NOW, repeats=3, within=timedelta(days=90))
    (entry,) = found.entries
    assert (entry.kind, entry.name, entry.taken_out) == ("machine", "m1", len(times))
    assert set(entry.nodes) == {node for _, node in times}
    assert bool(entry.warning) == (sum(days <= 90 for days, _ in times) >= 3)
