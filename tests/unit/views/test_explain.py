"""What `explain` shows, as values."""

from __future__ import annotations

from typing import Any

from gpukeeper.engine.outlook import Explanation
from gpukeeper.lifecycle.claims import Contradiction
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Hold, Memory, Shape
from gpukeeper.model.unknown import Unknown
from gpukeeper.views.explain import LABEL_MAX, LABELS_MAX, explain_view, facts, verdicts
from tests.unit.lifecycle.examples import BOOK, EVAL, HOUR, NOW, idle_view, subject


def explained(view: View, **more: Any) -> Explanation:
    decision = decide(view, BOOK, NOW)
    known = {"answers": answers(view, BOOK, NOW), "memory": view.memory, "subject": view.subject}
    return Explanation(now=NOW, decision=decision, **(known | more))


def test_facts_that_do_not_exist_are_left_out_and_unknown_ones_stay_unknown() -> None:
    unknown = Unknown("the driver is silent")
    found = dict(facts(explained(View(subject(owner=None, devices=unknown, size=unknown)))))
    assert found["owner"] == "unknown"
    assert (found["GPUs"], found["size"]) == (unknown, unknown)
    assert "ended" not in found


def test_many_and_long_labels_are_cut_with_how_many_are_left_out() -> None:
    labels = {f"key-{n:02d}": "x" * 500 for n in range(LABELS_MAX + 3)}
    shown = [value for name, value in facts(explained(View(subject(labels=labels)))) if name == "label"]
    assert len(shown) == LABELS_MAX + 1
    assert len(str(shown[0])) == LABEL_MAX + 1
    assert shown[-1] == "and 3 more (to see all: --json)"


def test_a_hold_that_is_over_is_no_fact() -> None:
    holds = (Hold("ann", NOW, NOW + HOUR), Hold("bob", NOW, NOW - HOUR))
    found = [
        value for name, value in facts(explained(View(subject(), memory=Memory(holds=holds)))) if name == "held by"
    ]
    assert found == ["ann, until 2026-03-10 13:00 UTC (in 1h)"]


def test_a_suspended_rule_names_what_suspends_it() -> None:
    held = Answer("hold", Verdict.PROTECT, "held", suspends=frozenset({"idle"}))
    due = Answer("idle", Verdict.DUE, "idle", Action.STOP)
    other = Answer("max_runtime", Verdict.DUE, "ran too long", Action.STOP)
    assert [word for word, _ in verdicts((held, due, other))] == ["protect", "suspended by hold", "stop"]
    everything = Answer("exemption", Verdict.PROTECT, "exempt", suspends=frozenset({"*"}), spares=frozenset({"idle"}))
    assert [word for word, _ in verdicts((everything, due, other))] == ["protect", "stop", "suspended by exemption"]


def test_the_document_gives_the_reason_a_diagnosis_is_missing() -> None:
    unknown = Unknown("the cluster did not answer")
    finding = Contradiction(kind="orphan", about=(EVAL,), words="it outlived its workload")
    view = explain_view(explained(idle_view(), undiagnosed=unknown, findings=(finding,)))
    assert view.diagnosis == unknown
    assert [(one.kind, one.words) for one in view.findings] == [("orphan", "it outlived its workload")]


def test_every_name_of_an_image_is_shown() -> None:
    image = subject(shape=Shape.IMAGE, labels={"names": "lab/train:7 lab/train:latest"})
    assert dict(facts(explained(View(image))))["names"] == "lab/train:7, lab/train:latest"
