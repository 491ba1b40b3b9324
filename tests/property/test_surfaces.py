"""What happens next is the same on every surface, for any work under any policy: tile, table, page of the workload,
plan, API, `explain`, `top`, `observe --gpus`, warning, and the reply to a hold."""

from __future__ import annotations

import html
import io
import random
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.engine.live import LiveFact, LivePlace, LiveState, PlaceState
from gpukeeper.engine.outlook import Explanation
from gpukeeper.engine.requests import not_prevented
from gpukeeper.engine.schedule import opening
from gpukeeper.engine.view import FleetSnapshot
from gpukeeper.interfaces.cli.explain import _print
from gpukeeper.interfaces.terminal.show import claim_row, plan_row
from gpukeeper.interfaces.terminal.top_screen import Age, Display, picture
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.forecast import (
    NOT_IDLE_BEFORE,
    NOT_USED,
    REACHED,
    STAYS_IDLE,
    NextStep,
    ahead,
    coming_in_brief,
    coming_in_words,
    next_actions,
)
from gpukeeper.lifecycle.settings import Narrow, Rulebook
from gpukeeper.model.decision import Action, View
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Hold, Shape
from gpukeeper.model.words import due_in_words
from gpukeeper.views.fleet import gpus_view, top_view
from gpukeeper.views.live import Delta, row_id
from gpukeeper.views.live_rows import LiveRows
from tests.effort import examples
from tests.property.strategies import NOW, policy, view
from tests.unit.interfaces.web.sites import Dashboard, dashboard

EVERY = tuple(Action)
HOUR = timedelta(hours=1)
COUNTDOWN = re.compile(r'<time datetime="([^"]+)" data-mode="in">[^<]*</time>')


class Work(msgspec.Struct):
    """Some work under one policy, and what is to be said about each, by key."""

    seed: int
    book: Rulebook
    views: list[View]
    steps: dict[str, tuple[NextStep, ...]]

    def __repr__(self) -> str:
        return f"some_work({self.seed})"

    def words(self, one: View) -> str:
        return coming_in_words(self.steps[one.subject.ref.key], NOW)


def some_work(seed: int) -> Work:
    rng = random.Random(seed)
    book = Rulebook(msgspec.structs.replace(policy(rng), mode=rng.choice([*Mode])))
    views = [one for n in range(12) if (one := _named(rng, view(rng), n)).subject.root is None]
    opens = opening(book.policy.schedule)
    return Work(
        seed, book, views, {one.subject.ref.key: next_actions(one, book, NOW, EVERY, opens).steps for one in views}
    )


def _named(rng: random.Random, one: View, number: int) -> View:
    """With a name of its own; some was in use just now."""
    ref = msgspec.structs.replace(one.subject.ref, name=f"w{number}", uid=f"u{number}")
    subject = msgspec.structs.replace(one.subject, seen=msgspec.structs.replace(one.subject.seen, ref=ref))
    minutes = (90.0,) if rng.random() < 0.3 else ()
    series = tuple(
        msgspec.structs.replace(of, minutes=of.minutes[: -len(minutes) or None] + minutes) if of.minutes else of
        for of in one.series
    )
    return msgspec.structs.replace(one, subject=subject, series=series)


work = st.integers(0, 2**32 - 1).map(some_work)


# In the browser and over the API


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with dashboard(cast(Path, tmp_path_factory.mktemp("site"))) as made:
        yield made


def shows(site: Dashboard, some: Work) -> None:
    live, opens = LiveState(), opening(some.book.policy.schedule)
    for one in some.views:
        ref = one.subject.ref
        state = PlaceState(platform=ref.platform, place=ref.place, at=NOW, seen=0, running=0)
        place = live.places.setdefault((ref.platform, ref.place), LivePlace(state))
        decision = decide(one, some.book, NOW)
        place.facts[ref.key] = LiveFact(one, decision, ahead(one, some.book, NOW, EVERY, opens))
    rows = LiveRows("m")
    for _ in (*rows.update(live, some.book, NOW), *rows.update_gpus(live, NOW, {})):
        pass
    source = site.app.state.site.source
    source.publishes = False
    (known,) = source.machines.values()
    head = msgspec.structs.replace(known, gpus=(), workloads=(), at=NOW)
    made = rows.view(head)
    site.call(lambda: source.change(Delta(head=head), made))


def read(page: str) -> str:
    """As people read it, with the countdowns of a browser whose clock says NOW."""
    page = COUNTDOWN.sub(lambda found: due_in_words(datetime.fromisoformat(found[1]), NOW), page)
    return " ".join(html.unescape(re.sub("<[^>]+>", "", page)).split())


def part(page: str, begin: str, end: str) -> str:
    return read(page[(at := page.index(begin)) : page.index(end, at)])


