"""Who is let in and whose turn it is."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gpukeeper.interfaces.daemon.server import RateLimits, RequestLimiter

ADMIN, ANN, BOB, EVE = 0, 1001, 1002, 1003
SMALL = RateLimits(connections=4, each=3, reserved=2, at_work=2, admins_at_work=1)


def test_one_user_cannot_take_all_connections_and_nobody_takes_those_of_admins() -> None:
    limiter = RequestLimiter(SMALL)
    for uid in (ANN, ANN, ANN):
        assert limiter.why_not(uid) is None
        limiter.enter(uid)
    assert limiter.why_not(ANN) == "too many concurrent requests of uid 1001"
    limiter.enter(BOB)
    assert limiter.why_not(EVE) == "too many concurrent requests"
    for _ in range(2):
        assert limiter.why_not(ADMIN) is None
        limiter.enter(ADMIN)
    assert limiter.why_not(ADMIN) == "too many concurrent requests of admins"
    limiter.leave(ANN)
    assert limiter.why_not(EVE) is None


def test_where_few_descriptors_are_allowed_most_stay_for_passes() -> None:
    assert RateLimits().within(1024) == RateLimits()
    few = RateLimits().within(64)
    assert few.connections + few.reserved <= 16
    assert min(few.connections, few.each, few.reserved) >= 1


async def _started(limiter: RequestLimiter, uid: int, order: list[int], go_on: asyncio.Event) -> None:
    async with limiter.turn(uid):
        order.append(uid)
        await go_on.wait()


def test_users_take_turns_and_have_one_request_at_work() -> None:
    async def story() -> None:
        limiter, order, go_on = RequestLimiter(SMALL), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(_started(limiter, uid, order, go_on)) for uid in (ANN, ANN, ANN, BOB, EVE, ADMIN)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [ANN, BOB, ADMIN]
        go_on.set()
        await asyncio.gather(*tasks)
        assert order.index(EVE) < len(order) - 1, "the last of ann's comes after eve's only"
        assert (limiter.working, limiter.waiting) == ({}, {})

    asyncio.run(story())


def test_who_goes_away_while_waiting_keeps_no_place() -> None:
    async def story() -> None:
        limiter, order, go_on = RequestLimiter(SMALL), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(_started(limiter, ANN, order, go_on)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks[:2]:
            task.cancel()
        for task in tasks[:2]:
            with suppress(asyncio.CancelledError):
                await task
        go_on.set()
        await tasks[2]
        assert order == [ANN, ANN]
        assert (limiter.working, limiter.waiting) == ({}, {})

    asyncio.run(story())


def test_after_a_burst_requests_of_one_user_come_slowly_and_those_of_others_do_not() -> None:
    limiter = RequestLimiter(RateLimits(burst=3, pause=2.0))
    assert [limiter.wait(ANN, 100.0) for _ in range(5)] == [0.0, 0.0, 0.0, 2.0, 4.0]
    assert limiter.wait(BOB, 100.0) == 0.0
    assert [limiter.wait(ADMIN, 100.0) for _ in range(9)] == [0.0] * 9
    assert limiter.wait(ANN, 200.0) == 0.0
    assert set(limiter.asked) == {ANN}, "who has been quiet is forgotten"
