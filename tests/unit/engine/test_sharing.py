"""One look for many who ask: never an older one than the question, and no more of them than needed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from gpukeeper.engine.ports import Shared, SharedQuestion
from tests.patience import PATIENCE


class Gate:
    """A look that ends when it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.running = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)

    def read(self) -> int:
        self.begun += 1
        number = self.begun
        self.running.release()
        assert self.let_go.acquire(timeout=PATIENCE)
        return number


def test_who_asks_while_a_read_runs_gets_the_next_one_and_shares_it() -> None:
    gate = Gate()
    shared = Shared(gate.read)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(shared)
        assert gate.running.acquire(timeout=PATIENCE)  # it has begun: what is asked from now on may have changed since
        leader = threads.submit(shared)
        others = [threads.submit(shared) for _ in range(10)]
        gate.let_go.release()
        assert first.result(PATIENCE) == 1
        assert gate.running.acquire(timeout=PATIENCE)
        gate.let_go.release(12)  # more than enough, should a late one need a look of its own
        wait([leader, *others], PATIENCE)
    assert min(one.result() for one in (leader, *others)) == 2
    assert gate.begun < 12, "nobody shared"


def test_looks_with_other_arguments_are_other_looks() -> None:
    shared = Shared(lambda *about: about)
    assert shared("/tmp") == ("/tmp",)
    assert shared() == ()


def test_what_goes_wrong_goes_wrong_for_all_who_wait_and_the_next_read_is_a_new_one() -> None:
    answers = [OSError("first"), None]

    def read() -> str:
        problem = answers.pop(0)
        if problem is not None:
            raise problem
        return "fine"

    shared = Shared(read)
    with pytest.raises(OSError, match="first"):
        shared()
    assert shared() == "fine"


def test_questions_are_shared_as_looks_are() -> None:
    async def story() -> None:
        begun = 0
        running, let_go = asyncio.Event(), asyncio.Event()

        async def ask() -> int:
            nonlocal begun
            begun += 1
            number = begun
            running.set()
            await let_go.wait()
            return number

        shared = SharedQuestion(ask)
        first = asyncio.create_task(shared())
        await running.wait()
        later = [asyncio.create_task(shared()) for _ in range(10)]
        await asyncio.sleep(0)
        later.pop().cancel()  # who stops waiting takes it from nobody else
        let_go.set()
        assert await first == 1
        assert await asyncio.gather(*later) == [2] * 9
        assert await shared() == 3

    asyncio.run(story())


def test_a_question_works_in_one_loop_after_another() -> None:
    async def ask() -> str:
        return "here"

    shared = SharedQuestion(ask)
    assert [asyncio.run(shared()) for _ in range(2)] == ["here", "here"]
