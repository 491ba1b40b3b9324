"""`--compress`: short times for named workloads, and everything else is kept."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import NOT_COMPRESSED, CompressedBook, Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.policy import ClassSettings, PlaceScope, Policy, Retention
from gpukeeper.model.subject import Marks, Memory, Outcome, Seen, Shape, State, Subject
from tests.effort import examples
from tests.property.strategies import DAY, HOUR, MINUTE, NOW, REFS, Dozens, dozens, pair

replace = msgspec.structs.replace
NAMES = st.sets(st.sampled_from(["docker/node-3/eval", "kubernetes/prod/research/trainjob/run-7", "eval", "docker"]))
SPANS = st.one_of(st.none(), st.sampled_from([timedelta(), MINUTE, HOUR, DAY, 7 * DAY]))
AGES = st.sampled_from([timedelta(), MINUTE, 59 * MINUTE, HOUR, 25 * HOUR, DAY - MINUTE, 8 * DAY])


@examples(0.4)
@given(pairs=dozens(pair), names=NAMES, divisor=st.sampled_from([2, 60, 3600]))
def test_what_is_not_named_is_kept(pairs: Dozens[tuple[View, Policy]], names: set[str], divisor: int) -> None:
    for view, rules in pairs:
        subject, found = view.subject, decide(view, CompressedBook(rules, divisor, names), NOW)
        if subject.shape is not Shape.WORKLOAD or subject.ref.path not in names:
            assert (found.action, found.begins, found.reason) == (Action.KEEP, None, NOT_COMPRESSED)
        elif found.action is not Action.KEEP:
            assert f"(times divided by {divisor})" in found.reason


@given(
    st.builds(Retention, succeeded=SPANS, failed=SPANS, stopped=SPANS, max=st.sampled_from([HOUR, 30 * DAY])),
    st.builds(ClassSettings, never_started=SPANS, max_runtime=SPANS),
    st.sampled_from([State.ENDED, State.CREATED, State.RUNNING]),
    st.sampled_from(Outcome),
    SPANS,
    AGES,
    st.sampled_from([2, 60]),
)
def test_a_named_one_is_decided_as_by_the_policy_itself_so_much_later(
    retention: Retention,
    limits: ClassSettings,
    state: State,
    outcome: Outcome,
    ttl: timedelta | None,
    age: timedelta,
    divisor: int,
) -> None:
    """Running work is only warned: this is its first warning."""
    rules = Policy(scope={"docker": PlaceScope()}, retention=retention, classes={"managed": limits})
    short = CompressedBook(rules, divisor, [REFS[0].path])
    begin, now = NOW, NOW + age / divisor
    of_any_time = Subject(
        seen=Seen(REFS[0], "run-1", "1", now),
        state=state,
        class_="managed",
        created=begin,
        started=None if state is State.CREATED else begin,
        ended=begin if state is State.ENDED else None,
        outcome=outcome if state is State.ENDED else None,
        owner="ann",
        devices=(),
        live_children=0,
        marks=Marks(ttl=ttl),
    )
    view = View(of_any_time, (), Memory(first_seen_ended=begin if state is State.ENDED else None))
    compressed, usual = decide(view, short, now), decide(view, Rulebook(rules), begin + age)
    assert (compressed.action, compressed.rule, compressed.verdict, compressed.stage) == (
        *(usual.action, usual.rule, usual.verdict),
        usual.stage,
    )
    if usual.due is not None:
        assert compressed.due is not None
        assert abs((compressed.due - begin) * divisor - (usual.due - begin)) <= timedelta(milliseconds=1)
