"""What a request changed is shown at once, and a pass that began before it does not show it as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.engine.live import PlaceState
from gpukeeper.engine.ports import Platform
from gpukeeper.engine.requests import Request, fulfil
from gpukeeper.engine.view import read_subject, refresh
from gpukeeper.lifecycle.decide import decide
from tests.unit.interfaces.web.sites import Dashboard, dashboard


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def holders(site: Dashboard) -> list[str]:
    facts = [fact for place in site.session.keeper.live.places.values() for fact in place.facts.values()]
    return [hold.by for fact in facts for hold in fact.view.memory.holds]


def place_at(platform: Platform, at: datetime) -> PlaceState:
    return PlaceState(platform=platform.name, place=platform.place, at=at, seen=0, running=0)


def test_a_pass_that_read_it_before_the_request_does_not_undo_what_is_shown(site: Dashboard) -> None:
    keeper, book = site.session.keeper, site.session.book
    platform = keeper.platforms[0]

    async def do() -> None:
        begun = keeper.clock.now()
        (ref,) = keeper.live.named("train")
        before = await read_subject(keeper, book, ref)
        assert before is not None
        keeper.live.begin(platform, whole=True)
        assert (await fulfil(keeper, book, "ann", Request(verb="hold", workload="train"), uid=1000)).done
        await refresh(keeper, book, "train")
        assert holders(site) == ["ann"]
        keeper.live.note(platform, before.view, decide(before.view, book, begun), begun, None)
        keeper.live.finish(place_at(platform, begun), [])
        assert holders(site) == ["ann"]
        later = keeper.clock.now() + timedelta(seconds=1)
        keeper.live.begin(platform, whole=True)
        keeper.live.note(platform, before.view, decide(before.view, book, later), later, None)
        keeper.live.finish(place_at(platform, later), [])
        assert holders(site) == [], "the next pass shows what it read"

    site.call(do)


def test_what_was_removed_is_not_shown_any_more(site: Dashboard) -> None:
    keeper, book = site.session.keeper, site.session.book

    async def do() -> None:
        assert keeper.live.named("eval")
        assert (await fulfil(keeper, book, "root", Request(verb="remove", workload="eval"), uid=0)).done
        await refresh(keeper, book, "eval")
        assert not keeper.live.named("eval")

    site.call(do)


def test_a_failure_to_read_it_again_leaves_the_reply_of_the_request_as_it_is(site: Dashboard) -> None:
    keeper, book = site.session.keeper, site.session.book

    class BrokenLedger:
        def __getattr__(self, name: str) -> object:
            raise OSError(name)

    async def do() -> None:
        before = holders(site)
        await refresh(dataclasses.replace(keeper, ledger=BrokenLedger()), book, "train")  # type: ignore[arg-type]
        assert holders(site) == before

    site.call(do)
