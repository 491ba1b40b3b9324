"""Live updates: each reader gets the tiles that changed, as far as they may see them; what is equal is made once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from gpukeeper.engine.outlook import NOT_SHOWN, PolicyHead
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.link import Answer, Credentials, Person, SourceSettings
from gpukeeper.interfaces.web.app import Site
from gpukeeper.interfaces.web.application import Feed, Snapshot
from gpukeeper.interfaces.web.pages.fleet import Selection
from gpukeeper.interfaces.web.peers import Peers
from gpukeeper.interfaces.web.source import Source, SourceLost
from gpukeeper.lifecycle.claims import ClaimState
from gpukeeper.model.policy import Mode
from gpukeeper.views.live import GpuState, GpuTile, MachineView, difference

ANN, BOB, NOBODY = Person(name="ann"), Person(name="bob"), Person()
ADMIN = Person(name="root", admin=True)
ALL = Selection()


class FixedSource(Source):
    revocations = 0

    def __init__(self) -> None:
        super().__init__(SourceSettings(key=b"k" * 32, anonymous=True, session_seconds=3600, version="0"))

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        raise SourceLost("nobody is there to ask")

    def show(self, *tiles: GpuTile) -> None:
        view = MachineView(
            machine="m",
            at=datetime(2026, 5, 1, tzinfo=UTC),
            version="1",
            policy=PolicyHead("file", "digest", "preset", Mode.PLAN),
            paused=None,
            places=(),
            gpus=tiles,
            workloads=(),
        )
        self.change(difference(None, view), view)


def tile(number: int, owner: str = "ann", **facts: Any) -> GpuTile:
    known: dict[str, Any] = {
        "id": f"t{number:04d}",
        "key": f"key-{number}",
        "name": f"node/{number}",
        "place": f"node-{number % 3}",
        "device": f"GPU-{number}",
        "how": ClaimState.RUNNING,
        "platform": "docker",
        "state": GpuState.HELD,
        "owner": owner,
        "use": 50.0,
        "reason": f"secret of {owner}",
    }
    return GpuTile(**(known | facts))


class Pages:
    def __init__(self) -> None:
        self.source = FixedSource()
        self.site = Site(cast(Source, self.source), Peers(None))
        self.feed = Feed(self.site)

    def event(self, person: Person, *, before: Snapshot) -> bytes:
        return self.feed._event(before, self.feed._snapshot(ALL), person)


@pytest.fixture
def pages() -> Pages:
    return Pages()


def body(event: bytes) -> Any:
    assert event.startswith(b"event: tiles\ndata: ")
    return msgspec.json.decode(event.removeprefix(b"event: tiles\ndata: "))


def test_each_reader_gets_what_changed_and_no_reason_of_others(pages: Pages) -> None:
    anns, bobs, other = tile(1), tile(2, "bob"), tile(3)
    pages.source.show(anns, bobs, other)
    before = pages.feed._snapshot(ALL)
    pages.source.show(msgspec.structs.replace(anns, use=1.0), msgspec.structs.replace(bobs, use=2.0), other)
    for person, seen in ((ANN, {"ann"}), (BOB, {"bob"}), (NOBODY, set()), (ADMIN, {"ann", "bob"})):
        tiles = body(pages.event(person, before=before))["tiles"]
        assert set(tiles) == {"t0001", "t0002"}
        assert {name for name in ("ann", "bob") if f"secret of {name}" in "".join(tiles.values())} == seen
        assert ("".join(tiles.values()).count(NOT_SHOWN)) == 2 - len(seen)


def test_readers_who_may_see_the_same_get_the_same_bytes(pages: Pages) -> None:
    pages.source.show(tile(1), tile(2, "bob"))
    before = pages.feed._snapshot(ALL)
    pages.source.show(tile(1, use=7.0), tile(2, "bob"))
    assert pages.event(BOB, before=before) is pages.event(NOBODY, before=before)
    assert pages.event(ANN, before=before) is not pages.event(NOBODY, before=before)


def test_without_a_visible_change_nothing_is_sent(pages: Pages) -> None:
    pages.source.show(tile(1))
    before = pages.feed._snapshot(ALL)
    pages.source.show(tile(1))
    assert pages.event(ANN, before=before) == b""


def test_other_tiles_or_another_order_are_fetched_again(pages: Pages) -> None:
    pages.source.show(tile(1))
    before = pages.feed._snapshot(ALL)
    pages.source.show(tile(1), tile(2))
    assert pages.event(ANN, before=before) == b"event: list\ndata: {}\n\n"


def test_of_many_gpus_only_the_summary_is_sent(pages: Pages) -> None:
    many = [tile(number) for number in range(300)]
    pages.source.show(*many)
    before = pages.feed._snapshot(ALL)
    pages.source.show(*(msgspec.structs.replace(one, use=1.0) for one in many))
    assert pages.event(ANN, before=before) == b""  # no count changed
    pages.source.show(tile(0, state=GpuState.FREE), *many[1:])
    found = body(pages.event(ANN, before=before))
    assert found["tiles"] == {}
    assert (found["counts"], "node-0" in found["rows"]) == ({"free": 1, "held": 299}, True)


def test_a_tile_is_rendered_once_for_all_who_may_see_it(pages: Pages) -> None:
    one, readers = tile(1), pages.site.readers
    assert readers.html(readers.tile(one, ANN)) is readers.html(readers.tile(one, ADMIN))
    assert readers.html(readers.tile(one, BOB)) is readers.html(readers.tile(one, NOBODY))
    assert readers.html(readers.tile(one, BOB)) != readers.html(readers.tile(one, ANN))
    assert "1 %" in readers.html(readers.tile(msgspec.structs.replace(one, use=1.0), ANN))


def test_a_view_is_reduced_once_for_each_reader(pages: Pages) -> None:
    pages.source.show(tile(1), tile(2, "bob"))
    view, readers = pages.source.machines["m"], pages.site.readers
    assert readers.view(view, ANN) is readers.view(view, ANN)
    assert [one.reason for one in readers.view(view, ANN).gpus] == ["secret of ann", NOT_SHOWN]
    assert [one.reason for one in readers.view(view, NOBODY).gpus] == [NOT_SHOWN, NOT_SHOWN]
    assert readers.view(view, ADMIN) is view
