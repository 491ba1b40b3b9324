"""Promise 1 for any input: what could not be learned or measured never makes anything happen."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.lifecycle.activity import MINUTE, TAIL_MAX, Use, assess_use, measured_span
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import ACTING, Action, Answer, Verdict, View
from gpukeeper.model.policy import Activity, Policy
from gpukeeper.model.series import NOT_MEASURED, Series, Signal
from gpukeeper.model.subject import Category, Marks, Shape, Subject
from gpukeeper.model.unknown import Unknown
from tests.effort import examples
from tests.property.strategies import LOST, NOW, SHORT, START, Dozens, dozens, pair, series

replace = msgspec.structs.replace
DEVICES = ("GPU-0", "GPU-1")
OTHERS = tuple(Series(one, "", START, (0.0,) * 90) for one in (Signal.CPU, Signal.DISK))
NOT_GPU = [
    (),
    (Series(Signal.GPU, "GPU-0", START, ()),),
    (Series(Signal.GPU, "GPU-0", START, (NOT_MEASURED,) * 90),),
    (Series(Signal.GPU, "GPU-0", START, (0.0,) * 60 + (NOT_MEASURED,) * 30),),
    (Series(Signal.GPU, "GPU-0", NOW, (), missing=LOST),),
    (Series(Signal.GPU, "GPU-0", NOW, (), missing=Unknown("a slice has none", by_design=True), slice=True),),
]


def _may_be_unknown(struct: type[msgspec.Struct]) -> list[str]:
    types = {field.name: field.type for field in msgspec.inspect.type_info(struct).fields}  # type: ignore[union-attr]
    return [name for name, kind in types.items() if any(_is_unknown(one) for one in getattr(kind, "types", ()))]


def _is_unknown(kind: Any) -> bool:
    return getattr(kind, "cls", None) is Unknown


FACTS = _may_be_unknown(Subject)
MARKS = _may_be_unknown(Marks)


def vaguer(view: View, fact: str) -> View:
    """The same view with one fact that could not be learned."""
    if fact in MARKS:
        return replace(view, subject=replace(view.subject, marks=replace(view.subject.marks, **{fact: LOST})))
    return replace(view, subject=replace(view.subject, **{fact: LOST}))


def test_every_fact_that_may_be_unknown_is_tried() -> None:
    assert len(FACTS) >= 15
    assert MARKS == ["ttl", "hold_until", "keep_alive"]


@given(pairs=dozens(pair))
def test_replacing_a_known_fact_by_unknown_never_makes_anything_act(pairs: Dozens[tuple[View, Policy]]) -> None:
    acted: dict[str, str] = {}
    for view, policy in pairs:
        book = Rulebook(policy)
        before = decide(view, book, NOW)
        if before.action is not Action.KEEP:
            continue
        for fact in (*FACTS, *MARKS):
            after = decide(vaguer(view, fact), book, NOW)
            if after.action in ACTING:
                acted[fact] = f"{after.action} by {after.rule}, known: kept by {before.rule}\n{view}"
    assert not acted, "\n\n".join(f"{fact} not known: {words}" for fact, words in acted.items())


@examples(0.5)
@given(pairs=dozens(pair))
def test_a_tree_of_which_a_condition_is_unknown_is_never_removed(pairs: Dozens[tuple[View, Policy]]) -> None:
    """C10.2, C10.3: in use or not, what runs beside it, when it was used; of temporary ones how large it is."""
    for view, policy in pairs:
        if view.subject.shape is not Shape.TREE:
            continue
        conditions = ["busy", "in_use", "last_used", *(["size"] if view.subject.category is Category.TEMPORARY else [])]
        for fact in conditions:
            for full in (True, False):
                made = decide(vaguer(replace(view, pressure=full), fact), Rulebook(policy), NOW)
                assert made.action is Action.KEEP, f"{fact} is not known: {made}"


@examples(0.3)
@given(pairs=dozens(pair))
def test_unreadable_exemptions_keep_everything(pairs: Dozens[tuple[View, Policy]]) -> None:
    for view, policy in pairs:
        assert decide(view, Rulebook(replace(policy, exemptions=LOST)), NOW).action is Action.KEEP


@examples(0.5)
@given(pairs=dozens(pair), measured=st.sampled_from(NOT_GPU))
def test_nothing_unmeasured_makes_anything_due_by_idle(
    pairs: Dozens[tuple[View, Policy]], measured: tuple[Series, ...]
) -> None:
    for view, policy in pairs:
        blind = replace(view, subject=replace(view.subject, devices=("GPU-0",)), series=(*measured, *OTHERS))
        idle = next(one for one in answers(blind, Rulebook(policy), NOW) if one.rule == "idle")
        assert idle.verdict is not Verdict.DUE or "stopped because it was idle" in idle.reason


@examples(0.5)
@given(many=dozens(lambda rng: (series(rng, DEVICES), rng.randrange(4), rng)))
def test_a_worse_coverage_never_makes_idle(many: Dozens[tuple[tuple[Series, ...], int, random.Random]]) -> None:
    """Quiet minutes that were not measured after all: what was not quiet for long enough does not become so."""
    thresholds = Activity(signals=("cpu", "disk"))
    for measured, which, rng in many:
        one, share = measured[which], rng.random()
        newest = len(one.minutes) - TAIL_MAX // MINUTE  # of the newest, nobody can know yet that they will be missing
        fewer = tuple(
            NOT_MEASURED if value == 0 and n < newest and rng.random() < share else value
            for n, value in enumerate(one.minutes)
        )
        worse = (*measured[:which], replace(one, minutes=fewer), *measured[which + 1 :])
        before = assess_use(measured, DEVICES, thresholds, SHORT, NOW, 2 * SHORT)
        after = assess_use(worse, DEVICES, thresholds, SHORT, NOW, 2 * SHORT)
        if after.use is Use.QUIET:
            assert before.since is not None
            assert after.since is not None
            assert (before.use, after.since >= before.since) == (Use.QUIET, True)


@examples(0.5)
@given(pairs=dozens(pair), seed=st.integers(0, 2**32 - 1))
def test_a_gap_never_makes_anything_due_earlier(pairs: Dozens[tuple[View, Policy]], seed: int) -> None:
    """Nobody measured for a while, for as short as it may be, and in any of its signals."""
    rng = random.Random(seed)
    for view, policy in pairs:
        if not view.series:
            continue
        book, gap_end = Rulebook(policy), NOW - rng.random() * 90 * MINUTE
        told = tuple(replace(one, since=START, until=NOW) for one in view.series)
        which = rng.randrange(len(told))
        measured = measured_span(told[which], NOW)
        if measured is None or measured[0] > gap_end:
            continue  # its minutes have a later gap: that it was measured from here on is more than was known
        broken = (*told[:which], replace(told[which], since=gap_end), *told[which + 1 :])
        whole, gap = replace(view, series=told), replace(view, series=broken)
        before, after = (_idle(one, book) for one in (whole, gap))
        if after.action in ACTING:
            assert before.action is after.action, f"{before}\n{after}"
        # Not warned yet, so that both wait for the same.
        unwarned = replace(view.memory, warnings=())
        before, after = (_idle(replace(one, memory=unwarned), book) for one in (whole, gap))
        if after.verdict is Verdict.WAIT and after.due is not None and before.verdict is Verdict.WAIT:
            assert before.due is not None
            assert after.due >= before.due
        assert decide(gap, book, NOW).action not in ACTING or decide(whole, book, NOW).action in ACTING


@examples(0.5)
@given(pairs=dozens(pair), seed=st.integers(0, 2**32 - 1))
def test_a_restart_never_makes_anything_due_earlier(pairs: Dozens[tuple[View, Policy]], seed: int) -> None:
    """The daemon has watched since a moment ago, or for longer than anything takes."""
    rng = random.Random(seed)
    for view, policy in pairs:
        book = Rulebook(policy)
        restarted = replace(view, watched_since=NOW - rng.random() * 90 * MINUTE)
        before, after = decide(view, book, NOW), decide(restarted, book, NOW)
        assert after.action not in ACTING or before.action is after.action, f"{before}\n{after}"
        for one, other in zip(answers(view, book, NOW), answers(restarted, book, NOW), strict=True):
            assert other.action not in ACTING or one.action is other.action


def _idle(view: View, book: Rulebook) -> Answer:
    return next(one for one in answers(view, book, NOW) if one.rule == "idle")


@given(value=st.floats(min_value=5, allow_infinity=True), minute=st.integers(0, 29), device=st.sampled_from(DEVICES))
def test_any_busy_gpu_minute_within_the_window_is_use(value: float, minute: int, device: str) -> None:
    busy = (0.0,) * (89 - minute) + (value,) + (0.0,) * minute
    gpus = tuple(Series(Signal.GPU, one, START, busy if one == device else (0.0,) * 90) for one in DEVICES)
    found = assess_use((*gpus, *OTHERS), DEVICES, Activity(signals=("cpu", "disk")), SHORT, NOW)
    assert found.use is Use.ACTIVE or (found.since is not None and (NOW - found.since).total_seconds() < minute * 60)
