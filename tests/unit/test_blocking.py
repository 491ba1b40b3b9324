"""Work that does not come back is left behind, and not without end."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from gpukeeper import blocking
from gpukeeper.blocking import in_thread
from tests.patience import PATIENT

AT_ONCE = timedelta(milliseconds=10)


def test_with_too_many_left_behind_only_that_work_is_not_begun_until_they_come_back() -> None:
    hangs, begun = threading.Event(), list[int]()

    def work() -> int:
        begun.append(1)
        hangs.wait()
        return 7

    async def main() -> None:
        try:
            for _ in range(blocking.LEFT_BEHIND_MAX + 5):
                with pytest.raises(TimeoutError):
                    await in_thread(work, AT_ONCE)
            left = set(blocking._left_behind[work.__code__, ""])
            assert len(left) == blocking.LEFT_BEHIND_MAX
            assert await in_thread(lambda: 8, PATIENT) == 8
            with pytest.raises(TimeoutError):
                await in_thread(work, AT_ONCE, purpose="another")
            left |= blocking._left_behind[work.__code__, "another"]
        finally:
            hangs.set()
        for thread in left:
            thread.join()
        assert len(begun) == blocking.LEFT_BEHIND_MAX + 1, "only the same purpose is blocked"
        assert await in_thread(work, PATIENT) == 7

    asyncio.run(main())


def test_work_whose_caller_gives_up_earlier_is_counted_too() -> None:
    hangs, begun = threading.Event(), list[int]()

    def work() -> None:
        begun.append(1)
        hangs.wait()

    async def main() -> None:
        try:
            for _ in range(blocking.LEFT_BEHIND_MAX + 5):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(AT_ONCE.total_seconds()):
                        await in_thread(work, PATIENT)
            left = set(blocking._left_behind[work.__code__, ""])
        finally:
            hangs.set()
        for thread in left:
            thread.join()
        assert len(begun) == len(left) == blocking.LEFT_BEHIND_MAX

    asyncio.run(main())