@examples(0.2)
@given(work)
def test_pages_and_the_api_say_what_is_forecast(site: Dashboard, some: Work) -> None:
    shows(site, some)
    tiles, table, plan = (site.get(path, "root").text for path in ("/", "/workloads", "/plan"))
    answered = {one["key"]: one for one in site.get("/api/v1/workloads", "root").json()["workloads"]}
    devices = {one["key"]: one for one in site.get("/api/v1/gpus", "root").json()["gpus"]}
    for one in some.views:
        key, words = one.subject.ref.key, some.words(one)
        id_ = row_id("m", key)
        assert as_steps(answered[key]) == some.steps[key], "the API"
        if not words:
            continue
        assert words in part(table, f'href="/workload/{id_}"', "</tr>"), "the table"
        assert words in read(site.get(f"/workload/{id_}", "root").text), "the page of the workload"
        assert words in part(plan, f'href="/workload/{id_}"', "</tr>"), "the plan"
        if key in devices:
            assert as_steps(devices[key]) == some.steps[key], "the API"
            assert words in part(tiles, f'href="/workload/{id_}"', "</article>"), "the tile"


def as_steps(row: dict[str, Any]) -> tuple[NextStep, ...]:
    return msgspec.convert(row["steps"], tuple[NextStep, ...])


# On a terminal


@given(work)
def test_commands_say_what_is_forecast(some: Work) -> None:
    offers = {(one.subject.ref.platform, one.subject.ref.place): EVERY for one in some.views}
    found, opens = FleetSnapshot(views=some.views, offers=offers), opening(some.book.policy.schedule)
    claims = gpus_view(found, some.book, Narrow(), NOW).gpus
    top = top_view(found, some.book, Narrow(), NOW)
    pictured = picture(top, Display(), Age(timedelta()), 4000, 1000).plain
    assert {one.key: one.steps for one in top.gpus if one.holder}.items() <= some.steps.items()
    for claim in claims:
        if claim.holder is not None and some.steps[claim.holder.key]:
            steps = some.steps[claim.holder.key]
            assert claim_row(claim, NOW)[-1].startswith(coming_in_words(steps, NOW))
            assert coming_in_brief(steps, NOW) in pictured
    for one in some.views:
        said = Explanation(
            now=NOW,
            subject=one.subject,
            decision=decide(one, some.book, NOW),
            mode=some.book.policy.mode,
            ahead=ahead(one, some.book, NOW, EVERY, opens),
        )
        with redirect_stdout(io.StringIO()) as printed:
            _print(said)
        assert f"What comes next: {words}\n" in printed.getvalue() if (words := some.words(one)) else True


@given(work)
def test_a_plan_and_a_warning_announce_what_is_forecast(some: Work) -> None:
    """A warning that is sent now names the time of the act; a row of the plan is the step that comes first."""
    for one in some.views:
        decision, steps = decide(one, some.book, NOW), some.steps[one.subject.ref.key]
        if decision.action is Action.KEEP:
            assert not steps or steps[0].at is not None
            continue
        assert (steps[0].action, steps[0].at, steps[0].rule) == (decision.action, None, decision.rule)
        assert plan_row(decision, verbose=False)[0] == steps[0].action
        if decision.action is Action.WARN and decision.then is not Action.KEEP and len(steps) > 1:
            act = next(step for step in steps if step.action != Action.WARN)
            if act.rule == decision.rule:
                assert max(decision.announced or NOW, NOW) == (act.at or NOW)
                assert due_in_words(act.at or NOW, NOW) in decision.reason
        if decision.announced is not None:
            verb = "would be" if some.book.policy.mode is Mode.PLAN else "will be"
            assert f"; {verb} " in decision.reason


@given(work, st.integers(1, 48))
def test_the_reply_to_a_hold_names_what_comes_in_spite_of_it(some: Work, hours: int) -> None:
    opens = opening(some.book.policy.schedule)
    for one in some.views:
        granted = Hold("ann", NOW, NOW + hours * HOUR)
        memory = msgspec.structs.replace(one.memory, holds=(*one.memory.holds, granted))
        held = next_actions(msgspec.structs.replace(one, memory=memory), some.book, NOW, EVERY, opens).steps
        acts = [step for step in held if step.action != Action.WARN and (step.at is None or step.at < granted.until)]
        place = SimpleNamespace(view=one, platform=SimpleNamespace(guards=EVERY))
        words = not_prevented(some.book, cast(Any, place), granted)
        if not acts:
            assert "The hold does not prevent" not in words
        else:
            assert f"The hold does not prevent {acts[0].rule}: " in words
            assert due_in_words(acts[0].at or NOW, NOW) in words
            assert ("would be" in words) == (some.book.policy.mode is Mode.PLAN)


def test_what_is_compared_is_of_every_kind() -> None:
    """So that the properties above are not about work to which nothing happens."""
    found = [one for seed in range(120) for one in some_work(seed).steps.values()]
    for kind in (Action.WARN, Action.STOP, Action.TRIM, Action.REMOVE):
        assert any(step.action == kind for steps in found for step in steps), kind
    assert any(not steps for steps in found)
    assert {step.would for steps in found for step in steps} == {True, False}
    given = {step.provided for steps in found for step in steps}
    assert given == {
        "",
        NOT_IDLE_BEFORE,
        *(f"{one}{reached}" for one in (STAYS_IDLE, NOT_USED) for reached in ("", f" and {REACHED}")),
    }
    assert any(step.at is None for steps in found for step in steps)
    assert any(one.subject.shape is Shape.WORKLOAD for one in some_work(1).views)
