"""What a person may ask for: with a verified owner, by uid, of trees at most what they could do themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from gpukeeper.engine import requests
from gpukeeper.engine.reclaim import look_and_plan, reclaim
from gpukeeper.engine.requests import Reply, Request
from gpukeeper.engine.view import PAUSE
from gpukeeper.model.decision import Result
from gpukeeper.model.event import Closed, Held, Intended
from gpukeeper.model.policy import Mode
from gpukeeper.model.subject import Marks, State, Subject
from gpukeeper.platforms.simulated.adapter import SimulatedPlatform
from tests.unit.engine.harness import HERE, HOUR, MINUTE, Harness, virtual
from tests.unit.engine.test_trees import NODES, Lab

ANN, BOB = 1001, 1002


class Told(SimulatedPlatform):
    """Its subjects with facts that a test sets; counts how often everything is listed."""

    facts: dict[str, Any]
    lists = 0

    async def observe(self, scope: object):  # type: ignore[no-untyped-def,override]
        type(self).lists += 1
        async for page in super().observe(scope):  # type: ignore[arg-type]
            subjects = tuple(msgspec.structs.replace(one, **self.facts) for one in page.subjects)
            yield msgspec.structs.replace(page, subjects=subjects)

    async def read(self, ref: Any) -> Any:
        found = await super().read(ref)
        return msgspec.structs.replace(found, **self.facts) if isinstance(found, Subject) else found


def told(b: Harness, place: Any = HERE, **facts: Any) -> type[Told]:
    kind = type("ToldHere", (Told,), {"facts": facts, "lists": 0})
    b.platform = kind(b.world, place)
    return kind


async def ask(b: Harness, verb: str, workload: str, who: str = "ann", uid: int | None = ANN, **more: Any) -> Reply:
    return await requests.fulfil(b.keeper, b.book, who, Request(verb=verb, workload=workload, **more), uid=uid)


# An owner who is only claimed


async def taken_off(b: Harness, *, verified: bool) -> list[str]:
    """What a release takes off the thing itself, with the daemon's right to change every object."""
    names: list[str] = []

    async def hold(self: object, subject: Subject, until: object) -> None:
        names.append(subject.ref.name)

    marks = Marks(hold_until=b.now() + 2 * HOUR, unhold="kubectl annotate")
    told(b, owner_verified=verified, marks=marks).hold = hold  # type: ignore[method-assign, assignment]
    b.ended("train")
    await ask(b, "release", "train")
    return names


@virtual
async def test_who_is_only_claimed_takes_no_hold_off_the_thing_itself(b: Harness) -> None:
    assert await taken_off(b, verified=False) == []


@virtual
async def test_a_verified_owner_takes_a_hold_off_the_thing_itself(b: Harness) -> None:
    assert await taken_off(b, verified=True) == ["train"]


@virtual
async def test_who_is_only_claimed_to_be_the_owner_holds_and_does_not_stop_or_remove(b: Harness) -> None:
    told(b, owner_verified=False, evidence=("label ds01.user names ann",))
    thing = b.running("train")
    for verb in ("stop", "remove"):
        reply = await ask(b, verb, "train")
        assert (reply.done, reply.exit_code) == (False, 2)
        assert "is only claimed (label ds01.user names ann)" in reply.words
        assert reply.words.endswith("Ask an admin: root")
    assert (await ask(b, "hold", "train", seconds=60)).done
    assert (await ask(b, "release", "train")).words == "docker/node-3/train is no longer held."
    assert (thing.state, b.lines(Intended)) == (State.RUNNING, [])
    assert (await ask(b, "stop", "train", "root", 0)).done


@virtual
async def test_a_claim_ends_only_ones_own_holds(b: Harness) -> None:
    told(b, owner_verified=False, owner="ann")
    b.ended("eval")
    await ask(b, "hold", "eval", seconds=600)
    (line,) = b.lines(Held)
    theirs = msgspec.structs.replace(line.hold, by="bob", until=line.hold.until + HOUR)
    await b.ledger.append([msgspec.structs.replace(line, by="bob", hold=theirs)])
    reply = await ask(b, "release", "eval")
    assert "released the hold of ann. Still held: by bob" in reply.words
    (memory,) = (await b.ledger.memories([line.ref.key])).values()  # type: ignore[union-attr]
    assert [hold.by for hold in memory.holds if hold.until > b.now()] == ["bob"]


