"""Keep-alive leases, demand by weight and images: what a look at a place makes of them over time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta

from gpukeeper.engine import requests
from gpukeeper.engine.observe import survey
from gpukeeper.engine.reclaim import look_and_plan, reclaim
from gpukeeper.engine.requests import Request
from gpukeeper.model.decision import Action, Verdict
from gpukeeper.model.event import Held, Noticed, Vanished, WarningSent
from gpukeeper.model.policy import BuildCache, Capture, ClassSettings, Images
from gpukeeper.model.subject import KEEP_ALIVE, Marks, Outcome, Ref, Shape, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import Thing
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual

ASKS = Marks(keep_alive=True)


async def measure(b: Harness, *things: Thing, span: timedelta) -> None:
    """As the daemon does once a minute."""
    for _ in range(span // MINUTE):
        found = await survey(b.keeper, b.platform, b.book)
        await b.signals.add(await b.meter.read(found.live))
        await asyncio.sleep(60)


def keep_long(b: Harness) -> None:
    """No maximum runtime in the way of a lease of a day."""
    b.set_policy(classes={"docker": ClassSettings(idle=30 * MINUTE)})


@virtual
async def test_a_lease_begins_when_it_would_be_warned_and_is_written_once(b: Harness) -> None:
    """C8.5: the file was there all the time; our clock begins when it matters."""
    keep_long(b)
    thing = b.running("train", marks=ASKS, busy_until=b.now() + 20 * MINUTE)
    await measure(b, thing, span=20 * MINUTE)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.lines(Held) == []
    await measure(b, thing, span=40 * MINUTE)
    for _ in range(2):
        report = await reclaim(b.keeper, b.platform, b.book)
        assert report.warnings == []
    (line,) = b.lines(Held)
    assert (line.by, line.owner, line.hold.devices) == (KEEP_ALIVE, "ann", ("GPU-0",))
    assert line.hold.until == line.at + DAY


@virtual
async def test_a_plan_shows_the_lease_and_writes_nothing(b: Harness) -> None:
    thing = b.ended("eval", marks=ASKS)
    made = (await look_and_plan(b.keeper, b.platform, b.book)).survey.decisions
    assert [(one.rule, one.verdict) for one in made] == [("keep_alive", Verdict.PROTECT)]
    assert b.ledger.lines == []
    assert b.world.find(thing.ref) is thing


@virtual
async def test_after_the_lease_it_is_removed_however_often_the_file_is_touched(b: Harness) -> None:
    """C8.5: a repeated touch held for ever."""
    thing = b.ended("eval", marks=ASKS)
    for _ in range(25):
        await reclaim(b.keeper, b.platform, b.book)
        thing.touch()
        assert b.world.find(thing.ref) is thing or b.now() - b.lines(Held)[0].at >= DAY
        await asyncio.sleep(HOUR.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is None
    assert [line.stage for line in b.lines(WarningSent) if line.rule == "keep_alive"] == [1]


@virtual
async def test_a_new_container_on_the_same_gpu_gets_no_new_lease(b: Harness) -> None:
    first = b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book)
    await asyncio.sleep(DAY.total_seconds())
    b.world.remove(first)
    again, other = b.ended("eval", marks=ASKS), b.ended("other", marks=ASKS, devices=("GPU-1",))
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(again.ref) is None
    assert b.world.find(other.ref) is other
    assert [line.ref for line in b.lines(Held)] == [first.ref, other.ref]


@virtual
async def test_a_keep_alive_file_of_nobody_begins_nothing(b: Harness) -> None:
    thing = b.ended("eval", marks=ASKS, owner=None)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is None
    assert b.lines(Held) == []


@virtual
async def test_a_hold_by_command_obeys_the_same_caps(b: Harness) -> None:
    b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book)
    await asyncio.sleep(20 * 3600)
    b.ended("again")
    reply = await requests.fulfil(b.keeper, b.book, "ann", Request(verb="hold", workload="again"))
    assert "(4h)" in reply.words
    await asyncio.sleep(4 * 3600)
    reply = await requests.fulfil(b.keeper, b.book, "ann", Request(verb="hold", workload="again"))
    assert "GPU GPU-0, counted over all workloads of its owner, was held for 1d of the last 3d" in reply.words


@virtual
async def test_a_released_hold_elsewhere_counts_only_as_long_as_it_lasted(b: Harness) -> None:
    b.ended("eval")
    b.ended("other")
    await requests.hold(b.keeper, b.book, "ann", Request(verb="hold", workload="eval"))
    await asyncio.sleep(HOUR.total_seconds())
    await requests.release(b.keeper, b.book, "eval", "ann")
    await asyncio.sleep(HOUR.total_seconds())
    _, granted = await requests.hold(b.keeper, b.book, "ann", Request(verb="hold", workload="other"))
    assert granted.until - granted.at == 23 * HOUR


@virtual
async def test_its_owner_may_end_what_a_keep_alive_file_holds(b: Harness) -> None:
    thing = b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book)
    request = Request(verb="remove", workload="eval")
    assert (await requests.fulfil(b.keeper, b.book, "ann", request)).done
    assert b.world.find(thing.ref) is None


@virtual
async def test_a_file_is_no_obstacle_to_an_admin_and_a_persons_hold_is(b: Harness) -> None:
    """Whoever can write one file must not be able to block an emergency stop."""
    b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book)
    b.ended("other")
    await requests.hold(b.keeper, b.book, "ann", Request(verb="hold", workload="other"))
    assert (await requests.fulfil(b.keeper, b.book, "root", Request(verb="remove", workload="eval"))).done
    reply = await requests.fulfil(b.keeper, b.book, "root", Request(verb="remove", workload="other"))
    assert "is held by ann" in reply.words


@virtual
async def test_a_lease_that_was_released_does_not_begin_again(b: Harness) -> None:
    thing = b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book)
    await requests.release(b.keeper, b.book, "eval", "ann")
    await asyncio.sleep(1)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is None


@virtual
async def test_no_lease_begins_by_a_clock_that_is_in_doubt(b: Harness) -> None:
    b.ended("eval", marks=ASKS)
    await reclaim(b.keeper, b.platform, b.book, act=False)
    b.ended("other", marks=ASKS, devices=("GPU-1",))
    b.clock.skew = 9 * DAY
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.plan.breaker is not None
    assert [line.ref.name for line in b.lines(Held) if line.ref] == ["eval"]


@virtual
async def test_work_without_an_idle_time_is_measured_when_it_holds_a_whole_gpu(b: Harness) -> None:
    """C8.4"""
    b.running("dev", class_="api")
    found = await survey(b.keeper, b.platform, b.book)
    assert [one.ref.name for one in found.live] == ["dev"]
    await measure(b, span=40 * MINUTE)
    made = (await b.decide())["dev"]
    assert (made.action, made.verdict) == (Action.KEEP, Verdict.REPORT)
    assert made.reason.startswith("holds 1 whole GPU, idle for at least 40m")


class Weights:
    def __init__(self, shares: Mapping[str, float] | Unknown) -> None:
        self.given = shares

    async def shares(self) -> Mapping[str, float] | Unknown:
        return self.given


async def is_high(b: Harness) -> bool:
    for _ in range(2):
        await survey(b.keeper, b.platform, b.book)
        await asyncio.sleep(301)
    return b.keeper.pressure.gpus_are_scarce(("docker", "node-3"))


@virtual
async def test_demand_is_weighed_not_counted(b: Harness) -> None:
    """C8.6: two small slices of seven and nothing else is no demand, one whole GPU of one and two sevenths is."""
    b.change_ports(gpus=Weights({"GPU-0": 1.0, "MIG-1": 1 / 7, "MIG-2": 1 / 7}))
    thing = b.running("train", devices=("MIG-1", "MIG-2"))
    assert not await is_high(b)
    thing.devices = ("GPU-0", "MIG-1")
    assert await is_high(b)


@virtual
async def test_a_paused_workload_still_counts_for_demand(b: Harness) -> None:
    b.change_ports(gpus=Weights({"GPU-0": 1.0}))
    b.running("train", state=State.PAUSED)
    assert await is_high(b)


@virtual
async def test_infrastructure_that_has_all_gpus_makes_none_scarce(b: Harness) -> None:
    """An exporter with `--gpus all` runs for ever and blocks no other use: `report` counts its GPUs as free."""
    b.set_policy(classes={**b.policy.classes, "infrastructure": ClassSettings(untouchable=True)})
    b.change_ports(gpus=Weights({"GPU-0": 1.0, "GPU-1": 1.0}))
    b.running("dcgm-exporter", class_="infrastructure", devices=("GPU-0", "GPU-1"))
    assert not await is_high(b)
    b.running("train", devices=("GPU-0", "GPU-1"))
    assert await is_high(b), "what people run beside it counts"


@virtual
async def test_unknown_weights_leave_demand_as_it_is(b: Harness) -> None:
    weights = Weights({"GPU-0": 1.0})
    b.change_ports(gpus=weights)
    thing = b.running("train")
    assert await is_high(b)
    weights.given = Unknown("the driver did not answer")
    thing.end(b.now(), Outcome.SUCCEEDED)
    assert await is_high(b)


@virtual
async def test_a_place_with_gpus_of_its_own_is_counted_by_them(b: Harness) -> None:
    b.change_ports(gpus=Weights({"GPU-of-this-machine": 1.0}))
    b.device(0)
    b.running("train")
    assert await is_high(b)


@virtual
async def test_a_gpu_itself_claims_nothing(b: Harness) -> None:
    """The device that is shown names itself; that is no demand."""
    b.add("GPU-0", kind="gpu", shape=Shape.DEVICE, state=State.RUNNING, devices=("GPU-0",))
    assert not await is_high(b)


def image(b: Harness, name: str, **facts: object) -> Thing:
    known = {"kind": "image", "shape": Shape.IMAGE, "state": State.ENDED, "owner": None, "age": 400 * DAY}
    return b.add(name, **(known | facts))


@virtual
async def test_an_image_goes_a_day_after_it_was_first_seen_unused(b: Harness) -> None:
    """C6.4: by when nothing referred to it any more, never by when it was built."""
    b.set_policy(images=Images(unused=DAY, keep=("base/*",)))
    used = image(b, "lab/train:7", state=State.RUNNING)
    unused, kept = image(b, "lab/eval:1"), image(b, "base/cuda:12")
    await reclaim(b.keeper, b.platform, b.book)
    await asyncio.sleep(DAY.total_seconds() - 60)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(unused.ref) is unused
    used.state = State.ENDED
    await asyncio.sleep(60)
    await reclaim(b.keeper, b.platform, b.book)
    assert [b.world.find(one.ref) for one in (unused, used, kept)] == [None, used, kept]
    await asyncio.sleep(DAY.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert [b.world.find(one.ref) for one in (used, kept)] == [None, kept]


@virtual
async def test_an_image_that_restorable_work_needs_is_held_as_long_as_the_evidence_is_kept(b: Harness) -> None:
    """Also after the lines of the removal are archived: it is remembered with the image."""
    b.set_policy(images=Images(unused=DAY), capture=Capture(keep=5 * DAY))
    needed, other = image(b, "lab/train:7", state=State.RUNNING), image(b, "lab/eval:1")
    for number in range(3):
        b.ended(f"job-{number}", image=needed.ref)
    await reclaim(b.keeper, b.platform, b.book)
    needed.state = State.ENDED
    for _ in range(4):
        await reclaim(b.keeper, b.platform, b.book)
        await asyncio.sleep(DAY.total_seconds())
    assert [b.world.find(one.ref) for one in (needed, other)] == [needed, None]
    memory = (await b.ledger.memories([needed.ref.key]))[needed.ref.key]
    assert [(one.by, one.suspends, one.reason) for one in memory.holds] == [
        ("a restore", ("unused_image",), "needed to restore docker/node-3/job-2")
    ]
    assert (await requests.fulfil(b.keeper, b.book, "ann", Request(verb="restore", workload="job-0"))).done
    await asyncio.sleep(2 * DAY.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(needed.ref) is None


@virtual
async def test_volumes_and_networks_that_restorable_work_needs_are_held(b: Harness) -> None:
    b.set_policy(capture=Capture(keep=5 * DAY))
    needed = (Ref("docker", "node-3", "volume", "v", "volume v"), Ref("docker", "node-3", "network", "n", "n"))
    b.ended("job", attached=needed)
    await reclaim(b.keeper, b.platform, b.book)
    memories = await b.ledger.memories([one.key for one in needed])
    for one in needed:
        (hold,) = memories[one.key].holds
        assert (hold.by, hold.suspends) == ("a restore", ("unused_volume", "unused_network"))


@virtual
async def test_an_admin_ends_the_hold_of_an_image_that_a_restore_would_need(b: Harness) -> None:
    b.set_policy(images=Images(unused=HOUR))
    needed = image(b, "lab/train:7")
    b.ended("job", image=needed.ref)
    await reclaim(b.keeper, b.platform, b.book)
    await asyncio.sleep(2 * HOUR.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(needed.ref) is needed
    reply = await requests.fulfil(b.keeper, b.book, "root", Request(verb="release", workload="lab/train:7"))
    assert reply.words == "docker/node-3/lab/train:7 is no longer held."
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(needed.ref) is None


@virtual
async def test_an_image_is_not_held_for_what_cannot_be_restored(b: Harness) -> None:
    b.set_policy(images=Images(unused=DAY), capture=Capture(what=("logs",)))
    needed = image(b, "lab/train:7")
    b.ended("job", image=needed.ref)
    await reclaim(b.keeper, b.platform, b.book)
    await asyncio.sleep(DAY.total_seconds())
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(needed.ref) is None


@virtual
async def test_build_cache_goes_by_its_last_use_and_leaves_no_lines_when_seen(b: Harness) -> None:
    b.set_policy(build_cache=BuildCache(unused=DAY))
    facts = {"kind": "cache", "shape": Shape.CACHE, "state": State.ENDED}
    old, young = (b.add(n, last_used=b.now() - ago, **facts) for n, ago in (("old", 2 * DAY), ("young", HOUR)))
    await reclaim(b.keeper, b.platform, b.book)
    assert [b.world.find(one.ref) for one in (old, young)] == [None, young]
    assert b.lines(Noticed) == []


@virtual
async def test_images_that_vanish_do_not_open_the_breaker_and_are_noted_as_gone(b: Harness) -> None:
    """Somebody cleaned up by hand: that says nothing of whether the world is whole."""
    many = [image(b, f"lab/old:{n}") for n in range(9)]
    b.running("train")
    await reclaim(b.keeper, b.platform, b.book)
    for one in many:
        b.world.remove(one)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert (report.plan.breaker, report.survey.counts.before, report.survey.counts.seen) == (None, 1, 1)
    assert len(b.lines(Vanished)) == 9


@virtual
async def test_many_images_do_not_hide_workloads_that_vanished(b: Harness) -> None:
    for n in range(40):
        image(b, f"lab/old:{n}")
    work = [b.running(f"job-{n}", devices=()) for n in range(4)]
    await reclaim(b.keeper, b.platform, b.book)
    for one in work[:3]:
        b.world.remove(one)
    report = await reclaim(b.keeper, b.platform, b.book)
    assert report.plan.breaker is not None
    assert report.plan.breaker.startswith("3 of 4 objects of the last pass are missing")
