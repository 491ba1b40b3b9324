"""What a daemon tells of its passes: bounded, as of the last pass, and of others' work no more than `observe` shows."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.engine import outlook
from gpukeeper.engine.outlook import without_reason
from gpukeeper.engine.reclaim import reclaim
from gpukeeper.model.decision import Action, Announcement, Decision
from gpukeeper.model.policy import Match
from gpukeeper.model.subject import Category, Ref, Seen, Shape, State
from tests.unit.engine.harness import HOUR, MINUTE, Harness, virtual
from tests.unit.lifecycle.examples import NOW


async def told(b: Harness, who: str) -> dict[str, Decision]:
    found = await outlook.outlooks(b.keeper, b.book, who, "policy.yaml")
    return {one.seen.ref.name: one for place in found.places for one in place.decisions}


@virtual
async def test_own_work_comes_first_and_with_its_reason(b: Harness) -> None:
    b.keeper.request_state.enabled = True
    b.set_policy(match=(Match(class_="api", name="mine"),))
    b.running("theirs", owner="bob")
    b.running("mine")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    for who, reasons in (
        ("ann", (True, False)),
        ("bob", (False, True)),
        ("root", (True, True)),
        ("eve", (False, False)),
    ):
        found = await told(b, who)
        given = tuple(found[name].reason != outlook.NOT_SHOWN for name in ("mine", "theirs"))
        assert given == reasons, who
    assert list(await told(b, "ann")) == ["mine", "theirs"]
    assert {name: one.class_ for name, one in (await told(b, "ann")).items()} == {"mine": "api", "theirs": "docker"}


@virtual
async def test_a_narrow_pass_changes_what_it_read_and_forgets_what_is_gone(b: Harness) -> None:
    b.keeper.request_state.enabled = True
    first, second = b.running("first"), b.running("second")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    b.world.remove(first)
    await reclaim(b.keeper, b.platform, b.book, act=False, only=[first.ref])
    assert list(await told(b, "ann")) == ["second"]
    second.state, second.ended = State.ENDED, b.now() - 2 * HOUR
    await reclaim(b.keeper, b.platform, b.book, only=[second.ref])
    assert await told(b, "ann") == {}, "it was removed"


@virtual
async def test_no_more_is_kept_than_a_bound_and_of_trees_what_is_due(b: Harness) -> None:
    b.keeper.request_state.enabled = True
    for number in range(4):
        b.running(f"r{number}", 10 * MINUTE)
        b.add(f"/tmp/tmp{number}", kind="tree", shape=Shape.TREE, category=Category.TEMPORARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlook, "MOST", 3)
        await reclaim(b.keeper, b.platform, b.book, act=False)
    found = await outlook.outlooks(b.keeper, b.book, "ann", "policy.yaml")
    (place,) = found.places
    assert (len(place.decisions), place.left_out) == (3, 1)
    assert all(one.action is Action.KEEP for one in place.decisions)


@virtual
async def test_nothing_is_kept_where_nobody_can_ask(b: Harness) -> None:
    b.running("mine")
    await reclaim(b.keeper, b.platform, b.book, act=False)
    assert b.keeper.request_state.outlooks == {}


@virtual
async def test_where_gpus_are_scarce_is_reported(b: Harness) -> None:
    b.keeper.pressure.set_scarce(("docker", "node-3"))
    b.keeper.uptime.watched_from = 7.0
    assert outlook.daemon_state(b.keeper) == outlook.DaemonState((("docker", "node-3"),), 7.0)


def test_others_are_told_no_word_of_a_reason_in_any_field() -> None:
    """A warning carries its sentence twice: also as it would be said if nobody could be told."""
    secret = "idle for 2h; GPU of the secret project"
    seen = Seen(Ref("docker", "node-3", "container", "eval", "u1"), "run-1", "v1", NOW)
    planned = Decision(seen=seen, action=Action.WARN, rule="idle", reason=secret, unheard=Announcement(NOW, secret))
    shown = without_reason(planned, outlook.NOT_SHOWN)
    assert secret.encode() not in msgspec.json.encode(shown)