@virtual
async def test_a_claim_is_not_enough_to_restore_what_a_pass_removed(b: Harness) -> None:
    told(b, owner_verified=False)
    b.ended("eval")
    await reclaim(b.keeper, b.platform, b.book)
    (line,) = b.lines(Closed)
    assert (line.result, line.owner, line.owner_verified) == (Result.RECLAIMED, "ann", False)
    refused = await ask(b, "restore", "eval")
    assert not refused.done
    assert "only claimed, or not recorded as verified; nothing was restored. Ask an admin: root" in refused.words
    assert (await ask(b, "restore", "eval", "root", 0)).done


def test_a_line_of_an_older_version_counts_as_not_verified() -> None:
    old = {"type": "outcome", "at": "2026-03-02T08:00:00Z", "step": "1.1", "action": "stop", "rule": "idle"}
    line = msgspec.convert({**old, "result": "reclaimed", "reason": ""}, type=Closed)
    assert not line.owner_verified


# Trees


@virtual
async def test_a_tree_goes_when_everything_in_it_is_the_askers(b: Harness) -> None:
    lab = Lab(b)
    told(b, NODES, uids=frozenset({ANN}))
    tree = lab.tree("tmp1", owner="ann", gib=1)  # far below the policy's threshold, which a person may skip
    assert (await ask(b, "remove", "tmp1")).done
    assert lab.there(tree) == [False]


@virtual
async def test_a_tree_with_others_files_or_nobody_knows_whose_is_refused(b: Harness) -> None:
    lab = Lab(b)
    kind = told(b, NODES)
    tree = lab.tree("tmp1", owner="ann")
    for uids, uid, words in (
        (frozenset({ANN, BOB}), ANN, "entries of uid 1002"),
        (frozenset({BOB}), ANN, "entries of uid 1002"),
        (frozenset[int](), ANN, "not everything"),
        (None, ANN, "could not be determined"),
        (frozenset({ANN}), None, "could not be determined"),
        (frozenset({ANN}), BOB, "entries of uid 1001"),  # a second uid with ann's name
    ):
        kind.facts = {"uids": uids}
        reply = await ask(b, "remove", "tmp1", uid=uid)
        assert (reply.done, words in reply.words) == (False, True), reply
    assert lab.there(tree) == [True]
    assert b.lines(Intended) == []
    assert (await ask(b, "remove", "tmp1", "root", 0)).done


@virtual
async def test_ages_use_and_names_of_the_policy_bind_a_person_too(b: Harness) -> None:
    lab = Lab(b)
    told(b, NODES, uids=frozenset({ANN}))
    lab.tree("tmp-young", unused=MINUTE, owner="ann")
    lab.tree("tmp-used", owner="ann", in_use=True)
    lab.tree("other", owner="ann")
    for name, words in (("tmp-young", "allowed 1h"), ("tmp-used", "in use"), ("other", "no root and pattern")):
        reply = await ask(b, "remove", name)
        assert (reply.done, words in reply.words) == (False, True), reply
    assert b.lines(Intended) == []


@virtual
async def test_what_grows_others_files_after_the_read_is_left_to_the_platform_with_the_uid(b: Harness) -> None:
    """The step carries whose rights bound it; an admin's carries none."""
    lab = Lab(b)
    kind = told(b, NODES, uids=frozenset({ANN}))
    steps = []

    async def act(self: Any, step: Any, fresh: Any) -> Any:
        steps.append(step.uid)
        return await SimulatedPlatform.act(self, step, fresh)

    kind.act = act  # type: ignore[method-assign]
    lab.tree("tmp1", owner="ann"), lab.tree("tmp2", owner="ann")
    assert (await ask(b, "remove", "tmp1")).done
    assert (await ask(b, "remove", "tmp2", "root", 0)).done
    assert steps == [ANN, None]


# Confirmations


