"""What people ask for, with whose rights, and what they read when it is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gpukeeper.engine import requests
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.requests import Reply, Request
from gpukeeper.model import reading
from gpukeeper.model.decision import Result
from gpukeeper.model.errors import LeaseHeld
from gpukeeper.model.event import Closed, Held, Intended, Paused, Released
from gpukeeper.model.policy import ClassSettings
from gpukeeper.model.subject import Marks, State
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from gpukeeper.platforms.simulated.world import Faults, SimulatedPlace
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_observe import ReadOnly
from tests.unit.engine.test_verify import intent


async def ask(b: Harness, verb: str, workload: str = "", who: str = "ann", **more: object) -> Reply:
    return await requests.fulfil(b.keeper, b.book, who, Request(verb=verb, workload=workload, **more))  # type: ignore[arg-type]


@virtual
async def test_the_owner_holds_and_releases(b: Harness) -> None:
    thing = b.ended("eval")
    reply = await ask(b, "hold", "eval", seconds=7200, reason="looking at it")
    assert reply == Reply(done=True, words="docker/node-3/eval is held until 2026-03-02 10:00 UTC (2h).")
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is thing
    assert (await ask(b, "release", "node-3/eval")).words == "docker/node-3/eval is no longer held."
    await asyncio.sleep(1)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is None


@virtual
async def test_a_hold_without_a_length_is_as_long_as_the_class_allows(b: Harness) -> None:
    b.ended("eval")
    assert "(1d)" in (await ask(b, "hold", "eval")).words
    assert b.lines(Held)[0].by == "ann"


@virtual
async def test_what_is_not_ones_own_is_refused_with_a_sentence(b: Harness) -> None:
    b.running("eval")
    for verb in ("hold", "release", "stop", "remove"):
        reply = await ask(b, verb, "eval", who="bob")
        assert not reply.done
        assert reply.exit_code == 2
        assert "belongs to ann; bob may not change it" in reply.words
    assert b.lines(Held) == []


@virtual
async def test_a_part_of_something_cannot_be_held_alone(b: Harness) -> None:
    root = b.running("run")
    b.running("run-0", root=root.ref)
    assert "only the root can be held" in (await ask(b, "hold", "run-0")).words


@virtual
async def test_an_ambiguous_name_is_refused_with_all_it_fits(b: Harness) -> None:
    one, other = b.ended("eval"), b.ended("eval")
    reply = await ask(b, "remove", "eval")
    assert reply.words.startswith('"eval" matches 2 objects; use more of the path, or the uid:')
    assert one.ref.uid in reply.words
    assert (await ask(b, "remove", other.ref.uid)).done
    assert b.world.find(one.ref) is one


@virtual
async def test_a_thing_that_is_named_like_another_uid_does_not_stand_before_it(b: Harness) -> None:
    wanted = b.ended("eval")
    shield = b.ended(wanted.ref.uid)
    assert (await ask(b, "remove", wanted.ref.uid)).done
    assert b.world.find(wanted.ref) is None
    assert b.world.find(shield.ref) is shield


@virtual
async def test_a_name_that_fits_nothing_shows_where_to_look(b: Harness) -> None:
    reply = await ask(b, "hold", "nope")
    assert reply.words == 'nothing in the policy\'s scope is named "nope". See: gpukeeper workload list'


@virtual
async def test_a_silent_place_does_not_prevent_a_hold_elsewhere(b: Harness) -> None:
    class Silent(SimulatedPlatform):
        async def observe(self, scope: object):  # type: ignore[no-untyped-def,override]
            from gpukeeper.model.errors import PlatformError

            raise PlatformError("node-4 did not answer")
            yield

    b.ended("eval")
    b.change_ports(platforms=(Silent(b.world, SimulatedPlace("docker", "node-4", (), ())), b.platform))
    assert (await ask(b, "hold", "eval")).done
    assert "Not everything could be read: node-4 did not answer." in (await ask(b, "hold", "nope")).words


@virtual
async def test_what_is_out_of_scope_cannot_be_checked(b: Harness) -> None:
    b.ended("eval")
    b.set_policy(scope={})
    assert "nothing in the policy's scope" in (await ask(b, "remove", "eval")).words


@virtual
async def test_the_owner_stops_busy_work_at_once(b: Harness) -> None:
    thing = b.running("train", 5 * MINUTE)
    reply = await ask(b, "stop", "train")
    assert reply == Reply(
        done=True, words="docker/node-3/train: reclaimed: requested by ann; verified: stopped", exit_code=0
    )
    assert thing.state is State.ENDED
    line = b.lines(Intended)[0]
    assert (line.rule, line.running, line.gpus) == ("request", True, 1)


@virtual
async def test_a_request_that_was_not_fulfilled_is_partly_done(b: Harness) -> None:
    b.running("train")
    b.world.faults = Faults(refused=1)
    reply = await ask(b, "stop", "train")
    assert (reply.done, reply.exit_code) == (False, 3)


@virtual
async def test_infrastructure_is_not_stopped_on_request_either(b: Harness) -> None:
    thing = b.running("exporter", class_="infrastructure")
    b.set_policy(classes={"infrastructure": ClassSettings(untouchable=True)})
    reply = await ask(b, "stop", "exporter", who="root")
    assert "class infrastructure is never touched" in reply.words
    assert thing.state is State.RUNNING


@virtual
async def test_a_request_needs_the_verb_the_lease_and_no_pause(b: Harness) -> None:
    b.running("train")
    async with b.ledger.lease("docker", "node-3"):
        reply = await ask(b, "stop", "train")
    assert (reply.done, reply.exit_code) == (False, LeaseHeld.exit_code)
    assert (await ask(b, "pause", who="root", reason="maintenance")).done
    assert "everything is paused (maintenance, by root since " in (await ask(b, "stop", "train")).words
    assert "maintenance, by root" in (await ask(b, "resume", who="root")).words
    assert (await ask(b, "stop", "train")).done


@virtual
async def test_a_verb_the_platform_does_not_offer_is_refused(b: Harness) -> None:
    b.platform = ReadOnly(b.world, HERE)
    b.running("train")
    assert (await ask(b, "stop", "train")).words == "docker offers no stop; nothing was done"


@virtual
async def test_only_an_admin_pauses_and_resumes(b: Harness) -> None:
    for verb in ("pause", "resume"):
        assert (await ask(b, verb)).words == "only an admin may do that; ann is not one of: root"
    assert await b.ledger.paused() is None


@virtual
async def test_a_second_pause_keeps_the_first_reason_and_shows_whose_it_is(b: Harness) -> None:
    b.policy = msgspec.structs.replace(b.policy, admins=("root", "eve"))
    await ask(b, "pause", who="eve", reason="driver update")
    second = await ask(b, "pause", who="root", reason="moving a rack")
    assert second.done
    assert "Already paused: driver update, by eve since " in second.words
    assert (await b.ledger.paused() or "").startswith("driver update, by eve")
    told = [line.reason for line in b.ledger.lines if isinstance(line, Paused)]
    assert told == ["driver update", "moving a rack"]


@virtual
async def test_a_resume_of_nothing_reports_it_with_2(b: Harness) -> None:
    reply = await ask(b, "resume", who="root")
    assert (reply.done, reply.exit_code, reply.words) == (False, 2, "not paused; nothing was changed")
    assert not b.ledger.lines


@virtual
async def test_an_unknown_verb_is_refused(b: Harness) -> None:
    assert (await ask(b, "explode")).words == 'unknown request "explode"; nothing was done'


def test_a_request_never_names_who_asks() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"verb": "pause", "who": "root"}', type=Request)


@virtual
async def test_open_intents_are_settled_before_a_request(b: Harness) -> None:
    thing = b.running("train")
    await b.ledger.append([intent(b, thing)])
    assert (await ask(b, "stop", "train")).done
    assert [(line.step, line.result) for line in b.lines(Closed)] == [
        ("7.1", Result.STILL_THERE),
        ("8.1", Result.RECLAIMED),
    ]


@virtual
async def test_a_request_about_unknown_limits_needs_no_grace(b: Harness) -> None:
    class Vague(SimulatedPlatform):
        async def observe(self, scope: object):  # type: ignore[no-untyped-def,override]
            async for page in super().observe(scope):  # type: ignore[arg-type]
                lost = Unknown("inspect timed out")
                changed = (msgspec.structs.replace(s, class_=lost, devices=lost) for s in page.subjects)
                yield msgspec.structs.replace(page, subjects=tuple(changed))

    b.platform = Vague(b.world, HERE)
    b.running("train")
    assert (await ask(b, "stop", "train")).done
    assert isinstance(b.lines(Intended)[0].gpus, Unknown)


# What a release says


GARBLED = Unknown("gpukeeper.io/hold-until='tomorrow' is no time such as 2026-12-01T18:00:00Z")


@virtual
async def test_releasing_what_nothing_holds_claims_nothing(b: Harness) -> None:
    b.ended("eval")
    reply = await ask(b, "release", "eval")
    assert (reply.done, reply.exit_code) == (False, 2)
    assert reply.words == "nothing was released: docker/node-3/eval has no hold that ann may end."
    assert b.lines(Released) == []


@virtual
async def test_a_user_cannot_release_a_mark_and_reads_how_it_ends(b: Harness) -> None:
    thing = b.ended("eval")
    thing.marks = Marks(hold_until=GARBLED, unhold="kubectl annotate")
    reply = await ask(b, "release", "eval")
    assert not reply.done
    assert "by its own mark, which cannot be read (gpukeeper.io/hold-until='tomorrow'" in reply.words
    assert "to end it: kubectl annotate, or ask an admin to release it" in reply.words
    await ask(b, "hold", "eval", seconds=3600)
    reply = await ask(b, "release", "eval")
    assert reply.done
    assert reply.words.startswith("docker/node-3/eval: released the hold of ann. Still held: by its own mark")


@virtual
async def test_an_admin_releases_a_mark_that_cannot_be_read(b: Harness) -> None:
    thing = b.ended("eval")
    thing.marks = Marks(hold_until=GARBLED)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is thing
    reply = await ask(b, "release", "eval", who="root")
    assert (reply.done, reply.words) == (True, "docker/node-3/eval is no longer held.")
    await asyncio.sleep(1)
    await reclaim(b.keeper, b.platform, b.book)
    assert b.world.find(thing.ref) is None


@virtual
async def test_a_mark_that_can_be_read_is_not_released_by_a_command(b: Harness) -> None:
    thing = b.ended("eval")
    thing.marks = Marks(hold_until=b.keeper.clock.now() + 2 * HOUR)
    for who in ("ann", "root"):
        reply = await ask(b, "release", "eval", who=who)
        assert not reply.done
        assert "Still held: by its own mark until" in reply.words
    await ask(b, "hold", "eval", who="root", seconds=3600)
    assert "by root until" in (await ask(b, "release", "eval")).words, "an admin's hold is the admin's to end"


@virtual
async def test_a_hold_shows_what_it_does_not_prevent_and_when(b: Harness) -> None:
    b.running("eval", HOUR)
    words = (await ask(b, "hold", "eval", seconds=7200)).words
    assert (
        "The hold does not prevent max_runtime: will be stopped at 2026-03-02 09:00 UTC (in 1h). An admin can suspend"
        in words
    )
    short = (await ask(b, "hold", "eval", seconds=600)).words
    assert "does not prevent" not in short
    assert short.endswith(" It does not suspend the maximum runtime of 2h.")


@virtual
async def test_a_hold_names_the_maximum_runtime_only_where_it_counts(b: Harness) -> None:
    b.running("api", HOUR, class_="api")
    b.ended("eval")
    b.running("train", HOUR, owner="bob")
    for name in ("api", "eval"):
        assert "maximum runtime" not in (await ask(b, "hold", name, seconds=600)).words, name
    named = await ask(b, "hold", "train", who="root", seconds=600, suspends=("max_runtime",))
    assert named.done
    assert "maximum runtime" not in named.words


@pytest.mark.parametrize("seconds", ["1e300", "-1e300", "4e9"])
def test_a_time_that_no_clock_has_is_no_request(seconds: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="seconds"):
        reading.decode(f'{{"verb": "token", "seconds": {seconds}}}', type=Request)
