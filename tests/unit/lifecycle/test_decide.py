"""The decision, the condition for acting on it, and every rule's answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gpukeeper.lifecycle import decide as decide_module
from gpukeeper.lifecycle.decide import REQUEST, RULES, answers, decide, still_holds
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import EVERY_RULE, Action, Announcement, Answer, Decision, Step, Verdict, View
from gpukeeper.model.policy import ClassSettings, Exemption
from gpukeeper.model.series import Series, Signal
from gpukeeper.model.subject import Hold, Marks, Memory, Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import (
    BOOK,
    DAY,
    HOUR,
    MINUTE,
    NOW,
    POLICY,
    ended,
    ended_view,
    idle_view,
    quiet,
    subject,
)

LOST = Unknown("inspect timed out")


def step(view: View, **changes: Any) -> Step:
    return Step("1.1", msgspec.structs.replace(decide(view, BOOK, NOW), **changes))


def asked(view: View, action: Action = Action.STOP) -> Step:
    return Step(
        "1.1",
        Decision(seen=view.subject.seen, action=action, rule=REQUEST, reason="asked for by ann", verdict=Verdict.DUE),
    )


def test_a_decision_has_every_field_of_its_answer_under_the_same_name() -> None:
    """It is made from positional arguments: with keywords, decisions take a tenth longer."""
    given = Answer(
        "idle",
        Verdict.DUE,
        "its GPUs are idle",
        Action.STOP,
        due=NOW + HOUR,
        since=NOW - HOUR,
        stage=2,
        limit=3 * HOUR,
        then=Action.REMOVE,
        announced=NOW + 2 * HOUR,
        unheard=Announcement(NOW + DAY, "its GPUs are idle"),
    )
    seen = subject(owner_verified=True, size=7)
    made = decide_module._decision(seen, given, ("a complaint",), BOOK.settings(seen))
    shared = set(Answer.__struct_fields__) & set(Decision.__struct_fields__) - {"begins"}
    assert len(shared) == 11
    assert {name: getattr(made, name) for name in shared} == {name: getattr(given, name) for name in shared}
    of_subject = (made.seen, made.owner, made.size, made.owner_verified, made.class_, made.complaints)
    assert of_subject == (seen.seen, seen.owner, 7, True, seen.class_, ("a complaint",))


def test_a_step_holds_when_nothing_changed() -> None:
    assert decide(idle_view(), BOOK, NOW).action is Action.STOP
    assert still_holds(step(idle_view()), idle_view(), BOOK, NOW) is None


def test_a_longer_idle_time_is_no_change() -> None:
    """Facts such as "idle for 31m" change every tick; the condition is the decision, not equality of facts."""
    fresh = View(subject(), quiet(), idle_view().memory)
    assert still_holds(step(idle_view()), fresh, BOOK, NOW + 30 * timedelta(seconds=1)) is None


def test_another_thing_under_the_same_name_is_left_alone() -> None:
    other = idle_view(ref=Ref("docker", "node-3", "container", "eval", "beef"))
    assert still_holds(step(idle_view()), other, BOOK, NOW) == "it is no longer the same object"


def test_a_restarted_thing_is_left_alone() -> None:
    fresh = idle_view(incarnation="run-2")
    assert still_holds(step(idle_view()), fresh, BOOK, NOW) == "it was restarted since the plan was made"


def test_what_is_used_again_is_left_alone() -> None:
    busy = (Series(Signal.GPU, "GPU-0", NOW - MINUTE, (90.0, 90.0)), *quiet()[1:])
    changed = still_holds(step(idle_view()), View(subject(), busy, idle_view().memory), BOOK, NOW)
    assert changed == "GPU GPU-0 was in use just now"


def test_what_was_held_meanwhile_is_left_alone() -> None:
    memory = Memory(holds=(Hold("ann", NOW, NOW + HOUR),), warnings=idle_view().memory.warnings)
    changed = still_holds(step(idle_view()), View(subject(), quiet(), memory), BOOK, NOW)
    assert changed == "held by ann for 1h more"


def test_another_rule_is_another_decision() -> None:
    changed = still_holds(step(ended_view(), rule="own_ttl"), ended_view(), BOOK, NOW)
    assert changed == "now remove by retention: succeeded 2d ago, kept for 1d"


def test_another_stage_is_another_warning() -> None:
    view = View(subject(), quiet(), Memory())
    assert decide(view, BOOK, NOW).action is Action.WARN
    assert still_holds(step(view, stage=2), view, BOOK, NOW) is not None


def test_a_request_needs_no_rule_to_be_due() -> None:
    busy = View(subject(), (), Memory())
    assert still_holds(asked(busy), busy, BOOK, NOW) is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"root": "kubernetes/prod/a/trainjob/x"}, "only the root is acted on"),
        ({"class_": "infrastructure"}, "never touched"),
        ({"state": LOST}, "state is unknown"),
        ({"state": State.REMOVING}, "in progress"),
    ],
)
def test_a_request_reaches_only_what_is_ours(facts: dict[str, Any], why: str) -> None:
    view = View(subject(**facts))
    changed = still_holds(asked(view), view, BOOK, NOW)
    assert changed is not None
    assert why in changed


def test_a_decision_carries_what_acting_needs() -> None:
    made = decide(idle_view(), BOOK, NOW)
    assert (made.running, made.owner, made.gpus, made.grace) == (True, "ann", 1, MINUTE)
    unknown = decide(idle_view(owner=LOST, devices=LOST, class_=LOST, size=5), BOOK, NOW)
    assert (unknown.owner, unknown.gpus, unknown.grace, unknown.size) == (None, LOST, timedelta(), 5)


def test_the_soonest_wait_is_named() -> None:
    """max_runtime warns in 15h, idle is judged in 30m: the decision says the latter."""
    made = decide(View(subject(started=NOW - MINUTE), quiet(), Memory()), BOOK, NOW)
    assert (made.rule, made.verdict) == ("idle", Verdict.WAIT)
    later = msgspec.structs.replace(
        POLICY, classes={"managed": ClassSettings(idle=30 * MINUTE, max_runtime=10 * MINUTE)}
    )
    made = decide(View(subject(started=NOW - MINUTE), quiet(), Memory()), Rulebook(later), NOW)
    assert (made.rule, made.verdict) == ("max_runtime", Verdict.WAIT)


def test_an_unknown_says_more_than_a_wait() -> None:
    made = decide(View(subject(), (), Memory()), BOOK, NOW)
    assert (made.rule, made.verdict) == ("idle", Verdict.UNKNOWN)


def test_complaints_are_carried_even_when_something_is_due() -> None:
    policy = msgspec.structs.replace(
        POLICY, exemptions=(Exemption(reason="x", owner="ann", rules=("idle",), until=Unknown("no date")),)
    )
    made = decide(ended_view(), Rulebook(policy), NOW)
    assert made.action is Action.REMOVE
    assert "no date" in made.complaints[0]


def test_every_rule_answers_for_every_shape() -> None:
    for shape in Shape:
        given = answers(View(subject(shape=shape)), BOOK, NOW)
        assert [answer.rule for answer in given] == [rule.name for rule in RULES]
        assert all(answer.reason for answer in given)


def test_rules_of_another_shape_report_it() -> None:
    given = {a.rule: a for a in answers(View(subject(shape=Shape.IMAGE)), BOOK, NOW)}
    assert given["idle"].reason == "not for an image"
    assert given["target"].verdict is Verdict.SILENT


def test_a_rule_asked_about_another_shape_is_silent() -> None:
    settings = BOOK.settings(subject())
    for rule in RULES:
        if rule.name in ("orphan", "temporary_tree", "unused_image", "build_cache"):
            assert rule.evaluate(View(subject()), settings, NOW).verdict is Verdict.SILENT


def test_every_rule_says_in_a_sentence_what_it_does() -> None:
    for rule in RULES:
        assert rule.summary.endswith(".")


def test_the_latest_known_hold_ends_by_the_class_limit() -> None:
    """The words tell how long it is still held, which is not what was written."""
    memory = Memory(holds=(Hold("ann", NOW - 23 * HOUR, NOW + 9 * DAY),))
    assert decide(View(subject(), quiet(), memory), BOOK, NOW).reason == "held by ann for 1h more"
    more = Hold("eve", NOW, NOW + 2 * HOUR, "paper", admin=True, suspends=("max_runtime",))
    both = Memory(holds=(*memory.holds, more))
    assert decide(View(subject(), quiet(), both), BOOK, NOW).reason == "held by ann for 1h more"
    alone = decide(View(subject(), quiet(10), Memory(holds=(more,))), BOOK, NOW)
    assert alone.reason == "held by eve for 2h more (suspends max_runtime only): paper"


def test_of_two_rules_that_each_spare_some_only_what_both_spare_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second used to replace the first: a rule that the first had suspended could act."""

    def says(name: str, verdict: Verdict = Verdict.PROTECT, **more: Any) -> tuple[str, Any]:
        return name, lambda view, settings, now: Answer(name, verdict, name, **more)

    rules = (
        says("removing", suspends=EVERY_RULE, spares=frozenset({"hold", "stuck"})),
        says("hold", suspends=EVERY_RULE, spares=frozenset({"stuck", "runtime"})),
        says("runtime", Verdict.DUE, action=Action.STOP),
        says("stuck", Verdict.WAIT),
    )
    monkeypatch.setitem(decide_module._APPLICABLE, (Shape.WORKLOAD, State.RUNNING), rules)
    assert decide(idle_view(), BOOK, NOW).action is Action.KEEP
    monkeypatch.setitem(decide_module._APPLICABLE, (Shape.WORKLOAD, State.RUNNING), rules[1:])
    assert decide(idle_view(), BOOK, NOW).action is Action.STOP


def test_what_ends_again_and_again_is_promised_no_date() -> None:
    for marks in (Marks(), Marks(ttl=HOUR)):
        thing = ended(MINUTE, ends_for_good=True, marks=marks)
        once = decide(View(thing, (), Memory(ends_seen=1)), BOOK, NOW)
        assert once.due is not None
        again = decide(View(thing, (), Memory(ends_seen=2)), BOOK, NOW)
        assert (again.verdict, again.due) == (Verdict.WAIT, None)
        assert again.reason.endswith("Remove it: gpukeeper workload remove docker/node-3/eval")