@virtual
async def test_a_token_is_for_what_was_shown_and_for_who_asked(b: Harness) -> None:
    b.set_policy(mode=Mode.PLAN)
    thing = b.running("train")
    shown = await ask(b, "stop", "train")
    assert shown.token
    assert not (await ask(b, "stop", "train", "bob", BOB, token=shown.token)).done
    assert not (await ask(b, "stop", "train", "ann", BOB, token=shown.token)).done
    assert not (await ask(b, "remove", "train", token=shown.token)).done
    assert thing.state is State.RUNNING
    thing.end(b.now(), None)  # type: ignore[arg-type]
    thing.start(b.now(), HOUR)
    reply = await ask(b, "stop", "train", token=shown.token)
    assert "has changed since the confirmation was requested; nothing was done" in reply.words
    assert not (await ask(b, "stop", "train", token=shown.token)).done
    assert (thing.state, b.lines(Intended)) == (State.RUNNING, [])


@virtual
async def test_in_mode_enforce_a_confirmation_is_requested_if_wanted(b: Harness) -> None:
    thing = b.running("train")
    shown = await ask(b, "stop", "train", confirm=True)
    assert (shown.done, thing.state) == (False, State.RUNNING)
    assert shown.words == f"stop docker/node-3/train ({thing.ref.uid}; owner ann, running, 1 GPU)"
    assert (await ask(b, "stop", "train", token=shown.token)).done


@virtual
async def test_what_one_may_not_do_is_refused_before_any_question(b: Harness) -> None:
    b.set_policy(mode=Mode.PLAN)
    b.running("train")
    reply = await ask(b, "stop", "train", "bob", BOB)
    assert (reply.done, reply.token) == (False, "")
    assert "belongs to ann" in reply.words


@virtual
async def test_a_reason_of_any_length_is_not_written_down(b: Harness) -> None:
    b.ended("eval")
    assert not (await ask(b, "hold", "eval", seconds=60, reason="x" * 1001)).done
    assert b.lines(Held) == []


# A daemon does not list the world for each question


@virtual
async def test_a_name_of_the_last_pass_costs_one_read(b: Harness) -> None:
    kind = told(b)
    b.ended("eval", ago=MINUTE)
    train = b.running("train")
    b.keeper.request_state.enabled = True
    await look_and_plan(b.keeper, b.platform, b.book)
    lists = kind.lists
    for _ in range(20):
        assert (await ask(b, "hold", "eval", seconds=1)).done
    assert (await ask(b, "stop", train.ref.uid)).done
    assert kind.lists == lists


@virtual
async def test_many_unknown_names_are_searched_together_and_with_pauses(b: Harness) -> None:
    kind = told(b)
    b.ended("eval", ago=MINUTE)
    b.keeper.request_state.enabled = True
    begun = b.loop.time()
    replies = await asyncio.gather(*(ask(b, "hold", f"nope-{number}") for number in range(50)))
    assert all("nothing in the policy's scope is named" in one.words for one in replies)
    assert kind.lists == 1
    b.running("new")
    await asyncio.sleep(10)
    assert (await ask(b, "hold", "new", seconds=1)).done
    assert kind.lists == 2
    assert b.loop.time() - begun >= PAUSE


@virtual
async def test_what_is_to_be_acted_on_by_name_is_listed_again(b: Harness) -> None:
    """A second one of that name may have come since the last pass."""
    told(b)
    b.running("train")
    b.keeper.request_state.enabled = True
    await look_and_plan(b.keeper, b.platform, b.book)
    b.running("train", devices=("GPU-1",))
    await asyncio.sleep(60)
    assert "matches 2 objects" in (await ask(b, "stop", "train")).words


@virtual
async def test_a_pass_that_was_turned_away_comes_before_the_next_request(b: Harness) -> None:
    """An admin does not wait."""
    b.running("train"), b.running("eval")
    b.keeper.request_state.turned_away.add(("docker", "node-3"))
    assert (await ask(b, "stop", "eval", "root", 0)).done
    waiting = asyncio.create_task(ask(b, "stop", "train"))
    await asyncio.sleep(10)
    assert not waiting.done()
    b.keeper.request_state.turned_away.clear()
    assert (await waiting).done
    b.keeper.request_state.turned_away.add(("docker", "node-3"))
    assert "comes first; nothing was done" in (await ask(b, "remove", "train")).words


@virtual
async def test_a_release_without_a_hold_writes_nothing(b: Harness) -> None:
    b.ended("eval")
    reply = await ask(b, "release", "eval")
    assert (reply.done, b.ledger.lines) == (False, [])
    assert "nothing was released" in reply.words
