"""Holds on trees whose filesystem gets another device number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from gpukeeper.model.decision import Action, Snapshot
from gpukeeper.model.event import Held, Released
from gpukeeper.model.policy import PlaceScope
from gpukeeper.model.subject import Gone, Hold, Ref, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import HOUR, Harness, virtual
from tests.unit.engine.test_requests import ask
from tests.unit.engine.test_trees import NODES, Lab


class Disk(SimulatedPlatform):
    """Its trees have uids that outlast their device number. `names`: by uid."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab.b.world, NODES)
        lab.b.platform = self
        self.lab, self.names = lab, dict[str, str]()

    def add(self, lasting: str) -> Thing:
        thing = self.lab.tree("tmp1", owner="ann")
        self.names[thing.ref.uid] = lasting
        return thing

    def renumber(self, thing: Thing, lasting: str) -> Thing:
        self.lab.b.world.remove(thing)
        return self.add(lasting)

    async def observe(self, scope: PlaceScope) -> AsyncIterator[Snapshot]:
        async for page in super().observe(scope):
            yield msgspec.structs.replace(page, subjects=tuple(map(self._named, page.subjects)))

    async def read(self, ref: Ref) -> Subject | Gone | Unknown:
        found = await super().read(ref)
        return self._named(found) if isinstance(found, Subject) else found

    def _named(self, subject: Subject) -> Subject:
        return msgspec.structs.replace(subject, lasting=self.names.get(subject.ref.uid))


async def _action(b: Harness, thing: Thing) -> Action:
    return (await b.decide())[thing.ref.name].action


@virtual
async def test_a_hold_counts_under_another_number_until_it_is_released(b: Harness) -> None:
    disk = Disk(Lab(b))
    thing = disk.add("fsid-a:1")
    assert (await ask(b, "hold", "tmp1", seconds=7200)).done
    assert len(b.lines(Held)) == 1
    thing = disk.renumber(thing, "fsid-a:1")
    assert await _action(b, thing) is Action.KEEP
    await disk.lab.pass_()
    assert disk.lab.there(thing) == [True]
    await asyncio.sleep(1)
    assert (await ask(b, "release", "tmp1")).words.endswith("is no longer held.")
    assert [one.lasting for one in b.lines(Released)] == ["fsid-a:1"]
    assert await _action(b, thing) is Action.REMOVE


@virtual
async def test_a_hold_of_an_earlier_version_counts_and_can_be_released(b: Harness) -> None:
    disk = Disk(Lab(b))
    thing = disk.add("fsid-a:1")
    hold = Hold("ann", b.now(), b.now() + HOUR)
    await b.keeper.ledger.append([Held(at=b.now(), ref=thing.ref, owner="ann", by="ann", hold=hold)])
    assert await _action(b, thing) is Action.KEEP
    await asyncio.sleep(1)
    assert (await ask(b, "release", "tmp1")).done
    assert await _action(b, thing) is Action.REMOVE


@pytest.mark.parametrize("now", ["", "fsid-b:1"])
def test_a_hold_counts_under_the_same_number_whatever_the_id(now: str) -> None:
    """The filesystem cannot be identified for a while, or an admin gave it another UUID."""

    @virtual
    async def story(b: Harness) -> None:
        disk = Disk(Lab(b))
        thing = disk.add("fsid-a:1")
        assert (await ask(b, "hold", "tmp1", seconds=7200)).done
        disk.names = {thing.ref.uid: now} if now else {}
        assert await _action(b, thing) is Action.KEEP
        await asyncio.sleep(1)
        assert (await ask(b, "release", "tmp1")).done
        assert await _action(b, thing) is Action.REMOVE

    story()
