"""What happens next is said in the same words on every surface, with its condition and by the policy's mode."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from gpukeeper.engine.live import LiveFact
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import FleetSnapshot
from gpukeeper.interfaces.terminal.show import claim_row
from gpukeeper.interfaces.terminal.top_screen import Age, Display, picture
from gpukeeper.interfaces.web.app import coming
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.forecast import (
    NOT_USED,
    STAYS_IDLE,
    NextActions,
    NextStep,
    ahead,
    coming_in_brief,
    coming_in_words,
    next_actions,
)
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.policy import Mode, OnLimit
from gpukeeper.views.fleet import gpus_view, top_view
from gpukeeper.views.live import WorkloadLine
from gpukeeper.views.live_rows import workload_line
from tests.unit.lifecycle.examples import HOUR, MINUTE, NOW, POLICY, idle_view, quiet, subject

EVERY = tuple(Action)
PLAN = Rulebook(msgspec.structs.replace(POLICY, mode=Mode.PLAN))
ENFORCE = Rulebook(POLICY)
CONDITIONS = {"idle": f"if {STAYS_IDLE}, ", "busy": f"if {NOT_USED}, ", "due": f"if {STAYS_IDLE}, ", "certain": ""}


def busy_view() -> View:
    series = tuple(msgspec.structs.replace(one, minutes=(*one.minutes[:-1], 100.0)) for one in quiet()[:1])
    return View(subject(), (*series, *quiet()[1:]))


def line_of(view: View, book: Rulebook) -> WorkloadLine:
    steps = ahead(view, book, NOW, EVERY, opening(book.policy.schedule))
    return workload_line(LiveFact(view, decide(view, book, NOW), steps), "m", NOW)


def view_of(name: str) -> View:
    certain = View(subject(class_="api"))
    return {"idle": View(subject(), quiet(10)), "busy": busy_view(), "due": idle_view(), "certain": certain}[name]


def next_of(view: View, book: Rulebook) -> NextActions:
    return next_actions(view, book, NOW, EVERY, opening(book.policy.schedule))


@pytest.mark.parametrize("book", [PLAN, ENFORCE], ids=["plan", "enforce"])
@pytest.mark.parametrize("name", ["idle", "busy", "due", "certain"])
def test_every_surface_says_the_same(name: str, book: Rulebook) -> None:
    view = view_of(name)
    words = coming_in_words(next_of(view, book).steps, NOW)
    assert words
    place = FleetSnapshot(views=[view], offers={("docker", "node-3"): EVERY})
    (claim,) = gpus_view(place, book, Narrow(), NOW).gpus
    assert claim_row(claim, NOW)[-1].startswith(words)
    top = top_view(place, book, Narrow(), NOW)
    assert coming_in_brief(line_of(view, book).steps, NOW) in picture(top, Display(), Age(timedelta()), 400, 24).plain
    line = line_of(view, book)
    assert line.steps == top.gpus[0].steps, "the tile, the workload page and the tables"
    assert coming_in_words(line.steps, NOW) == words


@pytest.mark.parametrize("name", ["idle", "busy", "due", "certain"])
def test_a_row_names_each_time_once(name: str) -> None:
    """After "will be warned at 12:06 UTC" came "; first warned at 24m", after "then stopped at" the same time again."""
    place = FleetSnapshot(views=[view_of(name)], offers={("docker", "node-3"): EVERY})
    (claim,) = gpus_view(place, ENFORCE, Narrow(), NOW).gpus
    said, _, why = claim.next.partition("): ")
    assert why.startswith(("idle for ", "ran for ", "GPU GPU-0 was in use"))
    row = picture(top_view(place, ENFORCE, Narrow(), NOW), Display(), Age(timedelta()), 400, 24).plain
    for words in (why, row):
        assert "warned at" not in words
        assert " UTC" not in words.replace("12:00:00 UTC", "")
    assert said.endswith("(max_runtime" if name == "certain" else "(idle")


@pytest.mark.parametrize(
    ("name", "condition"), [("idle", STAYS_IDLE), ("busy", NOT_USED), ("due", STAYS_IDLE), ("certain", "")]
)
def test_what_use_prevents_has_a_condition_and_what_is_certain_has_none(name: str, condition: str) -> None:
    steps = next_of(view_of(name), ENFORCE).steps
    assert {one.provided for one in steps} == {condition}


def test_mode_plan_says_would_and_never_will() -> None:
    for name in ("idle", "busy", "due", "certain"):
        view = view_of(name)
        for one in ahead(view, PLAN, NOW, EVERY, opening(POLICY.schedule)):
            assert one.would
            assert "will be" not in f"{one.reason} {one.currently}"
        for book, verb in ((PLAN, "would be "), (ENFORCE, "will be ")):
            words = coming_in_words(next_of(view, book).steps, NOW)
            assert words.removeprefix(CONDITIONS[name]).startswith(verb)


def test_work_in_use_is_never_said_to_be_idle() -> None:
    words = coming_in_words(next_of(busy_view(), ENFORCE).steps, NOW)
    assert "idle" not in words
    assert words.startswith("if it is not used from now on, will be warned at ")
    place = FleetSnapshot(views=[busy_view()], offers={("docker", "node-3"): EVERY})
    (claim,) = gpus_view(place, ENFORCE, Narrow(), NOW).gpus
    assert claim.next.endswith("(idle): GPU GPU-0 was in use just now")


def test_a_sentence_names_each_condition_once() -> None:
    warn = NextStep("warn", NOW + HOUR, "idle", STAYS_IDLE)
    stop = NextStep("stop", NOW + 90 * MINUTE, "idle", STAYS_IDLE)
    assert coming_in_brief((warn, stop), NOW) == "if it stays idle, will be warned in 1h, then stopped in 1h30m"
    certain = NextStep("stop", None, "max_runtime")
    assert coming_in_words((warn, stop), NOW) == (
        "if it stays idle, will be warned at 2026-03-10 13:00 UTC (in 1h), "
        "then stopped at 2026-03-10 13:30 UTC (in 1h30m)"
    )
    assert coming_in_brief((warn, certain), NOW) == (
        "if it stays idle, will be warned in 1h, then in any case stopped at the next pass"
    )
    assert coming_in_brief((msgspec.structs.replace(warn, provided=""), stop), NOW) == (
        "will be warned in 1h, then if it stays idle, stopped in 1h30m"
    )
    assert coming_in_words((), NOW) == ""


def test_a_page_has_the_same_words_with_times_that_count_down() -> None:
    steps = (NextStep("warn", None, "idle", "<idle>", True), NextStep("stop", NOW + HOUR, "idle", "<idle>", True))
    assert str(coming(steps)) == (
        "if &lt;idle&gt;, <b>would be warned</b> at the next pass, then <b>stopped</b> "
        '<time datetime="2026-03-10T13:00:00Z" data-mode="in">2026-03-10 13:00 UTC</time>'
    )


def test_a_tile_has_the_reason_that_counts_now_and_not_the_one_of_the_future() -> None:
    """It ran for 3h; in 21 hours it will have run for a day."""
    assert next_of(view_of("certain"), ENFORCE).reason.startswith("ran for 3h, allowed 1d")


def test_what_is_only_checked_again_has_its_reason_on_every_surface() -> None:
    """Lines ended with "(max_runtime):", or repeated "kept:" after that."""
    limits = msgspec.structs.replace(POLICY.classes["api"], on_max_runtime=OnLimit.REPORT)
    book = Rulebook(msgspec.structs.replace(POLICY, classes={**POLICY.classes, "api": limits}))
    view = view_of("certain")
    place = FleetSnapshot(views=[view], offers={("docker", "node-3"): EVERY})
    (claim,) = gpus_view(place, book, Narrow(), NOW).gpus
    (line,) = top_view(place, book, Narrow(), NOW).gpus
    assert "will be checked again at" in claim.next
    assert claim.next.endswith("(max_runtime): ran for 3h, allowed 1d; its class only reports long runtimes")
    assert line.reason == "ran for 3h, allowed 1d; its class only reports long runtimes"
