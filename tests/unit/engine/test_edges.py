"""Edges that a small slip would move: each is one line of the engine or the core."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.verify import as_found
from gpukeeper.engine.view import notice
from gpukeeper.lifecycle.budget import BudgetFacts, open_breaker
from gpukeeper.lifecycle.decide import decide
from gpukeeper.model.decision import Action, Decision, Result, View
from gpukeeper.model.policy import Breaker, Policy
from gpukeeper.model.subject import EMPTY, Memory, Ref, Seen, State, Subject, Warned
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.simulated.world import BEGIN
from tests.unit.engine.harness import DAY, HOUR, MINUTE, Harness, virtual

SEEN = Seen(Ref("docker", "node-3", "container", "eval", "u1"), "run-1", "1", BEGIN)


def test_an_end_of_unknown_kind_is_not_noticed_as_nobodys_stop() -> None:
    ended = Subject(seen=SEEN, state=State.ENDED, created=BEGIN, ended=BEGIN, outcome=Unknown("not said"))
    assert notice(ended, EMPTY, BEGIN) is None
    assert notice(msgspec.structs.replace(ended, outcome=None), EMPTY, BEGIN) is not None


def test_what_waits_to_start_has_not_stopped() -> None:
    created = Subject(seen=SEEN, state=State.CREATED, created=BEGIN)
    assert as_found(Action.STOP, "run-1", created)[0] is Result.STILL_THERE


@pytest.mark.parametrize(("running", "due", "opens"), [(9, 1, False), (9, 2, True), (10, 2, False), (14, 3, True)])
def test_a_share_of_the_running_work_is_rounded_down(running: int, due: int, opens: bool) -> None:
    acting = [Decision(seen=SEEN, action=Action.STOP, rule="idle", reason="idle", running=True)] * due
    fleet = BudgetFacts(seen=running, running=running, before=0, vanished=0, acts_last_hour=0)
    assert (open_breaker(acting, Policy(breaker=Breaker(running=0.2)), fleet) is not None) is opens


@virtual
async def test_a_warning_from_the_future_does_not_count(b: Harness) -> None:
    """It was written while the clock was wrong, and would put the stop off until then."""
    thing = b.running("train", 3 * DAY)
    found = await b.platform.read(thing.ref)
    assert isinstance(found, Subject)
    limit = b.book.policy.classes[thing.class_].max_runtime
    assert limit is not None
    ahead = Warned("max_runtime", 2, b.now() + HOUR, True, thing.incarnation, limit)
    decision = decide(View(found, (), Memory(warnings=(ahead,))), b.book, b.now())
    assert (decision.action, decision.stage) == (Action.WARN, 1)


@virtual
async def test_nobody_is_warned_by_a_wrong_clock(b: Harness) -> None:
    thing = b.running("train", 3 * DAY)
    thing.busy_until = b.now() + DAY
    tell = b.terminal.told
    b.keeper.clock_watch.doubt(b.clock.now())
    b.world.clock.skew = 30 * MINUTE
    await reclaim(b.keeper, b.platform, b.book)
    assert tell == []
